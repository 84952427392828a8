"""Chat templates, rendered as Hugging Face renders them: the same sandbox, whitespace rules and functions.

transformers' own renderer takes a second to import, and commands that only read a checkpoint do without it.
A malformed template is refused when it is read, before anything is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import one_line
from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.tokenizer.added_tokens import special_tokens
from mlx_spec.tokenizer.template_sandbox import BoundedSandbox, TemplateLimit, bounded, bounded_filter

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the names in templates, the usual one first

# Templates raise these when messages or tools are not what they expect.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    NameError,  # jinja2 writes 1e999 as inf
)

Message = Mapping[str, Any]  # "role", "content" and further keys that a template reads


class ChatTemplate:
    """Turns messages into the text of a prompt. If there are tools, `for_tools` is rendered instead."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], for_tools: ChatTemplate | None = None
    ) -> None:
        self.for_tools = for_tools
        self.source: str = source if for_tools is None else source + for_tools.source  # searched for names
        self._special_tokens = dict(special_tokens)
        self._limit: TemplateLimit | None = None  # the bound that a rendering reached
        try:
            self._template = _compiled(source)
        except (*TEMPLATE_ERRORS, SyntaxError) as error:  # jinja2 compiles a break without a loop
            raise BadCheckpoint(f"the chat template does not compile ({one_line(error)})") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool | None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt as text, special tokens included.

        Without `thinking` (None) the template decides whether the model shall think. `tools` are function
        definitions as in OpenAI's API, `variables` further variables of the template. Raises InvalidValue if
        the template refuses the messages, for example an unknown role.
        """
        if tools and self.for_tools is not None:
            return self.for_tools.render(messages, thinking=thinking, tools=tools, variables=variables)
        # Templates would print a missing value as None.
        complete = [{key: value for key, value in m.items() if value is not None} for m in messages]
        values = {
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            **({} if thinking is None else {"enable_thinking": thinking}),
            "messages": [_with_all_reasoning_keys(message) for message in complete],
            "add_generation_prompt": True,
        }
        shown = list(tools)
        try:
            return self._rendered(values, shown or None)
        except TEMPLATE_ERRORS as error:
            if not shown and (prompt := self._with_no_tools(values)) is not None:
                return prompt
            raise InvalidValue(f"the chat template refuses these messages: {one_line(error)}") from error

    def _with_no_tools(self, values: Mapping[str, Any]) -> str | None:
        """Return the prompt with an empty list of tools, which some templates need; None on error."""
        try:
            return self._rendered(values, [])
        except TEMPLATE_ERRORS:
            return None

    def _rendered(self, values: Mapping[str, Any], tools: list[Mapping[str, Any]] | None) -> str:
        """Return the prompt. A template without end is not rendered again: that takes seconds."""
        if self._limit is not None:
            raise self._limit
        with bounded() as budget:
            try:
                return self._template.render(values, tools=tools)
            except TemplateLimit as error:
                short = 10_000  # characters: the bound was not reached because of the messages
                if budget.size(values["messages"]) < short:
                    self._limit = error
                raise


def read_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """Return the chat template of a checkpoint; None if it has none. Raises BadCheckpoint if malformed."""
    try:
        named = _sources(checkpoint)
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(
            f"the chat template in {checkpoint.folder} cannot be read ({one_line(error)})"
        ) from error
    tokens = special_tokens(checkpoint)
    for_tools = named.get("tool_use")
    default = named.get("default", for_tools)
    if default is None and len(named) == 1:
        default = next(iter(named.values()))
    if default is None:
        return None
    return ChatTemplate(default, tokens, None if for_tools is None else ChatTemplate(for_tools, tokens))


def _sources(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the templates of a checkpoint by name. Files take precedence over entries of its config."""
    folder, config = checkpoint.folder, checkpoint.json("tokenizer_config.json")
    source = checkpoint.json("chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):
        source = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
    sources: dict[Any, Any] = source if isinstance(source, dict) else {"default": source}
    folders = ("chat_templates", "additional_chat_templates")  # of templates beside the default one
    files = {file.stem: file for name in folders for file in sorted((folder / name).glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    sources |= {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    return {name: text for name, text in sources.items() if isinstance(name, str) and isinstance(text, str)}


def _with_all_reasoning_keys(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@lru_cache  # compiling takes longer than reading the rest of a small model
def _compiled(source: str) -> jinja2.Template:
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = bounded_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _strftime_now(pattern: str, most: int = 2**10) -> str:
    """Return the time of now. Raises TemplateLimit for a pattern of more than `most` characters."""
    if len(pattern) > most:
        raise TemplateLimit(f"a pattern of a time has more than {most} characters")
    return datetime.now().strftime(pattern)


class _Generation(jinja2.ext.Extension):
    """Renders `{% generation %}`, which marks the text of the model for training, as its body."""

    tags = {"generation"}  # noqa: RUF012, jinja2's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
