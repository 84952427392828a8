"""`/metrics`: counters and gauges of a server in Prometheus' text format. Names and labels follow vLLM's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_spec.session import Positions, Statistics
from mlx_spec.types import Reason

from .engine_thread import EngineThread, Job, Status
from .errors import LOG, Failure
from .request import Event, Failed, Finished, GenerationRequest, PromptRead, RoundDone

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 1)  # seconds
PAUSE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)  # seconds
COUNT_INTERVAL_S = 0.25  # between two counts of a request that runs; counting every round would cost time
NO_RESPONSE = 499  # status of a request whose client hung up before the response
OTHER = "other"  # label of paths that do not exist
LABELS = {"/v1/models/": "/v1/models/{name}", "/v1/responses/": "/v1/responses/{id}"}  # by their beginnings


class Metrics(Collector):
    """The counters of a server, and its state at the moment of a reading."""

    def __init__(self, status: Callable[[], Status]) -> None:
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
        at = ("model", "drafter", "position")  # from 0, as vLLM counts them
        self.drafted_at = self._counter("spec_decode_num_draft_tokens_per_pos", "By position.", *at)
        self.accepted_at = self._counter("spec_decode_num_accepted_tokens_per_pos", "By position.", *at)
        self.plain = self._counter("plain_seconds", "Plain decoding of the compared tokens.", "model")
        self.compared = self._counter("compared_seconds", "Rounds whose plain time is known.", "model")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From admission.", FIRST_TOKEN_BUCKETS
        )
        self.per_token = self._histogram("time_per_output_token_seconds", "In the engine.", PER_TOKEN_BUCKETS)
        self.pause = self._histogram("longest_pause_seconds", "Between tokens of a choice.", PAUSE_BUCKETS)
        self.gain = self._gauge(
            "gain", "Speed of the latest request as a multiple of plain decoding.", "model"
        )
        self.reason = self._gauge(
            "reason", "1 for why speculation is on or off in the latest request.", "model", "reason"
        )
        self._status = status
        self._latest: dict[str, Statistics] = {}  # of the latest round of each model; the last one ran last
        self.registry.register(self)

    def count_prompt(self, model: str, event: PromptRead) -> None:
        """Count a prompt that was processed."""
        self.prompt.labels(model).inc(event.prompt_tokens)
        self.cached.labels(model).inc(event.cached_tokens)

    def count_rounds(self, model: str, before: Statistics, event: RoundDone) -> None:
        """Count what a choice generated since it was counted last."""
        now = event.statistics
        for counter, old, new in (
            (self.generated, before.generated_tokens, now.generated_tokens),
            (self.seconds, before.decode_seconds, now.decode_seconds),
            (self.drafts, before.speculative_rounds, now.speculative_rounds),
            (self.drafted, before.drafted, now.drafted),
            (self.accepted, before.accepted, now.accepted),
            (self.plain, before.plain_seconds, now.plain_seconds),
            (self.compared, before.compared_seconds, now.compared_seconds),
        ):
            counter.labels(model).inc(new - old)
        for drafter, positions in now.by_drafter.items():
            known = before.by_drafter.get(drafter, Positions())
            for counter, old_at, new_at in (
                (self.drafted_at, known.drafted, positions.drafted),
                (self.accepted_at, known.accepted, positions.accepted),
            ):
                for position, (new, old) in enumerate(zip_longest(new_at, old_at, fillvalue=0)):
                    counter.labels(model, event.drafters[drafter], str(position)).inc(new - old)
        self._show_latest(model, now)

    def count_answer(self, model: str, event: Finished) -> None:
        """Count a request that was answered."""
        statistics = event.timings.statistics
        if not statistics.generated_tokens:  # a model was loaded, or a prompt scored
            return
        self.first_token.labels(model).observe(event.timings.first_token_seconds)
        if statistics.tokens_per_second:
            self.per_token.labels(model).observe(1 / statistics.tokens_per_second)
        self.pause.labels(model).observe(event.timings.longest_pause_seconds)
        self._show_latest(model, statistics)

    def count_failure(self, model: str, failure: Failure) -> None:
        """Count a request that failed."""
        self.failures.labels(model, failure.code or str(failure.status)).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of this moment."""
        status = self._status()
        yield GaugeMetricFamily("mlx_spec_queue_depth", "Requests that wait.", value=status.waiting)
        yield GaugeMetricFamily("mlx_spec_running", "Requests that are answered.", value=status.running)
        memory = GaugeMetricFamily("mlx_spec_memory_bytes", "Memory of MLX.", labels=["kind"])
        memory.add_metric(["active"], status.active)
        memory.add_metric(["peak"], status.peak)
        memory.add_metric(["cache"], status.cached)
        memory.add_metric(["budget"], status.budget)
        yield memory
        models = GaugeMetricFamily("mlx_spec_model_bytes", "By model.", labels=["model", "kind"])
        for model in status.models:
            models.add_metric([model.name, "weights"], model.weights)
            models.add_metric([model.name, "caches"], model.caches)
        yield models
        rows = GaugeMetricFamily("mlx_spec_batch_rows", "Answers that decode.", labels=["model"])
        passes = GaugeMetricFamily("mlx_spec_batch_passes", "Passes of a round.", labels=["model"])
        for model in status.models:
            rows.add_metric([model.name], sum(model.batch))
            passes.add_metric([model.name], len(model.batch))
        yield rows
        yield passes

    def json(self) -> dict[str, Any]:
        """Return metrics by model, without the prefix `mlx_spec_`; queue, memory and the last request.

        Metrics by position are lists by drafter. Buckets of histograms are left out.
        """
        models: dict[str, dict[str, Any]] = {}
        for sample in (sample for family in self.registry.collect() for sample in family.samples):
            name, labels = sample.name.removeprefix("mlx_spec_"), dict(sample.labels)
            if (model := labels.pop("model", None)) is None or name.endswith(("_bucket", "_created")):
                continue
            found = models.setdefault(model, {})
            if not labels:
                found[name] = sample.value
            elif "position" in labels:
                by_position = found.setdefault(name, {}).setdefault(labels["drafter"], [])
                position = int(labels["position"])
                by_position += [0.0] * (position + 1 - len(by_position))
                by_position[position] += sample.value
            elif "kind" in labels:
                found[f"{labels['kind']}_bytes"] = sample.value
        latest = dict(self._latest)  # the engine thread changes it
        for model, statistics in latest.items():
            models.setdefault(model, {})["last"] = _last_json(model, statistics)
        status = self._status()
        for one in status.models:
            models.setdefault(one.name, {})["batch"] = {"sizes": list(one.batch), "obstacle": one.alone}
        return {
            "models": models,
            "loading": status.loading,
            "queue": {"waiting": status.waiting, "running": status.running},
            "memory_bytes": status.active,
            "memory_budget_bytes": status.budget,
            "last": _last_json(*list(latest.items())[-1]) if latest else None,
        }

    def _show_latest(self, model: str, statistics: Statistics) -> None:
        self._latest.pop(model, None)
        self._latest[model] = statistics
        if statistics.gain is not None:
            self.gain.labels(model).set(statistics.gain)
        for reason in Reason:
            self.reason.labels(model, reason.value).set(reason is statistics.reason)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"mlx_spec_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"mlx_spec_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mlx_spec_{name}", about, ["model"], buckets=buckets, registry=self.registry)


