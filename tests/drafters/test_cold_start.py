"""A target that holds a prefix which its drafter never saw: the same text, and the figures say so."""

from __future__ import annotations

from pathlib import Path

import drafting
import fitted
import pytest
import tiny
from drafting import emitted
from test_session import TEMPLATE, TOKENIZER

import mlx_spec
from mlx_spec.apps.chat.report import details
from mlx_spec.drafters.dflash import DFlash
from mlx_spec.pair import Facts, Pair
from mlx_spec.policies import Always
from mlx_spec.reuse import Held
from mlx_spec.template import ChatTemplate
from mlx_spec.text import Text
from mlx_spec.tuning.fixed import Fixed

TRAINED = Path(__file__).parents[1] / "golden" / "trained"
MADE = {"dflash": fitted.dflash, "peagle": fitted.peagle}


def pair_of(family: str, folder: Path) -> Pair:
    if family == "eagle3":
        published = drafting.write_converted(TRAINED / family, TRAINED / "llama", folder / "drafter")
        return mlx_spec.load(TRAINED / "llama", published, num_draft_tokens=2)
    source = fitted.opened(MADE[family](3, (0, 1, 2)), folder)
    text = Text(TOKENIZER, ChatTemplate(TEMPLATE, {}), ())
    return Pair(Facts("tiny", family, tiny.VOCAB, None, 0, 0), text, tiny.full(), [source], Always(Fixed(2)))


@pytest.mark.parametrize("family", ["dflash", "eagle3", "peagle"])
def test_what_a_drafter_never_saw_is_counted(family: str, tmp_path: Path) -> None:
    pair = pair_of(family, tmp_path)
    prompt = [2, *tiny.prompt(40)[1:]]
    warm, cold = Held(pair.open()), Held(pair.open())
    cold.decoding.target.prefill(prompt[:25])
    cold.note(prompt[:25])
    expected = None
    for held, before in ((warm, (0, 0)), (cold, (25, 25))):
        assert (held.align(prompt), held.cold) == before
        tokens = emitted(list(pair.run(held.decoding, prompt, max_tokens=8)))
        expected = expected or tokens
        assert tokens == expected
        held.note(tokens)
    longer = [*prompt, *expected[:5], 9, 9]
    kept = len(prompt) + 5
    assert (warm.align(longer), warm.cold) == (kept, 0)
    assert (cold.align(longer), cold.cold) == (kept, 25)  # those rows are gone for good


def test_the_figures_of_an_answer_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = pair_of("dflash", tmp_path).session()
    with monkeypatch.context() as patch:
        patch.setattr(DFlash, "observe", lambda *_: None)
        list(session.stream("one two", max_tokens=4))
    assert session.statistics.drafter_cold == 0
    list(session.stream("three", max_tokens=4))
    statistics = session.statistics
    assert statistics.drafter_cold == statistics.reused_tokens > 20
    line = f"drafter: {statistics.drafter_cold} of the reused tokens are new to it"
    assert line in details(statistics, None, 0)
