"""`/metrics`: the figures of a server in Prometheus' text format."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_spec.apps.chat.status import OFF
from mlx_spec.apps.server.ask import Ask, Closed, Event, Failed, Opened, RoundDone
from mlx_spec.apps.server.bridge import Job, Works
from mlx_spec.apps.server.failures import Failure
from mlx_spec.apps.server.log import LOG
from mlx_spec.apps.server.worker import Worker
from mlx_spec.session import Statistics
from mlx_spec.types import Reason

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 1)
EVERY = 0.25  # seconds between two counts of a request that runs
ONE_MODEL, OTHER = "/v1/models/{name}", "other"  # other: all paths that do not exist


class Metrics:
    """What is counted."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by path and status.", "path", "status")
        self.failures = self._counter("failures", "Admitted requests that failed.", "model", "code")
        self.cancelled = self._counter("cancelled", "Requests whose client hung up.", "model")
        self.prompt = self._counter("prompt_tokens", "Tokens of prompts.", "model")
        self.cached = self._counter("cached_tokens", "Tokens of prompts that were cached.", "model")
        self.generated = self._counter("generation_tokens", "Generated tokens.", "model")
        self.seconds = self._counter("generation_seconds", "Seconds of the engine for these.", "model")
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds that drafted.", "model")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Verified draft tokens.", "model")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted ones.", "model")
        at = ("model", "position")  # from 0, as vLLM counts them
        self.drafted_at = self._counter("spec_decode_num_draft_tokens_per_pos", "By place.", *at)
        self.accepted_at = self._counter("spec_decode_num_accepted_tokens_per_pos", "By place.", *at)
        self.first_token = self._histogram("time_to_first_token_seconds", "From admission.", FIRST_TOKEN)
        self.per_token = self._histogram("time_per_output_token_seconds", "In the engine.", PER_TOKEN)
        self.plain = self._counter("plain_seconds", "By plain decoding, for what was compared.", "model")
        self.compared = self._counter("compared_seconds", "As they were, of rounds so compared.", "model")
        self.gain = Gauge(
            "mlx_spec_gain",
            "Speed of the latest request as a multiple of plain decoding.",
            ["model"],
            registry=self.registry,
        )
        self.reason = Gauge(
            "mlx_spec_reason",
            "1 for why speculation is on or off in the latest request.",
            ["model", "reason"],
            registry=self.registry,
        )
        self.registry.register(_Now(worker))
        self._worker = worker
        self._latest: tuple[str, Statistics] | None = None  # model and statistics of the latest round

    def opened(self, model: str, event: Opened) -> None:
        """Count a prompt that was read."""
        self.prompt.labels(model).inc(event.prompt_tokens)
        self.cached.labels(model).inc(event.cached_tokens)

    def grown(self, model: str, before: Statistics, now: Statistics) -> None:
        """Count what a choice brought since it was counted last."""
        self.generated.labels(model).inc(now.generated_tokens - before.generated_tokens)
        self.seconds.labels(model).inc(now.decode_seconds - before.decode_seconds)
        self.drafts.labels(model).inc(now.speculative_rounds - before.speculative_rounds)
        self.drafted.labels(model).inc(now.drafted - before.drafted)
        self.accepted.labels(model).inc(now.accepted - before.accepted)
        self.plain.labels(model).inc(now.plain_seconds - before.plain_seconds)
        self.compared.labels(model).inc(now.compared_seconds - before.compared_seconds)
        for counter, old, new in (
            (self.drafted_at, before.drafted_at, now.drafted_at),
            (self.accepted_at, before.accepted_at, now.accepted_at),
        ):
            for position, count in enumerate(new):
                known = old[position] if position < len(old) else 0
                counter.labels(model, str(position)).inc(count - known)
        self._last(model, now)

    def failed(self, model: str, failure: Failure) -> None:
        """Count a request that failed."""
        self.failures.labels(model, failure.code or str(failure.status)).inc()

    def closed(self, model: str, event: Closed) -> None:
        """Count a request that was answered."""
        statistics = event.timings.statistics
        self.first_token.labels(model).observe(event.timings.first_token_seconds)
        if statistics.tokens_per_second:
            self.per_token.labels(model).observe(1 / statistics.tokens_per_second)
        self._last(model, statistics)

    def json(self) -> dict[str, Any]:
        """Return metrics by model, without the prefix `mlx_spec_`; queue, memory and the last request.

        Metrics by position are lists. Buckets of histograms are left out.
        """
        models: dict[str, dict[str, Any]] = {}
        for sample in (sample for family in self.registry.collect() for sample in family.samples):
            name, labels = sample.name.removeprefix("mlx_spec_"), dict(sample.labels)
            if (model := labels.pop("model", None)) is None or name.endswith(("_bucket", "_created")):
                continue
            found = models.setdefault(model, {})
            if not labels:
                found[name] = sample.value
            elif "position" in labels:  # positions are counted in order from 0
                found.setdefault(name, []).append(sample.value)
            elif "kind" in labels:
                found[f"{labels['kind']}_bytes"] = sample.value
        status = self._worker.status()
        return {
            "models": models,
            "queue": {"waiting": status.waiting, "running": status.running},
            "memory_bytes": status.memory.active,
            "memory_budget_bytes": status.budget,
            "last": None if self._latest is None else _last_json(*self._latest),
        }

    def _last(self, model: str, statistics: Statistics) -> None:
        self._latest = model, statistics
        if statistics.gain is not None:
            self.gain.labels(model).set(statistics.gain)
        for reason in Reason:
            self.reason.labels(model, reason.value).set(reason is statistics.reason)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"mlx_spec_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mlx_spec_{name}", about, ["model"], buckets=buckets, registry=self.registry)


