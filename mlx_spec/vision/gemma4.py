"""The vision tower of Gemma 4 E2B, E4B, 26B-A4B and 31B, and the embedder of 12B, which has no tower.

Parameter names come from the checkpoints, formulas from transformers' `gemma4` and `gemma4_unified`.
Pictures are encoded one at a time and without padding, so no mask is needed.
"""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_spec.errors import InvalidValue
from mlx_spec.prompt import Sight
from mlx_spec.vision.family import Config, Family, Rows, Words, in_steps
from mlx_spec.vision.pixels import Grid, Patches, Pixels

# What transformers' config classes say where config.json is silent.
TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "use_clipped_linears": False,
    "standardize": False,
}


class ClippedLinear(nn.Module):
    """A linear layer whose input and output stay in the ranges seen in training."""

    def __init__(self, inputs: int, outputs: int, *, clips: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self._clips = clips
        if clips:
            self.input_min = self.output_min = mx.array(-math.inf)
            self.input_max = self.output_max = mx.array(math.inf)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply it to [.., D]."""
        if not self._clips:
            return self.linear(x)
        x = self.linear(mx.clip(x, self.input_min, self.input_max))
        return mx.clip(x, self.output_min, self.output_max)


class VisionAttention(nn.Module):
    """Attention in which every patch sees all others. Half of each head rotates by x, half by y."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.eps = config["rms_norm_eps"]
        width, size, clips = config["hidden_size"], config["head_dim"], config["use_clipped_linears"]
        self.q_proj = ClippedLinear(width, self.heads * size, clips=clips)
        self.k_proj = ClippedLinear(width, self.kv_heads * size, clips=clips)
        self.v_proj = ClippedLinear(width, self.kv_heads * size, clips=clips)
        self.o_proj = ClippedLinear(self.heads * size, width, clips=clips)
        self.q_norm = nn.RMSNorm(size, eps=self.eps)
        self.k_norm = nn.RMSNorm(size, eps=self.eps)

    def __call__(self, x: mx.array, turn: tuple[mx.array, mx.array]) -> mx.array:
        """Attend over [N, D]. `turn` is cos and sin, [N, head_dim]."""
        N = x.shape[0]
        q = _rotated(self.q_norm(self.q_proj(x).reshape(N, self.heads, -1)), *turn)
        k = _rotated(self.k_norm(self.k_proj(x).reshape(N, self.kv_heads, -1)), *turn)
        v = mx.fast.rms_norm(self.v_proj(x).reshape(N, self.kv_heads, -1), None, self.eps)
        q, k, v = (array.transpose(1, 0, 2)[None] for array in (q, k, v))
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self.o_proj(out[0].transpose(1, 0, 2).reshape(N, -1))


def _rotated(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate [N, H, D] by cos and sin [N, D]: the halves of D apart, each half by half."""
    a, b, c, d = mx.split(x, 4, axis=-1)
    return x * cos[:, None] + mx.concatenate([-b, a, -d, c], axis=-1) * sin[:, None]


class VisionMLP(nn.Module):
    """A gated linear unit."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        clips = config["use_clipped_linears"]
        self.gate_proj = ClippedLinear(width, inner, clips=clips)
        self.up_proj = ClippedLinear(width, inner, clips=clips)
        self.down_proj = ClippedLinear(inner, width, clips=clips)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class VisionLayer(nn.Module):
    """Attention and MLP, with norms before and after both."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn, self.mlp = VisionAttention(config), VisionMLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps=eps)

    def __call__(self, x: mx.array, turn: tuple[mx.array, mx.array]) -> mx.array:
        """Apply it to [N, D]."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), turn))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x


class VisionEncoder(nn.Module):
    """The layers of the tower."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = [VisionLayer(config) for _ in range(config["num_hidden_layers"])]


class PatchEmbedder(nn.Module):
    """Turns patches into vectors, with a learned position for x and one for y."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_proj = nn.Linear(3 * config["patch_size"] ** 2, config["hidden_size"], bias=False)
        self.position_embedding_table = mx.zeros(
            (2, config["position_embedding_size"], config["hidden_size"])
        )

    def __call__(self, patches: mx.array, positions: mx.array) -> mx.array:
        """Return [N, D] of patches [N, P] in 0 to 1; `positions` are their x and y, [N, 2]."""
        table = self.position_embedding_table
        x: mx.array = self.input_proj((2 * (patches - 0.5)).astype(table.dtype))
        return x + (table[0][positions[:, 0]] + table[1][positions[:, 1]])


class VisionModel(nn.Module):
    """The tower: embedder, encoder, and the average over squares of patches."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patch_embedder, self.encoder = PatchEmbedder(config), VisionEncoder(config)
        self._width, self._standardizes = config["hidden_size"], config["standardize"]
        self._half = config["head_dim"] // 2
        self._theta = (config.get("rope_parameters") or {}).get("rope_theta", 100.0)
        if self._standardizes:
            self.std_bias, self.std_scale = mx.zeros((self._width,)), mx.ones((self._width,))

    def turn(self, positions: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Return cos and sin of the rotation at x and y, [N, head_dim]: x, x, y, y."""
        speeds = 1.0 / self._theta ** (mx.arange(0, self._half, 2, dtype=mx.float32) / self._half)
        angles = positions[..., None].astype(mx.float32) * speeds  # [N, 2, head_dim / 4]
        angles = mx.concatenate([angles, angles], axis=-1).reshape(positions.shape[0], -1)
        return mx.cos(angles).astype(dtype), mx.sin(angles).astype(dtype)

    def pooled(self, x: mx.array, grid: Grid, pool: int) -> mx.array:
        """Return the average over each square of a grid, standardized, [rows * columns, D]."""
        rows, columns = grid
        squares = x.astype(mx.float32).reshape(rows, pool, columns, pool, -1).mean(axis=(1, 3))
        averages = squares.reshape(rows * columns, -1).astype(x.dtype).astype(mx.float32)
        averages = averages * math.sqrt(self._width)  # exceeds the range of float16
        if self._standardizes:
            averages = (averages - self.std_bias.astype(mx.float32)) * self.std_scale.astype(mx.float32)
        return averages.astype(x.dtype)


class Projection(nn.Module):
    """Turns vectors of the tower into rows of the language model."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.embedding_projection = nn.Linear(inputs, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply it to [N, D]."""
        return self.embedding_projection(mx.fast.rms_norm(x, None, self.eps))


class Gemma4Tower(nn.Module):
    """Encodes pictures for E2B, E4B, 26B-A4B and 31B."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        config = {**TOWER, **config}
        self._pool = config["pooling_kernel_size"]
        self.vision_tower = VisionModel(config)
        self.embed_vision = Projection(config["hidden_size"], width, config["rms_norm_eps"])

    def encode(self, patches: Pixels, grid: Grid) -> Rows:
        """Compute the rows of a prepared picture, [rows * columns, D]; yield after some layers."""
        tower = self.vision_tower
        positions = _positions(grid[0] * self._pool, grid[1] * self._pool)
        x = tower.patch_embedder(mx.array(patches).astype(mx.float32) / 255, positions)
        turn = tower.turn(positions, x.dtype)
        x = yield from in_steps(tower.encoder.layers, x, turn)
        return self.embed_vision(tower.pooled(x, grid, self._pool))


class PatchNorms(nn.Module):
    """The embedder of 12B: large patches, three norms and two learned positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        side = config["patch_size"] * config["pooling_kernel_size"]
        inputs, width = 3 * side**2, config["mm_embed_dim"]
        self.patch_ln1, self.patch_ln2, self.pos_norm = (nn.LayerNorm(n) for n in (inputs, width, width))
        self.patch_dense = nn.Linear(inputs, width)
        self.pos_embedding = mx.zeros((config["mm_posemb_size"], 2, width))

    def __call__(self, patches: mx.array, positions: mx.array) -> mx.array:
        """Return [N, D] of patches [N, P] in 0 to 1; `positions` are their x and y, [N, 2]."""
        table = self.pos_embedding
        x: mx.array = self.patch_ln2(self.patch_dense(self.patch_ln1(patches.astype(table.dtype))))
        x = self.pos_norm(x + (table[positions[:, 0], 0] + table[positions[:, 1], 1]))
        return x


class Gemma4Embedder(nn.Module):
    """Encodes pictures for 12B."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        # What transformers' config class says where config.json is silent.
        usual = {"patch_size": 16, "pooling_kernel_size": 3, "mm_posemb_size": 1120, "rms_norm_eps": 1e-6}
        config = {**usual, "mm_embed_dim": width, **config}
        self.vision_embedder = PatchNorms(config)
        self.embed_vision = Projection(config["mm_embed_dim"], width, config["rms_norm_eps"])

    def encode(self, patches: Pixels, grid: Grid) -> Rows:
        """Compute the rows of a prepared picture, [rows * columns, D], in one step."""
        x = self.vision_embedder(mx.array(patches).astype(mx.float32) / 255, _positions(*grid))
        yield x
        return self.embed_vision(x)


def _positions(rows: int, columns: int) -> mx.array:
    """Return x and y of each patch of a grid, [rows * columns, 2]."""
    y, x = np.mgrid[0:rows, 0:columns]
    return mx.array(np.stack([x.ravel(), y.ravel()], axis=-1).astype(np.int32))


# --- the families


def _patches(config: Config, processor: Config, *, pools: bool) -> Patches:
    """Return how pictures are cut. With `pools`, a square has several patches, which are averaged."""
    vision = {**TOWER, **config["vision_config"]}
    patch, side = vision["patch_size"], vision["patch_size"] * vision["pooling_kernel_size"]
    return Patches(side, patch if pools else side, processor.get("max_soft_tokens") or 280)


def _sight(text: Config) -> Sight:
    """Return who sees the rows of a picture: later ones do in sliding layers, where text_config says so.

    Raises InvalidValue for a value that transformers does not know.
    """
    bidirectional = text.get("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):
        raise InvalidValue(f"its use_bidirectional_attention is {bidirectional}, which is not known here")
    root = float(text["hidden_size"]) ** 0.5
    return Sight(text.get("pad_token_id") or 0, root, "sliding" if bidirectional == "vision" else None)


def _words(row: str, begin: str, end: str) -> Words:
    return Words(row, row, begin, end)


_TOKENS = {"image_token": 258_880, "boi_token": 255_999, "eoi_token": 258_882}
WITH_TOWER = Family(Gemma4Tower, partial(_patches, pools=True), _sight, _TOKENS, _words)
WITHOUT_TOWER = Family(Gemma4Embedder, partial(_patches, pools=False), _sight, _TOKENS, _words)
