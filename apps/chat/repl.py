"""The conversation: reads messages and commands until it is left."""

from __future__ import annotations

import re

from mlx_spec.apps.chat.answer import ChatState
from mlx_spec.apps.chat.arguments import Options
from mlx_spec.apps.chat.commands import Commands
from mlx_spec.apps.chat.conversation import Conversation, NoModelLeft
from mlx_spec.apps.chat.input import open_input, unquoted
from mlx_spec.apps.chat.models import PairChoice, open_pair
from mlx_spec.apps.chat.settings import AnswerSettings
from mlx_spec.apps.chat.terminal import OutputClosed
from mlx_spec.errors import SpecError
from mlx_spec.hub.catalog import DEMO

COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)  # a path such as /usr/bin is a message
HELLO = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves"
ABOUT_DEMO = (
    "a small demo model that explains the Python standard library; for a real one: /model, "
    "or --target REPO_OR_FOLDER"
)


def converse(answerer: ChatState, options: Options, settings: AnswerSettings, choice: PairChoice) -> None:
    """Load the pair and talk until the user leaves. Raises SpecError."""
    terminal, interrupts = answerer.terminal, answerer.interrupts
    terminal.note(ABOUT_DEMO if choice.target == DEMO else f"loading {choice.target}{_why(options)}")
    conversation = Conversation(open_pair(choice, think=settings.think), settings, options.system)
    desk = ChatState(conversation, answerer, terminal, interrupts, full_reports=options.stats)
    commands = Commands(desk)
    answerer.talks = True
    desk.lines = open_input(terminal, interrupts, commands.completions(), history=options.history)
    terminal.note(HELLO)
    while True:
        try:
            _take(_read(desk), desk, commands)
        except EOFError:
            return
        except KeyboardInterrupt:  # a command that waited for something
            terminal.newline()
            terminal.note("interrupted")
        except (OutputClosed, NoModelLeft):
            raise
        except SpecError as error:  # it does not end the conversation
            terminal.error(error)


def _why(options: Options) -> str:
    return ", the pair used last" if options.target is None else ""


def _read(desk: ChatState) -> str:
    try:
        with desk.interrupts.prompting():
            return desk.lines.read()
    except KeyboardInterrupt:
        return ""


def _take(text: str, desk: ChatState, commands: Commands) -> None:
    if command := COMMAND.fullmatch(text.strip()):
        commands.run(command[1], command[2] or "")
    elif message := unquoted(text):
        desk.answer(message)
