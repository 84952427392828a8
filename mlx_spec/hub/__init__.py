"""Find, download, inspect, list and remove checkpoints.

Only reading a GGUF file and the layouts of weights need MLX.
"""

from mlx_spec.hub.download import cached, fetch, find, on_disk, plan
from mlx_spec.hub.files import NoSpace, check_space, free_bytes

__all__ = ["NoSpace", "cached", "check_space", "fetch", "find", "free_bytes", "on_disk", "plan"]
