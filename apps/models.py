"""`mlx-spec inspect`, `models`, `pull` and `rm`: the models on this disk and how they get there."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mlx_spec.apps.chat.terminal import Terminal
from mlx_spec.apps.command import INTERRUPTED, Parser
from mlx_spec.errors import InvalidValue, Mismatch, NotFound, SpecError

if TYPE_CHECKING:
    from mlx_spec.hub import Download

AUTO, NONE = "auto", "none"


def inspect_parser() -> Parser:
    """The options of `mlx-spec inspect`."""
    parser = Parser("inspect", "Say what a checkpoint is, without loading it.", usage=None)
    parser.add_argument("name", metavar="PATH_OR_REPO", help='a folder, a Hugging Face name, or "demo"')
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def inspect_main(arguments: Sequence[str]) -> int:
    """`mlx-spec inspect`. Returns its exit status: 1 for a checkpoint that cannot be loaded."""
    options = inspect_parser().parse_args(arguments)

    def run(terminal: Terminal) -> int:
        from mlx_spec.apps.described import as_json, description
        from mlx_spec.hub.inspect import inspect

        found = inspect(options.name)
        lines = [json.dumps(as_json(found), indent=2)] if options.json else description(found)
        _print(terminal, lines)
        return 1 if found.problem else 0

    return _guarded(run)


def models_parser() -> Parser:
    """The options of `mlx-spec models`."""
    parser = Parser(
        "models",
        "List the models on this disk: the demo, converted pairs, the Hugging Face cache.",
        usage=None,
    )
    parser.add_argument(
        "folders", metavar="FOLDER", nargs="*", type=Path, help="another folder with converted pairs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def models_main(arguments: Sequence[str]) -> int:
    """`mlx-spec models`. Returns its exit status."""
    options = models_parser().parse_args(arguments)

    def run(terminal: Terminal) -> int:
        for folder in options.folders:
            if not folder.is_dir():
                raise NotFound(f"there is no folder {folder}: give one that holds converted pairs")
        _print(terminal, _listing(options.folders, as_json=options.json))
        return 0

    return _guarded(run)


def pull_parser() -> Parser:
    """The options of `mlx-spec pull`."""
    parser = Parser("pull", "Download a target and the drafter made for it, ready to chat with.", usage=None)
    parser.add_argument(
        "name", metavar="ALIAS_OR_REPO", help="such as gemma-4-e2b, gemma-4-e2b:8bit, owner/name"
    )
    parser.add_argument(
        "--drafter",
        metavar="{auto,none,REPO}",
        default=AUTO,
        help="the drafter to fetch with it (default: auto)",
    )
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit of the target (default: main)"
    )
    return parser


def pull_main(arguments: Sequence[str]) -> int:
    """`mlx-spec pull`. Returns its exit status; 130 when interrupted, and the next one goes on from there."""
    options = pull_parser().parse_args(arguments)
    return _guarded(lambda terminal: _pull(terminal, options.name, options.drafter, options.revision))


def rm_parser() -> Parser:
    """The options of `mlx-spec rm`."""
    parser = Parser("rm", "Remove a converted pair or a repository in the Hugging Face cache.", usage=None)
    parser.add_argument("name", metavar="NAME", help="as `mlx-spec models` lists it, or an alias")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def rm_main(arguments: Sequence[str]) -> int:
    """`mlx-spec rm`. Returns its exit status: 1 if nothing was removed."""
    options = rm_parser().parse_args(arguments)
    return _guarded(lambda terminal: _remove(terminal, options.name, asks=not options.yes))


def _guarded(run: Callable[[Terminal], int]) -> int:
    """The exit status of `run`; an error of ours is one line on stderr and status 1."""
    terminal = Terminal()
    try:
        return run(terminal)
    except SpecError as error:
        terminal.error(error)
        return 1
    except KeyboardInterrupt:
        terminal.newline()
        return INTERRUPTED


def _print(terminal: Terminal, lines: list[str]) -> None:
    terminal.piece("".join(f"{line}\n" for line in lines), "answer")


def _listing(folders: list[Path], *, as_json: bool) -> list[str]:
    from mlx_spec.apps import described
    from mlx_spec.hub.files import human_bytes
    from mlx_spec.hub.local import local_models, partners

    models = local_models(folders)
    if as_json:
        entries = [
            {
                "name": model.name,
                "origin": model.origin,
                "folder": str(model.folder),
                "size": model.size,
                "last_used": model.last_used,
                "problem": model.problem,
                "partners": partners(model, models),
                "found": described.as_json(model.found),
            }
            for model in models
        ]
        return [json.dumps(entries, indent=2)]
    rows = [
        (model.name, model.origin, human_bytes(model.size), described.summary(model, partners(model, models)))
        for model in models
    ]
    return described.table(rows)


def _pull(terminal: Terminal, name: str, drafter: str, revision: str | None) -> int:
    from mlx_spec import hub
    from mlx_spec.hub.catalog import resolve
    from mlx_spec.hub.local import cache_folder

    if Path(name).expanduser().exists():
        raise InvalidValue(f"{name} is on this disk already: `mlx-spec inspect {name}` says what it is")
    pair = resolve(name)
    chosen = {AUTO: pair.drafter, NONE: None}.get(drafter, drafter)
    wanted = [(pair.target, revision), *([(chosen, None)] if chosen else [])]
    folders = {repo: hub.cached(repo, revision=rev) for repo, rev in wanted}
    plans = [hub.plan(repo, revision=rev) for repo, rev in wanted if folders[repo] is None]
    hub.check_space(" and ".join(p.name for p in plans), sum(p.missing for p in plans), cache_folder())
    for repo, folder in folders.items():
        if folder is not None:
            terminal.note(f"{repo} is here")
    with _leaving(f"interrupted: complete files are kept, `mlx-spec pull {name}` goes on from there"):
        for plan in plans:
            folders[plan.name] = _fetch(plan)
    if chosen:
        _check_fit(pair.target, chosen, folders)
    target = str(folders[pair.target]) if revision else pair.target
    _print(terminal, [_chat_command(target, chosen)])
    return 0


@contextmanager
def _leaving(message: str) -> Iterator[None]:
    """Ctrl-C says `message` and leaves at once: threads that wait for the network would hold up a return."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        os.write(2, f"\nmlx-spec: {message}\n".encode())
        os._exit(INTERRUPTED)

    previous = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _fetch(plan: Download) -> Path:
    """Download with the bars of huggingface_hub on stderr, or a line where that is no terminal."""
    from mlx_spec import hub
    from mlx_spec.hub.files import human_bytes
    from mlx_spec.hub.local import cache_folder

    here = plan.total - plan.missing
    kept = f", {human_bytes(here)} are here" if here else ""
    text = f"{plan.name}: {human_bytes(plan.missing)} to fetch{kept}, {_free(cache_folder())} free"
    print(text, f"fetching {plan.name}", sep="\n", file=sys.stderr, flush=True)
    return hub.fetch(plan)


