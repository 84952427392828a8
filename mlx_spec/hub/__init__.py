"""Checkpoints on this disk and on the Hugging Face Hub: find, download, inspect, list and remove them.

Nothing here needs MLX.
"""

from mlx_spec.hub.download import (
    Download,
    NoSpace,
    cached,
    check_space,
    explain,
    fetch,
    find,
    free_bytes,
    plan,
)

__all__ = [
    "Download",
    "NoSpace",
    "cached",
    "check_space",
    "explain",
    "fetch",
    "find",
    "free_bytes",
    "plan",
]
