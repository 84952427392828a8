"""Collect the turns of a conversation from the messages of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import invalid_field
from .parsing import MAX_SHOWN_CHARS, PARAGRAPH, parse_object, required
from .request import Chat, PictureFile, ToolUse


class ConversationBuilder:
    """Collects the turns of a conversation, as chat templates take them.

    Neighbours with the same role become one turn, except results of tools. Texts of a user or the system are
    joined as paragraphs, texts of the model as they were generated. The content of a turn with pictures is a
    list of parts. Templates only take texts as results of tools, so pictures of a result begin the next turn
    of the user. A call whose arguments are not a JSON object becomes text: a client sends such a call back
    after a stream that was cut at its limit.
    """

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []
        self.param = "messages"  # the field of the body that is being read
        self._params: list[str] = []  # where each turn begins
        self._shown: list[PictureFile] = []  # by the results of tools, for the next turn of the user
        self._names: dict[str, str | None] = {}  # functions by the ids of calls; None: the call became text

    def add(self, role: str, *contents: str | PictureFile, thinking: str | None = None) -> dict[str, Any]:
        """Add texts and pictures to the turn of a role. Return the turn.

        Leaves out the line of accounting that Claude Code writes before its system prompt. It differs between
        sessions, so the prompt after it would never be found in a cache.
        """
        if role == "system" and contents:
            accounting = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
            texts = [each for each in contents if isinstance(each, str)]
            contents = tuple(t for each in texts if (t := accounting.sub("", each, count=1)) or t == each)
            if not contents:
                return {}
        if self._shown:
            shown, self._shown = self._shown, []
            if role == "user":
                contents = (*shown, *contents)
            else:
                self.add("user", *shown)
        if not self.turns or self.turns[-1]["role"] != role:
            self._append({"role": role, "content": None})
        turn = self.turns[-1]
        if contents:
            turn["content"] = _joined(turn["content"], contents, "" if role == "assistant" else PARAGRAPH)
        if thinking:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thinking
        return turn

    def add_call(self, id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        parsed = parse_object(arguments or "{}") if isinstance(arguments, str) else arguments
        turn = self.add("assistant")
        if parsed is None:
            turn["content"] = PARAGRAPH.join(filter(None, [turn["content"], f"{name} {arguments}"]))
        else:
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": parsed}}
            turn.setdefault("tool_calls", []).append(call)
        self._names[id] = None if parsed is None else name

    def add_result(self, id: str | None, contents: Sequence[str | PictureFile], field: str) -> None:
        """Add the result of an earlier tool call. Raises Failure (400) that names `field`, the id's field."""
        id = required(id, field)
        if id not in self._names:
            raise invalid_field(field, f"there is no call {id[:MAX_SHOWN_CHARS]!r} before it")
        if (name := self._names[id]) is None:
            self.add("user", *contents)
        else:
            self.add_output(id, name, contents)

    def add_output(self, id: str, name: str, contents: Sequence[str | PictureFile]) -> None:
        """Add the result of a tool, with or without an earlier call."""
        text = PARAGRAPH.join(each for each in contents if isinstance(each, str))
        shown = [each for each in contents if isinstance(each, PictureFile)]
        self._shown += shown
        text = text or ("The result is the picture that follows." if shown else "")
        self._append({"role": "tool", "tool_call_id": id, "name": name, "content": text})

    def chat(self, tools: ToolUse | None, thinking: bool | None, variables: Mapping[str, Any]) -> Chat:
        if self._shown:
            self.add("user")
        return Chat(tuple(self.turns), tools, thinking, variables, tuple(self._params))

    def _append(self, turn: dict[str, Any]) -> None:
        self.turns.append(turn)
        self._params.append(self.param)


def _joined(before: Any, contents: Sequence[str | PictureFile], glue: str) -> str | list[dict[str, Any]]:
    """Return the content of a turn with more: one text, or parts if there are pictures."""
    if not isinstance(before, list):
        texts = [each for each in (before, *contents) if isinstance(each, str)]
        if len(texts) == len(contents) + (before is not None):
            return glue.join(texts)
        before = [] if before is None else [{"type": "text", "text": before}]
    return [*before, *map(_content_part, contents)]


def _content_part(content: str | PictureFile) -> dict[str, Any]:
    """Return a text or picture as a part of a message."""
    key = "text" if isinstance(content, str) else "image"
    return {"type": key, key: content}
