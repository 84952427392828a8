"""How answers are made, and what `/set` changes of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_spec.apps.chat.arguments import MAX_TOKENS, Options
from mlx_spec.apps.command import integer, number
from mlx_spec.errors import InvalidValue
from mlx_spec.sampling import Sampling

OFF = ("off", "none", "default")


@dataclass(frozen=True)
class Settings:
    """Of all answers to come. The grammar is no part of it."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = MAX_TOKENS
    think: bool = False


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give on or off")
    return text == "on"


OF_SAMPLING: Mapping[str, Callable[[str], Any]] = {
    "temperature": number,
    "top_p": number,
    "top_k": integer(0),
    "min_p": number,
    "repetition_penalty": number,
    "presence_penalty": number,
    "frequency_penalty": number,
    "seed": integer(None),
}
OTHERS: Mapping[str, Callable[[str], Any]] = {"max_tokens": integer(1), "think": _switch}
NAMES = (*OF_SAMPLING, *OTHERS)


def settings_of(options: Options) -> Settings:
    """Those of the command line. Raises InvalidValue."""
    return Settings(replace(Sampling(), **options.sampling), options.max_tokens, options.think)


def changed(settings: Settings, name: str, text: str) -> Settings:
    """With another value, as typed; "off" is the default. Raises InvalidValue."""
    if name not in NAMES:
        raise InvalidValue(f"there is no setting {name}: there are {', '.join(NAMES)}")
    if text in OFF and name != "think":
        return _with(settings, {name: values(Settings())[name]})
    try:
        return _with(settings, {name: (OF_SAMPLING.get(name) or OTHERS[name])(text)})
    except argparse.ArgumentTypeError as error:
        raise InvalidValue(f"{name}: {error}") from error


def values(settings: Settings) -> dict[str, Any]:
    """All by name."""
    found = {name: vars(settings.sampling)[name] for name in OF_SAMPLING}
    return found | {"max_tokens": settings.max_tokens, "think": settings.think}


def from_values(given: Mapping[str, Any]) -> Settings:
    """Settings by name; those that are not given have their defaults. Raises InvalidValue."""
    known = {name: value for name, value in given.items() if name in NAMES}
    try:
        settings = _with(Settings(), known)
    except TypeError as error:
        raise InvalidValue(f"the settings cannot be used: {error}") from error
    longest, think = settings.max_tokens, settings.think
    if type(longest) is not int or longest < 1 or type(think) is not bool:
        raise InvalidValue(f"max_tokens={longest!r} and think={think!r}: give 1 or more, and true or false")
    return settings


def shown(value: object) -> str:
    """A value as `/set` takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value is None else str(value)


def _with(settings: Settings, new: Mapping[str, Any]) -> Settings:
    """Raises InvalidValue."""
    sampling = replace(settings.sampling, **{name: new[name] for name in OF_SAMPLING if name in new})
    return replace(settings, sampling=sampling, **{name: new[name] for name in OTHERS if name in new})
