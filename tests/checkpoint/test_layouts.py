"""Tensors as transformers 5 saves them give the logits of the same weights under mlx-lm's names."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.pairs import TOKENIZER

from mlx_spec import load
from mlx_spec.checkpoint import quantizers
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.left_out import reason_left_out
from mlx_spec.checkpoint.memory import memory_need
from mlx_spec.cli.progress import StageProgress
from mlx_spec.convert.convert import convert
from mlx_spec.convert.options import ConversionOptions
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.read import read_model

Weights = dict[str, mx.array]
Config = dict[str, Any]
Case = tuple[Config, Config, Callable[[Weights], Weights]]
IDS = mx.array([[5, 9, 17, 3, 5, 9]])
V = 264
B: Config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
B |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": V, "max_position_embeddings": 64}
B |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4}
ROPE: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
B5 = {key: value for key, value in B.items() if key != "rope_theta"} | ROPE  # as transformers 5 says it
MOE: Config = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA: Config = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2}
TIED, OWN = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
GPT2: Config = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": V,
}
NEOX: Config = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "layer_norm_eps": 1e-5}
NEOX |= {
    "vocab_size": V,
    "max_position_embeddings": 64,
    "intermediate_size": 128,
    "use_parallel_residual": True,
}
NANO = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.h.": "model.layers.",
    ".attn.c_proj.": ".self_attn.o_proj.",
}
NANO |= {f".attn.c_{x}.": f".self_attn.{x}_proj." for x in "qkv"} | {
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}


def unchanged(weights: Weights) -> Weights:
    return weights


def without_head(weights: Weights) -> Weights:
    return {name: array for name, array in weights.items() if "lm_head" not in name}


def convolutions(weights: Weights) -> Weights:
    """GPT-2 stores [input, output]."""
    turned = ("attn.c_attn.weight", "c_proj.weight", "c_fc.weight")
    found = {name: array.T if name.endswith(turned) else array for name, array in weights.items()}
    return renamed({"model.": "transformer."})(found)


def renamed(old_to_new: dict[str, str]) -> Callable[[Weights], Weights]:
    def change(weights: Weights) -> Weights:
        for old, new in old_to_new.items():
            weights = {name.replace(old, new): array for name, array in weights.items()}
        return weights

    return change


def apart(weights: Weights) -> Weights:
    """Experts one by one."""
    found = {name: array for name, array in weights.items() if ".switch_mlp." not in name}
    for name in weights.keys() - found.keys():
        parts = {name.replace(".switch_mlp.", f".experts.{i}."): each for i, each in enumerate(weights[name])}
        found |= parts
    return found


def with_vision(weights: Weights) -> Weights:
    return {**weights, "model.vision_adapter.fc1.weight": mx.ones((2, 2)), "mm_projector.bias": mx.ones(2)}


def fused(weights: Weights) -> Weights:
    """Experts of gpt-oss as transformers 5 saves them: columns of gate and up in turn."""
    found = {name: array for name, array in weights.items() if ".experts." not in name}
    for name in [n for n in weights if n.endswith(".experts.gate_proj.weight")]:
        stem = name.removesuffix(".gate_proj.weight")
        for part, joined in (("weight", "gate_up_proj"), ("bias", "gate_up_proj_bias")):
            pair = [weights[f"{stem}.{layer}.{part}"] for layer in ("gate_proj", "up_proj")]
            rows = mx.stack(pair, axis=2).reshape(pair[0].shape[0], -1, *pair[0].shape[2:])
            found[f"{stem}.{joined}"] = mx.swapaxes(rows, -1, -2) if part == "weight" else rows
        found[f"{stem}.down_proj"] = mx.swapaxes(weights[f"{stem}.down_proj.weight"], -1, -2)
        found[f"{stem}.down_proj_bias"] = weights[f"{stem}.down_proj.bias"]
    return found


def vl_experts(turned: bool) -> Callable[[Weights], Weights]:
    """Experts of Qwen3-VL, fused: [output, input] in transformers 5, [input, output] before."""

    def change(weights: Weights) -> Weights:
        found = {name: array for name, array in weights.items() if ".switch_mlp." not in name}
        for name in [n for n in weights if n.endswith(".switch_mlp.gate_proj.weight")]:
            stem = name.removesuffix(".switch_mlp.gate_proj.weight")
            parts = [weights[f"{stem}.switch_mlp.{x}_proj.weight"] for x in ("gate", "up", "down")]
            both = [mx.concatenate(parts[:2], axis=1), parts[2]]
            both = both if turned else [mx.swapaxes(array, -1, -2) for array in both]
            found |= dict(
                zip((f"{stem}.experts.gate_up_proj", f"{stem}.experts.down_proj"), both, strict=True)
            )
        return found

    return change


def wrapped(kind: str, text: Config, **top: Any) -> Config:
    return {"model_type": kind, "text_config": text, **top}


QWEN35, QWEN3_VL = B | DELTA | {"model_type": "qwen3_5_text"}, B | OWN | {"model_type": "qwen3_vl_text"}
QWEN35_MOE = B | DELTA | MOE | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 24}
VL_MOE = (
    B
    | MOE
    | OWN
    | {
        "model_type": "qwen3_vl_moe_text",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
GPT_OSS: Config = B | {
    "model_type": "gpt_oss",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"]}
MISTRAL = B | {"model_type": "mistral"}
GLM4 = B | {"model_type": "glm4", "attention_bias": False, "partial_rotary_factor": 0.5}
# mlx-lm's config; what transformers 5 saves in its place, config and tensors
CASES: dict[str, Case] = {
    "gpt2": (
        GPT2 | {"model_type": "gpt2", "n_ctx": 64},
        GPT2 | {"model_type": "gpt2"},
        convolutions,
    ),
    "gpt_neox": (
        NEOX | {"model_type": "gpt_neox", "rotary_emb_base": 10_000, "rotary_pct": 0.5},
        NEOX
        | {"model_type": "gpt_neox", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        unchanged,
    ),
    "nanochat": (B | {"model_type": "nanochat"}, B5 | {"model_type": "nanochat"}, renamed(NANO)),
    "gpt_oss": (GPT_OSS, GPT_OSS, fused),
    "glm4, tied": (GLM4, GLM4 | TIED, without_head),
    "qwen3_5_text": (
        wrapped("qwen3_5", QWEN35 | OWN),
        {**QWEN35, **OWN},
        renamed({"language_model.": ""}),
    ),
    "qwen3_5, tied at the top": (
        wrapped("qwen3_5", QWEN35 | TIED),
        wrapped("qwen3_5", QWEN35, **TIED),
        unchanged,
    ),
    "qwen3_5_moe": (
        wrapped("qwen3_5_moe", QWEN35_MOE | OWN),
        wrapped("qwen3_5_moe", QWEN35_MOE, **OWN),
        lambda weights: with_vision(apart(weights)),
    ),
    "qwen3_vl": (
        wrapped("qwen3_vl", QWEN3_VL),
        wrapped("qwen3_vl", B5 | {"model_type": "qwen3_vl_text"}, **OWN),
        renamed({"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}),
    ),
    "qwen3_vl_moe": (
        wrapped("qwen3_vl_moe", VL_MOE),
        wrapped("qwen3_vl_moe", VL_MOE),
        vl_experts(turned=True),
    ),
    "qwen3_vl_moe of transformers 4": (
        wrapped("qwen3_vl_moe", VL_MOE),
        wrapped("qwen3_vl_moe", VL_MOE),
        vl_experts(turned=False),
    ),
    "qwen3_vl_moe, tied": (
        wrapped("qwen3_vl_moe", VL_MOE | TIED),
        wrapped("qwen3_vl_moe", VL_MOE | TIED),
        vl_experts(turned=True),
    ),
    "mistral3, tied at the top": (
        wrapped("mistral3", MISTRAL | TIED),
        wrapped("mistral3", MISTRAL | OWN, **TIED),
        unchanged,
    ),
    "qwen3_moe without head_dim": (
        B | MOE | OWN | VL_MOE | {"model_type": "qwen3_moe"},
        {key: v for key, v in (B5 | MOE | VL_MOE).items() if key != "head_dim"} | {"model_type": "qwen3_moe"},
        unchanged,
    ),
}


def write(folder: Path, config: Config, weights: Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    TOKENIZER.save(str(folder / "tokenizer.json"))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    return folder


def made(config: Config) -> tuple[Any, Weights]:
    """A random model of mlx-lm and its weights."""
    mx.random.seed(1)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    model.load_weights(
        [(n, a + mx.random.normal(a.shape) * 0.2) for n, a in tree_flatten(model.parameters())]
    )
    return model, dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_5_saves(name: str, tmp_path: Path) -> None:
    plain, saved, change = CASES[name]
    model, weights = made(plain)
    if "tied" in name and "lm_head.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_weights([*weights.items()])
    read, _ = read_model(read_checkpoint(write(tmp_path / "saved", saved, change(weights))))
    np.testing.assert_allclose(np.array(read(IDS)), np.array(model(IDS)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        B | {"model_type": "gemma2", "query_pre_attn_scalar": 8},
        B
        | {"model_type": "cohere2", "layer_norm_eps": 1e-5, "sliding_window": 8, "sliding_window_pattern": 2},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_head_of_its_own(config: Config, tmp_path: Path) -> None:
    """mlx-lm's classes of these types take the table of embeddings; a saved head is another matrix."""
    model, weights = made(config)
    folder = write(tmp_path / "saved", config | TIED, weights)
    tied = read_model(read_checkpoint(folder))[0](IDS)
    table = weights["model.embed_tokens.weight"]
    write(folder, config | OWN, weights | {"lm_head.weight": table[::-1]})
    untied, _ = read_model(read_checkpoint(folder))
    assert mx.allclose(tied, model(IDS)) and mx.allclose(untied(IDS), tied[..., ::-1], atol=1e-5)
    pair = load(folder, "lookup", num_draft_tokens=2)
    plain = load(folder, "none")
    texts = [[t for r in p.generate([5, 9, 5, 9], max_tokens=8) for t in r.tokens] for p in (pair, plain)]
    assert texts[0] == texts[1]


