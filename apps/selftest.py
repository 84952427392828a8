"""The self-test of the doctor and of conversions: compare text with drafts to plain text, up to near-ties."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.checkpoint.files import one_line
from mlx_spec.cli.lossless import (
    Gap,
    allowed_roundings,
    first_difference,
    largest_noise,
    logits_gap,
    next_logits,
)
from mlx_spec.cli.progress import StageProgress
from mlx_spec.cli.texts import TEXTS
from mlx_spec.decode.loop import decode
from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.decode.statistics import Statistics
from mlx_spec.errors import InvalidValue, NoVision
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import Prompt
from mlx_spec.sampling import GREEDY, Sampling
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Round, Sampler
from mlx_spec.vision.conversation import conversation_prompt, prepared

from .bench import Question, arm, chat_questions

K = 4  # draft tokens
# Ways to decode: the pair's drafts with a fixed and an adaptive length; partly wrong drafts, alone and in a
# batch.
OWN, ADAPTIVE, SPOILED, BATCHED = f"K = {K}", "adaptive", "spoiled drafts", "beside others"


@dataclass(frozen=True)
class Effort:
    """How much to test."""

    seconds: float  # upper bound; one more prompt may be read after it
    questions: int
    tokens: int  # upper bound for an answer


LONG, QUICK = Effort(60.0, 4, 64), Effort(15.0, 2, 32)


# --- answers


class ScriptedDrafter(Drafter):
    """Drafts the rest of `truth`. With a vocabulary size, one token of a draft is wrong.

    The wrong token moves one position further with each draft; after the last position one draft is right.
    """

    needs = FeatureSpec()

    def __init__(self, truth: Sequence[int], spoil_vocab_size: int | None = None) -> None:
        self._truth = list(truth)
        self._vocab_size = spoil_vocab_size
        self._drafts = 0

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Ignore the features: the text is known."""

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        tokens = self._truth[len(history) : len(history) + limit]
        at = self._drafts % (limit + 1)
        self._drafts += 1
        if self._vocab_size is not None and at < len(tokens):
            tokens[at] = (tokens[at] + 1) % self._vocab_size
        return Draft(mx.array(tokens, dtype=mx.int32))


@dataclass(frozen=True)
class Divergence:
    """The first token that differs from plain decoding."""

    position: int  # in the answer, from 0
    expected: str  # text of the token of plain decoding
    found: str
    gap: Gap


@dataclass(frozen=True)
class Comparison:
    """The comparison of an answer with drafts to the plain one."""

    prompt: str
    decoder: str
    seeded: bool  # else greedy
    tokens: int  # tokens compared
    drafted: int
    accepted: int
    divergence: Divergence | None = None  # None if the tokens are equal
    drift: Gap | None = None  # between the next logits of two equal answers
    error: str | None = None  # why the answer ended early

    def is_wrong(self, allowed: float) -> bool:
        """Return True if the difference is a defect: an error, or more than `allowed` roundings."""
        gaps = [self.drift, self.divergence.gap if self.divergence else None]
        return self.error is not None or not all(gap is None or gap.within(allowed) for gap in gaps)


@dataclass
class Attempt:
    """The answer of one way to decode, until it ends or fails."""

    question: Question
    sampling: Sampling
    decoder: str = "plain"
    tokens: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    error: str | None = None
    next: mx.array | None = None  # logits [V] after the last token, from its own caches; None if cut short

    @property
    def history(self) -> Prompt:
        return after(self.question, self.tokens)


def after(question: Question, tokens: Sequence[int]) -> Prompt:
    """Return the prompt of a question followed by tokens of its answer."""
    spans = question.tokens.spans if isinstance(question.tokens, Prompt) else ()
    return Prompt((*question.tokens, *tokens), spans)


@dataclass
class SelfTest:
    """The result of the self-test."""

    comparisons: list[Comparison] = field(default_factory=list)
    left_out: int = 0  # tests that were skipped: out of time
    window: int | None = None  # tokens of sliding attention; None without such layers
    past_window: bool = False  # whether an answer went past the window
    picture: int = 0  # rows of the picture that was read; 0 without a picture
    noise: Gap | None = None  # the largest gap between correct caches; None if not measured
    seconds: float = 0.0

    @property
    def allowed(self) -> float:
        """Return how many roundings a near-tie may be apart."""
        return allowed_roundings(self.noise)

    @property
    def wrong(self) -> list[Comparison]:
        return [c for c in self.comparisons if c.is_wrong(self.allowed)]

    @property
    def near_ties(self) -> list[Comparison]:
        """Return the comparisons with a difference that rounding explains."""
        return [c for c in self.comparisons if c.divergence is not None and not c.is_wrong(self.allowed)]

    @property
    def blocks_differ(self) -> bool:
        """Return True if passes over several rows give other logits than single rows."""
        return self.noise is not None and not self.noise.within(self.noise.limit)

    @property
    def passed(self) -> bool:
        """Return True if something was tested and nothing is wrong."""
        return bool(self.comparisons) and not self.wrong and not self.blocks_differ

    @property
    def verdict(self) -> str:
        count = len(self.comparisons)
        if not count:
            return "NOT TESTED: out of time"
        if self.blocks_differ:
            return "FAILED: passes over several tokens give other logits than one token at a time"
        if self.wrong:
            return f"FAILED: {len(self.wrong)} of {count} answers are not plain decoding"
        ties = f", {len(self.near_ties)} up to a near-tie" if self.near_ties else ""
        return f"lossless: {count} of {count} answers equal{ties}"


