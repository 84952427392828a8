"""DFlash2: DFlash with convolutions over the block around each sublayer, and a selector that walks it.

A sublayer has a convolution before it and one after it. Its input is projected to changes of their kernels.
The selector scores the best tokens of a slot as pairs with the token before; only these can be drafted.

Source: z-lab `dflash` 0.1.0.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.drafters.checkpoint import CONFIG, Count, Size, required
from mlx_spec.drafters.conditioned import DrafterCache
from mlx_spec.drafters.dflash import BlockAttention, DFlashNetwork, View
from mlx_spec.drafters.layers import DrafterLayer, LayerConfig
from mlx_spec.errors import BadCheckpoint


class DFlash2Network(DFlashNetwork):
    """DFlash with convolutions and a selector. Parameters have the converter's names."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config)
        self.candidate_selector = Selector(config)

    def make_layer(self, config: LayerConfig, index: int, view: View) -> DrafterLayer:
        return ConvolvedLayer(config, BlockAttention(config, index, view))

    def follow(
        self, hidden: mx.array, logits: mx.array, before: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        return self.candidate_selector(hidden, logits, before), None


class Convolution(nn.Module):
    """Two convolutions over the rows of a block. Rows before the block count as zeros."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self._taps = required(config.written, "conv_kernel_size", Count, CONFIG)
        self._group = required(config.written, "conv_group_size", Size, CONFIG)
        if width % self._group:
            raise BadCheckpoint(
                f"{CONFIG} has conv_group_size {self._group} for {width} channels, "
                "which the groups must divide"
            )
        self.base_kernel = mx.zeros((2, self._taps, width))
        self.kernel_projection = nn.Linear(width, 2 * self._taps * (width // self._group), bias=False)

    def before(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the input [1, B, D] of the sublayer, and the changes of the kernel of `after`."""
        moves = self.kernel_projection(x).reshape(*x.shape[:-1], 2, self._taps, -1)
        return self._convolve(x, moves[..., 0, :, :], 0), moves[..., 1, :, :]

    def after(self, x: mx.array, moves: mx.array) -> mx.array:
        """Return the convolved output of the sublayer, which is added to the residual stream."""
        return self._convolve(x, moves, 1)

    def _convolve(self, x: mx.array, moves: mx.array, which: int) -> mx.array:
        kernels = self.base_kernel[which] + mx.repeat(moves, self._group, axis=-1)  # [1, B, taps, D]
        rows = x.shape[1]
        padded = mx.pad(x, [(0, 0), (self._taps - 1, 0), (0, 0)])
        starts = range(self._taps - 1, -1, -1)  # tap t reads the row t rows before
        shifted = mx.stack([padded[:, start : start + rows] for start in starts], axis=2)
        return (kernels * shifted).sum(axis=2)


class ConvolvedLayer(DrafterLayer):
    """A decoder layer whose sublayers are convolved."""

    def __init__(self, config: LayerConfig, attention: nn.Module) -> None:
        super().__init__(config, attention)
        self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)

    def __call__(self, x: mx.array, cache: DrafterCache) -> mx.array:
        y, moves = self.attention_conv.before(self.input_layernorm(x))
        x = x + self.attention_conv.after(self.self_attn(y, cache), moves)
        y, moves = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(y), moves)


class Selector(nn.Module):
    """Scores the best tokens of a slot by the token before and the slot's hidden state."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        rank = required(config.written, "selector_rank", Size, CONFIG)
        self._top = required(config.written, "selector_top_k", Size, CONFIG)
        if self._top > config.vocab_size:
            raise BadCheckpoint(f"{CONFIG} has selector_top_k {self._top} of {config.vocab_size} tokens")
        self.predecessor_codebook = mx.zeros((config.vocab_size, rank))
        self.successor_codebook = mx.zeros((config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def __call__(self, hidden: mx.array, logits: mx.array, before: mx.array) -> mx.array:
        """Return logits [1, V] of a slot, -inf but for its best tokens."""
        best = mx.argpartition(-logits, self._top - 1, axis=-1)[:, : self._top]
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        pairs = (context[:, None] * self.successor_codebook[best]).sum(axis=-1)
        scores = mx.take_along_axis(logits, best, axis=-1) + pairs.astype(logits.dtype)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, logits.dtype), best, scores, axis=-1)
