"""Random histories of joins, leaves, blocks and cuts: every sequence is as if it were alone."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from support import tiny
from support.targets import assert_goes_on, read, write

from mlx_spec.model.caches import FIRST_LANES, Caches
from mlx_spec.model.layer_caches import MAX_UNCOMMITTED, VIEW_STEP, WINDOW_SLACK
from mlx_spec.model.target import MAX_REPLAY_TOKENS, LMTarget
from mlx_spec.model.target_batch import TargetBatch, probe_batch
from mlx_spec.types import Features, FeatureSpec

KINDS = ["full", "shared", "recurrent", "recurrent_moe", "quantized"]  # the last one has windows of 16, too
SPEC = FeatureSpec(hidden_layers=(1,), final_hidden=True)
MAX_ERROR = 2e-4  # of the largest value: float32 sums in another order; a wrong position gives 0.1 and more


@dataclass
class Sequence:
    """A target in a batch and the same one alone."""

    shared: LMTarget
    alone: LMTarget
    got: Features = field(default_factory=Features)  # of the last commit

    def extend(self, tokens: list[int]) -> None:
        for target in (self.shared, self.alone):
            target.prefill(tokens)


Both = tuple[mx.array, mx.array]  # what is got and what is expected


def assert_close(*pairs: Both) -> None:
    """Compare all pairs, and wait for the device once."""
    assert [got.shape for got, _ in pairs] == [expected.shape for _, expected in pairs]
    close = [mx.abs(a - b).max() <= MAX_ERROR * mx.abs(b).max() for a, b in pairs if b.size]
    assert not close or mx.stack(close).all().item()


def verified(target: TargetBatch, blocks: list[mx.array]) -> list[mx.array]:
    """Return the logits of a block of each sequence."""
    sizes = [block.size for block in blocks]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return list(mx.split(target.verify(mx.concatenate(blocks), sizes), ends))


def features_of(got: Features, expected: Features) -> Iterator[Both]:
    yield from zip((*got.hidden, got.final_hidden), (*expected.hidden, expected.final_hidden), strict=True)
    if expected.shared_kv is not None:
        ours, theirs = got.shared_kv(), expected.shared_kv()
        assert ours.keys() == theirs.keys()
        for kind in theirs:
            yield ours[kind].keys, theirs[kind].keys
            yield ours[kind].values, theirs[kind].values


@pytest.mark.parametrize("kind", KINDS)
def test_every_sequence_is_as_if_alone(kind: str) -> None:
    model, bits = tiny.shallow(kind), tiny.bits_of(kind)
    draw = random.Random(f"{kind}930")  # every kind joins, leaves, is dropped and comes back
    spec = FeatureSpec((1,), final_hidden=True, shared_kv=kind == "shared")
    target, inside, outside = TargetBatch(model, spec), list[Sequence](), list[Sequence]()
    # A window keeps 79 rows; a recurrent state has another checkpoint 32 tokens before the end of a prompt.
    longest = 40 if kind.startswith("recurrent") else 90
    for step in range(18):
        if (not inside or draw.random() < 0.35) and len(inside) < 8:
            if outside and draw.random() < 0.5:
                joining = outside.pop(draw.randrange(len(outside)))
            else:
                joining = Sequence(*(LMTarget(model, spec, kv_bits=bits) for _ in range(2)))
                joining.extend(tiny.prompt(draw.choice([1, 2, 9, 30, longest]), seed=step))
            target.join(joining.shared)
            inside.append(joining)
        elif inside and draw.random() < 0.35:
            index = draw.randrange(len(inside))
            leaving, last = inside[index], inside.pop()
            if leaving is not last:
                inside[index] = last
            keep = draw.random() < 0.7
            target.leave(index, keep=keep)
            if keep:  # alone again, it goes back and on
                size = leaving.alone.size
                goal = size - draw.choice([0, 3, 20])
                kept = [each.rewind(max(goal, 0)) for each in (leaving.alone, leaving.shared)]
                leaving.alone.rewind(kept[1])
                assert kept[0] == kept[1]
                leaving.extend(tiny.prompt(5, seed=step))
                outside.append(leaving)
        for each in (*inside, *outside) if kind == "shared" else ():  # drafters keep features over a move
            ours = each.got.shared_kv() if each.got.shared_kv else each.shared.shared_kv()
            theirs = each.alone.shared_kv()
            assert_close(*((ours[name].keys, theirs[name].keys) for name in theirs if each.alone.size))
        if not inside:
            continue
        sizes = [draw.choice([1, 1, 2, 5, 8]) for _ in inside]
        blocks = [mx.array([draw.randrange(256) for _ in range(size)]) for size in sizes]
        cuts = [draw.randint(0, s) for s in sizes]
        expected = [each.alone.verify(block) for each, block in zip(inside, blocks, strict=True)]
        assert_close(*zip(verified(target, blocks), expected, strict=True))
        found, pairs = target.commit(cuts), list[Both]()
        for each, got, cut in zip(inside, found, cuts, strict=True):
            each.got = got
            pairs += features_of(got, each.alone.commit(cut))
            assert each.shared.size == each.alone.size
        assert_close(*pairs)


@pytest.mark.parametrize("kind", ["full", "shared", "quantized"])
def test_prompts_are_read_together_as_alone(kind: str) -> None:
    """Some targets hold a part of their prompts, others have no buffers yet; the window is 16."""
    model, bits = tiny.shallow(kind), tiny.bits_of(kind)
    spec = FeatureSpec((1,), final_hidden=True, shared_kv=kind == "shared")
    for held in ([0, 0, 0], [0, 40, 7], [40, 0, 20]):
        both = [Sequence(*(LMTarget(model, spec, kv_bits=bits) for _ in range(2))) for _ in held]
        target = TargetBatch(model, spec)
        for each, size in zip(both, held, strict=True):
            if size:
                each.extend(tiny.prompt(size, seed=size))
            target.join(each.shared)
        unread = [tiny.prompt(length, seed=length) for length in (5, 30, 21)]
        sizes = [len(tokens) for tokens in unread]
        found = target.prefill(mx.array([token for tokens in unread for token in tokens]), sizes)
        for index in (2, 1, 0):
            target.leave(index, keep=True)
        for each, tokens, features in zip(both, unread, found, strict=True):
            assert_close(*features_of(features, each.alone.prefill(tokens)))
            assert each.shared.size == each.alone.size
            block = mx.array([1, 2, 3])
            assert_close((each.shared.verify(block), each.alone.verify(block)))


@pytest.mark.parametrize("remember", [False, True])
def test_only_places_of_the_present_text_are_returned_to(remember: bool) -> None:
    """The first text went on otherwise after 50 tokens. After a long answer the window has left them."""
    model, old, new = tiny.shallow("sliding"), tiny.prompt(60, seed=1), tiny.prompt(30, seed=2)
    homes, target = [read(model, old), LMTarget(model)], TargetBatch(model, FeatureSpec())
    assert homes[0].rewind(50) == 50
    for home in homes:
        target.join(home)
    target.prefill(mx.array(new * 2), [30, 30])
    for index in (1, 0):
        target.leave(index, keep=True, read=30 if remember else 0)
    for home in homes:
        target.join(home)
    for _ in range(60):
        target.verify(mx.array(new[:16]), [8, 8])
        target.commit([8, 8])
    target.leave(0, keep=True)
    kept = homes[0].rewind(58)
    assert kept == (58 if remember else 0)
    assert_goes_on(homes[0], model, (old[:50] + new)[:kept], [1, 2, 3])


def test_a_window_moves_again_and_again() -> None:
    """Rounds of the same batch move the window to the front of buffers of the same size."""
    model = tiny.shallow("sliding")
    batch, text = TargetBatch(model, FeatureSpec()), tiny.prompt(5 * WINDOW_SLACK // 2, seed=3)
    shared, alone = ([read(model, tiny.prompt(size)) for size in (20, 29)] for _ in "ab")
    for target in shared:
        batch.join(target)
    for low in range(0, len(text), 64):
        block = mx.array(text[low : low + 64])
        found, expected = verified(batch, [block, block]), [target.verify(block) for target in alone]
        assert_close(*zip(found, expected, strict=True))
        batch.commit([64, 64])
        for target in alone:
            target.commit(64)


def test_an_uncommitted_pass_survives_a_leave() -> None:
    for kind in ("full", "sliding", "recurrent"):
        model = tiny.shallow(kind)
        target = TargetBatch(model, SPEC)
        pairs = [Sequence(LMTarget(model, SPEC), LMTarget(model, SPEC)) for _ in range(3)]
        for i, each in enumerate(pairs):
            each.extend(tiny.prompt(20 + 9 * i))
            target.join(each.shared)
        for keep in (False, True):
            block = mx.array([5])
            verified(target, [block] * len(pairs))
            expected = [each.alone.verify(block) for each in pairs]
            mx.eval(expected)
            if keep:
                pairs[0].alone.commit(0)
                target.leave(0, keep=True)
                left = pairs.pop(0)
                pairs.reverse()
                assert_close((left.shared.verify(block), left.alone.verify(block)))
            counts = [1] * (len(pairs) - 1) + [0]
            for each, got, count in zip(pairs, target.commit(counts), counts, strict=True):
                assert_close(*features_of(got, each.alone.commit(count)))
        again = mx.array([7])
        for got, each in zip(verified(target, [again] * 2), pairs, strict=True):
            assert_close((got, each.alone.verify(again)))


def test_buffers_follow_the_lengths() -> None:
    caches, model = Caches(), tiny.shallow("sliding")
    for length in (900, 20, 30, 40, 50):  # more than a quarter of its buffers stay in use below 770
        caches.join(read(model, tiny.prompt(length)).detach(dict, lambda: (caches, 0)))
    window, full = caches.attention[:2]
    assert full.buffers[0].shape[0] == 8 and full.buffers[0].shape[2] > 900
    caches.leave(0, None)
    assert full.buffers[0].shape[2] < 500
    for _ in range(350):  # the window moves
        caches.begin(1)
        for cache in caches.attention:
            mx.eval(cache.update_and_fetch(*(mx.zeros((4, 2, 1, 32)) for _ in range(2))))
        caches.commit([1] * 4)
        assert window.buffers[0].shape[2] <= 16 + MAX_UNCOMMITTED + WINDOW_SLACK
        at = window.columns
        assert max(at.starts) - min(at.starts) < VIEW_STEP
        assert not any(first % VIEW_STEP for first in at.first)
    for _ in range(3):
        caches.leave(0, None)
    assert full.buffers[0].shape[0] == FIRST_LANES


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_a_block_in_two_passes_and_after_an_interrupted_one(kind: str) -> None:
    """Also where tokens of a rejected draft have to be written again."""
    model, block = tiny.shallow(kind), mx.array([5, 6, 7])
    lone, whole, batch = LMTarget(model), LMTarget(model), TargetBatch(model, FeatureSpec())
    for target in (lone, whole):
        target.prefill(tiny.prompt(9))
        write(target, [1, 2, 3, 4], 2)
    found = mx.concatenate([lone.verify(block[:1]), lone.verify(block[1:])])
    expected = whole.verify(block)
    lone.commit(0)
    batch.join(lone)
    batch.verify(mx.array([1, 2, 3, 4]), [4])  # and no commit follows
    assert_close((found, expected), (batch.verify(block, [3]), expected))


def test_few_tokens_are_written_again_after_many_rejections() -> None:
    model = tiny.shallow("recurrent")
    lone, batch = read(model, tiny.prompt(9)), TargetBatch(model, FeatureSpec())
    batch.join(read(model, tiny.prompt(9)))
    block, rows = mx.array([1, 2, 3, 4, 5, 6]), list[int]()
    for _ in range(8):
        assert_close((batch.verify(block, [6]), lone.verify(block)))
        rows += [batch._caches.uncommitted, lone.caches.uncommitted]
        lone.commit(5)
        batch.commit([5])
    assert 16 < max(rows) <= MAX_REPLAY_TOKENS + 6


@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent"])
def test_a_target_has_its_rows_once(kind: str) -> None:
    """In the batch, and then in its own caches: a part of the batch's buffers would keep all of them."""
    model = getattr(tiny, kind)()  # a new one: no capture of another test holds an output
    mx.eval(model.parameters())
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    batch, targets = TargetBatch(model, FeatureSpec()), [LMTarget(model) for _ in range(8)]
    for target in targets:
        target.prefill(tiny.prompt(60))
        write(target, tiny.prompt(20))
        batch.join(target)
        assert target.nbytes == sum(target.pinned.values())  # its checkpoints
    batch.leave(0, keep=True)
    target = targets[0]
    mx.synchronize()
    del batch, targets
    gc.collect()
    held = mx.get_active_memory() - before  # its checkpoints hold some, too
    assert held <= 5 * target.nbytes
    assert target.rewind(70) == (70 if kind != "recurrent" else 60)  # also from a window


