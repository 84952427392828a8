"""One request, from its prompts to its events: a row in the batch of its model for each of its choices.

A `Job` runs on the engine thread. Its rows go by
steps: a step is a chunk of the prompt, or a round that the batch has brought.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product

from mlx_spec import engine
from mlx_spec.apps.server.tool_formats import ToolCallReader
from mlx_spec.batch.scheduler import Batch, Result
from mlx_spec.drafters.model_free import prediction_counts
from mlx_spec.engine import RunningSequence
from mlx_spec.errors import InvalidValue, PromptTooLong
from mlx_spec.model.sequence import CachedSequence
from mlx_spec.sampling import LogitsProcessor
from mlx_spec.sampling.logprobs import score_prompt
from mlx_spec.session import Generation, Statistics, added
from mlx_spec.text.detokenizer import placed
from mlx_spec.text.stream import AnswerStream, TextPart
from mlx_spec.types import Round, TokenLogprob

from .answers import (
    ChoiceEnded,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptProgress,
    PromptRead,
    RoundDone,
    SourceSpan,
    TextDelta,
    Timings,
    Usage,
)
from .errors import LOG, Failure, invalid
from .metrics import JobCounter
from .models import LoadedModel
from .prefix_cache import Snapshot
from .preparation import PreparedRequest, prepare
from .request import Chat, GenerationRequest, RawPrompts

NO_LIMIT = 2**20  # tokens of a choice, if neither the request nor the model limits it

Send = Callable[[Event], None]
Steps = Generator[None, None, None]


@dataclass(eq=False)
class BatchRow:
    """A choice that runs: it reads its prompt in steps, then its rounds arrive from the model's batch.

    Rounds become events. Only the borders of text deltas depend on the rounds.
    """

    batch: Batch
    prompt: list[int]
    place: tuple[int, int]  # which prompt that is, and which choice of it; the first one reads it for all
    index: int  # of the choice in the answer
    sources: Sequence[str]  # names of the drafters, by the index that rounds hold
    known: int  # tokens of the prompt that its caches will hold from the beginning, at least
    arrived: deque[Result] = field(default_factory=deque)  # rounds not read yet, or the error that ended it
    steps: Steps = field(init=False)  # all that it does
    caches: CachedSequence | None = None  # those that it reads its prompt into
    sequence: RunningSequence | None = None  # whose prompt may be read together with others
    generation: Generation = field(init=False)
    answer: AnswerStream = field(init=False)
    calls: ToolCallReader | None = None
    _id: int | None = None  # in the batch
    _is_last: bool = False  # the last round was read

    @property
    def unread(self) -> int:
        """Return the tokens of its prompt that are to be read; 0 if it decodes."""
        if self._id is not None:
            return 0
        return len(self.prompt) - (self.known if self.caches is None else self.caches.parts.target.size)

    @property
    def is_first(self) -> bool:
        """Return True for the first choice of a prompt."""
        return self.place[1] == 0

    @property
    def statistics(self) -> Statistics:
        """Return the statistics so far. Only the first choice of a prompt counts the tokens of the prompt."""
        found = self.generation.statistics
        return found if self.is_first else replace(found, prompt_tokens=0, reused_tokens=0, drafter_cold=0)

    def join(self, sequence: RunningSequence) -> None:
        """Let the batch decode a sequence whose prompt was read."""
        self._id = self.batch.add(sequence, park=True, receive=self.arrived.append)

    def __next__(self) -> Round:
        if self._is_last:
            raise StopIteration
        result = self.arrived.popleft()
        if isinstance(result, Exception):
            raise result
        self._is_last = result.finish_reason is not None
        return result

    def close(self) -> None:
        """Leave the batch."""
        if self._id is not None:
            self.batch.remove(self._id)

    def read(self, parts: Sequence[TextPart]) -> Iterator[Event]:
        """Yield the events of a round that completed this text."""
        yield from self._events(parts)
        yield RoundDone(self.index, self.statistics, self.sources)

    def end(self) -> Iterator[Event]:
        """Yield the text that was held back, and the reason of the end."""
        yield from self._events(self.generation.end())
        if self.calls is not None:
            yield from self.calls.end()
        yield ChoiceEnded(self.index, self._finish_reason(), self.answer.finished)

    def _events(self, parts: Iterable[TextPart]) -> Iterator[Event]:
        for part in parts:
            if part.kind != "call":
                spans = tuple(SourceSpan(s.text, self._source(s.drafter), s.position) for s in part.spans)
                yield TextDelta(self.index, part.kind, part.text, part.logprobs, spans)
            elif self.calls is not None:
                yield from self.calls.read(part)

    def _source(self, drafter: int | None) -> str | None:
        return None if drafter is None else self.sources[drafter]

    def _finish_reason(self) -> FinishReason:
        if self.answer.finished is not None:
            return "stop"
        if self.statistics.finish_reason != "stop" and not self.answer.ended:
            return "length"
        return "tool_calls" if self.calls is not None and self.calls.complete else "stop"


class Job:
    """A request from its admission to its last event. Only `cancel` and `fail` are for other threads.

    Each choice is a row of the model's batch; a prompt is read once for all of them.
    """

    def __init__(
        self, request: GenerationRequest, send: Send, wake: Callable[[], None], counter: JobCounter
    ) -> None:
        self.request = request
        self.submitted = time.perf_counter()
        self.began = 0.0  # time.perf_counter(), once it has left the queue
        self.passed = 0  # later requests that began before it
        self.cancelled = False
        self.model: LoadedModel  # once it has begun
        self.rows: list[BatchRow] = []  # those that run
        self._send = send
        self._wake = wake
        self._counter = counter
        self._preparing: Future[PreparedRequest] | None = None  # None once it is prepared, too
        self._prepared: PreparedRequest
        self._sources: Sequence[str] = ()  # names of the drafters, by the index that rounds hold
        self._begun: list[BatchRow] = []  # all rows that have begun
        self._waiting: deque[tuple[int, int]] = deque()  # places of rows that have not begun
        self._snapshots: dict[int, Snapshot | None] = {}  # of prompts that were read
        self._scores: dict[int, list[TokenLogprob]] = {}  # of prompts, where they are echoed
        self._queued_seconds = 0.0
        self._first_token_seconds: float | None = None
        self._longest_pause = 0.0  # seconds between two rounds of a choice

    def cancel(self) -> None:
        """End the job within a round or a step of its prompt. No event follows. May be called again."""
        self._counter.cancel()
        if not self.cancelled:
            self.cancelled = True
            self._wake()

    def fail(self, failure: Failure) -> None:
        """Tell the client now that the job failed, whatever the engine does. Then it ends as if cancelled."""
        self.send(Failed(failure))
        self.cancelled = True

    def send(self, event: Event) -> None:
        """Hand an event to the client; cancel the job if that fails."""
        if self.cancelled:
            return
        try:
            self._counter.count(event)
            self._send(event)
        except Exception:
            LOG.exception("an event could not be handed over")
            self.cancelled = True

    def begin(self, model: LoadedModel, preparers: Executor) -> None:
        """Begin to prepare the request for its model."""
        self.model, self._queued_seconds = model, time.perf_counter() - self.submitted
        text, compile = model.pair.text, model.compile  # without the weights, which may be unloaded
        self._preparing = preparers.submit(prepare, self.request, text, compile)
        self._preparing.add_done_callback(lambda _: self._wake())

    @property
    def is_ready(self) -> bool:
        """Return True if the job needs a turn."""
        return self.cancelled or self._preparing is None or self._preparing.done()

    @property
    def preparing(self) -> list[Future[PreparedRequest]]:
        """Return what prepares the request, as long as it is not prepared."""
        return [] if self._preparing is None else [self._preparing]

    def check(self) -> bool:
        """Let the rows begin once the request is prepared. Return True if it has none. Raises Failure."""
        if self._preparing is None or not self._preparing.done():
            return False
        prepared, pair = self._preparing.result(), self.model.pair
        self._preparing = None
        for prompt in prepared.prompts:  # all of them, before anything is generated for the first
            try:
                pair.token_limit(prompt, NO_LIMIT)
            except PromptTooLong as error:
                raise invalid(str(error), self.request.prompt_param, "context_length_exceeded") from error
            except InvalidValue as error:
                param = self.request.prompt_param if isinstance(self.request.prompt, RawPrompts) else None
                raise invalid(str(error), param) from error
        self._prepared = prepared
        grammar = () if prepared.sampling.grammar is None else ("grammar",)
        prediction = ("prediction",) if prepared.prediction else ()
        self._sources = (*pair.drafter_names, *grammar, *prediction)
        self._waiting.extend(product(range(len(prepared.prompts)), range(self.request.n)))
        return self._end_if_done()

    @property
    def next_row(self) -> tuple[int, int] | None:
        """Return the place of the first row that could begin: one choice reads a prompt for all."""
        return next((each for each in self._waiting if each[1] == 0 or each[0] in self._snapshots), None)

    def has_room(self, place: tuple[int, int], unread: int) -> bool:
        """Return True if memory suffices for a row beside others of the model, with so many unread tokens."""
        return self.model.has_room(len(self._prepared.prompts[place[0]]), unread)

    def begin_row(self, place: tuple[int, int]) -> bool:
        """Begin a row: it takes caches. Return False. Raises what `step` raises."""
        self._waiting.remove(place)
        number, i = place
        prompt, index = self._prepared.prompts[number], number * self.request.n + i
        known = 0 if self._snapshots.get(number) is None else len(prompt) - 1
        row = BatchRow(self.model.batch, prompt, place, index, self._sources, known)
        row.steps = self._generate(row)
        self.rows.append(row)
        self._begun.append(row)
        return self.step(row)

    def step(self, row: BatchRow) -> bool:
        """Do a step of a row. Return True if it was the last of the request. Raises Failure and SpecError."""
        if next(row.steps, row) is not row:
            return False
        self.rows.remove(row)
        return self._end_if_done()

    def close(self) -> None:
        """End all rows, in whatever state they are. A client may hold the job on, but not its model."""
        try:
            if self._preparing is not None:
                self._preparing.cancel()
            for row in self.rows:
                row.steps.close()
        finally:
            self.rows, self._begun, self._snapshots = [], [], {}
            del self.model

    def _end_if_done(self) -> bool:
        if self.rows or self._waiting:
            return False
        self.send(self._finished())
        return True

    def _generate(self, row: BatchRow) -> Steps:
        """Generate a choice. All but the first of a prompt begin with the rows that it has read."""
        cache, number = self.model.prefix_cache, row.place[0]
        echo = isinstance(self.request.prompt, RawPrompts) and self.request.prompt.echo
        is_scored = echo and self.request.top_logprobs is not None and row.is_first
        with cache.borrow(row.prompt, self._snapshots.get(number)) as sequence:
            row.caches = sequence
            if is_scored:
                sequence.rewind_to_prefix(())  # no token of the prompt counts as cached
            running = self._prepare_row(row, sequence)
            row.sequence = None if is_scored or self.request.progress else running
            yield
            yield from self._prefill(row, sequence, self._score_prompt(row, sequence) if is_scored else None)
            cache.shrink()
            if row.is_first:
                statistics = row.statistics
                self.send(PromptRead(statistics.prompt_tokens, statistics.reused_tokens))
                self._snapshots[number] = cache.snapshot(sequence) if self.request.n > 1 else None
            if all(number != waiting for waiting, _ in self._waiting):
                self._snapshots[number] = None  # nobody needs it
            if echo:
                self.send(self._echo(row))
            if self.request.max_tokens != 0:
                yield from self._decode(row, running)
            for event in row.end():
                self.send(event)

    def _prepare_row(self, row: BatchRow, sequence: CachedSequence) -> RunningSequence:
        request, prepared, sampling = self.request, self._prepared, self._prepared.sampling
        if sampling.seed is not None:  # else all choices would be the same
            sampling = replace(sampling, seed=sampling.seed + row.place[1])
        running = self.model.pair.prepare(
            sequence.parts,
            row.prompt,
            sampling=sampling,
            max_tokens=NO_LIMIT if request.max_tokens is None else max(request.max_tokens, 1),
            stop=prepared.ends,
            top_logprobs=request.top_logprobs,
            prediction=prepared.prediction,
        )
        chat = request.prompt if isinstance(request.prompt, Chat) else None
        markers, last_call = None, None
        if prepared.dialect is not None and chat is not None and chat.tools:
            markers, is_free = prepared.dialect.syntax.marks, sampling.grammar is None
            row.calls = ToolCallReader(
                row.index, prepared.dialect, chat.tools.tools, one=not chat.tools.parallel and is_free
            )
            last_call = row.calls.is_last
        row.answer = AnswerStream(
            self.model.pair.text,
            None if chat is None else row.prompt,
            stop=request.stop,
            ends=prepared.ends,
            calls=markers,
            before=row.prompt if chat is None else (),
            last_call=last_call,
        )
        row.generation = Generation(sequence, row.prompt, row, row.answer)
        return running

    def _prefill(self, row: BatchRow, sequence: CachedSequence, scoring: Iterable[None] | None) -> Steps:
        """Process the prompt in steps, and report them if the request wants it."""
        parts, batch, length = sequence.parts, self.model.batch, len(row.prompt)
        target, cached = parts.target, parts.target.size
        reports = self.request.progress and cached < length - 1
        if reports:
            self.send(PromptProgress(length, cached, cached))
        steps = scoring or engine.prefill(target, parts.drafters, row.prompt, batch.chunk)
        for _ in row.generation.prefill(batch.timed(steps, target)):
            if reports:
                self.send(PromptProgress(length, cached, target.size))
            yield

    def _score_prompt(self, row: BatchRow, sequence: CachedSequence) -> Iterator[None]:
        """Process a prompt and keep the logprobs of its tokens; the first token has none."""
        pair, top, prompt, parts = self.model.pair, self.request.top_logprobs or 0, row.prompt, sequence.parts
        processor = LogitsProcessor(replace(self.request.sampling, grammar=None), 0, pair.info.vocab_size)
        scores = [TokenLogprob(prompt[0], pair.text.token_bytes(prompt[0]), math.nan)]
        self._scores[row.place[0]] = scores
        for more in score_prompt(parts.target, parts.drafters, processor, prompt, pair.text, top):
            scores.extend(more)
            yield

    def _echo(self, row: BatchRow) -> TextDelta:
        """Return the prompt as the beginning of its choice."""
        assert isinstance(self.request.prompt, RawPrompts)
        number, text = row.place[0], self.model.pair.text
        given, scores = self.request.prompt.prompts[number], placed(self._scores.get(number, ()), text)
        echoed = given if isinstance(given, str) else text.decode(row.prompt)
        row.answer.count_in_front(echoed)
        return TextDelta(row.index, "answer", echoed, scores, (SourceSpan(echoed, None, 0),))

    def _decode(self, row: BatchRow, running: RunningSequence) -> Steps:
        """Decode in the batch: a step for each of its rounds."""
        row.join(running)
        with closing(row), closing(row.generation.rounds()) as rounds:
            yield
            last = math.inf
            for round, parts in rounds:
                now = time.perf_counter()
                if self._first_token_seconds is None:
                    self._first_token_seconds = now - self.submitted
                self._longest_pause, last = max(self._longest_pause, now - last), now
                for event in row.read(parts):
                    self.send(event)
                if round.finish_reason is None and not row.answer.ended:
                    yield

    def _finished(self) -> Finished:
        rows = sorted(self._begun, key=lambda row: row.index)
        total = added([row.statistics for row in rows])
        expected = self._prepared.prediction
        outputs = [row.generation.tokens for row in rows]
        counts = [prediction_counts(expected, tokens) for tokens in outputs if expected]
        usage = Usage(
            total.prompt_tokens,
            total.reused_tokens,
            sum(map(len, outputs)),
            sum(row.answer.reasoning_tokens for row in rows),
            sum(accepted for accepted, _ in counts),
            sum(rejected for _, rejected in counts),
        )
        drafted = "+".join(self._sources[drafter] for drafter in total.by_drafter) or None
        first = self._first_token_seconds or 0.0
        return Finished(usage, Timings(total, drafted, self._queued_seconds, first, self._longest_pause))
