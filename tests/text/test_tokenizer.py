"""Tokens are those of transformers; bytes of tokens make up the text; checkpoints that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, processors
from vocabularies import GOLDEN, SAMPLES, TEXTS, byte_level, random_text, sentencepiece_like

from mlx_spec.errors import BadCheckpoint
from mlx_spec.text import Text, read_text, read_tokenizer


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.parent.name)
def test_end_tokens_are_the_union_of_all_files(folder: Path) -> None:
    text = read_text(folder, json.loads((folder / "config.json").read_text()))
    names = ("<eos>", "<turn|>", "<|tool_response>")
    assert text.eos == {text.token_id(name) for name in names}
    assert text.chats and text.thinks


@pytest.mark.parametrize("name", TEXTS)
def test_bytes_of_tokens_make_up_the_text(name: str) -> None:
    text = TEXTS[name]
    for sample in [*SAMPLES, *(random_text(seed) for seed in range(60))]:
        tokens = text.encode(sample)
        decoded = text.decode_raw(tokens)
        if name == "sentencepiece" and decoded:
            decoded = f" {decoded}"  # its decoder strips the space that it puts in front of every text
        assert b"".join(text.token_bytes(token) for token in tokens).decode() == decoded


@pytest.mark.parametrize("name", TEXTS)
def test_bytes_of_a_token_may_be_half_a_character(name: str) -> None:
    text = TEXTS[name]
    pieces = [text.token_bytes(token) for token in text.encode("👍")]
    assert b"".join(pieces).endswith("👍".encode()) and len(pieces) >= 2
    with pytest.raises(UnicodeDecodeError):
        pieces[-1].decode()


def test_other_vocabularies_are_read_by_their_decoder_and_unknown_ids_have_no_text() -> None:
    text = TEXTS["byte_level"]
    assert text.decode([*text.encode("a"), 100_000]) == "a" and text.token_bytes(100_000) == b""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert Text(tokenizer, None, ()).token_bytes(1) == b"play"
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    tokenizer.decoder = decoders.Metaspace()
    assert Text(tokenizer, None, ()).token_bytes(2) == b" a"


def test_a_plain_prompt_gets_the_special_tokens_of_its_tokenizer() -> None:
    tokenizer = sentencepiece_like()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    text = Text(tokenizer, None, ())
    assert text.prompt_tokens("a b") == [1, *text.encode("a b")]
    assert TEXTS["byte_level"].prompt_tokens("a b") == TEXTS["byte_level"].encode("a b")


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"has no tokenizer.json or tokenizer.model"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(BadCheckpoint, match="is no tokenizer"):
        read_tokenizer(tmp_path)


def test_a_tokenizer_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = json.dumps({"tokenizer_class": "GPT2Tokenizer", "model_type": "gpt2"})
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(config)
    sample = "Hello, world!"
    assert read_tokenizer(tmp_path).encode(sample).ids == tokenizer.encode(sample).ids
