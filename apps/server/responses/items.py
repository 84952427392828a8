"""The items of a response while they grow: thoughts, text and calls, each with the events of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from uuid import uuid4

from mlx_spec.apps.server.responses.sealed import sealed

Json = dict[str, Any]


class Item(Protocol):
    """An item that grows. Its events lack the number that a stream gives them."""

    content: Json  # as it is now

    def begin(self) -> Iterator[Json]:
        """The events that come before its content."""
        ...

    def end(self) -> Iterator[Json]:
        """Those that come after it."""
        ...


class Thoughts:
    """A `reasoning` item."""

    def __init__(self, place: int, *, sealing: bool) -> None:
        self._sealing = sealing
        self._part: Json = {"type": "reasoning_text", "text": ""}
        self.content: Json = {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "content": []}
        self._at = {"item_id": self.content["id"], "output_index": place, "content_index": 0}

    def begin(self) -> Iterator[Json]:
        """An empty part."""
        yield {"type": "response.content_part.added", **self._at, "part": dict(self._part)}

    def more(self, text: str) -> Iterator[Json]:
        """More thoughts."""
        self._part["text"] += text
        yield {"type": "response.reasoning_text.delta", **self._at, "delta": text}

    def end(self) -> Iterator[Json]:
        """The whole text."""
        text = self._part["text"]
        self.content["content"] = [self._part]
        self.content |= {"encrypted_content": sealed(text)} if self._sealing else {}
        yield {"type": "response.reasoning_text.done", **self._at, "text": text}
        yield {"type": "response.content_part.done", **self._at, "part": self._part}


class Message:
    """A `message` item."""

    def __init__(self, place: int) -> None:
        self._part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
        self.content: Json = {**head, "content": []}
        self._at = {"item_id": self.content["id"], "output_index": place, "content_index": 0}

    def begin(self) -> Iterator[Json]:
        """An empty part."""
        part = {**self._part, "logprobs": []}
        yield {"type": "response.content_part.added", **self._at, "part": part}

    def more(self, text: str, logprobs: Sequence[Json]) -> Iterator[Json]:
        """More text, and the logprobs of its tokens where they are asked for."""
        self._part["text"] += text
        self._part["logprobs"] += logprobs
        delta = {"delta": text, "logprobs": list(logprobs)}
        yield {"type": "response.output_text.delta", **self._at, **delta}

    def end(self) -> Iterator[Json]:
        """The whole text."""
        self.content["content"] = [self._part]
        whole = {"text": self._part["text"], "logprobs": self._part["logprobs"]}
        yield {"type": "response.output_text.done", **self._at, **whole}
        yield {"type": "response.content_part.done", **self._at, "part": self._part}


class Call:
    """A `function_call` item."""

    def __init__(self, place: int, *, call_id: str, name: str) -> None:
        head = {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": call_id, "name": name}
        self.content: Json = {**head, "arguments": ""}
        self._at = {"item_id": self.content["id"], "output_index": place}

    def begin(self) -> Iterator[Json]:
        """A call has no parts."""
        yield from ()

    def more(self, text: str) -> Iterator[Json]:
        """More of the JSON text of its arguments."""
        self.content["arguments"] += text
        yield {"type": "response.function_call_arguments.delta", **self._at, "delta": text}

    def end(self) -> Iterator[Json]:
        """The whole call."""
        whole = {"name": self.content["name"], "arguments": self.content["arguments"]}
        yield {"type": "response.function_call_arguments.done", **self._at, **whole}
