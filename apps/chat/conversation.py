"""A conversation with a model that can be exchanged: what the commands change and answers are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from mlx_spec import grammar
from mlx_spec.apps.chat.answer import Asked
from mlx_spec.apps.chat.conversation import SavedConversation
from mlx_spec.apps.chat.models import (
    LoadedPair,
    PairChoice,
    check_thinking,
    open_pair,
    reuse_weights,
    with_drafts,
)
from mlx_spec.apps.chat.settings import AnswerSettings, from_values, values
from mlx_spec.apps.chat.terminal import Origins
from mlx_spec.errors import SpecError
from mlx_spec.grammar import Grammar
from mlx_spec.pair import Pair
from mlx_spec.session import Session

Loading: TypeAlias = Callable[[], AbstractContextManager[None]]

PATIENCE = 10.0  # seconds that a schema may take to compile


@dataclass(frozen=True)
class Schema:
    """What answers must look like."""

    name: str  # as the user gave it
    source: str  # a JSON schema as JSON
    grammar: Grammar


class Lost(SpecError):
    """Neither another model nor the one before it can be loaded: there is nothing to go on with."""


class Conversation:
    """A session and everything that is set about it."""

    def __init__(self, model: LoadedPair, settings: AnswerSettings, system: str | None) -> None:
        self.model = model
        self.settings = settings
        self.system = system
        self.schema: Schema | None = None
        self.session: Session = model.pair.session(system)

    @property
    def pair(self) -> Pair:
        """The loaded pair."""
        return self.model.pair

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages without the system prompt."""
        return [message for message in self.session.messages if message["role"] != "system"]

    def asked(self, message: str) -> Asked:
        """A message, to be answered as set."""
        settings = self.settings
        schema = None if self.schema is None else self.schema.grammar.thinking(settings.think)
        sampling = replace(settings.sampling, grammar=schema)
        origins = Origins(self.pair.drafter_names)
        return Asked(message, sampling, settings.max_tokens, settings.think, origins)

    def set(self, settings: AnswerSettings) -> None:
        """Answer like that from now on. Raises InvalidValue for a target that cannot think."""
        if settings.think:
            check_thinking(self.pair)
        self.settings = settings

    def instruct(self, system: str | None) -> None:
        """Begin anew, with another system prompt."""
        self.session, self.system = self.pair.session(system), system

    def require(self, name: str | None, source: str = "") -> None:
        """Answers match a JSON schema from now on; no more with None. Raises SpecError."""
        self.schema = None if name is None else _schema(self.pair, name, source)

    def draft(self, word: str, loading: Loading = nullcontext) -> None:
        """Change what drafts, and go on. Raises SpecError."""
        self.switch(with_drafts(self.model.choice, word), loading)

    def switch(self, choice: PairChoice, loading: Loading = nullcontext) -> None:
        """Load another model, or the same one with other drafts, and go on. Raises SpecError.

        Within `loading` a KeyboardInterrupt counts as a model that cannot be loaded.

        There may be no memory for two: the old one goes first, and is loaded again if the new one cannot be.
        """
        before, turns = self.model, self.turns
        found = reuse_weights(before, choice)
        if found is None:
            self.session.clear()
            del self.session, self.model
            old = before.choice
            del before
            try:
                found = self._opened(choice, loading)
            except SpecError as error:
                self._continue(_again(old, error), turns)
                raise
        self._continue(found, turns)

    def saved(self) -> SavedConversation:
        """What to keep of it."""
        choice = self.model.choice
        return SavedConversation(
            choice.target, choice.drafter, self.system, self.turns, values(self.settings)
        )

    def load(self, saved: SavedConversation) -> None:
        """Go on from what was kept, with the present model. Raises InvalidValue, and then nothing changed."""
        settings = from_values(saved.settings)
        if settings.think and not self.pair.text.thinks:
            settings = replace(settings, think=False)
        session = self.pair.session(saved.system)
        session.resume([_message(turn) for turn in saved.turns])
        self.session, self.system, self.settings = session, saved.system, settings

    def _opened(self, choice: PairChoice, loading: Loading) -> LoadedPair:
        try:
            with loading():
                found = open_pair(choice, think=self.settings.think)
                found.pair.session(self.system)  # which refuses a target that does not chat
                return found
        except KeyboardInterrupt:
            raise SpecError(f"{choice.target} is not loaded: the conversation goes on as before") from None

    def _continue(self, model: LoadedPair, turns: Sequence[Mapping[str, Any]]) -> None:
        self.model = model
        self.session = model.pair.session(self.system)
        self.session.resume(turns)
        schema = self.schema
        if schema is not None:
            self.schema = None
            self.schema = _schema(model.pair, schema.name, schema.source)


def _again(old: PairChoice, reason: SpecError) -> LoadedPair:
    """Raises Lost."""
    try:
        return open_pair(old)
    except SpecError as error:
        raise Lost(
            f"{reason}; and {old.target}, which was loaded before, cannot be either: {error}"
        ) from error


def _schema(pair: Pair, name: str, source: str) -> Schema:
    size = pair.info.vocab_size
    return Schema(name, source, grammar.compile("json_schema", source, pair.text, size, seconds=PATIENCE))


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """What a session keeps of a message."""
    known = ("role", "content", "reasoning_content")
    return {name: turn[name] for name in known if isinstance(turn.get(name), str)}
