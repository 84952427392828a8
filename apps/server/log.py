"""The log of a server: ids, counts and places in the code, but no text of a request."""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from mlx_spec.errors import InvalidValue

LOG = logging.getLogger("mlx_spec.server")
LOGGERS = ("mlx_spec.server", "uvicorn.error")
MAX_FRAMES = 6  # innermost places of an exception that are named; the outer ones are always the same

_ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class DiscreetFormatter(logging.Formatter):
    """Write the type of an exception and where it was raised; its text may quote a request."""

    def formatException(self, ei: _ExcInfo) -> str:
        """Return one line."""
        kind, _, trace = ei
        frames = traceback.extract_tb(trace)[-MAX_FRAMES:]
        places = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
        return f"{kind.__name__ if kind else 'no exception'} at {places}"


def configure(file: Path | None) -> None:
    """Send the log to a file, or its warnings to stderr. Raises InvalidValue for a bad file."""
    handler: logging.Handler
    try:
        handler = logging.StreamHandler(sys.stderr) if file is None else logging.FileHandler(file)
    except OSError as error:
        raise InvalidValue(f"the log file {file} cannot be written: {error.strerror}") from error
    prefix = "mlx-spec: " if file is None else "%(asctime)s %(levelname)s "
    handler.setFormatter(DiscreetFormatter(f"{prefix}%(message)s"))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING if file is None or name != LOG.name else logging.INFO)
