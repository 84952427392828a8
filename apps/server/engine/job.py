"""Answer one request on the engine thread: each choice enters the batch, and its rounds become events.

The batch of the model decides when a choice begins, and when its prompt is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace

from mlx_spec.decode.answer import Answer
from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.scheduler import Entry, Result
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.decode.statistics import Statistics, added
from mlx_spec.drafters.per_request import prediction_counts
from mlx_spec.errors import InvalidValue, PromptTooLong
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import LogitsProcessor
from mlx_spec.sampling.logprobs import score_prompt
from mlx_spec.tokenizer.detokenizer import placed
from mlx_spec.tokenizer.stream import AnswerStream, TextPart, TokenText
from mlx_spec.types import Round, TokenLogprob

from ..errors import LOG, Failure, invalid
from ..requests.request import Chat, GenerationRequest, RawPrompts
from .answers import (
    ChoiceEnded,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptProgress,
    PromptRead,
    RoundDone,
    TextDelta,
    Timings,
    Usage,
)
from .metrics import JobCounter
from .models import LoadedModel
from .prefix_cache import Snapshot
from .preparation import PreparedRequest, prepare
from .tool_calls import ToolCallReader

NO_LIMIT = 2**20  # tokens of a choice, if neither the request nor the model limits it

Send = Callable[[Event], None]
# Answers a request in turns beside the rounds of the batch: an event for each turn, None while it waits for
# memory. The last event is `Finished`.
Turns = Callable[[LoadedModel, GenerationRequest, PreparedRequest], Iterator[Event | None]]


class RequestChoice(Entry):
    """A choice of a request: it waits in the batch, then its rounds become events.

    The first choice of a prompt reads it, and keeps for the others what they need of it.
    """

    answer: Answer  # set when it begins

    def __init__(self, job: Job, prompt_number: int, number: int, first: RequestChoice | None = None) -> None:
        super().__init__(job, park=True)
        self.job = job
        self.prompt_number = prompt_number
        self.number = number  # among the choices of its prompt
        self.prompt = job.prepared.prompts[prompt_number]
        self.index = prompt_number * job.request.n + number  # in the answer
        self.is_open = True
        self.snapshot: Snapshot | None = None  # caches of the prompt, for later choices
        self._first = first  # None for the first choice
        self._caches: CachedSequence | None = None  # None until it has begun, and once it is closed
        self._calls: ToolCallReader | None = None
        self.scores: list[TokenLogprob] = []  # of the prompt, if it is echoed
        self.reported = -len(self.prompt)  # tokens of the prompt at its last progress
        self.last_round = math.inf  # time.perf_counter() of its last round

    @property
    def statistics(self) -> Statistics:
        """Return the statistics so far. Only the first choice of a prompt counts the tokens of the prompt."""
        statistics = self.answer.statistics
        return statistics if self.reader is self else statistics.without_prompt()

    @property
    def reader(self) -> RequestChoice:
        return self if self._first is None else self._first

    # --- hooks of the batch

    def begin(self) -> RunningSequence:
        """Take caches and begin. Later choices of a prompt begin with a copy of the caches that hold it."""
        model = self.job.model
        caches = model.prefix_cache.take(self.prompt, self.reader.snapshot)
        if self.number == self.job.request.n - 1:
            self.reader.snapshot = None
        try:
            model.prefix_cache.shrink(model.chunk_bytes(len(self.prompt)))
            running = self._prepare(caches)
            self.answer = Answer(caches, running, self._stream())
            if running.unread:
                self._report(running.target.size)
        except BaseException:
            model.prefix_cache.forget(caches)
            raise
        self._caches = caches
        return running

    def waits(self) -> bool:
        return self.job.model.prefix_cache.waits(self.prompt)

    def has_room(self, unread: int) -> bool:
        return self.job.has_place() and self.job.model.has_room(len(self.prompt), unread)

    def on_progress(self, seconds: float) -> None:
        """Count a chunk of the prompt. Once all is read, enter the other choices of the prompt."""
        job, sequence, cache = self.job, self.sequence, self.job.model.prefix_cache
        self.answer.count_prefill(seconds)
        if self.answer.statistics.reused_tokens < sequence.target.size:
            self._report(sequence.target.size, is_last=not sequence.unread)
        # Kept conversations give way to this one as it grows, and to the passes that read it.
        cache.shrink(job.model.chunk_bytes(len(self.prompt)) if sequence.unread else 0)
        if sequence.unread:
            return
        if self.reader is self:
            statistics = self.statistics
            job.send(PromptRead(statistics.prompt_tokens, statistics.reused_tokens))
            if job.request.n > 1:
                self.snapshot = cache.snapshot(self.answer.sequence)
            for number in range(1, job.request.n):
                job.enter(RequestChoice(job, self.prompt_number, number, self))
        if job.request.echoes:
            job.send(self._echo())
        if job.request.max_tokens == 0:
            self.end()

    # --- rounds

    def read(self, round: Round) -> Iterator[Event]:
        yield from self._events(self.answer.add(round))
        yield RoundDone(self.index, self.statistics)

    def end(self) -> None:
        """Send the text that was held back, and then why the choice ended. Leave the batch."""
        for event in self._events(self.answer.stream.end()):
            self.job.send(event)
        for event in () if self._calls is None else self._calls.end():
            self.job.send(event)
        self.job.send(ChoiceEnded(self.index, self._finish_reason(), self.answer.stream.finished))
        self.close()

    def close(self, *, failed: bool = False) -> None:
        """Leave the batch. Give the caches back, or forget them after an error: their content is unknown."""
        self.is_open = False
        cache, caches, self._caches = self.job.model.prefix_cache, self._caches, None
        try:
            self.job.model.batch.remove(self.id)
            if caches is not None and not failed:
                del self.sequence
                self.answer.close()
                cache.give_back(caches)
        except Exception:
            LOG.exception("a request did not end well")
            failed = True
        if caches is not None and failed:
            cache.forget(caches)

    def _events(self, parts: Iterable[TextPart]) -> Iterator[Event]:
        for part in parts:
            if self._calls is not None and part.kind in self._calls.kinds:
                yield from self._calls.read(part)
            elif part.kind != "call":
                yield TextDelta(self.index, part.kind, part.text, part.logprobs, part.spans)

    def _finish_reason(self) -> FinishReason:
        stream = self.answer.stream
        if stream.finished is not None:
            return "stop"
        if self.answer.statistics.finish_reason != "stop" and not stream.ended:
            return "length"
        return "tool_calls" if self._calls is not None and self._calls.complete else "stop"

    # --- its parts

    def _prepare(self, sequence: CachedSequence) -> RunningSequence:
        request, prepared, sampling = self.job.request, self.job.prepared, self.job.prepared.sampling
        is_scored = self.reader is self and request.echoes and request.top_logprobs is not None
        if is_scored:
            sequence.rewind_to_prefix(text_prompt(()))  # no token of the prompt counts as cached
        if sampling.seed is not None:  # else all choices would be the same
            sampling = replace(sampling, seed=sampling.seed + self.number)
        try:
            return self.job.model.pair.prepare(
                sequence,
                self.prompt,
                sampling=sampling,
                max_tokens=NO_LIMIT if request.max_tokens is None else max(request.max_tokens, 1),
                stop=prepared.ends,
                top_logprobs=request.top_logprobs,
                prediction=prepared.prediction,
                read_prompt=self._score_prompt if is_scored else None,
                key=request.key if request.earlier_answers else None,
            )
        except InvalidValue as error:  # the prompt was checked: only a bias depends on the vocabulary, too
            raise invalid(str(error), "logit_bias") from error

    def _stream(self) -> AnswerStream:
        request, prepared = self.job.request, self.job.prepared
        chat = request.prompt if isinstance(request.prompt, Chat) else None
        markers, separator, last_call = None, "", None
        format = prepared.tool_format
        if format is not None and chat is not None and chat.tools:
            is_free = prepared.sampling.grammar is None
            markers = None if format.is_answer else format.syntax.markers
            separator = format.syntax.separator
            self._calls = ToolCallReader(
                self.index, format, chat.tools.tools, one=not chat.tools.parallel and is_free
            )
            last_call = self._calls.is_last
        return AnswerStream(
            self.job.model.pair.tokenizer,
            None if chat is None else self.prompt,
            stop=request.stop,
            ends=prepared.ends,
            calls=markers,
            separator=separator,
            before=self.prompt if chat is None or chat.begun else (),
            last_call=last_call,
        )

    def _report(self, read: int, *, is_last: bool = False) -> None:
        """Send how much of the prompt is read, at its end and whenever that has grown by a hundredth."""
        total, reader = len(self.prompt), self.reader
        if self.job.request.progress and (is_last or 100 * (read - reader.reported) >= total):
            reader.reported = read
            statistics = self.answer.statistics
            self.job.send(PromptProgress(total, statistics.reused_tokens, read, statistics.prefill_seconds))

    def _score_prompt(self) -> Iterator[bool]:
        """Process the prompt and keep the logprobs of its tokens; the first token has none.

        Yields True after each chunk.
        """
        request, pair, prompt = self.job.request, self.job.model.pair, self.prompt
        processor = LogitsProcessor(replace(request.sampling, grammar=None), 0, pair.info.vocab_size)
        self.scores.append(TokenLogprob(prompt[0], pair.tokenizer.token_bytes(prompt[0]), math.nan))
        target, observers, top = self.sequence.target, [self.sequence], request.top_logprobs or 0
        for more in score_prompt(target, observers, processor, prompt, pair.tokenizer, top):
            self.scores.extend(more)
            yield True

    def _echo(self) -> TextDelta:
        raw, tokenizer = self.job.request.prompt, self.job.model.pair.tokenizer
        assert isinstance(raw, RawPrompts)
        text = raw.prompts[self.prompt_number]
        echoed = text if isinstance(text, str) else tokenizer.decode(self.prompt.tokens)
        self.answer.stream.count_in_front(echoed)
        scores = placed(self.reader.scores, tokenizer)
        return TextDelta(self.index, "answer", echoed, scores, (TokenText(echoed, None, 0),))


class Job:
    """A request from its admission to its last event. Other threads may only call `cancel` and `fail`.

    The choices of a prompt read it once.
    """

    def __init__(
        self,
        request: GenerationRequest,
        send: Send,
        wake: Callable[[], None],
        counter: JobCounter,
        answer_in_turns: Turns | None = None,
    ) -> None:
        self.request = request
        self.submitted = time.perf_counter()
        self.began = 0.0  # time.perf_counter(), once it has left the queue
        self.passed = 0  # later requests that began before it
        self.cancelled = False
        self.model: LoadedModel  # set by `begin`
        self.prepared: PreparedRequest  # set once it is prepared
        self.has_place: Callable[[], bool]  # True if the server may run one more choice
        self.choices: list[RequestChoice] = []  # that have entered the batch
        self._send = send
        self._wake = wake
        self._counter = counter
        self._preparing: Future[PreparedRequest] | None = None  # None before and after preparing
        self._answer_in_turns = answer_in_turns
        self._turns: Iterator[Event | None] | None = None  # None if choices answer
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
        """Send the failure to the client at once. The job then ends as if it were cancelled."""
        self.send(Failed(failure))
        self.cancelled = True

    def send(self, event: Event) -> None:
        """Send an event to the client; cancel the job if that fails."""
        if self.cancelled:
            return
        try:
            self._counter.count(event)
            self._send(event)
        except Exception:
            LOG.exception("an event could not be handed over")
            self.cancelled = True

    def begin(self, model: LoadedModel, preparers: Executor, has_place: Callable[[], bool]) -> None:
        self.model, self._queued_seconds = model, time.perf_counter() - self.submitted
        self.has_place = has_place
        # The future must not keep the model: it may be unloaded meanwhile.
        tokenizer, compile, vision = model.pair.tokenizer, model.compile, model.vision
        self._preparing = preparers.submit(
            prepare, self.request, tokenizer, compile, vision, model.pair.info.context_length
        )
        self._preparing.add_done_callback(lambda _: self._wake())

    @property
    def is_ready(self) -> bool:
        """Return True if the job needs a turn."""
        return self.cancelled or self._preparing is None or self._preparing.done()

    @property
    def preparing(self) -> list[Future[PreparedRequest]]:
        """Return the future that prepares the request, in a list; [] once it is prepared."""
        return [] if self._preparing is None else [self._preparing]

    def check(self) -> bool:
        """Start once the request is prepared, then take turns. Return True if the job is done.

        Raises Failure.
        """
        if self._preparing is None:
            return self._take_turn()
        if not self._preparing.done():
            return False
        prepared, pair = self._preparing.result(), self.model.pair
        self._preparing = None
        for prompt in prepared.prompts:  # check all before anything is generated for the first
            try:
                pair.token_limit(prompt, NO_LIMIT)
            except PromptTooLong as error:
                raise invalid(str(error), self.request.prompt_param, "context_length_exceeded") from error
            except InvalidValue as error:
                param = self.request.prompt_param if isinstance(self.request.prompt, RawPrompts) else None
                raise invalid(str(error), param) from error
        self.prepared = prepared
        if self._answer_in_turns is not None:
            self._turns = self._answer_in_turns(self.model, self.request, prepared)
        else:
            for number in range(len(prepared.prompts)):
                self.enter(RequestChoice(self, number, 0))
        return self._take_turn()

    def enter(self, choice: RequestChoice) -> None:
        """Let a choice wait in the batch until there is room."""
        self.model.batch.enter(choice)
        self.choices.append(choice)

    def receive(self, choice: RequestChoice, result: Result) -> bool:
        """Read a round of a choice, or raise its error. Return True if it was the last of the request."""
        try:
            if isinstance(result, Exception):
                raise result
            self._measure(choice)
            for event in choice.read(result):
                self.send(event)
            if choice.answer.is_complete:
                choice.end()
        except Exception:
            choice.close(failed=True)
            raise
        return self._end_if_done()

    def close(self) -> None:
        """End all choices in any state, and release the model: a client may still hold the job."""
        if self._preparing is not None:
            self._preparing.cancel()
        for choice in self.open_choices:
            choice.close()
        self.choices, self._turns = [], None
        del self.model

    @property
    def open_choices(self) -> list[RequestChoice]:
        return [choice for choice in self.choices if choice.is_open]

    def _take_turn(self) -> bool:
        """Take a turn beside the rounds of the batch. Return True if the job is done."""
        if self._turns is None:
            return self._end_if_done()
        event = next(self._turns)
        if event is not None:
            self.send(event)
        return isinstance(event, Finished)

    def _measure(self, choice: RequestChoice) -> None:
        """Measure when the first token came, and the longest pause."""
        now = time.perf_counter()
        if self._first_token_seconds is None:
            self._first_token_seconds = now - self.submitted
        self._longest_pause, choice.last_round = max(self._longest_pause, now - choice.last_round), now

    def _end_if_done(self) -> bool:
        if self.open_choices:
            return False
        self.send(self._finished())
        return True

    def _finished(self) -> Finished:
        choices = sorted(self.choices, key=lambda choice: choice.index)
        total = added([choice.statistics for choice in choices])
        answers, expected = [choice.answer for choice in choices], self.prepared.prediction
        counts = [prediction_counts(expected, answer.tokens) for answer in answers if expected]
        usage = Usage(
            total.prompt_tokens,
            total.reused_tokens,
            sum(answer.stream.completion_tokens for answer in answers),
            sum(answer.stream.reasoning_tokens for answer in answers),
            sum(accepted for accepted, _ in counts),
            sum(rejected for _, rejected in counts),
            sum(span.count for prompt in self.prepared.prompts for span in prompt.spans),
            total.reread_tokens,
            total.reread_words,
        )
        drafted = "+".join(total.by_drafter) or None
        first = self._first_token_seconds or 0.0
        return Finished(usage, Timings(total, drafted, self._queued_seconds, first, self._longest_pause))
