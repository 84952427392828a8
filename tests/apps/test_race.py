"""The race: two answers in turns, the same tokens, the multiple with its interval."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.commands import run

import mlx_spec
from mlx_spec.apps.bench import Run
from mlx_spec.apps.race import Race, question, race, verdict
from mlx_spec.errors import InvalidValue
from mlx_spec.sampling.sampling import Sampling
from mlx_spec.types import Round


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, seed=3)])
def test_both_answers_have_the_same_tokens(pair, sampling):
    prompt = question(pair.tokenizer, "What does os.path.join do?", "Be brief.")
    *_, last = race(pair, prompt, 24, sampling)
    drafted, plain = last.runs
    rounds = pair.generate(prompt, max_tokens=24, sampling=sampling or Sampling())
    expected = [token for round in rounds for token in round.tokens]
    assert drafted.tokens == plain.tokens == expected and last.difference is None
    assert not any(round.drafted for round in plain.done) and len(last.ratios) >= 1
    *figures, multiple, same = verdict(last, pair.tokenizer)
    assert len(last.ratios) < 6 and multiple.startswith("the answer is too short to compare"), "no number"
    many = replace(last, ratios=[1.5, 1.4, 1.6, 1.5, 1.3, 1.7])
    assert verdict(many, pair.tokenizer)[-2].startswith("1.50 × faster (likely 1.30 to 1.70; median of 6")
    assert same == "every token the same ✓" and len(figures) == 2


def test_a_difference_is_named(pair):
    one, other = ([Round(tokens, 0, 0, "plain", finish_reason="stop")] for tokens in ([5, 6, 7], [5, 9]))
    found = Race((Run(iter(()), one, 1.0), Run(iter(()), other, 1.0)), [])
    assert found.difference == 1 and "the first difference is token 2: " in verdict(found, pair.tokenizer)[-1]
    shorter = Race((found.runs[0], Run(iter(()), [replace(one[0], tokens=[5, 6])], 1.0)), [])
    assert shorter.difference == 2


def test_the_command(capsys):
    assert run("race", "DEMO", "--tokens", "16") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "every token the same ✓" and "\x1b" not in out + err


def test_refusals(pair):
    for options in ({"drafter": "none"}, {"num_draft_tokens": 0}):
        with pytest.raises(InvalidValue, match="nothing drafts with demo, so there is no race"):
            race(mlx_spec.load("demo", **options), [1, 2], 16)
    with pytest.raises(InvalidValue, match="set one with /set seed"):
        next(race(pair, [1, 2], 16, Sampling(temperature=1.0)))
