"""Rewinding equals never having written, for every kind of cache; masks; refusals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from support import pairs, tiny
from support.targets import Foreign, assert_goes_on, assert_same_logits, logits_after, read, write

from mlx_spec.model.caches import Caches
from mlx_spec.model.layer_caches import (
    MAX_UNCOMMITTED,
    VIEW_STEP,
    WINDOW_SLACK,
    AttentionCache,
    ChunkCache,
    QuantizedCache,
)
from mlx_spec.model.rewind_points import CacheBlock, RewindPoint, RewindPoints
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.types import FeatureSpec

KINDS = ["full", "sliding", "shared", "recurrent"]
OTHER = tiny.prompt(30, seed=11)  # no text of a test goes on like this
# Caches of mlx-lm, and the bits that K and V are quantized to: that of the last layer is not.
MAKERS = {
    "full": ([KVCache], None),
    "window 16": ([lambda: RotatingKVCache(16)], None),
    "window 300": ([lambda: RotatingKVCache(300)], None),
    "8 bits": ([KVCache, KVCache], 8),
    "4 bits": ([KVCache, KVCache], 4),
}


def caches_of(kind: str) -> Caches:
    makers, bits = MAKERS[kind]
    return Caches.of_model(Foreign(*(make() for make in makers)), bits)


def window_of(size: int) -> Caches:
    return Caches.of_model(Foreign(RotatingKVCache(size)))


def rows(low: int, high: int, salt: int = 0) -> tuple[mx.array, mx.array]:
    """K and V [1, 2, high - low, 32] whose values tell their position."""
    position = mx.arange(low, high, dtype=mx.float32)[None, None, :, None] + 1000 * salt
    pattern = mx.arange(64, dtype=mx.float32).reshape(1, 2, 1, 32) / 7
    return mx.sin(position * 0.37 + pattern), mx.cos(position * 0.11 + pattern)


def append(caches: Caches, low: int, high: int, salt: int = 0, keep: int | None = None) -> list[mx.array]:
    """Write positions low..high, keep the first `keep`. Return what attention in the first layer sees."""
    caches.begin(high - low)
    found = []
    for cache in caches.attention:
        keys, values = cache.update_and_fetch(*rows(low, high, salt))
        found.append([*keys, *values] if isinstance(keys, tuple) else [keys, values])
    mx.eval(found)
    caches.commit([high - low if keep is None else keep])
    return found[0]


def same(a: list[mx.array], b: list[mx.array]) -> bool:
    return all(x.shape == y.shape and mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", MAKERS)
def test_write_rewind_write_equals_write(kind: str) -> None:
    draw = random.Random(1)
    rewound, clean = caches_of(kind), caches_of(kind)
    size = 0
    for step in range(130):
        if step % 60 == 59:  # a prefill chunk longer than any slack
            T = keep = 700
        else:
            T = draw.choice([1, 1, 2, 5, 17])
            keep = draw.randint(0, T)
        before = append(rewound, size, size + T, salt=1 if keep < T else 0, keep=T if keep == T else 0)
        if keep == T:
            assert same(before, append(clean, size, size + T))
        elif keep:
            assert same(append(rewound, size, size + keep), append(clean, size, size + keep))
        size += keep
        assert rewound.sizes == clean.sizes == [size]


@pytest.mark.parametrize("make", [RotatingKVCache, ChunkedKVCache])
@pytest.mark.parametrize("window", [16, 300])
def test_sliding_rows_are_the_last_ones_in_order(window: int, make: Callable[[int], object]) -> None:
    caches, size = Caches.of_model(Foreign(make(window))), 0
    for T in [1, 3, 40, 1, 1, 300, 2, 1] * 12:
        keys, _ = append(caches, size, size + T)
        low = max(size - window + 1, 0) // VIEW_STEP * VIEW_STEP
        assert mx.array_equal(keys, rows(low, size + T)[0]).item()
        if isinstance(cache := caches.attention[0], ChunkCache):
            assert cache.start_position == low  # Llama 4 builds its mask from there on
        size += T
        low = max(size - window + 1, 0)
        assert mx.array_equal(caches.attention[0].rows(0, size).keys, rows(low, size)[0]).item()


@pytest.mark.parametrize("window", [16, 300])
def test_a_key_has_one_index_alone_in_a_block_and_in_a_batch(window: int) -> None:
    """Modulo VIEW_STEP: Metal deals keys to partial sums by their index. Mended for half precision."""
    alone, block, joined = (Caches.of_model(Foreign(RotatingKVCache(window))) for _ in range(3))
    neighbour, batch, size = window_of(window), Caches(), 700
    for caches, tokens in ((alone, size), (block, size), (joined, size), (neighbour, 431)):
        append(caches, 0, tokens)
    batch.join(neighbour)
    batch.join(joined)
    for T in [1, 5, 2, 1, 8] * 24:
        for caches in (block, batch):
            caches.begin(T)
            for cache in caches.attention:  # attention reads the position of index 0 from a multiple on
                keys, _ = cache.update_and_fetch(
                    *(mx.concatenate([part] * len(caches.sizes)) for part in rows(size, size + T))
                )
                places = [cache.columns.low + first for first in cache.columns.first]
                assert all(place % VIEW_STEP == 0 for place in places)
                assert mx.array_equal(keys[-1:, :, size - places[-1] :][:, :, :T], rows(size, size + T)[0])
            caches.commit([T] * len(caches.sizes))
        for position in range(size, size + T):
            append(alone, position, position + 1)
            assert (alone.attention[0].columns.low + alone.attention[0].columns.first[0]) % VIEW_STEP == 0
        size += T
    left = window_of(window)
    batch.leave(1, left)
    keys, _ = append(left, size, size + 3)
    first = left.attention[0].columns.first[0]
    assert first % VIEW_STEP == 0
    assert mx.array_equal(keys[:, :, -window - 2 :], rows(size - window + 1, size + 3)[0])


def test_no_mask_is_wider_than_the_window() -> None:
    """PLaMo 3 asks for one row more than its cache keeps, so a block saw a row that single tokens do not."""
    caches = window_of(16)
    append(caches, 0, 40)
    caches.begin(2)
    assert caches.attention[0].make_mask(2, window_size=17).sum(axis=-1).tolist() == [[[16, 16]]]


def test_a_mask_is_that_of_its_window() -> None:
    """Layers with full caches may have windows of their own."""
    caches = caches_of("full")
    caches.begin(9)
    for window in (None, 4, 2):
        mask = caches.attention[0].make_mask(9, return_array=True, window_size=window)
        assert mask.sum(axis=-1).tolist() == [[[min(i + 1, window or 9) for i in range(9)]]]


def test_layers_of_a_batch_may_have_other_numbers_of_heads() -> None:
    """As in OpenELM. The lanes end at different columns."""
    shared, sizes, heads = Caches(), (3, 5), (2, 1)

    def write(caches: Caches, *ranges: tuple[int, int]) -> list[mx.array]:
        caches.begin(ranges[0][1] - ranges[0][0])
        parts = list(zip(*(rows(*each) for each in ranges), strict=True))
        written = [mx.concatenate(part) for part in parts]
        layers = zip(caches.attention, heads, strict=True)
        found = [cache.update_and_fetch(*(part[:, :count] for part in written)) for cache, count in layers]
        caches.commit([high - low for low, high in ranges])
        return [keys for keys, _ in found]

    for size in sizes:
        lone = Caches.of_model(Foreign(KVCache(), KVCache()))
        write(lone, (0, size))
        shared.join(lone)
    for keys, count in zip(write(shared, *((size, size + 2) for size in sizes)), heads, strict=True):
        for lane, size in enumerate(sizes):
            assert mx.array_equal(keys[lane, :, : size + 2], rows(0, size + 2)[0][0, :count])


@pytest.mark.parametrize("window", [None, 5, 9, 30])  # smaller than a block, as large, and larger
@pytest.mark.parametrize("in_all", [False, True])
def test_rows_of_a_block_see_each_other(window: int | None, in_all: bool) -> None:
    """Later rows, too, but no row before the window."""
    caches, blocks = (
        Caches.of_model(Foreign(KVCache() if window is None else RotatingKVCache(window))),
        [(24, 33)],
    )
    blocks.append((35, 38))
    append(caches, 0, 20)
    caches.begin(20, blocks=blocks, in_all=in_all)
    mask = np.array(caches.attention[0].make_mask(20, return_array=True, window_size=window))[0, 0]
    query, key = np.arange(20, 40)[:, None], np.arange(40 - mask.shape[1], 40)
    expected = key <= query
    for low, high in blocks if in_all or window is not None else ():
        expected |= (low <= query) & (query < high) & (low <= key) & (key < high)
    expected &= key > query - (window or 100)
    assert np.array_equal(mask, expected)
    short = caches.attention[0].make_mask(20, window_size=window)
    assert isinstance(short, str) == (window is None and not in_all)  # else "causal" would hide later rows
    caches.commit([20])
    caches.begin(1)
    mask = caches.attention[0].make_mask(1, return_array=True, window_size=window)
    assert mask.sum().item() == min(41, window or 41)  # of the next pass


def test_sliding_buffers_stay_small() -> None:
    caches = window_of(16)
    for i in range(3000):
        append(caches, i, i + 1)
        assert caches.arrays()[0].shape[2] <= 16 + MAX_UNCOMMITTED + WINDOW_SLACK


@pytest.mark.parametrize("reach", [16, 24])  # some models let tokens of a prompt see further than the window
def test_a_window_keeps_the_rows_of_its_slack(reach: int) -> None:
    caches, size = window_of(16), 0
    caches.attention[0].columns.reach = reach
    while size < 2000:
        append(caches, size, size + 5)
        size += 5
    first = caches.attention[0].columns.oldest[0] + reach - 1
    assert size - MAX_UNCOMMITTED >= first > 100
    assert caches.first_size() == first


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_full_layer_is_never_quantized(kind: str) -> None:
    caches = Caches.of_model(getattr(tiny, kind)(), kv_bits=4)
    full = [cache for cache in caches.attention if cache.columns.window is None]
    assert type(full[-1]) is AttentionCache
    assert all(isinstance(cache, QuantizedCache) for cache in full[:-1])


def test_models_for_tests_of_quantized_kv_have_some() -> None:
    made = [tiny.model_of("quantized"), tiny.shallow("quantized"), pairs.MODELS["quantized"]]
    with contextmanager(pairs.shallow)():
        made.append(pairs.MODELS["quantized"])
    for model in made:
        caches = Caches.of_model(model, kv_bits=8)
        assert any(isinstance(cache, QuantizedCache) for cache in caches.attention)


@pytest.mark.parametrize(
    ("makers", "why"),
    [
        ([KVCache], "one layer with K/V, and the last one stays"),
        ([KVCache, lambda: RotatingKVCache(16)], "one layer with K/V, and the last one stays"),
        ([lambda: RotatingKVCache(16)], "no layer of this target has full attention"),
        ([lambda: ArraysCache(2)], "no layer of this target has full attention"),
        ([KVCache, KVCache], None),
    ],
)
def test_kv_bits_that_quantize_no_layer_have_a_reason(
    makers: list[Callable[[], object]], why: str | None
) -> None:
    obstacle = Caches.of_model(Foreign(*(make() for make in makers)), kv_bits=4).quantization_obstacle
    assert obstacle is None if why is None else why in str(obstacle)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_kv_give_the_logits_of_mlx_lm(bits: int) -> None:
    model, prompt = tiny.full(num_hidden_layers=2), tiny.prompt(40)
    target = read(model, prompt[:30], kv_bits=bits)
    quantized = target.caches.attention[0]
    write(target, prompt[30:])
    assert isinstance(quantized, QuantizedCache)
    expected = model(
        mx.array([[*prompt, 3]]), cache=[QuantizedKVCache(quantized.group_size, bits), KVCache()]
    )
    assert mx.abs(logits_after(target, 3)[-1] - expected[0, -1]).max().item() < 1e-4


def test_generated_tokens_are_no_prompt_where_prompts_see_further() -> None:
    """They were computed with a shorter window. That holds after a batch and in another process, too."""
    model, prompt = tiny.make("plamo3"), tiny.prompt(60)
    target, batch = read(model, prompt[:20]), TargetBatch(model, FeatureSpec())
    batch.join(target)
    batch.prefill(mx.array(prompt[20:40]), [20])
    batch.verify(mx.array(prompt[40:43]), [3])
    batch.commit([2])
    batch.leave(0, keep=True)
    restored, fresh = LMTarget(model), read(model, prompt[:45])
    restored.restore(target.state())
    for each in (target, restored):
        assert each.size == 42
        assert max(last for _, last in each.reach()) == each.rewind(41) == 40
        assert_goes_on(each, model, prompt[:40], [*prompt[40:45], 3])
    write(fresh, prompt[45:48])
    fresh.prefill(prompt[48:60])
    assert fresh.rewind(60) == 45  # a prompt after generated tokens counts no more
    fresh.rewind(30)
    write(fresh, prompt[30:35])
    assert fresh.rewind(35) == 30  # they are no prompt, although one was read up to there before


def test_an_interrupted_prefill_leaves_no_checkpoint() -> None:
    """Its rows are taken back, so nothing may return to them later."""
    model, prompt, other = tiny.shallow("recurrent"), tiny.prompt(90), tiny.prompt(60, seed=7)
    target = read(model, prompt[:40])
    chunk = target.prefill_by_layers(prompt[40:])
    next(chunk)
    chunk.close()  # as an interrupt does, after the second checkpoint was written
    target.prefill(other)
    kept = target.rewind(70)
    assert_goes_on(target, model, (prompt[:40] + other)[:kept], [*other[:5], 3])


@pytest.mark.parametrize("kind", ["full", "shared", "recurrent", "quantized"])
def test_a_rewound_target_equals_one_that_never_wrote(kind: str) -> None:
    model, kv_bits, prompt = tiny.shallow(kind), tiny.bits_of(kind), tiny.prompt(90)
    for size in (90, 70, 41, 40, 12, 0):
        target = read(model, prompt[:40], kv_bits=kv_bits)
        target.prefill(prompt[40:41])
        for low in range(41, 90, 17):
            write(target, prompt[low : low + 17])
        kept = target.rewind(size)
        assert kept <= size
        assert kept == size or kind != "full"
        assert_goes_on(target, model, prompt[:kept], OTHER, kv_bits=kv_bits)


@pytest.mark.parametrize(
    ("kind", "size", "kept"),
    [("sliding", 95, 90), ("sliding", 80, 80), ("recurrent", 95, 90), ("recurrent", 80, 58)],
)
def test_a_target_rewinds_to_its_last_prefill_after_a_long_answer(kind: str, size: int, kept: int) -> None:
    model, prompt, answer = tiny.shallow(kind), tiny.prompt(90), tiny.prompt(450)
    target = read(model, prompt)
    for i in range(0, len(answer), 45):  # in blocks: only the length matters
        write(target, answer[i : i + 1])
        write(target, answer[i + 1 : i + 45])
    assert target.rewind(size) == kept
    assert_goes_on(target, model, prompt[:kept], (prompt + tiny.prompt(5))[kept:size] + OTHER)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [60, 0])  # a prompt of one token leaves the caches empty
def test_sequences_of_one_state_do_not_write_into_each_other(kind: str, size: int) -> None:
    model, prompt = tiny.shallow(kind), tiny.prompt(size)
    state, targets = read(model, prompt).state(), []
    for seed in (1, 2):
        target = LMTarget(model)
        target.restore(state)
        kept = target.rewind(50)
        text = prompt[:kept] + tiny.prompt(55 - kept, seed=seed)
        target.prefill(text[kept:])
        targets.append((target, text))
    for target, text in targets:
        assert_goes_on(target, model, text, [3])


@pytest.mark.parametrize("kind", ["full", "shared", "recurrent", "quantized"])
def test_a_fork_equals_a_fresh_target_and_leaves_its_origin(kind: str) -> None:
    """At any size, also while the origin has rows that are not committed, or is in a batch."""
    model, kv_bits, prompt, kept = tiny.shallow(kind), tiny.bits_of(kind), tiny.prompt(90), []
    for place in ("alone", "queued", "batch"):
        for size in (90, 70, 12):
            origin = read(model, prompt[:60], kv_bits=kv_bits)
            origin.prefill(prompt[60:80])
            write(origin, [*prompt[80:83], 1], 3)  # of a recurrent state, these are replayed
            batch = TargetBatch(model, FeatureSpec())
            if place == "batch":
                batch.join(read(model, OTHER, kv_bits=kv_bits))
                batch.join(origin)
            elif place == "queued":
                mx.eval(origin.verify(mx.array(prompt[83:84])))
            fork = LMTarget(model, kv_bits=kv_bits)
            kept.append(fork.fork_from(origin, size, 40))
            assert kept[-1] <= min(size, 83)
            assert fork.size == size or kind != "full" or size == 90
            assert_goes_on(fork, model, prompt[: kept[-1]], OTHER, kv_bits=kv_bits)
            if place == "batch":
                batch.leave(1, keep=True)
            origin.commit(0)
            assert_goes_on(origin, model, prompt[:83], [5], kv_bits=kv_bits)
    assert kept[0] == kept[3] == 83 and max(kept[6:]) >= 58


def addresses(caches: Sequence[AttentionCache]) -> list[int]:
    """Where the buffers of caches lie in memory."""
    buffers = [buffer for cache in caches for buffer in cache.buffers]
    mx.eval(buffers)
    return [int(np.asarray(buffer).__array_interface__["data"][0]) for buffer in buffers]


# What happens while a fork copies rows, from a rewind point at 60 and from the rows of a window at 70.
MEANWHILE = {60: "nothing rewound forgotten joined left forked saved"}
MEANWHILE[70] = "nothing moved rewound forgotten joined trimmed saved"


@pytest.mark.parametrize(
    ("kind", "start", "meanwhile"),
    [
        (kind, start, meanwhile)
        for start, kinds in ((60, KINDS), (70, ("sliding", "shared")))
        for kind in kinds
        for meanwhile in MEANWHILE[start].split()
    ],
)
def test_a_fork_of_a_sequence_in_use_copies_in_steps(kind: str, start: int, meanwhile: str) -> None:
    """Its origin goes on meanwhile, and no pass of it copies a buffer, because nothing refers to one."""
    model, text = tiny.shallow(kind), tiny.prompt(90)[:74]
    origin, fork, batch = read(model, text[:60]), LMTarget(model), TargetBatch(model, FeatureSpec())
    write(origin, [*text[60:70], 1], 10)
    assert fork.fork_from(origin, start, 40) == start
    write(origin, text[70:72])
    fork.follow(origin)
    in_use = origin.caches.full if start == 60 else origin.caches.windowed
    count = len(addresses(origin.caches.full + origin.caches.windowed))
    before, copies = addresses(in_use), fork.copies()
    for token in text[72:]:
        mx.eval(next(copies, mx.array(0)))
        write(origin, [token])
    assert addresses(in_use) == before
    if meanwhile in ("joined", "left"):
        batch.join(read(model, OTHER))
        batch.join(origin)
        if meanwhile == "left":
            batch.leave(1, keep=False)
    elif meanwhile in ("rewound", "forgotten", "trimmed", "moved"):
        if meanwhile == "rewound":
            text = text[: origin.rewind(30 if start == 60 else 65)]
        elif meanwhile == "forgotten":
            origin.forget()
            text = []
        elif meanwhile == "trimmed":
            origin.trim()
            assert origin.rewind(len(text)) == len(text)
        for _ in range(6 if meanwhile == "moved" else 1):
            write(origin, OTHER)
            text = text + OTHER
    elif meanwhile in ("forked", "saved"):
        second = LMTarget(model)
        if meanwhile == "saved":
            second.restore(fork.state())
            count = 2
        else:
            assert second.fork_from(fork, start, 40) == start
        fork, copies = second, second.copies()
    rest = [mx.eval(array) for array in copies]
    assert start == 60 or len(rest) == count - 2
    assert_goes_on(fork, model, tiny.prompt(90)[:start], OTHER)
    if meanwhile == "joined":
        batch.leave(1, keep=True)
    if meanwhile != "left":
        assert_goes_on(origin, model, text, [5])


@pytest.mark.parametrize("kind", ["sliding", "shared", "recurrent"])
@pytest.mark.parametrize("copied", [0, 2])
def test_a_fork_that_is_rewound_before_all_is_copied(kind: str, copied: int) -> None:
    """Such as that of an answer that was cancelled, whose conversation goes on elsewhere."""
    model, prompt = tiny.shallow(kind), tiny.prompt(400)
    origin, fork = LMTarget(model), LMTarget(model)
    origin.pin_at([40], 400)
    for start, end in ((0, 40), (40, 200), (200, 400)):
        origin.prefill(prompt[start:end])
    assert fork.fork_from(origin, 400, 40) == 400
    fork.follow(origin)
    copies = fork.copies()
    mx.eval([next(copies, mx.array(0)) for _ in range(copied)])
    assert fork.rewind(45) == 40
    mx.eval(list(fork.copies()))
    assert_goes_on(fork, model, prompt[:40], prompt[40:45] + OTHER)


@pytest.mark.parametrize("kind", ["sliding", "shared", "recurrent", "full"])
def test_a_prompt_leaves_places_to_go_back_to(kind: str) -> None:
    """Where it was told to, at its end and at an end of a chunk. Long answers and saved states keep them."""
    model, prompt = tiny.shallow(kind), tiny.prompt(300)
    target, restored = LMTarget(model), LMTarget(model)
    target.pin_at([70, 75, 150, 260], 300)
    target.prefill(prompt[:100], ends_prompt=False)
    target.keep_rewind_points(100, ends_prompt=False, apart=6)  # as if chunks were as long
    target.prefill(prompt[100:150], ends_prompt=False)
    target.prefill(prompt[150:])
    for low in range(0, 480, 48):
        write(target, prompt[low % 240 : low % 240 + 48])
    sizes = [] if kind == "full" else [70, 75, 100, 150, 260, 300]
    if kind == "recurrent":
        sizes.remove(75)  # each costs a pass, so none is near another one
    assert [place.size for place in target.rewind_points] == sizes
    restored.restore(target.state())
    assert restored.reach() == target.reach()
    for size in (280, 140, 99, 74):
        for each in (target, restored):
            kept = each.rewind(size)
            has_rows = size != 140 and kind != "recurrent"  # in steps of 128 positions
            assert kept == (size if has_rows else max((s for s in sizes if s <= size), default=size))
            assert_goes_on(each, model, prompt[:kept], OTHER)


@pytest.mark.parametrize("chunks", [(512, 512, 176), (500, 524, 176), (300, 700, 200)], ids=str)
def test_an_opening_keeps_the_same_points_however_it_is_cut(chunks: tuple[int, ...]) -> None:
    """The length of a chunk follows from the speed of the machine."""
    target, prompt = LMTarget(tiny.shallow("sliding")), tiny.prompt(1200)
    target.pin_at([], 1200, 1100)
    for end in itertools.accumulate(chunks):
        target.prefill(prompt[target.size : end], ends_prompt=end == 1200)
    assert [point.size for point in target.rewind_points] == [512, 1024, 1200]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trimmed_target_goes_on(kind: str) -> None:
    model, prompt = tiny.shallow(kind), tiny.prompt(500)
    target, fork, restored = read(model, prompt), LMTarget(model), LMTarget(model)
    before, slack = target.nbytes, target.slack()
    target.trim()
    assert target.nbytes == before - slack < before and not target.slack()
    assert target.reach()[0][1] == 500
    assert fork.fork_from(target, 500, 60) == 500  # its windows are only in its checkpoints
    restored.restore(target.state())
    target.trim()
    assert target.rewind(500) == 500
    expected = logits_after(read(model, [*prompt, *prompt[:50]]), 3)
    for each in (target, fork, restored):
        each.prefill(prompt[:50])
        assert_same_logits(each, expected, 3)


@pytest.mark.parametrize("kind", ["sliding", "shared"])
def test_places_share_the_rows_that_both_need(kind: str) -> None:
    """Also with places of a fork, and after a rewind: rows of another text are never shared."""
    model, prompt, other = tiny.shallow(kind), tiny.prompt(516), tiny.prompt(500, seed=11)
    target, fork = LMTarget(model), LMTarget(model)
    target.pin_at([116, 258, 266, 426])
    target.prefill(prompt)
    _, one, two, *_ = target.rewind_points
    assert one.blocks[0] is two.blocks[0] and one.blocks[1] is not two.blocks[1]
    assert sum(target.pinned.values()) < sum(place.nbytes for place in target.rewind_points)
    assert fork.fork_from(target, 264, 200) == 264
    assert set(fork.pinned) <= set(target.pinned)
    assert target.rewind(261) == 261
    for each, rest in ((target, other), (fork, prompt[264:364])):
        size = each.size
        each.pin_at([size + 20, size + 60])
        each.prefill(rest)
        each.rewind(size + 20)
        each.prefill(rest[20:90])
        assert_goes_on(each, model, [*prompt[:size], *rest[:90]], [3])


@pytest.mark.parametrize("kind", ["sliding", "shared"])
def test_places_without_a_gap_give_back_all_sizes_between(kind: str) -> None:
    model, prompt = tiny.shallow(kind), tiny.prompt(900)
    target = LMTarget(model)
    target.pin_at([512, 640, 768])
    target.prefill(prompt)
    assert [place.size for place in target.rewind_points] == [512, 640, 768, 900]
    for size in (760, 641, 600, 450):
        fork, expected = LMTarget(model), logits_after(read(model, prompt[:size]), 3)
        assert fork.fork_from(target, size, 100) == target.rewind(size) == size
        for each in (fork, target):
            assert_same_logits(each, expected, 3)


def test_places_are_bounded_by_what_their_loss_costs() -> None:
    """Those nearest to the place before go first, ends of chunks before turns, and never the last end."""

    def place(size: int, kind: Any) -> RewindPoint:
        return RewindPoint(size, {}, (CacheBlock((None, size, size), [[mx.zeros((10,))]]),), kind)

    places = RewindPoints()
    places.add([place(100, "turn"), place(200, "chunk"), place(250, "chunk"), place(260, "turn")], 160)
    assert [each.size for each in places] == [100, 200, 250, 260]
    places.add([place(700, "chunk"), place(720, "end")], 160)
    assert [each.size for each in places] == [100, 260, 700, 720]  # 250, and then 200, cost least
    places.end_prompt()
    places.add([place(730, "end"), place(100, "chunk")], 120)
    assert [(each.size, each.reason) for each in places] == [(100, "turn"), (260, "turn"), (730, "end")]
    assert [each.size for each in places.before(260)] == [100, 260]
