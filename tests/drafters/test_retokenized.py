"""A draft model with another tokenizer: its text lines up with the tokens of the target and changes none."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import mlx.nn as nn
import pytest
from support import lossless
from support.pairs import refused, save
from support.recited import (
    KINDS,
    RECITED,
    bytes_and_words,
    drafter_for,
    model_of,
    pair_of,
    prompt_of,
    recited,
    size_of,
    syllables,
    target_of,
    taught,
    text_of,
    untaught,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlx_spec.decode.loop import generate
from mlx_spec.drafters.retokenized import (
    Retokenized,
    Translation,
    continuation,
    encode_after,
    whole_characters,
)
from mlx_spec.errors import Mismatch
from mlx_spec.load import load
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import Features, Round

GREEDY, SEEDED = Sampling(), Sampling(temperature=1.4, seed=7)
NOTHING = Features()


def rounds(kind: str, K: int, sampling: Sampling = GREEDY, count: int = 60) -> list[Round]:
    tokens = prompt_of(kind)
    drafters = [drafter_for(kind)] if K else []
    sampler = sampling.sampler(len(tokens), size_of(kind))
    policy, target = FixedPolicy(K), LMTarget(target_of(kind))
    return list(generate(target, drafters, policy, sampler, tokens, max_tokens=count))


@cache
def plain_tokens(kind: str, sampling: Sampling = GREEDY) -> list[int]:
    """Return the text of plain decoding, computed once."""
    return lossless.emitted(rounds(kind, 0, sampling))


def figures(done: Sequence[Round]) -> tuple[int, int]:
    return sum(round.accepted for round in done), sum(round.drafted for round in done)


# --- at work


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("kind", KINDS)
def test_lossless_past_the_window(kind: str, sampling: Sampling) -> None:
    """Accepted, partly accepted and rejected drafts, where tokens of the two end at different letters."""
    expected = plain_tokens(kind, sampling)
    text = b"".join(map(text_of(kind).token_bytes, expected)).decode(errors="replace")
    assert (text.rstrip("\ufffd") in RECITED * 3) == (sampling is GREEDY)
    for K in (1, 4) if sampling is GREEDY else (4,):
        done = rounds(kind, K, sampling)
        assert lossless.emitted(done) == expected
        accepted, drafted = figures(done)
        assert drafted > accepted > (20 if sampling is GREEDY else 5)
        assert K == 1 or len({round.accepted for round in done if round.drafted}) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_emoji_cut_in_the_middle(kind: str) -> None:
    """A history that ends in half a character, from which both have to go on."""
    text, tokens = text_of(kind), recited(kind)
    first = next(i for i, token in enumerate(tokens) if text.token_bytes(token) == b"\xf0")
    assert [text.token_bytes(token) for token in tokens[first + 1 : first + 4]] == [b"\x9f", b"\x98", b"\x80"]
    for cut in (1, 2, 3):
        history = [*prompt_of(kind, 0), *tokens[: first + cut]]
        draft = drafter_for(kind).draft(history, 6, GREEDY.sampler(0, size_of(kind)))
        found = draft.tokens.tolist()
        assert len(found) >= 4 - cut and found == tokens[first + cut :][: len(found)]


@pytest.mark.parametrize("kind", KINDS)
def test_as_good_as_new_after_every_outcome(kind: str) -> None:
    sampler = GREEDY.sampler(0, size_of(kind))
    drafter, history = drafter_for(kind), prompt_of(kind)
    outcomes: list[Callable[[list[int]], list[int]]] = [
        lambda draft: [*draft, 5],
        lambda draft: [*draft[: len(draft) // 2], recited(kind)[3]],
        lambda draft: [recited(kind)[9]],
        lambda draft: draft[:1],
        lambda draft: [text_of(kind).token_id("<eos>") or 0],
    ]
    for outcome in outcomes * 2:
        draft = drafter.draft(history, 4, sampler).tokens.tolist()
        assert draft == drafter_for(kind).draft(history, 4, sampler).tokens.tolist()
        history = [*history, *outcome(draft)]
        drafter.observe(history, NOTHING)
    shorter = history[:-9]
    ours = drafter.draft(shorter, 4, sampler)
    assert ours.tokens.tolist() == drafter_for(kind).draft(shorter, 4, sampler).tokens.tolist()


def test_a_conversation_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = pair_of("words", 4).session(), pair_of("words", 0).session()
    for turn in range(2):
        prefilled = lossless.count_calls(monkeypatch, "prefill")
        question = RECITED[: 300 - turn] * 2
        answers = [
            [piece.text for piece in session.stream(question, max_tokens=24)] for session in (plain, ours)
        ]
        assert "".join(answers[0]) == "".join(answers[1])
        assert ours.statistics.accepted > 10
    # Both models wrote what was new of a turn, not the turns before.
    assert prefilled and max(size for _, size in prefilled) < 250


# --- text and tokens


@pytest.mark.parametrize("kind", KINDS)
def test_translation_does_not_depend_on_the_way(kind: str) -> None:
    """Any tokens, bytes that are not text among them; read in steps, back and forth, and at once."""
    text, other = text_of(kind), text_of(KINDS[1 - KINDS.index(kind)])
    chance = random.Random(3)
    history = [chance.randrange(size_of(kind) - 32) for _ in range(300)] + recited(kind) * 4
    translation = Translation(text, other)
    for end in [*range(1, len(history), 7), 40, 200, 190, 191, len(history)]:
        place = translation.read(history[:end])
        assert place == Translation(text, other).read(history[:end])
        assert place.before.endswith(place.pending) and len(place.before) <= 128 * 16
    changed = [*history[:100], 9, *history[101:]]
    assert translation.read(changed) == Translation(text, other).read(changed)
    clean = recited(kind) * 4
    written = b"".join(map(other.token_bytes, translation.read(clean).tokens))
    assert written.decode() == RECITED * 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_offered_writes_what_was_drafted(kind: str) -> None:
    """Wherever the history ends: within a word, within a character, behind a control token."""
    text, other = text_of(kind), text_of(KINDS[1 - KINDS.index(kind)])
    tokens, found = [*prompt_of(kind, 0), *recited(kind) * 2], 0
    for end in range(1, len(recited(kind))):
        place = Translation(text, other).read(tokens[:end])
        behind = b"".join(map(text.token_bytes, tokens[end : end + 12]))
        offered = continuation(text, place, place.pending + behind)
        assert whole_characters(place.pending + behind)[len(place.pending) :] == b"".join(
            map(text.token_bytes, offered)
        )
        found += offered == tokens[end : end + len(offered)]
    assert found > 0.9 * len(recited(kind))


def test_control_tokens_go_by_their_names() -> None:
    words, syllables = text_of("words"), text_of("syllables")
    turn, close = words.token_id("<|turn>"), words.token_id("<turn|>")
    assert turn is not None and close is not None and syllables.token_id("<turn|>") is None
    history = [*prompt_of("words", 0), turn, *words.encode("user\n"), close, turn]
    tokens = Translation(words, syllables).read(history).tokens
    names = [syllables.token_bytes(token) for token in tokens]
    assert [names[0], names[1], names[-1]] == [b"<bos>", b"<|turn>", b"<|turn>"]
    assert b"".join(names[2:-1]) == b"user\n"


def test_an_end_that_is_drafted() -> None:
    """The drafter's end of text is the target's of that name, and makes all before it certain."""
    words, other = text_of("words"), text_of("syllables")
    text = encode_after(other, b"", b" Speculative decoding drafts several tokens with some") or []
    model = taught(untaught("syllables"), [*text, other.token_id("<eos>")])
    drafter = Retokenized(model, size_of("syllables"), words, other)
    draft = drafter.draft(prompt_of("words", 4), 8, GREEDY.sampler(0, size_of("words")))
    assert list(map(words.token_bytes, draft.tokens.tolist())) == [b" tokens", b" with", b" some", b"<eos>"]


# --- loaded


def checkpoint(folder: Path, model: nn.Module, tokenizer: Tokenizer) -> Path:
    save(model, folder, eos_token_id=1)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("retokenized")
    target = checkpoint(folder / "target", target_of("words"), bytes_and_words())
    return target, checkpoint(folder / "drafter", model_of("syllables"), syllables())


def test_load_goes_by_the_vocabularies(folders: tuple[Path, Path]) -> None:
    pair = load(folders[0], folders[1], num_draft_tokens=4)
    assert pair.drafter_names == ("llama, re-tokenized",)
    done = list(pair.generate(prompt_of("words"), max_tokens=40))
    assert lossless.emitted(done) == plain_tokens("words")[:40]
    assert figures(done)[0] > 10
    adaptive = load(folders[0], folders[1])
    assert adaptive.drafter_names == ("llama, re-tokenized", "lookup")
    assert lossless.emitted(list(adaptive.generate(prompt_of("words"), max_tokens=40))) == lossless.emitted(
        done
    )
    assert load(folders[1], folders[1], num_draft_tokens=4).drafter_names == ("llama",)


def test_text_that_does_not_come_back(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(folders[1], tmp_path / "lowercase"))
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(other / "tokenizer.json"))
    message = refused(Mismatch, folders[0], other)
    assert f"the tokenizer of the drafter {other} does not write back the text it encodes" in message
    assert 'use a drafter with the target\'s vocabulary, or "lookup"' in message
