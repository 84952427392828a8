"""From names to a loaded pair: the one that is asked for, or the one used last."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_spec import load
from mlx_spec.apps.chat.arguments import Options
from mlx_spec.apps.chat.settings import last_used_file
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.hub.catalog import DEMO, LOOKUP, NONE, made_for
from mlx_spec.hub.files import write_atomically
from mlx_spec.pair import Pair, Policies
from mlx_spec.policies import always


@dataclass(frozen=True)
class Choice:
    """What to load, as `load` takes it."""

    target: str
    drafter: str | None = None
    num_draft_tokens: int | None = None
    kv_bits: int | None = None


@dataclass(frozen=True)
class Model:
    """A loaded pair."""

    choice: Choice
    pair: Pair
    free: Policies | None  # its own, where it was loaded to draft what pays


def choice_of(options: Options) -> Choice:
    """What the command line asks for; without a target the pair used last, or else the demo."""
    target, drafter = options.target, options.drafter
    if target is None:
        found = used_last() or Choice(DEMO)
        target, drafter = found.target, found.drafter if drafter is None else drafter
    return Choice(target, drafter, options.num_draft_tokens, options.kv_bits)


def opened(choice: Choice, *, think: bool = False) -> Model:
    """Load it and remember it. Raises SpecError; InvalidValue if it is to think and cannot."""
    pair = load(
        choice.target,
        choice.drafter,
        num_draft_tokens=choice.num_draft_tokens,
        kv_bits=choice.kv_bits,
    )
    if think:
        check_thinking(pair)
    _remember(choice)
    return Model(choice, pair, pair.policies if choice.num_draft_tokens is None else None)


def check_thinking(pair: Pair) -> None:
    """Raise InvalidValue for a target that cannot be asked to think."""
    if not pair.text.thinks:
        raise InvalidValue(
            f"{pair.info.target} cannot be asked to think first: leave out --think, or /set think off"
        )


def drafting(choice: Choice, word: str) -> Choice:
    """The same model with other drafts: auto, off, lookup or a number. Raises InvalidValue."""
    own = None if choice.drafter in (LOOKUP, NONE) else choice.drafter
    match word:
        case "auto":
            return replace(choice, drafter=own, num_draft_tokens=None)
        case "off":
            return replace(choice, num_draft_tokens=0)
        case "lookup":
            return replace(choice, drafter=LOOKUP, num_draft_tokens=None)
    if not word.isdecimal() or not 0 <= int(word) <= 16:
        raise InvalidValue(f"/draft {word} is not known: give auto, off, lookup or 1 to 16")
    drafter = own if choice.drafter == NONE else choice.drafter
    return replace(choice, drafter=drafter, num_draft_tokens=int(word))


def redrafted(model: Model, choice: Choice) -> Model | None:
    """The loaded weights with the drafts of `choice`; None where others are needed."""
    if replace(choice, num_draft_tokens=model.choice.num_draft_tokens) != model.choice:
        return None
    number = choice.num_draft_tokens
    has_drafter = bool(model.pair.drafter_names)
    if number is None:
        policies = model.free
    else:
        policies = always(number if has_drafter else 0, disabled=has_drafter or choice.drafter == NONE)
    if policies is None:
        return None
    model.pair.policies = policies
    return replace(model, choice=choice)


def used_last() -> Choice | None:
    """The real pair that this program used last, or else the cached one that was; None without one."""
    remembered = _remembered()
    if remembered is not None and _is_here(remembered):
        return remembered
    from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair
    from mlx_spec.hub.local import local_models, partners

    models = [model for model in local_models() if model.problem is None and model.origin != "bundled"]
    for model in sorted(models, key=lambda model: model.last_used, reverse=True):
        found = model.found
        if isinstance(found, ConvertedPair) and found.drafter is not None:
            return Choice(model.name)
        if isinstance(found, CheckpointInfo) and not model.is_drafter:
            own, here = made_for(model.name), partners(model, models)
            if here:
                return Choice(model.name, None if own in here else here[0])
    return None


def _remember(choice: Choice) -> None:
    """Keep what was loaded, where that can be written; the demo and plain decoding are no pair of ours."""
    if choice.target == DEMO or choice.drafter in (LOOKUP, NONE):
        return
    names = {"target": _lasting(choice.target), "drafter": choice.drafter and _lasting(choice.drafter)}
    file = last_used_file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"version": 1, **names}) + "\n")


def _remembered() -> Choice | None:
    try:
        found = json.loads(last_used_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    target, drafter = found.get("target"), found.get("drafter")
    if not isinstance(target, str) or not isinstance(drafter, str | None):
        return None
    return Choice(target, drafter)


def _lasting(name: str) -> str:
    """A path as it is from everywhere."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def _is_here(choice: Choice) -> bool:
    """Whether it can be loaded without a download."""
    drafter = choice.drafter or made_for(choice.target)
    return all(map(is_local, [choice.target, *([drafter] if drafter else [])]))


def is_local(name: str) -> bool:
    """Whether a folder or a repository is complete on this disk."""
    from mlx_spec import hub

    if Path(name).expanduser().is_dir():
        return True
    with suppress(SpecError):
        return hub.cached(name) is not None
    return False
