"""A prompt is read in passes of few sizes, and freed buffers go back after each of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from support import tiny
from support.lossless import Scripted

from mlx_spec.decode.running import RunningSequence, prefill
from mlx_spec.decode.scheduler import Batch
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Features, FeatureSpec

NARROW = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8}  # where only the order of passes counts


class RecordedTarget(LMTarget):
    """A target that keeps the rows of its passes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.passes = list[int]()

    def _write(self, tokens: mx.array, *given: Any, **options: Any) -> mx.array:
        self.passes.append(tokens.size)
        return super()._write(tokens, *given, **options)


@pytest.mark.parametrize(("kind", "rows"), [("full", [100, 100, 100]), ("recurrent", [100, 100, 68, 32])])
def test_only_the_last_chunk_of_a_recurrent_target_takes_two_passes(kind: str, rows: list[int]) -> None:
    """A second pass reads all weights again, and large kernels begin at the size of a whole chunk."""
    target = RecordedTarget(getattr(tiny, kind)(**NARROW))
    steps = list(prefill(target, (), text_prompt(tiny.prompt(301)), lambda: 100))
    assert (target.passes, len(steps)) == (rows, 3)
    assert target.rewind(285) == (285 if kind == "full" else 268)  # the checkpoint 32 tokens before the end


def test_freed_buffers_go_back_after_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of attention grow with each chunk, and no buffer of an earlier chunk is large enough."""
    chunks, cleared = list[int](), list[int]()
    target = LMTarget(tiny.full(**NARROW))
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(target.size))
    for _ in prefill(target, (), text_prompt(tiny.prompt(301)), lambda: 100):
        chunks.append(target.size)
    assert cleared == chunks == [100, 200, 300]


@pytest.mark.parametrize("by_layers", [False, True])
def test_a_prompt_is_copied_once_for_all_chunks_and_drafters(by_layers: bool) -> None:
    """Each chunk was a copy of the whole prompt for each drafter: quadratic, and a second at 32k tokens."""
    prompt, seen = tiny.prompt(301), list[tuple[int, int]]()

    class Reader(Scripted):
        def observe(self, history: Sequence[int], features: Features) -> None:
            assert list(history) == prompt[: len(history)]
            seen.append((id(history), len(history)))

    drafters = [Reader([]), Reader([])]
    for _ in prefill(
        LMTarget(tiny.full(**NARROW)), drafters, text_prompt(prompt), lambda: 8, lambda: by_layers
    ):
        pass
    assert len(seen) == 2 * 38 and len({list_id for list_id, _ in seen}) == 1
    assert [length for _, length in seen[::2]] == [*range(9, 301, 8), 301]


def sequence(target: LMTarget, length: int) -> RunningSequence:
    sampler, prompt = Sampling().sampler(length, tiny.VOCAB), text_prompt(tiny.prompt(length, seed=length))
    return RunningSequence(target, (), FixedPolicy(0), sampler, prompt, max_tokens=40)


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_the_passes_of_a_prompt_do_not_depend_on_the_load(kind: str) -> None:
    """A pass of other rows may round otherwise, so near ties of its text would be decided otherwise."""
    model, rows = getattr(tiny, kind)(num_hidden_layers=2, **NARROW), list[list[int]]()
    for others in (0, 2):
        batch, target = Batch(None, 3, clock=lambda: 0.0), RecordedTarget(model)
        for i in range(others):
            batch.add(sequence(LMTarget(model), 60 + i))
        while batch.begun < others or len(batch.group_sizes) < others:
            batch.step()
        long = batch.add(sequence(target, 1201))
        while not any(id == long for id, _ in batch.step()):
            pass
        rows.append([each for each in target.passes if each > 1])
    assert rows[0] == rows[1] == ([1024, 176] if kind == "full" else [1024, 144, 32])


@pytest.mark.parametrize("kind", ["full", "sliding", "shared", "recurrent", "recurrent_moe"])
def test_a_chunk_that_is_read_in_parts_has_the_bits_of_a_whole_one(kind: str) -> None:
    model, spec, prompt = getattr(tiny, kind)(), FeatureSpec((1,), final_hidden=True), tiny.prompt(301)
    whole, in_parts = LMTarget(model, spec), LMTarget(model, spec)
    drafters = Scripted([]), Scripted([])
    list(prefill(whole, drafters[:1], text_prompt(prompt), lambda: 200))
    steps = list(prefill(in_parts, drafters[1:], text_prompt(prompt), lambda: 200, lambda: True))
    assert sum(step.share for step in steps if step.rows) == pytest.approx(2)
    assert len(steps) > 2 * len(model.layers)
    for ours, expected in zip(joined(drafters[1]), joined(drafters[0]), strict=True):
        assert mx.array_equal(ours, expected)
    token = mx.array(prompt[-1:])
    assert mx.array_equal(in_parts.verify(token), whole.verify(token))


def joined(drafter: Scripted) -> list[mx.array]:
    """Return all rows of each hidden state that a drafter has seen."""
    return [
        mx.concatenate([features.hidden[0] for features in drafter.seen]),
        mx.concatenate([f.final_hidden for f in drafter.seen if f.final_hidden is not None]),
    ]


@pytest.mark.parametrize("most", range(1, 12))
def test_drafters_do_not_fall_behind_if_a_client_leaves(most: int) -> None:
    target, drafter = LMTarget(tiny.full(**NARROW)), Scripted([])
    reading = prefill(target, (drafter,), text_prompt(tiny.prompt(401)), lambda: 300, lambda: True)
    for step, _ in zip(reading, range(most), strict=False):
        assert step.unobserved == target.size - sum(drafter_rows(drafter))
    reading.close()
    assert sum(drafter_rows(drafter)) == target.size


def drafter_rows(drafter: Scripted) -> list[int]:
    ends = [length - 1 for length in drafter.histories]
    return [end - before for before, end in zip([0, *ends], ends, strict=False)]
