"""Resolve names of models that users type, in any letter case, and locate pairs, for all programs alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlx_spec import demo
from mlx_spec.checkpoint.files import default_folder, read_object, typed_path
from mlx_spec.checkpoint.targets import MANIFEST
from mlx_spec.errors import BadCheckpoint, NotFound
from mlx_spec.hub.catalog import (
    ALIASES,
    DEMO,
    LOOKUP,
    NONE,
    SMOLLM2,
    PairSpec,
    aliases,
    find_alias,
    made_for,
    suggested_drafter,
)

_PREFIX = "models--"  # of the folder of a repository in the cache
WITHOUT = 'drafter="none" decodes without one'


@dataclass(frozen=True)
class Located:
    """A target and a drafter: the names to show, and the folders, files or repositories to open."""

    target_name: str
    drafter_name: str  # the target's if both are bundled
    target: str
    drafter: str  # "lookup" or "none" if it has no checkpoint
    is_named: bool  # the user named the drafter; else it is the target's

    @property
    def checkpoints(self) -> tuple[str, str | None]:
        """Return the target and the drafter to open; None for one without a checkpoint."""
        return self.target, None if self.drafter in (LOOKUP, NONE) else self.drafter


def locate(spec: PairSpec) -> Located:
    """Locate the checkpoints of a pair; nothing is downloaded. Without a drafter, it is the target's own.

    Raises NotFound, and BadCheckpoint for a damaged pair.json.
    """
    resolved, drafter = resolve(spec.target), spec.drafter
    name = resolved.target
    path, paired = _from_manifest(name)
    if drafter is not None and drafter.lower() in (LOOKUP, NONE):
        drafter = drafter.lower()
    elif drafter is not None:
        try:
            drafter = resolve(drafter).target
        except NotFound as error:
            raise NotFound(f"drafter: {error}; {WITHOUT}") from error
    else:
        published = made_for(name) or (None if "/" in spec.target else resolved.drafter)
        drafter = paired or published or LOOKUP
    is_named = spec.drafter is not None
    shown = name if name in (DEMO, SMOLLM2) and not is_named else drafter
    return Located(name, shown, path, drafter, is_named)


def _from_manifest(target: str) -> tuple[str, str | None]:
    """Return what to open for a target, and the drafter that belongs to it: as pair.json says, or bundled."""
    if target == DEMO:
        return str(demo.TARGET), str(demo.DRAFTER)
    file = typed_path(target) / MANIFEST
    if not file.is_file():
        return target, str(demo.SMOLLM2_DRAFTER) if target == SMOLLM2 else None
    manifest = read_object(file)
    paths = manifest.get("target", "."), manifest.get("drafter")
    if not isinstance(paths[0], str) or not isinstance(paths[1], str | None):
        raise BadCheckpoint(f"{file}: target and drafter must be paths relative to it")
    return str(file.parent / paths[0]), None if paths[1] is None else str(file.parent / paths[1])


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
        published = [repo for pair in aliases().values() for repo in (pair.target, pair.drafter) if repo]
        repository = _same(name, [*cached_repositories(), *published]) or name
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
    converted = _entries(default_folder())
    return list(dict.fromkeys([DEMO, SMOLLM2, *converted, *cached_repositories(), *aliases()]))


def cache_folder() -> Path:
    """Return the Hugging Face cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def repository_folder(repository: str) -> Path:
    """Return the folder of a repository in the Hugging Face cache."""
    return cache_folder() / (_PREFIX + repository.replace("/", "--"))


def cached_repositories() -> list[str]:
    """Return the repositories that have a folder in the Hugging Face cache, complete or not, by name."""
    entries = (entry for entry in _entries(cache_folder()) if entry.startswith(_PREFIX))
    return [entry.removeprefix(_PREFIX).replace("--", "/") for entry in entries]


def _same(name: str, names: Iterable[str]) -> str | None:
    """Return the entry of `names` that equals `name` in any letter case; None if there is none."""
    return max((each for each in names if each.lower() == name.lower()), key=name.__eq__, default=None)


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in `folder` by name, none if it cannot be read."""
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []


def _entries(folder: Path) -> list[str]:
    return [entry.name for entry in folders_in(folder) if not entry.name.startswith(".")]
