"""A decoder layer in float64 numpy, over whole sequences: the reference for cached networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

Tensors = Mapping[str, mx.array]


@dataclass(frozen=True)
class Shape:
    """The shape of the attention of a layer."""

    heads: int
    groups: int
    head: int
    theta: float = 10000.0
    eps: float = 1e-6
    frequencies: tuple[float, ...] = ()  # of a scaled rope, instead of those of theta


def array(tensors: Tensors, name: str) -> np.ndarray:
    return np.array(tensors[name].astype(mx.float32), dtype=np.float64)


def norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x: np.ndarray, positions: np.ndarray, shape: Shape) -> np.ndarray:
    """[T, H, Dk], the first half of a head against the second."""
    half = x.shape[-1] // 2
    frequencies = shape.frequencies or 1 / shape.theta ** (np.arange(half) / half)
    angles = positions[:, None] * np.array(frequencies)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(
    x: np.ndarray, tensors: Tensors, prefix: str, shape: Shape, positions: np.ndarray
) -> np.ndarray:
    """Causal, [T, inputs] to [T, D]."""
    T = x.shape[0]
    q, k, v = ((x @ array(tensors, f"{prefix}self_attn.{part}_proj.weight").T) for part in "qkv")
    q = rotate(q.reshape(T, shape.heads, shape.head), positions, shape)
    k = rotate(k.reshape(T, shape.groups, shape.head), positions, shape)
    v = v.reshape(T, shape.groups, shape.head)
    k, v = (np.repeat(a, shape.heads // shape.groups, axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(shape.head)
    scores = np.where(np.tril(np.ones((T, T))) > 0, scores, -np.inf)
    out = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(T, -1)
    return out @ array(tensors, f"{prefix}self_attn.o_proj.weight").T


def finish(
    residual: np.ndarray, attended: np.ndarray, tensors: Tensors, prefix: str, eps: float
) -> np.ndarray:
    """The residual connection and the gated MLP behind an attention."""
    x = residual + attended
    y = norm(x, array(tensors, f"{prefix}post_attention_layernorm.weight"), eps)
    gate, up = (y @ array(tensors, f"{prefix}mlp.{part}_proj.weight").T for part in ("gate", "up"))
    return x + (silu(gate) * up) @ array(tensors, f"{prefix}mlp.down_proj.weight").T
