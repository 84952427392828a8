"""A worker and someone who asks it, without HTTP in between."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_spec.apps.server.ask import (
    Ask,
    CallArguments,
    CallOpened,
    Chat,
    Closed,
    Ended,
    Event,
    Failed,
    Opened,
    Piece,
    Raw,
)
from mlx_spec.apps.server.failures import Failure
from mlx_spec.apps.server.job import Job
from mlx_spec.apps.server.models import Loader, load_served
from mlx_spec.apps.server.settings import Served, Settings
from mlx_spec.apps.server.worker import Worker
from mlx_spec.sampling import Sampling

PATIENCE = 60  # seconds that a test waits for an event
DEMO = Settings(models=(Served("demo", "demo", num_draft_tokens=4),))
QUESTION = "What does os.path.join do?"


@dataclass
class Stream:
    """A request and its events."""

    job: Job
    events: queue.Queue[Event]
    seen: list[Event] = field(default_factory=list)

    def next(self) -> Event:
        """The next one."""
        event = self.events.get(timeout=PATIENCE)
        self.seen.append(event)
        return event

    def until(self, kind: type[Event]) -> Event:
        """Read up to the first event of a kind."""
        while not isinstance(event := self.next(), kind):
            assert not isinstance(event, Closed | Failed), event
        return event

    def all(self) -> list[Event]:
        """All events, also those that were read before."""
        while not (self.seen and isinstance(self.seen[-1], Closed | Failed)):
            self.next()
        return self.seen


@contextmanager
def working(settings: Settings = DEMO, loader: Loader = load_served) -> Iterator[Worker]:
    """A worker that has loaded its first model."""
    worker = Worker(settings, loader)
    worker.start()
    try:
        worker.begun(PATIENCE)
        yield worker
    finally:
        worker.close()


def chat(*texts: str, model: str = "demo", thinking: bool = False, **given: Any) -> Ask:
    """A question, perhaps behind turns that went before: user and assistant by turns."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))
    options: dict[str, Any] = {"sampling": Sampling(), "max_tokens": 24}
    return Ask(model, Chat(messages, thinking=thinking), **options | given)


def raw(*prompts: str | tuple[int, ...], model: str = "demo", echo: bool = False, **given: Any) -> Ask:
    """Texts or tokens to be continued."""
    options: dict[str, Any] = {"sampling": Sampling(), "max_tokens": 8}
    return Ask(model, Raw(prompts, echo), **options | given)


def begin(worker: Worker, ask: Ask) -> Stream:
    """Submit a request."""
    events: queue.Queue[Event] = queue.Queue()
    return Stream(worker.submit(ask, events.put), events)


def answer(worker: Worker, ask: Ask) -> list[Event]:
    """All events of a request."""
    return begin(worker, ask).all()


def text_of(events: list[Event], index: int = 0, kind: str = "answer") -> str:
    """The text of a choice."""
    return "".join(e.text for e in events if isinstance(e, Piece) and (e.index, e.kind) == (index, kind))


def closed(events: list[Event]) -> Closed:
    """The last event, which must not be a failure."""
    last = events[-1]
    assert isinstance(last, Closed), last
    return last


def failure(events: list[Event]) -> Failure:
    """What a request failed with."""
    last = events[-1]
    assert isinstance(last, Failed), last
    return last.failure


def body(events: list[Event]) -> Any:
    """What no reuse and no speculation may change: texts, calls, prompts, ends and counts of tokens."""
    usage = replace(closed(events).usage, cached_tokens=0)
    ends = [e for e in events if isinstance(e, Ended)]
    prompts = [e.prompt_tokens for e in events if isinstance(e, Opened)]
    kinds = ("answer", "thinking")
    calls = [(e.index, e.call, e.name) for e in events if isinstance(e, CallOpened)]
    arguments = "".join(e.text for e in events if isinstance(e, CallArguments))
    texts = [text_of(events, e.index, kind) for e in ends for kind in kinds]
    return usage, ends, prompts, calls, arguments, texts
