"""A conversation whose model, drafts and settings can change while it goes on."""

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
from .settings import AnswerSettings, for_model, from_values, values


@dataclass(frozen=True)
class AnswerSchema:
    """A JSON schema that answers match."""

    name: str  # as the user typed it
    source: str
    grammar: Grammar


class NoModelLeft(SpecError):
    """Neither the new model nor the former one can be loaded."""


class Conversation:
    """A session with its pair, settings, system prompt and answer schema, all of which may change."""

    def __init__(
        self,
        pair: Pair,
        choice: PairSpec,
        settings: AnswerSettings,
        system: str | None,
        key: str | None = "",
    ) -> None:
        """Begin with a pair; `choice` is what it was loaded from, `key` is for `Pair.session`."""
        self._key = key
        self.choice, self.settings, self.system = choice, settings, system
        self.schema: AnswerSchema | None = None
        self.sampling = pair.tokenizer.generation.sampling  # settings that the model brings
        self._resume(pair, choice, [])

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Return the messages without the system prompt."""
        return [message for message in self.session.messages if message["role"] != "system"]

    def stream(self, message: Content) -> Generator[Piece, None, None]:
        """Answer a message with the settings. Raises InvalidValue and PromptTooLong as `Session.stream`."""
        settings = self.settings
        thinks = settings.think or not self.pair.tokenizer.thinks  # some models think in any case
        grammar = None if self.schema is None else self.schema.grammar.thinking(thinks)
        return self.session.stream(
            ready(message, self.pair),
            sampling=replace(settings, grammar=grammar),
            max_tokens=settings.max_tokens,
            thinking=settings.think,
        )

    def change_settings(self, settings: AnswerSettings) -> None:
        """Use these settings from now on. Raises InvalidValue if they ask a model to think that cannot."""
        if settings.think:
            check_thinking(self.pair)
        self.settings = settings

    def change_system(self, system: str | None) -> None:
        """Go on with another system prompt: the next prompt is rendered again."""
        session = self.pair.session(system, key=self._key)
        session.resume(self.turns)
        self.session, self.system = session, system

    def require_schema(self, name: str, source: str) -> None:
        """Let answers match a JSON schema from now on. Raises SpecError; then nothing changes."""
        size = self.pair.info.vocab_size
        compiled = compile_grammar("json_schema", source, self.pair.tokenizer, size, seconds=10.0)
        self.schema = AnswerSchema(name, source, compiled)

    def switch(self, choice: PairSpec) -> None:
        """Load another model, or the same one with other drafts, and go on. Raises SpecError.

        The old model is freed first, because there may be no memory for two. If the new model cannot be
        loaded, or a KeyboardInterrupt comes, the old one is loaded again.
        """
        if not self._redraft(choice):
            self._exchange(choice, self.turns)
        if (schema := self.schema) is not None:
            self.schema = None  # it was compiled for the vocabulary of the former model
            self.require_schema(schema.name, schema.source)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue a conversation that `saved.read` returned. If it raises InvalidValue, nothing changes."""
        settings = from_values(saved["settings"])
        if settings.think and not self.pair.tokenizer.may_think:
            settings = replace(settings, think=False)
        session = self.pair.session(saved["system"], key=self._key)
        known, turns = ("role", "content", "reasoning_content"), saved["messages"]
        kept = [{key: turn[key] for key in known if type(turn.get(key)) in (str, list)} for turn in turns]
        session.resume(ready_turns(kept, self.pair))
        self.session, self.system, self.settings = session, saved["system"], settings

    def save(self) -> dict[str, Any]:
        """Return the conversation in the form that `saved.write` takes."""
        return {
            "target": self.choice.target,
            "drafter": self.choice.drafter,
            "system": self.system,
            "messages": [{**turn, "content": stored(turn["content"])} for turn in self.turns],
            "settings": values(self.settings),
        }

    def _redraft(self, choice: PairSpec) -> bool:
        """Change the draft length and keep the caches. Return False if the choice needs other weights."""
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
            except KeyboardInterrupt:  # only the first Ctrl-C raises this; the next one ends the program
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
        before, self.sampling = self.sampling, pair.tokenizer.generation.sampling
        self.settings = for_model(self.settings, before, self.sampling)
        self._own: AdaptivePolicies | FixedPolicy = pair.policies  # the loaded policies, for /draft auto
