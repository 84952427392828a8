"""Tokenizers of GGUF files: the ids of sentencepiece, and of transformers' own reading of such metadata."""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from support.gguf_files import tokenizer_metadata
from support.vocabularies import ROOT, SAMPLES, byte_level, random_text
from tokenizers import Tokenizer, normalizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
)

from mlx_spec.checkpoint.gguf_cuts import PRE_TOKENIZERS
from mlx_spec.checkpoint.gguf_tokenizer import read_gguf_tokenizer

CORPUS = [
    *SAMPLES,
    *((ROOT / name).read_text() for name in ("README.md", "mlx_spec/decode/round.py")),
    "x  y   z    " * 50,
]
ODD = [
    "I'LL we've DON'T 's",
    "12345 6.7e-8 ٣٤٥ ½ Ⅷ",
    "HTTPServer camelCase_x ÉCOLE",
    "a\r\n\r\n b \n c\t\td",
    "e\u0301 ﬁ Ǆ",
]
TEXTS = [*SAMPLES, *ODD, *map(random_text, range(60)), CORPUS[-2], "<|im_start|>x<|im_end|> <think>a</think>"]


def reference(metadata: dict[str, Any]) -> Tokenizer:
    named = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    return convert_gguf_tokenizer("llama", {named.get(key, key): value for key, value in values.items()})[0]


@cache
def vocabulary() -> Tokenizer:
    return byte_level(CORPUS, size=1200)


# A text cut as llama.cpp cuts it, by a name of each cut.
PIECES = {
    "gpt-2": "I|'|LL| we|'ve| 12345| HTTPServer|'s|\n\n | ete|\u0301!!/|\n|日本|。|かな|\t| y",
    "smollm": "I|'|LL| we|'ve| |1|2|3|4|5| HTTPServer|'s|\n\n | ete|\u0301!!/|\n|日本|。|かな|\t| y",
    "llama-bpe": "I|'LL| we|'ve| |123|45| BServe|'s|\n\n| | ete|\u0301!!/\n|日本|。かな|\t| y",
    "qwen2": "I|'LL| we|'ve| |1|2|3|4|5| BServe|'s|\n\n| | ete|\u0301!!/\n|日本|。かな|\t| y",
    "tekken": "I|'LL| we|'ve| |1|2|3|4|5| BServe|'s|\n\n| | ete\u0301|!!/\n|日本|。かな|\t| y",
    "gpt-4o": "I'LL| we've| |123|45| BServe's|\n\n| | ete\u0301|!!/\n|日本|。かな|\t| y",
    "deepseek-llm": "I|'|LL| we|'|ve| |12345| BServe|'|s|\n|\n| | ete|\u0301|!!/|\n|日本|。|かな|\t| y",
    "deepseek-coder": "I|'|LL| we|'|ve| |1|2|3|4|5| BServe|'|s|\n|\n| | ete|\u0301|!!/|\n|日本|。|かな|\t| y",
    "deepseek-v3": "I|'LL| we|'ve| |123|45| BServe|'s|\n\n| | ete\u0301|!!/\n|日本|。|かな|\t| y",
    "spark2_5": "I|'LL| we|'ve| |1|2|3|4|5| BServe|'s|\n|\n| | ete\u0301|!!/|\n|日本|。|かな|\t| y",
    "youtu": "I'LL| we've| |1|2|3|4|5| BServe's|\n\n| | ete\u0301|!!/\n|日本|。|かな|\t| y",
    "falcon": "I|'|LL| we|'|ve| |123|45| BServe|'|s|\n\n | ete|\u0301|!!/|\n|日本|。|かな|\t| y",
    "poro-chat": "I'LL| we've| 12345| BServe's|\n\n | ete\u0301|!!|/|\n|日本|。|かな|\t| y",
    "viking": "I'LL| we've| |1|2|3|4|5| BServe's|\n\n | ete\u0301|!!|/|\n|日本|。|かな|\t| y",
    "chameleon": "I|'|LL| we|'|ve| |1|2|3|4|5| BServe|'|s|\n|\n|  |ete|\u0301|!|!|/|\n|日本|。|かな|\t| y",
    "bailingmoe": "I|'LL| we|'ve| |1|2|3|4|5| BServe|'s|\n\n| | ete|\u0301!!/\n|日本|。かな|\t| y",
    "exaone-moe": "I|'LL| we|'ve| |1|2|3|4|5| BServe|'s|\n\n| | ete\u0301|!!/\n|日本|。かな|\t| y",
    "seed-coder": "I|'LL| we|'ve| |1|2|3|4|5| BServe|'s|\n\n| | ete|\u0301!!/|\n|日本|。かな|\t| y",
    "ufakzeka": "I|'LL| we|'ve| |1|2|3|4|5| BServe|'s|\n\n| | ete|\u0301!!/\n|日本|。かな|\t| y",
    "laguna": "I|'LL| we|'ve| |1|2|3|4|5| BServe|'s|\n\n| | ete|\u0301!!/|\n|日本|。かな|\t| y",
    "minicpm5": "I|'LL| we|'ve| |123|45| BServe|'s|\n\n| | ete|\u0301!!/\n|日本|。かな|\t| y",
    "jais-2": "I|'LL| we|'ve| |123|45| BServe|'s|\n\n| | ete|\u0301!!/\n|日本|。かな|\t| y",
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_text_is_cut_as_its_name_says(name: str) -> None:
    metadata = tokenizer_metadata(vocabulary(), pre=name)
    tokenizer, _, _ = read_gguf_tokenizer(Path("x.gguf"), metadata)
    pieces = next(
        PIECES[known] for known in PIECES if PRE_TOKENIZERS[known].patterns == PRE_TOKENIZERS[name].patterns
    ).split("|")
    text = "".join(pieces)
    cuts = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cuts] == pieces
    assert (tokenizer.encode("a").ids[0] == 1) == PRE_TOKENIZERS[name].with_bos
    assert tokenizer.decode(tokenizer.encode(text).ids) == text or PRE_TOKENIZERS[name].composed


