"""Native MTP heads: what the families that ship them inside a target's checkpoint have in common.

Ours, whatever the source calls them (D hidden, V vocabulary; DeepSeek-V3, arXiv 2412.19437, section 2.2):
    norm_embedding.weight [D], norm_hidden.weight [D]   norms of the two inputs
    fc.weight [D, 2D]                                   columns: the embedding's, then the hidden's
    layers.0.*                                          a decoder layer, by mlx-lm's names (blocks.py)
    norm.weight [D]                                     before the LM head, and before its own next step
    embed_tokens.weight, lm_head.weight [V, D]          only where they differ from the target's
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlx.core as mx

from mlx_spec.convert.families.conventions import Conventions, config_of
from mlx_spec.convert.families.family import Config, Converted
from mlx_spec.convert.families.fit import check_fit, own_config, size, text_config
from mlx_spec.convert.families.table import Source, Taken, all_but, finished
from mlx_spec.errors import BadCheckpoint

TRUNK = "part of the target, not of its head"
COPIES = {  # ours -> what the target calls its own, the first that it has
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "lm_head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}
SPELLINGS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)
CONVENTIONS = Conventions(hidden="post_norm", chain="post_norm", fc_order=("embedding", "hidden"))
quantizable = all_but("fc.weight", "mlp.gate.weight", "shared_expert_gate.weight")


def head_sizes(text: Config, title: str, target: Config) -> dict[str, int]:
    """The axes that every head has. Raises Mismatch where the target's differ."""
    hidden, vocab = size(text, "hidden_size", title), size(text, "vocab_size", title)
    check_fit(title, {"hidden_size": hidden, "vocab_size": vocab}, target)
    return {"hidden": hidden, "2hidden": 2 * hidden, "vocab": vocab}


def layers_at(names: Iterable[str], prefix: str) -> int:
    """How many decoder layers follow `prefix` in `names`."""
    indices = {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
    return len([index for index in indices if index.isdigit()])


def refuse_stripped(title: str, text: Config, key: str, prefix: str, origin: str) -> None:
    """Always raises BadCheckpoint: why there are no tensors below `prefix`, and where to get them."""
    count = text.get(key)
    if isinstance(count, int) and count > 0:
        raise BadCheckpoint(
            f"config.json of {title} promises {count} MTP layer{'s' if count > 1 else ''} ({key}), but the "
            f"checkpoint has no {prefix}*: the head was stripped; take the original repository ({origin})"
        )
    raise BadCheckpoint(f"{title} has no MTP head: neither tensors {prefix}* nor {key} in its config.json")


def refuse_more(title: str, count: int) -> None:
    """One head of one layer is known. Raises BadCheckpoint for more."""
    if count > 1:
        raise BadCheckpoint(f"{title} has {count} MTP layers: this version converts heads of one layer")


def without_copies(taken: Taken, source: Source) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The tensors that differ from the target's own, and the source names of the rest with the reason.

    Reads both of a pair. Where the target's table is not in the checkpoint, the head keeps its own.
    """
    tensors, dropped = dict(taken.tensors), {}
    for ours, candidates in COPIES.items():
        theirs = next((name for name in candidates if name in source.tensors), None)
        if ours not in tensors or theirs is None:
            continue
        if bool(mx.array_equal(tensors[ours], source.tensors[theirs]).item()):
            dropped[taken.origins[ours]] = f"a copy of the target's {source.names[theirs]}"
            del tensors[ours]
    return tensors, dropped


def converted(
    model_type: str,
    taken: Taken,
    source: Source,
    prefix: str,
    *,
    config: Config,
    target: Config,
) -> Converted:
    """A head in our form; tensors of `source` not below `prefix` are the target's."""
    tensors, dropped = without_copies(taken, source)
    trunk = {old: TRUNK for new, old in source.names.items() if not new.startswith(prefix)}
    own = sorted(tensors.keys() & COPIES.keys())
    notes = (f"own {', '.join(own)}",) if own else ()
    layer = own_config(config)
    written = config_of(
        model_type,
        CONVENTIONS,
        target,
        layer_type=layer.get("model_type", text_config(target).get("model_type")),
        text_config=layer,
    )
    used = taken.used - dropped.keys()
    kept: Mapping[str, str] = {**trunk, **dropped}
    return finished(source, Converted(written, tensors, used, kept, quantizable, notes))
