"""Draft lengths: how many tokens to draft in the next round, and with which drafter. See README.md."""

from mlx_spec.policy.adaptive import AdaptivePolicies, AdaptivePolicy, FixedPolicy
from mlx_spec.policy.costs import BadCosts, Table
from mlx_spec.policy.saved_costs import Key

__all__ = ["AdaptivePolicies", "AdaptivePolicy", "BadCosts", "FixedPolicy", "Key", "Table"]