def drawing(size: int = 96) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a test picture: a disc, a square and stripes on white, [size, size, 3]."""
    y, x = np.mgrid[0:size, 0:size] / size
    pixels = np.full((size, size, 3), 255, np.uint8)
    pixels[(x - 0.3) ** 2 + (y - 0.3) ** 2 < 0.05] = 220, 40, 40
    pixels[(abs(x - 0.7) < 0.15) & (abs(y - 0.35) < 0.15)] = 40, 80, 200
    pixels[(y > 0.7) & (x * 8 % 1 < 0.5)] = 30, 150, 60
    return pixels


def picture_question(pair: Pair) -> Question | None:
    """Return a question about a drawing; None if the pair reads no pictures."""
    question = "What do you see in this picture?"
    try:
        vision = pair.vision
        shown = prepared([{"type": "image", "image": drawing()}, {"type": "text", "text": question}], vision)
        prompt = conversation_prompt([{"role": "user", "content": shown}], pair.tokenizer, vision)
    except (NoVision, InvalidValue):  # no tower, no Pillow, no template, or one without pictures
        return None
    return Question(f"a drawing: {question}", prompt)


def long_text(tokenizer: Tokenizer, tokens: int) -> Question:
    """Return `tokens` tokens of built-in text, to be continued."""
    beginning = tokenizer.prompt_tokens("")
    once = tokenizer.encode("\n\n".join(TEXTS) + "\n\n")
    wanted = max(tokens - len(beginning), 1)
    repeated = once * (wanted // len(once) + 1)
    return Question(f"the built-in texts, {tokens} tokens of them", tuple([*beginning, *repeated[-wanted:]]))


def self_test(pair: Pair, window: int | None, effort: Effort, progress: StageProgress) -> SelfTest:
    """Test a pair. `window` is the number of tokens of the target's sliding attention; None without it."""
    tester = _Tester(pair, window, effort)
    count = tester.warm_up()
    progress.stage("self-test: text with drafts and without")
    for question, sampling in tester.cases(count):
        tester.compare(question, sampling, count)
    progress.end()
    tester.result.seconds = time.monotonic() - tester.started
    return tester.result


