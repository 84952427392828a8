"""Native MTP heads, which Qwen, DeepSeek and GLM ship inside a target's checkpoint.

Ours, whatever the source calls them (D hidden, V vocabulary; DeepSeek-V3, arXiv 2412.19437, section 2.2):
    norm_embedding.weight [D], norm_hidden.weight [D]   norms of the two inputs
    fc.weight [D, 2D]                                   columns: the embedding's, then the hidden's
    layers.0.*                                          a decoder layer, by mlx-lm's names (layers.py)
    norm.weight [D]                                     before the LM head, and before its own next step
    embed_tokens.weight, lm_head.weight [V, D]          only where they differ from the target's

Qwen3-Next, Qwen3.5 and Qwen3.6 keep the head under `mtp.`, a full-attention layer with an output gate.
Folders without that prefix or with stacked experts are read, too. DeepSeek-V3 and GLM-4.5 keep it as the
decoder layer after the last of L, `model.layers.{L}.*`, with copies of the target's tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.checkpoint import text_config
from mlx_spec.hub.files import shortened

from . import layers, table
from .table import Config, Converted, Family, PublishedTensors, Row, Taken, Tensors

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
CONVENTIONS = Conventions(hidden="post_norm", chain="post_norm")
quantizable = table.all_but("fc.weight", "mlp.gate.weight", "shared_expert_gate.weight")

QWEN_TITLE, QWEN_KEY = "the Qwen MTP head", "mtp_num_hidden_layers"
QWEN_MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_6")
QWEN_SIDECAR = (
    ("fc.", "mtp.fc."),
    ("layers.", "mtp.layers."),
    ("norm.", "mtp.norm."),
    ("pre_fc", "mtp.pre_fc"),
)
QWEN_HEAD = (
    Row("mtp.fc.weight", "fc.weight", "hidden 2hidden"),
    Row("mtp.pre_fc_norm_embedding.weight", "norm_embedding.weight", "hidden"),
    Row("mtp.pre_fc_norm_hidden.weight", "norm_hidden.weight", "hidden"),
    Row("mtp.norm.weight", "norm.weight", "hidden"),
    Row("mtp.embed_tokens.weight", "embed_tokens.weight", "vocab hidden", optional=True),
    Row("mtp.lm_head.weight", "lm_head.weight", "vocab hidden", optional=True),
)
QWEN_MOE = (
    table.same("mlp.gate.weight", "experts hidden"),
    *layers.dense("shared", "mlp.shared_expert."),
    table.same("mlp.shared_expert_gate.weight", "one hidden"),
)
# Converters add the 1 by lists of names, which have all norms of such a group or none.
QWEN_NORMS = {
    "layer": tuple(f"layers.0.{row.ours}" for row in (*layers.NORMS, *layers.QK_NORMS)),
    "head": ("norm_embedding.weight", "norm_hidden.weight", "norm.weight"),
}
# Median norm weights from which on the 1 of (1 + w) is in them, once and twice: trained weights stay close to
# their start, which is 0, 1 or 2.
FOLDED, TWICE = 0.5, 1.5

NEXTN_KEY = "num_nextn_predict_layers"
NEXTN_HEAD = (
    Row("enorm.weight", "norm_embedding.weight", "hidden"),
    Row("hnorm.weight", "norm_hidden.weight", "hidden"),
    Row("eh_proj.weight", "fc.weight", "hidden 2hidden"),
    Row("shared_head.norm.weight", "norm.weight", "hidden"),
    Row("shared_head.head.weight", "lm_head.weight", "vocab hidden", optional=True),
    Row("embed_tokens.weight", "embed_tokens.weight", "vocab hidden", optional=True),
)
NEXTN_MOE = (
    table.same("mlp.gate.weight", "experts hidden"),
    table.same("mlp.gate.e_score_correction_bias", "experts"),
    *layers.dense("shared", "mlp.shared_experts."),
)


# --- both


def _head_sizes(text: Config, title: str, target: Config) -> dict[str, int]:
    """Return the axes that every head has. Raises Mismatch if the target's differ."""
    hidden, vocab = table.size(text, "hidden_size", title), table.size(text, "vocab_size", title)
    table.check_fit(title, {"hidden_size": hidden, "vocab_size": vocab}, target)
    return {"hidden": hidden, "2hidden": 2 * hidden, "vocab": vocab}


