"""The prompts that a target answers for `mlx-spec train`: bundled ones, or a user's own.

Bundled prompts come from a grammar in `prompts.json`. `$topic` stands for any entry of the list "topic";
`$name1` stands for the same entry everywhere in a prompt. Held-out prompts come from separate lists: they
share no instruction, topic, sentence or code with the others.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlx_spec.checkpoint.files import typed_path
from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.tokenizer import Tokenizer

OWN = "own"  # kind of the prompts in a user's files


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt, and the kind of text that it asks for."""

    kind: str
    messages: tuple[Mapping[str, str], ...]


def bundled_prompt(index: int, seed: int, *, held_out: bool) -> TrainingPrompt:
    """Return prompt number `index` of a seed; the kinds take turns."""
    kinds = "chat", "code", "edit", "list", "summary", "writing"
    kind = kinds[index % len(kinds)]
    chance = random.Random(f"{seed} {index}")
    return _question(kind, _expand(f"${kind}", chance, {}, held_out=held_out))


def _expand(text: str, chance: random.Random, chosen: dict[str, str], *, held_out: bool) -> str:
    """Return the text with each slot filled; `chosen` has the texts of numbered slots."""

    def fill(slot: re.Match[str]) -> str:
        name, number = slot.groups()
        if slot[0] not in chosen:
            filled = _expand(chance.choice(rules(name, held_out=held_out)), chance, chosen, held_out=held_out)
            # another text for each number, unless the list is shorter than that
            for _ in range(8 if number else 0):
                if filled not in chosen.values():
                    break
                filled = _expand(f"${name}", chance, chosen, held_out=held_out)
            if not number:
                return filled
            chosen[slot[0]] = filled
        return chosen[slot[0]]

    return re.sub(r"\$([a-z_]+)(\d?)", fill, text)


def rules(name: str, *, held_out: bool) -> list[str]:
    """Return the texts that a slot may have."""
    texts: list[str] = _grammar()["held_out" if held_out else "train"][name]
    return texts


@cache
def _grammar() -> dict[str, dict[str, list[str]]]:
    text = Path(__file__).with_name("prompts.json").read_text(encoding="utf-8")
    grammar: dict[str, dict[str, list[str]]] = json.loads(text)
    return grammar


def own_prompts(files: Sequence[Path]) -> list[TrainingPrompt]:
    """Read prompts of the user: one on each line, or a conversation that the chat saved.

    A line may be a JSON string. In a conversation each user message is a prompt, with all messages before it.
    Raises BadCheckpoint for a file that cannot be read, InvalidValue if there is no prompt.
    """
    prompts = []
    for file in files:
        try:
            text = typed_path(file).read_text(encoding="utf-8-sig")
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


def encode(tokenizer: Tokenizer, prompt: TrainingPrompt) -> list[int]:
    """Return the tokens of a prompt; without a chat template, of its last message only."""
    if tokenizer.chats:
        return tokenizer.prompt([dict(message) for message in prompt.messages])
    return tokenizer.prompt_tokens(prompt.messages[-1]["content"])


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
    """Return the prompts in a saved conversation; none if the text is not a conversation."""
    try:
        messages = json.loads(text)["messages"]
        turns = [{"role": str(each["role"]), "content": str(each["content"])} for each in messages]
    except (ValueError, KeyError, TypeError):
        return []
    ends = [i + 1 for i, turn in enumerate(turns) if turn["role"] == "user"]
    return [TrainingPrompt(OWN, tuple(turns[:end])) for end in ends]