class _Tester:
    """The state of a running self-test."""

    def __init__(self, pair: Pair, window: int | None, effort: Effort) -> None:
        self._pair, self._window, self._effort = pair, window, effort
        self.started = time.monotonic()
        self._token_seconds = 0.0  # of plain decoding
        self.result = SelfTest(window=window)
        self.questions = chat_questions(pair.tokenizer)[: effort.questions]

    def _left(self) -> float:
        return max(self.started + self._effort.seconds - time.monotonic(), 0.0)

    def warm_up(self) -> int:
        """Read weights and compile kernels. Return how many tokens an answer may have."""
        for _ in range(2):
            answer = self._decode(Attempt(self.questions[0], GREEDY), arm(self._pair, 0), 8)
        timed = answer.statistics
        self._token_seconds = timed.decode_seconds / max(timed.generated_tokens, 1)
        decode_cost = 5.0  # in plain answers: decoding one question in all ways
        cost = (len(self.questions) + 4) * decode_cost * max(self._token_seconds, 1e-6)
        min_answer_tokens = 16  # on any device
        return min(max(int(self._effort.seconds / cost), min_answer_tokens), self._effort.tokens)

    def cases(self, count: int) -> Iterator[tuple[Question, Sampling]]:
        """Yield questions and samplings, the most telling first: the time may not be enough for all."""
        seeded = Sampling(temperature=0.8, seed=11)
        first, *others = self.questions
        yield first, GREEDY
        if (seen := picture_question(self._pair)) is not None:
            self.result.picture = sum(span.count for span in after(seen, ()).spans)
            yield seen, GREEDY
        most = self._pair.info.context_length
        if self._window is not None:
            across, past = self._window - count // 2, self._window + self._window // 2
            for length in (max(across, 2), past):
                if most is None or length + count <= most:
                    yield long_text(self._pair.tokenizer, length), GREEDY
        yield first, seeded
        yield from ((question, GREEDY) for question in others)
        yield from ((question, seeded) for question in others[:1])

    def _scripted(self, truth: Sequence[int], spoil_vocab_size: int | None = None) -> CachedSequence:
        drafter = ScriptedDrafter(truth, spoil_vocab_size)
        return CachedSequence(self._pair.open().target, (drafter,), FixedPolicy(7))

    def _decoders(self, truth: Sequence[int]) -> Iterator[tuple[str, CachedSequence]]:
        """Yield ways to decode with drafts: the pair's own drafts, and drafts that are partly wrong."""
        for name in (SPOILED, BATCHED):
            yield name, self._scripted(truth, self._pair.info.vocab_size)
        if self._pair.drafter_names:
            yield OWN, arm(self._pair, K)
            yield ADAPTIVE, self._pair.open()

    def _beside_others(self, running: RunningSequence, count: int) -> Iterator[Round]:
        """Yield the rounds of a sequence in one batch with all questions, which decode without drafts."""
        batch = self._pair.batch(len(self.questions) + 1)
        for question in self.questions:
            batch.add(self._pair.prepare(arm(self._pair, 0), question.tokens, max_tokens=count))
        number = batch.add(running, park=True)
        while running.remaining > 0:
            for id, result in batch.step():
                if isinstance(result, Exception):
                    raise result
                if id == number:
                    yield result

    def compare(self, question: Question, sampling: Sampling, count: int) -> None:
        """Decode an answer in all ways that the time allows, and compare each with plain decoding."""
        prefill_cost = 1 / 32  # of a plain token, to read one token of a long prompt; upper bound
        reading = len(question.tokens) * prefill_cost * self._token_seconds
        if self._left() <= reading:
            self.result.left_out += 1
            return
        expected = self._decode(Attempt(question, sampling), arm(self._pair, 0), count)
        if expected.error is not None or not expected.tokens:
            self.result.comparisons.append(self._comparison(expected, expected))
            return
        self._measure_noise(expected)
        for name, sequence in self._decoders(expected.history):
            if self._left() <= reading and self.result.comparisons:
                self.result.left_out += 1
                return
            answer = self._decode(Attempt(question, sampling, name), sequence, len(expected.tokens))
            self.result.comparisons.append(self._comparison(expected, answer))
            if self._window is not None and len(answer.history) > self._window:
                self.result.past_window = True

    def _decode(self, answer: Attempt, sequence: CachedSequence, count: int) -> Attempt:
        """Add at most `count` tokens, fewer if the time is up, or set `answer.error`. Return the answer."""
        prompt, sampling, is_batched = answer.history, answer.sampling, answer.decoder == BATCHED
        try:
            running = self._pair.prepare(sequence, prompt, sampling=sampling, max_tokens=count)
            for round in self._beside_others(running, count) if is_batched else decode(running):
                answer.tokens += round.tokens
                answer.statistics = answer.statistics.plus(round, round.seconds)
                if not self._left():
                    return answer
            answer.next = next_logits(sequence.target, answer.history)
        except Exception as error:  # a defect may raise anything
            # The user may show the report to others, so it has no paths.
            text = re.sub(r"(/[\w.@+~-]+){2,}", "(a file)", one_line(error, 120))
            answer.error = f"{type(error).__name__}: {text}"
        return answer

    def _measure_noise(self, expected: Attempt) -> None:
        """Compare the next logits of correct caches that were written row by row, in blocks, or at once."""
        if expected.next is None:
            return
        blocks = Attempt(expected.question, expected.sampling)
        self._decode(blocks, self._scripted(expected.history), len(expected.tokens))
        others = [next_logits(self._pair.open().target, expected.history)]
        if blocks.tokens == expected.tokens and blocks.next is not None:
            others.append(blocks.next)
        noise, known = largest_noise(expected.next, others), self.result.noise
        self.result.noise = max(noise, known or noise, key=lambda gap: gap.roundings)

    def _comparison(self, expected: Attempt, actual: Attempt) -> Comparison:
        drift, error, divergence = None, actual.error, None
        difference = first_difference(
            lambda: self._pair.open().target,
            after(actual.question, ()),
            expected.tokens,
            actual.tokens,
            actual.sampling,
        )
        if actual.tokens == expected.tokens and expected.next is not None and actual.next is not None:
            drift = logits_gap(expected.next, actual.next)
        if difference is not None:
            tokens = difference.expected, difference.actual
            a, b = (self._pair.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens)
            divergence = Divergence(difference.position, a, b, difference.gap)
        elif actual.next is not None and len(actual.tokens) < len(expected.tokens):
            error = f"it ended after {len(actual.tokens)} of {len(expected.tokens)} tokens"
        return Comparison(
            prompt=actual.question.name,
            decoder=actual.decoder,
            seeded=actual.sampling.temperature > 0,
            tokens=min(len(expected.tokens), len(actual.tokens)),
            drafted=actual.statistics.drafted,
            accepted=actual.statistics.accepted,
            divergence=divergence,
            drift=drift,
            error=error,
        )