def _last_json(model: str, statistics: Statistics) -> dict[str, Any]:
    return {
        "model": model,
        "predicted_per_second": statistics.tokens_per_second or None,
        "gain": statistics.gain,
        "acceptance_length": statistics.acceptance_length or None,
        "speculation": "off" if statistics.reason in OFF else "on",
        "reason": statistics.reason.value,
    }


class Observed:
    """A worker whose requests are counted while they run."""

    def __init__(self, worker: Works, metrics: Metrics) -> None:
        self._worker = worker
        self._metrics = metrics

    def resolve(self, name: str | None) -> str:
        """As the worker does."""
        return self._worker.resolve(name)

    def submit(self, ask: Ask, send: Callable[[Event], None]) -> Job:
        """As the worker does."""
        job = _Counted(self._metrics, ask.model)

        def counted(event: Event) -> None:
            job.read(event)
            send(event)

        job.job = self._worker.submit(ask, counted)
        return job


class _Counted:
    """A job whose rounds are counted a few times a second, and once more when it ends or is cut."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._lock = threading.Lock()  # it is read on the engine's thread and cancelled on another
        self._counted: dict[int, Statistics] = {}  # by choice
        self._latest: dict[int, Statistics] = {}  # of those, what is not counted yet
        self._when = 0.0  # time.monotonic()
        self._ended = False
        self.job: Job | None = None

    def read(self, event: Event) -> None:
        """Count what an event says."""
        match event:
            case Opened():
                self._metrics.opened(self._model, event)
            case RoundDone(index=index, statistics=statistics):
                with self._lock:
                    self._latest[index] = statistics
                    if time.monotonic() - self._when >= EVERY:
                        self._count()
            case Closed():
                self._end()
                self._metrics.closed(self._model, event)
            case Failed(failure=failure):
                self._end()
                self._metrics.failed(self._model, failure)

    def cancel(self) -> None:
        """End it; one that had not ended is counted."""
        if self._end():
            self._metrics.cancelled.labels(self._model).inc()
        if self.job is not None:
            self.job.cancel()

    def _end(self) -> bool:
        """Count the rest. Whether it had not ended before."""
        with self._lock:
            self._count()
            ended, self._ended = self._ended, True
        return not ended

    def _count(self) -> None:
        self._when = time.monotonic()
        for index, statistics in self._latest.items():
            self._metrics.grown(self._model, self._counted.get(index, Statistics()), statistics)
        self._counted |= self._latest
        self._latest = {}


class _Now(Collector):
    """What holds at the moment of a look."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """The gauges."""
        status = self._worker.status()
        yield GaugeMetricFamily("mlx_spec_queue_depth", "Requests that wait.", value=status.waiting)
        yield GaugeMetricFamily("mlx_spec_running", "Requests that take turns.", value=status.running)
        memory = GaugeMetricFamily("mlx_spec_memory_bytes", "Memory of MLX.", labels=["kind"])
        held = (
            ("active", status.memory.active),
            ("peak", status.memory.peak),
            ("cache", status.memory.cached),
        )
        for kind, size in (*held, ("budget", status.budget)):
            memory.add_metric([kind], size)
        yield memory
        models = GaugeMetricFamily("mlx_spec_model_bytes", "By model.", labels=["model", "kind"])
        for model in status.models:
            models.add_metric([model.name, "weights"], model.weights)
            models.add_metric([model.name, "caches"], model.caches)
        yield models


class Counting:
    """ASGI: counts requests and logs one line of each, without anything of what it says."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths  # as they were declared; what a client makes up is no label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 499, time.perf_counter()  # 499: hung up before there was a response

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            path = self._label(scope["path"])
            self._metrics.requests.labels(path, str(status)).inc()
            seconds = time.perf_counter() - began
            LOG.info("%s %s %d %.3f s", scope["method"], path, status, seconds)

    def _label(self, path: str) -> str:
        if path in self._paths:
            return path
        return ONE_MODEL if path.startswith("/v1/models/") else OTHER


def router(metrics: Metrics) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def read() -> Response:
        """All of it."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/metrics.json")
    async def read_json() -> JSONResponse:
        """The same for programs that do not parse Prometheus' text."""
        return JSONResponse(metrics.json())

    return routes
