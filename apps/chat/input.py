"""Read messages of the user: with a line editor on prompt_toolkit, or line by line on a dumb terminal."""

from __future__ import annotations

import base64
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from select import select

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, get_common_complete_suffix
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_completions, has_focus
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import Input, create_input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import get_term_environment_variable, is_dumb_terminal

from mlx_spec.errors import InvalidValue, NotFound

from .interrupts import CtrlC, Interrupts
from .saved import OWNER_ONLY
from .terminal import Terminal, checked

BLOCK_MARK = '"""'  # begins and ends a message of several lines
PROMPT, CONTINUATION = "> ", "… "


def read_plain(terminal: Terminal, interrupts: Interrupts) -> str:
    """Read a message line by line with input(), without an editor. Raises as `LineEditor.read`."""
    try:
        interrupts.clear()
        with interrupts.acting(CtrlC.RAISE):
            text = terminal.ask(PROMPT)
            while is_open(text):
                text += "\n" + terminal.ask(CONTINUATION)
    except (EOFError, KeyboardInterrupt):
        terminal.note("")  # end the line of the prompt
        raise
    return text


class LineEditor:
    """Reads messages with history, several lines and completion. Enter sends, Alt-Enter begins a new line."""

    def __init__(
        self,
        interrupts: Interrupts,
        completer: Completer,
        history: Path | None,
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        """Read from `input` and draw on `output`: by default stdin, and stdout if it is a terminal."""
        self._interrupts = interrupts
        self._input = input or create_input(sys.stdin)
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            input=self._input,
            output=output or _output(),
            history=InMemoryHistory() if history is None else _BestEffortHistory(str(history)),
            completer=completer,
            complete_style=CompleteStyle.COLUMN,
            complete_while_typing=False,
            key_bindings=self._keys(),
            multiline=True,
            prompt_continuation=CONTINUATION,
            enable_suspend=True,
        )

    def read(self) -> str:
        """Return a message. Raises EOFError, KeyboardInterrupt, and InvalidValue if it is not text."""
        keys = self._typed()
        store_typeahead(self._input, _unsent(keys) if self._interrupts.pressed else _sent(keys))
        # The editor handles Ctrl-C from `pre_run` on. An earlier press is forgotten: it had no line to clear.
        text = self._session.prompt(pre_run=self._interrupts.clear)
        self._take_interrupts()
        return checked(text, "this message")

    def _take_interrupts(self) -> None:
        """Set `pressed` if a Ctrl-C came after the message: it stops the answer. Keep the other keys.

        The Ctrl-C was typed, or its signal came after the editor ended and before it restored the handler.
        """
        keys = [*self._typed(), *self._session.app.key_processor.empty_queue()]
        others = [key for key in keys if key.key not in (Keys.ControlC, Keys.SIGINT)]
        store_typeahead(self._input, others)
        if len(others) < len(keys):
            self._interrupts.pressed = True

    def _typed(self) -> list[KeyPress]:
        """Return and remove the keys that the editor has not read."""
        with hidden_typing():
            unread = self._input.read_keys()
        return [*get_typeahead(self._input), *unread]

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus(DEFAULT_BUFFER)

        @keys.add("enter", filter=typing)
        def _enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if is_open(buffer.text):
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("tab", filter=typing & ~has_completions)
        def _tab(event: KeyPressEvent) -> None:
            # Complete at once, not in a task, so that text typed after the Tab comes after the completion.
            buffer, wanted = event.current_buffer, CompleteEvent(completion_requested=True)
            completions = list(buffer.completer.get_completions(buffer.document, wanted))
            if len(completions) == 1:
                buffer.apply_completion(completions[0])
            elif common := get_common_complete_suffix(buffer.document, completions):
                buffer.insert_text(common)
            else:
                buffer.start_completion()

        @keys.add("escape", "enter", filter=typing)
        def _alt_enter(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return keys


@dataclass(frozen=True)
class CommandCompleter(Completer):
    """Completes commands, and the arguments of commands."""

    commands: Completer
    arguments: Mapping[str, Completer]  # by the name of the command

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        command, space, argument = line.partition(" ")
        completer = self.arguments.get(command[1:]) if space else self.commands
        if completer is None or not line.startswith("/") or "\n" in line:
            return []
        return completer.get_completions(Document(argument.lstrip() if space else line), complete_event)


def open_input(
    terminal: Terminal, interrupts: Interrupts, completer: Completer, *, history: bool
) -> Callable[[], str]:
    """Return a function that reads a message: by an editor, or line by line on a dumb terminal or a pipe."""
    is_seen = terminal.shows_thinking or terminal.is_watched
    if not (sys.stdin and sys.stdin.isatty() and is_seen) or is_dumb_terminal():
        return partial(read_plain, terminal, interrupts)
    return LineEditor(interrupts, completer, open_history(terminal) if history else None).read


def is_open(text: str) -> bool:
    """Return True if a text begins a block of several lines with \"\"\" and does not end it."""
    text = text.strip()
    is_ended = len(text) >= 2 * len(BLOCK_MARK) and text.endswith(BLOCK_MARK)
    return text.startswith(BLOCK_MARK) and not is_ended


def unquoted(text: str) -> str:
    """Return the text between the marks of a block, or the text itself, without space around it."""
    text = text.strip()
    if text.startswith(BLOCK_MARK) and not is_open(text):
        return text[len(BLOCK_MARK) : -len(BLOCK_MARK)].strip("\n")
    return text


def _sent(keys: Sequence[KeyPress]) -> list[KeyPress]:
    """Return keys that were typed ahead, so that the terminal's newline works as Enter and sends."""
    return [KeyPress(Keys.ControlM, "\r") if key.key == Keys.ControlJ else key for key in keys]


def _unsent(keys: Sequence[KeyPress]) -> list[KeyPress]:
    """Return keys before a Ctrl-C, so that nothing is sent: Enter begins a line; at the end it is dropped."""
    enter = (Keys.ControlM, Keys.ControlJ)
    end = max((i for i, key in enumerate(keys, 1) if key.key not in enter), default=0)
    return [KeyPress(Keys.BracketedPaste, "\n") if key.key in enter else key for key in keys[:end]]


def edited(text: str) -> str:
    """Open a text in the user's editor, and return the edited text. Raises NotFound and InvalidValue."""
    nano = "nano" if shutil.which("nano") else "vi"
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or nano
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "message.md"
        file.write_text(text, encoding="utf-8")
        try:
            status = subprocess.run([*shlex.split(editor), str(file)]).returncode
            if status == 0:
                return file.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise NotFound(f"the editor {editor} cannot be used ({error}): set EDITOR to another") from error
    raise InvalidValue(f"the editor {editor} ended with status {status}, so nothing was sent")


def copied(text: str, is_terminal: bool) -> str:
    """Copy a text to the clipboard and return how. Raises NotFound without a way."""
    for command in (["pbcopy"], ["wl-copy"], ["xclip", "-selection", "clipboard"]):
        if shutil.which(command[0]):
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    command, input=text.encode(), check=True, timeout=10, stdout=subprocess.DEVNULL
                )
                return f"copied with {command[0]}"
    if not is_terminal:
        raise NotFound("there is no clipboard here: /export FILE writes the conversation")
    # Terminals that know this sequence fill the clipboard, also over ssh; they cut what is longer.
    most = 74_994  # bytes, the limit of xterm and hterm
    if len(text.encode()) > most:
        raise InvalidValue(f"an answer over {most} bytes fits no clipboard of a terminal: /export FILE")
    print(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a", end="", flush=True)
    return "copied, if this terminal lets programs use the clipboard"


@contextmanager
def hidden_typing() -> Iterator[None]:
    """Turn off the echo of keys within the context; the next prompt reads them. Ctrl-C and Ctrl-Z work."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before, hidden = termios.tcgetattr(terminal), termios.tcgetattr(terminal)
    local_modes = 3  # index in the list that tcgetattr returns
    # Without ICANON the kernel does not cut lines that are longer than its buffer.
    hidden[local_modes] = hidden[local_modes] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH

    def hide(*_: object) -> None:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(terminal, termios.TCSANOW, hidden)

    hide()
    resumed = signal.signal(signal.SIGCONT, hide)  # after Ctrl-Z the shell has changed the modes
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, resumed)
        with suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSANOW, before)


def key_waits() -> bool:
    """Return True if a typed key waits to be read. Call this within `hidden_typing`."""
    return sys.stdin is not None and sys.stdin.isatty() and bool(select([sys.stdin], [], [], 0)[0])


class _BestEffortHistory(FileHistory):
    """A history file that may fail to be read or written."""

    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeEncodeError):
            super().store_string(string)

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []


def open_history(terminal: Terminal) -> Path | None:
    """Return the file of the input history, readable by its owner only; None if it cannot be written."""
    file = user_state_path("mlx_spec") / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            file.chmod(OWNER_ONLY)
    except OSError as error:
        terminal.note(f"what you type is not kept: {file} cannot be written ({error.strerror})")
        return None
    return file


def _output() -> Vt100_Output:
    stream = sys.stdout if sys.stdout and sys.stdout.isatty() else sys.stderr
    depth = ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None
    term = get_term_environment_variable()
    output = Vt100_Output.from_pty(stream, term=term, default_color_depth=depth)
    output.enable_cpr = False  # the terminal's answer with the cursor position may come too late
    return output
