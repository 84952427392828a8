"""Prompts by kind, as tokens, each with the number of tokens to generate.

A folder of prompts has a file a kind; each line of one is JSON: a message, a conversation as a list of
messages that the user begins and ends, or {"text": ...}, which is continued as it stands and never ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from arms import PROMPTS, Prompt, fixed

from mlx_spec.pair import Pair
from mlx_spec.text.chat_template import special_tokens


def read_prompts(settings: argparse.Namespace, pair: Pair, target: Path) -> list[Prompt]:
    """All prompts that fit the context. An answer is as long as the plain greedy one, a text `--tokens`."""
    folder = settings.prompts or PROMPTS / ("demo" if settings.target == "demo" else "general")
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]
    wanted = settings.kinds or [file.stem for file in files]
    begin = special_tokens(target).get("bos_token", "")
    found = []
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines() if file.stem in wanted else []
        for line in lines[: settings.per_kind]:
            prompt = _prompt(file.stem, *_tokens(json.loads(line), pair, begin), pair, settings)
            found += [prompt] if prompt else []
    return found


def _prompt(
    kind: str, tokens: list[int], ends: bool, pair: Pair, settings: argparse.Namespace
) -> Prompt | None:
    length = pair.info.context_length
    most = min(settings.tokens, length - len(tokens)) if length else settings.tokens
    if most < min(settings.least, settings.tokens):
        print(f"a prompt of kind {kind} has {len(tokens)} tokens, too many for this target: left out")
        return None
    if not ends:
        return Prompt(kind, tokens, most, pair.text.eos)
    steps = fixed(pair, 0)(Prompt(kind, tokens, most), lambda: None)
    answer = [token for step, _ in steps for token in step]
    stops = [i + 1 for i, token in enumerate(answer) if token in pair.text.eos]
    return Prompt(kind, tokens, min(most, max(stops[0] if stops else most, settings.least)))


def _tokens(written: object, pair: Pair, begin: str) -> tuple[list[int], bool]:
    """The tokens, and whether an answer follows them, which has an end."""
    match written:
        case {"text": str(text)}:
            return pair.text.encode(begin + text), False
        case str():
            turns = [written]
        case list():
            turns = [str(turn) for turn in written]
        case _:
            sys.exit(f"a prompt is a message, a list of messages or a text, not {written!r}")
    if not pair.text.chats:
        return pair.text.encode(begin + "\n\n".join(turns)), False
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return pair.text.prompt(messages), True
