"""Masks are those of the language, in any order of requests; grammars that are refused."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import mlx.core as mx
import pytest
from support import grammars
from support.grammars import (
    CLOSE,
    END,
    NAMES,
    OPEN,
    STOP,
    V,
    byte_text,
    compiled,
    next_letters,
    row,
    tokens_of,
)
from support.schemas import Draws
from support.vocabularies import MARKED, marked

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Grammar
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.grammar.sandbox import SANDBOX
from mlx_spec.sampling import Sampling, logits
from mlx_spec.sampling.logits import GrammarMask
from mlx_spec.tokenizer.stream import AnswerStream
from mlx_spec.types import Round

PATTERN = "(ab|cd){1,2}x?|b(a|c){0,3}d"
LANGUAGE = grammars.language(PATTERN, "abcdx", longest=5)
PREFIXES = sorted({word[:i] for word in LANGUAGE for i in range(len(word) + 1)})
ENDS = {END, STOP}
FREE = set(range(V)) - ENDS
WITH_CALLS = byte_text({**NAMES, 250: "<|tool_call>"})
NONE = mx.array([], dtype=mx.int32)


def expected(before: str) -> set[int]:
    """Return what the language allows."""
    ends = ENDS if before in LANGUAGE else set()
    return {ord(letter) for letter in next_letters(LANGUAGE, before)} | ends


def test_rows_are_those_of_the_language_after_tokens_and_drafts() -> None:
    matcher = compiled("regex", PATTERN).matcher([])
    assert len(PREFIXES) > 40
    for before in PREFIXES:  # in no order of growth: the matcher rewinds, too
        tokens = list(before.encode())
        for cut in range(len(tokens) + 1):
            rows = matcher.allowed(tokens[:cut], tokens[cut:], len(tokens) - cut + 1)
            assert [tokens_of(r) for r in rows] == [expected(before[:i]) for i in range(cut, len(tokens) + 1)]


@pytest.mark.parametrize("wrong", [ord("x"), END, OPEN, 0, 255])
def test_an_illegal_draft_token_changes_nothing(wrong: int) -> None:
    matcher, legal = compiled("regex", PATTERN).matcher([]), list(b"ab")
    rows = matcher.allowed([], [*legal[:1], wrong, *legal, wrong], 6)
    assert [tokens_of(r) for r in rows[:2]] == [expected(""), expected("a")]
    assert rows.any(axis=-1).all().item(), "a row without a token has no distribution"
    assert row(matcher, legal[:1]) == expected("a")


def test_legal_counts_up_to_the_first_illegal_token() -> None:
    matcher, legal, illegal = compiled("regex", PATTERN).matcher([]), list(b"ab"), ord("x")
    assert matcher.legal([], [*legal, illegal, *legal]) == 3
    assert matcher.legal(legal, [ord("a"), ord("a"), ord("b")]) == 1
    assert matcher.legal([], [illegal]) == 0


def test_drafts_may_go_on_after_the_end() -> None:
    matcher = compiled("regex", "ab").matcher([])
    assert row(matcher, list(b"ab")) == ENDS
    rows = matcher.allowed([], [*b"ab", END, END, *b"ab"], 7)
    assert [tokens_of(r) for r in rows[:4]] == [{ord("a")}, {ord("b")}, ENDS, ENDS]
    assert rows.any(axis=-1).all().item()
    assert matcher.legal([], [*b"ab", STOP, END]) == 3
    assert matcher.forced(list(b"ab")) == []
    assert row(matcher, [*b"ab", END]) == ENDS
    assert row(matcher, []) == {ord("a")}


def test_forced_tokens_are_the_only_allowed_ones() -> None:
    matcher = compiled("json_schema", '{"const": {"name": [1, 2]}}').matcher([])
    forced = matcher.forced([])
    assert bytes(forced) == b'{"name": [1, 2]}'
    assert all(row(matcher, forced[:i]) == {token} for i, token in enumerate(forced))
    assert matcher.forced(forced[:4]) == forced[4:]
    assert row(matcher, forced) == ENDS


def test_json_is_written_in_one_way() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    matcher = compiled("json_schema", schema).matcher([])
    assert matcher.legal([], b'{"a": 1, "b": [1, 2]}') == 21
    assert matcher.legal([], b'{ "a": 1}') == matcher.legal([], b'{"a":1}') - 4 == 1


def test_any_json_object() -> None:
    matcher = compiled("json_object", "").matcher([])
    text = '{"a": {"b": [1, "ü"]}, "c": null}'.encode()
    assert matcher.legal([], text) == len(text)
    assert matcher.legal([], b"[1]") == 0


def test_lark_with_special_tokens() -> None:
    matcher = compiled("lark", 'start: <|tool_call> "go" | "no"', tokenizer=WITH_CALLS).matcher([])
    assert row(matcher, []) == {250, ord("n")}
    assert row(matcher, [250, *b"go"]) == ENDS


CALL_OPEN, CALL_CLOSE = 250, 249
CALLS = f'start: call*\ncall: <[{CALL_OPEN}]> ("ab" | "ac") <[{CALL_CLOSE}]>'
ONE_CALL = [CALL_OPEN, *b"ab", CALL_CLOSE]


def with_calls(source: str = CALLS, *, thinks: bool = False) -> Grammar:
    text = byte_text({**NAMES, CALL_OPEN: "<|tool_call>", CALL_CLOSE: "<tool_call|>"})
    return compiled("lark", source, thinks=thinks, tokenizer=text).with_calls(CALL_OPEN, CALL_CLOSE)


def test_text_around_calls_is_free() -> None:
    matcher, anything = with_calls().matcher([]), set(range(V)) - {CALL_CLOSE}
    for free in ([], [*b"xyz"], ONE_CALL, [*b"x", *ONE_CALL, *ONE_CALL, *b"y"]):
        assert row(matcher, free) == anything
        assert row(matcher, free, [CALL_OPEN]) == {ord("a")}
        assert row(matcher, free, [CALL_OPEN, ord("a")]) == {ord("b"), ord("c")}
    assert matcher.legal([*b"x"], [*ONE_CALL, *b"y", CALL_OPEN, ord("z")]) == 6
    assert row(with_calls(thinks=True).matcher([]), [OPEN, CALL_OPEN, *b"z", CLOSE]) == anything
    single = with_calls(CALLS.replace("call*", "call?")).matcher([])
    assert row(single, [*b"x", *ONE_CALL]) == ENDS


def test_after_a_token_that_is_not_read_the_masks_are_the_same() -> None:
    for thinks in (False, True):
        matcher, seen = with_calls(thinks=thinks).matcher([]), 0
        for before in ([], [*b"x"], ONE_CALL, [CALL_OPEN], [OPEN], [OPEN, *b"x"], [OPEN, CLOSE, *b"x"]):
            found = matcher.after_unread(before)
            for token in row(matcher, before) if found is not None else ():
                expected = ENDS if token in ENDS else row(matcher, before, [token])
                mask = found[1] if token == found[0] else found[2]
                assert tokens_of(mask) == expected or token in ENDS
            seen += found is not None
        assert seen == (5 if thinks else 6)


def test_masks_of_free_text_do_not_wait_for_the_queued_token(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = GrammarMask(with_calls(), 0)
    monkeypatch.setattr(logits, "read_tokens", None)
    for token, expected in ((ord("y"), set(range(V)) - {CALL_CLOSE}), (CALL_OPEN, {ord("a")})):
        limits = mask.limits(mx.zeros((1, V)), [*b"x"], mx.array([token]))[0]
        assert {i for i, limit in enumerate(limits.tolist()) if limit > 0} == expected


# --- thinking


def test_thinking_is_free_and_the_answer_is_not() -> None:
    matcher = compiled("regex", "ab", thinks=True).matcher([])
    assert row(matcher, []) == {ord("a"), OPEN}
    assert row(matcher, [OPEN, *b"xyz"]) == FREE
    assert row(matcher, [OPEN, CLOSE]) == {ord("a")}
    assert row(matcher, [*b"ab"]) == ENDS
    assert row(matcher, [OPEN, *b"ab", CLOSE, *b"ab"]) == ENDS


BEGUN = {  # how prompts end, by vocabulary
    "harmony": ["<|start|>assistant", "<|start|>assistant<|channel|>analysis<|message|>a"],
    "muse": ["<|start|>assistant"],
    "solar": ["<|begin|>assistant"],
    "kimi-k3": ['<|open|>message role="assistant"<|sep|>', "<|open|>think<|sep|>", "<|open|>response<|sep|>"],
    "brackets": ["q", "[THINK]", "[THINK][/THINK]"],
    "text-answer": ["q", "<think>", "<think></think>"],
}


@pytest.mark.parametrize("name", BEGUN)
def test_the_answer_matches_whatever_the_marks_of_thinking(name: str) -> None:
    """At random, masks lead through headers and tags to an answer that the stream shows, and that matches."""
    text, draw, thought = MARKED[name], random.Random(name), set()
    size, schema = max(text.vocabulary().values()) + 1, '{"const": {"n": [1]}}'
    found = compile_grammar("json_schema", schema, text, size, seconds=5.0).thinking(True)
    for prompt in map(text.encode, BEGUN[name] * 8):
        matcher, tokens = found.matcher(prompt), list[int]()
        while not text.eos.intersection(tokens):
            allowed = row(matcher, tokens)
            unread = matcher.after_unread(tokens)
            if unread is not None:
                token = draw.choice(sorted(allowed))
                after = unread[1] if token == unread[0] else unread[2]
                assert tokens_of(after) == row(matcher, tokens, [token])
            forced = matcher.forced(tokens)
            assert not forced or allowed == {forced[0]}
            marks = allowed & text.controls or allowed
            tokens.append(draw.choice(sorted(marks if draw.random() < 0.3 else allowed)))
            closing = text.encode("</think>")  # chance does not write a tag of ordinary text
            is_whole = len(tokens) > 20 and matcher.legal(tokens, closing) == len(closing)
            tokens += closing if is_whole and not text.controls.intersection(closing) else []
            assert len(tokens) < 400
        answer = AnswerStream(text, prompt)
        parts = [*answer.read(Round(tokens, 0, 0, "plain")), *answer.end()]
        assert json.loads("".join(part.text for part in parts if part.kind == "answer")) == {"n": [1]}
        thought |= {bool(answer.reasoning_tokens)}
    assert thought == {False, True}


def test_a_tag_that_is_a_token_is_not_text_of_an_answer_that_matches() -> None:
    """The stream hides it in front of an answer. Where it hides nothing, the token is text like others."""
    text = marked(added=["[THINK]", "[/THINK]"], template="[THINK][/THINK]")
    tag, spelled = text.encode("[/THINK]"), [token for c in "[/THINK]" for token in text.encode(c)]
    size = max(text.vocabulary().values()) + 1
    found = compile_grammar("regex", r"\n\[/THINK\]a", text, size, seconds=5.0)
    assert len(tag) == 1
    start, end = text.encode("\n"), text.encode("a")
    for thinks in (False, True):
        matcher = found.thinking(thinks).matcher([])
        assert matcher.legal([], [*start, *tag, *end]) == 1 and tag[0] not in row(matcher, start)
        assert matcher.legal([], [*start, *spelled, *end]) == len(spelled) + 2
        answer = AnswerStream(text, [])
        parts = [*answer.read(Round([*start, *spelled, *end], 0, 0, "plain")), *answer.end()]
        assert "".join(part.text for part in parts) == "\n[/THINK]a"
    assert found.with_thinking().matcher([]).legal([], [*start, *tag, *end]) == 3


def test_no_token_may_close_the_thinking_and_begin_the_answer() -> None:
    """The parser reads whole tokens."""
    text = marked(template="<think></think>", merges=[("k", ">"), ("k>", "{"), ("k>", "Ċ")])
    matcher = compile_grammar("json_object", "", text, 300, seconds=5.0).matcher(text.encode("<think>"))
    begun = text.encode("a</thin")
    crossing, spaced = text.encode("k>{")[0], text.encode("k>\n")[0]
    assert {crossing, spaced} <= row(matcher, begun[:-1])
    assert crossing not in row(matcher, begun) and spaced in row(matcher, begun)
    assert matcher.legal(begun, [crossing]) == 0
    assert row(matcher, [*begun, spaced]) == set(text.encode("{"))


def test_a_draft_may_close_the_thinking() -> None:
    matcher = compiled("regex", "ab", thinks=True).matcher([])
    draft = [ord("x"), CLOSE, *b"ab", END]
    rows = [tokens_of(r) for r in matcher.allowed([OPEN], draft, 6)]
    assert rows == [FREE, FREE, {ord("a")}, {ord("b")}, ENDS, ENDS]
    assert matcher.legal([OPEN], draft) == 5
    assert matcher.legal([OPEN], [CLOSE, ord("x")]) == 1
    assert matcher.legal([OPEN], [ord("x"), END]) == 1
    assert row(matcher, [OPEN]) == FREE


def test_a_prompt_may_open_the_thinking() -> None:
    grammar = compiled("regex", "ab")
    assert row(grammar.matcher([*b"hi", OPEN]), [CLOSE]) == {ord("a")}
    assert row(grammar.matcher([*b"hi", OPEN]), [ord("x")]) == FREE
    assert grammar.matcher([OPEN]).forced([]) == []
    assert row(grammar.matcher([*b"hi", OPEN, CLOSE]), []) == {ord("a")}
    assert row(grammar.matcher([*b"hi"]), []) == {ord("a")}


def test_tokens_of_another_answer_are_an_error() -> None:
    matcher = compiled("regex", "ab").matcher([])
    with pytest.raises(InvalidValue, match="does not match the grammar"):
        matcher.allowed(list(b"zz"), [], 1)
    assert row(matcher, [*b"a"]) == {ord("b")}


class Counted(list[int]):
    """A history that counts how many of its tokens are read at once."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()


