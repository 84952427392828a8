"""The work of one request on the engine thread, in steps that take turns with those of other requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mlx_spec import engine
from mlx_spec.answer import Answer
from mlx_spec.apps.server.ask import Ask, Chat, Closed, Event, Opened, Piece, Raw, Span, Timings, Usage
from mlx_spec.apps.server.choice import Choice
from mlx_spec.apps.server.failures import invalid
from mlx_spec.apps.server.models import Loaded
from mlx_spec.apps.server.prompts import Prepared
from mlx_spec.apps.server.tools import Calls
from mlx_spec.drafters.model_free import prediction_counts
from mlx_spec.errors import InvalidValue
from mlx_spec.logprobs import TokenLogprob
from mlx_spec.sampling import Law
from mlx_spec.scoring import score
from mlx_spec.sequence import CachedSequence
from mlx_spec.session import Statistics, added
from mlx_spec.types import Round

UNLIMITED = 2**20  # tokens of a choice, where neither the request nor the model names a limit

Steps = Generator[None, None, None]


class Answering:
    """Answers a request. The events of a prompt and its choices come one after the other."""

    def __init__(self, ask: Ask, loaded: Loaded, send: Callable[[Event], None], submitted: float) -> None:
        self._ask = ask
        self._loaded = loaded
        self._send = send
        self._submitted = submitted  # time.perf_counter()
        self._queued = time.perf_counter() - submitted
        self._first: float | None = None  # seconds to the first round
        self._choices: list[Choice] = []

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._loaded.name

    def steps(self, prepared: Prepared) -> Steps:
        """Do the work; a step is a chunk of a prompt or a round. Raises Failure and SpecError."""
        self._check(prepared.prompts)
        for number in range(len(prepared.prompts)):
            with self._loaded.conversations.using(prepared.prompts[number]) as held:
                for i in range(self._ask.n):
                    yield from self._choose(prepared, held, number, i)
        self._send(Closed(self._usage(prepared), self._timings()))

    def _check(self, prompts: Sequence[list[int]]) -> None:
        """Before anything is generated for the first of them. Raises Failure (400) and PromptTooLong."""
        for prompt in prompts:
            try:
                self._loaded.pair.token_limit(prompt, UNLIMITED)
            except InvalidValue as error:
                raise invalid(str(error), "prompt" if isinstance(self._ask.prompt, Raw) else None) from error

    def _choose(self, prepared: Prepared, held: CachedSequence, number: int, i: int) -> Steps:
        """Choice i of a prompt. All but the first find nearly all of the prompt in the cache."""
        prompt, index = prepared.prompts[number], number * self._ask.n + i
        rounds = self._rounds(prepared, held, prompt, i)
        scores: list[TokenLogprob] = []
        scored = isinstance(self._ask.prompt, Raw) and self._ask.prompt.echo
        if scored and self._ask.top_logprobs is not None:
            kept = held.rewind_to_prefix(())
            spent = yield from _timed(self._scored(held, prompt, scores))
        else:
            kept = held.rewind_to_prefix(prompt)
            spent = yield from _timed(engine.prefill(held.parts.target, held.parts.drafters, prompt))
        self._loaded.conversations.shrink()
        choice = self._open(prepared, number, index, kept, held.drafter_missing)
        self._echo(index, prompt, scores)
        yield from self._decode(choice, held, rounds, spent)
        held.truncate(len(prompt) + len(choice.tokens))
        self._give(choice.end())

    def _rounds(self, prepared: Prepared, held: CachedSequence, prompt: list[int], i: int) -> Iterator[Round]:
        """The rounds of choice i, not yet begun. Raises InvalidValue and PromptTooLong."""
        sampling, limit = prepared.sampling, self._ask.max_tokens
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + i)  # or all choices would be the same
        return self._loaded.pair.run(
            held.parts,
            prompt,
            sampling=sampling,
            max_tokens=UNLIMITED if limit is None else max(limit, 1),
            top_logprobs=self._ask.top_logprobs,
            prediction=prepared.prediction,
        )

    def _scored(self, held: CachedSequence, prompt: list[int], scores: list[TokenLogprob]) -> Iterator[None]:
        """Read a prompt and how likely its tokens are: the first has no logprob."""
        pair, top = self._loaded.pair, self._ask.top_logprobs or 0
        law = Law(replace(self._ask.sampling, grammar=None), 0, pair.info.vocab_size)
        scores.append(TokenLogprob(prompt[0], pair.text.written(prompt[0]), math.nan))
        parts = held.parts
        for more in score(parts.target, parts.drafters, law, prompt, pair.text, top):
            scores.extend(more)
            yield
        held.append(prompt)

    def _open(self, prepared: Prepared, number: int, index: int, kept: int, cold: int) -> Choice:
        ask, text, prompt = self._ask, self._loaded.pair.text, prepared.prompts[number]
        statistics = Statistics()
        if index % ask.n == 0:
            self._send(Opened(len(prompt), kept))
            statistics = Statistics(prompt_tokens=len(prompt), reused_tokens=kept, drafter_cold=cold)
        calls, marks = None, None
        if prepared.dialect is not None and isinstance(ask.prompt, Chat) and ask.prompt.tools is not None:
            marks = prepared.dialect.format.marks
            calls = Calls(index, prepared.dialect.format, ask.prompt.tools.tools)
        begins = prompt if isinstance(ask.prompt, Chat) else None
        answer = Answer(text, begins, stop=ask.stop, calls=marks)
        self._choices.append(Choice(index, answer, calls, self._names(prepared), statistics))
        return self._choices[-1]

    def _echo(self, index: int, prompt: list[int], scores: Sequence[TokenLogprob]) -> None:
        """Begin a choice with its prompt, if that was asked for."""
        given = self._ask.prompt
        if not isinstance(given, Raw) or not given.echo:
            return
        own = given.prompts[index // self._ask.n]
        text = own if isinstance(own, str) else self._loaded.pair.text.decode(prompt)
        self._send(Piece(index, "answer", text, tuple(scores), (Span(text, None, 0),)))

    def _decode(self, choice: Choice, held: CachedSequence, rounds: Iterator[Round], spent: float) -> Steps:
        """All rounds, a step each. `spent` are the seconds that the prompt took."""
        if self._ask.max_tokens == 0:
            return
        with _closed(rounds):
            while not choice.is_stopped:
                start = time.perf_counter()
                round = next(rounds, None)
                if round is None:
                    return
                now = time.perf_counter()
                self._first = now - self._submitted if self._first is None else self._first
                held.append(round.tokens)
                self._give(choice.read(round, now - start + spent))
                spent = 0.0
                yield

    def _give(self, events: Iterable[Event]) -> None:
        for event in events:
            self._send(event)

    def _names(self, prepared: Prepared) -> tuple[str, ...]:
        """Those of the drafters, in the order of their indices in rounds."""
        grammar = () if prepared.sampling.grammar is None else ("grammar",)
        prediction = ("prediction",) if prepared.prediction else ()
        return (*self._loaded.pair.drafter_names, *grammar, *prediction)

    def _usage(self, prepared: Prepared) -> Usage:
        total = added([choice.statistics for choice in self._choices])
        expected = prepared.prediction
        counts = [prediction_counts(expected, c.tokens) for c in self._choices if expected]
        return Usage(
            total.prompt_tokens,
            total.reused_tokens,
            sum(len(choice.tokens) for choice in self._choices),
            sum(choice.reasoning_tokens for choice in self._choices),
            sum(accepted for accepted, _ in counts),
            sum(rejected for _, rejected in counts),
        )

    def _timings(self) -> Timings:
        drafted = dict.fromkeys(name for choice in self._choices for name in choice.drafted)
        total = added([choice.statistics for choice in self._choices])
        return Timings(total, "+".join(drafted) or None, self._queued, self._first or 0.0)


@contextmanager
def _closed(rounds: Iterator[Round]) -> Iterator[None]:
    """Let the engine drop what is on trial, at the end."""
    try:
        yield
    finally:
        if isinstance(rounds, Generator):
            rounds.close()


def _timed(steps: Iterable[object]) -> Generator[None, None, float]:
    """Steps that take turns with those of others. Returns the seconds that they took themselves."""
    spent, start = 0.0, time.perf_counter()
    for _ in steps:
        spent += time.perf_counter() - start
        yield
        start = time.perf_counter()
    return spent + time.perf_counter() - start