def test_writes_are_in_place() -> None:
    """Lanes at different columns are written without a copy of the buffer."""
    caches, model = Caches(), tiny.full()
    for size in (3, 5):
        caches.join(read(model, tiny.prompt(size)).detach(dict, lambda: (caches, 0)))
    layer = caches.attention[0]
    wide = mx.zeros((2, 2, 1 << 16, 32))
    layer.buffers = [wide, wide + 1]
    del wide
    layer.columns.count = 1 << 16
    mx.eval(layer.buffers)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        caches.begin(4)
        mx.eval(layer.update_and_fetch(*(mx.ones((2, 2, 4, 32)) for _ in range(2)))[0][..., :1])
        mx.eval(layer.buffers)
        caches.commit([1, 3])
    assert mx.get_peak_memory() - before < layer.buffers[0].nbytes / 4


class HostRope(nn.Module):
    """A rotary embedding that calculates with one position for all sequences."""

    def __init__(self, rope: nn.Module, position: Callable[[Any], Any]) -> None:
        super().__init__()
        self.rope, self.position = rope, position

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return self.rope(x, offset=self.position(offset))


def test_logits_that_are_no_numbers_are_an_obstacle() -> None:
    model = tiny.full()
    model.model.norm.weight *= math.nan
    assert probe_batch(model).obstacle is not None


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (lambda offset: min(offset, 4096), "calculates with positions"),
        (lambda offset: mx.array(offset).max(), "not those of each alone"),
    ],
)
def test_a_model_that_calculates_with_positions_is_found(
    position: Callable[[Any], Any], message: str
) -> None:
    model = tiny.full()
    assert probe_batch(model).obstacle is None
    for layer in model.layers:
        layer.self_attn.rope = HostRope(layer.self_attn.rope, position)
    assert message in (probe_batch(model).obstacle or "")
