"""Names to folders: a path, or a Hugging Face repository that is in the local cache or can be downloaded.

Weights arrive in a partial file beside their place in the cache and move there once their SHA-256 is right:
an interrupted download goes on where it stopped. (huggingface_hub itself starts such a file again.)
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_spec.checkpoint import OTHER_WEIGHTS, WEIGHTS, has_weights, one_line, shortened
from mlx_spec.errors import BadCheckpoint, NotFound, SpecError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling
    from huggingface_hub.utils import tqdm

# What a checkpoint needs, and no code: nothing downloaded is ever run or unpickled. The same patterns are
# asked for every time, or the hub takes a snapshot without the other files for incomplete.
PATTERNS = ["*.json", WEIGHTS, "tokenizer.model", "*.jinja", "*.txt"]
SPARE = 1_000_000_000  # bytes that must stay free on the disk
MARGIN = 1.05
SHA256, HEX = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]+")
SHARD = re.compile(r"-\d+-of-(?P<count>\d+)\.safetensors$")
PARTIAL = ".mlx_spec.incomplete"  # the hub's own tools know files that end like this for unfinished

Progress = Callable[[int, int], None]  # called with the bytes that are here and the bytes of all files


class NoSpace(SpecError):
    """A disk without room for a download."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    name: str
    size: int  # bytes
    blob: str  # its name among the blobs of the cache
    is_hashed: bool  # `blob` is the SHA-256 of its content


@dataclass(frozen=True)
class Download:
    """What a checkpoint needs of a repository, and where that goes."""

    name: str
    revision: str | None  # as asked for
    commit: str
    folder: Path  # of this repository in the cache
    files: tuple[RemoteFile, ...]

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def missing(self) -> int:
        """Bytes that are not in the cache now."""
        return sum(file.size - self.present(file) for file in self.files)

    def present(self, file: RemoteFile) -> int:
        """Bytes of `file` that are in the cache now."""
        blob = self.folder / "blobs" / file.blob
        try:
            return min(file.size, (blob if blob.exists() else self.partial(file)).stat().st_size)
        except OSError:
            return 0

    def partial(self, file: RemoteFile) -> Path:
        """Where the bytes of `file` arrive."""
        return self.folder / "blobs" / (file.blob + PARTIAL)


