"""generation_config.json: forbidden tokens, sampling defaults and keys without effect, as in transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import pairs, seeded_llama
from support.lossless import texts

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.generation import read_generation_config
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.load import load
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.logits import Suppressed

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden/generation/generation.json").read_text()
)
APPLIED = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "repetition_penalty")
NAMED = tuple(name for name in GOLDEN if name not in ("none", *APPLIED))


def opened(folder: Path, generation: dict[str, Any], drafter: str = "none") -> Pair:
    seeded_llama.save(folder, generation)
    pairs.TOKENIZER.save(str(folder / "tokenizer.json"))
    return load(folder, drafter, num_draft_tokens=None if drafter == "none" else 5)


def text(pair: Pair, sampling: Sampling, prompt: list[int] = seeded_llama.PROMPT) -> list[int]:
    return [t for r in pair.generate(prompt, sampling=sampling, max_tokens=40) for t in r.tokens]


@pytest.mark.parametrize("name", ["none", *APPLIED])
def test_a_text_is_the_one_of_transformers(name: str, tmp_path: Path) -> None:
    for drafter in ("none", "lookup"):
        pair = opened(tmp_path, GOLDEN[name]["config"], drafter)
        assert text(pair, Sampling(**pair.tokenizer.generation.sampling)) == GOLDEN[name]["tokens"]


def test_suppressed_tokens_leave_one_argmax_and_hold_in_a_batch_and_with_a_seed(tmp_path: Path) -> None:
    right = GOLDEN["suppress_tokens"]
    pair = opened(tmp_path, right["config"], "lookup")
    sequence = pair.prepare(pair.open(), seeded_llama.PROMPT, max_tokens=40)
    assert sequence.sampler.is_argmax
    together = texts(pair.generate_batch([seeded_llama.PROMPT] * 2, max_tokens=40))
    assert together == dict.fromkeys(range(2), right["tokens"])
    plain = opened(tmp_path / "plain", right["config"])
    seeded = Sampling(temperature=1.5, seed=3)
    assert text(pair, seeded) == text(plain, seeded)
    for seed in range(4):
        assert not {*text(pair, Sampling(temperature=2.0, seed=seed))} & {*right["config"]["suppress_tokens"]}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_rows_that_begin_an_answer_lack_more_tokens(dtype: mx.Dtype) -> None:
    logits = mx.arange(12).reshape(3, 4).astype(dtype)
    found = Suppressed([3, 9], [2], 4).leave_out(logits, [1])
    assert found.argmax(axis=-1).tolist() == [2, 1, 2] and found.dtype == dtype
    assert mx.isfinite(found).all()


def test_a_grammar_that_allows_a_suppressed_token_alone_wins(tmp_path: Path) -> None:
    pair = opened(tmp_path, {"suppress_tokens": pairs.TOKENIZER.encode("a").ids})
    grammar = compile_grammar("regex", "aaa", pair.tokenizer, 256, seconds=20.0)
    found = text(pair, Sampling(grammar=grammar))  # ends with token 2
    assert pair.tokenizer.decode(found[:-1]) == "aaa"


@pytest.mark.parametrize("name", NAMED)
def test_a_key_without_effect_is_named_at_load(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(tmp_path, GOLDEN[name]["config"])
    key = name.partition(" ")[0]
    assert f"generation_config.json: {key} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "sampling"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, None),
        ({"temperature": 0.6, "top_p": 0.95}, None),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {}),
        ({"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1}, {"temperature": 1.0}),
        ({"repetition_penalty": 1.05}, None),
        ({"do_sample": True, "temperature": math.inf, "top_p": "0.9", "min_p": 7}, {"temperature": 1.0}),
        ({"transformers_version": "4.50", "max_length": 20, "num_beams": 1, "no_repeat_ngram_size": 0}, {}),
    ],
)
def test_sampling_settings_are_those_that_are_stated(
    written: dict[str, Any], sampling: dict[str, Any] | None, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    expected = {k: v for k, v in written.items() if k != "do_sample"} if sampling is None else sampling
    found = read_generation_config(Checkpoint(tmp_path))
    assert dict(found.sampling) == expected and not found.without_effect
    Sampling(**found.sampling)
