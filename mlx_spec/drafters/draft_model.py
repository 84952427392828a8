"""A smaller language model of the same vocabulary (arXiv:2211.17192, arXiv:2302.01318)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from mlx_spec.drafters.chain import Chain
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft

CHUNK = 512  # tokens in one pass over a prompt
BACKLOG = 128  # tokens not yet written at which `observe` writes them, so that no draft has to wait for more
SHORT = 8  # tokens that a draft writes on trial together with the pending one


@dataclass(frozen=True)
class Vocabulary:
    """Sizes that may differ by padding rows."""

    drafter: int
    target: int

    def known(self, tokens: Sequence[int]) -> list[int]:
        """`tokens` with those beyond the drafter's table replaced by its last one."""
        return list(tokens) if self.drafter >= self.target else [min(t, self.drafter - 1) for t in tokens]

    def fit(self, logits: mx.array) -> mx.array:
        """Logits [T, drafter] cut or padded with -inf to [T, target]."""
        if self.drafter >= self.target:
            return logits[:, : self.target]
        unknown = mx.full((logits.shape[0], self.target - self.drafter), -mx.inf, dtype=logits.dtype)
        return mx.concatenate([logits, unknown], axis=-1)


class DraftModel:
    """Drafts one sequence with a model and caches of its own."""

    needs = FeatureSpec()

    def __init__(self, model: nn.Module, vocabulary: Vocabulary) -> None:
        self._model = LMTarget(model)
        self._vocabulary = vocabulary
        self._written: list[int] = []  # tokens whose rows are in the caches, committed or on trial
        self._on_trial = 0  # how many of them are on trial
        self._guesses = 0  # rows of draft tokens behind `_written`, on trial

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        return self._model.nbytes

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Keep the rows of the accepted draft tokens: `history` grew by them and one token more."""
        grown = len(history) - len(self._written)
        a_round = self._on_trial and 1 <= grown <= self._guesses + 2
        if a_round:
            self._settle(history, len(self._written) + min(grown - 1, self._guesses))
        elif grown > BACKLOG or grown < 0:
            self.read(history)

    def read(self, history: Sequence[int]) -> None:
        """Write all of `history` but its last, pending token."""
        self._write(history, len(history) - 1 - self._align(history))

    def drafted(self, tokens: Sequence[int]) -> None:
        """The last draft was these `tokens`: told so, the next one keeps the rows of those that came true.

        Without it only `observe` can keep them, which takes the next history for one that accepted them.
        """
        self._written += tokens[: self._guesses]
        self._on_trial += self._guesses
        self._guesses = 0

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """`limit` tokens."""
        if limit < 1:
            return no_draft()
        missing = len(history) - self._align(history)
        if missing > SHORT:
            self._write(history, missing - 1)
        rows = self._vocabulary.known(history[len(self._written) :])
        logits = self._model.verify(mx.array(rows, dtype=mx.int32))[-1:]
        chain = Chain(history, sampler)
        for step in range(limit):
            token = chain.extend(self._vocabulary.fit(logits))
            if step + 1 < limit:
                logits = self._model.verify(token)
        self._written += history[len(self._written) :]
        self._on_trial, self._guesses = len(rows), limit - 1
        return chain.draft()

    def _align(self, history: Sequence[int]) -> int:
        """Keep the rows of the longest common prefix, without the pending token. Returns their number."""
        keep = min(common_prefix(self._written, history), len(history) - 1)
        self._settle(history, keep)
        return len(self._written)

    def _settle(self, history: Sequence[int], keep: int) -> None:
        """Close the trial and keep at most `keep` rows, those of `history[:keep]`."""
        committed = len(self._written) - self._on_trial
        del self._written[committed:]  # first: an interrupted draft leaves a trial that counts for nothing
        self._on_trial = self._guesses = 0
        self._model.commit(max(keep - committed, 0))
        kept = self._model.rewind(keep)
        del self._written[kept:]
        self._written += history[len(self._written) : kept]

    def _write(self, history: Sequence[int], count: int) -> None:
        """Write and commit the next `count` tokens of `history`."""
        end = len(self._written) + count
        while len(self._written) < end:
            chunk = history[len(self._written) : min(len(self._written) + CHUNK, end)]
            self._model.prefill(self._vocabulary.known(chunk))
            self._written += chunk


def common_prefix(written: list[int], history: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(written), len(history))
    if written[:length] == list(history[:length]):
        return length
    return next(i for i in range(length) if written[i] != history[i])


@dataclass(frozen=True)
class DraftModelSource:
    """One loaded model, shared by all sequences."""

    model: nn.Module
    vocabulary: Vocabulary
    name: str
    needs: FeatureSpec = DraftModel.needs

    @property
    def vocab_size(self) -> int:
        """Size of the drafter's own vocabulary, padding included."""
        return self.vocabulary.drafter

    def make(self, parts: TargetParts) -> DraftModel:
        """The drafter of one sequence."""
        return DraftModel(self.model, self.vocabulary)


def open_draft_model(
    path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]
) -> DraftModelSource:
    """Load a model that mlx-lm knows. Raises BadCheckpoint, or NotRewindable for an unknown kind of cache."""
    vocabulary = Vocabulary(_vocab_size(config, "drafter"), _vocab_size(target_config, "target"))
    check_weights(path)
    given: dict[str, Any] = {key: config[key] for key in ("text_config", "vocab_size") if key in config}
    try:
        model, _ = load_model(path, model_config=given)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError) as error:
        raise BadCheckpoint(f"draft model {path} cannot be loaded: {one_line(error)}") from error
    LMTarget(model)  # refuses here and not in the middle of a sequence
    return DraftModelSource(model, vocabulary, str(config["model_type"]))


def _vocab_size(config: Mapping[str, Any], role: str) -> int:
    size = (config.get("text_config") or config).get("vocab_size") or config.get("vocab_size")
    if not isinstance(size, int):
        raise BadCheckpoint(f"config.json of the {role} has no 'vocab_size': {AGAIN}")
    return size
