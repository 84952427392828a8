"""Recognize how weights are quantized, count them, and dequantize those that mlx-lm does not read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlx_spec.checkpoint.headers import TensorInfo, Tensors
from mlx_spec.checkpoint.targets import Config, mlx_lm_module

if TYPE_CHECKING:
    import mlx.core as mx

# Method in config.json -> name for users. Other methods keep their name in config.json.
NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
FP8 = "F8_E4M3"
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "FP8"}
DEFAULT_GROUP_SIZE = 64  # of mlx
SCALES = ("_scale_inv", "_scale")  # after the name of a weight; both multiply it
ACTIVATION_SCALE = r"\.(?:input|activation|output|k|v|q|prob)_scale(?:_ub)?$"  # names of tensors


def foreign_settings(config: Config) -> Config:
    """Return the `quantization_config` that transformers reads, empty if there is none."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    stated = (part["quantization_config"] for part in parts if part.get("quantization_config"))
    settings: object = next(stated, {})
    if not isinstance(settings, Mapping):
        return {}
    inner = settings.get("quantization")  # ModelOpt nests it, in a separate file
    return {"quant_method": "modelopt", **inner} if isinstance(inner, Mapping) else settings


def quantizer(config: Config, tensors: Tensors) -> str | None:
    """Return the name of the program that quantized these weights; None for mlx-lm or dense weights."""
    settings = foreign_settings(config)
    if isinstance(config.get("quantization"), Mapping) or (
        "bits" in settings and "group_size" in settings and "quant_method" not in settings
    ):
        return None
    if "load_in_4bit" in settings or "load_in_8bit" in settings:
        return NAMES["bitsandbytes"]
    method = settings.get("quant_method") or settings.get("quant_algo")
    if method:
        return NAMES.get(str(method).lower(), str(method))
    ends = {  # of tensors that only one method writes, if config.json does not name the method
        ".absmax": "bitsandbytes",
        ".SCB": "bitsandbytes",
        ".qzeros": "GPTQ or AWQ",
        ".weight_packed": "compressed-tensors",
        ".W_q": "HQQ",
        ".codebooks": "AQLM",
    }
    traces = (name for end, name in ends.items() if any(tensor.endswith(end) for tensor in tensors))
    return next(traces, "FP8" if any(info.dtype == FP8 for info in tensors.values()) else None)


def is_fp8(config: Config, tensors: Tensors) -> bool:
    """Return True if weights are FP8 with scales beside them, so that they can be dequantized.

    mlx-lm keeps blocks of 32 with scales that are powers of two as they are.
    """
    settings = foreign_settings(config)
    if isinstance(config.get("quantization"), Mapping):
        return False
    method, block = str(settings.get("quant_method", "fp8")).lower(), settings.get("weight_block_size")
    if settings.get("scale_fmt") == "ue8m0" and list(block or ()) == [32, 32]:
        return False
    fp8_formats = ("float-quantized", "naive-quantized")  # of compressed-tensors
    named = (
        method in ("fp8", "fbgemm_fp8")
        or settings.get("format") in fp8_formats
        or str(settings.get("quant_algo", "")).upper() == "FP8"
    )
    weights = [name for name, info in tensors.items() if info.dtype == FP8]
    return named and bool(weights) and all(any(name + end in tensors for end in SCALES) for name in weights)


def obstacle(config: Config, tensors: Tensors) -> str | None:
    """Return why mlx-lm cannot read these quantized weights; None if it can."""
    name, settings = quantizer(config, tensors), foreign_settings(config)
    if name is None or is_fp8(config, tensors):
        return None
    method, bits = str(settings.get("quant_method", "")).lower(), settings.get("bits")
    if method == "fp8" and settings.get("scale_fmt") == "ue8m0":
        return None
    # mlx-lm reads these methods; of AWQ, compressed-tensors and ModelOpt it reads some settings. It takes
    # GPTQ, which packs along the other axis, for AWQ.
    read = ("awq", "bitnet", "compressed-tensors", "modelopt", "mxfp4", "mxfp8")
    is_packed = settings.get("format") == "pack-quantized"  # integers, which few classes of mlx-lm unpack
    unpacking = ("deepseek_v3", "kimi_k25", "kimi_k3", "kimi_vl", "mistral3", "mistral4")
    unpacks = not is_packed or mlx_lm_module(str(config.get("model_type"))) in unpacking
    if method in read and not (method == "awq" and bits not in (None, 4)) and unpacks:
        return None
    how = f" to {bits} bits" if isinstance(bits, int) else ""
    return (
        f"is quantized{how} by {name}, which MLX cannot read: get the model in full precision, which "
        "`mlx-spec convert` quantizes, or a copy that mlx-lm quantized, such as mlx-community has"
    )


# --- weights


def count_parameters(tensors: Tensors, config: Config) -> int:
    """Return the parameters of a model; tables of indices do not count."""
    return sum(parameters_of(name, tensor, tensors, config) for name, tensor in tensors.items())


