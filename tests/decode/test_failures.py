"""Parts that fail: each costs its own gain, or ends the one answer that it belongs to."""

from __future__ import annotations

import errno
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
import pytest
from support import tiny
from support.forked import start_python
from support.lossless import Scripted, emitted
from support.pairs import alone, make_pair, shallow

from mlx_spec.decode.loop import decode
from mlx_spec.decode.round import Group
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.decode.statistics import Statistics
from mlx_spec.drafters.earlier import EarlierAnswers, TextRing
from mlx_spec.errors import NotFinite
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.pair import Pair
from mlx_spec.policy import Table
from mlx_spec.policy.batch import BatchPolicies, MemberPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import LogitsProcessor, Sampling
from mlx_spec.sampling.logprobs import score_prompt
from mlx_spec.types import Draft, DraftCall, Reason, Round, Sampler

shallow_models = pytest.fixture(shallow, scope="module", autouse=True)
COUNT = 18
PROMPTS = [tiny.prompt(length, seed=length) for length in (9, 13, 11)]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=0.8, top_p=0.9, seed=5)]
FAR = 10**6


class Breaking:
    """A drafter or a policy, one method of which raises from its n-th call on."""

    def __init__(self, part: Any, method: str, after: int) -> None:
        self.part, self.method, self.after = part, method, after

    def __getattr__(self, name: str) -> Any:
        return self.broken if name == self.method else getattr(self.part, name)

    def broken(self, *given: Any, **options: Any) -> Any:
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("this part is broken")
        return getattr(self.part, self.method)(*given, **options)


@cache
def texts_of(kind: str) -> list[list[int]]:
    """Return the text of each prompt alone."""
    pairs, pair = zip(PROMPTS, SAMPLINGS, strict=True), make_pair(kind)
    return [alone(pair, kind, prompt, COUNT, sampling) for prompt, sampling in pairs]


def in_a_batch(
    pair: Pair, opened: Sequence[CachedSequence]
) -> tuple[list[list[Round]], dict[int, Exception]]:
    """Return the rounds of each prompt, and the errors by prompt."""
    batch, found, errors = pair.batch(4), [list[Round]() for _ in opened], dict[int, Exception]()
    for parts, prompt, sampling in zip(opened, PROMPTS, SAMPLINGS, strict=False):
        batch.add(pair.prepare(parts, prompt, sampling=sampling, max_tokens=COUNT))
    for id, round in batch.run():
        if isinstance(round, Exception):
            errors[id] = round
        else:
            found[id].append(round)
    return found, errors


# --- drafters and policies


def break_one(part: str, method: str, after: int, opened: list[CachedSequence]) -> None:
    """Let a method of the second sequence fail from its n-th call on."""
    parts = opened[1]
    if part == "drafter":
        parts.drafters = (Breaking(parts.drafters[0], method, after),)
    else:
        parts.policy = Breaking(parts.policy, method, after)


class Odd(Scripted):
    """Drafts something else from the third draft on; the truth without it."""

    nbytes = 0

    def __init__(self, truth: Sequence[int], odd: Any, drafts: int = 0) -> None:
        super().__init__(truth)
        self.odd, self.drafts = odd, drafts

    def copy_from(self, earlier: object) -> None: ...

    def missing(self, size: int) -> int:
        return 0

    def prepare(self, *given: Any) -> None: ...

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        draft = super().draft(history, limit, sampler)
        return draft if self.drafts < 3 else self.odd

    def draft_batch(self, requests: Sequence[DraftCall]) -> list[Draft]:
        return [each.drafter.draft(each.history, each.limit, each.sampler) for each in requests]


def draft_odd(odd: Any, opened: list[CachedSequence]) -> None:
    """Let the second sequence draft what no target can verify, and the others the truth."""
    for i, (parts, prompt, text) in enumerate(zip(opened, PROMPTS, texts_of("full"), strict=True)):
        parts.drafters = (Odd([*prompt, *text], odd, 0 if i == 1 else -1000),)


