"""The text of an answer is the same whatever rounds its tokens came in, and never holds half a character."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.streams import joined, logprobs_of, round_of, said, streamed, texts
from support.vocabularies import DEMO, GEMMA, GOLDEN, QWEN, SAMPLES, TEXTS, byte_level, random_text

from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.tokenizer import Tokenizer, read_fast_tokenizer, read_tokenizer
from mlx_spec.tokenizer.detokenizer import Detokenizer
from mlx_spec.tokenizer.stream import AnswerStream, TextPart, TokenText
from mlx_spec.tokenizer.thinking import Markers

WORDS = "request requests quest rest stop stopped the end ending of it all café 👍 日本 "
_WORDS = byte_level([WORDS] * 20, [QWEN.open, QWEN.close], size=332)
ANSWERS = {
    "words": Tokenizer(_WORDS, None, [_WORDS.token_to_id("<|im_end|>")]),
    "demo": Tokenizer(read_fast_tokenizer(Checkpoint(DEMO)), None, [1]),
}
CALLS = {"words": QWEN, "demo": GEMMA}


def token_id(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_id(name)
    assert found is not None
    return found


# --- whole characters


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_make_up_the_whole_text(name: str) -> None:
    text = TEXTS[name]
    for sample in [*SAMPLES, *(random_text(seed) for seed in range(60))]:
        tokens = text.encode(sample)
        detokenizer = Detokenizer(text.decode)
        pieces = [*(detokenizer.add(token) for token in tokens), detokenizer.end()]
        assert "".join(pieces) == text.decode(tokens)
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_broken_character_leaves_those_before_it_alone() -> None:
    """A vocabulary of single bytes decodes neighbours together: 😀 and half an é as five broken ones."""
    text = ANSWERS["demo"]
    smile, accent, letter = map(text.encode, ("😀", "é", "x"))
    for rest, expected in (([], "\ufffd"), (letter[-1:], "\ufffdx")):
        detokenizer = Detokenizer(text.decode)
        pieces = [detokenizer.add(token) for token in [*smile, *accent[:-1], *rest]]
        assert "".join([*pieces, detokenizer.end()]) == f"😀{expected}"


# --- thinking and calls


CALL = 'call:f{a:<|"|>x <b> é<|"|>,n:1}'


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("byte_level", "<think>\nhm 👍\n</think>\n\nYes", [("thinking", "hm 👍\n"), ("answer", "Yes")]),
        ("byte_level", "one<|im_end|> two", [("answer", "one two")]),
        ("golden", "<|channel>thought\nhm<channel|>Yes", [("thinking", "hm"), ("answer", "Yes")]),
        ("golden", "<|channel>thought\n<channel|>Yes", [("answer", "Yes")]),
        ("golden", "<|channel>thou", [("thinking", "thou")]),
        ("golden", "<|channel>other\nhm<channel|>Yes", [("thinking", "other\nhm"), ("answer", "Yes")]),
        ("golden", "a <|channel>b<channel|> c", [("answer", "a "), ("thinking", "b"), ("answer", "c")]),
        (
            "golden",
            f"One <|tool_call>{CALL}<tool_call|>\n two",
            [("answer", "One "), ("call", CALL), ("answer", "two")],
        ),
        ("golden", "<|tool_call> a<|tool_call>b", [("call", " a<|tool_call>b")]),
        ("golden", "<|tool_call>a<|channel>b<tool_call|>c", [("call", "a<|channel>b"), ("answer", "c")]),
        ("golden", "<|channel>thought\nhm <|tool_call>a", [("thinking", "hm a")]),
        ("golden", "a<tool_call|>b", [("answer", "ab")]),
    ],
)
def test_kinds_of_text_stand_apart(name: str, source: str, expected: list) -> None:
    assert said(TEXTS[name], source, calls=GEMMA) == expected


def test_a_prompt_may_open_the_thinking() -> None:
    text, opening = TEXTS["byte_level"], "<|im_start|>assistant\n<think>\n"
    assert said(text, "hm</think>\nYes", opening) == [("thinking", "hm"), ("answer", "Yes")]
    assert said(text, "Yes", f"{opening}\n</think>\n\n") == [("answer", "Yes")]


def test_end_tokens_are_hidden() -> None:
    tokenizer = byte_level()
    letter = tokenizer.token_to_id("b")
    text = Tokenizer(tokenizer, None, [letter])
    assert texts(streamed(AnswerStream(text, []), text, [*text.encode("a"), letter])) == [("answer", "a")]
    text = read_tokenizer(read_checkpoint(GOLDEN))
    assert said(text, "<|tool_call>call:f{<turn|>", calls=GEMMA) == [("call", "call:f{")]


def test_calls_are_read_only_between_tokens_of_the_vocabulary() -> None:
    text, source = ANSWERS["words"], '<tool_call>\n{"a": 1}\n</tool_call>\n'
    assert said(text, source, calls=QWEN) == [("call", '\n{"a": 1}\n')]
    half = Markers(QWEN.open, "[no such token]")
    for prompt, calls in (("", None), ("", half), (None, QWEN)):
        assert said(text, source, prompt, calls=calls) == [("answer", text.decode(text.encode(source)))]


# --- nothing depends on the rounds


def random_answer(name: str, draw: random.Random) -> list[int]:
    """Tokens of answer, thinking and calls, with characters of several tokens."""
    text, calls = ANSWERS[name], CALLS[name]
    opening, closing = ("<think>", "</think>") if name == "words" else ("<|channel>", "<channel|>")
    tokens = []
    for _ in range(draw.randint(1, 5)):
        said = " ".join(draw.choice(WORDS.split()) for _ in range(draw.randint(0, 6)))
        said = draw.choice(["", " ", "\n\n", "thought\n", "thou"]) + said
        around = draw.choice([("", ""), ("", ""), (opening, closing), (calls.open, calls.close)])
        tokens += text.encode(around[0] + said + around[1])
    return tokens + draw.choice([[], [next(iter(text.eos))]])


@pytest.mark.parametrize("name", ANSWERS)
def test_nothing_depends_on_the_rounds(name: str) -> None:
    text, kinds, finished = ANSWERS[name], set(), 0
    for seed in range(150):
        draw = random.Random(seed)
        tokens = random_answer(name, draw)
        stop = draw.choice([(), ("quest",), (" of", "t\n"), ("👍", "ed s"), ("日本 ", "é")])
        prompt = text.encode("<think>") if draw.random() < 0.1 else []
        results = []
        for how in (None, random.Random(seed), random.Random(-seed - 1)):
            answer = AnswerStream(text, prompt, stop=stop, calls=CALLS[name])
            parts = joined(streamed(answer, text, tokens, how))
            assert not any("\ufffd" in part[2] for part in parts)
            results.append((parts, answer.finished, answer.completion_tokens, answer.reasoning_tokens))
        assert results[0] == results[1] == results[2], seed
        kinds |= {part[0] for part in results[0][0]}
        finished += results[0][1] is not None
    assert kinds == {"answer", "thinking", "call"} and 10 < finished < 140


# --- stop strings


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None, int]:
    """Return the text before the stop string that is complete first, that string, and where it ends."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, len(text)


