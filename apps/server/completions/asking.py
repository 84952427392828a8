"""From the body of a completion request to what the worker is asked."""

from __future__ import annotations

from typing import Any

from mlx_spec.apps.server.ask import Ask, Raw
from mlx_spec.apps.server.completions.fields import Body
from mlx_spec.apps.server.failures import invalid, unsupported
from mlx_spec.apps.server.fields import (
    check_options,
    choices_of,
    format_of,
    max_tokens_of,
    prediction_of,
    sampling_of,
    stop_of,
)
from mlx_spec.apps.server.settings import Limits

MAX_TOKENS = 16  # OpenAI's own default
WANTED = "give a text, a list of texts, a list of tokens, or a list of those"


def ask_of(body: Body, model: str, limits: Limits) -> Ask:
    """The request. Raises Failure (400) for what cannot be honoured, by name."""
    check_options(body)
    if body.suffix:
        raise unsupported("suffix: text can only be continued here, not filled in", "suffix")
    if body.best_of not in (None, 1 if body.n is None else body.n):
        raise unsupported("best_of: is not supported but where it equals n", "best_of")
    prompts = _prompts(body.prompt)
    if len(prompts) > limits.choices:
        raise invalid(f"prompt: {len(prompts)} prompts, {limits.choices} are the most", "prompt")
    given = max_tokens_of(body, 0 if body.echo else 1)
    return Ask(
        model=model,
        prompt=Raw(prompts, echo=bool(body.echo)),
        sampling=sampling_of(body),
        max_tokens=MAX_TOKENS if given is None else given,
        stop=stop_of(body, limits),
        n=choices_of(body, len(prompts), limits),
        top_logprobs=body.logprobs,
        format=format_of(body, limits),
        prediction=prediction_of(body),
    )


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    if given is None:
        raise invalid(f"prompt: is missing: {WANTED}", "prompt", "missing_required_parameter")
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise invalid(f"prompt: {WANTED}", "prompt")
    if all(isinstance(one, str) for one in given):
        return tuple(given)
    return (_tokens(given),) if _is_token(given[0]) else tuple(map(_tokens, given))


def _tokens(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not given or not all(map(_is_token, given)):
        raise invalid(f"prompt: {WANTED}, and none of them empty", "prompt")
    return tuple(given)


def _is_token(one: Any) -> bool:
    return isinstance(one, int) and not isinstance(one, bool)
