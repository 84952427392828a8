"""Text is the whole text, never half a character; prompts are those of transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.text import Text, read_text, read_tokenizer
from mlx_spec.text.chat_template import ChatTemplate, read_template
from mlx_spec.text.stream import AnswerReader
from mlx_spec.text.tokenizer import Markers

ROOT = Path(__file__).parents[2]
GOLDEN = sorted(ROOT.glob("tests/golden/*/target"))
FOLDERS = [*GOLDEN, *(file.parent for file in ROOT.glob("mlx_spec/demo/target/config.json"))]
SAMPLES = [
    "",
    " ",
    "a",
    "Hello, world!  Two  spaces.\n\n\tTab",
    " leading and trailing ",
    "naïve café – “quotes” … €",
    "日本語のテキスト、中文，한국어",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b",
    "def f(x):\n    return x ** 2  # 平方\n",
    "<|turn>user\nnot a turn<turn|> <bos><eos>",
    "0123456789 3.14e-10",
]
MESSAGES = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": " What is  π?\n"}],
    [
        {"role": "user", "content": "Add 1 and 2 in Python"},
        {"role": "assistant", "content": "`1 + 2`"},
        {"role": "user", "content": "And <b>3</b>? é 👍"},
    ],
]


def sentencepiece_like() -> Tokenizer:
    """Spaces are U+2581 with one in front of the text, bytes where a character is unknown."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocab |= {c: len(vocab) + i for i, c in enumerate("▁abcdefghijklmnopqrstuvwxyz,.!")}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def byte_level() -> Tokenizer:
    """Bytes are letters, as in GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


TOKENIZERS = {"sentencepiece": sentencepiece_like(), "byte_level": byte_level()}
if GOLDEN:
    TOKENIZERS["golden"] = read_tokenizer(GOLDEN[0])
TOKENIZERS["demo"] = read_tokenizer(ROOT / "mlx_spec/demo/target")
TEXTS = {name: Text(tokenizer, None, ()) for name, tokenizer in TOKENIZERS.items()}


def random_text(seed: int) -> str:
    draw = random.Random(seed)
    ranges = [
        (0x20, 0x7E),
        (0xA0, 0x17F),
        (0x400, 0x4FF),
        (0x4E00, 0x4EFF),
        (0x1F300, 0x1F64F),
        (0x200B, 0x200F),
    ]
    return "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 60)))


# --- streams of text


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_text_in_pieces_is_the_whole_text(name: str, step: int) -> None:
    text = TEXTS[name]
    for sample in [*SAMPLES, *(random_text(seed) for seed in range(60))]:
        tokens = text.encode(sample)
        detokenizer = text.detokenizer()
        pieces = [detokenizer.add(tokens[i : i + step]) for i in range(0, len(tokens), step)]
        pieces.append(detokenizer.end())
        assert "".join(pieces) == text.decode(tokens)
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", TEXTS)
def test_half_a_character_waits(name: str) -> None:
    text = TEXTS[name]
    tokens = text.encode("a👍b")
    detokenizer = text.detokenizer()
    pieces = [detokenizer.add([token]) for token in tokens]
    assert len(tokens) >= 4 and "👍" in pieces and "" in pieces


def test_bytes_that_are_no_character_come_at_the_end() -> None:
    text = TEXTS["sentencepiece"]
    detokenizer = text.detokenizer()
    assert detokenizer.add([text.token_id("<0xF0>") or 0]) == ""
    assert detokenizer.end() == "\ufffd"
    assert detokenizer.end() == ""


def test_unknown_ids_are_no_text() -> None:
    text = TEXTS["byte_level"]
    assert text.decode([*text.encode("a"), 100_000]) == "a"


def test_special_tokens_are_hidden() -> None:
    text = TEXTS["byte_level"]
    tokens = text.encode("one<|im_end|> two")
    assert text.token_id("<|im_end|>") in tokens
    detokenizer = text.detokenizer()
    assert "".join([*(detokenizer.add([t]) for t in tokens), detokenizer.end()]) == "one two"


# --- thoughts


def read_all(reader: AnswerReader, tokens: list[int], step: int) -> list[tuple[str, str]]:
    """What a reader gives, neighbours of one kind joined."""
    pieces = [p for i in range(0, len(tokens), step) for p in reader.read(tokens[i : i + step])]
    joined: list[tuple[str, str]] = []
    for text, kind in [*pieces, *reader.end()]:
        assert text
        if joined and joined[-1][1] == kind:
            joined[-1] = (joined[-1][0] + text, kind)
        else:
            joined.append((text, kind))
    return joined


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("byte_level", "<think>\nhm 👍\n</think>\n\nYes", [("hm 👍\n", "thinking"), ("Yes", "answer")]),
        ("byte_level", " plain", [(" plain", "answer")]),
        ("byte_level", "<think>cut", [("cut", "thinking")]),
        ("byte_level", "<think></think>Yes", [("Yes", "answer")]),
        ("golden", "<|channel>thought\nhm<channel|>Yes", [("hm", "thinking"), ("Yes", "answer")]),
        ("golden", "<|channel>thought\n<channel|>Yes", [("Yes", "answer")]),
        ("golden", "<|channel>thou", [("thou", "thinking")]),
        ("golden", "<|channel>other\nhm<channel|>Yes", [("other\nhm", "thinking"), ("Yes", "answer")]),
        (
            "golden",
            "a <|channel>thought\nb<channel|> c",
            [("a ", "answer"), ("b", "thinking"), ("c", "answer")],
        ),
    ],
)
def test_thoughts_stand_apart(name: str, answer: str, expected: list, step: int) -> None:
    text = TEXTS[name]
    assert read_all(text.reader(), text.encode(answer), step) == expected


def test_prompt_may_open_the_thoughts() -> None:
    text = TEXTS["byte_level"]
    opened = text.reader(text.encode("<|im_start|>assistant\n<think>\n"))
    assert read_all(opened, text.encode("hm</think>\nYes"), 1) == [("hm", "thinking"), ("Yes", "answer")]
    closed = text.reader(text.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n"))
    assert read_all(closed, text.encode("Yes"), 1) == [("Yes", "answer")]


def test_end_tokens_are_hidden() -> None:
    tokenizer = byte_level()
    letter = tokenizer.token_to_id("b")
    text = Text(tokenizer, None, [letter])
    assert read_all(text.reader(), [*text.encode("a"), letter], 1) == [("a", "answer")]


# --- tool calls

GEMMA, QWEN = Markers("<|tool_call>", "<tool_call|>"), Markers("<tool_call>", "</tool_call>")
CALL = 'call:f{a:<|"|>x <b> é<|"|>,n:1}'


def with_calls() -> Text:
    """Byte-level, with the marks of Qwen, which are not special."""
    tokenizer = byte_level()
    tokenizer.add_tokens([QWEN.open, QWEN.close])
    return Text(tokenizer, None, ())


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"<|tool_call>{CALL}<tool_call|>", [(CALL, "call")]),
        (
            f"One <|tool_call>{CALL}<tool_call|>\n two",
            [("One ", "answer"), (CALL, "call"), ("two", "answer")],
        ),
        ("<|tool_call> a<|tool_call>b", [(" a<|tool_call>b", "call")]),
        ("<|tool_call>a<|channel>b<tool_call|>c", [("a<|channel>b", "call"), ("c", "answer")]),
        (
            "<|channel>thought\nhm<channel|><|tool_call>a<tool_call|>",
            [("hm", "thinking"), ("a", "call")],
        ),
        ("<|channel>thought\nhm <|tool_call>a", [("hm a", "thinking")]),
        ("a<tool_call|>b", [("ab", "answer")]),
    ],
)
def test_calls_stand_apart(answer: str, expected: list, step: int) -> None:
    text = TEXTS["golden"]
    reader = text.reader(calls=GEMMA)
    assert reader.calls == GEMMA
    assert read_all(reader, text.encode(answer), step) == expected


def test_an_end_token_is_no_text_of_a_call() -> None:
    text = read_text(GOLDEN[0], json.loads((GOLDEN[0] / "config.json").read_text()))
    tokens = text.encode("<|tool_call>call:f{<turn|>")
    assert read_all(text.reader(calls=GEMMA), tokens, 1) == [("call:f{", "call")]


def test_calls_are_read_only_between_tokens() -> None:
    text = with_calls()
    tokens = text.encode('<tool_call>\n{"a": 1}\n</tool_call>\n')
    assert read_all(text.reader(calls=QWEN), tokens, 1) == [('\n{"a": 1}\n', "call")]
    half = Markers(QWEN.open, "[no such token]")
    assert text.reader(calls=half).calls is None and TEXTS["byte_level"].reader(calls=QWEN).calls is None
    for reader in (text.reader(), text.reader(calls=half), text.plain_reader()):
        assert read_all(reader, tokens, 1) == [(text.decode(tokens), "answer")]


def test_nothing_is_marked_in_a_plain_text() -> None:
    text = TEXTS["golden"]
    tokens = text.encode(" a<|channel>thought\nb<channel|> <|tool_call>c<tool_call|>")
    assert read_all(text.plain_reader(), tokens, 1) == [(" athought\nb c", "answer")]


# --- tokens as bytes


def without_decoder_strip(name: str, text: str) -> str:
    """One of these vocabularies writes a space in front of every text, which its decoder takes off."""
    return f" {text}" if name == "sentencepiece" and text else text


@pytest.mark.parametrize("name", TEXTS)
def test_bytes_of_tokens_make_up_the_text(name: str) -> None:
    text = TEXTS[name]
    for sample in [*SAMPLES, *(random_text(seed) for seed in range(60))]:
        tokens = text.encode(sample)
        whole = b"".join(text.token_bytes(token) for token in tokens)
        assert whole.decode() == without_decoder_strip(name, text.decode_raw(tokens))


@pytest.mark.parametrize("name", TEXTS)
def test_bytes_of_a_token_may_be_half_a_character(name: str) -> None:
    text = TEXTS[name]
    tokens = text.encode("👍")
    pieces = [text.token_bytes(token) for token in tokens]
    assert b"".join(pieces).endswith("👍".encode()) and len(pieces) >= 2
    with pytest.raises(UnicodeDecodeError):
        pieces[-1].decode()


def test_tokens_are_not_written_as_the_vocabulary_writes_them() -> None:
    text = TEXTS["byte_level"]
    for wrong, right in (("Ġ", b" "), ("Ċ", b"\n"), ("é", b"\xe9"), ("<think>", b"<think>")):
        assert text.token_bytes(text.vocabulary()[wrong]) == right
    text = TEXTS["sentencepiece"]
    for wrong, right in (("▁", b" "), ("<0xF0>", b"\xf0"), ("</s>", b"</s>"), ("a", b"a")):
        assert text.token_bytes(text.vocabulary()[wrong]) == right
    assert text.token_bytes(100_000) == b""


def test_a_vocabulary_of_another_kind_is_read_by_its_decoder() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert Text(tokenizer, None, ()).token_bytes(1) == b"play"


def test_marked_spaces_are_spaces() -> None:
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    tokenizer.decoder = decoders.Metaspace()
    assert Text(tokenizer, None, ()).token_bytes(2) == b" a"


BARE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}]{% endfor %}"


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ("<think>\nhm</think>\n\nYes", "Yes"),
        ("hm</think>Yes", "Yes"),
        ("<think>cut", ""),
        ("Yes", "Yes"),
        ("<think>a</think>b<think>c</think>d", "bd"),
    ],
)
def test_thoughts_of_earlier_turns_are_left_out(content: str, kept: str) -> None:
    text = Text(byte_level(), ChatTemplate(BARE, {}), ())
    asked = {"role": "user", "content": "<think>mine</think>"}
    answer = {"role": "assistant", "content": content, "reasoning_content": "hm"}
    tokens = text.prompt([asked, answer, asked])
    assert tokens == text.encode(f"[user:{asked['content']}][assistant:{kept}][user:{asked['content']}]")
    # of the last turn, the template decides
    assert text.prompt([asked, answer]) == text.encode(f"[user:{asked['content']}][assistant:{content}hm]")


# --- chat templates


def test_environment_is_that_of_transformers() -> None:
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
    for messages in MESSAGES:
        for thinking in (False, True):
            theirs, _ = render_jinja_template(
                [messages],
                chat_template=source,
                add_generation_prompt=True,
                enable_thinking=thinking,
                bos_token="<s>",
            )
            ours = ChatTemplate(source, {"bos_token": "<s>"}).render(messages, thinking=thinking)
            assert ours == theirs[0]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_tokens_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = read_text(folder, json.loads((folder / "config.json").read_text()))
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


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.parent.name)
def test_ends_are_the_union(folder: Path) -> None:
    text = read_text(folder, json.loads((folder / "config.json").read_text()))
    names = ("<eos>", "<turn|>", "<|tool_response>")
    assert text.eos == {text.token_id(name) for name in names}
    assert text.chats and text.thinks


def test_template_that_refuses() -> None:
    template = ChatTemplate("{{ raise_exception('only\nusers') }}", {})
    with pytest.raises(InvalidValue, match="refuses these messages: only users"):
        template.render(MESSAGES[0], thinking=False)


def test_template_is_boxed() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", {})
    with pytest.raises(InvalidValue, match="refuses these messages"):
        template.render(MESSAGES[0], thinking=False)


def test_malformed_template() -> None:
    with pytest.raises(BadCheckpoint, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "A{{ bos_token }}", "bos_token": "<s>"}}, "A<s>"),
        ({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "B"}, "B"),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "D"}]}}, "D"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "D"}]}}, None),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": "{{ eos_token }}",
                    "eos_token": {"content": "<e>"},
                },
                "special_tokens_map.json": {"eos_token": "<old>"},
            },
            "<e>",
        ),
        ({}, None),
    ],
)
def test_where_templates_are(tmp_path: Path, files: dict, expected: str | None) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = read_template(tmp_path)
    assert (template and template.render([], thinking=False)) == expected


# --- tokenizers


def test_damaged_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"has no tokenizer.json or tokenizer.model"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(BadCheckpoint, match="is no tokenizer"):
        read_tokenizer(tmp_path)


def test_tokenizer_without_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = {"tokenizer_class": "GPT2Tokenizer", "model_type": "gpt2"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    converted = read_tokenizer(tmp_path)
    sample = "Hello, world!"
    assert converted.encode(sample).ids == tokenizer.encode(sample).ids


def test_a_plain_prompt_has_the_tokens_that_its_tokenizer_adds() -> None:
    tokenizer = sentencepiece_like()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    text = Text(tokenizer, None, ())
    assert text.prompt_tokens("a b") == [1, *text.encode("a b")]
    assert TEXTS["byte_level"].prompt_tokens("a b") == TEXTS["byte_level"].encode("a b")


def test_no_template_no_prompt() -> None:
    with pytest.raises(InvalidValue, match="no chat template"):
        TEXTS["byte_level"].prompt(MESSAGES[0])
