"""Say which program quantized a checkpoint, and whether its weights can be read."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_spec.checkpoint.families import Config, mlx_lm_module
from mlx_spec.checkpoint.headers import Tensors

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
SCALES = ("_scale_inv", "_scale")  # after the name of a weight; both multiply it
ACTIVATION_SCALE = r"\.(?:input|activation|output|k|v|q|prob)_scale(?:_ub)?$"  # names of tensors


def foreign_settings(config: Config) -> Config:
    """Return the `quantization_config` that transformers reads, empty if there is none."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    found = (part["quantization_config"] for part in parts if part.get("quantization_config"))
    settings: object = next(found, {})
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
