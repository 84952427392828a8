"""The matrix: every kind of cache x every drafter x K x prompt length, over three turns of a conversation."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import fitted
import mlx.nn as nn
import pytest
import random_sources
import tiny
from lossless import Scripted, emitted, first_difference, mlx_lm_greedy, plain, rounds

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.draft_model import DraftModelSource, Vocabulary
from mlx_spec.drafters.lookup import LookupSource
from mlx_spec.errors import NotRewindable
from mlx_spec.target import LMTarget
from mlx_spec.types import Drafter, FeatureSpec

TURN = 10  # tokens of an answer; the third turn is past the window of 16 at every prompt length
KV_BITS = {"quantized KV": 8}


@functools.cache
def model(kind: str) -> nn.Module:
    if kind == "recurrent":
        return tiny.recurrent()
    return tiny.shared(
        pattern={"full": "ffffffff", "window 16": "sssfsssf", "quantized KV": "sffsffsf"}[kind]
    )


@functools.cache
def source(kind: str, drafter: str) -> DraftModelSource | LookupSource | tiny.AssistantSource:
    if drafter == "gemma4_assistant":
        return tiny.assistant(pattern="ff" if kind == "full" else "sssf")
    if drafter == "draft_model":
        small = tiny.recurrent(1) if kind == "recurrent" else tiny.sliding(1)
        return DraftModelSource(small, Vocabulary(256, 256), "draft_model")
    return LookupSource()


@functools.cache
def of_family(kind: str, family: str) -> DrafterSource:
    """A random drafter: what it drafts is hardly ever accepted, and its caches are mended every round."""
    layers = len(model(kind).layers)
    made = {
        "medusa": lambda: fitted.medusa(layers),
        "dflash": lambda: fitted.dflash(layers, (0, 1, 3)),
        "peagle": lambda: fitted.peagle(layers, (0, 1, 3)),
        "pard": lambda: fitted.pard(tiny.full(), layers),
    }
    if family == "eagle3":
        return random_sources.eagle3(64, 256, range(1, 256, 2), (0, 1, 3))
    if family == "mtp":
        return random_sources.mtp(64, 256)
    with tempfile.TemporaryDirectory() as folder:
        return fitted.opened(made[family](), Path(folder))


@functools.cache
def truth(kind: str, length: int) -> list[list[int]]:
    """The prompt and the plain answer of each turn, from fresh caches every time."""
    prompt, turns = tiny.prompt(length), []
    for turn in range(3):
        answer = plain(model(kind), prompt, TURN, KV_BITS.get(kind))
        if kind not in KV_BITS:
            assert answer == mlx_lm_greedy(model(kind), prompt, TURN)
        turns += [prompt, answer]
        prompt = prompt + answer + tiny.prompt(3 + turn, seed=turn)
    return turns


@pytest.mark.parametrize("kind", ["full", "window 16", "quantized KV", "recurrent"])
@pytest.mark.parametrize("drafter", ["gemma4_assistant", "draft_model", "lookup", "scripted"])
@pytest.mark.parametrize("K", [0, 1, 2, 4, 7])
def test_equal_to_plain_decoding_over_three_turns(kind: str, drafter: str, K: int) -> None:
    if (kind, drafter) == ("recurrent", "gemma4_assistant"):
        with pytest.raises(NotRewindable, match="reads the target's K/V and this target is recurrent"):
            LMTarget(model(kind), FeatureSpec(shared_kv=True))
        return
    for length in (1, 8, 15, 16, 17, 40):
        turns = truth(kind, length)
        needs = FeatureSpec() if drafter == "scripted" else source(kind, drafter).needs
        target = LMTarget(model(kind), needs, kv_bits=KV_BITS.get(kind))
        made: Drafter
        if drafter == "scripted":
            made = Scripted(turns[-2] + turns[-1], spoil=2)
        else:
            made = source(kind, drafter).make(target.parts)
        for prompt, answer in zip(turns[::2], turns[1::2], strict=True):
            got = emitted(rounds(target, made, K, prompt, TURN))
            assert got == answer, f"prompt {length}: {first_difference(got, answer)}"


@pytest.mark.parametrize("kind", ["full", "window 16", "quantized KV", "recurrent"])
@pytest.mark.parametrize("family", ["eagle3", "mtp", "dflash", "peagle", "pard", "medusa"])
def test_families_over_three_turns(kind: str, family: str) -> None:
    """Turns that end at the window and past it, behind each other in the same caches."""
    source = of_family(kind, family)
    for K, length in ((1, 16), (4, 40)):
        turns = truth(kind, length)
        target = LMTarget(model(kind), source.needs, kv_bits=KV_BITS.get(kind))
        drafter = source.make(target.parts)
        for prompt, answer in zip(turns[::2], turns[1::2], strict=True):
            done = rounds(target, drafter, K, prompt, TURN)
            assert emitted(done) == answer, f"prompt {length}: {first_difference(emitted(done), answer)}"
            assert sum(r.drafted for r in done) >= len(done) - 2