def _free(folder: Path) -> str:
    from mlx_spec import hub
    from mlx_spec.hub.files import human_bytes

    return human_bytes(hub.free_bytes(folder))


def _check_fit(target: str, drafter: str, folders: dict[str, Path | None]) -> None:
    """Raise Mismatch if the drafter was made for another target."""
    from mlx_spec.hub.inspect import inspect_checkpoint, misfits

    head, tail = (inspect_checkpoint(folders[repo] or Path(), repo) for repo in (target, drafter))
    unfit = misfits(tail.needs, head.offers) if tail.needs else []
    if unfit:
        raise Mismatch(
            f"both are here, but {drafter} does not fit {target}, it expects {', '.join(unfit)}: "
            "use the drafter made for this target"
        )


def _chat_command(target: str, drafter: str | None) -> str:
    from mlx_spec.hub.catalog import made_for

    words = ["mlx-spec", "chat", "--target", target]
    if drafter != made_for(target):
        words += ["--drafter", drafter or NONE]
    return shlex.join(words)


def _remove(terminal: Terminal, name: str, *, asks: bool) -> int:
    from mlx_spec.hub.catalog import find_alias
    from mlx_spec.hub.files import human_bytes
    from mlx_spec.hub.local import default_folder, plan_removal

    is_folder = Path(name).exists() or (default_folder() / name).exists()
    alias = None if is_folder else find_alias(name)
    removal = plan_removal(alias.target if alias else name)
    terminal.note(f"{removal.name}: {human_bytes(removal.size)} in {removal.folder}")
    if asks:
        if not (sys.stdin and sys.stdin.isatty() and terminal.is_watched):
            raise InvalidValue("nobody can be asked here whether to remove it: add --yes")
        if not _agrees(terminal):
            terminal.note("nothing was removed")
            return 1
    removal.carry_out()
    terminal.note(f"removed, {human_bytes(removal.size)} are free again")
    if alias and alias.drafter:
        terminal.note(f"its drafter stays: `mlx-spec rm {alias.drafter}` removes that")
    return 0


def _agrees(terminal: Terminal) -> bool:
    try:
        return terminal.ask("Remove it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        terminal.newline()
        return False