def test_an_answer_that_grows_is_read_once() -> None:
    """Each of the 3 to 6 calls a round compared the whole answer: 0.6 ms at 32k tokens."""
    prompt, grammar = list(b"prompt"), compiled("regex", "(a|b)*")
    history, matcher, letter = Counted(prompt), grammar.matcher(prompt), {ord("a"), ord("b")} | ENDS
    for _ in range(200):
        assert matcher.forced(history, start=6) == []
        assert matcher.legal(history, list(b"abx"), start=6) == 2
        rows = matcher.allowed(history, list(b"bx"), 3, start=6)
        assert [tokens_of(row) for row in rows[:2]] == [letter, letter]
        history.append(ord("a"))
    assert history.read < 500
    other = [*prompt, *b"ax"]  # another list is compared, and so is the same one if it was cut
    with pytest.raises(InvalidValue, match="does not match the grammar"):
        matcher.allowed(other, [], 1, start=6)
    del history[9:]
    history[6:] = b"abb"
    assert tokens_of(matcher.allowed(history, [], 1, start=6)[0]) == letter


# --- samplers


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=4), Sampling(1.0)])
def test_drafters_draw_without_the_grammar(sampling: Sampling) -> None:
    free = replace(sampling, grammar=compiled("regex", "a")).sampler(1, V).drafting
    plain, logits, drafted = sampling.sampler(1, V), mx.random.normal((3, V)), mx.array([2, 3])
    assert plain.drafting.draw(mx.zeros((1, V)), [1], NONE)[0].shape == (1,)
    if sampling.seed is not None or sampling.temperature == 0:
        assert mx.array_equal(free.draw(logits, [1], drafted)[0], plain.draw(logits, [1], drafted)[0])
    assert free.drafting.draw(logits, [1], drafted)[0].tolist() != [ord("a")] * 3


