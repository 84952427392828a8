"""Chat templates, rendered as Hugging Face renders them: the same sandbox, whitespace rules and functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.hub.files import one_line, read_object

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # what templates call it; the first is the usual one

# what templates raise where messages or tools are not what they expect
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)

Message = Mapping[str, Any]  # "role", "content", and what a template may read besides


class ChatTemplate:
    """Messages to the text of a prompt."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise BadCheckpoint(f"the chat template does not compile ({one_line(error)})") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool,
        generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, special tokens included.

        `tools` are function definitions as OpenAI's API has them, `variables` more of what a template reads.
        Raises InvalidValue where the template refuses the messages, such as a role that it does not know.
        """
        # a key without a value is dropped: templates would print it as None
        kept = [{key: value for key, value in m.items() if value is not None} for m in messages]
        given = {**(variables or {}), **self._special_tokens, "enable_thinking": thinking}
        given |= {"messages": [_with_reasoning(message) for message in kept], "tools": list(tools) or None}
        given |= {"documents": None, "add_generation_prompt": generation_prompt}
        try:
            return self._template.render(given)
        except REFUSALS as error:
            message = f"the chat template refuses these messages: {one_line(error)}"
            raise InvalidValue(message) from error


def read_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a checkpoint; None if it has none. Raises BadCheckpoint for a malformed one."""
    config = _optional(folder / "tokenizer_config.json")
    source = _source(folder, config)
    if source is None:
        return None
    return ChatTemplate(source, special_tokens(folder))


def special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens of a checkpoint, such as `bos_token`."""
    named = _optional(folder / "special_tokens_map.json") | _optional(folder / "tokenizer_config.json")
    found = {key: named.get(key) for key in SPECIAL_TOKENS}
    texts = {key: v.get("content") if isinstance(v, dict) else v for key, v in found.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _optional(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    source = _optional(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {
            t["name"]: t["template"]
            for t in source
            if isinstance(t, dict) and {"name", "template"} <= t.keys()
        }
        source = named.get("default")
    return source if isinstance(source, str) else None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with its reasoning under every name that templates read."""
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012, jinja2's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
