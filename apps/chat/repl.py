"""The conversation on a terminal: messages, commands, one status line after each answer."""

from __future__ import annotations

import re
from collections.abc import Callable

from mlx_spec.apps.chat.answer import Answerer
from mlx_spec.apps.chat.arguments import DEMO
from mlx_spec.apps.chat.models import pair_of
from mlx_spec.apps.chat.terminal import OutputClosed
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.pair import Pair

PROMPT = "> "
COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)  # a path such as /usr/bin is a message
HELLO = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves"
ABOUT_DEMO = (
    "a small demo model that explains the Python standard library; for a real one: --target REPO_OR_FOLDER"
)


def converse(answerer: Answerer) -> int:
    """Load the pair and talk. Returns the exit status. Raises SpecError."""
    options, terminal = answerer.options, answerer.terminal
    terminal.note(ABOUT_DEMO if options.target == DEMO else f"loading {options.target}")
    repl = Repl(pair_of(options), options.system, answerer)
    terminal.note(HELLO)
    repl.run()
    return 0


class Repl:
    """Reads lines until Ctrl-D or /exit. An error in one turn does not end the conversation."""

    def __init__(self, pair: Pair, system: str | None, answerer: Answerer) -> None:
        self._pair, self._system, self._answerer = pair, system, answerer
        self._terminal, self._interrupts = answerer.terminal, answerer.interrupts
        self._session = pair.session(system)
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "help": (self._help, "this list"),
            "clear": (self._clear, "forget the conversation"),
            "system": (self._change_system, 'show the system prompt; "/system TEXT" sets it and starts anew'),
            "stats": (self._stats, "more about the last answer"),
            "exit": (self._exit, "leave, as Ctrl-D does"),
        }

    def run(self) -> None:
        """Converse. Raises OutputClosed."""
        while True:
            try:
                self._take(self._read())
            except EOFError:
                return
            except OutputClosed:
                raise
            except SpecError as error:
                self._terminal.error(error)

    def _read(self) -> str:
        try:
            with self._interrupts.prompting():
                return self._terminal.ask(PROMPT).strip()
        except KeyboardInterrupt:
            self._terminal.newline()
            return ""
        except EOFError:
            self._terminal.newline()
            raise

    def _take(self, line: str) -> None:
        if command := COMMAND.fullmatch(line):
            self._command(command[1], command[2] or "")
        elif line:
            self._answerer.answer(self._session, line)

    def _command(self, name: str, argument: str) -> None:
        if name not in self._commands:
            raise InvalidValue(f"there is no command /{name}: /help lists them")
        self._commands[name][0](argument)

    def _help(self, _: str) -> None:
        for name, (_function, text) in self._commands.items():
            self._terminal.note(f"/{name:8}{text}")
        self._terminal.note("Ctrl-C stops an answer, or clears the line")

    def _clear(self, _: str) -> None:
        self._session.clear()
        self._terminal.note("the conversation is forgotten")

    def _change_system(self, text: str) -> None:
        if not text:
            self._terminal.note(f"system prompt: {self._system}" if self._system else "no system prompt")
            return
        self._session = self._pair.session(text)
        self._system = text
        self._terminal.note("new system prompt, new conversation")

    def _stats(self, _: str) -> None:
        if not self._session.statistics.prompt_tokens:
            raise InvalidValue("there is no answer yet: ask something first")
        self._answerer.report(self._session, full=True)

    def _exit(self, _: str) -> None:
        raise EOFError
