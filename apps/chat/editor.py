"""The line editor of a conversation, on prompt_toolkit: history, several lines, completion."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import Input, create_input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import get_term_environment_variable, is_dumb_terminal

from mlx_spec.apps.chat.input import MORE, PROMPT, CommandCompleter, hidden_typing, is_open
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.terminal import checked


def is_dumb() -> bool:
    """Whether the terminal cannot move its cursor."""
    return is_dumb_terminal()


class Editor:
    """Reads messages. Enter sends, Alt-Enter begins a new line; with `blocks` it is the other way round."""

    def __init__(self, interrupts: Interrupts, completions: CommandCompleter, history: Path | None) -> None:
        self.blocks = False
        self._interrupts = interrupts
        self._input = create_input(sys.stdin)
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            input=self._input,
            output=_output(),
            history=InMemoryHistory() if history is None else _Kept(str(history)),
            completer=_Completer(completions),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            reserve_space_for_menu=0,
            key_bindings=self._keys(),
            multiline=True,
            prompt_continuation=MORE,
            enable_suspend=True,
        )

    def read(self) -> str:
        """A message as it was typed. Raises EOFError, KeyboardInterrupt, and InvalidValue."""
        # As a key Ctrl-C is read by the editor. As a signal it is our own handler's: prompt_toolkit's loses
        # those that come while its application starts or ends.
        with self._interrupts.editing(self._leave_soon):
            text = self._session.prompt(handle_sigint=False, pre_run=self._leave_if_pressed)
        with hidden_typing():  # Ctrl-C is a signal again; as a key it may still be among what was not read
            behind = self._input.read_keys()
        if _pressed_ahead(self._input, behind):
            self._interrupts.press()
        return checked(text, "this message")

    def _leave_soon(self) -> None:
        # In a signal handler, so in the midst of anything: the application ends in a callback of its own.
        if loop := self._session.app.loop:
            loop.call_soon_threadsafe(self._leave_if_pressed)

    def _leave_if_pressed(self) -> None:
        application = self._session.app
        if self._interrupts.pressed and application.future and not application.future.done():
            application.exit(exception=KeyboardInterrupt, style="class:aborting")

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus(DEFAULT_BUFFER)

        @keys.add("enter", filter=typing)
        def _enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            is_command = buffer.text.startswith("/") and "\n" not in buffer.text
            if is_open(buffer.text) or (self.blocks and not is_command):
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=typing)
        def _alt_enter(event: KeyPressEvent) -> None:
            if self.blocks:
                event.current_buffer.validate_and_handle()
            else:
                event.current_buffer.insert_text("\n")

        return keys


class _Completer(Completer):
    def __init__(self, completions: CommandCompleter) -> None:
        self._completions = completions

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Those of the text before the cursor."""
        for text, length in self._completions.of(document.text_before_cursor):
            yield Completion(text, start_position=-length)


class _Kept(FileHistory):
    """A history on the disk; what cannot be written there is not kept."""

    def store_string(self, string: str) -> None:
        """Add an entry."""
        with suppress(OSError, UnicodeEncodeError):
            super().store_string(string)

    def load_history_strings(self) -> Iterable[str]:
        """All entries, the newest first."""
        try:
            return list(super().load_history_strings())
        except OSError:
            return []


def _output() -> Vt100_Output:
    """The terminal on stdout, or else on stderr, never asked where its cursor is: it may answer too late."""
    stream = sys.stdout if sys.stdout and sys.stdout.isatty() else sys.stderr
    output = Vt100_Output.from_pty(stream, term=get_term_environment_variable())
    output.enable_cpr = False
    return output


def _pressed_ahead(input: Input, behind: list[KeyPress]) -> bool:
    """Whether Ctrl-C was pressed behind the end of the message. It is taken, the rest is kept for later."""
    keys = [*get_typeahead(input), *behind]
    rest = [key for key in keys if key.key is not Keys.ControlC]
    store_typeahead(input, rest)
    return len(rest) < len(keys)
