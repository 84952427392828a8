"""Load models and answer requests on the one thread that uses MLX.

`EngineThread.submit` admits a request as a `Job`. A job waits in the queue and is prepared on another thread.
Then its choices enter the batch of its model, which decides who begins, reads and decodes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_spec.device import Stay
from mlx_spec.device.awake import Awake
from mlx_spec.grammar.sandbox import SANDBOX

from ..errors import LOG, queue_full, shutting_down, to_failure, unavailable
from ..requests.request import GenerationRequest
from ..settings import ServedModel, Settings
from .job import Job, Send, Turns
from .metrics import JobCounter, Metrics, ModelStatus, State, Status
from .models import LoadedModel, Loader, ModelCard, Models, load_served, next_in_queue
from .preparation import find_prompts


class EngineThread:
    """Answers requests. Any thread may call public methods; only `close` and `wait_loaded` may block."""

    def __init__(
        self,
        settings: Settings,
        loader: Loader = load_served,
        *,
        idle_s: float = 1.0,  # between two checks for idle models while none runs
        stuck_s: float = 30.0,  # of a turn until the server says so; a chunk of a prompt takes 10
        loading_wait_s: float = 300.0,  # of a request for the first model's download and load; Ollama's limit
    ) -> None:
        self._settings = settings
        self._idle_s, self._stuck_s, self._loading_wait_s = idle_s, stuck_s, loading_wait_s
        self._models = Models(settings, loader)
        self._thread = threading.Thread(target=self._work, name="mlx_spec engine", daemon=True)
        preparing = 4  # requests that are prepared at a time
        self._preparers = ThreadPoolExecutor(settings.max_running or preparing, "mlx_spec preparing")
        # Compiling a grammar may take seconds: requests without one do not wait behind it.
        self._grammar_preparers = ThreadPoolExecutor(preparing, "mlx_spec grammars")
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._state: State = "loading"
        self._closing = False
        self._blocked: Job | None = None  # it needs the memory of a model that is in use
        self._first_loaded = threading.Event()
        self._problem: str | None = None
        self._parallel = settings.max_running or 1  # choices at a time; a loaded model sets it
        self._average_seconds = 1.0  # duration of recent requests
        self._memory_read_at = 0.0  # time.monotonic()
        self._turned_at = 0.0  # time.monotonic() when the present turn began
        self._longest_turn = 0.0  # seconds, so far
        self._ended_unasked = False
        self._last_busy = 0.0  # time.monotonic() when a request last waited or ran
        self._awake = Awake()
        self._stay = Stay()  # models stay resident while requests wait or run
        self._status = Status("loading")
        self.metrics = Metrics(self.status)

    def start(self) -> None:
        """Begin; the first model is loaded on the engine thread."""
        self._thread.start()

    def wait_loaded(self, timeout: float | None = None) -> bool:
        """Wait for the first model. Return True if it was loaded; else `status` may say why not."""
        self._first_loaded.wait(timeout)
        return self._first_loaded.is_set() and self._problem is None

    def submit(self, request: GenerationRequest, send: Send, turns: Turns | None = None) -> Job:
        """Admit a request; `turns` answers it in place of choices in the batch.

        `send` is called on the engine thread, or by `close`, and must not block. A request that comes while
        the first model is loaded waits for it, up to `loading_wait_s`.

        Raises Failure: 404 for an unknown model, 429 if the queue is full, 503 if the server shuts down.
        """
        self._models.resolve(request.model)
        with self._changed:
            self._check_open()
            self._waiting = [job for job in self._waiting if not job.cancelled]
            waiting = len(self._waiting) - self._free_slots()  # some of them begin at once
            if waiting >= self._settings.max_waiting:
                raise queue_full(waiting, self._retry_after(waiting))
            job = Job(request, send, self._wake, JobCounter(self.metrics, request.model), turns)
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def resolve(self, name: str | None) -> str:
        return self._models.resolve(name)

    def models(self) -> tuple[ModelCard, ...]:
        return self._models.cards()

    def card(self, name: str) -> ModelCard:
        return next(card for card in self.models() if card.name == name)

    def served(self, name: str) -> ServedModel:
        return self._models.served(name)

    def offer(self, served: ServedModel) -> None:
        self._models.offer(served)

    def withdraw(self, name: str) -> None:
        self._models.withdraw(name)

    def status(self) -> Status:
        """Return the state of the server; the bytes in it may be half a second old."""
        with self._changed:
            return replace(
                self._status,
                state="stuck" if self._is_stuck() else self._state,
                waiting=self._pending(),
                running=len(self._running),
                loading=self._models.loading,
                measuring=self._models.measuring,
                problem=self._problem,
            )

    def count_tokens(self, request: GenerationRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises Failure."""
        try:
            name = self._models.resolve(request.model)
            tokenizer, vision = self._models.tokenizer(name), self._models.vision(name)
            return sum(map(len, find_prompts(request, tokenizer, vision)))
        except BaseException as error:  # Rust code that panics raises no Exception
            raise to_failure(error) from error

    def close(self, timeout: float | None = None) -> bool:
        """End the engine. Return True if its thread ends in time.

        Requests without an answer fail with 503 at once: a pass that has begun may take seconds.
        """
        with self._changed:
            self._closing = True
            if self._state != "closed":
                self._state = "draining"
            self._changed.notify_all()
            jobs = [*self._waiting, *self._running]
        for job in jobs:
            job.fail(shutting_down())
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def wait_ended(self) -> bool:
        """Wait until the engine ends. Return True if an error ended it, which the log names."""
        self._thread.join()
        return self._ended_unasked

    def _is_stuck(self) -> bool:
        """Return True if a turn takes longer than a model needs. Loading and measuring take their time."""
        if self._state != "ready" or self._models.loading or self._models.measuring:
            return False
        return time.monotonic() - self._turned_at > max(self._stuck_s, 4 * self._longest_turn)

    def _check_open(self) -> None:
        if self._closing:
            raise shutting_down()
        if not self._thread.is_alive():
            raise unavailable("the engine is not running", "not_running")

    def _pending(self) -> int:
        return sum(not job.cancelled for job in self._waiting)

    def _free_slots(self) -> int:
        return max(self._parallel - len(self._running), 0)

    def _retry_after(self, waiting: int) -> int:
        seconds = self._average_seconds * waiting / self._parallel
        max_retry_after_s = 60  # longer estimates mean nothing
        return min(max(math.ceil(seconds), 1), max_retry_after_s)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- on the engine thread

    def _work(self) -> None:
        try:
            self._load_first()
            while self._wait_for_work():
                self._turned_at = time.monotonic()
                if self._running or self._is_wanted():
                    self._stay.hold()
                self._admit()
                self._take_turns()
                self._expire_models()
                self._check_costs()
                self._read_memory()
                self._end_turn()
        except BaseException as error:
            self._ended_unasked = True
            LOG.critical("the engine ended", exc_info=error)
        finally:
            self._end_all()

    def _end_turn(self) -> None:
        now = time.monotonic()
        if self._running:  # else it may have loaded a model
            self._longest_turn = max(self._longest_turn, now - self._turned_at)
        self._turned_at = now

    def _load_first(self) -> None:
        threading.Thread(target=self._end_long_waits, name="mlx_spec loading", daemon=True).start()
        name, failed = self.resolve(None), list[Job]()
        try:
            self._models.ready(name, ())
        except BaseException as error:  # Rust code that panics raises no Exception
            self._problem, failure = str(error.__cause__ or error), to_failure(error)
            with self._changed:  # else each of them would try to load it again
                failed = [job for job in self._waiting if job.request.model == name]
            for job in failed:
                job.fail(failure)
        with self._changed:
            self._waiting = [job for job in self._waiting if job not in failed]
            if not self._closing:
                self._state = "failed" if self._problem else "ready"
            self._changed.notify_all()
        self._parallel = max([self._parallel, *(one.batch.max_running for one in self._models.loaded())])
        self._read_memory()
        self._first_loaded.set()

    def _end_long_waits(self) -> None:
        """Fail requests that have waited too long for the first model. Runs on its own thread until then."""
        while True:
            with self._changed:
                if self._state != "loading":
                    return
                end = time.perf_counter() - self._loading_wait_s
                late = [job for job in self._waiting if job.submitted < end]
                self._waiting = [job for job in self._waiting if job not in late]
                if not late:
                    self._changed.wait(self._idle_s)
            for job in late:
                after = f"after {self._loading_wait_s:g} s"
                message = f"the server is still loading its model {after}: try again later"
                job.fail(unavailable(message, "loading"))

    def _wait_for_work(self) -> bool:
        """Return False if the server closes."""
        self._turned_at = time.monotonic()
        with self._changed:
            is_busy = self._next() is not None or any(job.is_ready for job in self._running)
            if not self._closing and not is_busy:
                self._changed.wait(self._idle_s)
            return not self._closing

    def _expire_models(self) -> None:
        with self._changed:
            wanted = {job.request.model for job in self._waiting}
        self._models.expire(wanted | self._busy())

    def _check_costs(self) -> None:
        """Measure doubtful costs again while no request waits or runs, until one comes.

        A request may come during a pass and would wait for it. So a long pass begins only after a silence
        that is 20 times as long.
        """
        now = time.monotonic()
        if self._running or self._is_wanted():
            self._last_busy = now
            self._awake.hold()
        elif (silence_s := now - self._last_busy) >= self._idle_s:
            self._awake.release()
            self._stay.release()
            self._models.check_costs(self._is_wanted, max(0.2, silence_s / 20))

    def _is_wanted(self) -> bool:
        """Return True if a request waits or the server closes."""
        with self._changed:
            return self._closing or self._pending() > 0

    def _busy(self) -> set[str]:
        return {job.model.name for job in self._running}

    def _admit(self) -> None:
        while (job := self._next()) is not None:
            self._begin(job)

    def _next(self) -> Job | None:
        """Return the job that begins next; None if it cannot begin now."""
        if not self._free_slots():
            return None
        with self._changed:
            jobs = [job for job in self._waiting if not job.cancelled]
        if not jobs:
            return None
        loaded = {one.name for one in self._models.loaded()}
        job = jobs[next_in_queue([each.request.model for each in jobs], loaded, jobs[0].passed)]
        return None if job is self._blocked else job

    def _begin(self, job: Job) -> None:
        """Begin a job or fail it, unless it has to wait until a model can be unloaded."""
        job.began = time.perf_counter()
        try:
            model = self._models.ready(job.request.model, self._busy())
            if model is None:
                self._blocked = job
                return
            self._problem = None
            kept = job.request.keep_alive
            model.idle_seconds = self._settings.idle_seconds if kept is None else kept
            self._parallel = model.batch.max_running
            preparers = self._grammar_preparers if job.request.has_grammar else self._preparers
            job.begin(model, preparers, self._has_place)
        except BaseException as error:  # Rust code that panics raises no Exception
            self._leave_queue(job)
            job.fail(to_failure(error))
            return
        with self._changed:  # the job is never seen as neither waiting nor running
            for earlier in self._waiting[: self._waiting.index(job)]:
                earlier.passed += 1
            self._leave_queue(job)
            self._running.append(job)
            if self._state == "failed":
                self._state = "ready"

    def _leave_queue(self, job: Job) -> None:
        with self._changed:
            self._waiting = [other for other in self._waiting if other is not job]

    def _take_turns(self) -> None:
        """Let the batch of each model begin choices, read a chunk and decode a round."""
        if not any(model.batch.is_decoding for model in self._models.loaded()):
            prepare_s = 0.05  # lets a burst of requests begin together: each takes milliseconds to tokenize
            wait((future for job in self._running for future in job.preparing), prepare_s)
        for job in tuple(self._running):
            if job.cancelled:
                self._finish(job)
            else:
                self._attempt(job, job.check)
        for model in self._models.loaded():
            try:
                results = model.batch.step()
            except BaseException as error:  # Rust code that panics raises no Exception
                self._replace_batch(model, error)
                continue
            jobs = [job for job in self._running if job.model is model]
            choices = {choice.id: choice for job in jobs for choice in job.open_choices}
            for id, result in results:
                choice = choices.get(id)
                if choice is not None and choice.is_open:  # else it ended, perhaps by an earlier result
                    self._attempt(choice.job, partial(choice.job.receive, choice, result))

    def _has_place(self) -> bool:
        return sum(model.batch.begun for model in self._models.loaded()) < self._parallel

    def _replace_batch(self, model: LoadedModel, error: BaseException) -> None:
        """Fail all requests of a model and make a new batch: the state of the old one is unknown."""
        for job in [job for job in self._running if job.model is model]:
            job.fail(to_failure(error))
            self._finish(job)
        model.batch = model.pair.batch(self._settings.max_running)

    def _attempt(self, job: Job, action: Callable[[], bool]) -> None:
        """Call an action of a job. Finish the job if the action returns True; fail the job if it raises."""
        try:
            if action():
                self._finish(job)
        except BaseException as error:  # Rust code that panics raises no Exception
            job.fail(to_failure(error))
            self._finish(job)

    def _finish(self, job: Job) -> None:
        job.close()
        with self._changed:
            self._running.remove(job)
        self._last_busy = time.monotonic()
        self._blocked = None
        seconds = time.perf_counter() - job.began
        duration_weight = 0.2  # of the latest request in the average duration
        self._average_seconds += duration_weight * (seconds - self._average_seconds)
        self._memory_read_at = 0.0

    def _read_memory(self) -> None:
        memory_interval_s = 0.5  # between two readings of the memory while requests run
        if self._running and time.monotonic() - self._memory_read_at < memory_interval_s:
            return
        self._memory_read_at = time.monotonic()
        models = tuple(
            ModelStatus(
                one.name,
                one.weights,
                one.caches,
                tuple(one.batch.group_sizes),
                one.pair.batch_support.obstacle,
                one.expires_at,
                one.prefix_cache.rewind_points_nbytes,
                replace(one.prefix_cache.counters),
            )
            for one in self._models.loaded()
        )
        self._status = Status(
            self._state,
            models=models,
            active=mx.get_active_memory(),
            peak=mx.get_peak_memory(),
            cached=mx.get_cache_memory(),
            budget=self._models.budget,
        )

    def _end_all(self) -> None:
        """Fail all requests without an answer, and give all memory back."""
        for preparers in (self._preparers, self._grammar_preparers):
            preparers.shutdown(wait=False, cancel_futures=True)
        self._awake.release()
        SANDBOX.close()
        for job in tuple(self._running):
            job.fail(shutting_down())
            self._finish(job)
        with self._changed:
            left, self._waiting = self._waiting, []
        for job in left:
            job.fail(shutting_down())
        self._models.close()
        self._stay.release()
        with self._changed:  # last, because the process may end once the state is "closed"
            self._state = "closed"
        self._read_memory()
        self._first_loaded.set()
        mx.clear_streams()  # a CPU stream that a thread leaves behind aborts the process at its exit
