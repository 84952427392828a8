"""What the commands of a conversation work on: the conversation, the terminal and how answers are given."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_spec.apps.chat.answer import ChatState, Outcome
from mlx_spec.apps.chat.conversation import Conversation
from mlx_spec.apps.chat.input import Lines
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.report import details, status_line
from mlx_spec.apps.chat.settings import AnswerSettings, shown, values
from mlx_spec.apps.chat.terminal import Terminal
from mlx_spec.errors import InvalidValue
from mlx_spec.hub.files import human_bytes


@dataclass
class Desk:
    """One conversation on one terminal."""

    conversation: Conversation
    answerer: ChatState
    terminal: Terminal
    interrupts: Interrupts
    lines: Lines = field(init=False)  # they complete what the commands take, so they come after those
    full_reports: bool = False
    last: Outcome | None = None

    def answer(self, message: str) -> Outcome:
        """Answer and report. Raises SpecError."""
        conversation = self.conversation
        outcome = self.answerer.answer(conversation.session, conversation.asked(message))
        if outcome.statistics.prompt_tokens:
            self.last = outcome
            self.report(outcome, full=self.full_reports)
        else:
            self.terminal.note("interrupted")
        return outcome

    def report(self, outcome: Outcome, *, full: bool) -> None:
        """The status line of an answer, and with `full` the lines under it."""
        self.terminal.note(status_line(outcome.statistics, self.conversation.settings.max_tokens))
        if full:
            for line in details(outcome.statistics, outcome.first_seconds, outcome.peak_bytes):
                self.terminal.note(line)

    def last_outcome(self) -> Outcome:
        """That of the last answer. Raises InvalidValue before there is one."""
        if self.last is None:
            raise InvalidValue("there is no answer yet: ask something first")
        return self.last

    def agrees(self, question: str) -> bool:
        """Whether the user says yes."""
        try:
            with self.interrupts.prompting():
                return self.terminal.ask(question).strip().lower() in ("y", "yes")
        except (EOFError, KeyboardInterrupt):
            self.terminal.newline()
            return False

    def drafts(self) -> str:
        """What drafts, in a line."""
        choice, pair = self.conversation.model.choice, self.conversation.pair
        if choice.num_draft_tokens == 0 or not pair.drafter_names:
            return "drafts: off, plain decoding"
        names, number = pair.drafter_names, choice.num_draft_tokens
        if number is None:
            return f"drafts: by {' and '.join(names)}, as many tokens as pay"
        return f"drafts: by {names[0]}, {number} tokens a round"

    def described(self) -> list[str]:
        """What the conversation is held with, in lines."""
        conversation = self.conversation
        facts, choice = conversation.pair.info, conversation.model.choice
        lines = [f"model: {facts.target}, {shown_size(facts.target_bytes)}"]
        if facts.drafter is not None:
            lines.append(f"drafter: {facts.drafter}, {human_bytes(facts.drafter_bytes)}")
        lines.append(self.drafts())
        if choice.kv_bits is not None:
            lines.append(f"KV cache: {choice.kv_bits} bits")
        lines.append(f"system prompt: {conversation.system or 'none'}")
        usual = values(AnswerSettings())
        settings = [
            f"{name} {shown(value)}"
            for name, value in values(conversation.settings).items()
            if value != usual[name]
        ]
        lines.append(f"settings: {', '.join(settings) or 'the usual ones'}")
        lines.append(f"answers: {conversation.schema.name if conversation.schema else 'free'}")
        used = conversation.session.statistics
        tokens = used.prompt_tokens + used.generated_tokens if conversation.turns else 0
        context = f" of {facts.context_length}" if facts.context_length else ""
        lines.append(f"turns: {len(conversation.turns) // 2}, at the last answer {tokens}{context} tokens")
        return lines
