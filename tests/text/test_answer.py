"""An answer is the same whatever rounds its tokens came in; stop strings end it wherever they stand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import mlx_spec
from mlx_spec.errors import InvalidValue
from mlx_spec.pair import Pair
from mlx_spec.text import Text, read_tokenizer
from mlx_spec.text.stream import AnswerStream, Span, TextPart
from mlx_spec.text.tokenizer import Markers
from mlx_spec.types import Round, TokenLogprob

DEMO = Path(__file__).parents[2] / "mlx_spec/demo/target"
GEMMA, QWEN = Markers("<|tool_call>", "<tool_call|>"), Markers("<tool_call>", "</tool_call>")
WORDS = "request requests quest rest stop stopped the end ending of it all café 👍 日本 "


def words() -> Text:
    """A byte-level vocabulary with whole words, marks that are not special, and an end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    tokenizer.add_tokens(["<think>", "</think>", QWEN.open, QWEN.close])
    return Text(tokenizer, None, [tokenizer.token_to_id("<|im_end|>")])


TEXTS = {"words": words(), "demo": Text(read_tokenizer(DEMO), None, [1])}
CALLS = {"words": QWEN, "demo": GEMMA}


def token(text: Text, name: str) -> int:
    found = text.token_id(name)
    assert found is not None
    return found


def logprobs_of(text: Text, tokens: Sequence[int]) -> list[TokenLogprob]:
    """One for each token, told apart by its value."""
    return [TokenLogprob(t, text.token_bytes(t), -i / 8) for i, t in enumerate(tokens)]


def grouped(tokens: Sequence[int], draw: random.Random | None) -> list[Round]:
    """The tokens in rounds of random lengths, as drafts and plain; without `draw`, one by one."""
    rounds, rest = [], list(tokens)
    while rest:
        size = 1 if draw is None else min(draw.randint(1, 6), len(rest))
        accepted = size - 1 if draw is None or draw.random() < 0.8 else size
        rounds.append(Round(rest[:size], size, accepted, drafter=draw and draw.randint(0, 1)))
        rest = rest[size:]
    return rounds


def played(answer: AnswerStream, text: Text, tokens: Sequence[int], draw: random.Random | None) -> list[TextPart]:
    parts, given, logprobs = [], 0, logprobs_of(text, tokens)
    for round in grouped(tokens, draw):
        parts += answer.read(round, logprobs[given : given + len(round.tokens)])
        given += len(round.tokens)
    return parts + answer.end()


Joined = tuple[str, int | None, str, tuple[TokenLogprob, ...], bool]


def joined(parts: Sequence[TextPart]) -> list[Joined]:
    """Parts with neighbours of one kind and call joined, without their spans. No half characters."""
    assert not any("\ufffd" in part.text for part in parts)
    return half(parts)


def half(parts: Sequence[TextPart]) -> list[Joined]:
    """The same, with half characters."""
    found: list[Joined] = []
    for part in parts:
        assert "".join(span.text for span in part.spans) == part.text
        assert part.text or part.kind == "call"
        if found and found[-1][:2] == (part.kind, part.call):
            kind, call, text, logprobs, _ = found.pop()
            found.append((kind, call, text + part.text, logprobs + part.logprobs, part.closed))
        else:
            found.append((part.kind, part.call, part.text, part.logprobs, part.closed))
    return found


def texts(parts: Sequence[TextPart]) -> list[tuple[str, str]]:
    return [(kind, text) for kind, _, text, _, _ in joined(parts)]


# --- nothing depends on the rounds


