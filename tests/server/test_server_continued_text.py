"""Texts that go on after a prompt keep the space between: the text is transformers' of prompt and answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.endpoint import TEXT, Endpoint, stubbed
from support.served import working
from support.vocabularies import ROOT, metaspace
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mlx_spec
from mlx_spec.apps.server.engine.preparation import _raw_tokens
from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.pair import Pair
from mlx_spec.tokenizer.fill_in import FillIn

PROMPTS = ("the cat", "日本", "x.  ", "")
COUNT = 8


def prefixing() -> Tokenizer:
    """The same with a pre-tokenizer and a decoder of one step, as transformers 5 saves it."""
    tokenizer = metaspace()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    return tokenizer


def plain() -> Tokenizer:
    """The same without a space in front, as Gemma's."""
    tokenizer = metaspace()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@dataclass(frozen=True)
class Model:
    endpoint: Endpoint
    pair: Pair  # the same, to see its tokens
    theirs: PreTrainedTokenizerFast

    def answer(self, prompt: list[int], seed: int) -> list[int]:
        sampling = mlx_spec.Sampling(temperature=1.0, seed=seed)
        rounds = self.pair.generate(prompt, sampling=sampling, max_tokens=COUNT)
        return [token for round in rounds for token in round.tokens]

    def text(self, prompt: list[int], answer: list[int]) -> str:
        before = self.theirs.decode(prompt, skip_special_tokens=True)
        whole = self.theirs.decode([*prompt, *answer], skip_special_tokens=True)
        assert whole.startswith(before)
        return whole.removeprefix(before)

    def complete(self, path: str = TEXT, **body: Any) -> list[dict[str, Any]]:
        """Return the choice of an answer, whole and as the chunks of a stream."""
        given = {"model": "words", "temperature": 1.0, "max_tokens": COUNT} | body
        whole = self.endpoint.post(path, **given).json()["choices"][0]
        chunks = [chunk["choices"][0] for chunk in self.endpoint.chunks(path, **given)]
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        if whole["logprobs"]:
            parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
            for key in ("tokens", "text_offset"):
                assert [one for part in parts for one in part[key]] == whole["logprobs"][key]
        return whole


@pytest.fixture(scope="module", params=[metaspace, prefixing, plain], ids=lambda made: made.__name__)
def model(request: Any, tmp_path_factory: Any) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("words") / "words"
    shutil.copytree(ROOT / "tests/golden/trained/llama", folder)
    tokenizer = request.param()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    pair = mlx_spec.load(str(folder), "none")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    with working(Settings((ServedModel("words", PairSpec(str(folder), "none")),))) as engine:
        yield Model(Endpoint(stubbed(engine).client, tokenizer), pair, theirs)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_goes_on_where_its_prompt_ends(model: Model, prompt: str):
    tokens = model.theirs.encode(prompt)
    answer = model.answer(tokens, seed=1)
    expected = model.text(tokens, answer)
    assert model.complete(prompt=tokens, seed=1)["text"] == expected
    echoed = model.complete(prompt=prompt, seed=1, echo=True, logprobs=0)
    assert echoed["text"] == prompt + expected
    if prompt.isascii() and "\ufffd" not in expected:
        shown = [token for token in answer if token not in model.pair.tokenizer.controls]
        ids = [*tokens, *shown]
        starts = [len(model.theirs.decode(ids[:i], skip_special_tokens=True)) for i in range(len(ids))]
        assert echoed["logprobs"]["text_offset"] == starts


def test_stop_strings_see_the_first_space(model: Model):
    tokens = model.theirs.encode("the cat")
    expected = model.text(tokens, model.answer(tokens, 1))
    words = expected.split(" ")
    assert words[0] == ""  # it begins with a space
    for stop in (" " + words[1], words[1], " " + words[2], " " + " ".join(words[2:4])):
        found = model.complete(prompt="the cat", seed=1, stop=[stop])["text"]
        assert found == expected[: expected.find(stop)]


def test_a_middle_keeps_its_space(model: Model):
    gap = FillIn("the", "cat")
    tokens = _raw_tokens(gap, model.pair.tokenizer, "words")
    expected = model.text(tokens, model.answer(tokens, 1))
    assert model.complete(prompt=gap.prefix, suffix=gap.suffix, seed=1)["text"] == expected
    given = {"input_prefix": gap.prefix, "input_suffix": gap.suffix, "n_predict": COUNT, "seed": 1}
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    filled = model.endpoint.post("/infill", model="words", **given, **sampling).json()
    assert filled["content"] == expected and expected.startswith(" ")


def test_half_a_character_of_a_prompt_is_completed(model: Model):
    """A prompt as tokens may end inside a character; a literal U+FFFD is whole."""
    byte = {
        i: token for i in range(256) if (token := model.pair.tokenizer.token_id(f"<0x{i:02X}>")) is not None
    }
    half, rest = [1, *(byte[i] for i in "é".encode()[:1])], byte["é".encode()[1]]
    bias = {"logit_bias": {str(rest): 100}, "max_tokens": 1}
    assert model.complete(prompt=half, **bias)["text"] == "é"
    broken = [1, *(byte[i] for i in "\ufffd".encode())]
    letter = {"logit_bias": {str(model.pair.tokenizer.token_id("a")): 100}, "max_tokens": 1}
    assert model.complete(prompt=broken, **letter)["text"] == "a"
