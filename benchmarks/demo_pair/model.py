"""The demo target in PyTorch: Gemma 4 text (sliding and full layers, KV sharing, PLE), for training only."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLIDING, FULL = "sliding_attention", "full_attention"
KeyValue = tuple[Tensor, Tensor]  # each [B, n_kv, T, head_dim]


@dataclass(frozen=True)
class Shape:
    """The sizes of the demo target; the names are those of Gemma 4's `text_config`."""

    vocab_size: int = 2816
    hidden_size: int = 192
    intermediate_size: int = 448
    num_hidden_layers: int = 6
    layer_types: tuple[str, ...] = (SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL)
    num_kv_shared_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    head_dim: int = 64
    global_head_dim: int = 128
    hidden_size_per_layer_input: int = 32
    sliding_window: int = 64
    use_double_wide_mlp: bool = True
    final_logit_softcapping: float = 30.0

    def width(self, layer_type: str) -> int:
        """Return the head dimension of a layer type."""
        return self.head_dim if layer_type == SLIDING else self.global_head_dim


class Norm(nn.Module):
    """RMSNorm that multiplies by `weight`, as Gemma 4 does."""

    def __init__(self, size: int, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x, [..., size]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, 1e-6)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a Linear without bias, normal weights of variance 1 / inputs."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def rope_table(positions: Tensor, width: int, layer_type: str) -> KeyValue:
    """Return cos and sin, [..., T, width]: all pairs rotate, in full layers the first quarter of them."""
    pairs = torch.arange(width // 2, dtype=torch.float32)
    theta = 1e4 if layer_type == SLIDING else 1e6
    frequencies = theta ** (-2 * pairs / width)
    if layer_type == FULL:
        frequencies = torch.where(pairs < width // 8, frequencies, torch.zeros(()))
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: KeyValue) -> Tensor:
    """Return x, [..., T, width], with its halves rotated by the table."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * table[0].to(x.dtype) + turned * table[1].to(x.dtype)


class Attention(nn.Module):
    """Attention with normed queries, keys and values; a layer that shares K/V has queries only."""

    def __init__(self, shape: Shape, layer_type: str, owns_kv: bool, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.width(layer_type),
        )
        self.owns_kv = owns_kv
        self.q_proj = linear(hidden, self.heads * self.width)
        self.o_proj = linear(self.heads * self.width, hidden)
        self.q_norm = Norm(self.width, self.width**-0.25)
        if owns_kv:
            self.k_proj = linear(hidden, self.kv_heads * self.width)
            self.v_proj = linear(hidden, self.kv_heads * self.width)
            self.k_norm = Norm(self.width, self.width**-0.25)

    def forward(
        self, x: Tensor, table: KeyValue, mask: Tensor, shared: KeyValue | None
    ) -> tuple[Tensor, KeyValue]:
        """Return the output, [B, T, hidden], and the keys and values that were used."""
        batch, rows, _ = x.shape
        q = self.q_proj(x)
        dtype = q.dtype
        q = rotate(self.q_norm(q.view(batch, rows, self.heads, self.width)).to(dtype).transpose(1, 2), table)
        if shared is None:
            k = (
                self.k_norm(self.k_proj(x).view(batch, rows, self.kv_heads, self.width))
                .to(dtype)
                .transpose(1, 2)
            )
            v = self.v_proj(x).view(batch, rows, self.kv_heads, self.width)
            v = F.rms_norm(v.float(), (self.width,), None, 1e-6).to(v.dtype).transpose(1, 2)
            shared = (rotate(k, table), v)
        k, v = (t.expand(-1, self.heads, -1, -1) for t in shared)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1)), shared


class Mlp(nn.Module):
    """GeGLU with the tanh approximation."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(hidden, inner),
            linear(hidden, inner),
            linear(inner, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden]."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    """A Gemma 4 decoder layer; `ple` is the width of the per-layer input, 0 for none."""

    def __init__(self, shape: Shape, layer_type: str, owns_kv: bool, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        hidden, inner, ple = sizes
        self.layer_type = layer_type
        self.self_attn = Attention(shape, layer_type, owns_kv, hidden)
        self.mlp = Mlp(hidden, inner)
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(hidden), Norm(hidden)
        self.layer_scalar = nn.Buffer(torch.ones(1))
        if ple:
            self.per_layer_input_gate, self.per_layer_projection = linear(hidden, ple), linear(ple, hidden)
            self.post_per_layer_input_norm = Norm(hidden)

    def forward(
        self,
        x: Tensor,
        table: KeyValue,
        mask: Tensor,
        shared: KeyValue | None,
        per_layer: Tensor | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Return the layer's output, [B, T, hidden], and its keys and values."""
        out, used = self.self_attn(self.input_layernorm(x), table, mask, shared)
        x = x + self.post_attention_layernorm(out)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if per_layer is not None:
            gate = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * per_layer
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate))
        return x * self.layer_scalar, used


class Target(nn.Module):
    """The demo target. Parameter names are Gemma 4's below `language_model.model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, ple, count = shape.hidden_size, shape.hidden_size_per_layer_input, shape.num_hidden_layers
        self.first_shared = count - shape.num_kv_shared_layers
        self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        self.embed_tokens_per_layer = nn.Embedding(shape.vocab_size, count * ple)
        nn.init.normal_(self.embed_tokens.weight, std=hidden**-0.5)
        nn.init.normal_(self.embed_tokens_per_layer.weight, std=ple**-0.5)
        self.per_layer_model_projection = linear(hidden, count * ple)
        self.per_layer_projection_norm = Norm(ple)
        self.layers = nn.ModuleList(self._layer(i) for i in range(count))
        self.norm = Norm(hidden)

    def _layer(self, index: int) -> Layer:
        shape, owns_kv = self.shape, index < self.first_shared
        inner = shape.intermediate_size * (2 if shape.use_double_wide_mlp and not owns_kv else 1)
        sizes = (shape.hidden_size, inner, shape.hidden_size_per_layer_input)
        return Layer(shape, shape.layer_types[index], owns_kv, sizes)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the scaled embeddings, [..., hidden]."""
        return self.embed_tokens(tokens) * self.shape.hidden_size**0.5

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, KeyValue]]:
        """Return the post-norm hidden rows, [B, T, hidden], and the shared K/V of each layer type."""
        x = self.embed(tokens)
        shape, rows = self.shape, tokens.shape[1]
        size = (*tokens.shape, shape.num_hidden_layers, shape.hidden_size_per_layer_input)
        per_layer = self.per_layer_projection_norm(
            (self.per_layer_model_projection(x) * shape.hidden_size**-0.5).view(size)
        )
        inputs = self.embed_tokens_per_layer(tokens).view(size) * shape.hidden_size_per_layer_input**0.5
        per_layer = (per_layer + inputs) * 2.0**-0.5
        positions = torch.arange(rows)
        tables = {t: rope_table(positions, shape.width(t), t) for t in (SLIDING, FULL)}
        distance = positions[:, None] - positions[None]
        masks = {FULL: distance >= 0, SLIDING: (distance >= 0) & (distance < shape.sliding_window)}
        produced: dict[str, KeyValue] = {}
        for i, layer in enumerate(self.layers):
            kind = shape.layer_types[i]
            given = produced[kind] if i >= self.first_shared else None
            x, used = layer(x, tables[kind], masks[kind], given, per_layer[:, :, i])
            produced[kind] = used
        return self.norm(x), produced

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the soft-capped logits of post-norm rows, [..., vocab], float32."""
        cap = self.shape.final_logit_softcapping
        return torch.tanh(F.linear(hidden, self.embed_tokens.weight).float() / cap) * cap
