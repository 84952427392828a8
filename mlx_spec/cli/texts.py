"""Built-in texts, so that a self-test and `bench` need no network."""

from __future__ import annotations

import json
from pathlib import Path

BUILT_IN: dict[str, list[str]] = json.loads(Path(__file__).with_name("texts.json").read_text("utf-8"))
# Prompts to be continued as they are, and questions to be answered where the target has a chat template.
TEXTS, PROMPTS, QUESTIONS = (BUILT_IN[key] for key in ("texts", "prompts", "questions"))
