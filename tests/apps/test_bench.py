"""The speed test: arms in turns, the same tokens, ratios to plain decoding."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from support import tiny
from support.pairs import pair_with

from mlx_spec import load
from mlx_spec.apps.bench import QUESTIONS, Run, arm, chat_questions, in_turns, main, measured, speeds
from mlx_spec.apps.server import replay
from mlx_spec.errors import InvalidValue
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.types import Round


def test_arms_in_turns_give_the_tokens_of_plain_decoding(pair):
    prompt = chat_questions(pair.tokenizer)[0].tokens
    expected = [t for round in pair.generate(prompt, max_tokens=10) for t in round.tokens]
    arms = [arm(pair, 0), arm(pair, 4), arm(pair, None)]
    for start in range(2):
        runs = in_turns(pair, arms, prompt, 10, start)
        assert [run.tokens for run in runs] == [expected] * 3
        assert not any(round.drafted for round in runs[0].done)
        assert 0 < sum(r.accepted for r in runs[1].done) <= sum(r.drafted for r in runs[1].done)
        assert all(run.seconds > 0 for run in runs)


def test_an_answer_is_timed_from_the_end_of_its_prompt(pair, monkeypatch):
    """Plain decoding begins its second token before it returns the first: that pass must not be free."""
    prompt, plain = chat_questions(pair.tokenizer)[0].tokens, arm(pair, 0)
    sizes, clock = [], time.perf_counter

    def read_clock() -> float:
        sizes.append(plain.target.size)
        return clock()

    monkeypatch.setattr(time, "perf_counter", read_clock)
    (run,) = in_turns(pair, [plain], prompt, 1, 0)
    assert sizes[0] == len(prompt) - 1 and run.seconds > 0


def test_a_session_of_an_agent_is_replayed_turn_by_turn():
    """With full attention nothing is read twice, and what parted is copied."""
    spec = PairSpec("tiny")
    model = tiny.full(num_hidden_layers=1)
    turns = list(replay.replay(spec, 2, lambda _: pair_with(model, [], 0, context=3500), "Be brief. "))
    assert len(turns) == replay.TURNS and [turn.agent for turn in turns[:2]] == ["main", "title"]
    assert sum(turn.read_again for turn in turns) < 64 * 4  # less than a copy is worth, for each that parts
    assert all(
        turn.reused > 0.7 * before.prompt for before, turn in pairwise(turns) if before.agent == turn.agent
    )
    lines = replay.report(turns)
    assert len(lines) == replay.TURNS + 4 and "over the least" in lines[-2]
    with pytest.raises(InvalidValue, match=r"needs .* tokens, and this model has a context of 900"):
        list(replay.replay(spec, 2, lambda _: pair_with(model, [], 0, context=900)))


def run(speed: float, *, tokens: int = 11, drafted: int = 0, accepted: int = 0) -> Run:
    """Return an answer at `speed` tokens a second, with two drafts or none."""
    halves = (accepted // 2, accepted - accepted // 2) if drafted else ()
    rounds = [Round([0] * (half + 1), drafted // 2, half, "draft", "drafter") for half in halves]
    rounds += [Round([0], 0, 0, "plain") for _ in range(tokens - accepted - len(halves))]
    return Run(iter(()), rounds, tokens / speed)


def test_speeds_are_of_all_answers_and_agree_with_the_gain():
    arms = ["plain", "K = 2"]
    slow = run(10.0), run(20.0, drafted=4, accepted=3)
    fast = run(100.0), run(150.0, drafted=4, accepted=1)
    plain, two = speeds(arms, [slow, fast])
    assert (plain.gain, plain.accepted, plain.length) == (pytest.approx(1.0), None, None)
    assert plain.tokens_per_second == pytest.approx(22 / 1.21)
    assert two.gain == pytest.approx(two.tokens_per_second / plain.tokens_per_second)
    assert two.spread == (pytest.approx(1.625), pytest.approx(1.875))
    assert two.accepted == 0.5 and two.length == 2.0 and two.other_text == 0
    (_, other) = speeds(arms, [(run(10.0), run(10.0, tokens=7)), slow])
    assert other.other_text == 1


@pytest.mark.parametrize(
    ("length", "decoders"),
    [
        (None, ["plain", "K = 2", "K = 4", "adaptive"]),
        (3, ["plain", "K = 3"]),
        (0, ["plain", "K = 0"]),
    ],
)
def test_arms(one_layer, length, decoders):
    speeds, answers = measured(load(*one_layer), 6, 1, length, most=1)
    assert [speed.name for speed in speeds] == decoders and answers == 1
    assert all(speed.tokens_per_second > 0 and speed.other_text == 0 for speed in speeds)


def test_json(one_layer, capsys):
    pair = [f"--target={one_layer[0]}", f"--drafter={one_layer[1]}", "--num-draft-tokens=3"]
    assert main([*pair, "--tokens=16", "--repeats=1", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert not [line for line in err.splitlines() if not line.startswith("measuring what passes of ")]
    assert (report["target"], report["drafter"]) == tuple(map(str, one_layer))
    assert report["answers"] == len(QUESTIONS)
    assert [speed["name"] for speed in report["decoders"]] == ["plain", "K = 3"]
