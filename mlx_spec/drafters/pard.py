"""PARD (arXiv:2504.18583): a small language model that drafts K tokens in one pass over mask tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from mlx_spec.drafters.draft_model import BACKLOG, CHUNK, SHORT, Vocabulary, common_prefix
from mlx_spec.drafters.one_pass import behind, drawn
from mlx_spec.drafters.recorded import WHERE, Recorded, shift_norms
from mlx_spec.drafters.weights import required
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft


class Pard:
    """Drafts one sequence. Its caches hold tokens of the history and never a mask."""

    needs = FeatureSpec()

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, mask_token: int) -> None:
        self._model = LMTarget(model)
        self._vocabulary = vocabulary
        self._mask = mx.array([mask_token], dtype=mx.int32)
        self._written: list[int] = []  # tokens whose rows are in the caches

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        return self._model.nbytes

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Long pieces are written at once, so that no draft has to wait for them."""
        if len(history) - len(self._written) > BACKLOG:
            self._write(history)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """`limit` tokens."""
        if limit < 1:
            return no_draft()
        self._align(history)
        if len(history) - len(self._written) > SHORT:
            self._write(history)
        rows = self._vocabulary.known(history[len(self._written) :])
        logits = behind(self._model, mx.array(rows, dtype=mx.int32), self._mask, limit)
        self._written += history[len(self._written) :]
        return drawn(self._vocabulary.fit(logits), history, sampler)

    def _align(self, history: Sequence[int]) -> None:
        """Keep the rows of the longest common prefix, without the pending token."""
        self._model.commit(0)  # mends the caches where a draft was interrupted
        keep = min(common_prefix(self._written, history), len(history) - 1)
        del self._written[self._model.rewind(keep) :]

    def _write(self, history: Sequence[int]) -> None:
        """Write all but the pending token."""
        self._align(history)
        end = len(history) - 1
        while len(self._written) < end:
            chunk = history[len(self._written) : min(len(self._written) + CHUNK, end)]
            self._model.prefill(self._vocabulary.known(chunk))
            self._written += chunk


@dataclass(frozen=True)
class PardSource:
    """One loaded model, shared by all sequences."""

    model: nn.Module
    vocabulary: Vocabulary
    mask_token: int
    name: str = "pard"
    needs: FeatureSpec = Pard.needs

    @property
    def vocab_size(self) -> int:
        """Size of the drafter's own vocabulary, padding included."""
        return self.vocabulary.drafter

    def make(self, parts: TargetParts) -> Pard:
        """The drafter of one sequence."""
        return Pard(self.model, self.vocabulary, self.mask_token)


def open_pard(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> PardSource:
    """Load a converted drafter. Raises BadCheckpoint, or NotRewindable for an unknown kind of cache."""
    record = Recorded.from_config(config)
    if record.position_offset:
        raise BadCheckpoint(
            f"{WHERE} records position_offset {record.position_offset}: the rows of a language model follow "
            "each other, only 0 is known"
        )
    layers: dict[str, Any] = required(config, "layer_config", dict, WHERE)
    target: Mapping[str, Any] = target_config.get("text_config") or target_config
    vocabulary = Vocabulary(
        required(layers, "vocab_size", int, f"layer_config in {WHERE}"),
        required(target, "vocab_size", int, "config.json of the target"),
    )
    check_weights(path)
    try:
        model, _ = load_model(path, model_config=layers)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError) as error:
        raise BadCheckpoint(
            f"PARD drafter {path} cannot be loaded ({one_line(error)}): download or convert it again"
        ) from error
    shift_norms(model, record.norm_offset)
    LMTarget(model)  # refuses here and not in the middle of a sequence
    return PardSource(model, vocabulary, required(config, "mask_token_id", int, WHERE))
