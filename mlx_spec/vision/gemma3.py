"""The vision tower of Gemma 3: SigLIP and a projector. Formulas come from transformers' `gemma3`."""

from __future__ import annotations

import math
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_spec.prompt import Sight
from mlx_spec.vision.family import Config, Family, Rows, Words, in_steps
from mlx_spec.vision.pixels import Grid, Pixels, Square

# What transformers' config class says where config.json is silent.
SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}


class SiglipAttention(nn.Module):
    """Attention in which every patch sees all others."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def __call__(self, x: mx.array) -> mx.array:
        """Attend over [N, D]."""
        N, D = x.shape
        q, k, v = (
            project(x).reshape(N, self.heads, -1).transpose(1, 0, 2)[None]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=(D // self.heads) ** -0.5)
        return self.out_proj(out[0].transpose(1, 0, 2).reshape(N, D))


class SiglipMLP(nn.Module):
    """Two linear layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(nn.gelu_approx(self.fc1(x)))


class SiglipLayer(nn.Module):
    """Attention and MLP, with a norm before each."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.self_attn, self.mlp = SiglipAttention(config), SiglipMLP(config)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply it to [N, D]."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipEncoder(nn.Module):
    """The layers of the tower."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = [SiglipLayer(config) for _ in range(config["num_hidden_layers"])]


class SiglipEmbeddings(nn.Module):
    """Turns patches into vectors, with a learned position."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size, width = config["patch_size"], config["hidden_size"]
        self.patch_embedding = nn.Conv2d(3, width, kernel_size=size, stride=size)
        self.position_embedding = nn.Embedding((config["image_size"] // size) ** 2, width)

    def __call__(self, pixels: mx.array) -> mx.array:
        """Return [N, D] of [H, W, 3] in -1 to 1."""
        x: mx.array = self.patch_embedding(pixels.astype(self.patch_embedding.weight.dtype)[None])
        x = x.reshape(-1, x.shape[-1])
        x = x + self.position_embedding(mx.arange(x.shape[0]))
        return x


class Siglip(nn.Module):
    """The tower: embeddings, encoder, norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings, self.encoder = SiglipEmbeddings(config), SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])


class Projector(nn.Module):
    """Turns averages over squares of patches into rows of the language model."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.mm_input_projection_weight = mx.zeros((inputs, outputs))
        self.mm_soft_emb_norm = nn.RMSNorm(inputs, eps=eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply it to [N, D]. The norm's weight is stored as the difference to 1."""
        norm = self.mm_soft_emb_norm
        x = mx.fast.rms_norm(x, 1 + norm.weight.astype(mx.float32), norm.eps).astype(x.dtype)
        return x @ self.mm_input_projection_weight


class Gemma3Tower(nn.Module):
    """Encodes pictures for Gemma 3."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        config = {**SIGLIP, **config}
        self.vision_tower = Siglip(config)
        self.multi_modal_projector = Projector(config["hidden_size"], width, config["layer_norm_eps"])

    def encode(self, pixels: Pixels, grid: Grid) -> Rows:
        """Compute the rows of a prepared picture, [rows * columns, D]; yield after some layers."""
        tower, (rows, columns) = self.vision_tower, grid
        x = tower.embeddings((mx.array(pixels).astype(mx.float32) / 255 - 0.5) / 0.5)
        x = yield from in_steps(tower.encoder.layers, x)
        x = tower.post_layernorm(x)
        pool = math.isqrt(x.shape[0] // (rows * columns))
        x = x.reshape(rows, pool, columns, pool, -1).mean(axis=(1, 3)).reshape(rows * columns, -1)
        return self.multi_modal_projector(x)


# --- the family


def _square(config: Config, processor: Config) -> Square:
    """Return the one size of pictures, and the grid of their rows."""
    side = math.isqrt(config.get("mm_tokens_per_image") or 256)
    return Square({**SIGLIP, **config["vision_config"]}["image_size"], (side, side))


def _sight(text: Config) -> Sight:
    """Return who sees the rows of a picture: later ones do in all layers.

    mlx-lm scales embeddings by the root of the width in bfloat16.
    """
    bits = np.float32(text["hidden_size"] ** 0.5).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return Sight(text.get("pad_token_id") or 0, float(rounded.view(np.float32)), "all")


def _words(row: str, begin: str, end: str) -> Words:
    """Return the words: the template writes `begin` alone, and transformers adds the rest."""
    return Words(begin, row, f"\n\n{begin}", f"{end}\n\n")


def _renamed(name: str, array: mx.array) -> tuple[str, mx.array]:
    """Return a tensor in the layout of MLX, without a name that most checkpoints put around the tower."""
    name = re.sub(r"^vision_tower\.vision_model\.", "vision_tower.", name)
    if name.endswith("patch_embedding.weight") and array.shape[-1] != 3:  # [D, 3, H, W] of torch
        array = array.transpose(0, 2, 3, 1)
    return name, array


FAMILY = Family(
    Gemma3Tower,
    _square,
    _sight,
    {"image_token": 262_144, "boi_token": 255_999, "eoi_token": 256_000},
    _words,
    _renamed,
)
