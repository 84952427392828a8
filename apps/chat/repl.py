"""Hold a conversation until the user leaves, or give one answer. This module needs MLX."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from mlx_spec.checkpoint.files import human_bytes, typed_path
from mlx_spec.cli.command import INTERRUPTED, refuse
from mlx_spec.device.blas import blas_hint
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.hub.catalog import DEMO, SMOLLM2, SMOLLM2_BYTES
from mlx_spec.policy import FixedPolicy

from ..listing import expected_gain
from ..roofline import this_chip
from . import saved
from .answer import ChatState, Outcome, Trace, as_json
from .arguments import Options
from .commands import Commands
from .conversation import Conversation, NoModelLeft
from .input import open_input
from .interrupts import CtrlC, Interrupts
from .models import choose, open_pair, used_last
from .pictures import shown
from .settings import from_options, sampling_words
from .terminal import Terminal

if TYPE_CHECKING:
    from mlx_spec.distributed.ranks import Ranks


def run(
    options: Options, prompt: str | None, terminal: Terminal, interrupts: Interrupts, ranks: Ranks | None
) -> int:
    """Answer the prompt, or talk until the user leaves. Returns the exit status. Raises SpecError."""
    try:
        settings = from_options(options)
        FixedPolicy(options.num_draft_tokens or 0)  # refuses a number that is too large
    except InvalidValue as error:
        refuse("mlx-spec chat", str(error))
    if options.highlight and not terminal.has_styles:
        raise InvalidValue("--highlight: there are no colours here: use a terminal with them, unset NO_COLOR")
    is_kept = not options.no_history and (prompt is None or options.continued)
    with (
        nullcontext() if options.trace is None else Trace(options.trace) as trace,
        closing(saved.Journal(saved.kept_folder() if is_kept else None, terminal.note)) as journal,
    ):
        kept = saved.newest() if options.continued else None
        past = None if kept is None else saved.read(kept)
        choice = choose(options, past)
        if prompt is None:
            remembered = ", the pair used last" if options.chosen is None and past is None else ""
            is_demo = choice.target == DEMO
            terminal.note(about_demo() if is_demo else f"loading {choice.target}{remembered}")
        with nullcontext() if prompt is not None else terminal.working("loading"):
            first = open_pair(choice, think=settings.think, ranks=ranks)
        if prompt is None and (hint := blas_hint()):
            terminal.note(hint)
        of_model = first.tokenizer.generation.sampling
        settings = from_options(options, of_model)
        if not options.json and past is None and (words := sampling_words(settings, of_model)):
            terminal.note(words)
        talk = Conversation(
            first, choice, settings, options.system, None if options.no_earlier_answers else ""
        )
        del first  # the conversation holds the only reference: /model frees the pair before it loads another
        chat = ChatState(
            talk,
            terminal,
            interrupts,
            journal,
            trace,
            highlight=options.highlight,
            full_reports=options.stats,
            shows_answers=not options.json,
            is_interactive=prompt is None,
        )
        if kept is not None and past is not None:
            defaults = vars(Options())
            typed = {name: value for name, value in vars(options).items() if value != defaults.get(name)}
            chat.conversation.load(past | {"settings": past["settings"] | typed})
            if options.system is not None:
                chat.conversation.change_system(options.system)
            journal.go_on(kept, chat.conversation.save())
        for file in options.image or ():
            chat.attach(typed_path(file))
        if prompt is None:
            if past is not None:
                terminal.note(f"{saved.turns(past['messages'])} loaded, the last question was:")
                terminal.note(*[shown(turn["content"]) for turn in past["messages"][-2:-1]])
            _converse(chat, history=not options.no_history)
            return 0
        answered = (
            _answer_as_json(chat, prompt)
            if options.json
            else _status(chat.answer_and_report(chat.with_pictures(prompt)))
        )
        journal.keep(chat.conversation.save())
        return answered


def about_demo() -> str:
    """Return what the demo is, and, if its gain would be small on this chip, which model to use instead."""
    about = "This is a small demo model that explains the Python standard library. "
    chip = this_chip()
    gain = None if chip is None else expected_gain(DEMO, chip)
    if gain is not None and gain < 1.2 and used_last() is None:  # below it, speculation is hard to see
        return (
            f"{about}It is so tiny that drafts should make it only {gain:.2f} × as fast on this "
            f"{chip and chip.name}. /model {SMOLLM2} fetches a real model of {human_bytes(SMOLLM2_BYTES)}, "
            "and asks first."
        )
    return f'{about}Try "What does zip do?". /model {SMOLLM2} takes a real one, and /model lists others.'


def _converse(chat: ChatState, *, history: bool) -> None:
    commands = Commands(chat)
    read = open_input(chat.terminal, chat.interrupts, commands.completer(), history=history)
    chat.terminal.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    with chat.interrupts.acting(CtrlC.NOTE):
        while True:
            try:
                _take_line(chat, commands, read)
            except EOFError:
                return
            except NoModelLeft:
                raise
            except SpecError as error:  # it does not end the conversation
                chat.terminal.error(error)
            chat.journal.keep(chat.conversation.save())


def _take_line(chat: ChatState, commands: Commands, read: Callable[[], str]) -> None:
    """Read a message or a command and act on it. Raises SpecError, and EOFError to leave."""
    try:
        text = read()
    except KeyboardInterrupt:
        chat.terminal.note("Ctrl-D or /exit leaves")
        return
    # A path such as /usr/bin is a message.
    if command := re.fullmatch(r"/([a-z?]+)(?:\s+(.*))?", text.strip(), re.DOTALL | re.IGNORECASE):
        try:
            with chat.interrupts.acting(CtrlC.RAISE):
                commands.run(command[1].lower(), command[2] or "")
        except KeyboardInterrupt:  # it waited for a file or the network
            chat.terminal.note("", "interrupted")
    elif (word := text.strip()).lower() in ("exit", "quit", "bye", "q", "help", "?"):
        hint = "help" if word.lower() in ("help", "?") else "exit"
        chat.terminal.note(f'/{hint} is the command; """{word}""" sends the word to the model')
    elif message := chat.message(text):
        chat.answer_and_report(message)


def _answer_as_json(chat: ChatState, prompt: str) -> int:
    outcome = chat.answer(chat.with_pictures(prompt))
    fields = as_json(outcome, chat.conversation.pair.info)
    chat.terminal.piece(json.dumps(fields, ensure_ascii=False) + "\n", "answer")
    return _status(outcome)


def _status(outcome: Outcome) -> int:
    return INTERRUPTED if outcome.is_interrupted else 0
