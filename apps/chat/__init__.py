"""The chat program: a conversation on a terminal, or one answer to `-p` and piped text."""

from __future__ import annotations

import os
import select
import sys

from mlx_spec.cli.command import ERROR, program, refuse
from mlx_spec.device import require_backend
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.load import follow

from .arguments import Options
from .interrupts import Interrupts
from .terminal import Terminal, checked


def _run(options: Options) -> int:
    with Interrupts() as interrupts:
        terminal = Terminal()
        try:
            return _talk(options, terminal, interrupts)
        except SpecError as error:
            terminal.error(error)
            return ERROR


def _talk(options: Options, terminal: Terminal, interrupts: Interrupts) -> int:
    require_backend()
    from mlx_spec.distributed.ranks import join

    ranks = join()
    if ranks is not None and options.prompt is None:
        raise InvalidValue("over several machines one --prompt is answered: serve is for conversations")
    # The processes of mlx.launch have an open stdin that never ends, so it is not read.
    prompt = _read_prompt(options.prompt, None if ranks is not None else _piped_text(terminal))
    if prompt is None and options.json:
        refuse("mlx-spec chat", "--json is for one answer: give -p TEXT, or pipe text to stdin")
    if options.system is not None:
        checked(options.system, "--system")
    from .models import choose  # these need MLX
    from .repl import run

    if ranks is None:
        return run(options, prompt, terminal, interrupts, None)
    if ranks.rank:
        return ranks.run(lambda: follow(choose(options).target, ranks))
    return ranks.run(lambda: run(options, prompt, terminal, interrupts, ranks))


def _read_prompt(typed: str | None, piped: str | None) -> str | None:
    """Return the prompt followed by the piped text; None for a conversation. Raises InvalidValue."""
    if typed is None and piped is None:
        if sys.stdin is None:
            raise InvalidValue("stdin is closed, so nothing can be asked: leave it open, or use -p TEXT")
        return None
    text = "\n\n".join(stripped for stripped in ((typed or "").strip(), (piped or "").strip()) if stripped)
    if not text:
        raise InvalidValue("the prompt is empty: give -p TEXT, or pipe text to stdin")
    return checked(text, "the prompt")


def _piped_text(terminal: Terminal) -> str | None:
    """Return all of stdin; None if it is a terminal or closed. Raises InvalidValue if it is not text."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    # After two seconds without input, say what the program waits for.
    if terminal.is_watched and not _has_input(2.0):
        terminal.note("reading the prompt from stdin until its end; </dev/null if there is none")
    content = bytearray()
    try:
        while True:
            # Wait in steps of half a second: a blocking read would delay a Ctrl-C that comes just before it.
            if _has_input(0.5):
                if not (piece := os.read(sys.stdin.fileno(), 65536)):
                    return content.decode("utf-8-sig")
                content += piece
    except UnicodeDecodeError as error:
        raise InvalidValue(
            f"stdin is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}): pipe text only"
        ) from error
    except OSError as error:
        raise InvalidValue(f"cannot read stdin ({error.strerror}): pipe text, or use -p") from error


def _has_input(timeout_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


main = program("chat", Options, _run)