def tokens(*given: int) -> mx.array:
    return mx.array(given, dtype=mx.int32)


DRAWN = Draft(tokens(tiny.VOCAB, FAR), mx.full((2, tiny.VOCAB), 1 / tiny.VOCAB))
FAILING: dict[str, partial[None]] = {
    "draft": partial(break_one, "drafter", "draft", 0),
    "a later draft": partial(break_one, "drafter", "draft", 2),
    "observe": partial(break_one, "drafter", "observe", 0),
    "a later observe": partial(break_one, "drafter", "observe", 3),
    "copy_from": partial(break_one, "drafter", "copy_from", 0),
    "begin": partial(break_one, "policy", "begin", 0),
    "decide": partial(break_one, "policy", "decide", 2),
    "observe of the policy": partial(break_one, "policy", "observe", 1),
    "settle": partial(break_one, "policy", "settle", 1),
    "tokens far outside": partial(draft_odd, Draft(tokens(FAR, FAR))),
    "a negative token": partial(draft_odd, Draft(tokens(1, -7))),
    "the next token": partial(draft_odd, Draft(tokens(tiny.VOCAB))),
    "drawn tokens outside": partial(draft_odd, DRAWN),
    "a tree outside": partial(draft_odd, Draft(tokens(FAR, 2, FAR), parents=(0, 0, 1))),
    "int64": partial(draft_odd, Draft(mx.array([2**40], dtype=mx.int64))),
    "none": partial(draft_odd, None),
    "two dimensions": partial(draft_odd, Draft(mx.zeros((2, 2), dtype=mx.int32))),
    "floats": partial(draft_odd, Draft(mx.zeros((2,)))),
    "many": partial(draft_odd, Draft(tokens(*range(200)))),
    "probabilities of another shape": partial(draft_odd, Draft(tokens(1, 2), mx.zeros((2, 9)))),
    "parents of another tree": partial(draft_odd, Draft(tokens(1, 2), parents=(0,))),
}


@pytest.mark.parametrize("name", FAILING)
def test_drafts_that_fail_are_off_for_that_answer(draft_errors: list[str], name: str) -> None:
    spoil = FAILING[name]
    kind = "sliding" if spoil.func is break_one else "full"
    pair, texts = make_pair(kind), texts_of(kind)
    alone, opened = ([pair.open() for _ in PROMPTS] for _ in range(2))
    spoil(alone), spoil(opened)
    rounds = list(decode(pair.prepare(alone[1], PROMPTS[1], sampling=SAMPLINGS[1], max_tokens=COUNT)))
    assert emitted(rounds) == texts[1] and rounds[-1].reason is Reason.FAILED
    found, errors = in_a_batch(pair, opened)
    assert not errors and [emitted(each) for each in found] == texts
    assert [sum(round.drafted for round in each) > 0 for each in (found[0], found[2])] == [True, True]
    assert [each[-1].reason is Reason.FAILED for each in found] == [False, True, False]
    statistics = Statistics()
    for round in found[1]:
        statistics = statistics.plus(round, round.seconds)
    assert statistics.as_dict()["reason"] == "drafter failed"
    assert "the drafter failed" in statistics.as_dict()["reason_words"]
    assert len(draft_errors) == 2
    if spoil.func is break_one:
        assert all("RuntimeError at test_failures.py" in error for error in draft_errors)
    draft_errors.clear()


def test_the_next_answer_drafts_again(draft_errors: list[str]) -> None:
    pair = make_pair("sliding")
    kept = pair.open()
    kept.drafters = (Breaking(kept.drafters[0], "draft", 2),)
    prompt, drafted = PROMPTS[0], list[int]()
    for _ in range(2):
        rounds = decode(pair.prepare(kept, prompt, max_tokens=COUNT))
        kept.rewind_to_prefix(text_prompt(prompt))
        done = list(rounds)
        kept.append(emitted(done))
        assert emitted(done) == alone(pair, "sliding", prompt, COUNT, Sampling())
        drafted.append(sum(round.drafted for round in done))
        prompt = [*prompt, *emitted(done), 7, 9]
    assert drafted[1] > drafted[0]
    assert len(draft_errors) == 1
    draft_errors.clear()


