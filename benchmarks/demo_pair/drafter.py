"""The demo drafter in PyTorch: a Gemma 4 assistant (Q-only layers over the target's K/V), to train."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_pair.model import FULL, SLIDING, KeyValue, Layer, Norm, Shape, linear, rope_table


@dataclass(frozen=True)
class Context:
    """What the drafter sees of the target at a batch's anchors; tokens 0..t of an anchor t are in the K/V."""

    tables: dict[str, KeyValue]  # cos and sin at position t + 1, each [B, 1, N, head_dim]
    masks: dict[str, Tensor]  # [B, 1, N, T] bool: the rows j <= t, in sliding layers the last W - 1 of them
    shared: dict[str, KeyValue]  # the target's K/V, each [B, n_kv, T, head_dim]


class Drafter(nn.Module):
    """Three sliding layers and a full one. Parameter names are those of the published assistants."""

    layer_types = (SLIDING, SLIDING, SLIDING, FULL)

    def __init__(self, shape: Shape, hidden: int = 128, inner: int = 320) -> None:
        super().__init__()
        self.shape, self.hidden, self.inner = shape, hidden, inner
        self.pre_projection = linear(2 * shape.hidden_size, hidden)
        self.post_projection = linear(hidden, shape.hidden_size)
        self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        nn.init.normal_(self.embed_tokens.weight, std=hidden**-0.5)
        self.layers = nn.ModuleList(Layer(shape, t, False, (hidden, inner, 0)) for t in self.layer_types)
        self.norm = Norm(hidden)

    def forward(self, embedded: Tensor, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return the next step's hidden rows, [B, N, target hidden], and the normed rows, [B, N, hidden]."""
        x = self.pre_projection(torch.cat([embedded, hidden], -1))
        for kind, layer in zip(self.layer_types, self.layers, strict=True):
            x, _ = layer(x, context.tables[kind], context.masks[kind], context.shared[kind])
        x = self.norm(x)
        return self.post_projection(x), x

    def logits(self, normed: Tensor) -> Tensor:
        """Return the logits, [..., vocab], float32; without a soft cap, as in the published assistants."""
        return F.linear(normed, self.embed_tokens.weight).float()


def context_of(anchors: Tensor, shared: dict[str, KeyValue], shape: Shape) -> Context:
    """Return the context of the anchors, [B, N] int64."""
    rows = torch.arange(shared[FULL][0].shape[2])
    tables = {}
    for kind in (SLIDING, FULL):
        cos, sin = rope_table(anchors + 1, shape.width(kind), kind)
        tables[kind] = (cos[:, None], sin[:, None])
    distance = anchors[:, None, :, None] + 1 - rows
    masks = {FULL: distance > 0, SLIDING: (distance > 0) & (distance < shape.sliding_window)}
    return Context(tables, masks, shared)
