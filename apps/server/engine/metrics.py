"""Count requests, tokens and times for `/metrics` and `/metrics.json`. Names and labels follow vLLM's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_spec.decode.statistics import SUMMED, Positions, Statistics
from mlx_spec.types import Reason

from ..errors import LOG
from .answers import Event, Failed, Finished, PromptRead, RoundDone, measurements
from .prefix_cache import CacheCounters

State = Literal["loading", "ready", "stuck", "failed", "draining", "closed"]


@dataclass(frozen=True)
class ModelStatus:
    """A model that is loaded."""

    name: str
    weights: int  # bytes
    caches: int  # bytes of its cached sequences
    batch: tuple[int, ...]  # sequences in each pass of a round
    obstacle: str | None  # why sequences do not share passes; None if they do
    expires_at: float  # seconds since 1970, if it is not used again; infinite: never
    rewind_points: int  # bytes, a part of `caches`
    prefix_cache: CacheCounters  # a copy


@dataclass(frozen=True)
class Status:
    """The state of a server, for health checks and metrics."""

    state: State  # failed: the first model could not be loaded
    waiting: int = 0  # requests
    running: int = 0  # requests
    loading: str | None = None  # the model that is being loaded
    measuring: str | None = None  # the model whose costs are measured again
    models: tuple[ModelStatus, ...] = ()  # the loaded ones
    active: int = 0  # bytes that MLX holds
    peak: int = 0
    cached: int = 0
    budget: int = 0  # bytes for weights and caches
    problem: str | None = None  # why the first model could not be loaded

    @property
    def waits_for(self) -> Literal["loading", "measuring", "answers"] | None:
        """Return what the requests in the queue wait for; None if none waits."""
        if not self.waiting:
            return None
        return "loading" if self.loading else "measuring" if self.measuring else "answers"


class Metrics(Collector):
    """The counters of a server, and its state at the moment of a reading."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="mlx_spec", registry=self.registry)
        gauge = partial(Gauge, namespace="mlx_spec", registry=self.registry)
        histogram = partial(Histogram, namespace="mlx_spec", registry=self.registry, labelnames=["model"])
        self.requests = counter("requests", "Requests by path and status.", ["path", "status"])
        self.failures = counter("failures", "Admitted requests that failed.", ["model", "code"])
        self.cancelled = counter("cancelled", "Requests whose client hung up.", ["model"])
        self.prompt = counter("prompt_tokens", "Tokens of prompts.", ["model"])
        self.cached = counter("cached_tokens", "Tokens of prompts that were cached.", ["model"])
        # These names are vLLM's. Other figures of `Statistics` are counted under their own.
        names = {
            "generated_tokens": "generation_tokens",
            "decode_seconds": "generation_seconds",
            "speculative_rounds": "spec_decode_num_drafts",
            "drafted": "spec_decode_num_draft_tokens",
            "accepted": "spec_decode_num_accepted_tokens",
        }
        # Tokens of prompts are left out: they are counted when a prompt has been read.
        self.counted = {
            name: counter(names.get(name, name), f"Of all answers: {name}.", ["model"])
            for name in SUMMED
            if name not in ("prompt_tokens", "reused_tokens")
        }
        about = "Time of plain decoding, estimated for the answers whose gain is known."
        self.plain = counter("plain_seconds", about, ["model"])
        self.compared = counter("compared_seconds", "Time that these answers really took.", ["model"])
        at = ["model", "drafter", "position"]  # from 0, as vLLM counts them
        self.drafted_at = counter("spec_decode_num_draft_tokens_per_pos", "By position.", at)
        self.accepted_at = counter("spec_decode_num_accepted_tokens_per_pos", "By position.", at)
        first_token_s = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # upper bounds of buckets
        self.first_token = histogram("time_to_first_token_seconds", "From admission.", buckets=first_token_s)
        per_token_s = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 1)
        self.per_token = histogram("time_per_output_token_seconds", "In the engine.", buckets=per_token_s)
        pause_s = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
        self.pause = histogram("longest_pause_seconds", "Between tokens of a choice.", buckets=pause_s)
        self.gain = gauge("gain", "Speed of the latest request as a multiple of plain decoding.", ["model"])
        self.reason = gauge(
            "reason", "1 for why speculation is on or off in the latest request.", ["model", "reason"]
        )
        self._status = status
        self._latest: dict[str, Statistics] = {}  # by model, the one that ran last at the end
        self.registry.register(self)

    def count_rounds(self, model: str, before: Statistics, event: RoundDone) -> None:
        """Count what a choice generated since `before`, which was counted already."""
        now = event.statistics
        for field, counter in self.counted.items():
            counter.labels(model).inc(vars(now)[field] - vars(before)[field])
        for drafter, positions in now.by_drafter.items():
            known = before.by_drafter.get(drafter, Positions())
            for counter, old_at, new_at in (
                (self.drafted_at, known.drafted, positions.drafted),
                (self.accepted_at, known.accepted, positions.accepted),
            ):
                for position, (new, old) in enumerate(zip_longest(new_at, old_at, fillvalue=0)):
                    counter.labels(model, drafter, str(position)).inc(new - old)
        self._show_latest(model, now)

    def count_answer(self, model: str, event: Finished) -> None:
        """Count a request that was answered: its times, and its gain if that is known."""
        statistics = event.timings.statistics
        if not statistics.generated_tokens:  # a model was loaded, or a prompt scored
            return
        self.first_token.labels(model).observe(event.timings.first_token_seconds)
        if statistics.tokens_per_second:
            self.per_token.labels(model).observe(1 / statistics.tokens_per_second)
        self.pause.labels(model).observe(event.timings.longest_pause_seconds)
        if statistics.known_gain is not None:
            self.plain.labels(model).inc(statistics.decode_seconds * statistics.known_gain)
            self.compared.labels(model).inc(statistics.decode_seconds)
        self._show_latest(model, statistics)

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield _gauges("queue_depth", "Requests that wait.", [], (status.waiting,))
        yield _gauges("running", "Requests that are answered.", [], (status.running,))
        kinds = (("active", status.active), ("peak", status.peak), ("cache", status.cached))
        yield _gauges("memory_bytes", "Memory of MLX.", ["kind"], *kinds, ("budget", status.budget))
        sizes = [(one.name, "weights", one.weights) for one in status.models]
        sizes += [(one.name, "caches", one.caches) for one in status.models]
        sizes += [(one.name, "places", one.rewind_points) for one in status.models]  # documented so
        yield _gauges("model_bytes", "By model.", ["model", "kind"], *sizes)
        rows = [(one.name, sum(one.batch)) for one in status.models]
        yield _gauges("batch_rows", "Answers that decode.", ["model"], *rows)
        passes = [(one.name, len(one.batch)) for one in status.models]
        yield _gauges("batch_passes", "Passes of a round.", ["model"], *passes)
        for field in vars(CacheCounters()):
            name = field.replace("rewind_points", "places")  # as documented
            about = f"Of the prefix cache since the model was loaded: {name}."
            family = CounterMetricFamily(f"mlx_spec_prefix_cache_{name}", about, labels=["model"])
            for one in status.models:
                family.add_metric([one.name], vars(one.prefix_cache)[field])
            yield family

    def json(self) -> dict[str, Any]:
        """Return the body of `/metrics.json`: metrics by model without the prefix `mlx_spec_`, and more.

        Metrics by position are lists by drafter. Buckets of histograms are left out.
        """
        models: dict[str, dict[str, Any]] = {}
        for sample in (sample for family in self.registry.collect() for sample in family.samples):
            name, labels = sample.name.removeprefix("mlx_spec_"), dict(sample.labels)
            if (model := labels.pop("model", None)) is None or name.endswith(("_bucket", "_created")):
                continue
            metrics = models.setdefault(model, {})
            if not labels:
                metrics[name] = sample.value
            elif "position" in labels:
                by_position = metrics.setdefault(name, {}).setdefault(labels["drafter"], [])
                by_position.append(sample.value)  # samples come in the order of their positions
            elif "kind" in labels:
                metrics[f"{labels['kind']}_bytes"] = sample.value
        last: dict[str, Any] | None = None
        for model, now in tuple(self._latest.items()):  # the engine thread changes them
            last = {"model": model, **measurements(now)}
            models.setdefault(model, {})["last"] = last
        status = self._status()
        for one in status.models:
            models.setdefault(one.name, {})["batch"] = {"sizes": list(one.batch), "obstacle": one.obstacle}
        return {
            "models": models,
            "loading": status.loading,
            "measuring": status.measuring,
            "queue": {
                "waiting": status.waiting,
                "running": status.running,
                "waits_for": status.waits_for,
            },
            "memory_bytes": status.active,
            "memory_budget_bytes": status.budget,
            "last": last,
        }

    def _show_latest(self, model: str, statistics: Statistics) -> None:
        self._latest.pop(model, None)
        self._latest[model] = statistics
        gain = self.gain.labels(model)
        if statistics.known_gain is None:
            self.gain.remove(model)
        else:
            gain.set(statistics.known_gain)
        for reason in Reason:
            self.reason.labels(model, reason.value).set(reason is statistics.reason)