class Growing:
    """A drafter that keeps 128 MB more with each draft, in arrays or in the memory of Python."""

    def __init__(self, part: Any, make: Callable[[], object]) -> None:
        self.part, self.make = part, make
        self.kept = list[object]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def draft(self, *given: Any) -> Any:
        self.kept.append(self.make())
        return self.part.draft(*given)

    def draft_batch(self, requests: Sequence[DraftCall]) -> list[Draft]:
        return [each.drafter.draft(each.history, each.limit, each.sampler) for each in requests]


def an_array() -> mx.array:
    array = mx.zeros((128 << 20,), mx.uint8)
    mx.eval(array)
    return array


@pytest.mark.parametrize("is_batch", [False, True])
def test_drafters_that_take_memory_without_end_are_off(
    draft_errors: list[str], caplog: pytest.LogCaptureFixture, is_batch: bool
) -> None:
    pair, held, texts, made = make_pair("sliding"), mx.get_active_memory(), texts_of("sliding"), list[int]()
    pair.budget = lambda: 0

    def growing() -> mx.array:
        made.append(mx.get_active_memory() - held)
        return an_array()

    for calls in (4, 8, 8):  # the last one is weighed
        opened = [pair.open() for _ in PROMPTS[: 3 if is_batch else 1]]
        for sequence in opened:
            sequence.drafters = tuple(Growing(drafter, growing) for drafter in sequence.drafters)
        found, errors = in_a_batch(pair, opened)
        assert not errors and [emitted(rounds) for rounds in found] == texts[: len(found)]
        assert {rounds[-1].reason for rounds in found} == {Reason.FAILED}
        assert len(made) <= calls + 6 * is_batch and max(made) < 8 * (128 << 20)
        assert mx.get_active_memory() < held + (64 << 20), "what they kept has gone back"
    assert sum("drafts (same) grow without end" in line for line in caplog.messages) == 2
    draft_errors.clear()


def test_passes_in_flight_are_not_the_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a queued pass holds memory at the end of a round, which is back before the next one."""
    in_flight = [0]  # bytes
    bytes_now, synchronize, decode_round = mx.get_active_memory, mx.synchronize, Group._step

    def step(group: Group, *options: bool) -> Any:
        done = decode_round(group, *options)
        in_flight[0] = 1 << 20
        return done

    def wait() -> None:
        synchronize()
        in_flight[0] = 0

    pair = make_pair("full")
    sequence = pair.prepare(pair.open(), PROMPTS[0], max_tokens=160)
    sequence.draft_memory.most = 1 << 22
    monkeypatch.setattr(Group, "_step", step)
    monkeypatch.setattr(mx, "synchronize", wait)
    monkeypatch.setattr(mx, "get_active_memory", lambda: bytes_now() + in_flight[0])
    rounds = []
    for done in decode(sequence):
        rounds.append(done)
        in_flight[0] = 0
    assert sequence.draft_error is None and sum(round.drafted for round in rounds) > 100
    assert sequence.draft_memory.most > 1 << 22, "it was suspected"


def test_a_pass_in_flight_that_fails_while_memory_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round before it has its tokens, which must not be lost."""
    pair, texts = make_pair("full"), texts_of("full")
    sequence = pair.prepare(pair.open(), PROMPTS[0], max_tokens=len(texts[0]))
    weighed = []

    def fail(group: Group) -> int:
        weighed.append(group)
        raise RuntimeError("a pass in flight failed")

    sequence.draft_memory.most = 1 << 16
    sequence.draft_memory.suspected = 1.0
    monkeypatch.setattr(Group, "_judge_drafters", lambda group, grown: fail(group))
    assert emitted(list(decode(sequence))) == texts[0] and weighed


