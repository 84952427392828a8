"""Tool calls written in each syntax, and parsed: for the tests of the server's tools."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from mlx_spec.apps.server.requests.request import Tool
from mlx_spec.apps.server.tools.coder import CODER
from mlx_spec.apps.server.tools.gemma import GEMMA
from mlx_spec.apps.server.tools.json_calls import HERMES
from mlx_spec.grammar.schema import TYPES, fits

LETTERS = "abZ0 \n\t\"\\'{}[]<>|,:/é日🙂\u2028"
KEYS = ("a", "my-key", "B_2", "ünï", "with space", "x.y")
SYNTAX = {syntax.name: syntax for syntax in (GEMMA, HERMES, CODER)}


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(8)))


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return random_text(rng)
    if kind < 6:
        return rng.choice([0, -7, 12, 2.5, -1e-9, 3e20, True, False, None])
    if kind == 6:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return random_arguments(rng, depth + 1)


def random_arguments(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {key: random_value(rng, depth) for key in rng.sample(KEYS, rng.randrange(4))}


def gemma(name: str, arguments: Any) -> str:
    return f"call:{name}{gemma_value(arguments)}"


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return json.dumps(value)


def hermes(name: str, arguments: Any) -> str:
    return "\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n"


def coder(name: str, arguments: dict[str, Any]) -> str:
    def written(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    parts = [f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items()]
    return f"\n<function={name}>\n{''.join(parts)}</function>\n"


WRITERS = {"gemma4": gemma, "hermes": hermes, "qwen3-coder": coder}


def described(name: str, arguments: dict[str, Any]) -> Tool:
    """Return a tool whose schema gives the types of `arguments`."""
    properties = {
        key: {"type": next(kind for kind in TYPES if fits(value, [kind]))} for key, value in arguments.items()
    }
    return Tool(name, None, {"type": "object", "properties": properties})


def parse(syntax: str, body: str, tools: Sequence[Tool] = ()) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls of a body and the text that is not a call."""
    calls, rest = SYNTAX[syntax].parse(body, tools)
    return [(call.name, json.loads(call.arguments)) for call in calls], rest
