"""How a model writes calls: the format whose parser reads what the model's own chat template writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from mlx_spec.apps.server.request import Tool
from mlx_spec.apps.server.tools import coder, coder_grammar, gemma, gemma_grammar, hermes
from mlx_spec.apps.server.tools.lark import Rules
from mlx_spec.apps.server.tools.source import Arguments, Named, Parser
from mlx_spec.errors import InvalidValue
from mlx_spec.reading import Marks
from mlx_spec.text import Text

NAME, RESULT = "probe_of_calls", "result of the probe"
ARGUMENTS = {"place": "Bahía", "text": "two words"}
QUESTION = {"role": "user", "content": "?"}
TOOL = Tool(NAME, "A probe.", {"type": "object", "properties": {k: {"type": "string"} for k in ARGUMENTS}})


@dataclass(frozen=True)
class Format:
    """A way to write calls: a parser of what stands between the marks, and a grammar of it."""

    name: str
    marks: Marks
    parser: Callable[[Sequence[Tool]], Parser]
    grammar: Callable[[Tool, Rules], str]
    between: str = ""  # calls


FORMATS = (
    Format("gemma4", gemma.MARKS, gemma.parser, gemma_grammar.call),
    Format("hermes", hermes.MARKS, hermes.parser, hermes.grammar, "\n"),
    Format("qwen3-coder", coder.MARKS, coder.parser, coder_grammar.call, "\n"),
)


@dataclass(frozen=True)
class Dialect:
    """A format as one model has it."""

    format: Format
    open: int  # token ids of the marks
    close: int
    ends: frozenset[int]
    folds: bool  # the template reads results from the message with the calls, as "tool_responses"


_known: WeakKeyDictionary[Text, tuple[Dialect | None]] = WeakKeyDictionary()
_lock = threading.Lock()


def dialect_of(text: Text) -> Dialect | None:
    """How the model of `text` writes calls; None: its template has no calls, or in no format known here."""
    with _lock:
        if text not in _known:
            _known[text] = (_found(text),)
        return _known[text][0]


def definition(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it. Templates print the description even where there is none."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _found(text: Text) -> Dialect | None:
    call = {"id": "call_0", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    if not text.chats:
        return None
    for content in (None, ""):  # some templates do not mind one, some not the other
        written = _written(text, [QUESTION, {**calling, "content": content}])
        for format in FORMATS:
            marks = [text.token_id(mark) for mark in (format.marks.open, format.marks.close)]
            if None not in marks and NAME in written and _reads(format, written):
                folded = {**calling, "tool_responses": [{"name": NAME, "response": RESULT}]}
                folds = RESULT in _written(text, [QUESTION, folded])
                return Dialect(format, marks[0] or 0, marks[1] or 0, text.eos, folds)
    return None


def _written(text: Text, messages: list[dict[str, Any]]) -> str:
    try:
        return text.decode_raw(text.prompt(messages, tools=[definition(TOOL)]))
    except InvalidValue:
        return ""


def _reads(format: Format, written: str) -> bool:
    """Whether some part of `written` between the marks is the call. (Prompts may explain the format, too.)"""
    for part in written.split(format.marks.open)[1:]:
        parser = format.parser([TOOL])
        deltas = [*parser.feed(part.split(format.marks.close)[0]), *parser.end()]
        arguments = "".join(delta.text for delta in deltas if isinstance(delta, Arguments))
        if deltas[:1] == [Named(NAME)] and not parser.rest and json.loads(arguments) == ARGUMENTS:
            return True
    return False
