"""The settings of answers: from the command line, from `/set`, and from saved conversations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mlx_spec.errors import InvalidValue
from mlx_spec.sampling.sampling import Sampling, checked_integer

from .arguments import Options


@dataclass(frozen=True)
class AnswerSettings(Sampling):
    """The settings of all answers to come, without the grammar, which `/json` sets."""

    max_tokens: int = Options.max_tokens
    think: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_integer("max_tokens", self.max_tokens, least=1)
        if type(self.think) is not bool:
            raise InvalidValue(f"think={self.think!r} is not allowed: give on or off")


NAMES = tuple(  # the settings that `/set` knows
    name
    for name in vars(AnswerSettings())
    if name not in ("logit_bias", "min_tokens", "late_tokens", "grammar")
)


def from_options(options: Options, of_model: Mapping[str, float] = MappingProxyType({})) -> AnswerSettings:
    """Return the settings of a command line; others are `of_model` or as usual. Raises InvalidValue."""
    typed = {name: value for name, value in vars(options).items() if value is not None}
    return from_values({**of_model, **typed})


def for_model(
    settings: AnswerSettings, before: Mapping[str, float], after: Mapping[str, float]
) -> AnswerSettings:
    """Return the settings for another model: what the model before brought is replaced by its own."""
    usual, now = values(AnswerSettings()), values(settings)
    kept = (name for name in {*before, *after} if now[name] == before.get(name, usual[name]))
    return replace(settings, **{name: after.get(name, usual[name]) for name in kept})


def sampling_words(settings: AnswerSettings, of_model: Mapping[str, float]) -> str | None:
    """Return which settings are the model's own; None if none are."""
    now = values(settings)
    if not settings.temperature:  # then filters have no effect
        of_model = {name: value for name, value in of_model.items() if name == "repetition_penalty"}
    same = [f"{name} {value:g}" for name, value in of_model.items() if now[name] == value]
    if not same:
        return None
    return f"sampling as in the model's generation_config.json: {', '.join(same)}; temperature 0 is greedy"


def changed(settings: AnswerSettings, name: str, text: str) -> AnswerSettings:
    """Return the settings with one typed value; "off" stands for the default. Raises InvalidValue."""
    if name not in NAMES:
        raise InvalidValue(f"there is no setting {name}: there are {', '.join(NAMES)}")
    is_default = text in ("off", "none", "default") and name != "think"
    value: Any = vars(AnswerSettings())[name] if is_default else _typed(name, text)
    if name == "temperature" and value > 2:  # the bound of OpenAI's API and of the page
        raise InvalidValue(f"temperature={value:g} is not allowed: it is 0 to 2")
    return replace(settings, **{name: value})


def values(settings: AnswerSettings) -> dict[str, Any]:
    """Return all values by name."""
    return {name: vars(settings)[name] for name in NAMES}


def from_values(by_name: Mapping[str, Any]) -> AnswerSettings:
    """Return the settings with these values; other settings have their defaults. Raises InvalidValue."""
    try:
        return AnswerSettings(**{name: value for name, value in by_name.items() if name in NAMES})
    except TypeError as error:
        raise InvalidValue(f"the settings cannot be used: {error}") from error


def shown(value: object) -> str:
    """Return a value as `/set` takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value is None else str(value)


def _typed(name: str, text: str) -> bool | int | float:
    """Return a typed value as a bool or a number. `AnswerSettings` checks later whether it is allowed."""
    if text in ("on", "off"):
        return text == "on"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    wanted = "on or off" if name == "think" else "a number"
    raise InvalidValue(f"{name}: {text!r} is not allowed: give {wanted}")