def find(name: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The folder of a checkpoint, downloaded if need be, with a progress bar unless `progress` is given.

    A folder of that name wins. A complete snapshot in the Hugging Face cache is used without asking the
    network. Raises NotFound, BadCheckpoint for what arrived damaged, or NoSpace before a download that the
    disk has no room for. Interrupted, it goes on where it stopped when called again.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise NotFound(f"{name} is a file: give the folder that holds it")
    found = cached(name, revision=revision)
    if found is not None:
        return found
    download = plan(name, revision=revision)
    if progress is not None:
        return fetch(download, progress)
    from huggingface_hub.utils import tqdm

    with tqdm(desc=f"Fetching {name}", total=download.total, unit="B", unit_scale=True) as bar:
        return fetch(download, partial(_advance, bar))


def cached(name: str, *, revision: str | None = None) -> Path | None:
    """The complete snapshot of a repository in the cache, if there is one. Asks nobody.

    Raises NotFound for a name that no repository can have.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if name.count("/") != 1:
        raise _unnamed(name)
    try:
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=PATTERNS, local_files_only=True)
        )
    except HFValidationError as error:
        raise _unnamed(name) from error
    except LocalEntryNotFoundError:  # IncompleteSnapshotError is one
        return None
    return folder if has_weights(folder) and _is_whole(folder) else None


def plan(name: str, *, revision: str | None = None) -> Download:
    """What is to be downloaded of a repository: asks the hub, fetches nothing.

    Raises NotFound, and BadCheckpoint for a repository without safetensors.
    """
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.file_download import repo_folder_name

    if constants.is_offline_mode():
        raise NotFound(
            f"{name} is not complete in the local cache and HF_HUB_OFFLINE forbids to download it: "
            "unset it, or give the path of a folder"
        )
    try:
        info = HfApi().model_info(
            name, revision=revision, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        )
    except errors.HFValidationError as error:
        raise _unnamed(name) from error
    except Exception as error:  # the hub's own errors and those of its HTTP library
        raise NotFound(explained(name, error)) from error
    siblings = info.siblings or []
    _check_format(name, [file.rfilename for file in siblings])
    files = [
        _remote_file(file)
        for file in siblings
        if any(fnmatch(file.rfilename, pattern) for pattern in PATTERNS)
    ]
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    return Download(name, revision, info.sha or "", folder, tuple(files))


def _remote_file(file: RepoSibling) -> RemoteFile:
    # The names become paths: nothing but hexadecimal digits may go in.
    if file.lfs and SHA256.fullmatch(file.lfs.sha256):
        return RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256, is_hashed=True)
    blob = file.blob_id if file.blob_id and HEX.fullmatch(file.blob_id) else "unknown"
    return RemoteFile(file.rfilename, file.size or 0, blob, is_hashed=False)


def fetch(download: Download, progress: Progress) -> Path:
    """The folder of a planned download, complete.

    Raises NotFound, BadCheckpoint for what arrived damaged, or NoSpace before anything is written.
    """
    from huggingface_hub import errors

    check_space(download.name, download.missing, download.folder)
    try:
        return _fetch(download, progress)
    except (SpecError, errors.HFValidationError):
        raise
    except Exception as error:  # the hub's own errors, those of its HTTP library and of the disk
        if isinstance(error, OSError) and error.errno is not None:
            raise _unwritten(download, error) from error
        raise NotFound(explained(download.name, error)) from error


def _fetch(download: Download, progress: Progress) -> Path:
    from huggingface_hub import constants, hf_hub_url, snapshot_download

    from mlx_spec.transfer import Parcel, silent_tqdm, transfer

    large = [file for file in download.files if file.is_hashed and fnmatch(file.name, WEIGHTS)]
    take = partial(
        snapshot_download,
        download.name,
        revision=download.revision,
        allow_patterns=PATTERNS,
        tqdm_class=silent_tqdm(),
    )
    take(ignore_patterns=[file.name for file in large])
    parcels = [
        Parcel(
            hf_hub_url(download.name, file.name, revision=download.commit, endpoint=constants.ENDPOINT),
            file.size,
            file.blob,
            download.partial(file),
            download.folder / "blobs" / file.blob,
        )
        for file in large
        if not (download.folder / "blobs" / file.blob).exists()
    ]
    transfer(parcels, lambda: progress(download.total - download.missing, download.total))
    folder = Path(take())
    progress(download.total, download.total)
    return folder


def check_space(name: str, missing: int, place: Path) -> None:
    """Raise NoSpace unless `missing` bytes, and some more, fit on the disk of `place`."""
    free, needed = free_bytes(place), int(missing * MARGIN) + SPARE
    if missing and free < needed:
        raise NoSpace(
            f"{name} needs {needed / 1e9:.1f} GB on the disk of {place}, {free / 1e9:.1f} GB are free: "
            "make room there, or set HF_HOME to a folder on another disk"
        )


def free_bytes(place: Path) -> int:
    """Free bytes on the disk that holds `place`, which need not exist yet."""
    existing = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
    return shutil.disk_usage(existing).free


def explained(name: str, error: BaseException) -> str:
    """One line for an error of the hub. The order matters: a gated repository also counts as not found."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{name}"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept the licence at {page}, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {page}: check its name, or run `hf auth login` if it is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{page} has no such revision: {one_line(error)}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return f"{name} is not in the local cache and {page} cannot be reached: check the network"
    return (
        f"{page} cannot be downloaded ({type(error).__name__}: {one_line(error)}): check the network and run "
        "it again, what has arrived is kept"
    )


def _unwritten(download: Download, error: OSError) -> SpecError:
    problem = f"{download.name} cannot be written to {download.folder} ({error.strerror})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"{problem}: make room there and run it again, what has arrived is kept")
    return NotFound(f"{problem}: make it writable, or set HF_HOME to another folder")


def _is_whole(folder: Path) -> bool:
    """Whether no weight file is a link to nothing, and all that are numbered are there, index or not."""
    files = list(folder.glob(WEIGHTS))
    numbered = [match for file in files if (match := SHARD.search(file.name))]
    return all(file.is_file() for file in files) and all(
        len(numbered) >= int(match["count"]) for match in numbered
    )


def _unnamed(name: str) -> NotFound:
    return NotFound(f"there is no folder {name}, and a repository on Hugging Face is named owner/name")


def _check_format(name: str, files: list[str]) -> None:
    """Raise BadCheckpoint for a repository whose weights are in a format that is never loaded."""
    others = [file for file in files if any(fnmatch(file, pattern) for pattern in OTHER_WEIGHTS)]
    if others and not any(fnmatch(file, WEIGHTS) for file in files):
        raise BadCheckpoint(
            f"https://huggingface.co/{name} holds {shortened(others)} but no {WEIGHTS}, the only format "
            "that is downloaded: use a repository that has it"
        )


def _advance(bar: tqdm, here: int, total: int) -> None:
    bar.update(here - bar.n)
