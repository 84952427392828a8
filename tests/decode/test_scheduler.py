"""The scheduler: who begins and who reads next, and that an entry which fails ends alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from support import tiny
from support.lossless import plain
from support.shared_caches import hooked

from mlx_spec.decode.running import PREFILL_STEP, RunningSequence
from mlx_spec.decode.scheduler import Batch, Entry
from mlx_spec.errors import InvalidValue
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import FeatureSpec, Round

MODEL = tiny.full(num_hidden_layers=1)
COUNT = 4  # tokens of an answer


class Entries:
    """A batch and its entries, named by letters; those with one letter have one owner."""

    def __init__(self, max_running: int, kind: type[TargetBatch] = TargetBatch, **limits: int) -> None:
        self.made = 0  # targets of several sequences

        def make() -> TargetBatch:
            self.made += 1
            return kind(MODEL, FeatureSpec())

        self.batch = Batch(make, max_running, **limits)
        self.begun: list[str] = []
        self.names: dict[int, str] = {}
        self.texts: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, length: int = 9, **hooks: Any) -> None:
        def begin() -> RunningSequence:
            self.begun.append(name)
            prompt = text_prompt(tiny.prompt(length, seed=length))
            sampler = Sampling().sampler(length, tiny.VOCAB)
            return RunningSequence(LMTarget(MODEL), (), FixedPolicy(0), sampler, prompt, COUNT)

        self.seconds[name] = []
        hooks = {"begin": begin, "on_progress": self.seconds[name].append} | hooks
        entry = hooked(Entry(name[0]), **hooks)
        self.names[self.batch.enter(entry)] = name

    def step(self) -> None:
        for id, result in self.batch.step():
            if isinstance(result, Round):
                self.texts.setdefault(self.names[id], []).extend(result.tokens)
            else:
                self.errors[self.names[id]] = str(result)

    def run(self) -> None:
        while len(self.batch):
            self.step()


def text(length: int = 9) -> list[int]:
    return plain(MODEL, tiny.prompt(length, seed=length), COUNT)


def fail(*given: Any) -> Any:
    raise InvalidValue("this entry fails")


def test_the_owner_with_the_fewest_sequences_is_next() -> None:
    entries = Entries(3)
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        entries.add(name)
    entries.step()
    assert entries.begun == ["a1", "b1", "c1"] and entries.batch.begun == 3
    entries.run()
    assert entries.begun[3:] == ["a2", "c2", "a3"]
    assert entries.texts == dict.fromkeys(entries.seconds, text())


def test_an_entry_without_room_is_not_passed() -> None:
    entries = Entries(4)
    entries.add("a", 40)
    entries.add("b", has_room=lambda unread: len(entries.texts.get("a", [])) == COUNT)
    entries.add("c")
    entries.step()
    assert entries.begun == ["a"]
    entries.run()
    assert entries.begun == ["a", "b", "c"]


def test_an_entry_that_waits_is_passed() -> None:
    """But not one without room."""
    entries, waits = Entries(3), [True]
    entries.add("a", waits=lambda: waits[0])
    entries.add("b")
    entries.step()
    assert entries.begun == ["b"]
    waits[0] = False
    entries.run()
    assert entries.begun == ["b", "a"] and entries.texts == {"a": text(), "b": text()}


def test_room_is_what_others_have_yet_to_read() -> None:
    entries, unread = Entries(2), list[int]()
    entries.add("a", 30)
    entries.add("b", has_room=lambda tokens: not unread.append(tokens))
    entries.run()
    assert unread == [29]


@pytest.mark.parametrize("hook", ["begin", "on_progress"])
def test_an_entry_that_fails_ends_alone(hook: str) -> None:
    entries = Entries(3)
    for name, hooks in (("a", {}), ("b", {hook: fail}), ("c", {})):
        entries.add(name, **hooks)
    entries.run()
    assert entries.errors == {"b": "this entry fails"}
    assert entries.texts == {"a": text(), "c": text()}


def test_progress_is_reported_and_may_add_and_remove_entries() -> None:
    entries = Entries(4)

    def progress(name: str, seconds: float) -> None:
        entries.seconds[name].append(seconds)
        if len(entries.seconds[name]) == 3:  # the prompt is read
            entries.add("b", 1)
            entries.batch.remove(next(iter(entries.names)))

    entries.add("a", 2 * PREFILL_STEP + 9, on_progress=partial(progress, "a"))
    entries.run()
    assert len(entries.seconds["a"]) == 3 and entries.seconds["b"] == [0.0]  # nothing was to be read
    assert entries.texts == {"b": text(1)}


class Failing(TargetBatch):
    def verify(self, tokens: mx.array, sizes: Sequence[int], *, early: bool = True) -> mx.array:
        super().verify(tokens, sizes, early=early)
        raise InvalidValue("this pass fails")


class Broken(LMTarget):
    """Its passes fail alone, too."""

    def verify(self, tokens: mx.array, *, early: bool = True) -> mx.array:
        raise InvalidValue("this pass fails alone, too")


def test_only_sequences_whose_passes_fail_alone_end_and_their_rows_are_dropped() -> None:
    """To compute them again for a later request might fail again."""
    entries, targets = Entries(3, Failing), list[LMTarget]()

    def begin() -> RunningSequence:
        prompt, sampler = text_prompt(tiny.prompt(9)), Sampling().sampler(9, tiny.VOCAB)
        targets.append((Broken if len(targets) == 1 else LMTarget)(MODEL))
        return RunningSequence(targets[-1], (), FixedPolicy(0), sampler, prompt, 20)

    for name in ("a", "b", "c"):
        entries.add(name, begin=begin, park=True)
    entries.run()
    assert entries.errors == {"b": "this pass fails alone, too"}
    assert entries.texts["a"] == entries.texts["c"] == plain(MODEL, tiny.prompt(9), 20)
    entries.add("d")  # the batch goes on
    entries.run()
    assert entries.texts["d"] == text()


@pytest.mark.parametrize(("limits", "groups"), [({}, [3]), ({"max_padding": 0}, [1, 2])])
def test_long_and_short_sequences_share_no_pass_if_padding_would_take_much_memory(
    limits: dict[str, int], groups: list[int]
) -> None:
    entries = Entries(3, **limits)
    for name, length in (("a", 90), ("b", 4), ("c", 5)):
        entries.add(name, length)
    sizes = list[list[int]]()
    while len(entries.batch):
        entries.step()
        sizes.append(sorted(entries.batch.group_sizes))
    assert groups in sizes and all(max(each, default=0) <= max(groups) for each in sizes)
    assert entries.texts == {"a": text(90), "b": text(4), "c": text(5)}


@pytest.mark.parametrize(("limits", "together"), [({}, 1), ({"max_padding": 0}, 0)])
def test_kept_caches_move_between_a_batch_and_their_sequences(limits: dict[str, int], together: int) -> None:
    """Two conversations are kept, and their next prompts are read together unless that moves many bytes."""
    entries, targets, count = Entries(2, **limits), [LMTarget(MODEL), LMTarget(MODEL)], COUNT + 1
    prompt = tiny.prompt(30, seed=30)

    def begin(target: LMTarget) -> RunningSequence:
        sampler = Sampling().sampler(30, tiny.VOCAB)
        return RunningSequence(target, (), FixedPolicy(0), sampler, text_prompt(prompt), COUNT)

    for name, target in zip("ab", targets, strict=True):
        target.prefill(prompt[:20])
        entries.add(name, begin=partial(begin, target), park=True)
    entries.step()
    assert entries.made == together
    entries.run()
    assert entries.made == together + 1  # they decoded together
    assert all(target.reach() == [(0, 29 + COUNT)] for target in targets)  # full attention needs no places
    expected = plain(MODEL, prompt, count)
    for name, target in zip("ab", targets, strict=True):
        assert entries.texts[name] == expected[:COUNT]
        logits = target.verify(mx.array(expected[target.size - 30 : COUNT]))
        assert target.size == 30 + COUNT - 1 and logits[-1].argmax() == expected[COUNT]


def test_prompts_with_their_own_reading_are_not_read_together() -> None:
    """It does more, such as scoring their tokens."""
    entries, sizes, prompt = Entries(2), list[int](), tiny.prompt(9, seed=9)

    def begin() -> RunningSequence:
        target, sampler = LMTarget(MODEL), Sampling().sampler(9, tiny.VOCAB)

        def read() -> Iterator[bool]:
            sizes.append(target.size)
            target.prefill(prompt[target.size : -1])
            yield True

        parts = (target, (), FixedPolicy(0), sampler, text_prompt(prompt), COUNT)
        return RunningSequence(*parts, read_prompt=read)

    for name in "ab":
        entries.add(name, begin=begin)
    entries.run()
    assert sizes == [0, 0] and entries.texts == dict.fromkeys("ab", text())