@pytest.mark.parametrize("name", ANSWERS)
def test_stop_strings_anywhere(name: str) -> None:
    text, between_tokens = ANSWERS[name], set()
    for seed in range(400):
        draw = random.Random(seed)
        pieces = ["a", "b", "ab", "request", "stop", " ", "é", "👍", "日本"]
        tokens = [t for _ in range(8) for t in text.encode("".join(draw.choices(pieces, k=2)))]
        whole = text.decode(tokens)
        starts = [draw.randrange(len(whole)) for _ in range(draw.randint(1, 3))]
        stops = [whole[at : at + draw.randint(1, 6)] for at in starts] + ["aba?", "👍👍👍👍"]
        said, string, end = cut(whole, stops)
        answer = AnswerStream(text, None, stop=stops)
        parts = streamed(answer, text, tokens, draw)
        assert ("".join(part.text for part in parts), answer.finished) == (said, string), seed
        written = [text.token_bytes(t) for t in tokens]
        ends = [len(b"".join(written[: i + 1]).decode(errors="ignore")) for i in range(len(tokens))]
        assert answer.completion_tokens == 1 + next(i for i, at in enumerate(ends) if at >= end)
        begun = [i for i in range(len(tokens)) if (ends[i - 1] if i else 0) < len(said)]
        assert [each for part in parts for each in part.logprobs] == logprobs_of(text, tokens)[: len(begun)]
        assert string is not None
        between_tokens.add(len(said) in ends)
    assert between_tokens == {True, False}


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    text = ANSWERS["words"]
    answer = AnswerStream(text, None, stop=["the end.", "ends"])
    given = [answer.read(round_of([t])) for t in text.encode("all the end")]
    assert [[part.text for part in parts] for parts in given] == [["al"], ["l"], [" "], []]
    assert [part.text for part in answer.end()] == ["the end"]
    assert answer.finished is None and answer.completion_tokens == 4


def test_stop_strings_count_in_the_answer_only() -> None:
    text = ANSWERS["words"]
    source = "<think>\nthe end</think>\n\nall <tool_call>the end</tool_call> the rest"
    answer = AnswerStream(text, [], stop=["the end", "l t"], calls=QWEN)
    assert texts(streamed(answer, text, text.encode(source))) == [
        ("thinking", "the end"),
        ("answer", "all "),
        ("call", "the end"),
        ("answer", "the rest"),
    ]
    assert answer.finished is None
    assert said(text, source, None, stop=["the end"]) == [("answer", "<think>\n")]
    answer = AnswerStream(text, [], stop=["\n\n"])
    answer.read(round_of(text.encode("\n\n")))
    assert answer.finished == "\n\n", "space that may come before thinking ends an answer at once"


