"""Large files over a network that breaks: resumed, checked, and moved into place only when they are right."""

from __future__ import annotations

import fcntl
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, BinaryIO

from mlx_spec.errors import BadCheckpoint, NotFound

STREAMS = 4  # files at the same time
ATTEMPTS = 5  # at one file, without a single new byte
PAUSE = 1.0  # seconds before the next attempt
GLANCE = 0.2  # seconds between two looks at what has arrived


@dataclass(frozen=True)
class Parcel:
    """One file to fetch."""

    url: str
    size: int  # bytes
    sha256: str
    partial: Path  # where it arrives; what is there already is kept
    place: Path  # where it goes when it is right


def transfer(parcels: Sequence[Parcel], watch: Callable[[], None]) -> None:
    """Fetch all parcels. `watch` is called now and then, in this thread.

    Raises BadCheckpoint for a file with another content than promised, NotFound if another process fetches
    it, an OSError of the disk, and whatever the HTTP library of huggingface_hub raises.
    """
    stop, waiting, done = threading.Event(), _filled(parcels), queue.SimpleQueue[Exception | None]()
    # Daemons, so that a stalled connection does not keep an interrupted program from leaving.
    for _ in range(min(STREAMS, len(parcels))):
        threading.Thread(target=_work, args=(waiting, done, stop), daemon=True).start()
    arrived = 0
    try:
        while arrived < len(parcels):
            watch()
            try:
                problem = done.get(timeout=GLANCE)
            except queue.Empty:
                continue
            if problem is not None:
                raise problem
            arrived += 1
    finally:
        stop.set()


def silent_tqdm() -> type[Any]:
    """A progress bar, as huggingface_hub wants its class, that shows nothing."""
    from huggingface_hub.utils import tqdm

    base = tqdm.__mro__[1]  # the hub switches bars of its own class on again
    return type("SilentBar", (base,), {"__init__": partialmethod(base.__init__, disable=True)})


def _filled(parcels: Sequence[Parcel]) -> queue.SimpleQueue[Parcel]:
    waiting = queue.SimpleQueue[Parcel]()
    for parcel in parcels:
        waiting.put(parcel)
    return waiting


def _work(
    waiting: queue.SimpleQueue[Parcel], done: queue.SimpleQueue[Exception | None], stop: threading.Event
) -> None:
    while not stop.is_set():
        try:
            _deliver(waiting.get_nowait(), stop)
        except queue.Empty:
            return
        except Exception as error:  # raised again by `transfer`
            done.put(error)
            return
        done.put(None)


def _deliver(parcel: Parcel, stop: threading.Event) -> None:
    parcel.partial.parent.mkdir(parents=True, exist_ok=True)
    with parcel.partial.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NotFound(f"{parcel.url} is being downloaded by another process: wait for it") from error
        if file.tell() > parcel.size:
            file.truncate(0)
        _complete(parcel, file, stop)
        if stop.is_set():
            return
        with parcel.partial.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != parcel.sha256:
            parcel.partial.unlink()
            raise BadCheckpoint(
                f"{parcel.url} arrived with the SHA-256 {found} instead of {parcel.sha256} and "
                "was deleted: download it again"
            )
        os.replace(parcel.partial, parcel.place)


def _complete(parcel: Parcel, file: BinaryIO, stop: threading.Event) -> None:
    """Append what is missing, over as many connections as it takes."""
    from huggingface_hub.errors import HfHubHTTPError

    failures = 0
    while (before := file.seek(0, os.SEEK_END)) < parcel.size and not stop.is_set():
        problem: Exception = NotFound(f"{parcel.url} ends after {before} of {parcel.size} bytes")
        try:
            _append(parcel, file, before, stop)
        except (HfHubHTTPError, OSError):
            raise
        except Exception as error:  # a connection that broke, in the words of the hub's HTTP library
            problem = error
        if file.tell() > before:
            failures = 0
            continue
        failures += 1
        if failures == ATTEMPTS:
            raise problem
        stop.wait(PAUSE)


def _append(parcel: Parcel, file: BinaryIO, offset: int, stop: threading.Event) -> None:
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = build_hf_headers() | {"Range": f"bytes={offset}-", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", parcel.url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # the whole file, whatever was asked for
            file.truncate(0)
        for chunk in response.iter_bytes():  # as they come: a buffer would be lost with the connection
            if stop.is_set():
                return
            file.write(chunk)
            file.flush()
