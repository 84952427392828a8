"""Start the server as a process, send plain HTTP to it, and draw random requests for it.

Used by the server benchmarks and by the tests of clients and of the page.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
READY_TIMEOUT_S = 120.0  # for a server to load its model
CHAT = "/v1/chat/completions"
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


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[str]
    host: str
    port: int
    log: list[str]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def connect(self, timeout: float = 300) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def send(self, path: str, body: object = None, *, timeout: float = 300, **headers: str) -> Reply:
        """Send a GET without a body, else a POST of JSON; bytes are sent as they are."""
        connection = self.connect(timeout)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        try:
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                connection.request("POST", path, raw, sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, answer.read(), found)
        finally:
            connection.close()

    @property
    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    @property
    def threads(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/task").iterdir())

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> int:
        """End the process. Return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        return self.process.wait(30)


def start(*options: str, port: int = 0) -> Serving:
    """Start a server, on the demo pair if no option says otherwise, and wait until it is ready."""
    command = [sys.executable, "-m", "mlx_spec.serve", "--port", str(port), *options]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log: list[str] = []
    threading.Thread(target=_drain, args=(process, log), daemon=True).start()
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end:
        found = next((m for line in list(log) if (m := re.search(r"http://([\w.]+):(\d+)", line))), None)
        if found:
            serving = Serving(process, found[1], int(found[2]), log)
            if _ready(serving):
                return serving
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.kill()
    raise RuntimeError("the server did not come up:\n" + "".join(log))


@contextmanager
def serving(*options: str) -> Iterator[Serving]:
    """Run a server for as long as the context lasts."""
    started = start(*options)
    try:
        yield started
    finally:
        started.stop()


def _ready(serving: Serving) -> bool:
    try:
        return bool(serving.send("/health", timeout=5).json["status"] == "ok")
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _drain(process: subprocess.Popen[str], log: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        log.extend(iter(output.readline, ""))


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
