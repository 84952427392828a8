"""One answer to `-p` or piped text: as it streams, or as one JSON object when it is done."""

from __future__ import annotations

import json

from mlx_spec.apps.chat.answer import ChatState, Outcome
from mlx_spec.apps.chat.arguments import Options
from mlx_spec.apps.chat.conversation import Conversation
from mlx_spec.apps.chat.models import PairChoice, open_pair
from mlx_spec.apps.chat.report import as_json
from mlx_spec.apps.chat.settings import AnswerSettings
from mlx_spec.apps.command import INTERRUPTED


def answer_once(
    answerer: ChatState, options: Options, settings: AnswerSettings, choice: PairChoice, prompt: str
) -> int:
    """Answer, report, and return the exit status: 0, or INTERRUPTED. Raises SpecError."""
    conversation = Conversation(open_pair(choice, think=settings.think), settings, options.system)
    desk = ChatState(
        conversation, answerer, answerer.terminal, answerer.interrupts, full_reports=options.stats
    )
    if options.json:
        outcome = answerer.answer(conversation.session, conversation.asked(prompt))
        text = json.dumps(_result(conversation, outcome), ensure_ascii=False)
        answerer.terminal.piece(text + "\n", "answer")
    else:
        outcome = desk.answer(prompt)
    return INTERRUPTED if outcome.interrupted else 0


def _result(conversation: Conversation, outcome: Outcome) -> dict[str, object]:
    facts = conversation.pair.info
    return {
        "text": outcome.answer,
        "thoughts": outcome.thoughts or None,
        "target": facts.target,
        "drafter": facts.drafter,
        **as_json(outcome.statistics, outcome.first_seconds, outcome.peak_bytes),
    }
