"""What a request becomes with a model: prompts as tokens, a way to sample, a way to read calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_spec.apps.server.ask import Ask, Chat, Format, ToolUse
from mlx_spec.apps.server.failures import invalid
from mlx_spec.apps.server.grammars import Grammars
from mlx_spec.apps.server.settings import Limits
from mlx_spec.apps.server.tool_formats import ToolFormat, chat_prompt, find_tool_format
from mlx_spec.apps.server.tool_grammar import answer_grammar, coerce_one_of, tool_call_ban
from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Grammar
from mlx_spec.sampling import Sampling
from mlx_spec.text import Text


@dataclass(frozen=True)
class Prepared:
    """A request, ready for the engine."""

    prompts: tuple[list[int], ...]
    sampling: Sampling
    dialect: ToolFormat | None  # in which calls are written; None: there are none to read
    prediction: tuple[int, ...] = ()


def prepare(ask: Ask, text: Text, grammars: Grammars, limits: Limits) -> Prepared:
    """What a request is to the model of `text` and `grammars`. Touches nothing of MLX.

    Raises Failure (400), or InvalidValue where the template refuses it.
    """
    prompts = prompts_of(ask, text)
    prediction = () if ask.prediction is None else tuple(text.encode(ask.prediction))
    use = ask.prompt.tools if isinstance(ask.prompt, Chat) else None
    dialect = None if use is None else find_tool_format(text)
    sampling = ask.sampling
    if use is not None and dialect is not None:
        bias = {**(sampling.logit_bias or {}), **tool_call_ban(dialect, use)}
        sampling = replace(sampling, logit_bias=bias or None)
    asked = _format(ask, dialect, use)
    if asked is not None:
        sampling = replace(sampling, grammar=_compiled(asked, ask, grammars, limits))
    reads = use is not None and use.choice != "none"
    return Prepared(prompts, sampling, dialect if reads else None, prediction)


def prompts_of(ask: Ask, text: Text) -> tuple[list[int], ...]:
    """The tokens of each prompt. Raises Failure (400), or InvalidValue where the template refuses it."""
    if isinstance(ask.prompt, Chat):
        return (chat_prompt(ask.prompt, text, ask.model),)
    return tuple(
        text.prompt_tokens(prompt) if isinstance(prompt, str) else list(prompt)
        for prompt in ask.prompt.prompts
    )


def _format(ask: Ask, dialect: ToolFormat | None, use: ToolUse | None) -> Format | None:
    """What the answer must look like, for its own sake or because of the tools."""
    if use is None or dialect is None:
        return ask.format
    source = answer_grammar(dialect, use, ask.format)
    if source is None:
        return ask.format
    return Format("lark", source, "tools" if ask.format is None else ask.format.param)


def _compiled(format: Format, ask: Ask, grammars: Grammars, limits: Limits) -> Grammar:
    thinks = isinstance(ask.prompt, Chat) and ask.prompt.thinking
    source = coerce_one_of(format.text) if format.kind == "json_schema" else format.text
    try:
        found = grammars.compiled(format.kind, source, seconds=limits.grammar_seconds)
        return found.thinking(thinks)
    except InvalidValue as error:
        raise invalid(str(error), format.param) from error
