"""Draft lengths: how many tokens to draft in the next round, and with which drafter."""

from mlx_spec.policy.adaptive import AdaptivePolicies, AdaptivePolicy
from mlx_spec.policy.costs import Costs, Table
from mlx_spec.policy.fixed import Fixed
from mlx_spec.policy.planner import lengths

__all__ = ["AdaptivePolicies", "AdaptivePolicy", "Costs", "Fixed", "Table", "lengths"]
