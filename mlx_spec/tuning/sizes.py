"""What a checkpoint makes decoding read, from its config and the headers of its weights: none is loaded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_spec.checkpoint import AGAIN, MAX_HEADER, WEIGHTS, check_weights, read_config
from mlx_spec.errors import BadCheckpoint

# Parts of tensor names, between dots.
UNREAD = frozenset(  # not run while text is decoded
    "vision_tower audio_tower vision_model vision_encoder visual audio_encoder embed_vision embed_audio "
    "multi_modal_projector".split()
)
EXPERTS = frozenset(("experts", "switch_mlp", "switch_glu"))
EMBEDDINGS = frozenset(("embed_tokens", "wte", "tok_embeddings", "embeddings"))
PER_LAYER = "embed_tokens_per_layer"
HEADS = frozenset(("lm_head", "output"))

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token")
CLUSTERS = ("centroid_intermediate_top_k", "num_centroids")
LAYERS = ("num_hidden_layers",)
KV_HEADS = ("num_key_value_heads", "num_attention_heads")
KV_BYTES = 2
DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}


@dataclass(frozen=True)
class Format:
    """How weights are stored."""

    bits: int
    group_size: int | None = None  # weights that share a scale; None: not quantized
    mode: str = "affine"  # or a floating-point one: mxfp4, mxfp8, nvfp4

    @property
    def bytes_per_weight(self) -> float:
        """Scales included: two of 16 bits a group in affine mode, one of 8 in the others."""
        if self.group_size is None:
            return self.bits / 8
        return self.bits / 8 + (4 if self.mode == "affine" else 1) / self.group_size


@dataclass(frozen=True)
class Model:
    """What decoding reads and holds of a model, in bytes."""

    read: float  # weights for one token, the experts it goes through included
    held: float  # all weights
    format: Format
    experts: float = 0.0  # the part of `read` that is experts: other ones for every row
    layers: int | None = None  # None: not known
    kv_read: float = 0.0  # K/V for one token, at the context in question
    kv_held: float = 0.0


@dataclass(frozen=True)
class _Tensor:
    parts: frozenset[str]  # of its name
    dtype: str
    size: int  # bytes


def model_of(folder: Path, context: int) -> Model:
    """What one token reads of the checkpoint in `folder`, with `context` tokens before it.

    K/V count two bytes a number, and attention of an unnamed kind as full. Raises NotFound or BadCheckpoint.
    """
    config = read_config(folder)
    check_weights(folder)
    tensors = [tensor for file in sorted(folder.glob(WEIGHTS)) for tensor in _tensors(file)]
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    counted = [(tensor, _share(tensor, tensors, config, text)) for tensor in tensors]
    kv_read, kv_held = _kv(text, context)
    return Model(
        read=sum(share * tensor.size for tensor, share in counted),
        experts=sum(share * tensor.size for tensor, share in counted if tensor.parts & EXPERTS),
        held=sum(tensor.size for tensor in tensors),
        format=_format(config, tensors),
        layers=_integer(text, LAYERS),
        kv_read=kv_read,
        kv_held=kv_held,
    )


def requantized(model: Model, format: Format) -> Model:
    """The same model with all its weights in another format."""
    scale = format.bytes_per_weight / model.format.bytes_per_weight
    return replace(
        model,
        read=scale * model.read,
        experts=scale * model.experts,
        held=scale * model.held,
        format=format,
    )


def header(file: Path) -> bytes:
    """The header of a safetensors file, JSON. Raises BadCheckpoint."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            content = stream.read(length) if 0 < length <= MAX_HEADER else b""
    except OSError as error:
        raise BadCheckpoint(f"{file} cannot be read ({error.strerror})") from error
    if not content or len(content) < length:
        raise BadCheckpoint(f"{file} is not a whole safetensors file: {AGAIN}")
    return content


def _tensors(file: Path) -> list[_Tensor]:
    found = []
    try:
        for name, entry in json.loads(header(file)).items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            found.append(_Tensor(frozenset(name.split(".")), str(entry["dtype"]), int(end) - int(start)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"{file} has a damaged header: {AGAIN}") from error
    return found


def _share(
    tensor: _Tensor, tensors: list[_Tensor], config: Mapping[str, Any], text: Mapping[str, Any]
) -> float:
    """The part of a tensor that one token reads."""
    if tensor.parts & UNREAD or PER_LAYER in tensor.parts:
        return 0.0  # of a table one row is looked up, which is next to nothing
    if tensor.parts & EXPERTS:
        return _ratio(_integer(text, ACTIVE_EXPERTS), _integer(text, NUM_EXPERTS))
    if not tensor.parts & EMBEDDINGS:
        return 1.0
    if any(other.parts & HEADS for other in tensors):
        return 0.0
    if config.get("use_ordered_embeddings"):  # a head that looks only at the tokens of the best clusters
        return _ratio(_integer(config, CLUSTERS[:1]), _integer(config, CLUSTERS[1:]))
    return 1.0


def _ratio(part: int | None, whole: int | None) -> float:
    """part / whole, at most 1; 1 where the config does not say."""
    return min(part / whole, 1.0) if part and whole else 1.0


def _integer(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def _format(config: Mapping[str, Any], tensors: list[_Tensor]) -> Format:
    """How most of the weights are stored."""
    found = config.get("quantization") or config.get("quantization_config")
    if isinstance(found, dict):
        bits, group_size, mode = found.get("bits"), found.get("group_size"), found.get("mode", "affine")
        if isinstance(bits, int) and isinstance(group_size, int) and bits > 0 < group_size:
            return Format(bits, group_size, str(mode))
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.size
    dtype = max(sizes, key=sizes.__getitem__, default="BF16")
    return Format(DTYPE_BITS.get(dtype, 16))


def _kv(text: Mapping[str, Any], context: int) -> tuple[float, float]:
    """Bytes of K/V that one token reads, and that are held; none where the config lacks the shapes."""
    layers, heads, size = _integer(text, LAYERS), _integer(text, KV_HEADS), _integer(text, ("head_dim",))
    hidden, queries = _integer(text, ("hidden_size",)), _integer(text, ("num_attention_heads",))
    if size is None and hidden and queries:
        size = hidden // queries
    if layers is None or heads is None or size is None:
        return 0.0, 0.0
    full_heads = _integer(text, ("num_global_key_value_heads",)) or heads
    full_size = _integer(text, ("global_head_dim",)) or size
    window = _integer(text, ("sliding_window",))
    rows = {  # numbers in K, and as many in V
        "full_attention": context * full_heads * full_size,
        "sliding_attention": min(context, window or context) * heads * size,
    }
    kinds = text.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else ["full_attention"] * layers
    read = [2 * KV_BYTES * rows.get(str(kind), 0) for kind in kinds]
    owners = layers - (_integer(text, ("num_kv_shared_layers",)) or 0)
    return float(sum(read)), float(sum(read[:owners]))
