"""A conversation with a model that can be exchanged."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_spec.errors import SpecError
from mlx_spec.grammar import Grammar
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.policy.ratios import Ratios
from mlx_spec.session import Piece
from mlx_spec.types import Reason

from .models import check_thinking, open_pair
from .pictures import Content, ready, ready_turns, stored
from .settings import AnswerSettings, from_values, values


@dataclass(frozen=True)
class AnswerSchema:
    """A JSON schema that answers match."""

    name: str  # as the user typed it
    source: str
    grammar: Grammar


class NoModelLeft(SpecError):
    """The other model cannot be loaded, and the former one no longer."""


class Conversation:
    """A session with everything that can be set about it."""

    def __init__(
        self,
        pair: Pair,
        choice: PairSpec,
        settings: AnswerSettings,
        system: str | None,
        key: str | None = "",
    ) -> None:
        """Take the `choice` that loaded `pair`, and `key` as `Pair.session` does."""
        self._key = key
        self.choice, self.settings, self.system = choice, settings, system
        self.schema: AnswerSchema | None = None
        self._resume(pair, choice, [])

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Return the messages without the system prompt."""
        return [message for message in self.session.messages if message["role"] != "system"]

    def stream(self, message: Content) -> Generator[Piece, None, None]:
        """Answer a message as set. Raises InvalidValue and PromptTooLong as `Session.stream` does."""
        settings = self.settings
        thinks = settings.think or not self.pair.tokenizer.thinks  # some cannot be asked not to
        grammar = None if self.schema is None else self.schema.grammar.thinking(thinks)
        return self.session.stream(
            ready(message, self.pair),
            sampling=replace(settings, grammar=grammar),
            max_tokens=settings.max_tokens,
            thinking=settings.think,
        )

    def change_settings(self, settings: AnswerSettings) -> None:
        """Use these settings from now on. Raises InvalidValue if the target cannot think and has to."""
        if settings.think:
            check_thinking(self.pair)
        self.settings = settings

    def change_system(self, system: str | None) -> None:
        """Go on with another system prompt: the next prompt is rendered again."""
        session = self.pair.session(system, key=self._key)
        session.resume(self.turns)
        self.session, self.system = session, system

    def require_schema(self, name: str, source: str) -> None:
        """Let answers match a JSON schema from now on. Raises SpecError."""
        self.schema = None
        size = self.pair.info.vocab_size
        compiled = compile_grammar("json_schema", source, self.pair.tokenizer, size, seconds=10.0)
        self.schema = AnswerSchema(name, source, compiled)

    def switch(self, choice: PairSpec) -> None:
        """Load another model, or the same one with other drafts, and go on. Raises SpecError.

        The old model goes first, because there may be no memory for two; it is loaded again if the new one
        cannot be, or if a KeyboardInterrupt comes.
        """
        if not self._redraft(choice):
            self._exchange(choice, self.turns)
        if (schema := self.schema) is not None:
            self.require_schema(schema.name, schema.source)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved.read` returns. Raises InvalidValue and changes nothing."""
        settings = from_values(saved["settings"])
        if settings.think and not self.pair.tokenizer.may_think:
            settings = replace(settings, think=False)
        session = self.pair.session(saved["system"], key=self._key)
        known, turns = ("role", "content", "reasoning_content"), saved["messages"]
        kept = [{key: turn[key] for key in known if type(turn.get(key)) in (str, list)} for turn in turns]
        session.resume(ready_turns(kept, self.pair))
        self.session, self.system, self.settings = session, saved["system"], settings

    def save(self) -> dict[str, Any]:
        """Return what `saved.write` takes."""
        return {
            "target": self.choice.target,
            "drafter": self.choice.drafter,
            "system": self.system,
            "messages": [{**turn, "content": stored(turn["content"])} for turn in self.turns],
            "settings": values(self.settings),
        }

    def _redraft(self, choice: PairSpec) -> bool:
        """Change the draft length, and keep what was read. Return False if the choice needs other weights."""
        if replace(choice, num_draft_tokens=self.choice.num_draft_tokens) != self.choice:
            return False
        if choice.num_draft_tokens is not None:
            length = choice.num_draft_tokens if self.pair.drafter_names else 0
            reason = Reason.FIXED if length else Reason.DISABLED
            self.pair.policies = FixedPolicy(length, reason, self.pair.fixed_names, ratios=Ratios())
        elif isinstance(self._own, AdaptivePolicies):
            self.pair.policies = self._own
        else:
            return False
        self.choice = choice
        self.session.change_policy(self.pair.open().policy)
        return True

    def _exchange(self, choice: PairSpec, turns: Sequence[Mapping[str, Any]]) -> None:
        former = self.choice
        failure: SpecError | KeyboardInterrupt
        try:
            self.session.clear()
            del self.session, self.pair, self._own
            self._resume(open_pair(choice, think=self.settings.think), choice, turns)
            return
        except (SpecError, KeyboardInterrupt) as error:
            failure = error
        while True:
            try:
                self._resume(open_pair(former), former, turns)
                break
            except KeyboardInterrupt:  # the first Ctrl-C; one more ends the program
                continue
            except SpecError as error:
                raise NoModelLeft(
                    f"{str(failure) or 'interrupted'}; and {former.target}, which was loaded before, cannot "
                    f"be either: {error}"
                ) from error
        raise failure

    def _resume(self, pair: Pair, choice: PairSpec, turns: Sequence[Mapping[str, Any]]) -> None:
        session = pair.session(self.system, key=self._key)  # refuses a target that does not chat
        session.resume(ready_turns(turns, pair))
        self.pair, self.choice, self.session = pair, choice, session
        self._own: AdaptivePolicies | FixedPolicy = pair.policies  # as loaded, for a return to them
