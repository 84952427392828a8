"""Random requests for a server, and replies that can be compared."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHAT = "/v1/chat/completions"
PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "demo"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "add", "parameters": SUM, "strict": True}},
]
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"enum": ["zip", "map"]}, "n": {"type": "integer"}},
     "required": ["name", "n"], "additionalProperties": False},
    {"type": "object", "properties": {"ok": {"type": "boolean"}, "why": {"type": "string", "maxLength": 20}},
     "required": ["ok", "why"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4},
]  # fmt: skip
PATTERNS = [r"(yes|no), because [a-z ]{3,20}\.", r"[A-Z][a-z]{2,8} [0-9]{1,3}"]
STOPS = [".", " the", "a", "e t", "\n", "it"]


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """Return the data of a stream, event by event."""
        blocks = self.body.decode().split("\n\n")
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]

    @property
    def is_stream(self) -> bool:
        return self.body.startswith(b"data:") or b"\n\ndata:" in self.body

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Return the JSON objects of a stream."""
        return [json.loads(data) for data in self.events if data != "[DONE]"]


def questions() -> list[str]:
    """Return the questions of the demo prompts."""
    found: list[str] = []
    for kind in ("facts", "chat", "code"):
        lines = (PROMPTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        found += [text for text in map(json.loads, lines) if isinstance(text, str)]
    return found


class RandomRequests:
    """Requests with random parameters of the chat and completion routes; a seed repeats them."""

    def __init__(self, seed: int, *, greedy: bool = True, max_tokens: int = 24) -> None:
        self._chance = random.Random(seed)
        self._questions = questions()
        self._greedy, self._max_tokens = greedy, max_tokens

    def next(self) -> tuple[str, dict[str, Any]]:
        """Return a path and a body."""
        if self._chance.random() < 0.2:
            return "/v1/completions", self._completion()
        return "/v1/chat/completions", self._chat()

    def _chat(self) -> dict[str, Any]:
        chance = self._chance
        body: dict[str, Any] = {"messages": self._messages()} | self._sampling()
        body[chance.choice(["max_tokens", "max_completion_tokens"])] = chance.randint(1, self._max_tokens)
        if chance.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": chance.randint(0, 5)}
        match chance.randrange(8):
            case 0:
                schema = {"name": "answer", "strict": True, "schema": chance.choice(SCHEMAS)}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
            case 1:
                body["response_format"] = {"type": chance.choice(["json_object", "text"])}
            case 2:
                body |= {"tools": TOOLS, "tool_choice": chance.choice(["auto", "required", "none"])}
            case 3:
                named = {"type": "function", "function": {"name": chance.choice(["weather", "add"])}}
                body |= {"tools": TOOLS, "tool_choice": named, "parallel_tool_calls": chance.random() < 0.5}
            case 4:
                body["prediction"] = {"type": "content", "content": chance.choice(self._questions)}
            case 5:
                body["response_format"] = {"type": "regex", "pattern": chance.choice(PATTERNS)}
        if chance.random() < 0.3:
            body |= {"stream": True, "stream_options": {"include_usage": chance.random() < 0.5}}
        return body

    def _completion(self) -> dict[str, Any]:
        chance = self._chance
        prompts = chance.sample(self._questions, chance.randint(1, 2))
        body: dict[str, Any] = {"prompt": prompts if chance.random() < 0.5 else prompts[0]} | self._sampling()
        body["max_tokens"] = chance.randint(1, self._max_tokens)
        if chance.random() < 0.5:
            body["logprobs"] = chance.randint(0, 5)
        if chance.random() < 0.3:
            body["echo"] = True
        return body

    def _messages(self) -> list[dict[str, Any]]:
        chance = self._chance
        found = [{"role": "system", "content": "Answer shortly."}] if chance.random() < 0.3 else []
        for _ in range(chance.choice([0, 0, 1, 2])):
            found.append({"role": "user", "content": chance.choice(self._questions)})
            found.append(
                {"role": "assistant", "content": chance.choice(["Yes.", "It is a function.", "No."])}
            )
        return [*found, {"role": "user", "content": chance.choice(self._questions)}]

    def _sampling(self) -> dict[str, Any]:
        chance = self._chance
        body: dict[str, Any] = {"temperature": 0}
        if not self._greedy and chance.random() < 0.5:
            body = {"temperature": chance.choice([0.5, 1, 1.5]), "seed": chance.randrange(1000)}
        for name, value in (
            ("presence_penalty", chance.choice([0.5, -1, 1.5])),
            ("frequency_penalty", chance.choice([0.3, 1.0])),
            ("repetition_penalty", chance.choice([1.1, 1.3])),
            ("logit_bias", {str(chance.randrange(100, 2000)): chance.choice([-100, 5, -3])}),
            ("stop", chance.sample(STOPS, chance.randint(1, 3))),
            ("n", 2),
            ("top_p", chance.choice([0.5, 0.9, None])),
            ("user", "somebody"),
        ):
            if chance.random() < 0.2:
                body[name] = value
        return body


VOLATILE = {"id", "created", "timings", "system_fingerprint", "mlx_spec"}  # keys that differ between answers


def comparable(reply: Reply) -> Any:
    """Return the body without volatile keys; a stream as one body."""
    if reply.is_stream:
        return _joined(reply.chunks)
    return _without(reply.json, VOLATILE)


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(v, keys) for key, v in value.items() if key not in keys}
    return [_without(v, keys) for v in value] if isinstance(value, list) else value


def _joined(chunks: list[dict[str, Any]]) -> Any:
    """Return the text, tool calls, log-probabilities and usage of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            empty: dict[str, Any] = {"text": {}, "calls": {}, "logprobs": [], "end": None}
            found = choices.setdefault(choice["index"], empty)
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    for call in value:
                        made = found["calls"].setdefault(call["index"], {"name": None, "arguments": ""})
                        made["name"] = call["function"].get("name") or made["name"]
                        made["arguments"] += call["function"].get("arguments") or ""
                elif isinstance(value, str):
                    found["text"][key] = found["text"].get(key, "") + value
            found["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            found["end"] = choice.get("finish_reason") or found["end"]
    return {"choices": choices, "usage": _without(usage, VOLATILE)}


def without_cache(value: Any) -> Any:
    """Return a body without the number of cached tokens, which depends on earlier requests."""
    return _without(value, {"prompt_tokens_details"})
