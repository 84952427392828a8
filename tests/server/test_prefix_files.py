"""Prefixes in files: read once, exactly as they were, by this server or the next, and never a wrong token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
import random_sources
import tiny
from test_session import KINDS, MODELS, alone, make_pair

from mlx_spec import engine
from mlx_spec.apps.server import prefix_files
from mlx_spec.apps.server.prefix_files import CacheFolder, PrefixFiles
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.draft_model import DraftModelSource, VocabularySizes
from mlx_spec.drafters.retokenized import RetokenizedSource
from mlx_spec.model.sequence import CachedSequence
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import Round

GB = 10**9
PROMPT = tiny.prompt(420)  # so long that the buffers of a window have moved
VOCABULARY = VocabularySizes(tiny.VOCAB, tiny.VOCAB)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models, small steps."""
    monkeypatch.setattr(prefix_files, "MIN_TOKENS", 64)
    monkeypatch.setattr(engine, "PREFILL_STEP", 128)


def pair_with(kind: str, drafter: str) -> Pair:
    """A tiny pair; the drafter is one of `make_pair` or of a family."""
    if drafter in ("none", "lookup", "same", "other"):
        return make_pair(kind, drafter)
    plain = make_pair(kind, "none")
    capture = (0, 1, 2)
    made: dict[str, Callable[[], DrafterSource]] = {
        "eagle3": lambda: random_sources.eagle3(64, tiny.VOCAB, range(tiny.VOCAB), capture),
        "mtp": lambda: random_sources.mtp(64, tiny.VOCAB),
        "recurrent": lambda: DraftModelSource(MODELS["recurrent"], VOCABULARY, "recurrent"),
        "sliding": lambda: DraftModelSource(MODELS["sliding"], VOCABULARY, "sliding"),
        "retokenized": lambda: RetokenizedSource(MODELS["full"], tiny.VOCAB, plain.text, plain.text, "r"),
        "assistant": tiny.assistant,
    }
    return Pair(plain.info, plain.text, MODELS[kind], [made[drafter]()], FixedPolicy(4))


def files(pair: Pair, folder: Path, name: str = "a", max_bytes: int = GB) -> PrefixFiles:
    return PrefixFiles(CacheFolder(folder, max_bytes), {"model": name}, pair)


def generate(pair: Pair, sequence: CachedSequence, prompt: Sequence[int], count: int = 12) -> list[Round]:
    sequence.rewind_to_prefix(prompt)
    rounds = []
    for round in pair.run(sequence.parts, prompt, max_tokens=count):
        sequence.append(round.tokens)
        rounds.append(round)
    return rounds


def tokens_of(rounds: list[Round]) -> list[int]:
    return [token for round in rounds for token in round.tokens]


def facts(rounds: list[Round]) -> list[tuple[object, ...]]:
    return [(r.tokens, r.drafted, r.accepted, r.kind) for r in rounds]


def stored(pair: Pair, folder: Path, prompt: Sequence[int] = PROMPT, count: int = 12) -> CachedSequence:
    """A sequence that answered a prompt and was written."""
    sequence, found = CachedSequence(pair.open()), files(pair, folder)
    generate(pair, sequence, prompt, count)
    found.offer(sequence)
    found.close([])
    assert len(list(folder.iterdir())) == 1
    return sequence


CASES = [
    *((kind, "same") for kind in KINDS),
    *(("full", drafter) for drafter in ("none", "lookup", "eagle3", "mtp", "recurrent", "sliding")),
    ("full", "retokenized"),
    ("shared", "assistant"),
    ("recurrent", "mtp"),
]


@pytest.mark.parametrize(("kind", "drafter"), CASES)
@pytest.mark.parametrize("cut", [0, 30])
def test_a_restored_sequence_goes_on_as_the_one_in_memory(
    kind: str, drafter: str, cut: int, tmp_path: Path
) -> None:
    """The next turn, and a prompt that differs before the end of the first, past the window."""
    pair = pair_with(kind, drafter)
    kept = stored(pair, tmp_path)
    prompt = [*PROMPT[:-cut], 9, 9, 9] if cut else [*kept.tokens, 5, 6, 7]
    reused = kept.reusable(prompt)
    restored = files(pair, tmp_path).restore(prompt, 0, pair.open)
    assert restored is not None
    assert len(restored.tokens) == restored.rewind_to_prefix(prompt) == reused >= len(PROMPT) - 40
    expected, found = generate(pair, kept, prompt), generate(pair, restored, prompt)
    assert (facts(found), restored.drafter_missing) == (facts(expected), kept.drafter_missing)
    assert found[0].drafted or drafter in ("none", "lookup", "assistant")
    theirs, ours = kept.state().arrays, restored.state().arrays
    same = [name for name in theirs if name in ours and theirs[name].shape == ours[name].shape]
    assert len(same) > 3 and all(mx.array_equal(theirs[name], ours[name]) for name in same)
    assert kind != "full" or tokens_of(found) == alone(pair, kind, prompt, 12, Sampling())
