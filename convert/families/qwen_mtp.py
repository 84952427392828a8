"""Qwen3-Next, Qwen3.5, Qwen3.6: the head under `mtp.`, a full-attention layer with an output gate.

Its norms are stored zero-centred; which form a checkpoint has is told from the values (norms.py). Sidecar
folders that dropped the prefix `mtp.` or stacked the experts are read as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mlx_spec.convert.families import blocks, heads
from mlx_spec.convert.families.family import Config, Converted, Family, Tensors
from mlx_spec.convert.families.fit import size, text_config
from mlx_spec.convert.families.norms import fold
from mlx_spec.convert.families.table import Row, Source, same, spell, take, under

NAME, TITLE, LAYERS_KEY = "qwen_mtp", "the Qwen MTP head", "mtp_num_hidden_layers"
ORIGIN = "Qwen/..., in full precision"
MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_6")
SIDECAR = (("fc.", "mtp.fc."), ("layers.", "mtp.layers."), ("norm.", "mtp.norm."), ("pre_fc", "mtp.pre_fc"))
HEAD = (
    Row("mtp.fc.weight", "fc.weight", "hidden 2hidden"),
    Row("mtp.pre_fc_norm_embedding.weight", "norm_embedding.weight", "hidden"),
    Row("mtp.pre_fc_norm_hidden.weight", "norm_hidden.weight", "hidden"),
    Row("mtp.norm.weight", "norm.weight", "hidden"),
    Row("mtp.embed_tokens.weight", "embed_tokens.weight", "vocab hidden", optional=True),
    Row("mtp.lm_head.weight", "lm_head.weight", "vocab hidden", optional=True),
)
MOE = (
    same("mlp.gate.weight", "experts hidden"),
    *blocks.dense("shared", "mlp.shared_expert."),
    same("mlp.shared_expert_gate.weight", "one hidden"),
)
# Converters add the 1 by lists of names, on which these two groups stand together or not at all.
GROUPS = {
    "layer": tuple(f"layers.0.{row.ours}" for row in (*blocks.NORMS, *blocks.QK_NORMS)),
    "head": ("norm_embedding.weight", "norm_hidden.weight", "norm.weight"),
}


def recognises(config: Config, names: Collection[str]) -> bool:
    """A Qwen config with a head, there or promised."""
    text = text_config(config)
    kinds = (str(config.get("model_type")), str(text.get("model_type")))
    promised = bool(text.get(LAYERS_KEY)) or any("mtp." in name or "pre_fc_norm" in name for name in names)
    return promised and any(kind.startswith(MODEL_TYPES) for kind in kinds)


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """The head of a Qwen checkpoint. Raises BadCheckpoint and Mismatch."""
    text = text_config(config)
    bare = "pre_fc_norm_hidden.weight" in tensors
    source = spell(TITLE, tensors, config, SIDECAR if bare else (*heads.SPELLINGS, ("model.mtp.", "mtp.")))
    if not any(name.startswith("mtp.") for name in source.tensors):
        heads.refuse_stripped(TITLE, text, LAYERS_KEY, "mtp.", ORIGIN)
    heads.refuse_more(TITLE, heads.layers_at(source.tensors, "mtp.layers."))
    sizes = {"one": 1, **heads.head_sizes(text, TITLE, target), **_attention_sizes(text), **_mlp_sizes(text)}
    taken = take((*HEAD, *under("mtp.layers.0.", "layers.0.", _layer(text, source))), source, sizes)
    norms, notes = fold(TITLE, taken.tensors, GROUPS)
    taken = replace(taken, tensors={**taken.tensors, **norms})
    result = heads.converted(NAME, taken, source, "mtp.", config=config, target=target)
    return replace(result, notes=(*notes, *result.notes))


def _layer(text: Config, source: Source) -> tuple[Row, ...]:
    rows = (*blocks.NORMS, *blocks.attention(), *blocks.QK_NORMS)
    if text.get("attention_bias"):
        rows = (*rows, *blocks.QKV_BIASES)
    if not text.get("num_experts"):
        return (*rows, *blocks.dense())
    return (*rows, *MOE, *under("mlp.", "mlp.", blocks.experts(source, "mtp.layers.0.mlp.")))


def _attention_sizes(text: Config) -> dict[str, int]:
    sizes = blocks.attention_sizes(text, TITLE)
    gated = text.get("attn_output_gate", True)  # q holds queries and gates
    return {**sizes, "q": sizes["q"] * (2 if gated else 1)}


def _mlp_sizes(text: Config) -> dict[str, int]:
    if not text.get("num_experts"):
        return {"inner": size(text, "intermediate_size", TITLE)}
    shared = size(text, "shared_expert_intermediate_size", TITLE)
    return {"shared": shared, **blocks.expert_sizes(text, "num_experts", TITLE)}


QWEN_MTP = Family(NAME, runnable=True, recognises=recognises, convert=convert)
