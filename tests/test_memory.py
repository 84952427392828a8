"""Models stay in memory while they compute, and only then; freed buffers have a bound. Metal is imitated."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest
from support import mac, tiny
from support.pairs import make_pair
from support.served import DEMO, answer, chat, closed, working
from support.waiting import wait_until

import mlx_spec
from mlx_spec.device import memory_for_models, most_scores, resident

SET = mac.MACS[16].working_set


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> mac.Metal:
    """A Mac on which the wired limit never changes while the device computes."""
    found, is_idle = mac.imitate(monkeypatch), [False]
    synchronize, set_limit = mx.synchronize, mx.set_wired_limit

    def counted(*given: Any) -> None:
        synchronize(*given)
        is_idle[0] = True

    def checked(limit: int) -> int:
        assert is_idle[0], "the device may still compute"
        is_idle[0] = False
        return set_limit(limit)

    monkeypatch.setattr(mx, "synchronize", counted)
    monkeypatch.setattr(mx, "set_wired_limit", checked)
    return found


def test_the_wired_limit_covers_what_is_in_use_and_ends_with_it(metal: mac.Metal) -> None:
    pair = mlx_spec.load("demo")
    assert metal.wired_limits[-1] == 0 and len(metal.wired_limits) == 2  # the costs were measured
    for _ in pair.generate(pair.tokenizer.encode("def f("), max_tokens=6):
        assert mx.get_active_memory() + most_scores() < metal.allocator.wired_limit <= memory_for_models()
    assert metal.wired_limits[-1] == 0
    assert max(metal.wired_limits) < 0.95 * SET and memory_for_models() < SET
    for _ in pair.generate(pair.tokenizer.encode("def f("), max_tokens=6):
        break  # its client leaves
    for _ in pair.generate_batch([pair.tokenizer.encode("def f(")] * 2, max_tokens=3):
        assert metal.allocator.wired_limit
    assert metal.allocator.wired_limit == 0


def test_the_wired_limit_grows_with_the_caches(metal: mac.Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    active = 2**30
    monkeypatch.setattr(mx, "get_active_memory", lambda: active)
    with resident():
        limits = [metal.allocator.wired_limit]
        for _ in range(60):
            active += 2**28
            resident.grow()
            limits.append(metal.allocator.wired_limit)
            assert min(active + most_scores(), memory_for_models()) <= limits[-1]
    assert len(set(limits)) < 20 and limits[-1] == memory_for_models()
    assert metal.allocator.wired_limit == 0
    resident.grow()
    assert metal.allocator.wired_limit == 0  # nothing computes


def test_overlapping_answers_share_one_limit(metal: mac.Metal) -> None:
    pair = make_pair("full")
    first, second = (pair.generate(tiny.prompt(9), max_tokens=12) for _ in range(2))
    next(first), next(second)
    first.close()
    assert metal.allocator.wired_limit
    second.close()
    assert metal.allocator.wired_limit == 0


def test_freed_buffers_have_a_bound_from_the_load_on(metal: mac.Metal) -> None:
    mlx_spec.load("demo", "none")
    (limit,) = metal.cache_limits
    assert 2**29 <= limit <= 0.1 * SET


def test_an_idle_server_holds_weights_and_parked_conversations_only(metal: mac.Metal) -> None:
    gc.collect()  # what other tests of this process have left
    mx.clear_cache()
    others = mx.get_active_memory()
    with working(DEMO) as engine:
        closed(answer(engine, chat("What is a list?", max_tokens=6)))
        wait_until(lambda: metal.allocator.wired_limit == 0)
        assert mx.get_cache_memory() == 0
        (model,) = engine.status().models
        held = model.weights + model.caches
        assert model.caches and mx.get_active_memory() - others < held + 2**25


def test_an_answer_that_is_left_open_ends_with_the_program_in_silence() -> None:
    code = """
from mlx_spec.device import resident

def answer():
    with resident():
        yield

left = {"open": answer()}
next(left["open"])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == ""
