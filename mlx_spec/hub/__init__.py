"""Find, download, inspect, list and remove checkpoints.

Nothing here needs MLX.
"""

from mlx_spec.hub.download import NoSpace, cached, check_space, fetch, find, free_bytes, plan

__all__ = ["NoSpace", "cached", "check_space", "fetch", "find", "free_bytes", "plan"]
