"""What a request needs before the engine can begin with it: rendering, tokenizing, compiling a grammar.

None of it touches MLX, and it may take seconds: it is done on threads of its own while others take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mlx_spec.apps.server.answering import Answering, Steps
from mlx_spec.apps.server.ask import Ask
from mlx_spec.apps.server.job import Job
from mlx_spec.apps.server.models import Loaded
from mlx_spec.apps.server.prompts import Prepared, prepare
from mlx_spec.apps.server.settings import Limits
from mlx_spec.grammar.sandbox import SANDBOX


class Preparing:
    """Prepares as many requests at a time as may run."""

    def __init__(self, limits: Limits, wake: Callable[[], None]) -> None:
        self._limits = limits
        self._wake = wake
        self._threads = ThreadPoolExecutor(max(limits.running, 1), thread_name_prefix="mlx_spec preparing")

    def begin(self, ask: Ask, loaded: Loaded) -> Future[Prepared]:
        """Prepare a request for a model; the engine is woken when that is done."""
        text, grammars = loaded.pair.text, loaded.grammars  # and not the weights, which may be unloaded
        found = self._threads.submit(prepare, ask, text, grammars, self._limits)
        found.add_done_callback(lambda _: self._wake())
        return found

    def close(self) -> None:
        """Begin nothing more, and end what takes long."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        SANDBOX.close()


class Running:
    """A job that takes turns as soon as it is prepared."""

    def __init__(self, job: Job, answering: Answering, prepared: Future[Prepared], began: float) -> None:
        self.job = job
        self.began = began  # time.perf_counter()
        self._answering = answering
        self._prepared = prepared
        self._steps: Steps | None = None

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._answering.model

    @property
    def is_ready(self) -> bool:
        """Whether there is something to do for it."""
        return self._steps is not None or self.job.cancelled or self._prepared.done()

    def step(self) -> None:
        """A turn. Raises StopIteration at the end, and Failure, SpecError or whatever went wrong."""
        if self._steps is None:
            self._steps = self._answering.steps(self._prepared.result())
        next(self._steps)

    def close(self) -> None:
        """End it, wherever it is."""
        self._prepared.cancel()
        if self._steps is not None:
            self._steps.close()
