"""Measured costs and their correction."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from support.virtual_clock import CURVES, PLAIN_SECONDS

from mlx_spec.policy import BadCosts, Table
from mlx_spec.policy.costs import CostModel, Costs

FLAT, LINEAR = CURVES["flat"].table(), CURVES["CUDA linear"].table()


def true_seconds(table, length):
    return table.verify[length + 1] + table.draft[0][length] if length else table.plain


def test_one_length_teaches_the_others():
    model = CostModel(FLAT)
    for _ in range(4):
        model.observe_round(0, 3, true_seconds(LINEAR, 3))
    assert model.seconds(0, 3) == pytest.approx(true_seconds(LINEAR, 3), rel=0.1)
    assert model.seconds(0, 8) > 2 * true_seconds(FLAT, 8)
    assert model.plain == pytest.approx(FLAT.plain, rel=0.1)


def test_a_pass_never_costs_more_than_its_rows_one_by_one():
    """Slow rounds of a busy machine were once saved as a pass of 17 rows that takes 660 plain tokens."""
    model = CostModel(FLAT)
    for _ in range(50):
        model.observe_round(0, 4, 40 * FLAT.plain)
    rows = range(2, 18)
    assert all(model.passes[n - 1] <= n * model.plain * 1.0001 for n in rows)
    assert all(model.corrected().verify[n] <= n * FLAT.plain * 1.0001 for n in rows)


def test_heat_is_common():
    model, before = CostModel(CURVES["M5 Max"].table()), CostModel(CURVES["M5 Max"].table())
    for _ in range(60):
        model.observe_plain(1.5 * PLAIN_SECONDS)
    assert model.plain == pytest.approx(1.5 * PLAIN_SECONDS, rel=0.02)
    assert model.seconds(0, 4) == pytest.approx(1.5 * before.seconds(0, 4), rel=0.05)


def test_a_pause_of_the_machine_is_charged_as_expected_and_spoils_little():
    model, expected = CostModel(FLAT), true_seconds(FLAT, 4)
    for _ in range(20):
        model.observe_round(0, 4, expected)
    assert model.observe_round(0, 4, 12 * expected) == pytest.approx(expected, rel=0.01)
    assert model.seconds(0, 4) < 1.5 * expected
    second = model.observe_round(0, 4, 12 * expected)  # it is not a pause
    assert second == pytest.approx(model.drafting(0, 4) + 5 * model.plain, rel=0.01)


def test_a_round_is_charged_as_single_rows_at_most():
    """The first round of a busy machine took 18 plain tokens, and drafting was off for the next 1,300."""
    model = CostModel(FLAT)
    assert model.observe_round(0, 2, 18 * FLAT.plain) <= 3 * FLAT.plain + model.drafting(0, 2)
    assert model.observe_round(0, 2, 18 * FLAT.plain) <= 3 * model.plain + model.drafting(0, 2)


def test_a_table_of_a_busy_machine_does_not_inflate_gains():
    """Plain decoding was believed to take 10 times as long: answers with drafts showed 8 x plain."""
    curve = CURVES["M5 Max"].table()
    slow = {rows: 10 * seconds for rows, seconds in curve.verify.items()}
    model, taken = CostModel(replace(curve, plain=10 * curve.plain, verify=slow)), true_seconds(curve, 4)
    for _ in range(3):
        model.observe_round(0, 4, taken)
    assert model.plain <= 1.2 * taken


def test_known_costs_are_taken_at_the_speed_of_now():
    busy = replace(FLAT, plain=3 * FLAT.plain, verify={n: 3 * s for n, s in FLAT.verify.items()})
    found = busy.at_speed_of(FLAT)
    assert found.plain == pytest.approx(FLAT.plain)
    assert found.verify[5] == pytest.approx(FLAT.verify[5])
    assert found.draft[0][4] == pytest.approx(FLAT.draft[0][4] / 3)


def test_contexts_have_costs_of_their_own():
    costs = Costs(FLAT)
    for _ in range(60):
        costs.at(10 * 512).observe_plain(2 * PLAIN_SECONDS)
    assert costs.at(1).plain == pytest.approx(PLAIN_SECONDS)
    assert costs.at(512) is costs.at(1)
    assert costs.at(20 * 512).plain > 1.9 * PLAIN_SECONDS  # begins as its neighbour


def test_learned_corrections_are_saved_without_the_heat():
    costs = Costs(FLAT)
    for _ in range(60):
        costs.at(1).observe_plain(1.5 * PLAIN_SECONDS)
        costs.at(1).observe_round(0, 3, 1.5 * true_seconds(LINEAR, 3))
    again = Table.from_json(json.loads(json.dumps(asdict(costs.table()))), 1)
    model = CostModel(again)
    assert model.plain == pytest.approx(PLAIN_SECONDS)
    assert model.seconds(0, 3) == pytest.approx(true_seconds(LINEAR, 3), rel=0.1)
    assert model.longest == 6


def test_saved_costs_of_a_busy_machine_are_recognized():
    busy = replace(FLAT, draft=[{k: 4 * PLAIN_SECONDS for k in (1, 4)}])
    assert busy.dearer(FLAT) and not FLAT.dearer(busy) and not FLAT.dearer(FLAT)
    assert not replace(busy, context=20 * 512).dearer(FLAT)  # long contexts may cost more


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("plain", 0.0),
        ("plain", 1e-300),
        ("host", math.nan),
        ("verify", {}),
        ("verify", {str(10**40): 1.0}),
        ("draft", [{"1": -1.0}]),
        ("context", math.inf),
        ("longest", 0),
    ],
)
def test_damaged_tables_are_refused(part, value):
    with pytest.raises(BadCosts):
        Table.from_json({**asdict(FLAT), part: value}, 1)
