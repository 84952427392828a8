"""Whether decoding with drafts gives the tokens of plain decoding, and what to say where it does not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_spec.apps.doctor.scripted import Scripted, Spoiled
from mlx_spec.apps.doctor.ties import Gap, apart, following, gap
from mlx_spec.apps.questions import Question
from mlx_spec.hub.files import one_line
from mlx_spec.pair import Pair
from mlx_spec.policy import Fixed
from mlx_spec.sampling import Sampling
from mlx_spec.sequence import SequenceParts
from mlx_spec.session import Statistics

K, SCRIPTED_K = 4, 7  # draft tokens
PLACE = re.compile(r"(/[\w.@+~-]+){2,}")  # not to be shown to others
OWN, ADAPTIVE, SPOILED = f"K = {K}", "adaptive", "spoiled drafts"


class Watch:
    """Time that runs out."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; 0 when it is over."""
        return max(self._end - time.monotonic(), 0.0)


@dataclass(frozen=True)
class Divergence:
    """The first token that is not that of plain decoding."""

    position: int  # in the answer, from 0
    expected: str  # text of the token of plain decoding
    found: str
    gap: Gap


@dataclass(frozen=True)
class Comparison:
    """One answer with drafts beside the one without."""

    prompt: str
    decoder: str
    seeded: bool  # else greedy
    tokens: int  # compared
    drafted: int
    accepted: int
    divergence: Divergence | None = None  # None: equal
    drift: Gap | None = None  # of an equal answer: its next logits from those of plain decoding
    error: str | None = None  # what broke off the answer

    def is_wrong(self, allowed: float) -> bool:
        """Whether there is a defect, where logits may differ by so many roundings."""
        gaps = [self.drift, self.divergence.gap if self.divergence else None]
        return self.error is not None or not all(gap is None or gap.within(allowed) for gap in gaps)


@dataclass
class Answer:
    """Tokens of one way to decode, as far as it came."""

    tokens: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    seconds: float = 0.0  # to the first round, with the prompt
    error: str | None = None
    ended: bool = False  # by itself, not by the time
    next: mx.array | None = None  # logits [V] behind the last token, from its own caches


def answered(
    pair: Pair, parts: SequenceParts, prompt: Sequence[int], sampling: Sampling, count: int, watch: Watch
) -> Answer:
    """At most `count` tokens, fewer when the time is up; an error ends them and is kept."""
    answer, started = Answer(), time.perf_counter()
    try:
        for round in pair.run(parts, prompt, sampling=sampling, max_tokens=count):
            now = time.perf_counter() - started
            answer.seconds = answer.seconds or now
            answer.tokens += round.tokens
            answer.statistics = answer.statistics.plus(round, round.seconds)
            if not watch.left:
                break
        else:
            answer.ended = True
            answer.next = following(parts.target, [*prompt, *answer.tokens])
    except Exception as error:  # a defect may show as anything, and is what is looked for
        answer.error = f"{type(error).__name__}: {PLACE.sub('(a file)', one_line(error, 120))}"
    return answer


def plain(pair: Pair, question: Question, sampling: Sampling, count: int, watch: Watch) -> Answer:
    """The answer without drafts."""
    parts = SequenceParts(pair.open().target, (), Fixed(0))
    return answered(pair, parts, question.tokens, sampling, count, watch)


def noise(pair: Pair, question: Question, sampling: Sampling, expected: Answer, watch: Watch) -> Gap | None:
    """Between the next logits of right caches: written row by row, in blocks, and all at once.

    None where the answer did not come to its end.
    """
    if expected.next is None:
        return None
    history = [*question.tokens, *expected.tokens]
    parts = SequenceParts(pair.open().target, (Scripted(history),), Fixed(SCRIPTED_K))
    blocks = answered(pair, parts, question.tokens, sampling, len(expected.tokens), watch)
    found = [following(pair.open().target, history)]
    if blocks.tokens == expected.tokens and blocks.next is not None:
        found.append(blocks.next)
    return max((apart(expected.next, other) for other in found), key=lambda gap: gap.roundings)


def decoders(
    pair: Pair, question: Question, expected: Sequence[int]
) -> dict[str, Callable[[], SequenceParts]]:
    """Ways to decode with drafts: those of the pair, and drafts that are known to be partly wrong."""

    def spoiled() -> SequenceParts:
        drafter = Spoiled([*question.tokens, *expected], pair.info.vocab_size)
        return SequenceParts(pair.open().target, (drafter,), Fixed(SCRIPTED_K))

    def own() -> SequenceParts:
        parts = pair.open()
        return SequenceParts(parts.target, parts.drafters[:1], Fixed(K))

    return {SPOILED: spoiled, **({OWN: own, ADAPTIVE: pair.open} if pair.drafter_names else {})}


def compared(
    pair: Pair, question: Question, decoder: str, sampling: Sampling, expected: Answer, found: Answer
) -> Comparison:
    """Two answers, token by token as far as both came."""
    both = min(len(expected.tokens), len(found.tokens))
    at = next((i for i in range(both) if expected.tokens[i] != found.tokens[i]), None)
    divergence, drift = None, None
    if found.tokens == expected.tokens and expected.next is not None and found.next is not None:
        drift = apart(expected.next, found.next)
    if at is not None:
        tokens = expected.tokens[at], found.tokens[at]
        between = gap(pair, [*question.tokens, *expected.tokens[:at]], tokens, sampling)
        a, b = (pair.text.written(token).decode("utf-8", "replace") for token in tokens)
        divergence = Divergence(at, a, b, between)
    return Comparison(
        prompt=question.name,
        decoder=decoder,
        seeded=sampling.temperature > 0,
        tokens=both,
        drafted=found.statistics.drafted,
        accepted=found.statistics.accepted,
        divergence=divergence,
        drift=drift,
        error=found.error or _short(expected, found, at),
    )


def _short(expected: Answer, found: Answer, at: int | None) -> str | None:
    """What is wrong with an answer that ends too early and was equal so far."""
    if at is None and found.ended and len(found.tokens) < len(expected.tokens):
        return f"it ended after {len(found.tokens)} of {len(expected.tokens)} tokens"
    return None
