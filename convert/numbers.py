"""How many parameters a checkpoint has and in what precision, whoever quantized it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mlx_spec.convert.contents import Tensor

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "FP8"}
# Companions of quantized weights: not parameters.
SCALES: tuple[str, ...] = (
    "scales",
    "biases",
    "qzeros",
    "g_idx",
    "input_scale",
    "input_global_scale",
    "weight_scale",
)
SCALES += ("weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape")
NAMES = {"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "mxfp4": "MXFP4", "modelopt": "ModelOpt"}


def count_parameters(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
    """Parameters of the model, each quantized one counted once. Tables of indices are none."""
    return sum(_parameters(name, tensor, tensors, config) for name, tensor in tensors.items())


def precision(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """The quantization, or the dtype of most of the parameters, in words."""
    ours = config.get("quantization")
    if isinstance(ours, Mapping):
        return _mlx(ours)
    theirs = foreign(config)
    if theirs:
        return _foreign(theirs)
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if _is_float(tensor.dtype):
            sizes[tensor.dtype] += tensor.size
    if not sizes:
        return "unknown"
    most = sizes.most_common(1)[0][0]
    return DTYPES.get(most, most)


def foreign(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` that transformers reads; empty if there is none."""
    text = config.get("text_config")
    found = config.get("quantization_config")
    if not found and isinstance(text, Mapping):
        found = text.get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def _parameters(name: str, tensor: Tensor, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
    stem, _, last = name.rpartition(".")
    scales = tensors.get(f"{stem}.scales")
    if last == "weight" and tensor.dtype == "U32" and scales is not None:
        return scales.size * _group_size(stem, config)
    if last == "qweight" or (last == "weight_packed" and tensor.dtype == "I32"):
        return tensor.size * 32 // _bits(foreign(config))
    if tensor.dtype == "U8" and (last in ("weight", "weight_packed") or last.endswith("_blocks")):
        return tensor.size * 2  # two values of 4 bits
    if last in SCALES or last.endswith(("_scales", "_scale_inv")):
        return 0
    return tensor.size if _is_float(tensor.dtype) or (last, tensor.dtype) == ("weight", "I8") else 0


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("F", "BF"))


def _group_size(stem: str, config: Mapping[str, Any]) -> int:
    """Parameters to a scale, of the layer `stem`: the config may name layers of their own settings."""
    settings = config.get("quantization") or foreign(config)
    own = settings.get(stem)
    for found in (own, settings):
        if isinstance(found, Mapping) and isinstance(found.get("group_size"), int):
            return int(found["group_size"])
    return 64  # mlx's default


def _bits(settings: Mapping[str, Any]) -> int:
    """Bits of a weight in a `quantization_config`; 4 where it does not say."""
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    found = [settings.get("bits"), settings.get("w_bit"), *(w.get("num_bits") for w in weights if w)]
    return next((bits for bits in found if isinstance(bits, int) and bits in (2, 3, 4, 5, 6, 8)), 4)


def _mlx(settings: Mapping[str, Any]) -> str:
    bits, mode = settings.get("bits"), settings.get("mode", "affine")
    layers = [own["bits"] for own in settings.values() if isinstance(own, Mapping) and "bits" in own]
    others = sorted({own for own in layers if own != bits})
    kind = f"{bits}-bit" if mode == "affine" else str(mode)
    mixed = f", some layers {' and '.join(map(str, others))}-bit" if others else ""
    return f"{kind} MLX, groups of {settings.get('group_size', 64)}{mixed}"


def _foreign(settings: Mapping[str, Any]) -> str:
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "unknown")
    name = NAMES.get(method.lower(), method)
    if method == "fp8":
        blocks = settings.get("weight_block_size")
        return f"{name}, blocks of {'x'.join(map(str, blocks))}" if isinstance(blocks, list) else name
    if method == "bitsandbytes":
        return f"{name} {4 if settings.get('load_in_4bit') else 8}-bit"
    if method == "mxfp4":
        return name
    detail = settings.get("format") or settings.get("quant_algo")
    size = settings.get("group_size")
    groups = f", groups of {size}" if isinstance(size, int) and size > 0 else ""
    if "quant_method" not in settings and "bits" in settings:
        return _mlx(settings)
    return f"{name} {detail}" if detail else f"{name} {_bits(settings)}-bit{groups}"
