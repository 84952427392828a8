"""A target and its drafters, loaded and checked to fit: a pair generates."""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_spec.checkpoint.files import human_bytes, one_line
from mlx_spec.checkpoint.memory import ContextMemory
from mlx_spec.decode.loop import decode
from mlx_spec.decode.measuring import measure_costs, scratch_text
from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.scheduler import Batch
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.device import memory_for_models, resident
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.earlier import EarlierAnswers, ring_tokens
from mlx_spec.drafters.lookup import MatchRange
from mlx_spec.drafters.per_request import for_request
from mlx_spec.errors import DraftsGrow, InvalidValue, NoVision, PromptTooLong, SpecError, caught
from mlx_spec.model.caches import Caches
from mlx_spec.model.hooks import parts_of
from mlx_spec.model.probe import check_rows
from mlx_spec.model.row_bits import measure_rows
from mlx_spec.model.row_class import RowClass
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import BatchSupport, TargetBatch, probe_batch
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.policy.batch import FEWEST_RUNNING, BatchPolicies
from mlx_spec.policy.calibrate import Slice, Stopwatch
from mlx_spec.prompt import Prompt, text_prompt
from mlx_spec.sampling import GREEDY, Sampling
from mlx_spec.sampling.logits import Suppressed
from mlx_spec.sampling.logprobs import LogprobRecorder
from mlx_spec.session import Session
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.types import DraftLengthPolicy, FeatureSpec, Round, TargetParts
from mlx_spec.vision.conversation import NO_VISION, seeing
from mlx_spec.vision.vision import Vision

if TYPE_CHECKING:
    from mlx_spec.distributed.ranks import Ranks

_log = logging.getLogger("mlx_spec")


@dataclass(frozen=True)
class PairInfo:
    """The facts about a loaded pair that programs show: the names that were found, and sizes."""

    target: str  # a path, a repository or "demo"
    drafter: str | None  # the same, or "lookup"; the target's own if none was named; None if nothing drafts
    vocab_size: int
    context_length: int | None  # tokens of prompt and output together; None if the checkpoint names no limit
    target_bytes: int  # of the weights in memory
    drafter_bytes: int
    vision_bytes: int = 0  # of the tower, which is read with the first picture


