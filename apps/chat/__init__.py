"""The chat program: a conversation on a terminal, or one answer to `-p` and piped text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from mlx_spec.apps.chat import read_prompt
from mlx_spec.apps.chat.arguments import Options, parse, refuse
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.terminal import ReaderLeft, Terminal, checked
from mlx_spec.apps.command import ERROR
from mlx_spec.device import require_backend
from mlx_spec.errors import InvalidValue, SpecError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns its exit status; an error of ours is one line on stderr and status 1.

    Whoever stops reading the answer ends it, in silence and with status 0. A command line that makes no
    sense raises SystemExit with status 2.
    """
    with Interrupts() as interrupts:
        options = parse(argv)
        terminal = Terminal()
        try:
            return _run(options, terminal, interrupts)
        except ReaderLeft:
            terminal.drop()
            return 0
        except SpecError as error:
            terminal.error(error)
            return ERROR


def _run(options: Options, terminal: Terminal, interrupts: Interrupts) -> int:
    prompt = read_prompt(options.prompt, terminal)
    if prompt is None and options.json:
        refuse("--json is for one answer: give -p TEXT, or pipe text to stdin")
    if options.system is not None:
        checked(options.system, "--system")
    require_backend()
    from mlx_spec.apps.chat.answer import ChatState
    from mlx_spec.apps.chat.models import choose
    from mlx_spec.apps.chat.repl import answer_once, converse
    from mlx_spec.apps.chat.report import Trace
    from mlx_spec.apps.chat.settings import from_options

    try:
        settings = from_options(options)
    except InvalidValue as error:
        refuse(str(error))
    with nullcontext() if options.trace is None else Trace(options.trace) as trace:
        answerer = ChatState(terminal, interrupts, trace, options.highlight, shows=not options.json)
        choice = choose(options)
        if prompt is None:
            converse(answerer, options, settings, choice)
            return 0
        return answer_once(answerer, options, settings, choice, prompt)
