"""The vision tower of Qwen3.5 and Qwen3.6. Formulas follow transformers' `qwen3_5`.

Pictures are encoded one at a time. Patches come in the order in which the merger joins neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_spec.errors import InvalidValue
from mlx_spec.prompt import Sight
from mlx_spec.vision.family import Config, Family, Rows, Words
from mlx_spec.vision.pixels import Grid, MergedPatches, Pixels

# What transformers' config class says where config.json is silent.
TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}


class PatchEmbed(nn.Module):
    """Turns patches into vectors. A picture is a film of equal frames."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        frames, size = config["temporal_patch_size"], config["patch_size"]
        self.proj = nn.Conv3d(3, config["hidden_size"], (frames, size, size), (frames, size, size))

    def __call__(self, pixels: Pixels) -> mx.array:
        """Return [N, D] of patches [N, size * size * 3]."""
        weight = self.proj.weight
        x = ((mx.array(pixels).astype(mx.float32) / 255 - 0.5) / 0.5).astype(weight.dtype)
        film = mx.concatenate([x] * weight.shape[1], axis=-1)
        return film @ weight.reshape(weight.shape[0], -1).T + self.proj.bias


class Attention(nn.Module):
    """Attention in which every patch sees all others. Heads rotate by row and column."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads = config["num_heads"]
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def project(self, x: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values [1, H, N, D / H] of [N, D]."""
        q, k, v = self.qkv(x).reshape(x.shape[0], 3, self.heads, -1).transpose(1, 2, 0, 3)[:, None]
        return _rotated(q, cos, sin), _rotated(k, cos, sin), v

    def __call__(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """Return [T, D] for T of the queries."""
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)
        return self.proj(out[0].transpose(1, 0, 2).reshape(q.shape[2], -1))