class Pair:
    """A target, its drafters and its tokenizer. Made by `load`.

    All answers share the weights; each sequence has its own caches. `policies` makes the draft-length policy
    of every new sequence. `earlier` holds earlier answers by API key, for lookup.
    """

    measuring_s = 1.0  # seconds of a measurement of costs; half of them if costs are known

    def __init__(
        self,
        info: PairInfo,
        tokenizer: Tokenizer,
        model: nn.Module,
        drafters: Sequence[DrafterSource],
        policies: AdaptivePolicies | FixedPolicy,
        kv_bits: int | None = None,
        ranks: Ranks | None = None,
        vision: Vision | NoVision = NO_VISION,
        memory: ContextMemory | None = None,
    ) -> None:
        self.info = info
        self.budget = memory_for_models  # returns the bytes for this pair and one of its conversations
        self.tokenizer = tokenizer
        self.policies = policies
        self._model = model
        self._drafters = tuple(drafters)
        self._needs = _needs(drafters)
        self._copies = "lookup" in self.drafter_names
        self._kv_bits = kv_bits
        self._ranks = ranks
        self._vision = vision
        self.rows = RowClass()  # of passes that agree bit by bit; without limits until they are measured
        self._memory = memory
        self.earlier = EarlierAnswers(ring_tokens(memory_for_models()))
        self._measuring: Generator[Slice, None, None] | None = None  # an unfinished `calibrate`
        self._next_pass: Slice | None = None  # of that measurement
        self._growths: list[DraftsGrow] = []

    def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int,
        stop: Collection[int] = (),
        key: str | None = None,
    ) -> Iterator[Round]:
        """Continue a prompt, round by round, at most `max_tokens` tokens and never past the context.

        The target's end-of-text tokens and the tokens in `stop` end it; the last round holds that token.
        Lookup also copies from earlier answers with the same `key`, unless it is None. Raises InvalidValue or
        PromptTooLong at once, before the first round.
        """
        sequence = self.prepare(
            self.open(), prompt_tokens, sampling=sampling, max_tokens=max_tokens, stop=stop, key=key
        )
        return decode(sequence)

    def with_drafters(
        self, drafters: Sequence[DrafterSource], policies: AdaptivePolicies | FixedPolicy
    ) -> Pair:
        """Return a pair of the same target with other drafters."""
        shared = (self._kv_bits, self._ranks, self._vision, self._memory)
        pair = Pair(self.info, self.tokenizer, self._model, drafters, policies, *shared)
        pair.use_rows(self.rows)
        return pair

    def with_policies(self, policies: AdaptivePolicies | FixedPolicy) -> Pair:
        return self.with_drafters(self._drafters, policies)

    @property
    def parts(self) -> TargetParts:
        """Return the embedding and the LM head of the target."""
        return parts_of(self._model)

    @property
    def vision(self) -> Vision:
        """Return the reader of pictures. Raises NoVision, with the reason, if there is none."""
        return seeing(self._vision)

    @property
    def vision_or_reason(self) -> Vision | NoVision:
        return self._vision

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Return the names of its drafters: their families, or "lookup"."""
        return tuple(source.name for source in self._drafters)

    @property
    def drafts(self) -> bool:
        """Return True if rounds may draft: there is a drafter, and drafting is not turned off."""
        return bool(self._drafters) and not (
            isinstance(self.policies, FixedPolicy) and not self.policies.length
        )

    @property
    def fixed_names(self) -> tuple[str, ...]:
        """Return the names of the first drafter's proposals: with a fixed length it alone drafts."""
        return self._drafters[0].names if self._drafters else ()

    def session(self, system: str | None = None, *, key: str | None = "") -> Session:
        """Return a new conversation. With `key`, it shares answers with others that have the same one.

        Raises InvalidValue if the target has no chat template.
        """
        prepare = partial(self.prepare, key=key)
        return Session(self.tokenizer, self.open(), prepare, system, self._vision)

    def open(self) -> CachedSequence:
        """Return a new sequence with empty caches."""
        sequence = CachedSequence(self._target(), (), self.policies.plain())
        self._open_drafters(sequence)
        return sequence

    def _open_drafters(self, sequence: CachedSequence) -> None:
        """Give a sequence new drafters. Without those that fail, its next answer has no drafts."""
        target = sequence.target
        try:
            if len(self._growths) > 1:
                raise self._growths[0]
            made = [source.make(target.parts).proposals() for source in self._drafters]
        except SpecError:  # loading refuses them
            raise
        except BaseException as error:
            sequence.drop_drafters(caught(error))
            return
        drafters = tuple(itertools.chain.from_iterable(made))
        no_trees = any(s.drafts_trees for s in self._drafters) and target.tree_obstacle is not None
        reach = {
            i: (lambda: ()) if source.drafts_trees and no_trees else source.reach
            for i, source in enumerate(self._drafters)  # lookup, which has several proposals, comes last
            if source.reach is not None
        }
        available = {i: d.available for i, d in enumerate(drafters) if isinstance(d, MatchRange)}
        sequence.policy = self.policies.policy(reach=reach, available=available)
        sequence.drafters, sequence.draft_error = drafters, None

    def _drop_drafters(self, sequence: CachedSequence, error: Exception) -> DraftLengthPolicy:
        """Drop the drafters of a sequence, until the next answer. Return the policy of the rest."""
        sequence.drop_drafters(error)
        if isinstance(error, DraftsGrow) and error not in self._growths:
            self._growths.append(error)
            _log.error("drafts (%s) grow without end: off after twice", ", ".join(self.drafter_names))
        return self.policies.plain()

    def check(self, lengths: Sequence[int] = ()) -> mx.Dtype:
        """Refuse a target that cannot take back rows exactly, at these lengths, too.

        Returns the type of its activations. Raises NotRewindable, and Mismatch for a drafter of fixed draft
        lengths that cannot read the target. The costs of others are measured, which shows that, too.
        """
        activations = check_rows(self._model, lambda: self.open().target, lengths)
        if self.drafts and not isinstance(self.policies, AdaptivePolicies):
            sequence, text = self.open(), [1, 2, 3, 1]
            features = sequence.target.prefill(text[:-1])
            for drafter in sequence.drafters:
                drafter.observe(text, features)
                drafter.draft(text, 1, GREEDY.sampler(len(text), self.info.vocab_size))
        return activations

    def use_rows(self, rows: RowClass) -> None:
        """Decode with passes of a row class. Sequences that are open keep theirs."""
        self.rows = rows
        if isinstance(self.policies, AdaptivePolicies):
            self.policies.rows = rows

    def measured_rows(self) -> RowClass:
        """Measure which passes agree bit by bit with plain decoding. It takes about 30 passes."""
        if self._ranks is not None:
            return RowClass(doubt=f"it is split over {self._ranks.size} machines")
        return measure_rows(self._model, self._target(), self.info.vocab_size, self.info.context_length)

    def calibrate(
        self, context: int | None = None, *, again: bool = False, most_s: float = math.inf
    ) -> Generator[Slice, None, None]:
        """Measure the costs of passes and drafts on a scratch sequence. Costs do not depend on its text.

        Yields before each pass what it takes at most: the caller may do other work then. It may also stop,
        which changes nothing. Passes that may take more than `most_s` are left out if possible. Known costs
        are kept, scaled to the plain speed of now, unless they are clearly dearer than the new ones: then
        they were measured on a busy machine and could keep drafting off. `again` replaces them. It takes a
        second, or half a second if costs are known; a big model takes longer. `context` tokens are read
        first; None reads the length of a first question, as far as the time allows.
        """
        policies = self.policies
        if not isinstance(policies, AdaptivePolicies) or not policies.names:
            return
        text = scratch_text(self.tokenizer, context or 256, self.info.context_length)
        before = None if again else policies.costs
        limit_s = self.measuring_s if before is None else self.measuring_s / 2
        watch = Stopwatch(limit_s, before.at(1).plain if before else 0.0, most_s)
        costs = yield from measure_costs(
            self.open(), text, self.info.vocab_size, policies.copying, watch, whole=context is not None
        )
        known = None if again or policies.costs is None else policies.costs.table()  # corrected meanwhile
        if known is None or known.dearer(costs):
            policies.use(costs)
        else:
            policies.use(known.at_speed_of(costs), policies.measured)

    def check_costs(self, is_wanted: Callable[[], bool], most_s: float) -> None:
        """Measure costs again if a drafter was too dear to try. Call it while no request waits.

        Stops before a pass if `is_wanted()` returns True, or if the pass may take more than `most_s` seconds.
        Another call goes on from there.
        """
        if self._measuring is None and isinstance(self.policies, AdaptivePolicies):
            if not self.policies.claim_check():
                return
            self._measuring = self.calibrate(most_s=0.2)  # seconds: users notice a longer wait
        if self._measuring is None:
            return
        with resident():
            while (following := self._next_pass or next(self._measuring, None)) is not None:
                if is_wanted() or following.seconds > most_s:
                    self._next_pass = following
                    return
                self._next_pass = None
        self._measuring = None

    def prepare(
        self,
        sequence: CachedSequence,
        prompt_tokens: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int,
        stop: Collection[int] = (),
        top_logprobs: int | None = None,
        prediction: Sequence[int] = (),
        read_prompt: Callable[[], Iterator[bool]] | None = None,
        key: str | None = None,
    ) -> RunningSequence:
        """Return a running sequence for `decode`, or for a batch with others.

        `sequence` may already hold a prefix of the prompt. With `top_logprobs`, rounds carry the
        log-probabilities of their tokens and that many alternatives for each. `prediction` is text that the
        answer is expected to contain: it is drafted where it fits. `read_prompt` replaces the prefill. Unless
        `key` is None, lookup copies from earlier answers with that key, and this answer becomes one of them.
        Raises InvalidValue and PromptTooLong.
        """
        if not isinstance(sampling, Sampling):
            raise InvalidValue(f"sampling is {sampling!r}, it must be one Sampling")
        if not isinstance(key, str | None):
            raise InvalidValue(f"key is {key!r}, it must be a text, or None")
        prompt, ends = self._as_prompt(prompt_tokens), _as_tokens("stop", stop)
        limit = self.token_limit(prompt, max_tokens)
        sampler = sampling.sampler(len(prompt), self.info.vocab_size)
        recorder = None if top_logprobs is None else LogprobRecorder(sampler, self.tokenizer, top_logprobs)
        earlier = on_end = None
        if key is not None and self._copies:
            try:
                earlier, on_end = self.earlier.ring(key), partial(self.earlier.add, key, prompt)
            except (OSError, MemoryError) as error:  # such as a limit of the address space
                _log.warning("an answer copies from no earlier ones: %s", one_line(error))
        if sequence.draft_error is not None:
            self._open_drafters(sequence)
        drafters, extras = for_request(
            sequence.drafters, prompt, grammar=sampling.grammar, prediction=prediction
        )
        running = RunningSequence(
            sequence.target,
            drafters,
            sequence.policy,
            recorder or sampler,
            prompt,
            limit,
            self.tokenizer.eos.union(ends),
            extras,
            read_prompt,
            on_end,
            self._suppressed,
            None if self._memory is None else self._memory.attention,
            partial(self._drop_drafters, sequence),
            max(2**28, self.budget() // 16),
        )
        if sequence.draft_error is not None:
            running.stop_drafting(sequence.draft_error)
        for drafter in sequence.drafters:
            running.try_drafting(partial(drafter.copy_from, earlier), None)
        return running

    def batch(self, max_running: int | None = None) -> Batch:
        """Return an empty batch for sequences made by `prepare`. At most `max_running` run at a time.

        If that is None, measured costs say how many. The first batch of a pair decodes a few tokens to find
        out whether sequences of this target can share a pass.
        """
        policies = self.policies if isinstance(self.policies, BatchPolicies) else None
        if max_running is None:
            max_running = FEWEST_RUNNING if policies is None else policies.most_running()
        targets = None if self.batch_support.obstacle else self._target_batch
        group = None if policies is None else policies.group
        # Padding is worth it only while it is small beside the weights, which a second pass would read again.
        return Batch(targets, max_running, group, max_padding=self.info.target_bytes // 4)

    @cached_property
    def _suppressed(self) -> Suppressed | None:
        """Return the tokens that generation_config.json forbids; None if there are none."""
        generation = self.tokenizer.generation
        if not (generation.suppressed or generation.suppressed_first):
            return None
        return Suppressed(generation.suppressed, generation.suppressed_first, self.info.vocab_size)

    @cached_property
    def batch_support(self) -> BatchSupport:
        return probe_batch(self._model, self.rows) if self._ranks is None else self._ranks.batch_support()

    def _target(self) -> LMTarget:
        if self._ranks is None:
            sight = None if isinstance(self._vision, NoVision) else self._vision.sight
            return LMTarget(self._model, self._needs, kv_bits=self._kv_bits, sight=sight, rows=self.rows)
        return self._ranks.open_target(self._needs, self._kv_bits, self.rows)

    def _target_batch(self) -> TargetBatch:
        takes_drafts = self.batch_support.takes_drafts
        if self._ranks is None:
            rows = self.rows if self.batch_support.is_bitwise else replace(self.rows, shared=0)
            return TargetBatch(self._model, self._needs, takes_drafts=takes_drafts, rows=rows)
        return self._ranks.open_batch(self._needs, takes_drafts=takes_drafts, rows=self.rows)

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int,
        stop: Collection[int] = (),
        max_running: int | None = None,
        key: str | None = None,
    ) -> Iterator[tuple[int, Round]]:
        """Continue several prompts at once, each as `generate` does. Yields a prompt's index and a round.

        Raises InvalidValue or PromptTooLong at once, before the first round.
        """
        batch = self.batch(max_running)
        if not isinstance(prompts, Iterable):
            raise InvalidValue(f"the prompts are {prompts!r}, they must be a list of prompts")
        for prompt in prompts:
            sequence = self.prepare(
                self.open(), prompt, sampling=sampling, max_tokens=max_tokens, stop=stop, key=key
            )
            batch.add(sequence)
        return _rounds(batch)

    def _as_prompt(self, tokens: Iterable[int]) -> Prompt:
        """Return tokens as a prompt of text, and a prompt as it is. Raises InvalidValue and NoVision."""
        if not isinstance(tokens, Prompt):
            return text_prompt(_as_tokens("the prompt", tokens))
        if not tokens.spans:
            return tokens
        seeing(self._vision)
        if tokens.spans[-1].end >= len(tokens):
            raise InvalidValue("the prompt ends with a picture: let text follow it")
        return tokens

    def token_limit(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Return how many tokens may be generated after a prompt. Raises InvalidValue and PromptTooLong."""
        if not isinstance(max_tokens, (int, np.integer)) or max_tokens < 1:
            raise InvalidValue(f"max_tokens is {max_tokens}, it must be 1 or more, and an integer")
        if not prompt:
            raise InvalidValue("the prompt is empty: give at least one token")
        low, high, size = min(prompt), max(prompt), self.info.vocab_size
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            raise InvalidValue(f"the prompt holds token {wrong}, this target has tokens 0 to {size - 1}")
        length, most = self.info.context_length, self.most_tokens()
        if most is not None and (length is None or most < length):
            if len(prompt) >= most:
                raise PromptTooLong(self._too_long_for_memory(len(prompt), most))
            length = most
        if length is None:
            return max_tokens
        if len(prompt) >= length:
            raise PromptTooLong.for_context(str(len(prompt)), length)
        return min(max_tokens, length - len(prompt))

    def most_tokens(self, least: int = 2048) -> int | None:
        """Return how many tokens of a conversation fit the memory; None if its sizes are not known.

        At least `least`: a model that has been loaded answers a short question.
        """
        return None if self.memory is None else max(self.memory.most_tokens(self.budget()), least)

    @cached_property
    def memory(self) -> ContextMemory | None:
        """Return what conversations take in memory; None if it is not known. K/V are measured."""
        if self._memory is None:
            return None
        target = self._target()
        target.prefill([0])
        return replace(self._memory, target_bytes=target.row_bytes)

    def _too_long_for_memory(self, tokens: int, most: int) -> str:
        assert self.memory is not None
        is_left = self._kv_bits != 4 and Caches.of_model(self._model, 4).quantization_obstacle is None
        way = "quantize K and V with kv_bits 4 (--kv-bits 4), " if is_left else ""
        return (
            f"the prompt is too long: {tokens} tokens > {most} maximum, for which this machine has memory: "
            f"with them {self.info.target} takes {human_bytes(self.memory.total(tokens))} and may use "
            f"{human_bytes(self.budget())}: {way}shorten it, or begin a new conversation"
        )


def _as_tokens(name: str, tokens: Iterable[int]) -> list[int]:
    """Return tokens as plain ints; NumPy's are accepted. Raises InvalidValue for others, such as text."""
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise InvalidValue(
            f"{name} is not a list of token ids ({error}): give what encode returns"
        ) from error


def _rounds(batch: Batch) -> Iterator[tuple[int, Round]]:
    """Yield the rounds of a batch. Raises the first error."""
    for index, result in batch.run():
        if isinstance(result, Exception):
            raise result
        yield index, result


def _needs(drafters: Sequence[DrafterSource]) -> FeatureSpec:
    """Return the features that the target must record. All drafters that read any must read the same."""
    wanted = {source.needs for source in drafters} - {FeatureSpec()}
    assert len(wanted) <= 1, "two drafters that read different features"
    return wanted.pop() if wanted else FeatureSpec()
