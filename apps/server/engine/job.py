"""Answer one request on the engine thread: each choice enters the batch, and its rounds become events.

The batch of the model decides when a choice begins, and when its prompt is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial

from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.scheduler import Entry, Result
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.decode.statistics import Statistics, added
from mlx_spec.drafters.model_free import prediction_counts
from mlx_spec.errors import InvalidValue, PromptTooLong
from mlx_spec.prompt import Prompt, text_prompt
from mlx_spec.sampling import LogitsProcessor
from mlx_spec.sampling.logprobs import score_prompt
from mlx_spec.session import Generation
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


@dataclass(eq=False)
class RequestChoice:
    """A choice of a request: its sequence, and the events that its rounds become."""

    prompt: Prompt
    place: tuple[int, int]  # numbers of the prompt, and of the choice among its choices: 0 reads it for all
    index: int  # of the choice in the answer
    entry: Entry = field(init=False)  # in the batch
    caches: CachedSequence | None = None  # None until the choice begins
    generation: Generation = field(init=False)
    answer: AnswerStream = field(init=False)
    calls: ToolCallReader | None = None
    last_round: float = math.inf  # time.perf_counter() of its last round

    @property
    def is_first(self) -> bool:
        """Return True for the first choice of a prompt, which reads it for the others."""
        return self.place[1] == 0

    @property
    def statistics(self) -> Statistics:
        """Return the statistics so far. Only the first choice of a prompt counts the tokens of the prompt."""
        found = self.generation.statistics
        return found if self.is_first else found.without_prompt()

    def read(self, round: Round) -> Iterator[Event]:
        """Yield the events of a round."""
        yield from self._events(self.generation.add(round))
        yield RoundDone(self.index, self.statistics)

    def end(self) -> Iterator[Event]:
        """Yield the text that was held back, and then why the choice ended."""
        yield from self._events(self.generation.end())
        if self.calls is not None:
            yield from self.calls.end()
        yield ChoiceEnded(self.index, self._finish_reason(), self.answer.finished)

    def _events(self, parts: Iterable[TextPart]) -> Iterator[Event]:
        for part in parts:
            if self.calls is not None and part.kind in self.calls.kinds:
                yield from self.calls.read(part)
            elif part.kind != "call":
                yield TextDelta(self.index, part.kind, part.text, part.logprobs, part.spans)

    def _finish_reason(self) -> FinishReason:
        if self.answer.finished is not None:
            return "stop"
        if self.statistics.finish_reason != "stop" and not self.answer.ended:
            return "length"
        return "tool_calls" if self.calls is not None and self.calls.complete else "stop"


class Job:
    """A request from its admission to its last event. Other threads may only call `cancel` and `fail`.

    The choices of a prompt read it once.
    """

    def __init__(
        self, request: GenerationRequest, send: Send, wake: Callable[[], None], counter: JobCounter
    ) -> None:
        self.request = request
        self.submitted = time.perf_counter()
        self.began = 0.0  # time.perf_counter(), once it has left the queue
        self.passed = 0  # later requests that began before it
        self.cancelled = False
        self.model: LoadedModel  # set by `begin`
        self.choices: dict[int, RequestChoice] = {}  # waiting and running ones by their id in the batch
        self._send = send
        self._wake = wake
        self._counter = counter
        self._has_place: Callable[[], bool]  # True if the server may run one more choice
        self._preparing: Future[PreparedRequest] | None = None  # None before and after preparing
        self._prepared: PreparedRequest
        self._all_choices: list[RequestChoice] = []
        self._snapshots: dict[int, Snapshot | None] = {}  # caches of read prompts, for their later choices
        self._scores: dict[int, list[TokenLogprob]] = {}  # logprobs of prompts that are echoed
        self._queued_seconds = 0.0
        self._reported: dict[int, int] = {}  # tokens of each prompt at its last progress
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
        """Begin to prepare the request for its model."""
        self.model, self._queued_seconds = model, time.perf_counter() - self.submitted
        self._has_place = has_place
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
            return self.go_on()
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
        self._prepared = prepared
        self.start(prepared)
        return self.go_on()

    def start(self, prepared: PreparedRequest) -> None:
        """Begin: the first choice of each prompt waits in the batch."""
        for number in range(len(prepared.prompts)):
            self._enter(number, 0)

    def go_on(self) -> bool:
        """Take a turn beside the rounds of the batch. Return True if the job is done."""
        return self._end_if_done()

    def receive(self, id: int, result: Result) -> bool:
        """Read a round of a choice, or raise its error. Return True if it was the last of the request."""
        choice = self.choices[id]
        try:
            if isinstance(result, Exception):
                raise result
            self._measure(choice)
            for event in choice.read(result):
                self.send(event)
            if choice.generation.is_complete:
                self._end_choice(choice)
        except Exception:
            self._close_choice(choice, failed=True)
            raise
        return self._end_if_done()

    def close(self) -> None:
        """End all choices in any state, and release the model: a client may still hold the job."""
        if self._preparing is not None:
            self._preparing.cancel()
        for choice in tuple(self.choices.values()):
            self._close_choice(choice)
        self._all_choices, self._snapshots = [], {}
        del self.model

    # --- choices

    def _enter(self, number: int, i: int) -> None:
        """Let a choice wait in the batch until there is room."""
        prompt = self._prepared.prompts[number]
        choice = RequestChoice(prompt, (number, i), number * self.request.n + i)
        choice.entry = Entry(
            partial(self._begin_choice, choice),
            owner=self,
            waits=partial(self.model.prefix_cache.waits, prompt),
            has_room=lambda unread: self._has_place() and self.model.has_room(len(prompt), unread),
            on_progress=partial(self._count_chunk, choice),
            park=True,
        )
        self.choices[self.model.batch.enter(choice.entry)] = choice
        self._all_choices.append(choice)

    def _begin_choice(self, choice: RequestChoice) -> RunningSequence:
        """Take caches and begin. Later choices of a prompt begin with a copy of the caches that hold it."""
        number, i = choice.place
        cache = self.model.prefix_cache
        choice.caches = cache.take(choice.prompt, self._snapshots.get(number))
        cache.shrink(self.model.chunk_bytes(len(choice.prompt)))
        if i == self.request.n - 1:
            self._snapshots.pop(number, None)
        is_scored = self._echoes and self.request.top_logprobs is not None and choice.is_first
        if is_scored:
            choice.caches.rewind_to_prefix(text_prompt(()))  # no token of the prompt counts as cached
        running = self._prepare_choice(choice, choice.caches, is_scored)
        if running.unread:
            self._report(choice, running.target.size)
        return running

    def _count_chunk(self, choice: RequestChoice, seconds: float) -> None:
        """Count a chunk of a prompt. Once all is read, enter the other choices of the prompt."""
        assert choice.caches is not None
        choice.generation.count_prefill(seconds)
        sequence, cached = choice.entry.sequence, choice.generation.statistics.reused_tokens
        if cached < sequence.target.size:
            self._report(choice, sequence.target.size, is_last=not sequence.unread)
        # Kept conversations give way to this one as it grows, and to the passes that read it.
        cache, number = self.model.prefix_cache, choice.place[0]
        cache.shrink(self.model.chunk_bytes(len(choice.prompt)) if sequence.unread else 0)
        if sequence.unread:
            return
        if choice.is_first:
            statistics = choice.statistics
            self.send(PromptRead(statistics.prompt_tokens, statistics.reused_tokens))
            if self.request.n > 1:
                self._snapshots[number] = cache.snapshot(choice.caches)
            for i in range(1, self.request.n):
                self._enter(number, i)
        if self._echoes:
            self.send(self._echo(choice))
        if self.request.max_tokens == 0:
            self._end_choice(choice)

    def _report(self, choice: RequestChoice, read: int, *, is_last: bool = False) -> None:
        """Send how much of a prompt is read, at its end and whenever that has grown by a hundredth."""
        number, total = choice.place[0], len(choice.prompt)
        if self.request.progress and (is_last or 100 * (read - self._reported.get(number, -total)) >= total):
            self._reported[number] = read
            statistics = choice.generation.statistics
            seconds = statistics.prefill_seconds
            self.send(PromptProgress(total, statistics.reused_tokens, read, seconds))

    def _measure(self, choice: RequestChoice) -> None:
        """Measure when the first token came, and the longest pause."""
        now = time.perf_counter()
        if self._first_token_seconds is None:
            self._first_token_seconds = now - self.submitted
        self._longest_pause, choice.last_round = max(self._longest_pause, now - choice.last_round), now

    def _end_choice(self, choice: RequestChoice) -> None:
        for event in choice.end():
            self.send(event)
        self._close_choice(choice)

    def _close_choice(self, choice: RequestChoice, *, failed: bool = False) -> None:
        """Leave the batch. Give the caches back, or forget them after an error: their content is unknown."""
        del self.choices[choice.entry.id]
        cache = self.model.prefix_cache
        try:
            self.model.batch.remove(choice.entry.id)
            if choice.caches is not None and not failed:
                choice.generation.close()
                cache.give_back(choice.caches)
        except Exception:
            LOG.exception("a request did not end well")
            failed = True
        if choice.caches is not None and failed:
            cache.forget(choice.caches)

    def _end_if_done(self) -> bool:
        if self.choices:
            return False
        self.send(self._finished())
        return True

    @property
    def _echoes(self) -> bool:
        return isinstance(self.request.prompt, RawPrompts) and self.request.prompt.echo

    def _prepare_choice(
        self, choice: RequestChoice, sequence: CachedSequence, is_scored: bool
    ) -> RunningSequence:
        request, prepared, sampling = self.request, self._prepared, self._prepared.sampling
        if sampling.seed is not None:  # else all choices would be the same
            sampling = replace(sampling, seed=sampling.seed + choice.place[1])
        try:
            running = self.model.pair.prepare(
                sequence,
                choice.prompt,
                sampling=sampling,
                max_tokens=NO_LIMIT if request.max_tokens is None else max(request.max_tokens, 1),
                stop=prepared.ends,
                top_logprobs=request.top_logprobs,
                prediction=prepared.prediction,
                read_prompt=partial(self._score_prompt, choice, sequence) if is_scored else None,
                key=request.key if request.earlier_answers else None,
            )
        except InvalidValue as error:  # the prompt was checked: only a bias depends on the vocabulary, too
            raise invalid(str(error), "logit_bias") from error
        chat = request.prompt if isinstance(request.prompt, Chat) else None
        markers, last_call = None, None
        if prepared.tool_format is not None and chat is not None and chat.tools:
            is_free = sampling.grammar is None
            markers = None if prepared.tool_format.is_answer else prepared.tool_format.syntax.marks
            choice.calls = ToolCallReader(
                choice.index, prepared.tool_format, chat.tools.tools, one=not chat.tools.parallel and is_free
            )
            last_call = choice.calls.is_last
        choice.answer = AnswerStream(
            self.model.pair.tokenizer,
            None if chat is None else choice.prompt,
            stop=request.stop,
            ends=prepared.ends,
            calls=markers,
            before=choice.prompt if chat is None or chat.begun else (),
            last_call=last_call,
        )
        choice.generation = Generation(sequence, choice.prompt, choice.answer)
        return running

    def _score_prompt(self, choice: RequestChoice, sequence: CachedSequence) -> Iterator[bool]:
        """Process a prompt and keep the logprobs of its tokens; the first token has none.

        Yields True after each chunk.
        """
        pair, top = self.model.pair, self.request.top_logprobs or 0
        prompt, target = choice.prompt, sequence.target
        processor = LogitsProcessor(replace(self.request.sampling, grammar=None), 0, pair.info.vocab_size)
        scores = [TokenLogprob(prompt[0], pair.tokenizer.token_bytes(prompt[0]), math.nan)]
        self._scores[choice.place[0]] = scores
        observers = [choice.entry.sequence]
        for more in score_prompt(target, observers, processor, prompt, pair.tokenizer, top):
            scores.extend(more)
            yield True

    def _echo(self, choice: RequestChoice) -> TextDelta:
        """Return the prompt as the beginning of its choice."""
        assert isinstance(self.request.prompt, RawPrompts)
        number, tokenizer = choice.place[0], self.model.pair.tokenizer
        given, scores = self.request.prompt.prompts[number], placed(self._scores.get(number, ()), tokenizer)
        echoed = given if isinstance(given, str) else tokenizer.decode(choice.prompt.tokens)
        choice.answer.count_in_front(echoed)
        return TextDelta(choice.index, "answer", echoed, scores, (TokenText(echoed, None, 0),))

    def _finished(self) -> Finished:
        choices = sorted(self._all_choices, key=lambda choice: choice.index)
        total = added([choice.statistics for choice in choices])
        expected = self._prepared.prediction
        outputs = [choice.generation.tokens for choice in choices]
        counts = [prediction_counts(expected, tokens) for tokens in outputs if expected]
        usage = Usage(
            total.prompt_tokens,
            total.reused_tokens,
            sum(map(len, outputs)),
            sum(choice.answer.reasoning_tokens for choice in choices),
            sum(accepted for accepted, _ in counts),
            sum(rejected for _, rejected in counts),
            sum(span.count for prompt in self._prepared.prompts for span in prompt.spans),
            total.reread_tokens,
            total.reread_words,
        )
        drafted = "+".join(total.by_drafter) or None
        first = self._first_token_seconds or 0.0
        return Finished(usage, Timings(total, drafted, self._queued_seconds, first, self._longest_pause))
