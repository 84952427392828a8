"""Filling in the middle: the tokens of each layout, `suffix` of completions, and llama.cpp's `/infill`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.endpoint import INFILL, READ, TEXT, Endpoint, Stub, events_of, fresh, said, shared, stubbed
from support.served import working
from support.vocabularies import ROOT, byte_level, sentencepiece_like
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors

from mlx_spec.apps.server.engine.answers import Failed
from mlx_spec.apps.server.engine.preparation import _raw_tokens
from mlx_spec.apps.server.errors import Failure, internal_error
from mlx_spec.apps.server.requests.request import RawPrompts
from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.fill_in import LAYOUTS, FillIn, Layout, fill_in_ends

GAP = FillIn("def f(", ": pass")
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]
RENAMED = dict(zip(QWEN, ["<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>"], strict=True))


def pieces(given: FillIn, tokenizer: FastTokenizer) -> list[str]:
    """The prompt as texts: its control tokens by name, what stands between them as one."""
    text = Tokenizer(tokenizer, None, ())
    added, found = tokenizer.get_added_tokens_decoder(), [""]
    for token in _raw_tokens(given, text, "m"):
        if token in added:
            found += [added[token].content, ""]
        else:
            found[-1] += (tokenizer.id_to_token(token) or "").replace("Ġ", " ").replace("Ċ", "\n")
    return [piece for piece in found if piece]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.prefix + layout.file)
def test_each_layout_is_the_published_one(layout: Layout):
    before, after = [layout.prefix, "def f("], [layout.suffix, ": pass"]
    middle = [layout.middle] if layout.middle else []
    ends = [*after, *before] if layout.suffix_first else [*before, *after]
    assert pieces(GAP, byte_level(added=layout.tokens)) == [*ends, *middle]


def test_other_files_come_first():
    extra = replace(GAP, extra=(("a.py", "x = 1"), ("b.py", "y")))
    project, file = QWEN[3:]
    around = [QWEN[0], "def f(", QWEN[1], ": pass", QWEN[2]]
    files = [project, "project\n", file, "a.py\nx = 1\n", file, "b.py\ny\n", file, "file\n"]
    assert pieces(extra, byte_level(added=QWEN)) == [*files, *around]
    around[1] = "a.py\nx = 1\nb.py\ny\ndef f("
    assert pieces(extra, byte_level(added=QWEN[:3])) == around


def test_begin_of_text_and_spaces_of_sentencepiece():
    """CodeLlama: <s> first; only the prefix gets the space that the tokenizer puts before a text."""
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    found = pieces(FillIn("a b", "c d", middle="e"), tokenizer)
    assert found == ["<s>", "▁<PRE>", "▁a▁b", "▁<SUF>", "c▁d", "▁<MID>", "e"]
    assert pieces(FillIn("a", ""), tokenizer) == ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "▁<MID>"]
    text = Tokenizer(tokenizer, None, ())
    ends = {text.token_bytes(end) for end in fill_in_ends(text)}
    assert ends == {b" <PRE>", b" <SUF>", b" <MID>", b" <EOT>"}


def test_a_model_without_such_tokens_is_named():
    with pytest.raises(Failure, match="suffix: m has no tokens for filling in") as caught:
        _raw_tokens(GAP, Tokenizer(byte_level(), None, ()), "m")
    assert (caught.value.status, caught.value.param) == (400, "suffix")


# --- a model


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def served(request: Any, tmp_path_factory: Any) -> Iterator[Endpoint]:
    """A tiny model with Qwen's tokens, which that model's own tokenizer does not count as special."""
    folder = tmp_path_factory.mktemp("coder") / "coder"
    shutil.copytree(ROOT / "tests/golden/trained/qwen", folder)
    source = (folder / "tokenizer.json").read_text()
    for token, old in RENAMED.items():
        source = source.replace(json.dumps(old), json.dumps(token))
    content = json.loads(source)
    for token in content["added_tokens"]:
        token["special"] = token["special"] and (request.param or token["content"] not in QWEN)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with working(Settings((ServedModel("coder", PairSpec(str(folder), "none")),))) as engine:
        yield Endpoint(stubbed(engine).client, FastTokenizer.from_file(str(folder / "tokenizer.json")))


def test_the_middle_is_continued_and_ends(served: Endpoint):
    exact = {"model": "coder", "temperature": 0}
    end = served.app.token_to_id("<|file_sep|>")
    prompt = _raw_tokens(GAP, Tokenizer(served.app, None, ()), "coder")
    raw = served.post(TEXT, **exact, prompt=prompt).json()
    filled = served.post(TEXT, **exact, prompt=GAP.prefix, suffix=GAP.suffix).json()
    assert filled["choices"] == raw["choices"] and filled["usage"]["prompt_tokens"] == len(prompt)
    given = {"input_prefix": GAP.prefix, "input_suffix": GAP.suffix, "n_predict": 16}
    body = served.post(INFILL, **exact, **given).json()
    assert body["content"] == filled["choices"][0]["text"] and body["timings"]["predicted_n"] == 16
    assert (body["stop"], body["stop_type"], body["tokens_evaluated"]) == (True, "limit", len(prompt))
    read = served.post(INFILL, **exact, **given | {"n_predict": 0}).json()
    assert (read["content"], read["tokens_predicted"], read["tokens_evaluated"]) == ("", 0, len(prompt))
    ended = served.post(INFILL, **exact, **given, logit_bias={str(end): 100}).json()
    assert (ended["content"], ended["tokens_predicted"]) == ("", 1) and ended["stop_type"] != "limit"


# --- fields


@pytest.fixture
def stub() -> Stub:
    return fresh(said("Hel", "lo"))[0]


def test_fields_of_editors(stub: Stub):
    """What llama.vim and llama.vscode send."""
    body = {
        "id_slot": 0,
        "input_prefix": "a\n",
        "input_suffix": "\nb",
        "input_extra": [{"filename": "c.py", "text": "c", "time": 1}],
        "prompt": "de",
        "n_predict": 128,
        "n_indent": 4,
        "stop": ["\n"],
        "samplers": ["top_k", "top_p", "infill"],
        "top_k": 20,
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "generation_settings/n_ctx"],
    }
    reply = shared()[1].post(INFILL, **body).json()
    assert reply == {"content": "Hello", "timings/prompt_n": 3}
    found = stub.requests[-1]
    given = FillIn("a\n", "\nb", (("c.py", "c"),), "de", "input_suffix")
    assert (found.prompt, found.max_tokens, found.stop) == (RawPrompts((given,)), 128, ("\n",))
    assert found.sampling == Sampling(temperature=0.8, top_k=20, top_p=0.95, min_p=0.05)
    nulls = {"temperature": None, "top_k": None, "min_p": 0}
    shared()[1].post(INFILL, n_predict=-1, **nulls, prediction={"type": "content", "content": "Hel"})
    found = stub.requests[-1]
    assert (found.max_tokens, found.prediction) == (None, "Hel")
    assert found.sampling == Sampling(temperature=0.8, top_k=40, top_p=0.95)


def test_a_stream_of_infill(stub: Stub):
    found = [json.loads(data) for data in events_of(shared()[1].post(INFILL, stream=True).text)]
    assert [one["content"] for one in found] == ["Hel", "lo", ""]
    assert [one["stop"] for one in found] == [False, False, True] and found[-1]["timings"]["prompt_n"] == 3
    stub.events = (READ, Failed(internal_error()))
    assert "error" in json.loads(events_of(shared()[1].post(INFILL, stream=True).text)[-1])


def test_each_prompt_gets_the_suffix(stub: Stub):
    shared()[1].post(TEXT, prompt=["a", "c"], suffix="b")
    assert stub.requests[-1].prompt.prompts == (FillIn("a", "b"), FillIn("c", "b"))
