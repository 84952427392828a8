"""DFlash (arXiv:2602.06036): a block of tokens in one pass over the target's own hidden states.

The block is the pending token and masks. It is always as long as in training, however many tokens are
wanted. A slot predicts its own token, so the first slot, whose token is known, predicts nothing; checkpoints
that also draft from it record a shift of 1. Slots do not see each other's tokens: each is drawn from its
marginal distribution.

A context row is the target's captured layers, projected once and turned into K and V by every layer. Only
the block has queries; its rows see the whole context and each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.config import text_config
from mlx_spec.drafters.checkpoint import CONFIG, mask_token, required
from mlx_spec.drafters.conditioned import ConditionedDrafter, Rows, network_source
from mlx_spec.drafters.drawing import DrafterSource, draw_rows
from mlx_spec.drafters.layers import (
    LAYER_CONFIG,
    DrafterAttention,
    DrafterLayer,
    LayerConfig,
    add_tables,
    load_layers,
)
from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import Draft, FeatureSpec, Sampler, TargetParts

SLIDING, FULL = "sliding_attention", "full_attention"
SUPPORTED = {  # switches of a config, and the only supported value
    "is_causal": False,
    "causal": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
}
SOFTCAP = "final_logit_softcapping"


def _windows(layer: Mapping[str, Any]) -> list[int | None]:
    """Return the window of each layer; None if it sees the whole context. Raises BadCheckpoint."""
    count = required(layer, "num_hidden_layers", int, LAYER_CONFIG)
    kinds = layer.get("layer_types") or [FULL] * count
    if len(kinds) != count or set(kinds) - {SLIDING, FULL}:
        raise BadCheckpoint(
            f"{LAYER_CONFIG} has layer_types {kinds} for {count} layers, known are {SLIDING!r} and {FULL!r}"
        )
    return [
        required(layer, "sliding_window", int, LAYER_CONFIG) if kind == SLIDING else None for kind in kinds
    ]


class DFlashNetwork(nn.Module):
    """Layers over a context that grows, and one block at a time. Names are those the converter writes."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        windows = _windows(config.written["layer_config"])
        self.fc = nn.Linear(len(config.conventions.capture) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.layers = [DrafterLayer(config, _Attention(config, i, w)) for i, w in enumerate(windows)]
        self.norm = nn.RMSNorm(width, eps=eps)
        add_tables(self, config.tensors, width, config.vocab_size, config.draft_vocab_size)

    def remember(self, rows: mx.array, caches: Sequence[Rows]) -> None:
        """Append K and V of context rows [T, F] to the caches."""
        context = self.hidden_norm(self.fc(rows.astype(self.norm.weight.dtype)))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.append(context[None], cache, cache.offset)

    def __call__(self, embedded: mx.array, caches: Sequence[Rows]) -> mx.array:
        """Return the head's input [B, D] for a block [B, D], which stays in the caches."""
        x = embedded.astype(self.norm.weight.dtype)[None]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        normed: mx.array = self.norm(x)[0]
        return normed


class _Attention(DrafterAttention):
    def __init__(self, config: LayerConfig, index: int, window: int | None) -> None:
        super().__init__(config, config.hidden_size, f"layers.{index}.self_attn", normed=True)
        self._window = window

    def __call__(self, x: mx.array, cache: Rows) -> mx.array:
        """Attend from [1, B, D]: each row sees the context in the first row's window, and the whole block."""
        before, position = cache.size, cache.offset
        keys, values = self.append(x, cache, position)
        low = 0 if self._window is None else max(before - self._window + 1, 0)
        return self.attend(self.queries(x, position), keys[..., low:, :], values[..., low:, :])


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
        self._network.remember(rows, self._caches)

    def draft_next(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return tokens up to the end of the block."""
        self._write(self._num_waiting)
        self._cut()
        embedded = self._parts.embed(mx.array([history[-1], *self._masks], dtype=mx.int32))
        drafted = self._network(embedded, self._caches)[1 - self._shift :][:limit]
        return draw_rows(self._parts.unembed(drafted), history, sampler)


def open_dflash(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> DrafterSource:
    """Load a converted drafter. Raises BadCheckpoint, and Mismatch if it is made for another target."""
    network, sizes = load_layers(DFlashNetwork, path, config, target_config)
    _check_switches(config, target_config)
    masks = [mask_token(config, sizes.vocab_size)] * (required(config, "block_size", int, CONFIG) - 1)
    needs, shift = FeatureSpec(sizes.conventions.capture), sizes.conventions.shift
    return network_source("dflash", network, needs, sizes.vocab_size, DFlash, masks, shift)


def _check_switches(config: Mapping[str, Any], target_config: Mapping[str, Any]) -> None:
    for key, known in SUPPORTED.items():
        if config.get(key, known) != known:
            raise BadCheckpoint(f"{CONFIG} has {key} = {config[key]!r}, only {known!r} is supported")
    target = text_config(target_config)
    if config.get(SOFTCAP) not in (None, target.get(SOFTCAP)):
        raise BadCheckpoint(
            f"{CONFIG} has {SOFTCAP} {config[SOFTCAP]!r}, the target {target.get(SOFTCAP)!r}: only "
            "the target's is supported"
        )
