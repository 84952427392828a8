"""Costs: measured points stay as they are, wrong ones are found out, single surprises are not believed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_spec.tuning.costs import BadTable, Costs, Table, bucket

MS = 0.001
STAIRS = {1: 30 * MS, 2: 31 * MS, 5: 34 * MS, 6: 60 * MS, 10: 64 * MS}
DRAFT = {1: 2 * MS, 4: 8 * MS}


def costs(verify: dict[int, float] = STAIRS, contexts: tuple[int, ...] = (512,)) -> Costs:
    return Costs(("mtp",), {context: Table(29 * MS, verify, (DRAFT,), MS) for context in contexts})


def see(costs: Costs, k: int, seconds: float, times: int = 1, context: int = 100) -> None:
    for _ in range(times):
        costs.saw_round(0, k, k, context, seconds, selective=False)


def test_measured_points_are_kept_and_gaps_are_straight() -> None:
    table = costs()
    for rows, seconds in STAIRS.items():
        assert table.verify(rows, 100) == pytest.approx(seconds)
    assert table.verify(3, 100) == pytest.approx(32 * MS)
    assert table.verify(17, 100) == pytest.approx(71 * MS)  # the last slope
    assert table.draft(0, 2, 100) == pytest.approx(4 * MS)
    assert table.draft(0, 8, 100) == pytest.approx(16 * MS)
    assert table.round(0, 4, 2, 100) == pytest.approx(40 * MS)
    assert table.plain(100) == pytest.approx(29 * MS)


def test_beyond_the_last_point_a_curve_does_not_fall() -> None:
    table = costs({1: 30 * MS, 7: 200 * MS, 8: 60 * MS})
    assert table.verify(8, 100) == pytest.approx(60 * MS)
    assert table.verify(12, 100) == pytest.approx(60 * MS)


def test_a_tile_edge_is_not_smoothed() -> None:
    table = costs()
    see(table, 4, 42 * MS, times=30)  # as expected
    assert table.verify(5, 100) == pytest.approx(34 * MS)
    assert table.verify(6, 100) == pytest.approx(60 * MS)


@pytest.mark.parametrize("before", [0, 20])
def test_one_surprise_is_not_believed(before: int) -> None:
    table = costs()
    see(table, 4, 42 * MS, times=before)
    see(table, 4, 420 * MS)
    believed = table.round(0, 4, 4, 100)
    assert believed is not None
    assert believed < 1.11 * 42 * MS
    see(table, 4, 42 * MS, times=20)
    assert table.round(0, 4, 4, 100) == pytest.approx(42 * MS, rel=0.02)


def test_surprises_in_a_row_are_believed_at_once() -> None:
    table = costs()
    see(table, 4, 90 * MS, times=3)
    assert table.round(0, 4, 4, 100) == pytest.approx(90 * MS, rel=0.01)


def test_a_curve_believed_flat_is_found_out_at_lengths_not_tried() -> None:
    table = costs({1: 30 * MS, 17: 30 * MS})
    see(table, 4, 160 * MS, times=3)  # in truth each row takes 30 ms
    for k in (2, 3, 6, 8, 12):
        believed, truth = table.round(0, k, k, 100), (30 * (k + 1) + 2 * k) * MS
        assert believed is not None
        assert 0.65 * truth < believed < 1.5 * truth


def test_a_curve_believed_linear_is_found_out() -> None:
    table = costs({1: 30 * MS, 17: 510 * MS})
    see(table, 2, 34 * MS, times=3)  # in truth it is flat
    for k in (1, 3, 6):
        believed = table.round(0, k, k, 100)
        assert believed is not None
        assert believed < 60 * MS


def test_small_differences_do_not_reach_far() -> None:
    table = costs()
    see(table, 1, 35 * MS, times=20)  # 2 ms more than expected
    assert table.verify(17, 100) == pytest.approx(71 * MS, rel=0.1)


def test_heat_slows_everything_and_what_was_just_seen_is_not_counted_twice() -> None:
    table = costs()
    see(table, 4, 50 * MS, times=12)
    seen, unseen = table.round(0, 4, 4, 100), table.verify(10, 100)
    for _ in range(60):
        table.saw_plain(100, 35 * MS)
    assert table.plain(100) == pytest.approx(35 * MS, rel=0.02)
    assert table.round(0, 4, 4, 100) == pytest.approx(seen)
    assert unseen is not None
    assert table.verify(10, 100) == pytest.approx(35 / 29 * 64 * MS, rel=0.2)


def test_a_bucket_never_measured_takes_the_nearest_one_scaled() -> None:
    table = costs(contexts=(512,))
    assert table.verify(6, 5000) == pytest.approx(60 * MS)
    for _ in range(100):
        table.saw_plain(5000, 58 * MS)
    assert table.verify(6, 5000) == pytest.approx(120 * MS, rel=0.05)
    assert table.verify(6, 100) == pytest.approx(60 * MS)
    assert [bucket(context) for context in (1, 512, 513, 2048, 2049, 8193, 40_000)] == [0, 0, 1, 1, 2, 3, 4]


def test_without_measurements_nothing_is_known_until_a_plain_token_was_timed() -> None:
    table = Costs(("mtp",))
    assert table.plain(100) is None
    assert table.round(0, 1, 1, 100) is None
    see(table, 2, 40 * MS)
    table.saw_plain(100, 30 * MS)
    assert table.plain(100) == pytest.approx(30 * MS)
    assert table.guessed(100)
    see(table, 2, 90 * MS, times=2)
    assert not table.guessed(100)
    longer = table.round(0, 8, 8, 100)
    assert longer is not None
    assert longer > 150 * MS  # extrapolated from what was seen


def test_a_table_survives_saving() -> None:
    table = Costs(("lookup", "mtp"), {512: Table(29 * MS, STAIRS, ({1: MS}, DRAFT), MS)})
    see(table, 4, 50 * MS, times=6)
    saved = json.loads(json.dumps(table.table()))
    assert saved["512"]["plain"] == 29.0
    again = Costs.from_table(saved, ("lookup", "mtp"))
    for rows in range(1, 18):
        assert again.verify(rows, 100) == pytest.approx(table.verify(rows, 100), abs=1e-6)
    assert again.draft(1, 4, 100) == pytest.approx(table.draft(1, 4, 100), abs=1e-6)
    swapped = Costs.from_table(saved, ("mtp", "lookup"))
    assert swapped.draft(0, 4, 100) == pytest.approx(table.draft(1, 4, 100), abs=1e-6)


GOOD = costs().table()["512"]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"far": GOOD}, "'far' is no context length"),
        ({"512": 3}, "'512' is no context length with a table"),
        ({"512": {**GOOD, "draft": {}}}, "of drafters [], these are ['mtp']"),
        ({"512": {**GOOD, "verify": {}}}, "passes of []"),
        ({"512": {**GOOD, "verify": {"40": 1.0}}}, "passes of [40], they must be of 1 to 17"),
        ({"512": {**GOOD, "verify": {"1": -3.0}}}, "times must be positive numbers"),
        ({"512": {**GOOD, "verify": {"1": float("nan")}}}, "times must be positive numbers"),
        ({"512": {**GOOD, "plain": "fast"}}, "cannot be read (ValueError"),
        ({"512": {**GOOD, "verify": [1, 2]}}, "cannot be read (AttributeError"),
        ({"512": {"draft": GOOD["draft"]}}, "cannot be read (KeyError"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(saved: dict[str, Any], message: str) -> None:
    with pytest.raises(BadTable) as caught:
        Costs.from_table(saved, ("mtp",))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