def _gauges(name: str, about: str, labels: list[str], *samples: tuple[Any, ...]) -> GaugeMetricFamily:
    """Return a gauge; each sample has a value for each label, and then its number."""
    family = GaugeMetricFamily(f"mlx_spec_{name}", about, labels=labels)
    for *values, number in samples:
        family.add_metric(values, number)
    return family


class JobCounter:
    """Counts the events of a job: its rounds a few times a second, and the rest at its end."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._lock = threading.Lock()  # events come on the engine thread; the last may come on another
        self._counted: dict[int, Statistics] = {}  # by choice
        self._latest: dict[int, RoundDone] = {}  # by choice: the latest round, if it is not counted yet
        self._last_count = 0.0  # time.monotonic()
        self._ended = False

    def count(self, event: Event) -> None:
        """Count an event. Only the engine thread may call this, except for `Failed`."""
        match event:
            case PromptRead():
                self._metrics.prompt.labels(self._model).inc(event.prompt_tokens)
                self._metrics.cached.labels(self._model).inc(event.cached_tokens)
            case RoundDone(index=index):
                with self._lock:
                    self._latest[index] = event
                    count_interval_s = 0.25  # counting every round would cost time
                    if time.monotonic() - self._last_count >= count_interval_s:
                        self._count_rounds()
            case Finished():
                if self._end():
                    self._metrics.count_answer(self._model, event)
            case Failed(failure=failure):
                if self._end():
                    self._metrics.failures.labels(self._model, failure.code or str(failure.status)).inc()

    def cancel(self) -> None:
        if self._end():
            self._metrics.cancelled.labels(self._model).inc()

    def _end(self) -> bool:
        """Count the rest. Return False if the job had ended before."""
        with self._lock:
            self._count_rounds()
            had_ended, self._ended = self._ended, True
        return not had_ended

    def _count_rounds(self) -> None:
        self._last_count = time.monotonic()
        for index, event in self._latest.items():
            self._metrics.count_rounds(self._model, self._counted.get(index, Statistics()), event)
            self._counted[index] = event.statistics
        self._latest = {}


@dataclass
class RequestCounter:
    """ASGI middleware: count requests and log one line for each, without any of its text."""

    app: ASGIApp
    metrics: Metrics
    paths: frozenset[str]  # as declared; a path that a client made up is not a label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        no_response = 499  # counted if the client hangs up before the response
        status, began = no_response, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            path = self._label(scope["path"])
            self.metrics.requests.labels(path, str(status)).inc()
            seconds = time.perf_counter() - began
            LOG.info("%s %s %d %.3f s", scope["method"], path, status, seconds)

    def _label(self, path: str) -> str:
        if path in self.paths:
            return path
        other = "other"  # the label of all paths that do not exist
        labels = {"/v1/models/": "/v1/models/{name}", "/v1/responses/": "/v1/responses/{id}"}
        return next((label for start, label in labels.items() if path.startswith(start)), other)
