"""Which marks of thinking a model has, and where they count. Nothing depends on the tokens of the text."""

from __future__ import annotations

import random

import pytest
from support.streams import streamed, texts
from support.vocabularies import HARMONY, MARKED, QWEN, TEXTS, marked

from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.segments import Segmenter
from mlx_spec.tokenizer.stream import AnswerStream
from mlx_spec.tokenizer.thinking import Markers, MessageMarks, TextTagMarks, TokenTagMarks
from mlx_spec.types import Round, TokenLogprob

START = "<|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
HEADERS = Markers("<|start|>", "<|call|>")


def split(
    tokenizer: Tokenizer, prompt: str, written: str | list[int], calls: Markers | None = None, seed: int = 0
) -> tuple[list[tuple[str, str]], int]:
    """Return the kinds and texts of an answer, and its tokens of thinking."""
    answer = AnswerStream(tokenizer, tokenizer.encode(prompt), calls=calls)
    tokens = tokenizer.encode(written) if isinstance(written, str) else written
    parts = streamed(answer, tokenizer, tokens, random.Random(seed) if seed else None)
    return texts(parts), answer.reasoning_tokens


KIMI = '<|open|>message role="assistant"<|sep|>'
KIMI_ANSWER = "Yes<|close|>response<|sep|>"
SENTENCES = {  # vocabulary and case: end of the prompt, what the model writes, its thinking, its answer
    "harmony": (START, f"{ANALYSIS}hm<|end|>{START}{FINAL}Yes<|return|>", "hm", "Yes"),
    "harmony, the channel open": (f"{START}{ANALYSIS}", f"hm<|end|>{START}{FINAL}Yes", "hm", "Yes"),
    "harmony, no thinking": (START, f"{FINAL}Yes", "", "Yes"),
    "harmony, constrained": (START, "<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    "harmony, a stray channel": (
        START,
        f"<|channel|>commentary{ANALYSIS}hm<|end|>{START}{FINAL}Yes",
        "hm",
        "Yes",
    ),
    "harmony, no start": (START, f"{ANALYSIS}hm{FINAL}Yes", "hm", "Yes"),
    "harmony, two thoughts": (
        START,
        f"{ANALYSIS}h<|end|>{START}{ANALYSIS}m<|end|>{START}{FINAL}Yes",
        "hm",
        "Yes",
    ),
    "harmony, a preamble": (
        START,
        f"<|channel|>commentary<|message|>Yes, <|end|>{START}{FINAL}I do",
        "",
        "Yes, I do",
    ),
    "harmony, no header": (START, "assist to", "", "assist to"),
    "harmony, no header after a message": (START, f"{ANALYSIS}hm<|end|>Yes", "hm", "Yes"),
    "harmony, half a header": (START, "<|channel|>ana", "", ""),
    "harmony, a header without end": (START, f"<|channel|>{'x' * 60}", "", "x" * 60),
    "harmony, tags": (START, f"{FINAL}<think> </think>", "", "<think> </think>"),
    "harmony, a call that is not asked for": (
        START,
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "",
        "{}",
    ),
    "harmony, a tool of its own": (
        START,
        f"<|channel|>analysis to=python code<|message|>hm<|end|>{START}{FINAL}Yes",
        "hm",
        "Yes",
    ),
    "muse": (START, f" to=self<|message|>hm<|eom|>{START} to=user<|message|>Yes", "hm", "Yes"),
    "solar": ("<|begin|>assistant", "<|think|>hm<|end|><|begin|>assistant<|content|>Yes", "hm", "Yes"),
    "kimi-k3": (
        f"{KIMI}<|open|>think<|sep|>",
        f"hm<|close|>think<|sep|><|open|>response<|sep|>{KIMI_ANSWER}<|close|>message<|sep|><|end_of_msg|>",
        "hm",
        "Yes",
    ),
    "kimi-k3, no thinking": (f"{KIMI}<|open|>response<|sep|>", KIMI_ANSWER, "", "Yes"),
    "brackets": ("q", "[THINK]hm[/THINK]Yes<|ends|>", "hm", "Yes"),
    "brackets, the prompt opens": ("q[THINK]", "hm[/THINK]Yes", "hm", "Yes"),
    "brackets, opened twice": ("q[THINK]", "[THINK]hm[/THINK]Yes", "hm", "Yes"),
    "brackets, only closed": ("q", "[/THINK]Yes", "", "Yes"),
    "brackets, mentioned": (
        "q",
        "[THINK]hm[/THINK]Yes, [THINK] and [/THINK]",
        "hm",
        "Yes, [THINK] and [/THINK]",
    ),
    "brackets, space around": ("q", " \n[THINK]\nhm[/THINK]\n\nYes", "hm", "Yes"),
    "brackets, only space": ("q", " \n", "", " \n"),
    "brackets, empty": ("q", "[THINK]\n\n[/THINK]\n\nYes", "", "Yes"),
    "brackets, cut": ("q", "[THINK]", "", ""),
    "brackets, closed by the prompt": ("[THINK]\n\n[/THINK]\n\n", "[THINK] is a tag", "", "[THINK] is a tag"),
    "seed": ("q", "<seed:think>hm</seed:think>Yes", "hm", "Yes"),
    "seed, another tag": ("q", "<think>hm</think>Yes", "", "<think>hm</think>Yes"),
    "text": ("q", "<think>\nhm</think>\nYes", "hm", "Yes"),
    "text, the prompt opens": ("<think>\n", "hm</think>Yes", "hm", "Yes"),
    "text, mentioned": ("q", "<think>hm</think>Yes </think> <think>", "hm", "Yes </think> <think>"),
    "text, later": ("q", "Yes <think>hm</think>", "", "Yes <think>hm</think>"),
    "text, nearly": ("q", "<thin ice", "", "<thin ice"),
    "text, cut": ("<think>", "hm</thi", "hm</thi", ""),
    "text, closed by the prompt": ("<think></think>", "<think>", "", "<think>"),
    "text, empty": ("q", "<think>\n</think>\nYes", "", "Yes"),
    "text-answer": ("q", "<think>\nhm</think>\n<answer>\nYes</answer>", "hm", "Yes"),
    "text-answer, mentioned": (
        "<think>\n\n</think>\n",
        "<answer>\n</answer> ends it</answer>\n",
        "",
        "</answer> ends it",
    ),
    "text-answer, none": ("q", "<think>hm</think>Yes</answer>", "hm", "Yes</answer>"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_thinking_stands_apart_where_the_model_puts_it(name: str) -> None:
    prompt, written, thinking, said = SENTENCES[name]
    text, expected = MARKED[name.split(",")[0]], [("thinking", thinking), ("answer", said)]
    pieces = [split(text, prompt, written, seed=seed)[0] for seed in range(4)]
    assert pieces == [[piece for piece in expected if piece[1]]] * 4


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
    "harmony": [*HARMONY[:5], *"assistant analysis final commentary functions.f a".split(), " to=", " "],
    "kimi-k3": [*"<|open|> <|close|> <|sep|> think response tools a".split(), " "],
    "brackets": [*"[THINK] [/THINK] [CALLS] [ THINK] a".split(), "\n"],
    "text-answer": [*"<think> </think> <answer> </answer> < /think> é a".split(), "\n"],
}


@pytest.mark.parametrize("name", PIECES)
def test_nothing_depends_on_how_the_text_is_cut(name: str) -> None:
    """Neither the rounds nor, where tags are text, the tokens of an answer change its pieces."""
    text, kinds = MARKED[name], set()
    for seed in range(120):
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
