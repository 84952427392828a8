"""A fixed draft length."""

from __future__ import annotations

from mlx_spec.policy import FixedPolicy
from mlx_spec.types import Choice, Reason, RequestDrafter

EXTRA = RequestDrafter("prediction", None, len, 0.75)


def test_request_drafters_come_first_for_one_answer():
    policy = FixedPolicy(3, drafters=2)
    policy.begin([EXTRA])
    assert policy.decide([1]).choices == (Choice(2, 3), Choice(0, 3), Choice(1, 3))
    policy.begin()
    assert policy.decide([1]).choices == (Choice(0, 3), Choice(1, 3))
    assert policy.decide([1, 2]).reason is Reason.FIXED


def test_sequences_do_not_share_requests():
    policies = FixedPolicy(2)
    first, second = policies.policy(), policies.policy()
    first.begin([EXTRA])
    assert second.decide([1]).choices == (Choice(0, 2),)
