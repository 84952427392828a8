"""Download a large file of the Hub so that a later try goes on where an earlier one broke.

huggingface_hub writes every try to a new file, and removes it if the try fails. Here all tries append to one
file. By HTTP a try asks for the bytes that are missing, by Xet it opens a stream that starts there. By HTTP
huggingface_hub writes 10 MB at a time, so up to 10 MB of a broken try are lost.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mlx_spec.checkpoint.files import sha256
from mlx_spec.errors import BadCheckpoint

SUFFIX = ".part.incomplete"  # huggingface_hub's tools take *.incomplete for unfinished files


def partial_file(repository: Path, digest: str) -> Path:
    """Return the file with the first bytes of a blob, in the folder of a repository in the cache."""
    return repository / "blobs" / (digest + SUFFIX)


def check_arrived(arrived: Path, what: str, size: int, digest: str | None) -> None:
    """Raise BadCheckpoint for a file of another size (bytes) or SHA-256, after removing it.

    `what` names it in the error.
    """
    real_size = arrived.stat().st_size
    problem = f"{real_size} bytes instead of {size}" if real_size != size else None
    if problem is None and digest is not None and (real := sha256(arrived)) != digest:
        problem = f"the SHA-256 {real} instead of {digest}"
    if problem is not None:
        arrived.unlink()
        raise BadCheckpoint(f"{what} arrived with {problem} and was deleted: download it again")


def remove_unfinished(repository: Path) -> None:
    """Remove the unfinished files of a repository that is complete: of killed processes, and of old commits.

    Those that another process is writing stay.
    """
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    for unfinished in (repository / "blobs").glob("*.incomplete"):
        lock = _lock_file(repository, unfinished.name.partition(".")[0])
        lock.parent.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout), WeakFileLock(lock, timeout=0.01):
            unfinished.unlink(missing_ok=True)


def _lock_file(repository: Path, digest: str) -> Path:
    """Return the file that huggingface_hub locks while it writes a blob.

    Some network file systems ignore it: then two processes can spoil a part, which its SHA-256 shows.
    """
    return repository.parent / ".locks" / repository.name / f"{digest}.lock"


def download_blob(repository: Path, name: str, file: str, commit: str, size: int, digest: str) -> bool:
    """Download a file of the Hub, or the rest of it, to its blob, whose name is its SHA-256.

    Return False if huggingface_hub has to download it: it names the file otherwise if the hub gives another
    ETag, and has no blobs without symbolic links. What arrived is kept if a download breaks. Raises
    BadCheckpoint for damaged content; the errors of huggingface_hub, of its HTTP library, of hf_xet and of
    the disk.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import are_symlinks_supported, http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    url = hf_hub_url(name, file, revision=commit)
    metadata = get_hf_file_metadata(url, retry_on_errors=True)
    if metadata.etag != digest or not are_symlinks_supported(repository.parent):
        return False
    part, blob = partial_file(repository, digest), repository / "blobs" / digest
    lock = _lock_file(repository, digest)
    for folder in (part.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():  # of another process, commit or program
            check_arrived(blob, f"{file} of {name}", size, digest)
            return True
        try:
            with part.open("ab") as stream:
                if stream.tell() > size:
                    stream.truncate(0)
                    stream.seek(0)
                xet, headers, is_whole = metadata.xet_file_data, build_hf_headers(), stream.tell() == size
                if not is_whole and (
                    xet is None
                    or not _append_by_xet(stream, xet.file_hash, xet.refresh_route, size, headers, file)
                ):
                    http_get(
                        url,
                        stream,
                        resume_size=stream.tell(),
                        headers=headers,
                        expected_size=metadata.size,
                        displayed_filename=file,
                    )
            check_arrived(part, f"{file} of {name}", size, digest)
            part.replace(blob)
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()
    return True


def _append_by_xet(
    stream: BinaryIO, file_hash: str, refresh_url: str, size: int, headers: Mapping[str, str], shown: str
) -> bool:
    """Append the rest of a file from Xet's storage. Return False if hf_xet is missing, off or too old."""
    from huggingface_hub import constants
    from huggingface_hub.utils import tqdm

    if constants.HF_HUB_DISABLE_XET:
        return False
    try:
        from hf_xet import XetFileInfo, XetSession
    except ImportError:
        return False
    start = stream.tell()

    def read() -> Iterator[bytes]:
        group = XetSession().new_download_stream_group(
            token_refresh_url=refresh_url, token_refresh_headers=dict(headers)
        )
        yield from group.download_stream(XetFileInfo(file_hash, size), start=start)

    with tqdm(desc=shown, total=size, initial=start, unit="B", unit_scale=True, disable=None) as progress:
        for chunk in _read_in_thread(read()):
            stream.write(chunk)
            progress.update(len(chunk))
    return True


def _read_in_thread(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield `chunks`, which a thread reads: Ctrl-C does not end a wait inside hf_xet."""
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=4)
    stopped = threading.Event()

    def read() -> None:
        try:
            for chunk in chunks:
                ready.put(chunk)
                if stopped.is_set():
                    return
            ready.put(None)
        except BaseException as error:  # raised again below
            ready.put(error)

    threading.Thread(target=read, name="mlx_spec xet", daemon=True).start()
    try:
        while (chunk := ready.get()) is not None:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk
    finally:
        stopped.set()
        with suppress(queue.Empty):  # the thread may wait for room
            ready.get_nowait()
