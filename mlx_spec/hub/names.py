"""Resolve names of models that users type, in any letter case, in the same way for all programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from mlx_spec.checkpoint.files import default_folder, typed_path
from mlx_spec.errors import NotFound
from mlx_spec.hub.catalog import (
    ALIASES,
    DEMO,
    SMOLLM2,
    PairSpec,
    aliases,
    find_alias,
    suggested_drafter,
)

PREFIX = "models--"  # of the folder of a repository in the cache


def resolve(name: str) -> PairSpec:
    """Return the target that a name means, as `load` takes it, and its published drafter.

    A name is "demo", "smollm2", a folder, a GGUF file, a converted pair, a short name or owner/name. An
    existing path takes precedence. Raises NotFound, which suggests similar names.
    """
    path, lower = typed_path(name), name.lower()
    if name in (DEMO, SMOLLM2) or path.exists():
        return PairSpec(name)
    if lower in (DEMO, SMOLLM2):
        return PairSpec(lower)
    converted = _same(name, _entries(default_folder()))
    if converted is not None:
        return PairSpec(str(default_folder() / converted))
    if pair := find_alias(name):
        return pair
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        cached = [entry.removeprefix(PREFIX).replace("--", "/") for entry in _entries(cache_folder())]
        published = [repo for pair in aliases().values() for repo in (pair.target, pair.drafter) if repo]
        repository = _same(name, [*cached, *published]) or name
        return PairSpec(repository, suggested_drafter(repository))
    if path.suffix.lower() == ".gguf":
        raise NotFound(f"there is no file {name}: give the path of a GGUF file on this machine")
    known = [DEMO, SMOLLM2, *_entries(default_folder()), *aliases()]
    close = difflib.get_close_matches(lower, [each.lower() for each in known], n=3)
    meant = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"short names are {', '.join([DEMO, SMOLLM2, *ALIASES])}"
    )
    raise NotFound(
        f"there is no folder {name}, and a repository on Hugging Face is named owner/name: {meant} "
        "(`mlx-spec models` lists what is here)"
    )


def known_names() -> list[str]:
    """Return the names that `resolve` knows: bundled, converted and downloaded ones, then short names."""
    cached = [entry for entry in _entries(cache_folder()) if entry.startswith(PREFIX)]
    repositories = [entry.removeprefix(PREFIX).replace("--", "/") for entry in cached]
    return list(dict.fromkeys([DEMO, SMOLLM2, *_entries(default_folder()), *repositories, *aliases()]))


def cache_folder() -> Path:
    """Return the Hugging Face cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _same(name: str, names: Iterable[str]) -> str | None:
    """Return the entry of `names` that equals `name` in any letter case; None if there is none."""
    return max((each for each in names if each.lower() == name.lower()), key=name.__eq__, default=None)


def _entries(folder: Path) -> list[str]:
    """Return the folders in `folder` by name, none if it cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        return []
