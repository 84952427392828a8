"""Costs measured on a live sequence: no trace is left in it, the next process finds them, others do not."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
from lossless import GREEDY, Scripted, emitted, plain

import mlx_spec
from mlx_spec.apps.tune import main as tune
from mlx_spec.drafters.draft_model import DraftModel, VocabularySizes
from mlx_spec.engine import generate
from mlx_spec.policy import Fixed
from mlx_spec.target import LMTarget
from mlx_spec.tuning import profile
from mlx_spec.tuning.calibrate import measure
from mlx_spec.tuning.costs import Costs, Table
from mlx_spec.tuning.policy import Adaptive
from mlx_spec.tuning.tuner import YOUNG, Tuner
from mlx_spec.types import Draft, Drafter, FeatureSpec, Reason, Round, Sampler

KINDS = ["full", "sliding", "shared", "recurrent"]
MODELS = {kind: getattr(tiny, kind)() for kind in KINDS}
KEY = profile.Key("a device", "target", ("drafter",), "8-bit", None, "0.1")


def answer(
    tuner: Tuner, target: LMTarget, drafter: Drafter, prompt: list[int], count: int = 40
) -> list[Round]:
    policy = tuner.make(target, [drafter])
    sampler = GREEDY.sampler(len(prompt), tiny.VOCAB)
    return list(generate(target, [drafter], policy, sampler, prompt, max_tokens=count))


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_measuring_leaves_no_trace(kind: str, kv_bits: int | None) -> None:
    model, prompt = MODELS[kind], tiny.prompt(20)
    truth = plain(model, prompt, 30, kv_bits)
    target = LMTarget(model, kv_bits=kv_bits)
    drafter = DraftModel(MODELS["full"], VocabularySizes(tiny.VOCAB, tiny.VOCAB))
    target.prefill(prompt[:-1])
    points = measure(target, [drafter, Scripted([])], prompt, 0.05)
    assert (target.size, target.uncommitted) == (19, 0)
    assert {1, 2} <= set(points.verify) and {1, 4} <= set(points.draft[0]) and set(points.draft) == {0, 1}
    assert min([points.plain, points.host, *points.verify.values(), *points.draft[0].values()]) > 0
    assert points.draft[1][1] < points.draft[0][1]  # no draft costs less than one
    sampler = GREEDY.sampler(20, tiny.VOCAB)
    done = generate(target, [], Fixed(0), sampler, prompt, max_tokens=30)
    assert emitted(list(done)) == truth


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_measured_once_and_is_lossless(kind: str, tmp_path: Path) -> None:
    prompt = tiny.prompt(17)
    truth = plain(MODELS[kind], prompt, 40)
    tuner = Tuner(["drafter"], KEY, tmp_path)
    assert not tuner.knows(17)
    assert emitted(answer(tuner, LMTarget(MODELS[kind]), Scripted(prompt + truth, 3), prompt)) == truth
    written = json.loads(tuner.file.read_text())
    assert tuner.knows(17) and tuner.knows(500) and not tuner.knows(600)
    assert set(written["table"]) == {"512"} and set(written["table"]["512"]["draft"]) == {"drafter"}
    assert emitted(answer(tuner, LMTarget(MODELS[kind]), Scripted(prompt + truth, 3), prompt)) == truth
    assert json.loads(tuner.file.read_text()) == written


def test_the_next_process_measures_nothing(tmp_path: Path) -> None:
    prompt = tiny.prompt(17)
    first = Tuner(["drafter"], KEY, tmp_path)
    answer(first, LMTarget(MODELS["full"]), Scripted([5] * 99), prompt)
    next_process = Tuner(["drafter"], KEY, tmp_path)
    assert next_process.knows(17) and next_process.costs.plain(17) == pytest.approx(
        first.costs.plain(17), rel=2
    )
    other = Tuner(["other"], profile.Key("a device", "target", ("other",), "8-bit", None, "0.1"), tmp_path)
    assert not other.knows(17) and other.costs.plain(17) is None


def test_a_table_of_other_drafters_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompt = tiny.prompt(17)
    tuner = Tuner(["drafter"], KEY, tmp_path)
    answer(tuner, LMTarget(MODELS["full"]), Scripted([5] * 99), prompt)
    with caplog.at_level(logging.WARNING):
        assert not Tuner(["renamed"], KEY, tmp_path).knows(17)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "drafter" in line and "renamed" in line and "\n" not in line


def test_drafting_that_cannot_be_measured_is_given_up(tmp_path: Path) -> None:
    class Silent(Scripted):
        def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
            return super().draft([], 0, sampler)

    tuner, prompt = Tuner(["drafter"], KEY, tmp_path), tiny.prompt(17)
    needs = FeatureSpec(final_hidden=True)
    done = answer(tuner, LMTarget(MODELS["full"], needs), Silent([], 0, needs), prompt)
    assert emitted(done) == plain(MODELS["full"], prompt, 40)
    assert [r.reason for r in done[: YOUNG - 1]] == [Reason.LEARNING] * (YOUNG - 1)  # and then no more
    assert tuner.knows(17) and not tuner.file.exists()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tune") / "costs.json"
    assert tune(["--export", str(file)]) == 0
    return file


def test_tune_prints_what_it_measured(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(["--import", str(exported)]) == 0
    out = capsys.readouterr().out
    assert (
        "plain decoding" in out and "rows of a pass" in out and "gemma4_assistant" in out and "lookup" in out
    )
    assert tune(["--import", str(exported), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["milliseconds"]) == {"512"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "none"], "nothing to tune"),
        (["--drafter", "lookup", "--import", "EXPORTED"], "was measured with drafters"),
        (["--import", "/nonexistent.json"], "there is no file /nonexistent.json"),
        (["--export", "/nonexistent/costs.json", "--import", "EXPORTED"], "not allowed with"),
        (["--context", "1"], "give a number of tokens"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(
    arguments: list[str], said: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = tune([str(exported) if a == "EXPORTED" else a for a in arguments])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert status in (1, 2) and said in line


def test_a_pair_finds_its_costs_again() -> None:
    first, second = mlx_spec.load("demo"), mlx_spec.load("demo", "lookup")
    prompt = first.text.prompt([{"role": "user", "content": "What does os.path.join do?"}])
    texts = [[t for r in pair.generate(prompt, max_tokens=40) for t in r.tokens] for pair in (first, second)]
    assert texts[0] == texts[1]
    again = mlx_spec.load("demo").policies
    assert (
        isinstance(again, Tuner)
        and again.knows(len(prompt))
        and again.names == ("gemma4_assistant", "lookup")
    )
    assert isinstance(second.policies, Tuner) and second.policies.file != again.file


def test_a_drafter_is_tried_behind_one_that_pays_and_has_nothing() -> None:
    """By what is believed at first, drafter 0 does not pay; drafter 1, free, would, but never has a draft."""
    now = [0.0]
    verify, neural, free = {1: 1.0, 2: 1.45, 5: 2.8}, {1: 0.3, 4: 1.2}, {1: 1e-7}
    costs = Costs(["neural", "free"], {256: Table(1.0, verify, (neural, free))})
    policy = Adaptive(costs, 2, clock=lambda: now[0])
    drafted = []
    for at in range(60):
        decision = policy.decide([0] * (100 + at))
        choice = next((c for c in decision.choices if c.drafter == 0), None)
        K = choice.limit if choice else 0
        now[0] += (costs.round(0, K, K, 100) or 1.0) if choice else 1.0
        policy.observe(Round([1] * (K + 1), K, K, drafter=0 if K else None, proposed=K))
        drafted.append(K)
    assert sum(K > 0 for K in drafted[:12]) > 0 and min(drafted[30:]) > 0
