"""One sequence that is being decoded: its prompt is read, then rounds extend its history."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from mlx_spec.decode.blocks import checked
from mlx_spec.device import resident
from mlx_spec.device.attention import FullAttention
from mlx_spec.errors import InvalidValue, caught
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import Prompt
from mlx_spec.sampling.logits import Suppressed
from mlx_spec.types import (
    Draft,
    DraftCall,
    DraftChoice,
    Drafter,
    DraftLengthPolicy,
    Features,
    FinishReason,
    Observer,
    Reason,
    RequestDrafter,
    Sampler,
    TokenLogprob,
    no_draft,
)

# Prompt tokens in one forward pass: bounds the memory of its activations. One value serves all pairs. A pass
# reads the weights once. By published peaks that takes as long as the arithmetic of 7 (M1 Ultra) to 32
# (M5 Max) rows of a 4-bit model. So a longer step would save at most 3 % of a prompt's time. A measured step
# would change with the load, and the rounding of a prompt's numbers would change with it.
PREFILL_STEP = 1024
Result = TypeVar("Result")
# Why an answer ends with the emitted tokens (None if it goes on), and their log-probabilities.
Ending = tuple[FinishReason | None, tuple[TokenLogprob, ...]]

_log = logging.getLogger("mlx_spec")


@dataclass(frozen=True)
class PrefillStep:
    """A step of a prefill. It computed a part of a pass, or rows that the pass or a drafter reads."""

    rows: int = 0  # of the pass; 0 if the step was not a part of one
    share: float = 1.0  # of the pass
    unobserved: int = 0  # rows of the chunk that the target has and a drafter lacks
    ends_chunk: bool = False


def prefill(
    target: LMTarget,
    drafters: Sequence[Observer],
    prompt: Prompt,
    step: Callable[[], int] = lambda: PREFILL_STEP,
    in_parts: Callable[[], bool] = lambda: False,
) -> Generator[PrefillStep, None, None]:
    """Prefill the uncached part of a prompt except its last token, in chunks of `step()` tokens.

    A chunk is one pass. With `in_parts()`, each layer of the pass and each part of what drafters read is a
    step. The rounding of its numbers is the same, because it depends on the rows of the pass. A chunk never
    cuts a span whose rows see each other, so it may be longer. It is then always read in parts. Rows of a
    span, and arrays that a fork still has to copy, are computed in steps, too. May be closed early and called
    again.
    """
    for array in target.copies():
        mx.eval(array)
        yield PrefillStep()
    end = len(prompt) - 1
    read = list(prompt[: target.size + 1])  # the history so far, one list for all chunks and drafters
    while (low := target.size) < end:
        high = min(low + step(), end)
        if target.reads_spans_whole:
            high = prompt.whole_chunk(low, high)
        spans = [span for span in prompt.spans if span.end > low and span.start < high]
        if unknown := [span for span in spans if not span.rows.are_computed]:
            for array in unknown[0].rows.steps():
                mx.eval(array)
                yield PrefillStep()
            continue
        chunk, steps = (prompt[low:high], prompt.spans), target.prefill_parts
        if steps > 1 and (in_parts() or (spans and target.reads_spans_whole)):
            for features in target.prefill_by_layers(*chunk, ends_prompt=high == end):
                if features is None:
                    yield PrefillStep(high - low, 1 / steps)
                    continue
                yield from _observe_in_parts(drafters, prompt, read, features, high - low, 1 / steps)
            last = PrefillStep(ends_chunk=True)
        else:
            features = target.prefill(*chunk, ends_prompt=high == end)
            read += prompt[len(read) : high + 1]
            for drafter in drafters:
                drafter.observe(read, features)
            last = PrefillStep(high - low, ends_chunk=True)
        # Else freed buffers pile up, because scores of attention grow with each chunk. MLX gives an array
        # only a buffer that is at most 32 KB larger (mlx/backend/common/buffer_cache.h).
        mx.clear_cache()
        resident.grow()
        yield last


def _observe_in_parts(
    drafters: Sequence[Observer],
    prompt: Prompt,
    read: list[int],
    features: Features,
    rows: int,
    share: float,
    most: int = 128,
) -> Generator[PrefillStep, None, None]:
    """Show drafters the `features` of a chunk of `rows` rows. The step before took `share` of its pass.

    They get at most `most` rows in a step, for which `read` grows to the end of the chunk. If this is closed,
    they get all, because they must not fall behind the target.
    """
    start = len(read) - 1
    lows = iter(range(0, rows, most) if drafters else ())

    def observe(low: int) -> int:
        high = min(low + most, rows)
        read.extend(prompt[len(read) : start + high + 1])
        for drafter in drafters:
            drafter.observe(read, features.rows(low, high))
        return rows - high

    try:
        yield PrefillStep(rows, share, unobserved=rows if drafters else 0)
        for low in lows:
            yield PrefillStep(unobserved=observe(low))
    except GeneratorExit:
        for low in lows:
            observe(low)
        raise


@dataclass
class DraftMemory:
    """The memory that the drafters of one answer take and keep beside the caches that they count."""

    most: int  # bytes; beyond them drafters are suspected
    taken: int = 0  # bytes that rounds took, growth of caches included
    counted: int = 0  # bytes of the caches when `taken` was 0
    rounds: int = 0  # that took them
    suspected: float = 0.0  # bytes that drafters seem to take in a round

    def acquit(self) -> None:
        """Begin anew after a round that took far less, and suspect later the next time."""
        self.most, self.taken, self.rounds, self.suspected = 2 * self.most, 0, 0, 0.0


class RunningSequence:
    """One sequence: its history, target, drafters, policy and sampler.

    `read_prompt` replaces `prefill` if reading the prompt does more, such as scoring its tokens. `on_end`
    gets the tokens of the answer when it ends, also if it is incomplete. The scores of `attention` limit the
    passes that read the prompt. If a drafter or the policy fails, the answer goes on without drafts, with the
    policy that `on_draft_error` returns. So it does if they keep more than `most_draft_bytes` beside their
    caches.
    """

    def __init__(
        self,
        target: LMTarget,
        drafters: Sequence[Drafter],
        policy: DraftLengthPolicy,
        sampler: Sampler,
        prompt: Prompt,
        max_tokens: int,
        stop: frozenset[int] = frozenset(),
        request_drafters: Sequence[RequestDrafter] = (),
        read_prompt: Callable[[], Iterator[object]] | None = None,
        on_end: Callable[[list[int]], None] | None = None,
        suppressed: Suppressed | None = None,
        attention: FullAttention | None = None,
        on_draft_error: Callable[[Exception], DraftLengthPolicy] | None = None,
        most_draft_bytes: int = 2**62,
    ) -> None:
        if not prompt:
            raise InvalidValue("the prompt is empty: give at least one token")
        self.target, self.policy, self.sampler = target, policy, sampler
        self.prompt = prompt
        self.suppressed = suppressed  # the same for all sequences of a target
        self.history = list(prompt)
        self.remaining = max_tokens  # tokens that may still be emitted; 0 after a stop token
        self.error: Exception | None = None  # ends this sequence and no other
        self.draft_error: Exception | None = None  # ended the drafts of this answer
        self.failed_passes = 0  # passes with others that failed
        self.doubt: str | None = None  # see `Round.doubt`: of all tokens from now on
        self._drafters = (*drafters, *(extra.drafter for extra in request_drafters))
        self._request_drafters = request_drafters
        self._stop = stop
        self._read_prompt = read_prompt
        self._last_step = PrefillStep(ends_chunk=True)
        self._on_end = on_end
        self._attention = attention
        self._on_draft_error = on_draft_error
        self.draft_memory = DraftMemory(most_draft_bytes)
        self._emitted = 0
        self._drafting = sampler.drafting

    @property
    def unread(self) -> int:
        """Return the tokens of the prompt that the target or a drafter lacks."""
        return len(self.history) - 1 - self.target.size + self._last_step.unobserved

    @property
    def can_share_prefill(self) -> bool:
        reads_spans = any(span.end > self.target.size for span in self.prompt.spans)
        is_free = self._read_prompt is None and self._last_step.ends_chunk
        # Kernels depend on the rows of a pass: in half precision, K and V must not depend on other prompts.
        is_alone = self.target.is_recurrent or self.target.has_copies or self.target.rows.is_bitwise
        return is_free and not is_alone and not reads_spans

    def prefill(
        self,
        step: Callable[[], int] = lambda: PREFILL_STEP,
        in_parts: Callable[[], bool] = lambda: False,
    ) -> Generator[PrefillStep, None, None]:
        """Read the prompt in chunks of at most `step()` tokens, as the function `prefill` does."""
        if self._read_prompt is not None:
            yield from (PrefillStep(ends_chunk=True) for _ in self._read_prompt())
            return
        observers = [self] if self._drafters else []
        for made in prefill(self.target, observers, self.prompt, lambda: self._rows(step()), in_parts):
            self._last_step = made
            yield made

    def _rows(self, most: int) -> int:
        """Return how many tokens the next pass reads, at most `most` and what their scores allow.

        Where bits count, passes end where they end for a prompt that is read from its beginning.
        """
        start = self.target.size
        if self.target.rows.is_bitwise:
            most -= start % most
        rows = min(most, len(self.history) - 1 - start)
        return rows if self._attention is None else self._attention.longest_pass(start, rows)

    def begin(self) -> None:
        self.try_drafting(partial(self.policy.begin, self._request_drafters), None)
        self.draft_memory.counted = self.target.nbytes

    def end(self) -> None:
        if self._on_end is not None and self._emitted:
            try:
                self._on_end(self.history[-self._emitted :])
            except (OSError, MemoryError) as error:
                _log.warning("an answer is not kept for later ones: %s", error)
        self._emitted = 0

    def attempt(self, action: Callable[[], Result], otherwise: Result) -> Result:
        """Return the result of an action; `otherwise` if it or an earlier one failed."""
        if self.error is None:
            try:
                return action()
            except BaseException as error:  # whatever it is, the other sequences go on
                self.error = caught(error)
        return otherwise

    def try_drafting(self, action: Callable[[], Result], otherwise: Result) -> Result:
        """Return the result of a drafter or the policy; `otherwise` if the sequence drafts no more.

        If it fails, the answer goes on without drafts.
        """
        if self.error is None and self.draft_error is None:
            try:
                return action()
            except BaseException as error:
                self.stop_drafting(caught(error))
        return otherwise

    def stop_drafting(self, error: Exception) -> None:
        """Decode the rest of the answer plainly, because of an error."""
        if self.draft_error is None:
            # Not the text of the error: it may quote the text of a user.
            frames = traceback.extract_tb(error.__traceback__)[-1:]
            line = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in frames)
            failure = f"{type(error).__name__}{line}"
            _log.warning("a drafter failed, and an answer goes on without drafts: %s", failure)
            self.draft_error = error.with_traceback(None)  # whose frames would keep the drafter
            self._drafters = ()  # so that what they keep goes back
            on_error = self._on_draft_error
            self.policy = FixedPolicy(0, Reason.FAILED) if on_error is None else on_error(error)

    @property
    def is_drafting(self) -> bool:
        return bool(self._drafters)

    @property
    def drafter_bytes(self) -> int:
        """Return the bytes of the caches that its drafters count."""
        return self.try_drafting(lambda: sum(drafter.nbytes for drafter in self._drafters), 0)

    def recover(self, size: int) -> None:
        """Hold at most the first `size` tokens of the history after a pass that failed.

        They are fewer if the target cannot go back, or if a write of the pass can never be finished.
        """
        try:
            self.target.commit(0)
            if self.target.size > size:
                self.target.rewind(size)
            mx.eval(self.target.caches.arrays())
        except Exception:
            self.target.forget()

    def reread(self) -> None:
        """Bring the target to the end of the history after a pass that failed. Read again what is lost."""
        self.recover(len(self.history) - 1)
        for _ in prefill(self.target, (), replace(self.prompt, tokens=tuple(self.history))):
            if self.target.rows.is_bitwise:
                self.doubt = "tokens were read again after an error"

    @property
    def emitted(self) -> int:
        return len(self.history) - len(self.prompt)

    @property
    def pending(self) -> mx.array:
        """Return the last token of the history, [1] int32."""
        return mx.array(self.history[-1:], dtype=mx.int32)

    def draft_call(self, choice: DraftChoice) -> DraftCall:
        drafter = self._drafters[choice.drafter_index]
        return DraftCall(drafter, self.history, choice.limit, self._drafting)

    def draft(self, choices: Sequence[DraftChoice]) -> Draft:
        for choice in choices:
            call = self.draft_call(choice)
            draft = self.checked(call.drafter.draft(call.history, call.limit, call.sampler), choice)
            if draft.tokens.size:
                return draft.with_choice(choice)
        return no_draft()

    def checked(self, draft: Draft, choice: DraftChoice) -> Draft:
        """Return the draft of a choice. Raises ValueError if no target can verify it."""
        return checked(draft, choice.limit, self.sampler.vocab_size)

    def prepare(self, draft: Draft, choices: Sequence[DraftChoice]) -> None:
        """Let the drafter work ahead while its draft is verified, if its choice says so."""
        for choice in choices:
            if choice.ahead and choice.drafter_index == draft.drafter_index:
                self._drafters[choice.drafter_index].prepare(self.history, draft, self.sampler.drafting)

    def draw(self, logits: mx.array, drafted: mx.array, *, exact: bool = False) -> mx.array:
        """Draw the token after the history and `drafted`, [1] int32."""
        return self.sampler.draw(logits, self.history, drafted, exact=exact)[0]

    def until_stop(self, tokens: list[int]) -> list[int]:
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in self._stop), tokens)

    def emit(self, tokens: list[int], features: Features) -> Ending:
        """Append the tokens of a round. Return its finish reason and log-probabilities."""
        position = len(self.history)
        self.history += tokens
        self._emitted += len(tokens)
        self.observe(self.history, features)
        stopped = tokens[-1] in self._stop
        self.remaining = 0 if stopped else self.remaining - len(tokens)
        reason: FinishReason | None = "stop" if stopped else None if self.remaining else "length"
        return reason, self.sampler.logprobs(position, tokens)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Show the drafters the features of new tokens, the last ones of `history`."""
        for drafter in self._drafters:
            self.try_drafting(partial(drafter.observe, history, features), None)
