"""The one thread that touches MLX: it loads models and answers requests, which take turns round by round."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

import mlx.core as mx

from mlx_spec.apps.server.answering import Answering
from mlx_spec.apps.server.ask import Ask, Event, Failed
from mlx_spec.apps.server.failures import busy, told, unavailable
from mlx_spec.apps.server.job import Job
from mlx_spec.apps.server.memory import now
from mlx_spec.apps.server.models import Loader, ModelCard, Models, load_served
from mlx_spec.apps.server.preparing import Preparing, Running
from mlx_spec.apps.server.prompts import prompts_of
from mlx_spec.apps.server.settings import Settings
from mlx_spec.apps.server.status import ModelStatus, State, Status

LOOK_EVERY = 0.5  # seconds between two looks at the memory while requests run
TICK = 1.0  # seconds between two looks at the clock while none does
LONGEST_WAIT = 60  # seconds that a client is told to wait at most

_log = logging.getLogger("mlx_spec.server")


class Worker:
    """Answers requests. What is public may be called on any thread and never waits for the engine."""

    def __init__(self, settings: Settings, loader: Loader = load_served) -> None:
        self._settings = settings
        self._models = Models(settings, loader)
        self._thread = threading.Thread(target=self._work, name="mlx_spec engine", daemon=True)
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: list[Running] = []  # of the engine thread
        self._preparing = Preparing(settings.limits, self._wake)
        self._state: State = "loading"
        self._draining = self._closing = False
        self._blocked = False  # the one that waits first needs the memory of a model that is in use
        self._begun = threading.Event()
        self._problem: str | None = None
        self._seconds = 1.0  # that a request takes, lately
        self._looked = 0.0
        self._status = Status("loading")

    def start(self) -> None:
        """Begin; the first model is loaded on the engine thread."""
        self._thread.start()

    def begun(self, timeout: float | None = None) -> bool:
        """Wait until the first model is loaded, or could not be. Says whether it was; `status` says why."""
        self._begun.wait(timeout)
        return self._begun.is_set() and self._problem is None

    def submit(self, ask: Ask, send: Callable[[Event], None]) -> Job:
        """Admit a request; `send` is called on the engine thread and must not block.

        Raises Failure: 404 for an unknown model, 429 when the queue is full, 503 while the server loads its
        first model or shuts down.
        """
        self._models.resolve(ask.model)
        with self._changed:
            self._check_open()
            self._waiting = [job for job in self._waiting if not job.cancelled]
            waiting = len(self._waiting) - self._free_places()  # some of them begin at once
            if waiting >= self._settings.limits.waiting:
                raise busy(waiting, self._retry_after(waiting))
            job = Job(ask, send, self._wake)
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def resolve(self, name: str | None) -> str:
        """The model that a name or alias stands for; None: the first one. Raises Failure (404)."""
        return self._models.resolve(name)

    def models(self) -> tuple[ModelCard, ...]:
        """All models that can be asked for."""
        return self._models.cards()

    def status(self) -> Status:
        """How the server is; bytes are those of the engine thread's last look."""
        with self._changed:
            return self._status.at(self._state, self._pending(), len(self._running), self._problem)

    def count(self, ask: Ask) -> int:
        """The tokens of a request's prompt, on the thread that asks. Raises Failure."""
        try:
            text = self._models.text(self._models.resolve(ask.model))
            return sum(map(len, prompts_of(ask, text)))
        except Exception as error:
            raise told(error) from error

    def drain(self) -> None:
        """Admit nothing more. What was admitted is still answered."""
        with self._changed:
            self._draining = True
            if self._state != "closed":
                self._state = "draining"
            self._changed.notify_all()

    def close(self) -> None:
        """End everything: requests that are not answered fail with 503. Returns when the thread is done."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _check_open(self) -> None:
        if self._draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self._state == "loading":
            raise unavailable("the server is loading its model: try again soon", "loading")
        if not self._thread.is_alive():
            raise unavailable("the engine is not running", "not_running")

    def _pending(self) -> int:
        """Requests that wait for their turn."""
        return sum(not job.cancelled for job in self._waiting)

    def _free_places(self) -> int:
        return max(self._settings.limits.running - len(self._running), 0)

    def _retry_after(self, waiting: int) -> int:
        seconds = self._seconds * waiting / max(self._settings.limits.running, 1)
        return min(max(math.ceil(seconds), 1), LONGEST_WAIT)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- on the engine thread

    def _work(self) -> None:
        try:
            self._load_first()
            while self._wait():
                self._expire()
                self._admit()
                self._take_turns()
                self._look()
        finally:
            self._end_all()

    def _load_first(self) -> None:
        try:
            self._models.ready(self._models.first, ())
        except Exception as error:
            self._problem = str(error.__cause__ or error)
        with self._changed:
            if not self._draining:
                self._state = "failed" if self._problem else "ready"
        self._look()
        self._begun.set()

    def _wait(self) -> bool:
        """Wait for something to do. False at the end."""
        with self._changed:
            if not self._closing and not self._can_begin() and not any(r.is_ready for r in self._running):
                self._changed.wait(TICK)
            return not self._closing

    def _can_begin(self) -> bool:
        return self._free_places() > 0 and self._pending() > 0 and not self._blocked

    def _expire(self) -> None:
        if self._settings.idle_seconds is not None:
            with self._changed:
                wanted = {job.ask.model for job in self._waiting}
            self._models.expire({self._models.resolve(name) for name in wanted} | self._busy())

    def _busy(self) -> set[str]:
        return {running.model for running in self._running}

    def _admit(self) -> None:
        """Let requests that wait begin, in the order in which they came."""
        self._blocked = False
        while self._free_places():
            with self._changed:
                job = next((job for job in self._waiting if not job.cancelled), None)
            if job is None or not self._begin(job):
                return

    def _begin(self, job: Job) -> bool:
        """Begin a job or fail it. False if it has to wait until a model can be unloaded."""
        began = time.perf_counter()
        try:
            model = self._models.resolve(job.ask.model)
            loaded = self._models.ready(model, self._busy())
            if loaded is None:
                self._blocked = True
                return False
            self._problem = None
            answering = Answering(job.ask, loaded, job.send, job.submitted)
            prepared = self._preparing.begin(job.ask, loaded)
        except Exception as error:
            self._leave(job)
            job.send(Failed(told(error)))
            return True
        with self._changed:  # at no time is it neither waiting nor running
            self._leave(job)
            self._running.append(Running(job, answering, prepared, began))
            if self._state == "failed":
                self._state = "ready"
        return True

    def _leave(self, job: Job) -> None:
        """It does not wait any more; one that was cancelled may have left before."""
        with self._changed:
            self._waiting = [other for other in self._waiting if other is not job]

    def _take_turns(self) -> None:
        """One step of each request that is prepared."""
        for running in [one for one in self._running if one.is_ready]:
            try:
                if running.job.cancelled:
                    self._finish(running)
                else:
                    running.step()
            except StopIteration:
                self._finish(running)
            except Exception as error:
                running.job.send(Failed(told(error)))
                self._finish(running)

    def _finish(self, running: Running) -> None:
        try:
            running.close()
        except Exception:
            _log.exception("a request did not end well")
        with self._changed:
            self._running.remove(running)
        self._seconds += 0.2 * (time.perf_counter() - running.began - self._seconds)
        self._looked = 0.0

    def _look(self) -> None:
        """Read memory, now and then."""
        if self._running and time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        models = tuple(
            ModelStatus(one.name, one.weights, one.conversations.nbytes, one.conversations.kept)
            for one in self._models.loaded()
        )
        self._status = Status(self._state, models=models, memory=now(), budget=self._models.budget)

    def _end_all(self) -> None:
        """Fail what is not answered, and give all memory back."""
        self._preparing.close()
        failed = Failed(unavailable("the server is shutting down", "shutting_down"))
        for running in tuple(self._running):
            running.job.send(failed)
            self._finish(running)
        with self._changed:
            left, self._state = self._waiting, "closed"
            self._waiting = []
        for job in left:
            job.send(failed)
        self._models.close()
        self._look()
        self._begun.set()
        mx.clear_streams()  # those that a thread leaves behind on a CPU abort the process when it exits