def test_unseeded_drafts_do_not_share_noise_with_the_verdict() -> None:
    sampler = Sampling(1.0, grammar=compiled("regex", "[a-z]+")).sampler(1, V)
    logits = mx.zeros((1, V))
    drawn = [sampler.drafting.draw(logits, [1], NONE)[0].item() for _ in range(20)]
    judged = [sampler.draw(logits, [1], NONE)[0].item() for _ in range(20)]
    assert len(set(drawn)) > 10 and len(set(judged)) > 5


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
def test_the_grammar_stands_above_a_ban(temperature: float) -> None:
    banned = {ord("a"): -float("inf"), ord("c"): -float("inf")}
    logits = mx.random.normal((1, V))
    for pattern, letter in (("a", "a"), ("a|b|c", "b")):
        sampling = Sampling(temperature, seed=1, logit_bias=banned, grammar=compiled("regex", pattern))
        assert sampling.sampler(1, V).draw(logits, [1], NONE)[0].item() == ord(letter)


# --- refusals


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    parts = [{"pattern": f".*a.{{{n}}}b"} for n in range(1, 30)]
    with pytest.raises(InvalidValue, match=r"takes more than 0.3 s to compile"):
        compile_grammar(
            "json_schema", json.dumps({"type": "string", "allOf": parts}), byte_text(), V, seconds=0.3
        )
    assert row(compiled("regex", "a").matcher([]), []) == {ord("a")}, "the next one starts anew"


