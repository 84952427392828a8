"""Shared by all tests."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import sys
from collections.abc import Generator, Iterator

import mlx.core as mx
import pytest
from hypothesis import settings
from support import mac
from support.forked import measure_shortly

from mlx_spec.device import use_device
from mlx_spec.device.blas import use_blas

M_TRIM_THRESHOLD, M_TOP_PAD = -1, -2  # options of glibc's mallopt


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mac", action="store_true", help="imitate a Mac: see support/mac.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than cores: a test that waits for a program leaves its core to another test."""
    return 1 + (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile(
        "suite", deadline=None, derandomize=True, database=None
    )  # the same cases in every run
    settings.load_profile("suite")
    # Tests start dozens of Python processes. Without bytecode each would compile all modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the tokenizer's module does, which a test may import
    # On a CPU, MLX wakes a thread for every operation. One of this class does not interrupt the thread that
    # wakes it, so that a tiny model takes two thirds of the time. Threads and processes inherit the class.
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # A pass of a tiny model takes and frees the top of the heap, which would go back to the kernel each time.
    if platform.libc_ver()[0] == "glibc":
        for option, size in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 1 << 24)):  # bytes
            ctypes.CDLL(None).mallopt(option, size)
    if config.option.mac and sys.platform != "darwin":  # a worker of xdist begins as a Mac
        mac.imitate_for_good()
    # Tests compare passes of one row and of several to 1e-5: an optimized BLAS has another kernel for each.
    use_blas(optimized=False)
    use_device()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, and never walk them and the tests afterwards."""
    gc.disable()
    found = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    return found


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every run of a test, whatever ran before it."""
    mx.random.seed(0)


class DraftErrors(logging.Handler):
    """Collects the warnings about drafters that failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("a drafter failed"):
            self.found.append(record.getMessage())


@pytest.fixture(autouse=True)
def draft_errors() -> Iterator[list[str]]:
    """Fail a test in which a drafter failed: the texts alone would not show it. A test may clear the list."""
    handler, logger = DraftErrors(), logging.getLogger("mlx_spec")
    logger.addHandler(handler)
    yield handler.found
    logger.removeHandler(handler)
    assert not handler.found


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo what a test, or the program in this process, changed: environment and log. Tests share workers."""
    before = dict(os.environ)
    logs = [logging.getLogger(name) for name in ("mlx_spec", "mlx_spec.server", "uvicorn.error", "asyncio")]
    settings = [(log.handlers, log.propagate, log.level) for log in logs]
    yield
    for log, (handlers, propagate, level) in zip(logs, settings, strict=True):
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)
    before["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def rules_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decisions that depend on the device be those for a CPU, also in a process that uses a GPU."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Save measured costs in a folder of the tests, not in the user's. Workers of xdist share it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def short_measurements() -> None:
    measure_shortly()
