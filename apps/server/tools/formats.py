"""Find the syntax of a model's tool calls.

A model has the syntax whose reader reads the probe call that its chat template writes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.thinking import Markers

from ..requests.request import Tool, ToolUse
from .coder import CODER, SEED
from .gemma import GEMMA
from .json_calls import ANSWER, FORMS, HERMES, LISTS
from .syntax import Calls, ReadCalls, Syntax, read_call

PROBE_ARGUMENTS = {"place": "Bahía", "text": "two words"}
PROBE = Tool(
    "probe_of_calls",
    "A probe.",
    {"type": "object", "properties": {k: {"type": "string"} for k in PROBE_ARGUMENTS}},
)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """The syntax of one model, with the ids of its tokens."""

    syntax: Syntax
    open: int | None  # token before calls; None if headers of messages mark them, or the answer is a call
    close: int | None  # token after calls; None if a call ends with the answer or the next call
    results_in_calls: bool  # the template reads results from the message with the calls ("tool_responses")
    token: Callable[[str], int | None]  # id of a token by its name
    short_ids: bool = False  # the template takes ids of nine letters only

    @property
    def in_headers(self) -> bool:
        """Return True if headers of messages mark calls."""
        return self.open is None and not self.is_answer

    @property
    def is_answer(self) -> bool:
        """Return True if the whole answer is a call."""
        return self.syntax is ANSWER

    def new_id(self) -> str:
        """Return an id for a call to which the model gives none."""
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


# --- the format of a model, and its prompt

_known: WeakKeyDictionary[Tokenizer, ToolFormat | None] = WeakKeyDictionary()
_lock = threading.Lock()


def find_tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the tool format of a model; None if its template writes no calls, or in an unknown syntax."""
    with _lock:
        if tokenizer not in _known:
            _known[tokenizer] = _find_format(tokenizer)
        return _known[tokenizer]


def format_of(use: ToolUse, tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the format of the calls in an answer; None if they have no format that is known.

    If the template writes no calls, a grammar can still force one: the answer is its JSON.
    """
    format = find_tool_format(tokenizer)
    if format is None and use.choice == "required":
        return ToolFormat(ANSWER, None, None, False, tokenizer.token_id)
    return format


def definition(tool: Tool) -> dict[str, Any]:
    """Return a tool as chat templates take it, always with a description, because templates print it."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _find_format(tokenizer: Tokenizer) -> ToolFormat | None:
    if not tokenizer.chats:
        return None
    question = {"role": "user", "content": "?"}
    function = {"name": PROBE.name, "arguments": PROBE_ARGUMENTS}
    # Kimi K2's template writes the name only as a part of the id. Mistral's templates want nine letters.
    probe_ids = ("call_0", f"functions.{PROBE.name}:0", "abcdefghi")
    for content, call_id in product((None, ""), probe_ids):  # some templates refuse one or the other
        call = {"id": call_id, "type": "function", "function": function}
        calling = {"role": "assistant", "content": content, "tool_calls": [call]}
        written = _render(tokenizer, [question, calling])
        if PROBE.name not in written:
            continue
        for syntax in all_syntaxes():
            open, close = tokenizer.token_id(syntax.markers.open), tokenizer.token_id(syntax.markers.close)
            has_markers = open is not None and (close is not None or not syntax.markers.close)
            if has_markers and _reads_probe(syntax, written):
                result = "result of the probe"
                answered = {**calling, "tool_responses": [{"name": PROBE.name, "response": result}]}
                folds = result in _render(tokenizer, [question, answered])
                in_headers = tokenizer.marks is not None and tokenizer.marks.marks_calls
                return ToolFormat(
                    syntax,
                    None if in_headers else open,
                    None if in_headers else close,
                    folds,
                    tokenizer.token_id,
                    short_ids=call_id == probe_ids[-1],
                )
    return None


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    try:
        return tokenizer.decode_raw(tokenizer.prompt(messages, tools=[definition(PROBE)]))
    except InvalidValue:
        return ""


def _reads_probe(syntax: Syntax, written: str) -> bool:
    """Return True if a part of `written` is the probe call. Other parts may explain the syntax."""
    bodies = [_before(body, syntax.markers.close) for body in written.split(syntax.markers.open)[1:]]
    expected = [read_call(PROBE.name, PROBE_ARGUMENTS)]
    for calls, rest in (syntax.parse(body, [PROBE]) for body in bodies):
        if [call._replace(id=None) for call in calls] == expected and not (rest and syntax.markers.close):
            return True
    return False


def _before(text: str, mark: str) -> str:
    return text.split(mark)[0] if mark else text


def all_syntaxes() -> list[Syntax]:
    """Return all syntaxes, mlx-lm's last: some of its parsers read a call in nearly any text."""
    syntaxes = [GEMMA, HERMES, CODER, SEED, *LISTS, *FORMS]
    # Modules of mlx_lm.tool_parsers whose markers are tokens. The others are left out: minicpm5 and kimi_k3
    # have other markers, mistral and kimi_k2 are FORMS, laguna is glm47; json_tools, gemma4 and qwen3_coder
    # lose text that HERMES, GEMMA and CODER keep.
    library_parsers = ("glm47", "longcat", "minimax_m2", "function_gemma", "pythonic", "muse_spark")
    for name in library_parsers:
        module = import_module(f"mlx_lm.tool_parsers.{name}")  # imports MLX
        markers = Markers(module.tool_call_start, module.tool_call_end)
        syntaxes.append(Syntax(name, markers, _library_reader(module.parse_tool_call), needs_close=True))
    return syntaxes


def _library_reader(parse: Callable[[str, list[dict[str, Any]]], Any]) -> ReadCalls:
    """Return a reader that calls a parser of mlx-lm: it takes a whole body and may return several calls."""

    def read(body: str, start: int, tools: Sequence[Tool]) -> tuple[Calls, int]:
        try:
            parsed = parse(body.strip(), [definition(tool) for tool in tools])
            parsed = parsed if isinstance(parsed, list) else [parsed]
            pairs = [(call["name"], call["arguments"]) for call in parsed]
        except Exception as error:  # on other text the parsers raise anything
            raise ValueError("no call") from error
        names = {tool.name for tool in tools}  # without this check the first word of any text may be a call
        if any(name not in names or not isinstance(arguments, dict) for name, arguments in pairs):
            raise ValueError("no call of a tool")
        return [read_call(name, arguments) for name, arguments in pairs], len(body)

    return read
