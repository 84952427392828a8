"""DFlash (arXiv:2602.06036): a block of tokens in one pass over the target's own hidden states.

The block is the pending token and masks. It is always as long as in training, however many tokens are
wanted. A slot predicts its own token, so the first slot, whose token is known, predicts nothing. Checkpoints
that also draft from it record a shift of 1. Slots do not see each other's tokens: each is drawn from its
marginal distribution. DFlash2 and DSpark override `follow`.

A context row is the target's captured layers, projected once and turned into K and V by every layer. Only
the block has queries. A row of it sees the context and the block, as `View` says.

Source: z-lab `dflash` 0.1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.config import Checkpoint, text_config
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import CONFIG, Count, mask_token, required
from mlx_spec.drafters.conditioned import ConditionedDrafter, DrafterCache, network_source
from mlx_spec.drafters.drafter import DraftBuilder, DrafterSource
from mlx_spec.drafters.layers import (
    LAYER_CONFIG,
    DrafterAttention,
    DrafterLayer,
    LayerConfig,
    add_tables,
    load_layers,
)
from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import FULL, SLIDING, Draft, FeatureSpec, Sampler, TargetParts


@dataclass(frozen=True)
class View:
    """The keys that a row of the block sees in one layer."""

    window: int | None  # keys on each side, the row's own included; None for all keys
    causal: bool  # True if a row sees no later rows of the block

    def mask(self, before: int, rows: int) -> tuple[int, mx.array | None]:
        """Return the first key that any row of the block sees, and the mask [rows, keys from there on].

        `before` is the number of keys of the context. The mask is None if every row sees all keys.
        """
        low = 0 if self.window is None else max(before - self.window + 1, 0)
        if not self.causal and (self.window is None or before + rows <= self.window):
            return low, None
        apart = mx.arange(before, before + rows)[:, None] - mx.arange(low, before + rows)
        seen = apart >= 0 if self.causal else mx.ones(apart.shape, dtype=mx.bool_)
        return low, seen if self.window is None else seen & (mx.abs(apart) < self.window)


def views(config: LayerConfig) -> list[View]:
    """Return the view of each layer. Raises BadCheckpoint."""
    layer: dict[str, Any] = config.written["layer_config"]
    depth = required(layer, "num_hidden_layers", Count, LAYER_CONFIG)
    layer_types = layer.get("layer_types") or [FULL] * depth
    causal = required(config.written, "causal", list, CONFIG)
    if len(layer_types) != depth or set(layer_types) - {SLIDING, FULL}:
        raise BadCheckpoint(
            f"{LAYER_CONFIG} has layer_types {layer_types} for {depth} layers, "
            f"known are {SLIDING!r} and {FULL!r}"
        )
    if len(causal) != depth:
        raise BadCheckpoint(f"{CONFIG} has causal {causal} for {depth} layers: convert it again")
    bounded = layer.get("use_sliding_window") is not False
    return [
        View(required(layer, "sliding_window", int, LAYER_CONFIG) if name == SLIDING and bounded else None, c)
        for name, c in zip(layer_types, causal, strict=True)
    ]


class DFlashNetwork(nn.Module):
    """Layers over a growing context and one block at a time. Parameters have the converter's names."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.conventions.capture) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.layers = [self.make_layer(config, index, view) for index, view in enumerate(views(config))]
        self.norm = nn.RMSNorm(width, eps=eps)
        add_tables(self, config.tensors, width, config.vocab_size, config.draft_vocab_size)
        self._softcap = config.written.get("final_logit_softcapping") if "lm_head" in self else None

    def make_layer(self, config: LayerConfig, index: int, view: View) -> DrafterLayer:
        return DrafterLayer(config, BlockAttention(config, index, view))

    def append_context(self, rows: mx.array, caches: Sequence[DrafterCache]) -> None:
        """Append K and V of context rows [T, F] to the caches."""
        context = self.hidden_norm(self.fc(rows.astype(self.norm.weight.dtype)))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.append(context[None], cache, cache.offset)

    def __call__(self, embedded: mx.array, caches: Sequence[DrafterCache]) -> mx.array:
        """Return the head's input [B, D] for a block [B, D], which stays in the caches."""
        x = embedded.astype(self.norm.weight.dtype)[None]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        normed: mx.array = self.norm(x)[0]
        return normed

    def capped(self, logits: mx.array) -> mx.array:
        """Return logits with the softcap of the drafter's own head; the target's head brings its own."""
        return logits if self._softcap is None else mx.tanh(logits / self._softcap) * self._softcap

    def follow(
        self, hidden: mx.array, logits: mx.array, before: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Return the logits [1, V] of a slot after the token `before` [1], and the state for the next slot.

        `hidden` [1, D] and `logits` are the slot's own; the first slot has no state.
        """
        return logits, state

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: Config, target_config: Config) -> DrafterSource:
        network, sizes = load_layers(cls, checkpoint, config, target_config)
        key = "final_logit_softcapping"
        cap = text_config(target_config).get(key)
        if "lm_head" not in network and config.get(key) not in (None, cap):
            raise BadCheckpoint(
                f"{CONFIG} has {key} {config[key]!r}, the target {cap!r}: only the target's is supported"
            )
        masks = [mask_token(config, sizes.vocab_size)] * (required(config, "block_size", Count, CONFIG) - 1)
        needs, shift = FeatureSpec(sizes.conventions.capture), sizes.conventions.shift
        return network_source(config["model_type"], network, needs, sizes.vocab_size, DFlash, masks, shift)


class BlockAttention(DrafterAttention):
    """Attention of the rows of a block over the context and the block."""

    def __init__(self, config: LayerConfig, index: int, view: View) -> None:
        super().__init__(config, config.hidden_size, f"layers.{index}.self_attn", normed=True)
        self._view = view

    def __call__(self, x: mx.array, cache: DrafterCache) -> mx.array:
        before, position = cache.size, cache.offset
        keys, values = self.append(x, cache, position)
        low, mask = self._view.mask(before, x.shape[1])
        return self.attend(self.queries(x, position), keys[..., low:, :], values[..., low:, :], mask)


class DFlash(ConditionedDrafter):
    """Drafts one sequence. Its caches hold the context and, during a draft, the block."""

    reads_next_token = False

    def __init__(
        self, network: DFlashNetwork, parts: TargetParts, needs: FeatureSpec, masks: list[int], shift: int
    ) -> None:
        super().__init__(network, parts, needs)
        self._masks = masks  # of the block that the checkpoint was trained on, after the pending token
        self._shift = shift  # 0: slot j predicts token j of the block; 1: the token after it

    def process(self, rows: mx.array, tokens: list[int]) -> None:
        self._network.append_context(rows, self._caches)

    def draft_next(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return tokens up to the end of the block."""
        self._write(self._num_waiting)
        self._cut()
        network = self._network
        embedded = self._parts.embed(mx.array([history[-1], *self._masks], dtype=mx.int32))
        hidden = network(embedded, self._caches)[1 - self._shift :][:limit]
        logits = network.capped(self._parts.unembed(hidden))
        builder, before = DraftBuilder(history, sampler), mx.array([history[-1]], dtype=mx.int32)
        state: mx.array | None = None
        for j in range(hidden.shape[0]):
            row, state = network.follow(hidden[j : j + 1], logits[j : j + 1], before, state)
            before = builder.draw(row)
        return builder.draft()