# --- counts


def test_calls_are_counted_and_closed() -> None:
    text = ANSWERS["demo"]
    source = '<|tool_call>call:f{a:<|"|>é<|"|>}<tool_call|><|tool_call><tool_call|> so <|tool_call>call:g{'
    for draw in (None, random.Random(1), random.Random(2)):
        answer = AnswerStream(text, [], calls=GEMMA)
        found = joined(streamed(answer, text, text.encode(source), draw))
        assert [(kind, call, said, closed) for kind, call, said, _, closed in found] == [
            ("call", 0, 'call:f{a:<|"|>é<|"|>}', True),
            ("call", 1, "", True),
            ("answer", None, "so ", False),
            ("call", 2, "call:g{", False),
        ]
    cut_off = streamed(AnswerStream(text, [], calls=GEMMA), text, text.encode("<|tool_call>"))
    assert cut_off == [TextPart("call", "", call=0)]


@pytest.mark.parametrize(
    ("between", "shown"),
    [("; ", ""), (" ;\n", ""), ("", ""), ("\n", ""), (";", ""), ("; and ", "; and "), (";; ", ";; ")],
)
def test_separator_of_calls_is_hidden_between_two(between: str, shown: str) -> None:
    text, call = ANSWERS["demo"], "<|tool_call>call:f{}<tool_call|>"
    calls: list[tuple[str, str]] = [("call", "call:f{}"), ("call", "call:f{}")]
    for draw in (None, random.Random(1), random.Random(2)):
        for end in ("", "; ", "; so"):
            answer = AnswerStream(text, [], calls=GEMMA, separator="; ")
            source = text.encode(f"{call}{between}{call}{end}")
            said = [(kind, part) for kind, _, part, _, _ in joined(streamed(answer, text, source, draw))]
            answers = [("answer", part) for part in (shown, end)]
            expected = [calls[0], answers[0], calls[1], answers[1]]
            assert said == [piece for piece in expected if piece[1]], (between, end)


def test_stop_string_in_a_separator_ends_the_answer() -> None:
    text, call = ANSWERS["demo"], "<|tool_call>call:f{}<tool_call|>"
    answer = AnswerStream(text, [], calls=GEMMA, separator="; ", stop=[";"])
    streamed(answer, text, text.encode(f"{call}; {call}"))
    assert answer.finished == ";"


@pytest.mark.parametrize(
    ("prompt", "source", "thinking"),
    [
        ("", "<think>the end</think>all of it", "<think>the end</think>"),
        ("<think>\n", "the end</think>all", "the end</think>"),
        ("", "all of it", ""),
        ("", "all<think>of", ""),
    ],
)
def test_reasoning_tokens_are_those_of_thinking(prompt: str, source: str, thinking: str) -> None:
    text = ANSWERS["words"]
    answer, tokens = AnswerStream(text, text.encode(prompt)), text.encode(source)
    streamed(answer, text, tokens, random.Random(0))
    assert answer.reasoning_tokens == len(text.encode(thinking))
    assert answer.completion_tokens == len(tokens)


# --- origin


def test_spans_name_the_drafter_of_each_token() -> None:
    text = ANSWERS["words"]
    tokens = text.encode("the end of it")
    assert len(tokens) == 4
    answer = AnswerStream(text, None)
    (part,) = answer.read(round_of(tokens, 3, "mtp"))
    assert part.spans == (
        TokenText("the", "mtp", 1),
        TokenText(" end", "mtp", 2),
        TokenText(" of", "mtp", 3),
        TokenText(" it", None, 0),
    )
    (part,) = answer.read(round_of(tokens[:2], 2, "lookup"))  # cut at an end of text
    assert part.spans == (TokenText("the", "lookup", 1), TokenText(" end", "lookup", 2))
    (part,) = answer.read(round_of(tokens[:1], 0, "lookup"))  # nothing accepted
    assert part.spans == (TokenText("the", None, 0),)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_character_of_several_tokens_is_one_span(name: str) -> None:
    text = ANSWERS[name]
    tokens = text.encode("🎉")
    assert len(tokens) >= 3
    answer, logprobs = AnswerStream(text, None), logprobs_of(text, tokens)
    assert answer.read(round_of(tokens[:2], 2, "lookup"), logprobs[:2]) == []
    (part,) = answer.read(round_of(tokens[2:], len(tokens) - 2, "mtp"), logprobs[2:])
    assert part.spans == (TokenText("🎉", "mtp", len(tokens) - 2),) and list(part.logprobs) == logprobs