def _stripped(title: str, text: Config, key: str, prefix: str, origin: str) -> BadCheckpoint:
    """Return the error for a checkpoint without tensors below `prefix`."""
    count = text.get(key)
    if isinstance(count, int) and count > 0:
        return BadCheckpoint(
            f"config.json of {title} promises {count} MTP layer{'s' if count > 1 else ''} ({key}), but the "
            f"checkpoint has no {prefix}*: the head was stripped; take the original repository ({origin})"
        )
    return BadCheckpoint(f"{title} has no MTP head: neither tensors {prefix}* nor {key} in its config.json")


def _check_depth(title: str, names: Iterable[str], prefix: str) -> None:
    """Raise BadCheckpoint for heads of more than one layer below `prefix`."""
    indices = {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
    count = len([index for index in indices if index.isdigit()])
    if count > 1:
        raise BadCheckpoint(f"{title} has {count} MTP layers: this version converts heads of one layer")


def _without_copies(taken: Taken, source: PublishedTensors) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return the tensors that the target lacks, and why the others are dropped.

    Reads both of a pair. If the target's table is not in the checkpoint, the head keeps its own.
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


def _converted(
    model_type: str, taken: Taken, source: PublishedTensors, prefix: str, *, config: Config, target: Config
) -> Converted:
    """Return a head in our form. Tensors of `source` not below `prefix` are the target's."""
    tensors, dropped = _without_copies(taken, source)
    trunk = {old: TRUNK for new, old in source.names.items() if not new.startswith(prefix)}
    own = sorted(tensors.keys() & COPIES.keys())
    notes = (f"own {', '.join(own)}",) if own else ()
    layer = table.own_config(config)
    written = table.config_of(
        model_type,
        CONVENTIONS,
        target,
        layer_type=layer.get("model_type", text_config(target).get("model_type")),
        text_config=layer,
    )
    kept = {**trunk, **dropped}
    return table.finished(source, Converted(written, tensors, taken.used, kept, quantizable, notes))


# --- Qwen


def _recognizes_qwen(config: Config, names: Collection[str]) -> bool:
    text = text_config(config)
    kinds = (str(config.get("model_type")), str(text.get("model_type")))
    promised = bool(text.get(QWEN_KEY)) or any("mtp." in name or "pre_fc_norm" in name for name in names)
    return promised and any(kind.startswith(QWEN_MODEL_TYPES) for kind in kinds)


def _convert_qwen(tensors: Tensors, config: Config, target: Config) -> Converted:
    text = text_config(config)
    is_bare = "pre_fc_norm_hidden.weight" in tensors
    spellings = QWEN_SIDECAR if is_bare else (*SPELLINGS, ("model.mtp.", "mtp."))
    source = table.spell(QWEN_TITLE, tensors, config, spellings)
    if not any(name.startswith("mtp.") for name in source.tensors):
        raise _stripped(QWEN_TITLE, text, QWEN_KEY, "mtp.", "Qwen/..., in full precision")
    _check_depth(QWEN_TITLE, source.tensors, "mtp.layers.")
    attention = layers.attention_sizes(text, QWEN_TITLE)
    if text.get("attn_output_gate", True):  # q holds queries and gates
        attention["q"] *= 2
    rows: tuple[Row, ...] = (*layers.NORMS, *layers.attention(), *layers.QK_NORMS)
    rows += layers.QKV_BIASES if text.get("attention_bias") else ()
    if text.get("num_experts"):
        shared = table.size(text, "shared_expert_intermediate_size", QWEN_TITLE)
        mlp = {"shared": shared, **layers.expert_sizes(text, "num_experts", QWEN_TITLE)}
        experts = layers.experts(source, "mtp.layers.0.mlp.")
        rows = (*rows, *QWEN_MOE, *table.under("mlp.", "mlp.", experts))
    else:
        mlp = {"inner": table.size(text, "intermediate_size", QWEN_TITLE)}
        rows = (*rows, *layers.dense())
    sizes = {"one": 1, **_head_sizes(text, QWEN_TITLE, target), **attention, **mlp}
    taken = table.take((*QWEN_HEAD, *table.under("mtp.layers.0.", "layers.0.", rows)), source, sizes)
    norms, notes = _fold_norms(taken.tensors)
    taken = replace(taken, tensors={**taken.tensors, **norms})
    result = _converted("qwen_mtp", taken, source, "mtp.", config=config, target=target)
    return replace(result, notes=(*notes, *result.notes))


def _fold_norms(tensors: Mapping[str, mx.array]) -> tuple[dict[str, mx.array], tuple[str, ...]]:
    """Return norm weights with the 1 of (1 + w) folded in, and a note for each group.

    Converters fold the 1 in, forget it, or do it twice; the values tell. Folding in bfloat16 rounds to 1 in
    256, as the norm rounds its output and mlx-lm rounds the target's norms; `--dtype float32` loses nothing.
    Raises BadCheckpoint if the 1 was added twice.
    """
    folded: dict[str, mx.array] = {}
    notes = []
    for group, names in QWEN_NORMS.items():
        present = [name for name in names if name in tensors]
        medians = [np.median(np.array(tensors[name].astype(mx.float32))) for name in present]
        middle = float(np.median(medians))
        if middle >= TWICE:
            raise BadCheckpoint(
                f"{QWEN_TITLE} has norm weights around {middle:.1f} ({shortened(present)}), where 0 or 1 "
                "belongs: the 1 of their (1 + w) was added twice; convert it from the original repository"
            )
        is_missing = middle < FOLDED
        folded |= {name: tensors[name] + 1 if is_missing else tensors[name] for name in present}
        dtype = str(tensors[present[0]].dtype).removeprefix("mlx.core.")
        done = f"zero-centred, 1 folded in, in {dtype}" if is_missing else "plain, kept"
        notes.append(f"norm weights of the {group}: median {middle:.2f}, {done}")
    return folded, tuple(notes)


# --- DeepSeek and GLM


def _recognizes_nextn(model_types: Collection[str], config: Config, names: Collection[str]) -> bool:
    text = text_config(config)
    kinds = {config.get("model_type"), text.get("model_type")}
    promised = bool(text.get(NEXTN_KEY)) or any(name.endswith("eh_proj.weight") for name in names)
    return promised and bool(kinds & set(model_types))


def _convert_nextn(
    name: str, title: str, origin: str, tensors: Tensors, config: Config, target: Config
) -> Converted:
    """Convert a head that is kept as a further layer. `origin` has complete checkpoints."""
    text = text_config(config)
    if text.get("index_n_heads"):
        raise BadCheckpoint(
            f"{title} of a {text.get('model_type') or config.get('model_type')} attends through an indexer "
            f"(index_n_heads {text['index_n_heads']}), which this version cannot run: convert its target "
            "with --drafter none, or with another drafter"
        )
    source = table.spell(title, tensors, config, SPELLINGS)
    depth = table.size(text, "num_hidden_layers", title)
    prefix = f"model.layers.{depth}."
    head = [tensor for tensor in source.tensors if _layer_index(tensor) >= depth]
    if not head:
        raise _stripped(title, text, NEXTN_KEY, prefix, origin)
    _check_depth(title, head, "model.layers.")
    rows, sizes = _nextn_layer(text, title, source, prefix)
    named = (*table.under(prefix, "", NEXTN_HEAD), *table.under(prefix, "layers.0.", rows))
    taken = table.take(named, source, {**_head_sizes(text, title, target), **sizes})
    return _converted(name, taken, source, prefix, config=config, target=target)


def _nextn_layer(
    text: Config, title: str, source: PublishedTensors, prefix: str
) -> tuple[tuple[Row, ...], dict[str, int]]:
    """Return the rows and axes of the decoder layer."""
    if text.get("kv_lora_rank"):
        rows = (*layers.NORMS, *layers.latent_attention(text))
        sizes = layers.latent_sizes(text, title)
    else:
        biases = layers.QKV_BIASES if text.get("attention_bias") else ()
        norms = layers.QK_NORMS if text.get("use_qk_norm") else ()
        rows = (*layers.NORMS, *layers.attention(), *biases, *norms)
        sizes = layers.attention_sizes(text, title)
    if not text.get("n_routed_experts"):
        return (*rows, *layers.dense()), {**sizes, "inner": table.size(text, "intermediate_size", title)}
    mixture = layers.expert_sizes(text, "n_routed_experts", title)
    shared = mixture["expert"] * int(text.get("n_shared_experts") or 1)
    experts = table.under("mlp.", "mlp.", layers.experts(source, f"{prefix}mlp."))
    return (*rows, *NEXTN_MOE, *experts), {**sizes, **mixture, "shared": shared}


def _layer_index(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2].isdigit() else -1


def _nextn_family(name: str, title: str, origin: str, model_types: Collection[str]) -> Family:
    convert = partial(_convert_nextn, name, title, origin)
    return Family(name, convert, recognizes=partial(_recognizes_nextn, model_types))


QWEN_MTP = Family("qwen_mtp", _convert_qwen, recognizes=_recognizes_qwen)
DEEPSEEK_MTP = _nextn_family(
    "deepseek_mtp", "the DeepSeek MTP head", "deepseek-ai/...", ("deepseek_v3", "deepseek_v32")
)
GLM_MTP = _nextn_family(
    "glm_mtp",
    "the GLM MTP head",
    "zai-org/...",
    ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm4v_moe", "glm4v_moe_text"),
)
