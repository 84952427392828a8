"""A smaller language model with another tokenizer: what it drafts is read as text and encoded again.

As in assisted generation with different tokenizers (transformers, "universal assisted decoding"), but that a
draft holds only tokens that are certain: those that stay what they are when one more token of the drafter
follows. A draft is the drafter's likeliest text. It depends on no chance, so verification keeps the target's
law whatever it says: where the two texts do not line up, tokens are rejected and nothing else happens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.drafters.draft_model import BACKLOG, DraftModel, Vocabulary, common_prefix, open_draft_model
from mlx_spec.drafters.translation import Place, Translation, Writing, continuation, encoded, named
from mlx_spec.errors import Mismatch
from mlx_spec.grammar import read_tokens
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft

MOST = 48  # the drafter's tokens in one draft
RATIOS = (0.25, 4.0)  # of the drafter's tokens to the target's, that are believed
PROBE = "Is it 3.14 or 42?\n    x = {'Key': [1, 2]}  # Yes, as `a_b` said.\n"


@dataclass(frozen=True)
class Retold:
    """A drafted text in the target's tokens."""

    tokens: list[int]
    made_of: list[int]  # how many of the drafter's tokens begin before the end of each


class Retokenized:
    """Drafts one sequence with a model, caches and tokens of its own."""

    needs = FeatureSpec()

    def __init__(self, model: nn.Module, vocab_size: int, target: Writing, drafter: Writing) -> None:
        self._model = DraftModel(model, Vocabulary(vocab_size, vocab_size))
        self._translation = Translation(target, drafter)
        self._target, self._drafter = target, drafter
        self._greedy = Sampling().sampler(0, vocab_size)
        self._read = 0  # tokens of the history that were read last

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        return self._model.nbytes

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Read the prompt, and what many rounds without a draft left behind."""
        if not 0 <= len(history) - self._read <= BACKLOG:
            tokens = self._place(history).tokens
            if tokens:
                self._model.read(tokens)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """At most `limit` tokens, the likeliest: no other text is accepted more often as one without chance.

        Waits for the drafter: its text is put into the target's tokens on the host.
        """
        place = self._place(history)
        if limit < 1 or not place.tokens:
            return no_draft()
        low, high = RATIOS
        ratio = min(max(len(place.tokens) / len(history), low), high)
        steps = min(math.ceil(limit * ratio) + 1, MOST)
        draft = self._model.draft(place.tokens, steps, self._greedy)
        tokens = read_tokens(draft.tokens)
        self._model.drafted(tokens)
        retold = self._retold(place, tokens)
        if not retold.tokens or draft.confidence is None:
            return no_draft()
        together = mx.concatenate([mx.zeros((1,)), mx.cumsum(mx.log(draft.confidence))])
        ends = together[mx.array([0, *retold.made_of[:limit]])]
        return Draft(mx.array(retold.tokens[:limit], dtype=mx.int32), confidence=mx.exp(ends[1:] - ends[:-1]))

    def _place(self, history: Sequence[int]) -> Place:
        self._read = len(history)
        return self._translation.read(history)

    def _retold(self, place: Place, tokens: Sequence[int]) -> Retold:
        """What is certain of a draft. A control token ends it, and so does the text before it."""
        controls = self._drafter.controls
        end = next((i for i, token in enumerate(tokens) if token in controls), len(tokens))
        written = [self._drafter.written(token) for token in tokens[:end]]
        certain = continuation(self._target, place, b"".join(written))
        if end == len(tokens):
            shorter = continuation(self._target, place, b"".join(written[:-1]))
            certain = certain[: common_prefix(certain, shorter)]
        sizes = [len(self._target.written(token)) for token in certain]
        starts = [0, *accumulate(len(text) for text in written)]  # in bytes, of the text behind all as well
        made_of = [bisect_left(starts, len(place.pending) + size) for size in accumulate(sizes)]
        if end < len(tokens) and len(place.pending) + sum(sizes) == starts[-1]:
            last = named(self._drafter, tokens[end], self._target)
            return Retold([*certain, *last], [*made_of, *(end + 1 for _ in last)])
        return Retold(certain, made_of)


@dataclass(frozen=True)
class RetokenizedSource:
    """One loaded model and both tokenizers, shared by all sequences."""

    model: nn.Module
    drafter_vocab_size: int
    target: Writing
    drafter: Writing
    name: str
    needs: FeatureSpec = Retokenized.needs
    vocab_size: None = None  # it drafts what the target's tokenizer gives

    def make(self, parts: TargetParts) -> Retokenized:
        """The drafter of one sequence."""
        return Retokenized(self.model, self.drafter_vocab_size, self.target, self.drafter)


def open_retokenized(
    path: Path, config: Mapping[str, Any], drafter: Writing, target: Writing
) -> RetokenizedSource:
    """Load a model that mlx-lm knows, to draft for a target of another vocabulary.

    Raises BadCheckpoint, NotRewindable, or Mismatch where a tokenizer does not write back what it encodes.
    """
    for writing, whose in ((drafter, f"the drafter {path}"), (target, "the target")):
        if encoded(writing, b"", PROBE.encode()) is None:
            raise Mismatch(
                f"the drafter {path} and the target have different tokenizers, and that of {whose} does not "
                'write back the text it encodes: use a drafter with the target\'s vocabulary, or "lookup"'
            )
    source = open_draft_model(path, config, config)
    return RetokenizedSource(source.model, source.vocab_size, target, drafter, f"{source.name}, re-tokenized")