def random_answer(name: str, draw: random.Random) -> list[int]:
    """Tokens of answer, thoughts and calls, with characters that several tokens make."""
    text, marks = TEXTS[name], CALLS[name]
    opening, closing = ("<think>", "</think>") if name == "words" else ("<|channel>", "<channel|>")
    tokens = []
    for _ in range(draw.randint(1, 5)):
        words = WORDS.split()
        said = " ".join(draw.choice(words) for _ in range(draw.randint(0, 6)))
        said = draw.choice(["", " ", "\n\n", "thought\n", "thou"]) + said
        around = draw.choice([("", ""), ("", ""), (opening, closing), (marks.open, marks.close)])
        tokens += text.encode(around[0] + said + around[1])
    return tokens + draw.choice([[], [next(iter(text.eos))]])


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_depends_on_the_rounds(name: str) -> None:
    text = TEXTS[name]
    kinds, finished = set(), 0
    for seed in range(150):
        draw = random.Random(seed)
        tokens = random_answer(name, draw)
        stop = draw.choice([(), ("quest",), (" of", "t\n"), ("👍", "ed s"), ("日本 ", "é")])
        prompt = text.encode("<think>") if draw.random() < 0.1 else []
        results = []
        for how in (None, random.Random(seed), random.Random(-seed - 1)):
            answer = AnswerStream(text, prompt, stop=stop, calls=CALLS[name])
            parts = joined(played(answer, text, tokens, how))
            results.append((parts, answer.finished, answer.completion_tokens, answer.reasoning_tokens))
        assert results[0] == results[1] == results[2], seed
        kinds |= {part[0] for part in results[0][0]}
        finished += results[0][1] is not None
    assert kinds == {"answer", "thinking", "call"} and 10 < finished < 140


@pytest.mark.parametrize("name", TEXTS)
def test_logprobs_are_those_of_the_text(name: str) -> None:
    text = TEXTS[name]
    for seed in range(60):
        tokens = text.encode(" ".join(random.Random(seed).choices(WORDS.split(), k=12)))
        eos = next(iter(text.eos))
        parts = played(AnswerStream(text, None), text, [*tokens, eos], random.Random(seed))
        ((_, _, said, logprobs, _),) = joined(parts)
        assert list(logprobs) == logprobs_of(text, tokens)  # without the end of text
        assert b"".join(each.written for each in logprobs).decode() == said


