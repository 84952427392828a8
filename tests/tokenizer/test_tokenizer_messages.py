"""Refused tokenizers, texts and templates end with one line that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refusal
from support.vocabularies import TEXTS, marked

from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.errors import BadCheckpoint, InvalidValue, SpecError
from mlx_spec.tokenizer import Tokenizer, read_fast_tokenizer, read_tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate, read_template

HI = [{"role": "user", "content": "Hi"}]


def stating(**config: Any) -> Callable[[Path], Tokenizer]:
    """Read a tokenizer of bytes beside this tokenizer_config.json."""

    def read(folder: Path) -> Tokenizer:
        marked()._tokenizer.save(str(folder / "tokenizer.json"))
        for name, content in (("config", {"model_type": "llama"}), ("tokenizer_config", config)):
            (folder / f"{name}.json").write_text(json.dumps(content))
        return read_tokenizer(read_checkpoint(folder))

    return read


def rendering(source: str) -> Callable[[Path], str]:
    return lambda folder: ChatTemplate(source, {}).render(HI, thinking=False)


def template(folder: Path) -> object:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    return read_template(Checkpoint(folder))


def tokenizer(folder: Path) -> object:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    return read_fast_tokenizer(Checkpoint(folder))


TEXT = TEXTS["byte_level"]
MESSAGES: dict[type[SpecError], list[tuple[str, Callable[[Path], object]]]] = {
    BadCheckpoint: [
        ("has no tokenizer.json or tokenizer.model", lambda folder: read_fast_tokenizer(Checkpoint(folder))),
        ("is not a tokenizer", tokenizer),
        ("states '<new>' as token 7, where", stating(added_tokens_decoder={"7": {"content": "<new>"}})),
        ("cannot be read", stating(added_tokens_decoder={"x": {}})),
        ("cannot be read", stating(eos_token=3)),
        ("NewlineTokenizer, which writes <n> for a newline", stating(tokenizer_class="NewlineTokenizer")),
        ("the chat template in", template),
        ("does not compile", rendering("{% for %}")),
        ("does not compile", rendering("{% break %}")),
        ("does not compile", rendering("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")),
        ("does not compile", rendering("{{ " + "9" * 5000 + " }}")),
    ],
    InvalidValue: [
        ("half a surrogate pair", lambda folder: TEXT.encode("a\udcff")),
        ("half a surrogate pair", lambda folder: TEXT.prompt_tokens("a\udcff")),
        ("no chat template", lambda folder: TEXT.prompt(HI)),
        ("refuses these messages", rendering("{{ 1e999 ~ messages }}")),
        ("refuses these messages: only users", rendering("{{ raise_exception('only\nusers') }}")),
        # sandboxed
        ("refuses these messages", rendering("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")),
    ],
}


@pytest.mark.parametrize(
    ("error", "words", "read"), [(error, *row) for error, rows in MESSAGES.items() for row in rows]
)
def test_refusals(error: type[SpecError], words: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    assert words in refusal(error, read, tmp_path)
