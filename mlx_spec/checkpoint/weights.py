"""Read parameter counts, precision and bytes per token from file headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.checkpoint.config import Checkpoint, integer, stated_dtype, text_config, vocab_size
from mlx_spec.checkpoint.headers import TensorInfo, Tensors
from mlx_spec.checkpoint.owners import is_of_language
from mlx_spec.checkpoint.quantizers import DTYPE_NAMES, FP8, SCALES, common_dtype, is_float, parameters_of
from mlx_spec.checkpoint.targets import Config, TargetShape
from mlx_spec.device import memory_for_models

# --- formats of safetensors and of quantizers
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "BOOL": 8}
BITS |= {"U64": 64, "U32": 32, "U16": 16, "U8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
EXPERTS = frozenset(("experts", "switch_mlp", "switch_glu"))  # parts of tensor names, between dots


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored."""

    bits: int
    group_size: int | None = None  # weights that share a scale, None if not quantized
    mode: str = "affine"  # or mxfp4, mxfp8, nvfp4

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes of a weight: a group has two scales of 16 bits, or one of 8."""
        if self.group_size is None:
            return self.bits / 8
        return self.bits / 8 + (4 if self.mode == "affine" else 1) / self.group_size


@dataclass(frozen=True)
class DecodeSizes:
    """The bytes of a loaded model: read for one token, and held in memory."""

    read: float  # weights for one token, its experts included
    held: float  # all weights
    format: WeightFormat
    experts: float = 0.0  # the part of `read` that is experts, which differ from row to row
    layers: int | None = None  # None if not known
    kv_read: float = 0.0  # K/V for one token, at a given context
    kv_held: float = 0.0


def decode_sizes(checkpoint: Checkpoint, context: int) -> DecodeSizes:
    """Return the sizes of a complete checkpoint, as `sizes_of`. Raises NotFound or BadCheckpoint."""
    _ = checkpoint.config
    checkpoint.check_weights()
    return sizes_of(checkpoint, context)


def sizes_of(checkpoint: Checkpoint, context: int) -> DecodeSizes:
    """Return the bytes of a checkpoint once it is loaded, for one token after `context` others.

    A number in K/V takes two bytes; unknown attention counts as full attention.
    """
    config, headers = checkpoint.config, checkpoint.headers
    text = text_config(config)
    lm_heads = frozenset(("lm_head", "output"))
    has_head = any(lm_heads & set(name.split(".")) for name in headers.tensors)
    read = experts = held = 0.0
    for name, tensor in headers.tensors.items():
        parts = frozenset(name.split("."))
        size = _loaded_bytes(name, tensor, checkpoint)
        share = size * _share_read(parts, config, text, has_head=has_head)
        read += share
        held += size
        experts += share if parts & EXPERTS else 0
    layers, window = kv_layers(text), min(context, target_shape(text).window or context)
    return DecodeSizes(
        read=read,
        held=held,
        format=_format(config, headers.tensors),
        experts=experts,
        layers=integer(text, "num_hidden_layers"),
        kv_read=layers.read * context + layers.window_read * window,
        kv_held=layers.held * context + layers.window_held * window,
    )


def is_dequantized(config: Config) -> bool:
    """Return True if the weights of a GGUF file become dense float32: on a CPU, if they fit its memory.

    A CPU reads dense weights once for all rows of a pass. It unpacks quantized weights again for each row,
    and is slow with types other than float32.
    """
    return _is_on_cpu(config) and 4 * int(config.get("gguf_weights", 0)) < memory_for_models()


def gguf_dtype(config: Config) -> Any:
    """Return the type of all floats of a GGUF file once it is loaded; None for other checkpoints."""
    if "gguf" not in config:
        return None
    return "float32" if _is_on_cpu(config) else config.get("dtype")


def _is_on_cpu(config: Config) -> bool:
    if "gguf" not in config:
        return False
    try:
        import mlx.core as mx
    except ImportError:  # models are listed without it
        return False
    return mx.default_device().type == mx.cpu


def _loaded_bytes(name: str, tensor: TensorInfo, checkpoint: Checkpoint) -> int:
    """Return the bytes of a tensor in memory. FP8 is dequantized; images and sound are not loaded."""
    tensors, config = checkpoint.headers.tensors, checkpoint.config
    if not is_of_language(name):
        return 0
    if is_dequantized(config):
        return 4 * parameters_of(name, tensor, tensors, config)
    if (dtype := gguf_dtype(config)) and is_float(tensor.dtype):
        return tensor.size * (4 if dtype == "float32" else 2)
    if not checkpoint.is_fp8:
        return tensor.nbytes
    if name.endswith(SCALES):
        return 0
    is_wide = "float32" in str(stated_dtype(config))
    return tensor.size * (4 if is_wide else 2) if tensor.dtype == FP8 else tensor.nbytes


def target_shape(config: Config) -> TargetShape:
    """Return the shape of a target with this config.json, as drafters see it."""
    text = text_config(config)
    heads = integer(text, "num_attention_heads")
    kv_heads = integer(text, "num_key_value_heads") or heads
    hidden, head_dim = integer(text, "hidden_size"), integer(text, "head_dim")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    return TargetShape(
        hidden,
        vocab_size(config),
        integer(text, "num_hidden_layers"),
        integer(text, "sliding_window") if text.get("use_sliding_window") is not False else None,
        kv_heads,
        head_dim,
        integer(text, "num_global_key_value_heads") or kv_heads,
        integer(text, "global_head_dim") or head_dim,
    )


def _share_read(parts: frozenset[str], config: Config, text: Config, *, has_head: bool) -> float:
    if "embed_tokens_per_layer" in parts:
        return 0.0  # a token reads one row of the table
    if parts & EXPERTS:
        num_experts = ("num_experts", "num_local_experts", "n_routed_experts")
        active_experts = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token")
        return _ratio(integer(text, *active_experts), integer(text, *num_experts))
    embeddings = frozenset(("embed_tokens", "wte", "tok_embeddings", "embeddings"))
    if not parts & embeddings:
        return 1.0
    if has_head:
        return 0.0
    if config.get("use_ordered_embeddings"):  # a head that reads only the tokens of the best clusters
        clusters = integer(config, "num_centroids")
        return _ratio(integer(config, "centroid_intermediate_top_k"), clusters)
    return 1.0


def _ratio(part: int | None, whole: int | None) -> float:
    """Return part / whole, at most 1, and 1 if the config lacks one of them."""
    return min(part / whole, 1.0) if part and whole else 1.0


def _format(config: Config, tensors: Tensors) -> WeightFormat:
    settings = config.get("quantization") or config.get("quantization_config")
    if isinstance(settings, Mapping):
        bits, group_size = integer(settings, "bits"), integer(settings, "group_size")
        if bits and group_size and bits > 0 < group_size:
            return WeightFormat(bits, group_size, str(settings.get("mode", "affine")))
    dtype = common_dtype(tensors)
    return WeightFormat(BITS[dtype] if dtype in DTYPE_NAMES and dtype != "F8_E4M3" else 16)


@dataclass(frozen=True)
class KVLayers:
    """The bytes of K and V of one token, of all layers that keep every position and of those with a window.

    `read` counts layers that read the K/V of another one, too.
    """

    read: float = 0.0
    held: float = 0.0
    window_read: float = 0.0
    window_held: float = 0.0


def kv_layers(text: Config, kv_bits: int | None = None) -> KVLayers:
    """Return the bytes of a token's K/V, 0 if not known. Unknown attention counts as full attention.

    With `kv_bits` all full-attention layers but the last are quantized (model/caches.py), in groups of 64.
    """
    shape = target_shape(text)
    if shape.layers is None or shape.kv_heads is None or shape.head_dim is None:
        return KVLayers()
    full = 2.0 * (shape.global_kv_heads or 0) * (shape.global_head_dim or 0)  # numbers in K and V
    if rank := integer(text, "kv_lora_rank"):  # MLA keeps one latent vector for all heads
        full = rank + (integer(text, "qk_rope_head_dim") or 0)
    kinds, owners = text.get("layer_types"), shape.layers - (integer(text, "num_kv_shared_layers") or 0)
    owners = max(owners, 0)
    if isinstance(kinds, list):
        read, held = kinds.count("full_attention"), kinds[:owners].count("full_attention")
        windows = [each.count("sliding_attention") for each in (kinds, kinds[:owners])]
    else:  # all layers have full attention, or each n-th has
        interval = integer(text, "full_attention_interval") or 1
        read, held, windows = shape.layers // interval, owners // interval, [0, 0]
    quantized = 0 if kv_bits is None else max(held - 1, 0)
    sliding = 2 * 2.0 * shape.kv_heads * shape.head_dim
    return KVLayers(
        2 * full * read,
        full * (quantized * ((kv_bits or 0) / 8 + 4 / 64) + 2 * (held - quantized)),
        sliding * windows[0],
        sliding * windows[1],
    )
