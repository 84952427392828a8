"""How much memory a server may use, and how much a model will take before it is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_spec.apps.server.settings import GB, Served
from mlx_spec.errors import NotFound
from mlx_spec.hub import cached
from mlx_spec.hub.catalog import repair_config
from mlx_spec.hub.checkpoint import read_config
from mlx_spec.hub.weights import decode_sizes
from mlx_spec.load import folders
from mlx_spec.text import Text, read_text

SHARE = 0.75  # of the memory of a machine that does not say how much a GPU may use
CONTEXT = 8192  # tokens for whose K/V there must be room, if the model takes as many


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes."""

    weights: int  # of target and drafter
    caches: int  # K/V of one conversation of `context` tokens
    context: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.caches

    def __str__(self) -> str:
        return (
            f"{shown(self.total)} ({shown(self.weights)} of weights, {shown(self.caches)} for "
            f"{self.context} tokens of conversation)"
        )


@dataclass(frozen=True)
class Memory:
    """What MLX holds, in bytes."""

    active: int = 0
    peak: int = 0
    cached: int = 0


NOTHING = Memory()


def now() -> Memory:
    """As MLX counts it."""
    return Memory(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


def machine_bytes() -> int:
    """What this machine has for weights and caches."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return int(SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def shown(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size / 10**6:.1f} MB"


def need_of(served: Served) -> Need:
    """What a model will take, from its config and the headers of its weights: nothing is loaded.

    Raises NotFound where it is not on this machine, BadCheckpoint where it is damaged.
    """
    folders = _folders(served)
    config = read_config(folders[0])
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    context = min(longest, CONTEXT) if isinstance(longest, int) else CONTEXT
    models = [decode_sizes(folder, context) for folder in folders]
    held = sum(int(model.held) for model in models), sum(int(model.kv_held) for model in models)
    return Need(*held, context)


def is_here(served: Served) -> bool:
    """Whether a model can be loaded without a download."""
    try:
        return all(folder.is_dir() for folder in _folders(served))
    except NotFound:
        return False


def text_of(served: Served) -> Text:
    """The text side of a model: nothing else of it is loaded. Raises NotFound and BadCheckpoint."""
    folder = _folders(served)[0]
    return read_text(folder, repair_config(read_config(folder)))


def _folders(served: Served) -> list[Path]:
    """Where target and drafter are, if the drafter is a checkpoint."""
    target, drafter = folders(served.target, served.drafter)
    return [_local(name) for name in (target, drafter) if name is not None]


def _local(name: str) -> Path:
    folder = Path(name).expanduser()
    found = folder if folder.is_dir() else cached(name)
    if found is None:
        raise NotFound(f"{name} is not on this machine: fetch it with `mlx-spec pull {name}`")
    return found