def _rotated(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate [1, H, N, D] in float32, each dimension of the first half with one of the second."""
    wide = x.astype(mx.float32)
    first, second = mx.split(wide, 2, axis=-1)
    return (wide * cos + mx.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_fc2(nn.gelu_approx(self.linear_fc1(x)))


class Block(nn.Module):
    """Attention and MLP, with a norm before each."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = Attention(config), MLP(width, config["intermediate_size"])

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array, most: int = 2**23) -> Rows:
        """Apply it to [N, D] in parts of at most `most` pairs of patches; yield each.

        A photo of 12 million pixels has 48,000 patches, which is too much for one turn of its prompt. MLX has
        a fused kernel for few sizes of a head, and holds all scores for others.
        """
        q, k, v = self.attn.project(self.norm1(x), cos, sin)
        outputs, rows = list[mx.array](), max(most // x.shape[0], 1)
        for low in range(0, x.shape[0], rows):
            attended = x[low : low + rows] + self.attn(q[:, :, low : low + rows], k, v)
            outputs.append(attended + self.mlp(self.norm2(attended)))
            yield outputs[-1]
        return mx.concatenate(outputs)


class Merger(nn.Module):
    """Joins neighbouring patches to rows of the language model."""

    def __init__(self, inputs: int, joined: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs, eps=1e-6)
        self.linear_fc1 = nn.Linear(inputs * joined, inputs * joined)
        self.linear_fc2 = nn.Linear(inputs * joined, outputs)
        self._joined = joined

    def __call__(self, x: mx.array) -> mx.array:
        """Return [N / joined, outputs]."""
        x = self.norm(x).reshape(x.shape[0] // self._joined, -1)
        return self.linear_fc2(nn.gelu(self.linear_fc1(x)))


class QwenTower(nn.Module):
    """Encodes pictures for Qwen3.5."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self._config = config = {**TOWER, **config}
        inner = config["hidden_size"]
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config["num_position_embeddings"], inner)
        self.blocks = [Block(config) for _ in range(config["depth"])]
        self.merger = Merger(inner, config["spatial_merge_size"] ** 2, width)

    def encode(self, pixels: Pixels, grid: Grid) -> Rows:
        """Compute the rows of a prepared picture, [rows * columns, D]; yield after parts of layers."""
        merge = self._config["spatial_merge_size"]
        height, width = grid[0] * merge, grid[1] * merge
        blocks = np.indices((height, width)).reshape(2, grid[0], merge, grid[1], merge)
        y, x = blocks.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        embedded = self.patch_embed(pixels)
        embedded = embedded + self._position(y, height, x, width).astype(embedded.dtype)
        head = self._config["hidden_size"] // self._config["num_heads"]
        theta = (self._config.get("rope_parameters") or {}).get("rope_theta", 10_000.0)
        speeds = theta ** -(mx.arange(0, head // 2, 2, dtype=mx.float32) / (head // 2))
        angles = mx.concatenate([mx.array(at)[:, None].astype(mx.float32) * speeds for at in (y, x)] * 2, -1)
        cos, sin = mx.cos(angles), mx.sin(angles)
        for block in self.blocks:
            embedded = yield from block(embedded, cos, sin)
        return self.merger(embedded)

    def _position(self, y: Any, height: int, x: Any, width: int) -> mx.array:
        """Return the learned positions [N, D], of a square grid that is stretched over the picture."""
        side = math.isqrt(self._config["num_position_embeddings"])
        index, weights = [], []
        for rows, share in _neighbours(y, height, side):
            for columns, weight in _neighbours(x, width, side):
                index.append(rows * side + columns)
                weights.append(share * weight)
        learned: mx.array = self.pos_embed(mx.array(np.stack(index)))
        return (learned * mx.array(np.stack(weights))[..., None]).sum(axis=0)


def _neighbours(index: Any, size: int, side: int) -> Sequence[tuple[Any, Any]]:
    """Return the two learned positions around each place, and their weights; the ends are aligned."""
    position = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(position)
    neighbours = []
    for neighbour in (low, low + 1):
        weight = np.maximum(1 - np.abs(position - neighbour), 0).astype(np.float32)
        neighbours.append((np.clip(neighbour, 0, side - 1).astype(np.int64), weight))
    return neighbours


# --- the family


def _preparation(config: Config, processor: Config) -> MergedPatches:
    """Return how pictures are resized. Raises InvalidValue for what is not done here."""
    tower = {**TOWER, **config["vision_config"]}
    same = {"patch_size": "patch_size", "merge_size": "spatial_merge_size"}
    same["temporal_patch_size"] = "temporal_patch_size"
    wanted = {key: tower[name] for key, name in same.items()} | {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    for key, value in wanted.items():
        if (stated := processor.get(key, value)) != value:
            raise InvalidValue(f"its processor has {key} {stated}, where {value} is read here")
    if tower["hidden_act"] != TOWER["hidden_act"]:
        raise InvalidValue(f"its vision tower has hidden_act {tower['hidden_act']}, which is not done here")
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or 2**16  # as published
    most = processor.get("max_pixels") or size.get("longest_edge") or 2**24
    return MergedPatches(tower["patch_size"], tower["spatial_merge_size"], least, most)


def _sight(text: Config) -> Sight:
    """Return how rows are read: causally, at their places in the plane.

    Time, y and x take the rotary frequencies in turn, y and x as many as `mrope_section` says.
    """
    rope = text.get("rope_parameters") or {}
    dims = int(text["head_dim"] * rope.get("partial_rotary_factor", 0.25))
    _, y, x = rope.get("mrope_section") or (11, 11, 10)
    axes = [0] * (dims // 2)
    for axis, count in ((1, y), (2, x)):
        for frequency in range(axis, min(3 * count, len(axes)), 3):
            axes[frequency] = axis
    return Sight(text.get("pad_token_id") or 0, axes=tuple(axes))


def _words(row: str) -> Words:
    """Return the words: the template has those before and after a picture itself."""
    return Words(row, row, "", "")


def _renamed(name: str, array: mx.array) -> tuple[str, mx.array]:
    """Return a tensor in the layout of MLX, without the name of the tower."""
    if name.endswith("patch_embed.proj.weight") and array.shape[-1] != 3:  # [D, 3, frames, H, W] of torch
        array = array.transpose(0, 2, 3, 4, 1)
    return name.removeprefix("vision_tower."), array


FAMILY = Family(QwenTower, _preparation, _sight, {"image_token": 248_056}, _words, _renamed)
