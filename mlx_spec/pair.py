"""A target and its drafter, loaded and found to fit: what generates."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.nn as nn

from mlx_spec import engine
from mlx_spec.branches import Branches
from mlx_spec.drafters import DrafterSource
from mlx_spec.errors import InvalidValue, PromptTooLong
from mlx_spec.model.target import LMTarget
from mlx_spec.offers import offered
from mlx_spec.reuse import Decoding
from mlx_spec.sampling import LogitsProcessor, Sampling
from mlx_spec.sampling.logprobs import LogprobRecorder
from mlx_spec.session import Session
from mlx_spec.text import Text
from mlx_spec.types import Drafter, DraftLengthPolicy, FeatureSpec, Round, Target

GREEDY = Sampling()


@dataclass(frozen=True)
class Facts:
    """What is known about a pair, for those who show it."""

    target: str  # as it was asked for: a path, a repository or "demo"
    drafter: str | None  # the same; None: there is none
    vocab_size: int
    context_length: int | None  # tokens of prompt and output together; None: the checkpoint names no limit
    target_bytes: int  # size of the weight files
    drafter_bytes: int


class Policies(Protocol):
    """Makes the draft-length policies of a pair."""

    def make(self, target: Target, drafters: Sequence[Drafter]) -> DraftLengthPolicy:
        """The policy of a new sequence."""
        ...


class Pair:
    """A target, its drafter and its text. Made by `load`.

    Weights are shared by all that is generated with it; every generation or session has caches of its own.
    """

    def __init__(
        self,
        facts: Facts,
        text: Text,
        model: nn.Module,
        drafters: Sequence[DrafterSource],
        policies: Policies,
        kv_bits: int | None = None,
    ) -> None:
        self.facts = facts
        self.text = text
        self._model = model
        self._drafters = tuple(drafters)
        self._needs = _needs(drafters)
        self._branches = Branches(drafters)
        self.policies = policies
        self._kv_bits = kv_bits

    def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int,
        stop: Collection[int] = (),
    ) -> Iterator[Round]:
        """Continue a prompt, round by round, at most `max_tokens` tokens and never past the context.

        The target's own end-of-text tokens end it, and those in `stop`; the last round holds the token that
        did. Raises InvalidValue or PromptTooLong at once, before the first round.
        """
        return self.run(self.open(), prompt_tokens, sampling=sampling, max_tokens=max_tokens, stop=stop)

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The families of its drafters, by the index that rounds name."""
        return tuple(source.name for source in self._drafters)

    def session(self, system: str | None = None) -> Session:
        """A conversation. Raises InvalidValue where the target has no chat template."""
        return Session(self, system)

    def open(self) -> Decoding:
        """The parts of a new sequence, its caches empty."""
        target = LMTarget(self._model, self._needs, kv_bits=self._kv_bits)
        drafters = tuple(source.make(target.parts) for source in self._drafters)
        decoding = Decoding(target, drafters, self.policies.make(target, drafters))
        return self._branches.offered(decoding, self.policies)

    def run(
        self,
        decoding: Decoding,
        prompt_tokens: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int,
        stop: Collection[int] = (),
        top_logprobs: int | None = None,
        prediction: Sequence[int] = (),
    ) -> Iterator[Round]:
        """`generate` with parts that may already hold a prefix of the prompt.

        With `top_logprobs` rounds carry the log-probabilities of their tokens, and so many alternatives of
        each. `prediction` is what much of the text is expected to be: it is drafted where it fits. What it
        and a grammar bring to draft from are drafters of their own, whose indices follow `drafter_names`.
        """
        prompt = list(prompt_tokens)
        room = self.room(prompt, max_tokens)
        sampler = sampling.sampler(len(prompt), self.facts.vocab_size)
        recorder = None
        if top_logprobs is not None:
            law = LogitsProcessor(sampling, len(prompt), self.facts.vocab_size)
            sampler = recorder = LogprobRecorder(sampler, law, self.text, top_logprobs)
        parts = offered(decoding, prompt, grammar=sampling.grammar, prediction=prediction)
        ends = self.text.eos | frozenset(stop)
        rounds = engine.generate(
            parts.target, parts.drafters, parts.policy, sampler, prompt, max_tokens=room, stop=ends
        )
        return rounds if recorder is None else _recorded(rounds, recorder, len(prompt))

    def room(self, prompt: Sequence[int], max_tokens: int) -> int:
        """How many tokens may be generated behind a prompt. Raises InvalidValue and PromptTooLong."""
        if max_tokens < 1:
            raise InvalidValue(f"max_tokens is {max_tokens}, it must be 1 or more")
        if not prompt:
            raise InvalidValue("the prompt is empty: give at least one token")
        low, high, size = min(prompt), max(prompt), self.facts.vocab_size
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            raise InvalidValue(f"the prompt holds token {wrong}, this target has tokens 0 to {size - 1}")
        length = self.facts.context_length
        if length is None:
            return max_tokens
        if len(prompt) >= length:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and the context of this target ends at {length}: "
                "shorten it, or begin a new conversation"
            )
        return min(max_tokens, length - len(prompt))


def _recorded(rounds: Generator[Round, None, None], recorder: LogprobRecorder, position: int) -> Iterator[Round]:
    """Rounds with the log-probabilities of their tokens, of which the first is at `position`."""
    with closing(rounds):
        for round in rounds:
            yield replace(round, logprobs=recorder.of(position, round.tokens))
            position += len(round.tokens)


def _needs(drafters: Sequence[DrafterSource]) -> FeatureSpec:
    """What the target must record: of several drafters only one may read its activations."""
    wanted = [source.needs for source in drafters if source.needs != FeatureSpec()]
    assert len(wanted) <= 1, "two drafters that read activations"
    return wanted[0] if wanted else FeatureSpec()
