"""Tokens and prompts are those of transformers; bytes of tokens make up the text; refused checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.checkpoints import edit_config
from support.vocabularies import DEMO, GOLDEN, SAMPLES, TEXTS, byte_level, random_text, sentencepiece_like
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, processors

from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.errors import InvalidValue, PromptTooLong
from mlx_spec.tokenizer import Tokenizer, read_fast_tokenizer, read_tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate, read_template
from mlx_spec.tokenizer.tokenizer import longest_token


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(read_checkpoint(GOLDEN))
    names = ("<eos>", "<turn|>", "<|tool_response>")
    assert tokenizer.eos == {tokenizer.token_id(name) for name in names}
    shutil.copytree(GOLDEN, tmp_path / "composite")
    edit_config(tmp_path / "composite", lambda config: config.update(text_config={"eos_token_id": [7]}))
    assert read_tokenizer(read_checkpoint(tmp_path / "composite")).eos == tokenizer.eos | {7}
    assert tokenizer.chats and tokenizer.thinks


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
    tokenizer = FastTokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert Tokenizer(tokenizer, None, ()).token_bytes(1) == b"play"
    tokenizer = FastTokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    tokenizer.decoder = decoders.Metaspace()
    assert Tokenizer(tokenizer, None, ()).token_bytes(2) == b" a"
    tokenizer = byte_level()
    tokenizer.add_tokens(["é"])  # as it is written, although this letter also stands for a byte
    assert Tokenizer(tokenizer, None, ()).token_bytes(tokenizer.token_to_id("é")) == "é".encode()


def test_a_plain_prompt_gets_the_special_tokens_of_its_tokenizer() -> None:
    tokenizer = sentencepiece_like()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    text = Tokenizer(tokenizer, None, ())
    assert text.prompt_tokens("a b") == [1, *text.encode("a b")]
    assert TEXTS["byte_level"].prompt_tokens("a b") == TEXTS["byte_level"].encode("a b")


def test_a_tokenizer_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = json.dumps({"tokenizer_class": "GPT2Tokenizer", "model_type": "gpt2"})
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(config)
    sample = "Hello, world!"
    assert read_fast_tokenizer(Checkpoint(tmp_path)).encode(sample).ids == tokenizer.encode(sample).ids


# --- prompts

MESSAGES = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": " What is  π?\n"}],
    [
        {"role": "user", "content": "Add 1 and 2 in Python"},
        {"role": "assistant", "content": "`1 + 2`"},
        {"role": "user", "content": "And <b>3</b>? é 👍"},
    ],
]


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("thinking", [False, True])
def test_the_environment_is_that_of_transformers(messages: list[dict[str, str]], thinking: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = """{{ bos_token }}
{% for m in messages if m.role != 'skip' %}
    {% if loop.first %}{% continue %}{% endif %}
    {%- generation -%}{{ m.content | tojson }}{%- endgeneration -%}
    {% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}
{% endfor %}
{{ {'a': '<é>', 'b': [1, 2]} | tojson(indent=2) }}{{ strftime_now('%Y') }}
{{ tools is none }} {{ documents is none }} {{ enable_thinking }} {{ dict(a=1) }}
{% if add_generation_prompt %}model:{% endif %}
"""
    theirs, _ = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=True,
        enable_thinking=thinking,
        bos_token="<s>",
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages, thinking=thinking) == theirs[0]


def test_what_a_request_cannot_replace_and_a_missing_text() -> None:
    source = "{{ messages | length }}{{ enable_thinking }}{{ add_generation_prompt }}"
    source += "{{ messages[0].content }}{{ x }}"
    variables = {"messages": [], "enable_thinking": True, "add_generation_prompt": False, "x": "!"}
    message = {"role": "assistant", "content": None}
    assert ChatTemplate(source, {}).render([message], thinking=False, variables=variables) == "1FalseTrue!"


@pytest.mark.parametrize("folder", [GOLDEN, DEMO], ids=lambda folder: folder.parent.name)
def test_tokens_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = read_tokenizer(read_checkpoint(folder))
    for sample in [*SAMPLES, *(random_text(seed) for seed in range(20))]:
        tokens = theirs.encode(sample, add_special_tokens=False)
        assert ours.encode(sample) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    for messages in MESSAGES:
        for thinking in (False, True):
            prompt = theirs.apply_chat_template(
                messages, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
            )
            assert ours.prompt(messages, thinking=thinking) == prompt
    assert ours.vocabulary() == theirs.get_vocab()
    assert ours.prompt_tokens("Hi") == theirs.encode("Hi", add_special_tokens=True)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "A{{ bos_token }}", "bos_token": "<s>"}}, "A<s>"),
        ({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "B"}, "B"),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "D"}]}}, "D"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "E"}]}}, "E"),
        ({"tokenizer_config.json": {"chat_template": {"other": "F"}}}, "F"),
        ({"tokenizer_config.json": {"chat_template": [{"name": n, "template": n} for n in "ab"]}}, None),
        ({"additional_chat_templates/tool_use.jinja": "G", "chat_template.jinja": "H"}, "H"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": "{{ eos_token }}",
                    "eos_token": {"content": "<e>"},
                    "added_tokens_decoder": {},
                },
                "special_tokens_map.json": {"eos_token": "<old>"},
            },
            "<e>",
        ),
        (
            {
                "tokenizer_config.json": {"chat_template": "{{ eos_token }}", "eos_token": "<new>"},
                "special_tokens_map.json": {"eos_token": {"content": "<e>"}},
            },
            "<e>",
        ),
        ({}, None),
    ],
)
def test_where_templates_are(tmp_path: Path, files: dict, expected: str | None) -> None:
    write(tmp_path, files)
    template = read_template(Checkpoint(tmp_path))
    assert (template and template.render([], thinking=False)) == expected


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config.json": {
                "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
            }
        },
        {"chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "T"},
        {"tokenizer_config.json": {"chat_template": "D"}, "chat_templates/tool_use.jinja": "T"},
    ],
)
def test_the_template_for_tools(tmp_path: Path, files: dict) -> None:
    write(tmp_path, files)
    template = read_template(Checkpoint(tmp_path))
    assert template is not None
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render([], thinking=False) == "D"
    assert template.render([], thinking=False, tools=[tool]) == "T"


def write(folder: Path, files: dict) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


PANICS = {"type": "Split", "pattern": {"Regex": "(q+)+$"}, "behavior": "Isolated", "invert": False}


def test_a_panic_of_the_library_is_an_error_of_the_text() -> None:
    """It is a BaseException, which would end the thread that tokenizes."""
    source = json.loads(byte_level().to_str())
    text = Tokenizer(FastTokenizer.from_str(json.dumps(source | {"pre_tokenizer": PANICS})), None, ())
    with pytest.raises(InvalidValue, match="the tokenizer fails on this text"):
        text.encode("q" * 60 + "!")
    assert text.decode_raw(text.encode("q")) == "q"


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_the_context_cannot_hold_is_not_tokenized(name: str) -> None:
    """A text with fewer tokens than the context is never refused: the longest token bounds it."""
    text = TEXTS[name]
    most = longest_token(text._tokenizer)
    tokens = sorted(text.vocabulary().values(), key=lambda token: -len(text.decode_raw([token])))[:40]
    for token in tokens:
        written = text.decode_raw([token] * 50)
        size = len(text.prompt_tokens(written))
        assert len(text.prompt_tokens(written, size)) == size
    if most is not None:
        with pytest.raises(PromptTooLong, match=r"the prompt is too long: at least \d+ tokens > 10"):
            text.prompt_tokens("x" * (10 * most + 1), 10)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "Removed",
                "invert": False,
            }
        },
    ],
)
def test_a_token_that_may_stand_for_any_text_sets_no_bound(change: dict[str, object]) -> None:
    source = json.loads(byte_level().to_str())
    assert longest_token(FastTokenizer.from_str(json.dumps(source))) is not None
    assert longest_token(FastTokenizer.from_str(json.dumps(source | change))) is None