def precision(tensors: Tensors, config: Config) -> str:
    """Return the quantization, or the dtype of most parameters, as users read it."""
    ours, theirs = config.get("quantization"), foreign_settings(config)
    if isinstance(ours, Mapping):
        return _mlx_precision(ours)
    if not theirs:
        most = common_dtype(tensors)
        if most == "unknown" and tensors:  # tables of integers, such as token ids
            largest = max(tensors.values(), key=lambda tensor: tensor.nbytes).dtype
            most = largest.replace("U", "uint").replace("I", "int")
        return DTYPE_NAMES.get(most, most)
    if "quant_method" not in theirs and "bits" in theirs:
        return _mlx_precision(theirs)
    name = quantizer(config, tensors) or "unknown"
    return (
        name if name in ("FP8", "MXFP4") else f"{name} {theirs.get('quant_algo') or f'{_bits(theirs)}-bit'}"
    )


def common_dtype(tensors: Tensors) -> str:
    """Return the dtype of floats that takes most bytes, "unknown" if there is none."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if is_float(tensor.dtype):
            sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "unknown"


def parameters_of(name: str, tensor: TensorInfo, tensors: Tensors, config: Config) -> int:
    """Return the parameters in a tensor, also where several share an integer; 0 for a scale or an index."""
    stem, _, last = name.rpartition(".")
    scales = tensors.get(f"{stem}.scales")
    if last == "weight" and tensor.dtype == "U32" and scales is not None:
        return scales.size * _group_size(stem, config)
    if last == "qweight" or (last == "weight_packed" and tensor.dtype == "I32"):
        return tensor.size * 32 // _bits(foreign_settings(config))
    if tensor.dtype == "U8" and (last in ("weight", "weight_packed") or last.endswith("_blocks")):
        return tensor.size * 2  # two values of 4 bits
    # Other tensors that belong to quantized weights are not parameters.
    others = (
        "scales biases qzeros g_idx input_scale input_global_scale weight_scale weight_scale_inv "
        "weight_scale_2 weight_global_scale weight_zero_point weight_shape"
    )
    if last in others.split() or last.endswith(("_scales", "_scale_inv")):
        return 0
    return tensor.size if is_float(tensor.dtype) or (last, tensor.dtype) == ("weight", "I8") else 0


def is_float(dtype: str) -> bool:
    """Return True for the name of a type of floats in safetensors."""
    return dtype.startswith(("F", "BF"))


def _group_size(stem: str, config: Config) -> int:
    """Return how many parameters of layer `stem` share a scale; a layer may have its own settings."""
    settings = config.get("quantization") or foreign_settings(config)
    for stated in (settings.get(stem), settings):
        if isinstance(stated, Mapping) and isinstance(size := stated.get("group_size"), int):
            return size
    return DEFAULT_GROUP_SIZE


def _bits(settings: Config) -> int:
    """Return the bits of a weight in a `quantization_config`, 4 if it does not say."""
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    stated = [settings.get("bits"), settings.get("w_bit"), 8 if settings.get("load_in_8bit") else None]
    stated += [each.get("num_bits") for each in weights if each]
    return next((bits for bits in stated if isinstance(bits, int) and bits in (2, 3, 4, 5, 6, 8)), 4)


def _mlx_precision(settings: Config) -> str:
    bits, mode = settings.get("bits"), settings.get("mode", "affine")
    layers = [layer["bits"] for layer in settings.values() if isinstance(layer, Mapping) and "bits" in layer]
    others = sorted({layer for layer in layers if layer != bits})
    kind = f"{bits}-bit" if mode == "affine" else str(mode)
    mixed = f", some layers {' and '.join(map(str, others))}-bit" if others else ""
    return f"{kind} MLX, groups of {settings.get('group_size', DEFAULT_GROUP_SIZE)}{mixed}"


# --- FP8


def dequantized_fp8(weights: Mapping[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Return FP8 weights that have scales as dense ones, multiplied in float32 as in transformers."""
    import mlx.core as mx

    result = dict(weights)
    for name, array in weights.items():
        scale = next((weights[name + end] for end in SCALES if name + end in weights), None)
        if scale is not None and array.dtype == mx.uint8:
            result[name] = (mx.from_fp8(array, mx.float32) * _spread(scale, array.shape)).astype(dtype)
            for end in SCALES:
                result.pop(name + end, None)
    if len(result) == len(weights):
        return result
    return {name: array for name, array in result.items() if not re.search(ACTIVATION_SCALE, name)}


def _spread(scale: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Return scales that broadcast to `shape`, from a scale for a tensor, for rows or for blocks."""
    import mlx.core as mx

    if scale.dtype == mx.uint8:  # an exponent
        scale = mx.left_shift(scale.astype(mx.uint32), mx.array(23, mx.uint32)).view(mx.float32)
    scale = scale.astype(mx.float32)
    if scale.size == 1:
        return scale.reshape(())
    if scale.ndim < len(shape):
        scale = scale.reshape(*scale.shape, *[1] * (len(shape) - scale.ndim))
    for axis in (-2, -1):
        block = -(-shape[axis] // scale.shape[axis])
        if scale.shape[axis] > 1 and block > 1:
            usual = 128  # rows or columns of a block, unless the shapes contradict it
            block = usual if -(-shape[axis] // usual) == scale.shape[axis] else block
            scale = mx.repeat(scale, block, axis)
    return scale[..., : shape[-2], : shape[-1]]
