"""Prompts with pictures: transformers = plain = drafted, from any cache, in chunks and in batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest
from support.spans import CASES, VARIANTS, Golden, file, pair_of, vision_of, with_sight
from support.spans import golden as unread

from mlx_spec.decode.loop import decode
from mlx_spec.decode.running import PREFILL_STEP, RunningSequence, prefill
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair
from mlx_spec.prompt import LazyRows, Prompt, text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Round

GREEDY = Sampling()
COUNT = 8  # tokens of an answer
TOLERANCE = 2e-3  # of logits; smaller than the margins of greedy texts
BOTH = [("31b", "assistant"), ("qwen", "mtp")]  # rows that see each other, and rows in the plane
OWN = {"gemma3": "text", "qwen": "mtp"}  # drafters that are not assistants
KNOWN: dict[tuple[str, bytes], LazyRows] = {}  # of the first prompt with a picture


def golden(variant: str, case: str) -> Golden:
    """Return a golden whose pictures the tower reads once for all prompts, when the first of them is read."""
    wanted = unread(variant, case)
    rows = {
        span.digest: LazyRows(partial(read_once, KNOWN.setdefault((variant, span.digest), span.rows)))
        for span in wanted.prompt.spans
    }
    spans = tuple(replace(span, rows=rows[span.digest]) for span in wanted.prompt.spans)
    return replace(wanted, prompt=Prompt(wanted.prompt.tokens, spans))


def read_once(rows: LazyRows) -> Generator[mx.array, None, mx.array]:
    yield from rows.steps()
    return rows()


def answer(sequence: RunningSequence, step: int = PREFILL_STEP) -> list[Round]:
    """Decode one sequence, its prompt in chunks of `step` tokens."""
    list(sequence.prefill(lambda: step))
    return list(decode(sequence))


def said(pair: Pair, prompt: Prompt, sampling: Sampling = GREEDY) -> list[int]:
    rounds = answer(pair.prepare(pair.open(), prompt, sampling=sampling, max_tokens=COUNT))
    return [token for each in rounds for token in each.tokens]


def error(pair: Pair, wanted: Golden, step: int = PREFILL_STEP) -> float:
    """Return the largest error of the logits after a prompt."""
    target = pair.open().target
    list(prefill(target, (), wanted.prompt, lambda: step))
    return error_of_last(target, wanted)


def error_of_last(target: LMTarget, wanted: Golden) -> float:
    """Return the largest error of the logits after the last token of a prompt that was read up to it."""
    row = target.verify(mx.array(wanted.prompt[-1:]))[0]
    target.commit(0)
    return float(mx.abs(row - wanted.logits).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_is_that_of_transformers(variant: str) -> None:
    pairs = [pair_of(variant, drafter) for drafter in ("none", "lookup", OWN.get(variant, "assistant"))]
    cases = ("one.0", "two.0", "later.1")
    accepted = 0
    for step, wanted in zip((13, 29, 64), map(partial(golden, variant), cases), strict=True):
        said = wanted.greedy[:COUNT]
        wrong = [token if i % 7 else 300 for i, token in enumerate(said)]
        plain, again, own = (pair.open() for pair in pairs)
        again.target = plain.target  # goes on with what plain decoding read
        for pair, parts, expected in zip(pairs, (plain, again, own), ((), wrong, ()), strict=True):
            parts.target.rewind(min(parts.target.size, len(wanted.prompt) - 1))
            sequence = pair.prepare(parts, wanted.prompt, max_tokens=COUNT, prediction=expected)
            list(sequence.prefill(lambda step=step: step))
            assert error_of_last(parts.target, wanted) < TOLERANCE
            rounds = list(decode(sequence))
            assert [token for each in rounds for token in each.tokens] == said
            accepted += sum(each.accepted for each in rounds)
    assert accepted >= len(cases)


@pytest.mark.parametrize(
    ("variant", "case", "step"),
    [
        ("e2b", "one.0", 1),
        ("31b", "one.0", 1),
        ("qwen", "one.0", 1),
        ("qwen", "two.0", 3),
        ("qwen", "two.0", 33),
    ],
)
def test_small_chunks(variant: str, case: str, step: int) -> None:
    assert error(pair_of(variant), golden(variant, case), step) < TOLERANCE


@pytest.mark.parametrize(
    ("variant", "drafter", "prompts"), [("31b", "lookup", 9), ("e2b", "lookup", 6), ("qwen", "mtp", 12)]
)
def test_prompts_in_random_order_from_one_cache(variant: str, drafter: str, prompts: int) -> None:
    """Second turns, the same picture twice, and other pictures in equal tokens."""
    draw, pair = random.Random(1), pair_of(variant, drafter)
    held, reused = pair.open(), 0
    for case in draw.choices(CASES, k=prompts):
        wanted = golden(variant, case)
        kept = held.rewind_to_prefix(wanted.prompt)
        assert kept == held.target.size
        # A recurrent state may lie in a picture, where a chunk ended.
        assert kept == wanted.prompt.whole(kept) or held.target.is_recurrent
        assert not any(span.rows.are_computed for span in wanted.prompt.spans)
        sequence = pair.prepare(held, wanted.prompt, max_tokens=2)
        for each in answer(sequence, draw.choice([17, 64, 1024])):
            held.append(each.tokens)
        assert list(sequence.history[len(wanted.prompt) :]) == wanted.greedy[:2]
        computed = [span.rows.are_computed for span in wanted.prompt.spans]
        assert computed == [span.end > kept for span in wanted.prompt.spans]  # what is reused costs nothing
        held.truncate(len(wanted.prompt) + draw.randrange(1, 3))
        reused += kept
    assert reused > 10 * prompts


@pytest.mark.parametrize(("variant", "drafter"), BOTH)
def test_a_saved_sequence_goes_on(variant: str, drafter: str) -> None:
    pair, first, second = pair_of(variant, drafter), golden(variant, "again.0"), golden(variant, "again.1")
    held, other = pair.open(), pair.open()
    held.rewind_to_prefix(first.prompt)
    for each in answer(pair.prepare(held, first.prompt, max_tokens=COUNT)):
        held.append(each.tokens)
    other.restore(held.identity, held.state())
    assert other.rewind_to_prefix(second.prompt) >= first.prompt.spans[0].end
    rounds = answer(pair.prepare(other, second.prompt, max_tokens=COUNT))
    assert [token for each in rounds for token in each.tokens] == second.greedy[:COUNT]


@pytest.mark.parametrize(("variant", "drafter"), BOTH)
def test_a_batch_that_prompts_join_at_random(variant: str, drafter: str) -> None:
    """Some prompts are those of others, as the choices of one request are; short texts are read together."""
    draw, pair = random.Random(2), pair_of(variant, drafter)
    batch, texts = pair.batch(4), dict[int, tuple[list[int], list[int]]]()
    waiting = [golden(variant, case) for case in (*CASES, "later.0", "later.0")]
    draw.shuffle(waiting)
    waiting += waiting[:2]
    while waiting or len(batch):
        if waiting and draw.random() < 0.5:
            wanted = waiting.pop()
            texts[batch.add(pair.prepare(pair.open(), wanted.prompt, max_tokens=6))] = wanted.greedy[:6], []
        for id, result in batch.step():
            assert isinstance(result, Round), result
            texts[id][1].extend(result.tokens)
    assert len(texts) == len(CASES) + 4 and all(wanted == found for wanted, found in texts.values())


@pytest.mark.parametrize(
    ("variant", "sampling", "bits"),
    [
        ("31b", Sampling(temperature=0.8, seed=7), None),
        ("31b", Sampling(repetition_penalty=1.3), 8),
        ("31b", Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3, frequency_penalty=0.3), 8),
        ("qwen", Sampling(temperature=0.8, seed=7, repetition_penalty=1.3), None),
    ],
)
def test_plain_is_drafted_with_seeds_penalties_and_quantized_kv(
    variant: str, sampling: Sampling, bits: int | None
) -> None:
    own = OWN.get(variant, "assistant")
    pairs = [pair_of(variant, drafter, kv_bits=bits) for drafter in ("none", "text", own)]
    prompt = golden(variant, "one.0").prompt
    texts = [said(pair, prompt, sampling) for pair in pairs]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(("variant", "drafter"), BOTH)
def test_a_conversation_about_pictures(variant: str, drafter: str) -> None:
    """The same picture twice; what was read is not read again."""
    pair, reused = pair_of(variant, drafter), list[int]()
    session = pair.session()
    for case, text in (("again.0", "one two three"), ("again.1", "A B C D")):
        parts = [{"type": "image", "image": file("a")}, {"type": "text", "text": text}]
        rounds = [piece.round for piece in session.stream(parts, max_tokens=24) if piece.round is not None]
        assert [token for each in rounds for token in each.tokens] == golden(variant, case).greedy
        reused.append(session.statistics.reused_tokens)
    assert reused[1] > golden(variant, "again.0").prompt.spans[0].end


# --- what goes wrong when one rule is broken


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("gemma3", {"together": None}),
        ("gemma3", {"together": "sliding"}),
        ("gemma3", {"scale": 1.0}),
        ("31b", {"together": None}),
        ("26b", {"together": None}),
        ("12b", {"together": "all"}),
        ("31b", {"together": "all"}),
        ("e2b", {"together": "sliding"}),
        ("e2b", {"pad_token": 7}),
        ("qwen", {"axes": ()}),  # positions by index
    ],
)
def test_controls_of_how_rows_are_read(variant: str, change: dict[str, object]) -> None:
    wrong = pair_of(variant, vision=with_sight(variant, replace(vision_of(variant).sight, **change)))
    assert min(error(wrong, golden(variant, case)) for case in ("one.0", "two.0")) > 20 * TOLERANCE


def test_control_of_what_caches_compare() -> None:
    """By tokens, one picture would be taken for another."""
    one, other = golden("31b", "one.0"), golden("31b", "other.0")
    assert one.prompt.tokens == other.prompt.tokens

    def wrong_by(told: Callable[[Prompt], Prompt]) -> float:
        held = pair_of("31b").open()
        for each in (one, other):
            held.rewind_to_prefix(told(each.prompt))
            list(prefill(held.target, (), each.prompt))
        row = held.target.verify(mx.array(other.prompt[-1:]))[0]
        return float(mx.abs(row - other.logits).max())

    assert wrong_by(lambda prompt: prompt) < TOLERANCE
    assert wrong_by(lambda prompt: text_prompt(prompt.tokens)) > 20 * TOLERANCE


def test_a_picture_whose_rows_see_each_other_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prompt, "whole_chunk", lambda self, low, high: high)
    with pytest.raises(AssertionError, match="a span was cut"):
        error(pair_of("31b"), golden("31b", "one.0"), 20)
    assert error(pair_of("e2b"), golden("e2b", "one.0"), 20) < TOLERANCE  # causal rows may be


@pytest.mark.parametrize("variant", ["31b", "gemma3"])
def test_a_picture_that_is_dropped_between_layers_leaves_nothing(variant: str) -> None:
    """Others have turns between the layers of its pass, and its client may leave then."""
    target, wanted = pair_of(variant).open().target, unread(variant, "one.0")
    list(prefill(target, (), text_prompt(wanted.prompt[:2]), lambda: 8))
    size, steps = target.size, 0
    for most in (3, 9, 99):
        reading = prefill(target, (), wanted.prompt, lambda: 8)
        for step in reading:
            steps += not step.ends_chunk
            if target.size > size or steps >= most:
                break
        reading.close()
        size = target.size
    assert steps > 10
    list(prefill(target, (), wanted.prompt, lambda: 8))
    row = target.verify(mx.array(wanted.prompt[-1:]))[0]
    assert float(mx.abs(row - wanted.logits).max()) < TOLERANCE
