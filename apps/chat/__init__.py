"""The chat program: a conversation on a terminal, or one answer to `-p` and piped text."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.apps.chat.arguments import Options, parse, refuse
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.prompt import read_prompt
from mlx_spec.apps.chat.terminal import Terminal, checked
from mlx_spec.backend import require_backend
from mlx_spec.errors import InvalidValue, SpecError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns its exit status; an error of ours is one line on stderr and status 1.

    A command line that makes no sense raises SystemExit with status 2.
    """
    with Interrupts() as interrupts:
        options = parse(argv)
        terminal = Terminal()
        try:
            return _run(options, terminal, interrupts)
        except SpecError as error:
            terminal.error(error)
            return 1


def _run(options: Options, terminal: Terminal, interrupts: Interrupts) -> int:
    prompt = read_prompt(options.prompt, terminal)
    if options.system is not None:
        checked(options.system, "--system")
    require_backend()
    from mlx_spec.apps.chat.answer import Answerer  # these need MLX
    from mlx_spec.apps.chat.models import pair_of, sampling_of
    from mlx_spec.apps.chat.repl import converse

    try:
        sampling = sampling_of(options)
    except InvalidValue as error:
        refuse(str(error))
    answerer = Answerer(options, sampling, terminal, interrupts)
    if prompt is None:
        return converse(answerer)
    return answerer.answer(pair_of(options).session(options.system), prompt)
