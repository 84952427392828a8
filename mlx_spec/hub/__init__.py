"""Find, download, inspect, list and remove checkpoints."""

from mlx_spec.checkpoint.files import NoSpace, check_space, free_bytes
from mlx_spec.hub.download import cached, fetch, find, on_disk, plan

__all__ = ["NoSpace", "cached", "check_space", "fetch", "find", "free_bytes", "on_disk", "plan"]
