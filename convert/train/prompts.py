"""The prompts that a target answers to make the text that a drafter learns from.

Bundled prompts join an instruction with a topic. Those about a text quote the beginning of an answer that the
target gave before, so they are made after the others were answered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.text import Text

BUNDLED = Path(__file__).with_name("prompts.json")
QUOTED_SHARE = 0.25  # of the prompts, which quote an answer: as often as people ask about a text of theirs
QUOTED_CHARACTERS = 600  # of a quoted answer, about 130 tokens: a longer one leaves less time for answers
OWN = "own"  # kind of the prompts in a user's files


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt, and what kind of text it wants."""

    kind: str
    messages: tuple[Mapping[str, str], ...]


def bundled_prompts(count: int, seed: int) -> list[TrainingPrompt]:
    """Return that many prompts without quotations; the kinds take turns."""
    material, chance = _bundled(), random.Random(seed)
    kinds: dict[str, list[str]] = material["kinds"]
    prompts = []
    for i in range(count):
        kind = list(kinds)[i % len(kinds)]
        topic, other = chance.sample(material["topics"], 2)
        language, task = chance.choice(material["languages"]), chance.choice(material["tasks"])
        text = chance.choice(kinds[kind]).format(topic=topic, other=other, language=language, task=task)
        prompts.append(_question(kind, text))
    return prompts


def quoting_prompts(answers: Iterator[tuple[str, str]], seed: int) -> Iterator[TrainingPrompt]:
    """Return a prompt about each answer, given as its kind and its text."""
    material, chance = _bundled()["texts"], random.Random(seed + 1)
    for answered, text in answers:
        kind = "edit code" if answered == "code" else chance.choice(["summary", "edit"])
        quoted = text[:QUOTED_CHARACTERS].rsplit(" ", 1)[0]
        yield _question(kind.split()[0], chance.choice(material[kind]).replace("{text}", quoted))


def own_prompts(files: Sequence[Path]) -> list[TrainingPrompt]:
    """Read prompts of the user: one on each line, or a conversation that the chat saved.

    A line may be a JSON string. Each message of the user in a conversation is a prompt, with all before it.
    Raises BadCheckpoint for a file that cannot be read, InvalidValue if there is no prompt.
    """
    prompts = []
    for file in files:
        try:
            text = file.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadCheckpoint(
                f"{file} cannot be read ({error}): give a text file with a prompt on each line"
            ) from error
        prompts += _conversation(text) or [
            _question(OWN, line) for line in map(_unquoted, text.splitlines()) if line
        ]
    if files and not prompts:
        raise InvalidValue(f"{', '.join(map(str, files))}: there is no prompt in it: write one on each line")
    return prompts


def encode(text: Text, prompt: TrainingPrompt) -> list[int]:
    """Return the tokens of a prompt; without a chat template those of its last message."""
    if text.chats:
        return text.prompt([dict(message) for message in prompt.messages])
    return text.encode(prompt.messages[-1]["content"])


def _bundled() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BUNDLED.read_text(encoding="utf-8"))
    return found


def _question(kind: str, text: str) -> TrainingPrompt:
    return TrainingPrompt(kind, ({"role": "user", "content": text},))


def _unquoted(line: str) -> str:
    if line.startswith('"'):
        try:
            return str(json.loads(line))
        except ValueError:
            pass
    return line.strip()


def _conversation(text: str) -> list[TrainingPrompt]:
    """Return the prompts in a saved conversation; none if the text is no conversation."""
    try:
        messages = json.loads(text)["messages"]
        turns = [{"role": str(each["role"]), "content": str(each["content"])} for each in messages]
    except (ValueError, KeyError, TypeError):
        return []
    ends = [i + 1 for i, turn in enumerate(turns) if turn["role"] == "user"]
    return [TrainingPrompt(OWN, tuple(turns[:end])) for end in ends]
