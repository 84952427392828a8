"""PARD (arXiv:2504.18583): a small language model that drafts K tokens in one pass over mask tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.drafters.checkpoint import CONFIG, Conventions, required, shift_norms
from mlx_spec.drafters.draft_model import DraftModel, DraftModelSource, VocabularySizes, load_language_model
from mlx_spec.drafters.drawing import draw_rows
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.checkpoint import text_config
from mlx_spec.types import Draft, Sampler, TargetParts, no_draft


class Pard(DraftModel):
    """Drafts one sequence. Its caches hold tokens of the history and never a mask."""

    def __init__(self, model: nn.Module, vocabulary: VocabularySizes, mask_token: int) -> None:
        super().__init__(model, vocabulary)
        self._mask = mx.array([mask_token], dtype=mx.int32)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return `limit` tokens. The masks' rows are dropped: drafted tokens are written when accepted."""
        if limit < 1:
            return no_draft()
        rows = self._unwritten(history)
        logits = self._model.verify(mx.concatenate([rows, *[self._mask] * (limit - 1)]))[-limit:]
        self._model.commit(rows.size)
        self._written += history[len(self._written) :]
        return draw_rows(self._vocabulary.fit(logits), history, sampler)


@dataclass(frozen=True)
class PardSource(DraftModelSource):
    """One loaded model, shared by all sequences."""

    mask_token: int = field(kw_only=True)

    def make(self, parts: TargetParts) -> Pard:
        """Return the drafter of one sequence."""
        return Pard(self.model, self.vocabulary, self.mask_token)


def open_pard(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> PardSource:
    """Load a converted drafter. Raises BadCheckpoint, or NotRewindable for an unknown kind of cache."""
    conventions = Conventions.from_config(config)
    if conventions.position_offset:
        raise BadCheckpoint(
            f"{CONFIG} records position_offset {conventions.position_offset}: the rows of a language model "
            "follow each other, only 0 is known"
        )
    layers: dict[str, Any] = required(config, "layer_config", dict, CONFIG)
    vocabulary = VocabularySizes(
        required(layers, "vocab_size", int, f"layer_config in {CONFIG}"),
        required(text_config(target_config), "vocab_size", int, "config.json of the target"),
    )
    model = load_language_model(path, layers)
    shift_norms(model, conventions.norm_offset)
    mask_token = required(config, "mask_token_id", int, CONFIG)
    return PardSource(model, vocabulary, "pard", mask_token=mask_token)