def test_a_grammar_that_waits_for_a_cpu_is_not_refused() -> None:
    """The limit is of a CPU: the seconds of a busy machine, or of one that stood still, are not its own."""
    assert row(compiled("regex", "b").matcher([]), []) == {ord("b")}
    assert SANDBOX._process is not None
    SANDBOX._process.send_signal(signal.SIGSTOP)
    going_on = threading.Timer(0.3, SANDBOX._process.send_signal, [signal.SIGCONT])
    going_on.start()
    found = compile_grammar("regex", "c", byte_text(), V, seconds=0.1)
    assert row(found.matcher([]), []) == {ord("c")}
    going_on.join()


def test_a_grammar_is_compiled_beside_many_connections() -> None:
    """select() refuses descriptors above 1023."""
    SANDBOX.close()  # the next one has pipes with higher numbers
    limits, opened = resource.getrlimit(resource.RLIMIT_NOFILE), [0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    try:
        while opened[-1] < 1024:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        assert row(compiled("regex", "a").matcher([]), []) == {ord("a")}
    finally:
        SANDBOX.close()
        for descriptor in opened[1:]:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_grammar_that_overflows_the_stack_is_refused() -> None:
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(5000))
    with pytest.raises(InvalidValue, match="the Lark grammar is nested too deeply"):
        compiled("lark", f'start: <|tool_call> r0\n{chain}\nr5000: "a"', tokenizer=WITH_CALLS)
    assert row(compiled("regex", "a").matcher([]), []) == {ord("a")}


# --- schemas of the benchmarks


@pytest.mark.parametrize("number", range(18))
def test_random_answers_match_and_end(number: int) -> None:
    """Whatever allowed token comes next."""
    schema, draw = Draws(0).schemas(18)[number], random.Random(number)
    matcher, written = compiled("json_schema", json.dumps(schema)).matcher([]), b""
    while allowed := sorted(row(matcher, list(written)) - ENDS):
        written += bytes([draw.choice(allowed)])
        assert len(written) < 2000
    jsonschema.Draft202012Validator(schema).validate(json.loads(written))


def test_a_seed_draws_the_same_schemas() -> None:
    assert Draws(7).schemas(12) == Draws(7).schemas(12) != Draws(8).schemas(12)
