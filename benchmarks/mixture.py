"""Requests of all kinds, drawn at random: every parameter of the chat and completion routes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).parent / "prompts" / "demo"
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


def questions() -> list[str]:
    """Messages of a user."""
    found: list[str] = []
    for kind in ("facts", "chat", "code"):
        lines = (PROMPTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        found += [text for text in map(json.loads, lines) if isinstance(text, str)]
    return found


class Mixture:
    """An endless supply of requests; the same seed gives the same ones."""

    def __init__(self, seed: int, *, greedy: bool = True, most: int = 24) -> None:
        self._chance = random.Random(seed)
        self._questions = questions()
        self._greedy, self._most = greedy, most

    def next(self) -> tuple[str, dict[str, Any]]:
        """A path and a body."""
        if self._chance.random() < 0.2:
            return "/v1/completions", self._completion()
        return "/v1/chat/completions", self._chat()

    def _chat(self) -> dict[str, Any]:
        chance = self._chance
        body: dict[str, Any] = {"messages": self._messages()} | self._sampling()
        body[chance.choice(["max_tokens", "max_completion_tokens"])] = chance.randint(1, self._most)
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
        body["max_tokens"] = chance.randint(1, self._most)
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