# --- stop strings


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None, int]:
    """What stands before the stop string that is complete first; that string; how much text it takes."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, len(text)


@pytest.mark.parametrize("name", TEXTS)
def test_stop_strings_anywhere(name: str) -> None:
    text, seen = TEXTS[name], set()
    for seed in range(400):
        draw = random.Random(seed)
        pieces = ["a", "b", "ab", "request", "stop", " ", "é", "👍", "日本"]
        tokens = [t for _ in range(8) for t in text.encode("".join(draw.choices(pieces, k=2)))]
        whole = text.decode(tokens)
        starts = [draw.randrange(len(whole)) for _ in range(draw.randint(1, 3))]
        stops = [whole[at : at + draw.randint(1, 6)] for at in starts] + ["aba?", "👍👍👍👍"]
        said, string, end = cut(whole, stops)
        answer = AnswerStream(text, None, stop=stops)
        parts = played(answer, text, tokens, draw)
        assert ("".join(part.text for part in parts), answer.finished) == (said, string), seed
        written = [text.token_bytes(t) for t in tokens]
        ends = [len(b"".join(written[: i + 1]).decode(errors="ignore")) for i in range(len(tokens))]
        assert answer.completion_tokens == 1 + next(i for i, at in enumerate(ends) if at >= end)
        begun = [i for i in range(len(tokens)) if (ends[i - 1] if i else 0) < len(said)]
        assert [each for part in parts for each in part.logprobs] == logprobs_of(text, tokens)[: len(begun)]
        assert string is not None
        seen.add(len(said) in ends)
    assert seen == {True, False}  # between tokens, and inside of one


def test_a_stop_string_inside_a_token() -> None:
    text = TEXTS["words"]
    tokens = text.encode("the request of it")
    names = [text.token_bytes(t).decode() for t in tokens]
    assert names == ["the", " request", " of", " it"]
    answer = AnswerStream(text, None, stop=["quest"])
    parts = answer.read(Round(tokens, 3, 3, drafter=0), logprobs_of(text, tokens))
    assert [(p.text, len(p.logprobs)) for p in parts] == [("the re", 2)]
    assert (answer.finished, answer.completion_tokens) == ("quest", 2)
    assert answer.read(Round(tokens, 0, 0)) == [] and answer.end() == []
    assert answer.completion_tokens == 2
    # a token whose beginning was given before the rest was held counts once
    answer = AnswerStream(text, None, stop=["est of"])
    logprobs = logprobs_of(text, tokens)
    parts = [
        part for i, t in enumerate(tokens) for part in answer.read(Round([t], 0, 0), logprobs[i : i + 1])
    ]
    assert [(p.text, len(p.logprobs)) for p in parts] == [("th", 1), ("e requ", 1)]
    assert (answer.finished, answer.completion_tokens) == ("est of", 3)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    text = TEXTS["words"]
    answer = AnswerStream(text, None, stop=["the end.", "ends"])
    given = [answer.read(Round([t], 0, 0)) for t in text.encode("all the end")]
    assert [[part.text for part in parts] for parts in given] == [["al"], ["l"], [" "], []]
    assert [part.text for part in answer.end()] == ["the end"]
    assert answer.finished is None and answer.completion_tokens == 4


def test_the_stop_string_that_is_complete_first() -> None:
    text = TEXTS["words"]
    for stops, said, finished in (
        (["abc", "b"], "xa", "b"),
        (["b", "abc"], "xa", "b"),
        (["bc", "abc", "c"], "x", "abc"),
        (["cd", "xabcd"], "", "xabcd"),
    ):
        answer = AnswerStream(text, None, stop=stops)
        parts = played(answer, text, text.encode("xabcd"), None)
        assert ("".join(p.text for p in parts), answer.finished) == (said, finished)


def test_stop_strings_count_in_the_answer_only() -> None:
    text = TEXTS["words"]
    source = "<think>\nthe end</think>\n\nall <tool_call>the end</tool_call> the rest"
    answer = AnswerStream(text, [], stop=["the end", "l t"], calls=QWEN)
    assert texts(played(answer, text, text.encode(source), None)) == [
        ("thinking", "the end"),
        ("answer", "all "),
        ("call", "the end"),
        ("answer", "the rest"),
    ]
    assert answer.finished is None
    plain = AnswerStream(text, None, stop=["the end"])
    assert texts(played(plain, text, text.encode(source), None)) == [("answer", "<think>\n")]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidValue, match="stop string is empty"):
        AnswerStream(TEXTS["words"], None, stop=["a", ""])


# --- kinds


def test_calls_are_counted_and_closed() -> None:
    text = TEXTS["demo"]
    source = '<|tool_call>call:f{a:<|"|>é<|"|>}<tool_call|><|tool_call><tool_call|> so <|tool_call>call:g{'
    for draw in (None, random.Random(1), random.Random(2)):
        answer = AnswerStream(text, [], calls=GEMMA)
        found = joined(played(answer, text, text.encode(source), draw))
        assert [(kind, call, said, closed) for kind, call, said, _, closed in found] == [
            ("call", 0, 'call:f{a:<|"|>é<|"|>}', True),
            ("call", 1, "", True),
            ("answer", None, "so ", False),
            ("call", 2, "call:g{", False),
        ]
        assert answer.calls == GEMMA  # what cuts such a call off: its marks and its text are all there was
    cut_off = played(AnswerStream(text, [], calls=GEMMA), text, text.encode("<|tool_call>"), None)
    assert cut_off == [TextPart("call", "", call=0)]
    assert AnswerStream(text, [], calls=QWEN).calls is None and AnswerStream(text, []).calls is None


def test_reasoning_tokens_are_those_of_thoughts() -> None:
    text = TEXTS["words"]
    for prompt, source, thoughts in (
        ("", "<think>the end</think>all of it", "<think>the end</think>"),
        ("<think>\n", "the end</think>all", "the end</think>"),
        ("", "all of it", ""),
        ("", "all<think>of", "<think>of"),
    ):
        answer = AnswerStream(text, text.encode(prompt))
        tokens = text.encode(source)
        played(answer, text, tokens, random.Random(0))
        assert answer.reasoning_tokens == len(text.encode(thoughts))
        assert answer.completion_tokens == len(tokens)


# --- origin


def test_spans_tell_where_text_came_from() -> None:
    text = TEXTS["words"]
    tokens = text.encode("the end of it")
    assert len(tokens) == 4
    answer = AnswerStream(text, None)
    (part,) = answer.read(Round(tokens, 5, 3, drafter=1))
    assert part.spans == (Span("the", 1, 1), Span(" end", 1, 2), Span(" of", 1, 3), Span(" it", None, 0))
    (part,) = answer.read(Round(tokens[:2], 5, 2, drafter=0))  # cut at an end of text
    assert part.spans == (Span("the", 0, 1), Span(" end", 0, 2))
    (part,) = answer.read(Round(tokens[:1], 0, 0, drafter=0))  # a shadow token was compared
    assert part.spans == (Span("the", None, 0),)


@pytest.mark.parametrize("name", TEXTS)
def test_a_character_of_several_tokens_is_one_span(name: str) -> None:
    text = TEXTS[name]
    tokens = text.encode("🎉")
    assert len(tokens) >= 3
    answer, logprobs = AnswerStream(text, None), logprobs_of(text, tokens)
    assert answer.read(Round(tokens[:2], 2, 2, drafter=0), logprobs[:2]) == []
    (part,) = answer.read(Round(tokens[2:], 9, len(tokens) - 2, drafter=1), logprobs[2:])
    assert part.spans == (Span("🎉", 1, len(tokens) - 2),) and list(part.logprobs) == logprobs


def test_half_a_character_is_given_at_the_end() -> None:
    text = TEXTS["demo"]
    tokens = [token(text, "<0xF0>"), token(text, "<0x9F>")]
    answer = AnswerStream(text, None)
    assert answer.read(Round(tokens, 0, 0), logprobs_of(text, tokens)) == []
    (part,) = answer.end()
    assert set(part.text) == {"\ufffd"} and list(part.logprobs) == logprobs_of(text, tokens)


def test_tokens_without_visible_text_have_no_logprobs() -> None:
    text = TEXTS["demo"]
    tokens = [*text.encode("<|channel>thought\nthe end<channel|>\n\nall of"), token(text, "<0xF0>"), 1]
    answer = AnswerStream(text, [])
    found = {
        kind: (said, logprobs) for kind, _, said, logprobs, _ in half(played(answer, text, tokens, None))
    }
    assert found["thinking"][0] == "the end" and found["answer"][0] == "all of\ufffd"
    for said, logprobs in found.values():
        written = b"".join(each.written for each in logprobs)
        assert written.decode(errors="replace") == said


# --- the demo pair


@pytest.fixture(scope="module")
def told() -> list[tuple[Pair, list[int], list[Round]]]:
    """The same question to the demo pair without drafts and with: pair, prompt and rounds."""
    found = []
    for drafts in (0, 5):
        pair = mlx_spec.load("demo", num_draft_tokens=drafts)
        prompt = pair.text.prompt([{"role": "user", "content": "What is the capital of France?"}])
        found.append((pair, prompt, list(pair.generate(prompt, max_tokens=60))))
    return found


@pytest.mark.parametrize("stop", [(), ("apit",), (" of",), ("no such text",)])
def test_speculation_does_not_show(
    told: list[tuple[Pair, list[int], list[Round]]], stop: tuple[str, ...]
) -> None:
    found, drafted = [], []
    for pair, prompt, rounds in told:
        answer, parts = AnswerStream(pair.text, prompt, stop=stop), []
        for round in rounds:
            parts += answer.read(round, logprobs_of(pair.text, round.tokens))
            if answer.finished is not None:
                break
        parts += answer.end()
        drafted.append(any(span.position > 0 for part in parts for span in part.spans))
        found.append((texts(parts), answer.finished, answer.completion_tokens))
        assert len(texts(parts)) == 1 and not any(string in texts(parts)[0][1] for string in stop)
    assert found[0] == found[1] and found[0][0][0][1]
    assert drafted == [False, True]
