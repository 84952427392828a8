"""What a request becomes with a model: prompts as tokens, a way to sample, a way to read calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_spec import grammar
from mlx_spec.apps.server.ask import Ask, Chat, Format, ToolUse
from mlx_spec.apps.server.failures import invalid
from mlx_spec.apps.server.settings import Limits
from mlx_spec.apps.server.tools import Dialect, banned, dialect_of, lark, prompt_of
from mlx_spec.errors import InvalidValue
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling


@dataclass(frozen=True)
class Prepared:
    """A request, ready for the engine."""

    prompts: tuple[list[int], ...]
    sampling: Sampling
    dialect: Dialect | None  # in which calls are written; None: there are none to read
    prediction: tuple[int, ...] = ()


def prepare(ask: Ask, pair: Pair, limits: Limits) -> Prepared:
    """What a request is to `pair`. Raises Failure (400), or InvalidValue where the template refuses it."""
    text = pair.text
    prediction = () if ask.prediction is None else tuple(text.encode(ask.prediction))
    if isinstance(ask.prompt, Chat):
        prompts: tuple[list[int], ...] = (prompt_of(ask.prompt, text, ask.model),)
        use = ask.prompt.tools
    else:
        prompts = tuple(
            text.prompt_tokens(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in ask.prompt.prompts
        )
        use = None
    dialect = None if use is None else dialect_of(text)
    sampling = ask.sampling
    if use is not None and dialect is not None:
        bias = {**(sampling.logit_bias or {}), **banned(dialect, use)}
        sampling = replace(sampling, logit_bias=bias or None)
    asked = _format(ask, dialect, use)
    if asked is not None:
        sampling = replace(sampling, grammar=_compiled(asked, ask, pair, limits))
    reads = use is not None and use.choice != "none"
    return Prepared(prompts, sampling, dialect if reads else None, prediction)


def _format(ask: Ask, dialect: Dialect | None, use: ToolUse | None) -> Format | None:
    """What the answer must look like, for its own sake or because of the tools."""
    if use is None or dialect is None:
        return ask.format
    source = lark(dialect, use, ask.format)
    if source is None:
        return ask.format
    return Format("lark", source, "tools" if ask.format is None else ask.format.param)


def _compiled(format: Format, ask: Ask, pair: Pair, limits: Limits) -> grammar.Grammar:
    thinks = isinstance(ask.prompt, Chat) and ask.prompt.thinking
    size, seconds = pair.facts.vocab_size, limits.grammar_seconds
    try:
        return grammar.compile(format.kind, format.text, pair.text, size, seconds=seconds, thinks=thinks)
    except InvalidValue as error:
        raise invalid(str(error), format.param) from error
