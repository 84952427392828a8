"""The commands of a conversation. Each takes the rest of its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mlx_spec.apps.chat import conversation
from mlx_spec.apps.chat.answer import ChatState, Outcome
from mlx_spec.apps.chat.clipboard import copy
from mlx_spec.apps.chat.input import CommandCompleter
from mlx_spec.apps.chat.settings import NAMES, changed, shown, typed_path, values
from mlx_spec.apps.chat.terminal import legend
from mlx_spec.errors import InvalidValue, NotFound, SpecError


class Command(NamedTuple):
    """What a command does. Raises SpecError, and EOFError to leave."""

    run: Callable[[str], None]
    takes: str
    about: str


class Commands:
    """All of them, by name."""

    def __init__(self, desk: ChatState) -> None:
        self._desk = desk
        self._terminal = desk.terminal
        self.table: Mapping[str, Command] = {
            "help": Command(self._help, "", "this list"),
            "exit": Command(self._exit, "", "leave, as Ctrl-D does"),
            "clear": Command(self._clear, "", "forget the conversation"),
            "system": Command(self._system, "[TEXT|off]", "show the system prompt, or set it and begin anew"),
            "model": Command(self._model, "[NAME]", "list the models, or change to one and go on"),
            "draft": Command(self._draft, "auto|off|lookup|K", "what drafts, or K draft tokens a round"),
            "set": Command(self._set, "[NAME VALUE]", "list the settings of the answers, or change one"),
            "show": Command(self._show, "", "what the conversation is held with"),
            "stats": Command(self._stats, "", "more about the last answer"),
            "save": Command(self._save, "FILE", "write the conversation to a file"),
            "load": Command(self._load, "FILE", "go on with a conversation from a file"),
            "retry": Command(self._retry, "", "answer the last message again"),
            "undo": Command(self._undo, "", "forget the last message and its answer"),
            "copy": Command(self._copy, "", "put the last answer on the clipboard"),
            "multiline": Command(self._multiline, "[on|off]", "Enter begins a line, Alt-Enter sends"),
            "json": Command(self._json, "SCHEMA|off", "answers match the JSON schema in that file"),
            "highlight": Command(self._highlight, "[on|off]", "colour each token by where it came from"),
        }

    def run(self, name: str, argument: str) -> None:
        """Run one. Raises SpecError, and EOFError to leave."""
        name = {"bye": "exit", "quit": "exit", "?": "help"}.get(name, name)
        if name not in self.table:
            raise InvalidValue(f"there is no command /{name}: /help lists them")
        self.table[name].run(argument.strip())

    def completions(self) -> CommandCompleter:
        """What the Tab key completes."""
        switch = ("on", "off")
        return CommandCompleter(
            sorted(self.table),
            {
                "model": self._models,
                "draft": lambda: ("auto", "lookup", "off", *map(str, range(1, 17))),
                "set": lambda: NAMES,
                "highlight": lambda: switch,
                "multiline": lambda: switch,
                "system": lambda: ("off",),
            },
            ("save", "load", "json"),
        )

    def _models(self) -> list[str]:
        from mlx_spec.apps.chat import models

        return models.names()

    def _help(self, _: str) -> None:
        for name, command in self.table.items():
            self._terminal.note(f"/{f'{name} {command.takes}':24}{command.about}")
        self._terminal.note('""" begins and ends a message of several lines; Alt-Enter begins a line')
        self._terminal.note("Ctrl-C stops an answer, or clears the line")

    def _exit(self, _: str) -> None:
        raise EOFError

    def _clear(self, _: str) -> None:
        self._desk.conversation.session.clear()
        self._terminal.note("the conversation is forgotten")

    def _system(self, text: str) -> None:
        conversation = self._desk.conversation
        if not text:
            system = conversation.system
            self._terminal.note(f"system prompt: {system}" if system else "no system prompt")
            return
        conversation.instruct(None if text == "off" else text)
        self._terminal.note(f"{'no' if text == 'off' else 'new'} system prompt, new conversation")

    def _model(self, name: str) -> None:
        from mlx_spec.apps.chat import models

        conversation = self._desk.conversation
        if not name:
            with self._desk.interrupts.waiting():
                lines = models.listing(conversation.model.choice.target)
            for line in lines:
                self._terminal.note(line)
            return
        with self._desk.interrupts.waiting():
            wanted = models.find_model(name, conversation.model.choice)
            lines = models.describe_download(wanted) if wanted.missing else []
        if wanted.missing:
            for line in lines:
                self._terminal.note(line)
            if not self._desk.agrees("Download? [y/N] "):
                self._terminal.note("nothing was downloaded")
                return
            if not models.download(wanted):
                raise SpecError(f"{name} is not here: the conversation goes on as before")
        self._terminal.note(f"loading {wanted.choice.target}")
        conversation.switch(wanted.choice, self._desk.interrupts.loading)
        self._terminal.note(self._desk.drafts())

    def _draft(self, word: str) -> None:
        if word:
            self._desk.conversation.draft(word.lower(), self._desk.interrupts.loading)
        self._terminal.note(self._desk.drafts())

    def _set(self, text: str) -> None:
        conversation = self._desk.conversation
        name, _, value = text.partition(" ")
        if name and not value.strip() and name in NAMES:
            self._terminal.note(f"{name} {shown(values(conversation.settings)[name])}")
        elif name:
            conversation.set(changed(conversation.settings, name, value.strip()))
            self._terminal.note(f"{name} {shown(values(conversation.settings)[name])}")
        else:
            for each, current in values(conversation.settings).items():
                self._terminal.note(f"{each:20}{shown(current)}")

    def _show(self, _: str) -> None:
        for line in self._desk.described():
            self._terminal.note(line)

    def _stats(self, _: str) -> None:
        self._desk.report(self._desk.last_outcome(), full=True)

    def _save(self, name: str) -> None:
        file = conversation.file_named(name)
        conversation = self._desk.conversation
        with self._desk.interrupts.waiting():
            conversation.write(file, conversation.saved())
        self._terminal.note(f"{_turns(len(conversation.turns) // 2)} saved in {file}")

    def _load(self, name: str) -> None:
        conversation = self._desk.conversation
        with self._desk.interrupts.waiting():
            found = conversation.read(conversation.file_named(name))
        conversation.load(found)
        self._desk.last = None
        self._terminal.note(f"{_turns(len(conversation.turns) // 2)} loaded")
        if found.target != conversation.model.choice.target:
            self._terminal.note(f"it was held with {found.target}: /model {found.target} changes to that")

    def _retry(self, _: str) -> None:
        session = self._desk.conversation.session
        turn = session.undo()
        if not turn:
            raise InvalidValue("there is no message to answer again: ask something first")
        outcome: Outcome | None = None
        try:
            outcome = self._desk.answer(turn[0]["content"])
        finally:
            if outcome is None or not outcome.statistics.rounds:
                session.resume([*self._desk.conversation.turns, *turn])

    def _undo(self, _: str) -> None:
        if not self._desk.conversation.session.undo():
            raise InvalidValue("there is nothing to undo: the conversation is empty")
        self._terminal.note(f"forgotten, {_turns(len(self._desk.conversation.turns) // 2)} left")

    def _copy(self, _: str) -> None:
        turns = self._desk.conversation.turns
        if not turns:
            raise InvalidValue("there is no answer to copy: ask something first")
        text = turns[-1]["content"]
        self._terminal.note(f"{len(text)} characters copied by {copy(text)}")

    def _multiline(self, word: str) -> None:
        lines = self._desk.lines
        lines.blocks = _switched(word, lines.blocks, "/multiline")
        self._terminal.note(
            "Enter begins a line, Alt-Enter sends (commands: Enter)"
            if lines.blocks
            else "Enter sends, Alt-Enter begins a line"
        )

    def _json(self, name: str) -> None:
        conversation = self._desk.conversation
        if name == "off":
            conversation.require(None)
        elif name:
            with self._desk.interrupts.waiting():
                source = _text(typed_path(name))
            conversation.require(name, source)
        schema = conversation.schema
        self._terminal.note(f"answers match {schema.name}" if schema else "answers are free")

    def _highlight(self, word: str) -> None:
        answerer = self._desk.answerer
        wanted = _switched(word, answerer.highlights, "/highlight")
        if wanted and not self._terminal.has_styles:
            raise InvalidValue("there are no colours here: use a terminal that has them, and unset NO_COLOR")
        answerer.highlights = wanted
        if wanted:
            self._terminal.styled(legend())
        else:
            self._terminal.note("no highlighting")


def _switched(word: str, now: bool, command: str) -> bool:
    """Raises InvalidValue for what is neither on nor off; nothing is the other one."""
    if word not in ("", "on", "off"):
        raise InvalidValue(f"{command} {word} is not known: give on or off")
    return not now if not word else word == "on"


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"


def _text(file: Path) -> str:
    """Raises NotFound or InvalidValue."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound(f"{file} cannot be read ({error.strerror}): give a file with a JSON schema") from error
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{file} is not UTF-8 text: give a file with a JSON schema") from error
