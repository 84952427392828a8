"""The settings of answers, what `/set` changes of them, and the files of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_spec.errors import InvalidValue
from mlx_spec.sampling import Sampling

from .arguments import MAX_TOKENS, Options

DEFAULT_WORDS = ("off", "none", "default")  # as values of `/set`


@dataclass(frozen=True)
class AnswerSettings:
    """The settings of all answers to come. The grammar is not among them."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = MAX_TOKENS
    think: bool = False


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not allowed: give a number") from None


def _integer(text: str, minimum: int | None = 0) -> int:
    with suppress(ValueError):
        value = int(text)
        if minimum is None or value >= minimum:
            return value
    bound = "" if minimum is None else f" of at least {minimum}"
    raise ValueError(f"{text!r} is not allowed: give an integer{bound}")


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"{text!r} is not allowed: give on or off")
    return text == "on"


FIELDS: Mapping[str, Callable[[str], Any]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "seed": lambda text: _integer(text, None),
    "max_tokens": lambda text: _integer(text, 1),
    "think": _switch,
}
NAMES = tuple(FIELDS)
NOT_SAMPLING = ("max_tokens", "think")


def from_options(options: Options) -> AnswerSettings:
    """Return the settings of a command line. Raises InvalidValue."""
    return AnswerSettings(replace(Sampling(), **options.sampling), options.max_tokens, options.think)


def changed(settings: AnswerSettings, name: str, text: str) -> AnswerSettings:
    """Return the settings with one value as typed; "off" is the default. Raises InvalidValue."""
    if name not in NAMES:
        raise InvalidValue(f"there is no setting {name}: there are {', '.join(NAMES)}")
    if text in DEFAULT_WORDS and name != "think":
        return _replace(settings, {name: values(AnswerSettings())[name]})
    try:
        value = FIELDS[name](text)
    except ValueError as error:
        raise InvalidValue(f"{name}: {error}") from error
    return _replace(settings, {name: value})


def values(settings: AnswerSettings) -> dict[str, Any]:
    """Return all values by name."""
    return {name: vars(settings if name in NOT_SAMPLING else settings.sampling)[name] for name in NAMES}


def from_values(given: Mapping[str, Any]) -> AnswerSettings:
    """Return the settings with these values, the others at their defaults. Raises InvalidValue."""
    known = {name: value for name, value in given.items() if name in NAMES}
    try:
        settings = _replace(AnswerSettings(), known)
    except TypeError as error:
        raise InvalidValue(f"the settings cannot be used: {error}") from error
    max_tokens, think = settings.max_tokens, settings.think
    if type(max_tokens) is not int or max_tokens < 1 or type(think) is not bool:
        raise InvalidValue(
            f"max_tokens={max_tokens!r} and think={think!r}: give 1 or more, and true or false"
        )
    return settings


def shown(value: object) -> str:
    """Return a value as `/set` takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value is None else str(value)


def _replace(settings: AnswerSettings, new: Mapping[str, Any]) -> AnswerSettings:
    sampling = {name: value for name, value in new.items() if name not in NOT_SAMPLING}
    others = {name: value for name, value in new.items() if name in NOT_SAMPLING}
    return replace(settings, sampling=replace(settings.sampling, **sampling), **others)


# --- files


def typed_path(name: str) -> Path:
    """Return the path that a user typed. Raises InvalidValue."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise InvalidValue(f"{name} is in the home of nobody: give a path without ~") from error
    if "\0" in name:
        raise InvalidValue("a path cannot hold a NUL: type it again")
    return path
