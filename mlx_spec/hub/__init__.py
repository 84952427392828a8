"""Find, download, inspect, list and remove checkpoints.

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
