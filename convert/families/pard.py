"""PARD (arXiv 2504.18583): a small model that drafts in one pass over mask tokens.

Ours: the model's own names, as mlx-lm has them; `layer_config` is the config.json that mlx-lm builds it from.
"""

from __future__ import annotations

from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.hub.catalog import PARD as KIND

from . import layers, table
from .table import Config, Converted, Family, Row, Tensors

NAME, TITLE, MASK = "pard", "the PARD drafter", "pard_token"
ATTENTION: dict[str, tuple[Row, ...]] = {  # model_type -> tensors of its attention beside the projections
    "llama": (),
    "qwen2": layers.QKV_BIASES,
    "qwen3": layers.QK_NORMS,
}
quantizable = table.all_but()


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a PARD drafter. Raises BadCheckpoint and Mismatch."""
    kind = str(config.get("model_type"))
    if kind not in ATTENTION:
        raise BadCheckpoint(f"{TITLE} is a {kind} model: known are {', '.join(ATTENTION)}")
    vocab, mask = table.size(config, "vocab_size", TITLE), table.size(config, MASK, TITLE)
    if not 0 <= mask < vocab:
        raise BadCheckpoint(f"config.json of {TITLE} has {MASK} {mask}, the model knows {vocab} tokens")
    theirs = table.target_size(target, "vocab_size")
    if abs(vocab - theirs) > max(vocab, theirs) // 100:  # tables of one tokenizer differ by their padding
        raise Mismatch(
            f"{TITLE} is made for a target of vocab size {vocab}, this one has {theirs}: "
            f"{table.OTHER_DRAFTER}"
        )
    sizes = {
        **layers.attention_sizes(config, TITLE),
        "hidden": table.size(config, "hidden_size", TITLE),
        "inner": table.size(config, "intermediate_size", TITLE),
        "vocab": vocab,
    }
    source = table.spell(TITLE, tensors, config)
    tied = bool(config.get("tie_word_embeddings"))
    taken = table.take(_rows(config, kind, tied=tied), source, sizes)
    head = {"lm_head.weight": "tied to embed_tokens"} if tied and "lm_head.weight" in tensors else {}
    conventions = Conventions(hidden="none", rope="own")
    written = table.config_of(
        NAME, conventions, target, layer_config=table.own_config(config), mask_token_id=mask
    )
    return table.finished(source, Converted(written, taken.tensors, taken.used, head, quantizable))


def _rows(config: Config, kind: str, *, tied: bool) -> tuple[Row, ...]:
    biases = layers.QKV_BIASES if kind == "llama" and config.get("attention_bias") else ()
    block = (*layers.NORMS, *layers.attention(), *ATTENTION[kind], *biases, *layers.dense())
    rows = [
        table.same("model.embed_tokens.weight", "vocab hidden"),
        table.same("model.norm.weight", "hidden"),
    ]
    for index in range(table.size(config, "num_hidden_layers", TITLE)):
        rows += table.under(f"model.layers.{index}.", f"model.layers.{index}.", block)
    return (*rows, *(() if tied else (table.same("lm_head.weight", "vocab hidden"),)))


PARD = Family(NAME, convert, KIND)