def _last_json(model: str, statistics: Statistics) -> dict[str, Any]:
    return {
        "model": model,
        "predicted_per_second": statistics.tokens_per_second or None,
        "batch_n": round(statistics.batch_size, 3),
        "gain": statistics.gain,
        "acceptance_length": statistics.acceptance_length or None,
        "speculation": "on" if statistics.reason.is_on else "off",
        "reason": statistics.reason.value,
    }


class CountedEngine:
    """An engine whose requests are counted while they run."""

    def __init__(self, engine: EngineThread, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self.resolve = engine.resolve
        self.count_tokens = engine.count_tokens

    def submit(self, request: GenerationRequest, send: Callable[[Event], None]) -> CountedJob:
        """Admit a request as the engine does; `send` is called on its thread."""
        job = CountedJob(self._metrics, request.model)

        def counted(event: Event) -> None:
            job.read(event)
            send(event)

        job.job = self._engine.submit(request, counted)
        return job


class CountedJob:
    """A job whose rounds are counted a few times a second, and once more in the end."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._lock = threading.Lock()  # events come on the engine thread, `cancel` is called on another
        self._counted: dict[int, Statistics] = {}  # by choice
        self._latest: dict[int, RoundDone] = {}  # by choice, those that are not counted yet
        self._last_count = 0.0  # time.monotonic()
        self._ended = False
        self.job: Job | None = None

    def read(self, event: Event) -> None:
        """Count an event."""
        match event:
            case PromptRead():
                self._metrics.count_prompt(self._model, event)
            case RoundDone(index=index):
                with self._lock:
                    self._latest[index] = event
                    if time.monotonic() - self._last_count >= COUNT_INTERVAL_S:
                        self._count()
            case Finished():
                self._end()
                self._metrics.count_answer(self._model, event)
            case Failed(failure=failure):
                self._end()
                self._metrics.count_failure(self._model, failure)

    def cancel(self) -> None:
        """End the job; count it as cancelled if it had not ended."""
        if self._end():
            self._metrics.cancelled.labels(self._model).inc()
        if self.job is not None:
            self.job.cancel()

    def _end(self) -> bool:
        """Count the rest. Return False if the job had ended before."""
        with self._lock:
            self._count()
            had_ended, self._ended = self._ended, True
        return not had_ended

    def _count(self) -> None:
        self._last_count = time.monotonic()
        for index, event in self._latest.items():
            self._metrics.count_rounds(self._model, self._counted.get(index, Statistics()), event)
            self._counted[index] = event.statistics
        self._latest = {}


class RequestCounter:
    """ASGI middleware: count requests and log one line for each, without any of its text."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths  # as declared; a path that a client made up is no label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = NO_RESPONSE, time.perf_counter()

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
        return next((label for start, label in LABELS.items() if path.startswith(start)), OTHER)
