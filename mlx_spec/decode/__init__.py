"""Decode with drafts: a sequence, a round, and the scheduler of many sequences."""

from mlx_spec.decode.loop import decode, generate
from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.scheduler import Batch

__all__ = ["Batch", "RunningSequence", "decode", "generate"]
