"""Heads stored as the decoder layer behind the last of L (DeepSeek-V3, GLM-4.5): `model.layers.{L}.*`.

Their norms are plain. embed_tokens and shared_head.head are as a rule copies of the target's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mlx_spec.convert.families import blocks, heads
from mlx_spec.convert.families.family import Config, Converted, Tensors
from mlx_spec.convert.families.fit import size, text_config
from mlx_spec.convert.families.table import Row, Source, same, spell, take, under
from mlx_spec.errors import BadCheckpoint

LAYERS_KEY = "num_nextn_predict_layers"
HEAD = (
    Row("enorm.weight", "norm_embedding.weight", "hidden"),
    Row("hnorm.weight", "norm_hidden.weight", "hidden"),
    Row("eh_proj.weight", "fc.weight", "hidden 2hidden"),
    Row("shared_head.norm.weight", "norm.weight", "hidden"),
    Row("shared_head.head.weight", "lm_head.weight", "vocab hidden", optional=True),
    Row("embed_tokens.weight", "embed_tokens.weight", "vocab hidden", optional=True),
)
MOE = (
    same("mlp.gate.weight", "experts hidden"),
    same("mlp.gate.e_score_correction_bias", "experts"),
    *blocks.dense("shared", "mlp.shared_experts."),
)


@dataclass(frozen=True)
class Layout:
    """What differs between the families that store their head so."""

    name: str
    title: str
    origin: str  # where a complete checkpoint is
    model_types: tuple[str, ...]


def recognises(layout: Layout, config: Config, names: Collection[str]) -> bool:
    """A config of the family with a head, there or promised."""
    text = text_config(config)
    kinds = {config.get("model_type"), text.get("model_type")}
    promised = bool(text.get(LAYERS_KEY)) or any(name.endswith("eh_proj.weight") for name in names)
    return promised and bool(kinds & set(layout.model_types))


def convert(layout: Layout, tensors: Tensors, config: Config, target: Config) -> Converted:
    """The head of a checkpoint of the family. Raises BadCheckpoint and Mismatch."""
    text, title = text_config(config), layout.title
    if text.get("index_n_heads"):
        raise BadCheckpoint(
            f"{title} of a {text.get('model_type') or config.get('model_type')} attends through an indexer "
            f"(index_n_heads {text['index_n_heads']}), which this version cannot run: convert its target "
            "with --drafter none, or with another drafter"
        )
    source = spell(title, tensors, config, heads.SPELLINGS)
    layers = size(text, "num_hidden_layers", title)
    prefix = f"model.layers.{layers}."
    behind = [name for name in source.tensors if _layer_index(name) >= layers]
    if not behind:
        heads.refuse_stripped(title, text, LAYERS_KEY, prefix, layout.origin)
    heads.refuse_more(title, heads.layers_at(behind, "model.layers."))
    sizes = {**heads.head_sizes(text, title, target), **_sizes(text, title)}
    rows = (*under(prefix, "", HEAD), *under(prefix, "layers.0.", _layer(text, source, prefix)))
    taken = take(rows, source, sizes)
    return heads.converted(layout.name, taken, source, prefix, config=config, target=target)


def _layer_index(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2].isdigit() else -1


def _layer(text: Config, source: Source, prefix: str) -> tuple[Row, ...]:
    rows = (*blocks.NORMS, *_attention(text))
    if not text.get("n_routed_experts"):
        return (*rows, *blocks.dense())
    return (*rows, *MOE, *under("mlp.", "mlp.", blocks.experts(source, f"{prefix}mlp.")))


def _attention(text: Config) -> tuple[Row, ...]:
    if text.get("kv_lora_rank"):
        return blocks.latent_attention(text)
    biases = blocks.QKV_BIASES if text.get("attention_bias") else ()
    norms = blocks.QK_NORMS if text.get("use_qk_norm") else ()
    return (*blocks.attention(), *biases, *norms)


def _sizes(text: Config, title: str) -> dict[str, int]:
    latent = bool(text.get("kv_lora_rank"))
    attention = blocks.latent_sizes(text, title) if latent else blocks.attention_sizes(text, title)
    if not text.get("n_routed_experts"):
        return {**attention, "inner": size(text, "intermediate_size", title)}
    mixture = blocks.expert_sizes(text, "n_routed_experts", title)
    shared = mixture["expert"] * int(text.get("n_shared_experts") or 1)
    return {**attention, **mixture, "shared": shared}
