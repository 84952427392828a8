"""Every drafter with every kind of cache and every draft length: the text is that of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import fitted
import mlx.nn as nn
import pytest
import random_sources
import tiny
from grammars import byte_text
from lossless import Scripted, emitted, first_difference, lengths, plain, rounds
from virtual_clock import CURVES, PLAIN_SECONDS

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.draft_model import DraftModelSource, VocabularySizes
from mlx_spec.drafters.model_free import Lookup, LookupSource, Prediction
from mlx_spec.drafters.retokenized import Retokenized
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.types import Draft, Drafter, DraftLengthPolicy, Sampler, TargetParts

PROMPT, COUNT = tiny.prompt(20), 36  # the window of sliding caches is 16
CACHES = {"full": None, "quantized": 8, "sliding": None, "shared": None, "recurrent": None}
LENGTHS = [0, 1, 4, "adaptive", "switching"]
PUBLISHED = {
    "medusa": lambda: fitted.medusa(3),
    "pard": lambda: fitted.pard(tiny.full(seed=1, max_position_embeddings=512), 3),
    "dflash": lambda: fitted.dflash(3, (0, 1, 2)),
    "peagle": lambda: fitted.peagle(3, (0, 1, 2)),
}


class ShortLookup(LookupSource):
    """Lookup of single tokens: random models hardly repeat themselves."""

    def make(self, parts: TargetParts) -> Lookup:
        return Lookup(1, 16)


SOURCES = {
    "lookup": ShortLookup,
    "draft model": lambda: DraftModelSource(tiny.full(seed=1), VocabularySizes(256, 256), "other"),
    "eagle3": lambda: random_sources.eagle3(64, 256, range(0, 256, 2), (0, 1, 2)),
    "mtp": lambda: random_sources.mtp(64, 256),
    "gemma4 assistant": tiny.assistant,
}
DRAFTERS = ["prediction", "retokenized", *SOURCES, *PUBLISHED]
PAIRS = [pair for pair in itertools.product(DRAFTERS, CACHES) if pair[0] != "gemma4 assistant"]
PAIRS.append(("gemma4 assistant", "shared"))  # it reads the K/V of this target


@cache
def target_of(kind: str) -> tuple[nn.Module, list[int]]:
    """Return a model and what plain decoding says after the prompt."""
    model = tiny.sliding() if kind == "quantized" else getattr(tiny, kind)()
    return model, plain(model, PROMPT, COUNT, CACHES[kind])


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DrafterSource]:
    folder: Path = tmp_path_factory.mktemp("published")
    return {name: fitted.opened(make(), folder / name) for name, make in PUBLISHED.items()}


class Guided(Scripted):
    """Asks a drafter, and of three drafts gives its own, the truth, and the truth with a wrong token."""

    def __init__(self, drafter: Drafter, truth: Sequence[int]) -> None:
        super().__init__(truth, 3, drafter.needs)
        self.drafter, self.observe, self.own = drafter, drafter.observe, 0

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        own, scripted = self.drafter.draft(history, limit, sampler), super().draft(history, limit, sampler)
        self.own += own.tokens.size
        return own if self.drafts % 3 == 1 and own.tokens.size else scripted


def policy_of(length: int | str) -> DraftLengthPolicy:
    if isinstance(length, int):
        return FixedPolicy(length)
    if length == "switching":
        return lengths(0, 0, 4, 4, 0, 1, 1, 2)  # the first after a plain round lets the queued token land
    policies, ticks = AdaptivePolicies(["drafter"]), itertools.count()
    policies.use(CURVES["M5 Max"].table())
    return policies.policy(lambda: next(ticks) * PLAIN_SECONDS)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_the_text_is_that_of_plain_decoding(
    name: str, kind: str, published: dict[str, DrafterSource]
) -> None:
    model, truth = target_of(kind)
    source = published.get(name) or (SOURCES[name]() if name in SOURCES else None)
    for length in LENGTHS:
        target = LMTarget(model, source and source.needs, kv_bits=CACHES[kind])
        if source is not None:
            drafter: Drafter = source.make(target.parts)
        elif name == "prediction":
            drafter = Prediction([(t + (i % 7 == 6)) % 256 for i, t in enumerate(truth)], PROMPT)
        else:
            drafter = Retokenized(tiny.full(seed=1), 256, byte_text({}), byte_text({}, first=1))
        guided = Guided(drafter, [*PROMPT, *truth])
        done = rounds(target, guided, policy_of(length), PROMPT, COUNT)
        assert emitted(done) == truth, f"{length}: {first_difference(emitted(done), truth)}"
        used = {round.drafted for round in done[:-1]}
        assert len(used) > 2 if isinstance(length, str) else max(used) == length
        assert guided.own or length != 4 or name == "lookup"
