"""Chat templates, rendered as Hugging Face renders them: the same sandbox, whitespace rules and functions.

transformers' own renderer takes a second to import, and commands that only read a checkpoint do without it.
A malformed template is refused when it is read, before anything is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.hub.files import one_line, read_optional
from mlx_spec.text.added_tokens import special_tokens

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the names in templates, the usual one first

# raised by templates when messages or tools are not what they expect
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)

Message = Mapping[str, Any]  # "role", "content" and further keys that a template reads


class ChatTemplate:
    """Turns messages into the text of a prompt."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _compiled(source)
        except jinja2.TemplateError as error:
            raise BadCheckpoint(f"the chat template does not compile ({one_line(error)})") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt as text, special tokens included.

        `tools` are function definitions as in OpenAI's API, `variables` further variables of the template.
        Raises InvalidValue if the template refuses the messages, for example an unknown role.
        """
        # Templates would print a missing value as None.
        given = [{key: value for key, value in m.items() if value is not None} for m in messages]
        values = {
            **(variables or {}),
            **self._special_tokens,
            "enable_thinking": thinking,
            "messages": [_with_all_reasoning_keys(message) for message in given],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(values)
        except TEMPLATE_ERRORS as error:
            message = f"the chat template refuses these messages: {one_line(error)}"
            raise InvalidValue(message) from error


def read_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a checkpoint; None if it has none. Raises BadCheckpoint if malformed."""
    try:
        source = _source(folder)
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"the chat template in {folder} cannot be read ({one_line(error)})") from error
    return None if source is None else ChatTemplate(source, special_tokens(folder))


def _source(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    config = read_optional(folder / "tokenizer_config.json")
    source = read_optional(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):  # several templates with names
        named = [t for t in source if isinstance(t, dict) and {"name", "template"} <= t.keys()]
        source = {t["name"]: t["template"] for t in named}.get("default")
    return source if isinstance(source, str) else None


def _with_all_reasoning_keys(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@lru_cache  # compiling takes longer than reading the rest of a small model
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # no escapes for HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


class _Generation(jinja2.ext.Extension):
    """Renders `{% generation %}`, which marks the text of the model for training, as its body."""

    tags = {"generation"}  # noqa: RUF012, jinja2's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
