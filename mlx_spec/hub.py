"""Names to folders: a path, or a Hugging Face repository that is in the local cache or can be downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlx_spec.checkpoint import has_weights, one_line
from mlx_spec.errors import NotFound, SpecError

# What a checkpoint needs, and no code: nothing downloaded is ever run or unpickled. The same patterns are
# asked for every time, or the hub takes a snapshot without the other files for incomplete.
PATTERNS = ["*.json", "model*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]
SPARE = 1_000_000_000  # bytes that must stay free on the disk
MARGIN = 1.05


class NoSpace(SpecError):
    """A disk without room for a download."""


def find(name: str) -> Path:
    """The folder of a checkpoint, downloaded if need be.

    A folder of that name wins. A complete snapshot in the Hugging Face cache is used without asking the
    network. Raises NotFound, or NoSpace before a download that the disk has no room for.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise NotFound(f"{name} is a file: give the folder that holds it")
    from huggingface_hub.errors import HFValidationError

    try:
        if name.count("/") == 1:
            return _cached(name) or _download(name)
    except HFValidationError:
        pass
    raise NotFound(f"there is no folder {name}, and a repository on Hugging Face is named owner/name")


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:  # IncompleteSnapshotError is one
        return None
    return folder if has_weights(folder) else None


def _download(name: str) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    if constants.is_offline_mode():
        raise NotFound(
            f"{name} is not complete in the local cache and HF_HUB_OFFLINE forbids to download it: "
            "unset it, or give the path of a folder"
        )
    try:
        files = snapshot_download(name, allow_patterns=PATTERNS, dry_run=True)
        _check_space(name, sum(file.file_size or 0 for file in files if file.will_download))
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except (SpecError, errors.HFValidationError):
        raise
    except Exception as error:  # the hub's own errors, those of its HTTP library and of the disk
        raise NotFound(_explained(name, error)) from error


def _check_space(name: str, missing: int) -> None:
    """Raise NoSpace unless `missing` bytes fit into the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    place = next((folder for folder in (cache, *cache.parents) if folder.exists()), Path("/"))
    free, needed = shutil.disk_usage(place).free, int(missing * MARGIN) + SPARE
    if missing and free < needed:
        raise NoSpace(
            f"{name} needs {needed / 1e9:.1f} GB on the disk of {place}, {free / 1e9:.1f} GB are free: "
            "make room there, or set HF_HOME to a folder on another disk"
        )


def _explained(name: str, error: BaseException) -> str:
    """One line for an error of the hub. The order matters: a gated repository also counts as not found."""
    from huggingface_hub import errors

    if isinstance(error, errors.DryRunError) and error.__cause__ is not None:
        error = error.__cause__
    page = f"https://huggingface.co/{name}"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept the licence at {page}, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {page}: check its name, or run `hf auth login` if it is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{page} has no such revision: {one_line(error)}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return f"{name} is not in the local cache and {page} cannot be reached: check the network"
    return f"{page} cannot be downloaded ({type(error).__name__}: {one_line(error)}): check the network"
