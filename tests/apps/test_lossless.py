"""The matrix: kinds of cache x drafters x K x prompt lengths, over three turns of a conversation.

Any three of the four meet in every combination; all four do in every third.
"""

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
from mlx_spec.drafters.draft_model import DraftModelSource, VocabularySizes
from mlx_spec.drafters.model_free import LookupSource
from mlx_spec.engine import PREFILL_STEP
from mlx_spec.errors import NotRewindable
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Drafter, FeatureSpec

TURN = 8  # tokens of an answer; the third turn is past the window of 16 at every prompt length
KV_BITS = {"quantized KV": 8}
KINDS = ["full", "window 16", "quantized KV", "recurrent"]
DRAFTERS = ["gemma4_assistant", "draft_model", "lookup", "scripted"]
DRAFTS = [0, 1, 2, 4, 7]
LENGTHS = [(1, 16), (8, 17), (15, 40)]  # of prompts: before the window, and at its end or past it


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
        return DraftModelSource(small, VocabularySizes(256, 256), "draft_model")
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


def lengths(kind: str, drafter: str, K: int) -> tuple[int, int]:
    """A Latin square's: with two of the three fixed, the third runs through all lengths."""
    return LENGTHS[(KINDS.index(kind) + DRAFTERS.index(drafter) + DRAFTS.index(K)) % len(LENGTHS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("K", DRAFTS)
def test_equal_to_plain_decoding_over_three_turns(kind: str, drafter: str, K: int) -> None:
    if (kind, drafter) == ("recurrent", "gemma4_assistant"):
        with pytest.raises(NotRewindable, match="reads the target's K/V and this target is recurrent"):
            LMTarget(model(kind), FeatureSpec(shared_kv=True))
        return
    for length in lengths(kind, drafter, K):
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["eagle3", "mtp", "dflash", "peagle", "pard", "medusa"])
def test_families_over_three_turns(kind: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that end at the window and past it, behind each other in the same caches; prompts in pieces."""
    source = of_family(kind, family)
    for K, length, step in ((1, 16, PREFILL_STEP), (4, 40, 7)):
        monkeypatch.setattr("mlx_spec.engine.PREFILL_STEP", step)
        turns = truth(kind, length)
        target = LMTarget(model(kind), source.needs, kv_bits=KV_BITS.get(kind))
        drafter = source.make(target.parts)
        for prompt, answer in zip(turns[::2], turns[1::2], strict=True):
            done = rounds(target, drafter, K, prompt, TURN)
            assert emitted(done) == answer, f"prompt {length}: {first_difference(emitted(done), answer)}"
            assert sum(r.drafted for r in done) >= len(done) - 2
