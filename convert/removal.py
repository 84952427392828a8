"""Removing what we put on the disk: a converted pair or a repository in the cache, and nothing else."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlx_spec import demo
from mlx_spec.checkpoint import read_object, shortened
from mlx_spec.convert.cached import PREFIX, cache_folder, default_folder, size_on_disk
from mlx_spec.errors import NotFound, SpecError
from mlx_spec.load import DEMO, MANIFEST

STRAY = (".DS_Store",)  # the Finder leaves them in every folder it shows


class NotOurs(SpecError):
    """Something that `mlx-spec rm` does not remove."""


@dataclass(frozen=True)
class Removal:
    """What will be removed."""

    name: str
    folder: Path
    size: int  # bytes that it frees
    carry_out: Callable[[], None]  # raises NotOurs where the disk does not allow it


def plan_removal(name: str) -> Removal:
    """Find what `name` is: a folder, a pair in the default folder, or a cached repository. Removes nothing.

    Raises NotFound, NotOurs, and BadCheckpoint for a pair.json that cannot be read.
    """
    if name == DEMO:
        raise NotOurs("demo is part of mlx_spec: uninstall the package to remove it")
    folder = Path(name).expanduser()
    if not (folder.exists() or folder.is_symlink()) and "/" not in name:
        folder = default_folder() / name
    if folder.exists() or folder.is_symlink():
        return _pair(name, folder)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _repository(name)
    raise NotFound(f"there is no {name} to remove: `mlx-spec models` lists what there is")


def _pair(name: str, folder: Path) -> Removal:
    if folder.is_symlink():
        raise NotOurs(
            f"{folder} is a link, which is not followed: remove the folder {folder.resolve()} by name"
        )
    place = folder.resolve()
    if place.is_relative_to(demo.TARGET.parent.resolve()):
        raise NotOurs(f"{folder} is part of mlx_spec: uninstall the package to remove it")
    if not (place / MANIFEST).is_file():
        raise NotOurs(f"{folder} holds no {MANIFEST}, so it is no converted pair: remove it by hand")
    parts = _parts(place)
    size = sum(file.lstat().st_size for part in parts for file in part.rglob("*") if file.is_file())
    return Removal(name, place, size, partial(_remove_pair, place, parts))


def _parts(folder: Path) -> list[Path]:
    """The folders of the two halves. Raises NotOurs unless the pair is as the converter wrote it."""
    manifest = read_object(folder / MANIFEST)
    named = [manifest.get(role) for role in ("target", "drafter")]
    parts = [folder / part for part in named if isinstance(part, str)]
    strange = [
        part
        for part in parts
        if part.parent != folder or part.name in ("", "..") or part.is_symlink() or part == folder
    ]
    expected = {*STRAY, MANIFEST, *(part.name for part in parts)}
    strange += [entry for entry in sorted(folder.iterdir()) if entry.name not in expected]
    if strange or not parts:
        what = shortened([str(part) for part in strange]) or "no target"
        raise NotOurs(f"{folder} has {what} beside a converted pair: remove it by hand")
    return [part for part in parts if part.is_dir()]


def _remove_pair(folder: Path, parts: list[Path]) -> None:
    # pair.json goes last: what an interruption leaves is still known as ours.
    try:
        for part in parts:
            shutil.rmtree(part)
        for name in (*STRAY, MANIFEST):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except OSError as error:
        raise NotOurs(f"{folder} cannot be removed ({error.strerror}): change its permissions") from error


def _repository(name: str) -> Removal:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise NotFound(
            f"{name} is neither a folder nor a repository: `mlx-spec models` lists both"
        ) from error
    folder = cache_folder() / (PREFIX + name.replace("/", "--"))
    if folder.is_symlink():
        raise NotOurs(f"{folder} is a link, which is not followed: remove it by hand")
    if not folder.is_dir():
        raise NotFound(f"{name} is not in the cache ({cache_folder()}): `mlx-spec models` lists what is")
    return Removal(name, folder, size_on_disk(folder), partial(_remove_repository, name, folder))


def _remove_repository(name: str, folder: Path) -> None:
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir()
    repositories = [repo for repo in cache.repos if repo.repo_type == "model" and repo.repo_id == name]
    # Copies of a repository on the Hub share its commits: the hub must not look at any other.
    cache = dataclasses.replace(cache, repos=frozenset(repositories))
    commits = [revision.commit_hash for repo in repositories for revision in repo.revisions]
    if commits:
        cache.delete_revisions(*commits).execute()
    else:  # never finished, or too odd for the hub
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise NotOurs(f"{folder} cannot be removed: change its permissions")