def test_growth_of_caches_is_not_the_drafters() -> None:
    pair = make_pair("full")
    sequence = pair.prepare(pair.open(), PROMPTS[0], max_tokens=160)
    sequence.draft_memory.most = 1 << 16  # bytes
    rounds = list(decode(sequence))
    assert sequence.draft_error is None and sum(round.drafted for round in rounds) > 100


# MLX's CPU allocator ends the process where malloc fails, so the drafter takes the memory of NumPy.
WITHOUT_MEMORY = """
import resource
import numpy as np
from mlx_spec import load
from mlx_spec.types import Reason
pair = load("demo", num_draft_tokens=4)
kind, prompt = type(pair.open().drafters[0]), pair.tokenizer.encode("What does zip do?")
good, texts = kind.draft, []

def draft(self, *given):
    self.kept = [*getattr(self, "kept", ()), np.empty(3 << 30, np.uint8)]
    return good(self, *given)

for kind.draft in (good, draft, draft):
    rounds = list(pair.generate(prompt, max_tokens=12))
    texts.append([token for round in rounds for token in round.tokens])
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
print(texts[0] == texts[1] == texts[2], rounds[-1].reason is Reason.FAILED)
"""


def test_a_drafter_that_takes_all_memory_costs_its_drafts() -> None:
    if sys.platform != "linux":  # which has a limit of the address space
        return
    command = [sys.executable, "-c", WITHOUT_MEMORY]
    with start_python()(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        out, errors = program.communicate(timeout=200)
    assert out.split() == ["True", "True"], out + errors[-2000:]
    assert errors.count("without drafts: MemoryError") == 2


def test_a_drafter_that_cannot_be_opened_or_saved_costs_no_answer(draft_errors: list[str]) -> None:
    pair = make_pair("full")
    kept = pair.open()
    kept.drafters = (Breaking(kept.drafters[0], "state", 0),)
    fork = pair.open()
    assert not fork.fork_from(kept, text_prompt(PROMPTS[0]), in_use=False)
    good, pair._drafters = pair._drafters, ()

    def fail(*given: Any) -> Any:
        raise RuntimeError("no room for it")

    pair._drafters = (type(good[0])("same", good[0].needs, fail),)
    for sequence in (kept, pair.open()):
        rounds = list(decode(pair.prepare(sequence, PROMPTS[0], max_tokens=COUNT)))
        assert emitted(rounds) == alone(pair, "full", PROMPTS[0], COUNT, Sampling())
        assert rounds[0].reason is Reason.FAILED
    pair._drafters = good
    rounds = list(decode(pair.prepare(kept, PROMPTS[1], max_tokens=COUNT)))
    assert any(round.drafted for round in rounds)
    assert len(draft_errors) == 2
    draft_errors.clear()


@pytest.mark.parametrize("method", ["candidates", "observe_shared"])
def test_a_member_of_a_shared_policy_that_fails(
    draft_errors: list[str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    pair = make_pair("full")
    policies = BatchPolicies(["same"])
    policies.use(Table(0.01, {1: 0.01, 17: 0.011}, [{1: 1e-5}]))
    pair = pair.with_policies(policies)
    opened = [pair.open() for _ in PROMPTS]
    good = getattr(MemberPolicy, method)
    calls = 0

    def broken(self: MemberPolicy, *given: Any) -> Any:
        nonlocal calls
        if self is opened[1].policy:
            calls += 1
            if calls > 2 * (method == "candidates"):
                raise RuntimeError("this policy is broken")
        return good(self, *given)

    monkeypatch.setattr(MemberPolicy, method, broken)
    found, errors = in_a_batch(pair, opened)
    assert not errors and [emitted(each) for each in found] == texts_of("full")
    assert found[1][-1].reason is Reason.FAILED
    if method == "candidates":  # it is known whose it is
        assert found[0][-1].reason is not Reason.FAILED
    draft_errors.clear()


# --- drafts that no target can verify


def test_drawn_drafts_with_tokens_outside_keep_the_length(draft_errors: list[str]) -> None:
    """Without a seed the text is another one in each run: only its tokens are checked."""
    pair, parts = make_pair("full"), make_pair("full").open()
    parts.drafters = (Odd([], DRAWN, 9),)
    sampling = Sampling(temperature=1.0)
    rounds = list(decode(pair.prepare(parts, PROMPTS[0], sampling=sampling, max_tokens=COUNT)))
    assert len(emitted(rounds)) == COUNT and all(0 <= token < tiny.VOCAB for token in emitted(rounds))
    assert rounds[0].accepted == 0 and rounds[-1].reason is Reason.FAILED
    draft_errors.clear()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("parents", [None, (0, 0, 1)])
def test_no_rule_accepts_a_token_outside(top_p: float, parents: tuple[int, ...] | None) -> None:
    V, q = 16, mx.full((3, 16), 1 / 16)
    sampler = Sampling(temperature=1.0, top_p=top_p).sampler(3, V)
    for token in (V, V + 5, 10**5, -3):
        for _ in range(20):
            draft = Draft(tokens(token, token, token), q, parents)
            row, last = sampler.verify(mx.zeros((4, V)), [1, 2, 3], draft).tolist()
            assert row == 0 and 0 <= last < V


# --- passes that fail


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("full", False),
        ("sliding", True),
        ("recurrent", False),
        ("recurrent", True),
        ("quantized", False),
        ("shared", True),
    ],
)
def test_a_shared_pass_that_fails_is_tried_again_one_by_one(
    monkeypatch: pytest.MonkeyPatch, kind: str, lost: bool
) -> None:
    """With `lost`, the caches of one sequence cannot be computed any more: it is read again."""
    pair, calls = make_pair(kind), 0
    assert pair.batch_support.obstacle is None
    good, commit = TargetBatch.verify, LMTarget.commit
    failed = list[LMTarget]()

    def verify(self: TargetBatch, *given: Any, **options: Any) -> mx.array:
        nonlocal calls
        calls += 1
        logits = good(self, *given, **options)
        if calls in (2, 4):
            raise RuntimeError("[metal::malloc] Unable to allocate 1 bytes")
        return logits

    def commit_fails(self: LMTarget, keep: int) -> Any:
        if lost and calls == 2 and not failed:
            failed.append(self)
            raise RuntimeError("these caches are lost")
        return commit(self, keep)

    monkeypatch.setattr(TargetBatch, "verify", verify)
    monkeypatch.setattr(LMTarget, "commit", commit_fails)
    found, errors = in_a_batch(pair, [pair.open() for _ in PROMPTS])
    assert not errors and [emitted(each) for each in found] == texts_of(kind)
    assert calls >= 4 and bool(failed) == lost


def test_a_pass_with_a_draft_that_fails_is_tried_again_without(
    draft_errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, good = make_pair("recurrent"), LMTarget.verify

    def verify(self: LMTarget, rows: mx.array, **options: Any) -> mx.array:
        logits = good(self, rows, **options)
        if rows.size > 2:
            raise RuntimeError("too many rows")
        return logits

    monkeypatch.setattr(LMTarget, "verify", verify)
    rounds = list(decode(pair.prepare(pair.open(), PROMPTS[0], max_tokens=COUNT)))
    monkeypatch.undo()
    assert emitted(rounds) == alone(pair, "recurrent", PROMPTS[0], COUNT, Sampling())
    assert rounds[0].reason is Reason.FAILED and "RuntimeError" in draft_errors.pop()


# --- logits that are not finite


def spoiled(monkeypatch: pytest.MonkeyPatch, bad: mx.array, whole: bool, after: int) -> None:
    """Let the logits after token `after` of the second prompt be spoiled, whoever computes them."""
    start = len(PROMPTS[1]) + after

    def spoil(logits: mx.array, first: int) -> mx.array:
        rows = mx.arange(logits.shape[0])[:, None] + first >= start
        column = mx.arange(logits.shape[1])[None] == 5
        return mx.where(rows if whole else rows & column, bad, logits)

    def verify(self: LMTarget, rows: mx.array, **options: Any) -> mx.array:
        first = self.size + self.uncommitted + 1
        logits = plain(self, rows, **options)
        return spoil(logits, first) if self is victim[0] else logits

    def shared(self: TargetBatch, rows: mx.array, sizes: Sequence[int], **options: Any) -> mx.array:
        logits, low, parts = together(self, rows, sizes, **options), 0, []
        for origin, size in zip(self._origins, sizes, strict=True):
            block = logits[low : low + size]
            parts.append(spoil(block, origin.size + 1) if origin is victim[0] else block)
            low += size
        return mx.concatenate(parts)

    plain, together, victim = LMTarget.verify, TargetBatch.verify, VICTIM
    monkeypatch.setattr(LMTarget, "verify", verify)
    monkeypatch.setattr(TargetBatch, "verify", shared)


VICTIM: list[LMTarget] = []


@pytest.mark.parametrize(("bad", "K"), [("nan", 0), ("nan", 4), ("inf", 0), ("-inf", 4), ("one nan", 4)])
def test_logits_that_are_not_finite_end_one_answer(monkeypatch: pytest.MonkeyPatch, bad: str, K: int) -> None:
    pair = make_pair("full", "same" if K else "none")
    texts = texts_of("full")
    spoiled(monkeypatch, mx.array(float(bad.removeprefix("one "))), bad != "one nan", 7)
    for single in (True, False):
        opened = [pair.open() for _ in PROMPTS]
        VICTIM[:] = [opened[1].target]
        if single:
            text, running = (
                list[int](),
                pair.prepare(opened[1], PROMPTS[1], sampling=SAMPLINGS[1], max_tokens=COUNT),
            )
            with pytest.raises(NotFinite, match="not finite after 7 tokens of the answer"):
                for round in decode(running):
                    text += round.tokens
            assert text == texts[1][:7]
        else:
            found, errors = in_a_batch(pair, opened)
            assert [emitted(each) for each in found] == [texts[0], texts[1][:7], texts[2]]
            assert list(errors) == [1] and isinstance(errors[1], NotFinite)


def test_log_probabilities_of_a_prompt_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair("full", "none")
    for bad in ("nan", "inf"):
        with monkeypatch.context() as patched:
            spoiled(patched, mx.array(float(bad)), False, -3)
            target = pair.open().target
            VICTIM[:] = [target]
            processor = LogitsProcessor(Sampling(), 0, tiny.VOCAB)
            with pytest.raises(NotFinite):
                list(score_prompt(target, (), processor, PROMPTS[1], pair.tokenizer, 0))


# --- memory for what an answer can do without


def test_a_ring_of_earlier_answers_without_memory_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, ring = make_pair("full", "lookup"), EarlierAnswers.ring

    def lacks(after: int) -> Callable[..., TextRing]:
        calls = itertools.count()

        def limited(self: EarlierAnswers, key: str) -> TextRing:
            if next(calls) >= after:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return ring(self, key)

        return limited

    for after in (0, 1):  # as the answer begins, and as it is entered
        with monkeypatch.context() as limited:
            limited.setattr(EarlierAnswers, "ring", lacks(after))
            rounds = list(decode(pair.prepare(pair.open(), PROMPTS[0], max_tokens=COUNT, key="a")))
        assert emitted(rounds) == texts_of("full")[0]