@pytest.mark.parametrize("cut", ["gpt-2", *sorted(PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys())])
def test_tokens_of_byte_level_vocabularies(cut: str) -> None:
    metadata = tokenizer_metadata(vocabulary(), pre=cut)
    tokenizer, config, ends = read_gguf_tokenizer(Path("x.gguf"), metadata)
    expected = reference(metadata)
    if PRE_TOKENIZERS[cut].composed:  # as in the published tokenizer.json of Qwen
        expected.normalizer = normalizers.NFC()
    for text in TEXTS:
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(found, skip_special_tokens=False) == text or PRE_TOKENIZERS[cut].composed
    assert (tokenizer.encode("a").ids[0] == 1) == PRE_TOKENIZERS[cut].with_bos
    assert (config["bos_token"], config["eos_token"], ends) == ("<|im_start|>", "<|im_end|>", [2, 0])
    texts = {"tokenizer.ggml.token_type": [1] * len(metadata["tokenizer.ggml.tokens"])}
    assert read_gguf_tokenizer(Path("x.gguf"), metadata | texts)[2] == [2]  # ordinary text ends nothing


def test_chat_templates() -> None:
    metadata = tokenizer_metadata(vocabulary(), pre="gpt-2") | {"tokenizer.chat_templates": ["tool_use"]}
    default = {"tokenizer.chat_template": "D"}
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    for more, expected in (
        ({}, None),
        (default, "D"),
        (default | {"tokenizer.chat_template.tool_use": "T"}, named),
    ):
        config = read_gguf_tokenizer(Path("x.gguf"), metadata | more)[1]
        assert config.get("chat_template") == expected


@pytest.mark.parametrize("prefix", [True, False])
def test_tokens_of_sentencepiece(prefix: bool) -> None:
    """The scores of a trained model give the ids of sentencepiece itself."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines()]),
        model_writer=file,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["▁▁", "▁▁▁▁", "<b>"],
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    ids = range(model.vocab_size())
    own = [i for i in ids if model.id_to_piece(i) in ("▁▁", "▁▁▁▁", "<b>")]
    kinds = [3 if model.is_control(i) else 6 if model.is_byte(i) else 4 if i in own else 1 for i in ids]
    pieces = [model.id_to_piece(i) for i in ids]
    tokens = [p.replace("▁", " ") if kind == 4 else p for p, kind in zip(pieces, kinds, strict=True)]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    tokenizer, _, _ = read_gguf_tokenizer(Path("x.gguf"), metadata)
    chance = random.Random(0)
    # After a token that users define, llama.cpp puts a space in front again; sentencepiece does not.
    words = f"speculative decoding  drafts    tokens Ünï 日本 x y {'' if prefix else '<b>'}".split(" ")
    texts = [" ".join(chance.choices(words, k=12)) for _ in range(30)]
    for text in [*texts, *ODD, *(t for t in TEXTS if not t.startswith(" ") and "<" not in t)]:
        if text:
            assert tokenizer.encode(text, add_special_tokens=False).ids == model.encode(text), text
    assert tokenizer.encode("a").ids[0] == 1


def test_a_token_of_a_million_letters_takes_no_time() -> None:
    """Each of its cuts was tried, for minutes."""
    tokens = ["a", "b", "ab", "abab", "z" * 10**6]
    kinds = {"model": "llama", "tokens": tokens, "scores": [-1.0, -2.0, -3.0, -4.0, -5.0]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in kinds.items()}
    tokenizer, *_ = read_gguf_tokenizer(Path("model.gguf"), metadata)
    tokenizer.normalizer = None
    assert tokenizer.encode("ababab").tokens == ["abab", "ab"]
