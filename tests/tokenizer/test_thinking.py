"""Which marks of thinking a model has, and where they count. Nothing depends on the tokens of the text."""

from __future__ import annotations

import random

import pytest
from support.vocabularies import HARMONY, MARKED, QWEN, TEXTS, marked

from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.segments import Segmenter
from mlx_spec.tokenizer.stream import AnswerStream
from mlx_spec.tokenizer.thinking import Markers, MessageMarks, TextTagMarks, TokenTagMarks
from mlx_spec.types import Round, TokenLogprob

START = "<|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
HEADERS = Markers("<|start|>", "<|call|>")
Pieces = list[tuple[str, str]]


def split(
    tokenizer: Tokenizer, prompt: str, written: str | list[int], calls: Markers | None = None, seed: int = 0
) -> tuple[Pieces, int]:
    """Return the kinds and texts of an answer, and its tokens of thinking."""
    answer, draw, parts = (
        AnswerStream(tokenizer, tokenizer.encode(prompt), calls=calls),
        random.Random(seed),
        [],
    )
    tokens = tokenizer.encode(written) if isinstance(written, str) else written
    while tokens:
        size = draw.randint(1, 4) if seed else 1
        parts += answer.read(Round(tokens[:size], 0, 0, "plain"))
        tokens = tokens[size:]
    found: Pieces = []
    for part in [*parts, *answer.end()]:
        assert "".join(span.text for span in part.spans) == part.text
        same = found and found[-1][0] == part.kind
        found[-1:] = (
            [(part.kind, found[-1][1] + part.text)] if same else [*found[-1:], (part.kind, part.text)]
        )
    return found, answer.reasoning_tokens


