"""Draft lengths stay in the row class of the target, alone and in a batch."""

from __future__ import annotations

import pytest
from support.virtual_clock import CURVES

from mlx_spec.model.row_class import RowClass
from mlx_spec.policy.batch import BatchPolicies
from mlx_spec.types import MAX_DRAFT_TOKENS, Reason

HISTORY = range(100)


def policies(rows: RowClass) -> BatchPolicies:
    """Costs by which the longest draft pays, if any length was timed and drafts are accepted."""
    made = BatchPolicies(["mtp"], together=["mtp"])
    made.use(CURVES["flat"].table())
    made.costs.at(100).allow_longer(MAX_DRAFT_TOKENS)
    made.acceptance[0].frequencies = [0.0] * 6 + [1.0]
    made.account.lead = 3.0
    made.rows = rows
    return made


def longest(rows: RowClass, size: int = 99) -> int:
    policy = policies(rows).policy(lambda: 0.0)
    policy._drafters[0].verified = True
    return max((choice.limit for choice in policy.decide(range(size + 1)).choices), default=0)


def test_drafts_of_one_sequence_stay_in_the_class() -> None:
    assert longest(RowClass()) == MAX_DRAFT_TOKENS
    assert longest(RowClass(limits=((0, 5),))) == 4
    assert longest(RowClass(base=2, limits=((0, 2),))) == 1, "the second row of a plain pass is a free draft"
    edge = RowClass(base=2, limits=((0, 8),), edges=(1024,))
    assert [longest(edge, size) for size in (1000, 1016, 1021, 1023)] == [7, 5, 0, 7]


def test_a_class_without_drafts_says_so() -> None:
    decision = policies(RowClass(limits=((0, 1),))).policy(lambda: 0.0).decide(HISTORY)
    assert (decision.choices, decision.reason) == ((), Reason.EXACT)


@pytest.mark.parametrize(("count", "most"), [(2, 5), (3, 3), (4, 2), (6, 1), (7, 0), (13, MAX_DRAFT_TOKENS)])
def test_all_rows_of_a_batch_stay_in_the_class(count: int, most: int) -> None:
    """Beyond the class not even plain passes agree, so drafts are free again."""
    shared = policies(RowClass(base=2, limits=((0, 8),), shared=12))
    members = [shared.policy(lambda: 0.0) for _ in range(count)]
    for member in members:
        member.begin()
    decisions = shared.group(lambda: 0.0).decide(members, [HISTORY] * count)
    found = max((choice.limit for each in decisions for choice in each.choices), default=0)
    assert found == most
    assert most or {each.reason for each in decisions} == {Reason.EXACT}
