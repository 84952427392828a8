"""An engine thread and its requests, without HTTP in between."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from typing import Any
from unittest.mock import patch

from mlx_spec.apps.server.engine import models
from mlx_spec.apps.server.engine.answers import (
    ChoiceEnded,
    Event,
    Failed,
    Finished,
    PromptRead,
    RoundDone,
    TextDelta,
    ToolCall,
)
from mlx_spec.apps.server.engine.engine_thread import EngineThread, Job
from mlx_spec.apps.server.engine.models import Loader, load_served
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.requests.request import Chat, GenerationRequest, RawPrompts
from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling
from support.pairs import make_pair
from support.waiting import wait_until

TIMEOUT_S = 120  # for an event
NUMBERS = count()
DEMO = Settings(models=(ServedModel("demo", PairSpec("demo", num_draft_tokens=4)),))
PLAIN = Settings(models=(ServedModel("demo", PairSpec("demo", drafter="none")),))  # for `load_once`
QUESTION = "What does os.path.join do?"
ENDLESS = Sampling(logit_bias={1: -100.0, 15: -100.0})  # without the tokens that end an answer of the demo


@dataclass
class Stream:
    """The events of a request. The engine waits after each round of a `held` one until it is let go on."""

    held: bool = False
    events: queue.Queue[Event] = field(default_factory=queue.Queue)
    sent: list[tuple[int, Event]] = field(
        default_factory=list
    )  # with a number that grows from event to event
    seen: list[Event] = field(default_factory=list)
    job: Job = field(init=False)
    _rounds: threading.Semaphore = field(default_factory=partial(threading.Semaphore, 0))

    def send(self, event: Event) -> None:
        """Take an event from the engine."""
        self.sent.append((next(NUMBERS), event))
        self.events.put(event)
        if self.held and isinstance(event, RoundDone):
            self._rounds.acquire(timeout=TIMEOUT_S)

    def go_on(self, rounds: int | None = None) -> None:
        """Let the engine go on for so many rounds, or to the end."""
        self.held = rounds is not None
        self._rounds.release(rounds or 1)

    def number(self, kind: type[Event]) -> int:
        """Return the number of the first event of a kind: what was sent before has smaller ones."""
        return next(number for number, event in self.sent if isinstance(event, kind))

    def next(self) -> Event:
        event = self.events.get(timeout=TIMEOUT_S)
        self.seen.append(event)
        return event

    def until(self, kind: type[Event]) -> Event:
        while not isinstance(event := self.next(), kind):
            assert not isinstance(event, Finished | Failed), event
        return event

    def all(self) -> list[Event]:
        while not (self.seen and isinstance(self.seen[-1], Finished | Failed)):
            self.next()
        return self.seen


def load_tiny(_: ServedModel) -> Pair:
    """Load a pair in a moment: where texts do not matter. The demo takes a second."""
    return make_pair("full")


@cache
def _loaded(spec: PairSpec) -> Pair:
    return load_served(ServedModel("", spec))


def load_once(one: ServedModel) -> Pair:
    """Load a pair, or take that of an earlier engine if it has no drafter, which belongs to one thread."""
    return _loaded(one.spec) if one.spec.drafter == "none" else load_served(one)


@contextmanager
def working(
    settings: Settings = DEMO, loader: Loader = load_served, **seconds: float
) -> Iterator[EngineThread]:
    engine = EngineThread(settings, loader, **seconds)
    with patch.object(models, "WARM_UP_TOKENS", 1):  # no test measures the first request
        engine.start()
        try:
            engine.wait_loaded(TIMEOUT_S)
            yield engine
        finally:
            engine.close()


@contextmanager
def before_prefill(act: Callable[[Sequence[int]], object]) -> Iterator[None]:
    """Do something before each chunk of a prompt is read, with its tokens."""
    prefill = LMTarget.prefill

    def told(target: LMTarget, tokens: Sequence[int], *rest: Any, **more: Any) -> Any:
        act(tokens)
        return prefill(target, tokens, *rest, **more)

    with patch.object(LMTarget, "prefill", told):
        yield


def chat(
    *texts: str, model: str = "demo", thinking: bool = False, tools: Any = None, **given: Any
) -> GenerationRequest:
    """A question, perhaps after earlier turns: user and assistant in turn."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))
    options: dict[str, Any] = {"sampling": Sampling(), "max_tokens": 16}
    return GenerationRequest(model, Chat(messages, tools, thinking), **options | given)


def raw(*prompts: str | tuple[int, ...], echo: bool = False, **given: Any) -> GenerationRequest:
    options: dict[str, Any] = {"sampling": Sampling(), "max_tokens": 8, "prompt_param": "prompt"}
    return GenerationRequest("demo", RawPrompts(prompts, echo), **options | given)


def begin(engine: EngineThread, request: GenerationRequest, *, held: bool = False) -> Stream:
    stream = Stream(held)
    stream.job = engine.submit(request, stream.send)
    return stream


def answer(engine: EngineThread, request: GenerationRequest) -> list[Event]:
    return begin(engine, request).all()


def text_of(events: list[Event], index: int = 0, kind: str = "answer") -> str:
    deltas = [e for e in events if isinstance(e, TextDelta)]
    return "".join(e.text for e in deltas if (e.index, e.kind) == (index, kind))


def closed(events: list[Event]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished), last
    return last


def failure(events: list[Event]) -> Failure:
    last = events[-1]
    assert isinstance(last, Failed), last
    return last.failure


def body(events: list[Event]) -> Any:
    """Return texts, calls, prompts, ends and counts: no cache, speculation or company may change them."""
    usage = replace(closed(events).usage, cached_tokens=0, reread_tokens=0, reread_words=None)
    ends = sorted((e for e in events if isinstance(e, ChoiceEnded)), key=lambda e: e.index)
    prompts = sorted(e.prompt_tokens for e in events if isinstance(e, PromptRead))
    calls = [(e.index, e.call, e.name, e.arguments) for e in events if isinstance(e, ToolCall)]
    texts = [text_of(events, e.index, kind) for e in ends for kind in ("answer", "thinking")]
    return usage, ends, prompts, calls, texts


def wait_until_idle(engine: EngineThread) -> None:
    wait_until(lambda: not engine.status().running and not engine.status().waiting)
