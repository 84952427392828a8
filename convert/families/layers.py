"""Table rows of decoder layers, by the names of mlx-lm, whose layers hold them.

Axes in Sizes: hidden; q, kv, o, head (attention); inner (MLP); experts, expert (inner of one), shared.
"""

from __future__ import annotations

import mlx.core as mx

from .table import Config, PublishedTensors, Row, Sizes, check_fit, same, size

NORMS = (same("input_layernorm.weight", "hidden"), same("post_attention_layernorm.weight", "hidden"))
QK_NORMS = (same("self_attn.q_norm.weight", "head"), same("self_attn.k_norm.weight", "head"))
QKV_BIASES = (
    same("self_attn.q_proj.bias", "q"),
    same("self_attn.k_proj.bias", "kv"),
    same("self_attn.v_proj.bias", "kv"),
)


def attention(inputs: str = "hidden") -> tuple[Row, ...]:
    """Return grouped-query attention whose q, k and v read rows of `inputs`."""
    return (
        same("self_attn.q_proj.weight", f"q {inputs}"),
        same("self_attn.k_proj.weight", f"kv {inputs}"),
        same("self_attn.v_proj.weight", f"kv {inputs}"),
        same("self_attn.o_proj.weight", "hidden o"),
    )


def attention_sizes(config: Config, title: str) -> dict[str, int]:
    """Return the axes of `attention`."""
    heads = size(config, "num_attention_heads", title)
    if config.get("head_dim") is not None:
        head = size(config, "head_dim", title)
    else:
        head = size(config, "hidden_size", title) // heads
    groups = size(config, "num_key_value_heads", title) if "num_key_value_heads" in config else heads
    return {"q": heads * head, "kv": groups * head, "o": heads * head, "head": head}


def captured_sizes(layer: Config, special: Config, count: int, target: Config, title: str) -> dict[str, int]:
    """Return the axes of a drafter that reads `count` target layers. Raises Mismatch for another target."""
    hidden, vocab = size(layer, "hidden_size", title), size(layer, "vocab_size", title)
    theirs = int(special.get("target_hidden_size") or hidden)
    check_fit(title, {"hidden_size": theirs, "vocab_size": vocab}, target)
    return {
        **attention_sizes(layer, title),
        "hidden": hidden,
        "inner": size(layer, "intermediate_size", title),
        "target": theirs,
        "fused": count * theirs,
        "vocab": vocab,
        "draft": int(special.get("draft_vocab_size") or vocab),
    }


def latent_attention(config: Config) -> tuple[Row, ...]:
    """Return multi-head latent attention (DeepSeek-V2)."""
    query: tuple[Row, ...] = (
        same("self_attn.q_a_proj.weight", "q_rank hidden"),
        same("self_attn.q_a_layernorm.weight", "q_rank"),
        same("self_attn.q_b_proj.weight", "q q_rank"),
    )
    if config.get("q_lora_rank") is None:
        query = (same("self_attn.q_proj.weight", "q hidden"),)
    absorbed = "self_attn.embed_q.weight self_attn.unembed_out.weight"
    return (
        *query,
        same("self_attn.kv_a_proj_with_mqa.weight", "kv_a hidden"),
        same("self_attn.kv_a_layernorm.weight", "kv_rank"),
        Row("self_attn.kv_b_proj.weight", absorbed, "kv_b kv_rank", absorb),
        same("self_attn.o_proj.weight", "hidden o"),
    )


def latent_sizes(config: Config, title: str) -> dict[str, int]:
    """Return the axes of `latent_attention`."""
    heads, rank = size(config, "num_attention_heads", title), size(config, "kv_lora_rank", title)
    nope, rope = size(config, "qk_nope_head_dim", title), size(config, "qk_rope_head_dim", title)
    value = size(config, "v_head_dim", title)
    return {
        "heads": heads,
        "nope": nope,
        "q_rank": int(config.get("q_lora_rank") or 0),
        "q": heads * (nope + rope),
        "kv_rank": rank,
        "kv_a": rank + rope,
        "kv_b": heads * (nope + value),
        "o": heads * value,
    }


def absorb(weight: mx.array, sizes: Sizes) -> tuple[mx.array, ...]:
    """Split kv_b_proj into mlx-lm's embed_q and unembed_out."""
    heads = weight.reshape(sizes["heads"], -1, sizes["kv_rank"])
    keys, values = heads[:, : sizes["nope"]], heads[:, sizes["nope"] :]
    return mx.contiguous(keys.swapaxes(-1, -2)), mx.contiguous(values)


def tables(sizes: Sizes) -> tuple[Row, ...]:
    """Return a drafter's own embedding and LM head, and the maps of a reduced vocabulary."""
    whole = sizes["draft"] == sizes["vocab"]
    return (
        same("embed_tokens.weight", "vocab hidden", optional=True),
        same("lm_head.weight", "draft hidden", optional=whole),
        same("d2t", "draft", optional=whole),
        same("t2d", "vocab", optional=True),
    )


def dense(inner: str = "inner", prefix: str = "mlp.") -> tuple[Row, ...]:
    """Return a gated MLP of `inner` units."""
    return _gated(prefix, prefix, inner)


def _gated(source: str, ours: str, inner: str, experts: str = "") -> tuple[Row, ...]:
    """Return the rows of a gated MLP below two prefixes; `experts` is the axis before its own, if any."""
    up, down = f"{experts} {inner} hidden".strip(), f"{experts} hidden {inner}".strip()
    forms = {"gate_proj": up, "up_proj": up, "down_proj": down}
    return tuple(Row(f"{source}{part}.weight", f"{ours}{part}.weight", form) for part, form in forms.items())


STACKED = _gated("switch_mlp.", "switch_mlp.", "expert", "experts")
SEPARATE = _gated("experts.{e}.", "switch_mlp.", "expert")


def split_halves(weight: mx.array, sizes: Sizes) -> tuple[mx.array, ...]:
    """Split gate_up_proj [experts, 2 · expert, hidden] into gate and up."""
    return tuple(mx.split(weight, 2, axis=-2))


FUSED = (
    Row(
        "experts.gate_up_proj",
        "switch_mlp.gate_proj.weight switch_mlp.up_proj.weight",
        "experts 2expert hidden",
        split_halves,
    ),
    Row("experts.down_proj", "switch_mlp.down_proj.weight", "experts hidden expert"),
)


def experts(source: PublishedTensors, prefix: str) -> tuple[Row, ...]:
    """Return the routed experts below `prefix`, in the form of the checkpoint."""
    for rows in (STACKED, FUSED):
        if any(prefix + row.source in source.tensors for row in rows):
            return rows
    return SEPARATE


def expert_sizes(config: Config, count: str, title: str) -> dict[str, int]:
    """Return the axes of `experts`. `count` is the key of their number."""
    inner = size(config, "moe_intermediate_size", title)
    return {"experts": size(config, count, title), "expert": inner, "2expert": 2 * inner}