THINKING_AND_ANSWER = [("thinking", "hm"), ("answer", "Yes")]
SENTENCES = {  # vocabulary, end of the prompt, what the model writes, its pieces
    "harmony": ("harmony", START, f"{ANALYSIS}hm<|end|>{START}{FINAL}Yes<|return|>", THINKING_AND_ANSWER),
    "harmony, the channel open": (
        "harmony",
        f"{START}{ANALYSIS}",
        f"hm<|end|>{START}{FINAL}Yes",
        THINKING_AND_ANSWER,
    ),
    "harmony, no thinking": ("harmony", START, f"{FINAL}Yes", [("answer", "Yes")]),
    "harmony, constrained": (
        "harmony",
        START,
        "<|channel|>final <|constrain|>json<|message|>{}",
        [("answer", "{}")],
    ),
    "harmony, a stray channel": (
        "harmony",
        START,
        f"<|channel|>commentary{ANALYSIS}hm<|end|>{START}{FINAL}Yes",
        THINKING_AND_ANSWER,
    ),
    "harmony, no start": ("harmony", START, f"{ANALYSIS}hm{FINAL}Yes", THINKING_AND_ANSWER),
    "harmony, two thoughts": (
        "harmony",
        START,
        f"{ANALYSIS}h<|end|>{START}{ANALYSIS}m<|end|>{START}{FINAL}Yes",
        THINKING_AND_ANSWER,
    ),
    "harmony, a preamble": (
        "harmony",
        START,
        f"<|channel|>commentary<|message|>Yes, <|end|>{START}{FINAL}I do",
        [("answer", "Yes, I do")],
    ),
    "harmony, no header": ("harmony", START, "assist to", [("answer", "assist to")]),
    "harmony, no header after a message": ("harmony", START, f"{ANALYSIS}hm<|end|>Yes", THINKING_AND_ANSWER),
    "harmony, half a header": ("harmony", START, "<|channel|>ana", []),
    "harmony, a header without end": ("harmony", START, f"<|channel|>{'x' * 60}", [("answer", "x" * 60)]),
    "harmony, tags": ("harmony", START, f"{FINAL}<think> </think>", [("answer", "<think> </think>")]),
    "harmony, a call that is not asked for": (
        "harmony",
        START,
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        [("answer", "{}")],
    ),
    "harmony, a tool of its own": (
        "harmony",
        START,
        f"<|channel|>analysis to=python code<|message|>hm<|end|>{START}{FINAL}Yes",
        THINKING_AND_ANSWER,
    ),
    "muse": (
        "muse",
        START,
        f" to=self<|message|>hm<|eom|>{START} to=user<|message|>Yes",
        THINKING_AND_ANSWER,
    ),
    "solar": (
        "solar",
        "<|begin|>assistant",
        "<|think|>hm<|end|><|begin|>assistant<|content|>Yes",
        THINKING_AND_ANSWER,
    ),
    "kimi-k3": (
        "kimi-k3",
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        "hm<|close|>think<|sep|><|open|>response<|sep|>Yes<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
        THINKING_AND_ANSWER,
    ),
    "kimi-k3, no thinking": (
        "kimi-k3",
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>',
        "Yes<|close|>response<|sep|>",
        [("answer", "Yes")],
    ),
    "brackets": ("brackets", "q", "[THINK]hm[/THINK]Yes<|ends|>", THINKING_AND_ANSWER),
    "brackets, the prompt opens": ("brackets", "q[THINK]", "hm[/THINK]Yes", THINKING_AND_ANSWER),
    "brackets, opened twice": ("brackets", "q[THINK]", "[THINK]hm[/THINK]Yes", THINKING_AND_ANSWER),
    "brackets, only closed": ("brackets", "q", "[/THINK]Yes", [("answer", "Yes")]),
    "brackets, mentioned": (
        "brackets",
        "q",
        "[THINK]hm[/THINK]Yes, [THINK] and [/THINK]",
        [("thinking", "hm"), ("answer", "Yes, [THINK] and [/THINK]")],
    ),
    "brackets, space around": ("brackets", "q", " \n[THINK]\nhm[/THINK]\n\nYes", THINKING_AND_ANSWER),
    "brackets, only space": ("brackets", "q", " \n", [("answer", " \n")]),
    "brackets, empty": ("brackets", "q", "[THINK]\n\n[/THINK]\n\nYes", [("answer", "Yes")]),
    "brackets, cut": ("brackets", "q", "[THINK]", []),
    "brackets, closed by the prompt": (
        "brackets",
        "[THINK]\n\n[/THINK]\n\n",
        "[THINK] is a tag",
        [("answer", "[THINK] is a tag")],
    ),
    "seed": ("seed", "q", "<seed:think>hm</seed:think>Yes", THINKING_AND_ANSWER),
    "seed, another tag": ("seed", "q", "<think>hm</think>Yes", [("answer", "<think>hm</think>Yes")]),
    "text": ("text", "q", "<think>\nhm</think>\nYes", THINKING_AND_ANSWER),
    "text, the prompt opens": ("text", "<think>\n", "hm</think>Yes", THINKING_AND_ANSWER),
    "text, mentioned": (
        "text",
        "q",
        "<think>hm</think>Yes </think> <think>",
        [("thinking", "hm"), ("answer", "Yes </think> <think>")],
    ),
    "text, later": ("text", "q", "Yes <think>hm</think>", [("answer", "Yes <think>hm</think>")]),
    "text, nearly": ("text", "q", "<thin ice", [("answer", "<thin ice")]),
    "text, cut": ("text", "<think>", "hm</thi", [("thinking", "hm</thi")]),
    "text, closed by the prompt": ("text", "<think></think>", "<think>", [("answer", "<think>")]),
    "text, empty": ("text", "q", "<think>\n</think>\nYes", [("answer", "Yes")]),
    "answer tags": ("text-answer", "q", "<think>\nhm</think>\n<answer>\nYes</answer>", THINKING_AND_ANSWER),
    "answer tags, mentioned": (
        "text-answer",
        "<think>\n\n</think>\n",
        "<answer>\n</answer> ends it</answer>\n",
        [("answer", "</answer> ends it")],
    ),
    "answer tags, none": (
        "text-answer",
        "q",
        "<think>hm</think>Yes</answer>",
        [*THINKING_AND_ANSWER[:1], ("answer", "Yes</answer>")],
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_thinking_stands_apart_where_the_model_puts_it(name: str) -> None:
    vocabulary, prompt, written, expected = SENTENCES[name]
    text = MARKED[vocabulary]
    assert [split(text, prompt, written, seed=seed)[0] for seed in range(4)] == [expected] * 4


CALL = '{"a": 1}'


@pytest.mark.parametrize(
    ("before", "header"),
    [
        ("", " to=functions.f<|channel|>commentary json<|message|>"),
        ("", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"),
        (f"{ANALYSIS}hm<|end|>{START}", "<|channel|>analysis to=functions.f code<|message|>"),
    ],
)
def test_headers_mark_calls(before: str, header: str) -> None:
    expected = [("thinking", "hm")] * bool(before) + [("call", f"{START}{header}{CALL}")]
    for end in ("<|call|>", "<|end|>", f"<|end|>{START}{FINAL}Yes"):
        found, _ = split(MARKED["harmony"], START, f"{before}{header}{CALL}{end}", HEADERS)
        assert found == expected + [("answer", "Yes")] * end.endswith("Yes")


@pytest.mark.parametrize(("last", "texts"), [("none", ["f{}", "g{}"]), ("f{}", ["f{}"])])
def test_calls_without_a_closing_marker_end_with_the_answer(last: str, texts: list[str]) -> None:
    """After the last call no other one begins."""
    text, calls = MARKED["brackets"], Markers("[CALLS]", "")
    tokens = text.encode("[THINK]hm[/THINK]Yes[CALLS]f{}[CALLS]g{}<|ends|>")
    answer = AnswerStream(text, [], calls=calls, last_call=last.__eq__)
    parts = [part for token in tokens for part in answer.read(Round([token], 0, 0, "plain"))]
    found = [part for part in parts if part.kind == "call"]
    assert [part.call for part in found if part.closed] == list(range(len(texts)))
    assert {part.call for part in found} == set(range(len(texts)))
    assert "".join(part.text for part in found) == "".join(texts)


def test_thinking_may_follow_a_call() -> None:
    written = "<think>a</think>b<tool_call>c</tool_call>\n<think>d</think>e <think>"
    text = marked(added=["<think>", "</think>", QWEN.open, QWEN.close])
    assert split(text, "q", written, QWEN)[0] == [
        ("thinking", "a"),
        ("answer", "b"),
        ("call", "c"),
        ("thinking", "d"),
        ("answer", "e <think>"),
    ]


def test_a_tag_that_is_a_token_is_not_the_tag_in_other_tokens() -> None:
    text = marked(added=["<think>", "</think>"])
    spelled = [token for letter in "<think>" for token in text.encode(letter)]
    assert split(text, "q", [*spelled, *text.encode("hm")])[0] == [("answer", "<think>hm")]
    assert split(text, "<think>", [*spelled, *text.encode("</think>Yes")])[0] == [
        ("thinking", "<think>"),
        ("answer", "Yes"),
    ]


def test_tokens_of_marks_count_as_thinking() -> None:
    text = MARKED["harmony"]
    thought = f"{ANALYSIS}hm<|end|>"
    assert split(text, START, f"{thought}{START}{FINAL}Yes")[1] == len(text.encode(thought))
    text = MARKED["text"]
    assert split(text, "q", "<think>hm</think>Yes")[1] == len(text.encode("<think>hm</think>"))
    assert split(text, "q", "<thin ice")[1] == 0


def test_a_token_may_end_a_tag_of_text_with_space_but_not_with_text() -> None:
    text = marked(template="<think></think>", merges=[(">", "a"), (">", "Ċ")])
    segmenter = Segmenter(text.marks)
    segment = segmenter.begin(text.encode("<think>"))
    for token in text.encode("hm</think"):
        segment, _ = segmenter.read(segment, text.decode([token]))
    assert segmenter.marks.forbidden(segment) == {text.token_id(">a")}


def test_a_token_that_ends_a_tag_keeps_its_log_probability() -> None:
    text = marked(template="<think></think>", merges=[(">", "a")])
    tokens = text.encode("<think>hm</think>ab")
    assert text.token_bytes(tokens[-2]) == b">a"
    answer = AnswerStream(text, text.encode("q"))
    logprobs = [TokenLogprob(token, text.token_bytes(token), 0.0) for token in tokens]
    parts = [*answer.read(Round(tokens, 0, 0, "plain"), logprobs), *answer.end()]
    found = [each.token for part in parts if part.kind == "answer" for each in part.logprobs]
    assert found == tokens[-2:]


def test_the_template_decides_which_marks_count() -> None:
    tags = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>"]
    for template, opening in (
        ("", "<|channel>"),
        ("a [THINK] b [/THINK]", "[THINK]"),
        ("b</think>", "<think>"),
    ):
        marks = marked(added=tags, template=template).marks
        assert isinstance(marks, TokenTagMarks) and marks.tags.open == opening
    marks = marked(added=tags, template="<reasoning></reasoning>").marks
    assert isinstance(marks, TextTagMarks) and marks.tags.open == "<reasoning>"
    marks = marked([*HARMONY, *tags], template="<|start|><|channel|><|message|><|end|>").marks
    assert isinstance(marks, MessageMarks)
    assert isinstance(marked([*HARMONY, *tags], template="<think></think>").marks, TokenTagMarks)
    assert marked(template="no marks").marks is None and marked(["<|start|>", "<|message|>"]).marks is None


def test_harmony_ends_where_no_configuration_says_so() -> None:
    text = MARKED["harmony"]
    assert {text.token_id("<|return|>"), text.token_id("<|call|>")} < text.eos
    assert text.token_id("<|end|>") not in text.eos


PIECES = {
    "harmony": [
        *HARMONY[:5],
        "assistant",
        "analysis",
        "final",
        "commentary",
        " to=",
        "functions.f",
        "a",
        " ",
    ],
    "kimi-k3": ["<|open|>", "<|close|>", "<|sep|>", "think", "response", "tools", "a", " "],
    "brackets": ["[THINK]", "[/THINK]", "[CALLS]", "[", "THINK]", "\n", "a"],
    "text-answer": ["<think>", "</think>", "<answer>", "</answer>", "<", "/think>", "\n", "é", "a"],
}


@pytest.mark.parametrize("name", PIECES)
def test_nothing_depends_on_how_the_text_is_cut(name: str) -> None:
    """Neither the rounds nor, where tags are text, the tokens of an answer change its pieces."""
    text, kinds = MARKED[name], set()
    for seed in range(200):
        draw = random.Random(seed)
        written = "".join(draw.choices(PIECES[name], k=draw.randint(1, 12)))
        prompt = draw.choice(["q", START, "<think>\n", "[THINK]", "<|open|>think<|sep|>"])
        whole = split(text, prompt, written)
        assert whole == split(text, prompt, written, seed=seed + 1)
        kinds |= {kind for kind, _ in whole[0]}
        shown = "".join(piece for _, piece in whole[0])
        assert shown.count("a") <= written.count("a") and shown.count("é") == written.count("é")
        if name == "text-answer":
            spelled = [token for letter in written for token in text.encode(letter)]
            assert split(text, prompt, spelled)[0] == whole[0]
    assert kinds == {"answer", "thinking"}


def test_a_stop_string_counts_in_what_is_not_a_header_after_all() -> None:
    text = MARKED["harmony"]
    answer = AnswerStream(text, text.encode(START), stop=["e"])
    parts = answer.read(Round(text.encode(f"{ANALYSIS}hm<|end|>Yes, yes"), 0, 0, "plain"))
    assert [(part.kind, part.text) for part in parts] == [("thinking", "hm"), ("answer", "Y")]
    assert answer.finished == "e"
    answer = AnswerStream(text, text.encode(START), stop=["s"])
    (part,) = answer.read(Round(text.encode("assistance"), 0, 0, "plain"))
    assert (part.text, answer.finished) == ("a", "s")


def test_a_text_completion_has_no_marks() -> None:
    answer = AnswerStream(TEXTS["byte_level"], None)
    (part,) = answer.read(Round(TEXTS["byte_level"].encode("<think>a</think>"), 0, 0, "plain"))
    assert (part.kind, part.text) == ("answer", "<think>a</think>")
