"""Every drafter with every cache and draft length, over two turns: the text is that of plain decoding."""

from __future__ import annotations

import itertools
from functools import cache, partial
from pathlib import Path

import mlx.nn as nn
import pytest
from support import fitted, random_sources, tiny
from support.grammars import byte_text
from support.lossless import Guided, emitted, first_difference, lengths, plain, rounds
from support.virtual_clock import CURVES, PLAIN_SECONDS

from mlx_spec.decode.running import PREFILL_STEP, prefill
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.lookup import Lookup
from mlx_spec.drafters.per_request import Prediction
from mlx_spec.drafters.retokenized import Retokenized
from mlx_spec.errors import NotRewindable
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.types import Drafter, DraftLengthPolicy, FeatureSpec

PROMPT, COUNT = tiny.prompt(20), 14  # the window of sliding caches is 16
MORE = tiny.prompt(9, seed=5)  # what the second turn adds to the first
CACHES = ["full", "quantized", "sliding", "shared", "recurrent"]
SHARED = {"shared, full": ("ffff", "f"), "shared, quantized": ("sfsf", "sf")}  # target, assistant
VARYING = ["adaptive", "switching"]  # lengths; the last has plain rounds and drafts of one token


def short_lookup() -> DrafterSource:
    """Lookup of single tokens: random models hardly repeat themselves."""
    return DrafterSource("lookup", Lookup.needs, lambda parts: Lookup(1, 16))


SOURCES = {"lookup": short_lookup, **random_sources.FOR_TINY}
DRAFTERS = ["prediction", "retokenized", *SOURCES, *fitted.MADE]
PAIRS = [pair for pair in itertools.product(DRAFTERS, CACHES) if pair[0] != "gemma4 assistant"]
# It reads the K/V of these targets.
PAIRS += [("gemma4 assistant", kind) for kind in ("shared", *SHARED)]


@cache
def target_of(kind: str) -> tuple[nn.Module, list[tuple[list[int], list[int]]]]:
    """Return a model, and prompts and answers of plain decoding: two turns."""
    model = tiny.shared(pattern=SHARED[kind][0]) if kind in SHARED else tiny.model_of(kind)
    first = plain(model, PROMPT, COUNT, tiny.bits_of(kind))
    longer = [*PROMPT, *first, *MORE]
    return model, [(PROMPT, first), (longer, plain(model, longer, COUNT, tiny.bits_of(kind)))]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DrafterSource]:
    folder: Path = tmp_path_factory.mktemp("published")
    return {name: fitted.opened(make(), folder / name) for name, make in fitted.MADE.items()}


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
    """The second turn goes on in the same caches, with another policy; its prompt comes in pieces.

    Every drafter and every cache meets both lengths that vary, in a first turn and in a second one.
    """
    model, turns = target_of(kind)
    source = published.get(name) or (SOURCES[name]() if name in SOURCES else None)
    if kind in SHARED:
        source = tiny.assistant(pattern=SHARED[kind][1])
    target = LMTarget(model, source and source.needs, kv_bits=tiny.bits_of(kind))
    if source is not None:
        drafter: Drafter = source.make(target.parts)
    elif name == "prediction":
        answers = [token for _, answer in turns for token in answer]
        drafter = Prediction([(t + (i % 7 == 6)) % 256 for i, t in enumerate(answers)], PROMPT)
    else:
        drafter = Retokenized(tiny.full(seed=1), 256, byte_text({}), byte_text({}, first=1))
    guided, index = Guided(drafter), PAIRS.index((name, kind))
    for turn, (step, (prompt, answer)) in enumerate(zip((PREFILL_STEP, 7), turns, strict=True)):
        length = 4 if turn == index // 2 % 2 else VARYING[index % 2]
        list(prefill(target, [guided], text_prompt(prompt), partial(int, step)))
        guided.truth = [*prompt, *answer]
        done = rounds(target, guided, policy_of(length), prompt, len(answer))
        assert emitted(done) == answer, f"{length}: {first_difference(emitted(done), answer)}"
        used = {round.drafted for round in done}
        assert len(used) > 2 if isinstance(length, str) else max(used) == length
    assert guided.own or name == "lookup"


def test_an_assistant_refuses_a_recurrent_target() -> None:
    with pytest.raises(NotRewindable, match="reads the target's K/V and this target is recurrent"):
        LMTarget(target_of("recurrent")[0], FeatureSpec(shared_kv=True))
