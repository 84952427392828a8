"""The commands of a conversation, such as /help. Each gets the rest of its line as its argument."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from prompt_toolkit.completion import PathCompleter, WordCompleter

from mlx_spec.checkpoint.files import default_folder, human_bytes, typed_path
from mlx_spec.cli.command import table
from mlx_spec.errors import InvalidValue, NotFound, SpecError
from mlx_spec.hub.catalog import LOOKUP, NONE, PairSpec
from mlx_spec.hub.names import cache_folder

from ..race import question, show_race
from . import models, pictures, saved
from .answer import ChatState, Outcome
from .input import CommandCompleter, copied, edited, hidden_typing
from .interrupts import CtrlC
from .settings import NAMES, AnswerSettings, changed, sampling_words, shown, values
from .terminal import legend

ALIASES = {"bye": "exit", "quit": "exit", "?": "help"}


class Command(NamedTuple):
    """A command. `run` may raise SpecError and KeyboardInterrupt, and EOFError to leave."""

    run: Callable[[str], None]
    takes: str  # its argument, for /help
    about: str  # for /help and completion


class Commands:
    """All commands, by name."""

    def __init__(self, chat: ChatState) -> None:
        self._chat = chat
        self._terminal = chat.terminal
        self._conversation = chat.conversation
        self._own_drafters: dict[str, str | None] = {}  # target -> the drafter that /draft auto returns to
        self.table: Mapping[str, Command] = {
            "help": Command(self._help, "", "this list"),
            "exit": Command(self._exit, "", "leave, as Ctrl-D does"),
            "clear": Command(self._clear, "", "begin a new conversation"),
            "system": Command(self._system, "[TEXT|off]", "show the system prompt, or set it and go on"),
            "model": Command(self._model, "[NAME]", "list the models, or change to one and go on"),
            "draft": Command(self._draft, "auto|off|lookup|K", "what drafts, or K draft tokens in each pass"),
            "set": Command(self._set, "[NAME VALUE]", "list the settings of the answers, or change one"),
            "show": Command(self._show, "", "what the conversation is held with"),
            "stats": Command(self._stats, "", "more about the last answer"),
            "save": Command(self._save, "FILE", "write the conversation to a file"),
            "load": Command(self._load, "[FILE|NUMBER]", "list the kept conversations, or go on with one"),
            "rename": Command(self._rename, "NUMBER NAME", "rename a kept conversation"),
            "delete": Command(self._delete, "NUMBER", "delete a kept conversation; asks first"),
            "copy": Command(self._copy, "", "copy the last answer to the clipboard"),
            "export": Command(self._export, "FILE", "write the conversation as Markdown"),
            "image": Command(self._image, "[PATH|off]", "add a picture to the next message"),
            "race": Command(self._race, "[QUESTION]", "answer it twice at once, with drafts and plain"),
            "edit": Command(self._edit, "", "change the last message in $EDITOR and send it again"),
            "retry": Command(self._retry, "", "answer the last message again"),
            "undo": Command(self._undo, "", "forget the last message and its answer"),
            "json": Command(self._json, "SCHEMA|off", "answers match the JSON schema in that file"),
            "highlight": Command(self._highlight, "[on|off]", "colour each token by where it came from"),
        }

    def run(self, name: str, argument: str) -> None:
        """Run a command, or raise InvalidValue if there is none of this name. Raises as `Command.run`."""
        name = ALIASES.get(name, name)
        if name not in self.table:
            close = difflib.get_close_matches(name, [*self.table, *ALIASES], n=1)
            way = f"did you mean /{close[0]}?" if close else "/help lists them"
            raise InvalidValue(f"there is no command /{name}: {way}")
        self.table[name].run(argument.strip())

    def completer(self) -> CommandCompleter:
        one_of, file = partial(WordCompleter, sentence=True), PathCompleter(expanduser=True)
        arguments = {
            "model": one_of(models.names),
            "draft": one_of(["auto", "lookup", "off", *map(str, range(1, 17))]),
            "set": one_of(list(NAMES)),
            "highlight": one_of(["on", "off"]),
            "system": one_of(["off"]),
            **dict.fromkeys(("save", "load", "json", "image", "export"), file),
        }
        about = {f"/{name}": command.about for name, command in sorted(self.table.items())}
        return CommandCompleter(one_of(list(about), ignore_case=True, meta_dict=about), arguments)

    def _help(self, _: str) -> None:
        for name, command in self.table.items():
            self._terminal.note(f"/{f'{name} {command.takes}':24}{command.about}")
        self._terminal.note('""" begins and ends a message of several lines; Alt-Enter begins a line')
        self._terminal.note("Ctrl-C stops an answer, twice leaves; at the prompt it clears the line")

    def _exit(self, _: str) -> None:
        raise EOFError

    def _clear(self, _: str) -> None:
        self._conversation.session.clear()
        self._chat.journal.close()
        self._chat.last = None
        self._chat.pictures.clear()
        self._terminal.note("a new conversation begins; /load lists the ones before")

    def _system(self, text: str) -> None:
        if not text:
            system = self._conversation.system
            self._terminal.note(f"system prompt: {system}" if system else "no system prompt")
            return
        self._conversation.change_system(None if text == "off" else text)
        self._terminal.note(f"{'no' if text == 'off' else 'new'} system prompt, {self._turns()} kept")

    def _model(self, name: str) -> None:
        present = self._conversation.choice
        if not name:
            self._terminal.note(*models.listing(present.target))
            return
        choice, missing = models.find_model(name, present)
        if missing:
            self._terminal.note(*models.describe_download(missing))
            if not self._confirms("Download? [y/N] "):
                self._terminal.note("nothing was downloaded")
                return
            with self._chat.interrupts.acting(CtrlC.NOTE):  # Ctrl-C is for the program that downloads
                is_complete = models.download(name)
            if not is_complete:
                raise SpecError(f"{name} is not here: the conversation goes on as before")
        self._switch(choice, f"loading {choice.target}")

    def _draft(self, word: str) -> None:
        choice = self._conversation.choice
        if choice.drafter not in (LOOKUP, NONE):
            self._own_drafters[choice.target] = choice.drafter
        if word:
            drafter = self._own_drafters.get(choice.target)
            self._switch(models.with_drafts(choice, word.lower(), drafter))
        else:
            self._terminal.note(self._drafts())

    def _set(self, text: str) -> None:
        settings = self._conversation.settings
        name, _, value = text.partition(" ")
        if not name:
            for setting, current in values(settings).items():
                self._terminal.note(f"{setting:20}{shown(current)}")
            return
        if value.strip() or name not in NAMES:
            settings = changed(settings, name, value.strip())
            self._conversation.change_settings(settings)
        self._terminal.note(f"{name} {shown(values(settings)[name])}")

    def _show(self, _: str) -> None:
        conversation = self._conversation
        info, choice = conversation.pair.info, conversation.choice
        lines = [f"model: {info.target}, {human_bytes(info.target_bytes)}"]
        if info.drafter is not None:
            lines.append(f"drafter: {info.drafter}, {human_bytes(info.drafter_bytes)}")
        lines.append(self._drafts())
        if choice.kv_bits is not None:
            lines.append(f"KV cache: {choice.kv_bits} bits")
        lines.append(f"system prompt: {conversation.system or 'none'}")
        now, usual = values(conversation.settings), values(AnswerSettings())
        settings = [f"{name} {shown(value)}" for name, value in now.items() if value != usual[name]]
        lines.append(f"settings: {', '.join(settings) or 'the usual ones'}")
        lines.append(f"answers: {conversation.schema.name if conversation.schema else 'free'}")
        used = conversation.session.statistics
        tokens = used.prompt_tokens + used.generated_tokens if conversation.turns else 0
        context = f" of {info.context_length}" if info.context_length else ""
        lines.append(f"turns: {len(conversation.turns) // 2}, at the last answer {tokens}{context} tokens")
        lines.append(f"conversations are kept in {saved.kept_folder()}, models in {default_folder()} and ")
        lines[-1] += f"{cache_folder()}: /delete and `mlx-spec rm` remove them, or delete the folders"
        self._terminal.note(*lines)

    def _stats(self, _: str) -> None:
        if self._chat.last is None:
            raise InvalidValue("there is no answer yet: ask something first")
        self._chat.report(self._chat.last, full=True)

    def _save(self, name: str) -> None:
        file, now = saved.file_named(name), self._conversation.save()
        if before := saved.replaced(file):
            messages = before["messages"]
            question = f"{file} holds another conversation ({saved.turns(messages)}): replace it? [y/N] "
            if messages != now["messages"][: len(messages)] and not self._confirms(question):
                self._terminal.note("nothing was saved: take another name")
                return
        saved.write(file, now)
        self._terminal.note(f"{self._turns()} saved in {file}")

    def _load(self, name: str) -> None:
        if not name:
            if rows := saved.kept_rows():
                self._terminal.note(*table(rows, right=(0,)), "/load NUMBER or NAME goes on with one")
            else:
                self._terminal.note(f"no conversation was kept in {saved.kept_folder()} yet")
            return
        file = saved.find(name)
        content = saved.read(file)
        try:
            self._conversation.load(content)
        except InvalidValue as error:
            raise InvalidValue(f"{file} cannot be continued: {error}") from error
        self._chat.journal.go_on(file, self._conversation.save())
        self._chat.last = None
        self._terminal.note(f"{self._turns()} loaded")
        target = content.get("target")
        if isinstance(target, str) and target != self._conversation.choice.target:
            self._terminal.note(f"it was held with {target}: /model {target} changes to that")

    def _rename(self, words: str) -> None:
        name, _, new = words.partition(" ")
        if not new.strip():
            raise InvalidValue("give a number or name and the new name: /load lists the kept conversations")
        self._terminal.note(f"it is named {saved.rename(saved.find_kept(name), new.strip()).stem} now")

    def _delete(self, name: str) -> None:
        if not name:
            raise InvalidValue("give a number or name: /load lists the kept conversations")
        file = saved.find_kept(name)
        if not self._confirms(f"Delete {file.stem} ({saved.turns(saved.read(file)['messages'])})? [y/N] "):
            self._terminal.note("nothing was deleted")
            return
        saved.delete(file)
        self._chat.journal.leave_deleted()
        self._terminal.note(f"{file.stem} is deleted")

    def _copy(self, _: str) -> None:
        turns = self._conversation.turns
        if not turns:
            raise InvalidValue("there is no answer yet: ask something first")
        self._terminal.note(copied(pictures.words(turns[-1]["content"]), self._terminal.has_styles))

    def _export(self, name: str) -> None:
        if not name:
            raise InvalidValue("give the name of a file, such as talk.md")
        file = typed_path(name).with_suffix(typed_path(name).suffix or ".md")
        if file.exists() and not self._confirms(f"{file} exists: replace it? [y/N] "):
            self._terminal.note("nothing was written: take another name")
            return
        saved.write_markdown(file, self._conversation.save())
        self._terminal.note(f"{self._turns()} written to {file}")

    def _image(self, text: str) -> None:
        if text == "off":
            self._chat.pictures.clear()
        elif text:
            message = self._chat.message(text)
            if not self._chat.pictures or pictures.words(message) == text:
                raise NotFound(f"{text} is not the file of a picture: give a JPEG, PNG, WebP, GIF or BMP")
            if pictures.words(message):
                self._chat.answer_and_report(message)
                return
        count = len(self._chat.pictures)
        self._terminal.note(f"the next message has {count} picture{'' if count == 1 else 's'}")

    def _race(self, words: str) -> None:
        talk, interrupts = self._conversation, self._chat.interrupts
        last = "".join(pictures.words(turn["content"]) for turn in talk.turns[-2:-1])
        if not words and any(type(turn["content"]) is list for turn in talk.turns[-2:-1]):
            raise InvalidValue("the last message has a picture, and a race is of text: /race QUESTION")
        if not (words or last):
            raise InvalidValue("there is no question yet: /race QUESTION")
        prompt = question(talk.pair.tokenizer, words or last, talk.system)
        with interrupts.acting(CtrlC.NOTE), hidden_typing():
            count = min(talk.settings.max_tokens, 256)  # enough turns for a narrow interval
            lines = show_race(talk.pair, prompt, count, talk.settings, lambda: interrupts.pressed)
        self._terminal.note(*lines)

    def _edit(self, _: str) -> None:
        turns = self._conversation.turns
        content = turns[-2]["content"] if turns else ""
        before = pictures.words(content)
        with self._chat.interrupts.acting(CtrlC.NOTE):  # Ctrl-C is for the editor
            text = edited(before).strip()
        if text in ("", before.strip()):
            self._terminal.note("the message is as it was, nothing was sent")
        else:
            self._terminal.note(f"> {text}")
            self._answer_again(pictures.with_text(content, text))

    def _retry(self, _: str) -> None:
        if not self._conversation.turns:
            raise InvalidValue("there is no message to answer again: ask something first")
        self._answer_again(self._conversation.turns[-2]["content"])

    def _answer_again(self, message: pictures.Content) -> None:
        """Replace the last turn by a new answer to `message`; restore the turn if no answer comes."""
        session, turns = self._conversation.session, self._conversation.turns
        session.undo()
        outcome: Outcome | None = None
        try:
            outcome = self._chat.answer_and_report(message)
        finally:
            if outcome is None or not outcome.statistics.rounds:
                session.resume(turns)

    def _undo(self, _: str) -> None:
        if not self._conversation.session.undo():
            raise InvalidValue("there is nothing to undo: the conversation is empty")
        self._terminal.note(f"forgotten, {self._turns()} left")

    def _json(self, name: str) -> None:
        if name == "off":
            self._conversation.schema = None
        elif name:
            self._conversation.require_schema(name, _schema_text(name))
        schema = self._conversation.schema
        self._terminal.note(f"answers match {schema.name}" if schema else "answers are free")

    def _highlight(self, word: str) -> None:
        if word not in ("", "on", "off"):
            raise InvalidValue(f"/highlight {word} is not known: give on or off")
        wanted = word == "on" if word else not self._chat.highlight
        if wanted and not self._terminal.has_styles:
            raise InvalidValue("there are no colours here: use a terminal that has them, and unset NO_COLOR")
        self._chat.highlight = wanted
        if wanted:
            self._terminal.styled(legend())
        else:
            self._terminal.note("no highlighting")

    def _switch(self, choice: PairSpec, note: str = "") -> None:
        with self._chat.interrupts.acting(CtrlC.LOAD):
            try:
                if note:
                    self._terminal.note(note)
                with self._terminal.working("loading") if note else nullcontext():
                    self._conversation.switch(choice)
            except KeyboardInterrupt:
                if self._conversation.choice == choice:
                    raise
                problem = f"{choice.target} is not loaded: the conversation goes on as before"
                raise SpecError(problem) from None
        words = sampling_words(self._conversation.settings, self._conversation.sampling)
        self._terminal.note(self._drafts(), *([words] if words and note else []))

    def _drafts(self) -> str:
        choice, names = self._conversation.choice, self._conversation.pair.drafter_names
        if choice.num_draft_tokens == 0 or not names:
            return "drafts: off, plain decoding"
        if choice.num_draft_tokens is None:
            return f"drafts: by {' and '.join(map(_who, names))}, as many tokens as pay"
        return f"drafts: by {_who(names[0])}, {choice.num_draft_tokens} tokens in each pass"

    def _turns(self) -> str:
        return saved.turns(self._conversation.turns)

    def _confirms(self, question: str) -> bool:
        try:
            return self._terminal.ask(question).strip().lower() in ("y", "yes")
        except (EOFError, KeyboardInterrupt):
            self._terminal.note("")
            return False


def _who(drafter: str) -> str:
    """Return a drafter in a user's words, without the family of a model."""
    return drafter if drafter == LOOKUP else "the drafter"


def _schema_text(name: str) -> str:
    file = typed_path(name)
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise NotFound(f"{file} cannot be read ({error.strerror}): give a file with a JSON schema") from error
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{file} is not UTF-8 text: give a file with a JSON schema") from error