# --- FP8


def e4m3(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of FP8, and the numbers that they stand for."""
    stored = mx.to_fp8(mx.array(weights))
    return np.array(stored), np.array(mx.from_fp8(stored, mx.float32))


def write_fp8(folder: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file whose types NumPy does not have."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def spread(scale: np.ndarray, shape: tuple[int, ...], block: int) -> np.ndarray:
    if scale.size == 1 or scale.shape[-1] == 1:
        return np.broadcast_to(scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(()), shape)
    return np.kron(scale, np.ones((block, block), np.float32))[: shape[0], : shape[1]]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lm_head.weight", None),
        ("model.layers.3.mlp.up_proj.weight", None),
        ("model.layers.4.mlp.up_proj.weight", "a multi-token head"),
        ("model.layers.1.self_attn.k_proj.weight", None),
        ("model.layers.2.self_attn.k_proj.weight", "a layer that reuses K and V of an earlier one"),
        ("model.layers.2.self_attn.q_proj.weight", None),
    ],
)
def test_what_a_model_may_be_without(name: str, reason: str | None) -> None:
    config = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "tie_word_embeddings": False}
    assert reason_left_out(name, config) == reason
    tied = config | {"tie_word_embeddings": True}
    assert (reason_left_out(name, tied) == reason) == (name != "lm_head.weight")


@pytest.mark.parametrize(
    ("scales", "block"), [((2, 2), (128, 128)), ((4, 5), (50, 26)), ((2, 1), (128, 130))]
)
def test_the_last_block_of_scales_may_be_smaller(scales: tuple[int, int], block: tuple[int, int]) -> None:
    """Blocks have 128 rows and columns, unless the number of scales contradicts that."""
    scale = np.arange(1, 1 + scales[0] * scales[1], dtype=np.float32).reshape(scales)
    expected = np.kron(scale, np.ones(block, np.float32))[:200, :130]
    found = mx.broadcast_to(quantizers._spread(mx.array(scale), (200, 130)), (200, 130))
    assert np.array_equal(np.array(found), expected)


@pytest.mark.parametrize(
    ("settings", "end", "form"),
    [
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "_scale_inv", "blocks"),
        ({"quant_method": "fp8"}, "_scale_inv", "tensor"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "_scale", "rows"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", "tensor"),
    ],
)
def test_fp8_is_dequantized_exactly(settings: Config, end: str, form: str, tmp_path: Path) -> None:
    config = B | OWN | {"model_type": "llama", "dtype": "float32"}
    _, weights = made(config)
    stored: dict[str, tuple[str, np.ndarray]] = {}
    exact: Weights = {}
    chance = np.random.default_rng(2)
    for name, array in weights.items():
        if not name.endswith("proj.weight"):
            stored[name], exact[name] = ("F32", np.array(array)), array
            continue
        shape = {"blocks": [-(-n // 16) for n in array.shape], "rows": [array.shape[0], 1], "tensor": [1]}[
            form
        ]
        scale = chance.uniform(0.5, 2, shape).astype(np.float32)
        data, values = e4m3(np.array(array))
        stored[name], stored[name + end] = ("F8_E4M3", data), ("F32", scale)
        stored[name.replace("weight", "input_scale")] = ("F32", np.ones(1, np.float32))
        exact[name] = mx.array(values * spread(scale, array.shape, 16))
    folder = write(tmp_path / "fp8", config | {"quantization_config": settings}, {})
    write_fp8(folder, stored)
    read, found = read_model(read_checkpoint(folder))
    assert "quantization_config" not in found
    saved = read_checkpoint(folder)  # its files hold a byte of each weight
    held = sum(array.nbytes for _, array in tree_flatten(read.parameters()))
    assert memory_need([saved]).weights == held > saved.headers.size
    assert all(mx.array_equal(a, exact[n]) for n, a in tree_flatten(read.parameters()))
    out = tmp_path / "pair"
    options = ConversionOptions(str(folder), out, drafter="none", quantization="none")
    convert(options, StageProgress(io.StringIO()))
    assert "quantization_config" not in json.loads((out / "target" / "config.json").read_text())
    written = mx.load(str(out / "target" / "model.safetensors"))
    assert isinstance(written, dict) and all(mx.array_equal(a, exact[n]) for n, a in written.items())


# --- draft models that cannot be loaded


# --- what mlx-lm does not read as the checkpoint means it

ERNIE = B | {"model_type": "ernie4_5_moe", "use_bias": False, "moe_num_experts": 3, "moe_k": 2} | OWN
ROUTER, UNKNOWN = "model.layers.1.mlp.moe_statics.e_score_correction_bias", "model.extra_mtp_block.weight"


def test_a_router_without_its_bias_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """mlx-lm drops the bias that chooses experts: the text would be another."""
    _, weights = made(ERNIE)
    saved = apart(weights)
    read_model(read_checkpoint(write(tmp_path / "without", ERNIE, {**saved, UNKNOWN: mx.ones(32)})))
    assert f"mlx-lm leaves out {UNKNOWN}: the text may differ" in capsys.readouterr().err
    read_model(
        read_checkpoint(
            write(tmp_path / "known", ERNIE, {**saved, "model.mtp_block.0.mtp.weight": mx.ones(32)})
        )
    )
    assert capsys.readouterr().err == ""
    with pytest.raises(BadCheckpoint, match=f"as ernie4_5_moe: mlx-lm leaves out {ROUTER}, so that tokens"):
        read_model(read_checkpoint(write(tmp_path / "with", ERNIE, {**saved, ROUTER: mx.ones((1, 3))})))
