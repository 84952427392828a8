"""Decode many sequences at once, each with its own drafts."""

from mlx_spec.batch.scheduler import Batch

__all__ = ["Batch"]
