"""The grammar of a request: what its response format and its tools demand of the answer."""

from __future__ import annotations

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Grammar
from mlx_spec.text import Text

from .errors import LOG, invalid
from .models import CompileGrammar
from .request import Chat, GenerationRequest, OutputFormat, ToolUse
from .tool_formats import ToolFormat
from .tool_grammar import answer_grammar, answer_schema, compile_failure, is_optional


def request_grammar(
    request: GenerationRequest,
    text: Text,
    use: ToolUse | None,
    dialect: ToolFormat | None,
    compile: CompileGrammar,
) -> Grammar | None:
    """Return the grammar of what the request asks for, combined with what its tools need.

    None if all is free, or if the grammar is that of calls, only wanted, and does not compile.
    """
    format = request.format
    if use is not None and dialect is not None:
        calls = answer_grammar(dialect, use, format)
        if calls is not None:
            format = OutputFormat("lark", calls, "tools" if format is None else format.param)
    if format is None:
        return None
    source = answer_schema(format.text) if format.kind == "json_schema" else format.text
    try:
        found = compile(format.kind, source)
    except InvalidValue as error:
        if use is not None and dialect is not None and is_optional(use, request.format):
            LOG.warning("calls of tools are not constrained: their schemas cannot be enforced")
            return None
        if format is not request.format:
            raise compile_failure(error, format.param) from error
        raise invalid(str(error), format.param) from error
    thinks = isinstance(request.prompt, Chat) and (request.prompt.thinking or not text.thinks)
    found = found.thinking(thinks)  # some models cannot be asked not to
    if use is not None and dialect is not None and use.choice == "auto" and request.format is None:
        found = found.with_calls(dialect.open, dialect.close)
    return found
