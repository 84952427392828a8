"""Earlier answers: the ring against its definition, lookup in it, keys apart, files that survive a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support import tiny
from support.forked import start_python
from support.lossless import GREEDY, emitted, first_difference
from support.pairs import alone, make_pair
from support.waiting import wait_until

from mlx_spec.drafters.earlier import LENGTHS, MAX_RINGS, TAIL, EarlierAnswers, TextRing, ring_tokens
from mlx_spec.drafters.lookup import RANGES, Lookup
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.pair import Pair
from mlx_spec.prompt import LazyRows, Prompt, Span, text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Round

SAMPLER = GREEDY.sampler(1, 1000)
SIZE = 1 << 12


def drawn(seed: int, count: int = 300, tokens: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, tokens, count).tolist()


def texts_of(ring: TextRing) -> list[int]:
    """The tokens of all texts, the oldest first."""
    tokens = np.concatenate([ring._text[ring._end :], ring._text[1 : ring._end]])
    return tokens[tokens >= 0].tolist()


# --- the ring


def test_a_context_is_found_where_it_stood_last() -> None:
    """A match is as long as it says, and as long as a table's contexts unless entries collide."""
    ring, texts = TextRing(1 << 14), [drawn(seed, 60, 8) for seed in range(12)]
    texts.append([8, 9, *texts[3][10:40], 8, 9])  # what stood there before is overwritten
    for text in texts:
        ring.add(text)
    found = short = 0
    for text in texts[4:]:
        for end in range(2, len(text) - 1):
            last = text[max(end - 32, 0) : end]
            place, length = ring.find(last)
            assert ring.copy(place - length, length) == last[len(last) - length :]
            assert ring.copy(place, 90) != [] and len(ring.copy(place, 90)) <= len(text)  # not the next text
            found += 1
            short += length < max(n for n in LENGTHS if n <= len(last))
    assert short < 0.05 * found
    place, length = ring.find(texts[3][8:30])
    assert (length, ring.copy(place, 30)) == (20, [*texts[3][30:40], 8, 9])


def test_memory_is_fixed_and_the_newest_texts_stay() -> None:
    ring, before, added = TextRing(SIZE), TextRing(SIZE).nbytes, list[int]()
    for seed in range(200):
        ring.add(text := drawn(seed, 1 + 3 * seed, 5000))
        added += text
        held = texts_of(ring)
        assert held == added[-len(held) :] and len(held) > min(len(added), SIZE // 2) - 1
    assert ring.nbytes == before == 4 * (1 + len(LENGTHS)) * SIZE
    assert all(ring.copy(ring.find(text[i - 8 : i])[0], 1) == [text[i]] for i in range(8, len(text)))
    ring.add(drawn(7, 50_000))  # longer than the ring
    ring.add([])
    ring.add([5])
    assert ring.find([5]) == (0, 0)


@pytest.mark.parametrize(("memory", "tokens"), [(12 << 30, 1 << 20), (5 << 30, 1 << 19), (0, 1 << 10)])
def test_a_small_machine_has_a_small_ring(memory: int, tokens: int) -> None:
    assert ring_tokens(memory) == tokens


# --- lookup


@pytest.mark.parametrize(
    ("history", "limit", "expected", "source"),
    [
        ([1, 2, 3, 9, 2, 3], 8, [9, 2], "lookup"),  # a tie: the conversation
        ([7, 1, 2, 3, 50, 1, 2], 8, [3, 50], "lookup"),
        ([7, 1, 2, 3, 4, 50, 60, 1, 2, 3, 4], 3, [50, 60, 1], "lookup"),
        ([50, 61, 60, 70], 8, [80, 81], "earlier"),  # only there
        ([60, 70, 66, 50, 60, 70], 8, [80, 81, 82], "earlier"),  # longer there
        ([8, 9, 50, 9], 8, [50], "lookup"),  # one token
        ([99], 8, [], None),
    ],
)
def test_the_longer_match_wins(
    history: list[int], limit: int, expected: list[int], source: str | None
) -> None:
    lookup, ring = Lookup(1), TextRing(SIZE)
    ring.add([2, 3, 4, 5])
    ring.add([50, 60, 70, 80, 81, 82])
    lookup.copy_from(ring)
    drafts = [part.draft(history, limit, SAMPLER) for part in (lookup, *lookup.proposals())]
    assert drafts[0].tokens.tolist() == expected and drafts[0].source == source
    assert [d.tokens.tolist() for d in drafts[1:] if d.tokens.size] == ([expected] if expected else [])
    lengths = [part.available(history) for part in lookup.proposals()]
    assert all(low <= n <= high for n, (low, high) in zip(lengths, RANGES.values(), strict=True) if n)
    lookup.copy_from(None)
    assert lookup.draft(history, limit, SAMPLER).source != "earlier"


# --- answers

PROMPT, COUNT = tiny.prompt(20), 40


def pair_of(kind: str) -> Pair:
    return make_pair(kind, "lookup", eos=(2,))


@cache
def sampling_of(name: str) -> Sampling:
    if name == "greedy":
        return Sampling()
    if name == "seeded":
        return Sampling(1.0, seed=3, top_p=0.9, frequency_penalty=0.3)
    tokenizer = pair_of("full").tokenizer
    grammar = compile_grammar("regex", "([a-f]{3} )+", tokenizer, tiny.VOCAB, seconds=5.0)
    return Sampling(0.9, seed=5, grammar=grammar) if name == "seeded grammar" else Sampling(grammar=grammar)


@cache
def truth(kind: str, sampling: str) -> list[int]:
    return alone(pair_of(kind), kind, PROMPT, COUNT, sampling_of(sampling))


def counts(rounds: Sequence[Round]) -> list[tuple[int, int, str | None]]:
    return [(r.drafted, r.accepted, r.source) for r in rounds]


def answers(pair: Pair, key: str | None, sampling: str = "greedy") -> list[Round]:
    return list(pair.generate(PROMPT, sampling=sampling_of(sampling), max_tokens=COUNT, key=key))


@pytest.mark.parametrize("sampling", ["greedy", "seeded", "grammar", "seeded grammar"])
@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent"])
def test_the_text_is_that_of_plain_decoding(kind: str, sampling: str) -> None:
    """The first answer is new, the second one is copied."""
    pair = pair_of(kind)
    first, second = (answers(pair, "mine", sampling) for _ in range(2))
    for done in (first, second):
        assert emitted(done) == truth(kind, sampling), first_difference(emitted(done), truth(kind, sampling))
    copied = [r.accepted for r in second if r.source == "earlier"]
    assert 3 * sum(copied) >= len(emitted(second)) and len(second) < len(first)


def test_company_and_interrupted_answers() -> None:
    """Several at once, each with the answers of one that was closed early."""
    pair = pair_of("full")
    rounds = pair.generate(PROMPT, max_tokens=COUNT, key="mine")
    while not texts_of(pair.earlier.ring("mine")):
        next(rounds)
        rounds.close()
    for key in ("mine", "other"):
        texts: dict[int, list[Round]] = {0: [], 1: [], 2: []}
        for index, round in pair.generate_batch([PROMPT] * 3, max_tokens=COUNT, key=key):
            texts[index].append(round)
        assert all(emitted(done) == truth("full", "greedy") for done in texts.values())
    done = [r for _, r in pair.generate_batch([PROMPT] * 3, max_tokens=COUNT, key="mine")]
    assert (
        max(r.batch_size for r in done) == 3 and sum(r.accepted for r in done if r.source == "earlier") > 60
    )


def test_counts_never_depend_on_the_answers_of_another_key() -> None:
    pair = pair_of("full")
    fresh = counts(answers(pair_of("full"), "theirs"))
    for _ in range(2):
        answers(pair, "mine")
    assert counts(answers(pair, "theirs")) == fresh
    assert counts(answers(pair, None)) == fresh  # without a key nothing is copied, and nothing kept
    assert counts(answers(pair, "mine")) != fresh
    held = pair.open()
    pair.prepare(held, PROMPT, max_tokens=1, key="mine")  # caches pass from one key to another
    again = list(pair.prepare(held, PROMPT, max_tokens=COUNT, key=None)._drafters)
    assert all(d.draft(PROMPT, 4, SAMPLER).source != "earlier" for d in again)


def test_the_key_used_longest_ago_gives_way() -> None:
    earlier = EarlierAnswers(SIZE)
    for i in range(MAX_RINGS + 3):
        earlier.add(str(i), text_prompt([1, 2]), [3, 4, 5])
        earlier.ring("0")
    assert earlier.nbytes == MAX_RINGS * 4 * (1 + len(LENGTHS)) * SIZE
    assert earlier.ring("0").find([1, 2, 3])[1] == 3 and earlier.ring("1").find([1, 2, 3]) == (0, 0)


PICTURE = Span(2, 2, b"", LazyRows(lambda: (yield)))


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        (Prompt((1, 2, 9, 9, 3, 4), (PICTURE,)), [3, 4]),  # no row of a picture
        (text_prompt(range(20)), range(20)),
        (text_prompt(range(50)), range(50 - TAIL, 50)),
    ],
)
def test_an_answer_follows_the_last_text_of_its_prompt(prompt: Prompt, kept: Sequence[int]) -> None:
    earlier = EarlierAnswers(SIZE)
    earlier.add("", prompt, [5, 6])
    assert texts_of(earlier.ring("")) == [*kept, 5, 6]


# --- files


def kept(folder: Path, vocab_size: int = 5000, target: str = "target") -> EarlierAnswers:
    earlier = EarlierAnswers(SIZE)
    earlier.keep_in(folder, target, vocab_size, 3600)
    return earlier


def test_answers_outlive_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(tmp_path)
    assert not list(tmp_path.iterdir())
    for seed in range(40):  # more than twice the ring
        kept(tmp_path).add("key", text_prompt([seed]), drawn(seed, 500, 5000))
        if not seed:  # a kill may leave a part of a token
            (file,) = tmp_path.iterdir()
            file.write_bytes(file.read_bytes() + b"\x01\x02\x03")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_size < 10 * SIZE and "key" not in file.name
    assert not caplog.text
    last = drawn(39, 500, 5000)
    assert kept(tmp_path).ring("key").find(last[90:120])[1] == 30
    assert kept(tmp_path).ring("other").find(last[90:120]) == (0, 0)
    os.utime(file, (0, 0))
    kept(tmp_path)
    assert not file.exists()
    for token in (6000, -2):  # not in the vocabulary
        caplog.clear()
        kept(tmp_path).add("key", text_prompt([1]), [token])
        assert kept(tmp_path).ring("key").find([1, token]) == (0, 0) and "is not used" in caplog.text
        assert not file.exists()


def test_the_newest_files_of_the_target_are_read_at_once(tmp_path: Path) -> None:
    """A newer file of another target takes the place of none, and its answers are not mixed in."""
    newest_first = [("other", 0, 99), *(("target", key, key) for key in reversed(range(MAX_RINGS + 2)))]
    for minutes, (target, key, token) in enumerate(newest_first):
        before = set(tmp_path.iterdir())
        kept(tmp_path, target=target).add(str(key), text_prompt([1]), [2, token])
        (file,) = set(tmp_path.iterdir()) - before
        os.utime(file, (time.time() - 60 * minutes,) * 2)
    earlier = kept(tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    rings = [earlier.ring(str(key)) for _, key, _ in newest_first[1:]]
    assert [ring.copy(ring.find([1, 2])[0], 1) for ring in rings] == [[5], [4], [3], [2], [], []]


def test_a_folder_that_cannot_be_written_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = kept(tmp_path / "folder")
    for count in range(2):
        earlier.add("key", text_prompt([1]), [2, 3 + count])
        assert caplog.text.count("no more answers are kept") == 1
        ring = earlier.ring("key")
        assert ring.copy(ring.find([1, 2])[0], 1) == [3 + count]
        (tmp_path / "folder").mkdir(exist_ok=True)
    assert not list((tmp_path / "folder").iterdir())


def test_many_short_answers_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone takes a start of the server some microseconds: a whole ring of them took 20 seconds."""
    texts = [[8, *drawn(seed, 1 + seed % 5, 10), 9] for seed in range(500)]
    earlier, add, sizes = kept(tmp_path), TextRing.add, list[int]()
    for text in texts:
        earlier.add("key", text_prompt(text[:1]), text[1:])
    earlier.add("empty", text_prompt([]), [])
    monkeypatch.setattr(TextRing, "add", lambda ring, given: sizes.append(len(given)) or add(ring, given))
    again = kept(tmp_path)
    assert len(sizes) < 8
    for last in [text[:end] for text in texts[-100:] for end in (-1, None)]:
        found = [each.ring("key").find(last) for each in (earlier, again)]
        assert found[0][1] == found[1][1] >= 2
        copies = [
            each.ring("key").copy(place, 9) for each, (place, _) in zip((earlier, again), found, strict=True)
        ]
        assert copies[0] == copies[1]


WRITER = """
import sys, itertools
from pathlib import Path
from mlx_spec.drafters.earlier import EarlierAnswers
from mlx_spec.prompt import text_prompt
earlier = EarlierAnswers(1 << 12)
earlier.keep_in(Path(sys.argv[1]), "target", 5000, 3600)
for i in itertools.count():
    earlier.add("key", text_prompt([1]), [i % 5000, 7, 8, 9] * 200)
"""


def test_a_kill_while_writing_leaves_what_was_written(tmp_path: Path) -> None:
    for i in range(3):
        process = start_python()([sys.executable, "-c", WRITER, str(tmp_path)])
        wait_until(lambda size=i * 9000: sum(f.stat().st_size for f in tmp_path.glob("*.answers")) > size)
        process.kill()
        process.wait()
        (file,) = tmp_path.glob("*.answers")
        with file.open("ab") as stream:
            stream.write(b"\x01\x02\x03")  # what a kill within a write leaves
        ring = kept(tmp_path).ring("key")
        assert ring.find([7, 8])[1] == 2 and file.stat().st_size % 4 == 0
        kept(tmp_path).add("key", text_prompt([1]), [40, 41, 42])
        assert kept(tmp_path).ring("key").find([40, 41])[1] == 2


APPENDER = """
import sys
from pathlib import Path
from mlx_spec.drafters.earlier import EarlierAnswers
from mlx_spec.prompt import text_prompt
earlier = EarlierAnswers(1 << 12)
earlier.keep_in(Path(sys.argv[1]), "target", 5000, 3600)
print("ready", flush=True)
sys.stdin.readline()
for i in range(1000):
    earlier.add("key", text_prompt([int(sys.argv[2])]), [i] * 9)
"""


def test_a_file_written_anew_keeps_what_another_server_appended(tmp_path: Path) -> None:
    first, second = kept(tmp_path), kept(tmp_path)
    for i in range(17):  # more than twice the ring
        if i == 15:
            second.add("key", text_prompt([1]), [40, 41, 42])
        first.add("key", text_prompt([1]), drawn(i, 500))
    (file,) = tmp_path.iterdir()
    tokens = np.fromfile(file, "<i4").tolist()
    assert len(tokens) == SIZE and tokens[tokens.index(41) - 2 :][:5] == [1, 40, 41, 42, -1]


def test_servers_that_append_at_a_time_lose_nothing(tmp_path: Path) -> None:
    """Of each, the file has all answers since one that may have been too old for the ring."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [
        start_python()([sys.executable, "-c", APPENDER, str(tmp_path), str(i)], **pipes) for i in range(2)
    ]
    assert [run.stdout.readline() for run in runs] == ["ready\n"] * 2
    assert [run.communicate("\n")[1] for run in runs] == ["", ""]
    (file,) = tmp_path.iterdir()
    tokens = np.fromfile(file, "<i4").tolist()
    assert SIZE <= len(tokens) <= 2 * SIZE
    texts = [tokens[i : i + 11] for i in range(tokens.index(-1) + 1, len(tokens), 11)]
    for writer in range(2):
        found = [text[1] for text in texts if text[0] == writer]
        assert found == list(range(1000 - len(found), 1000))
    assert all(text == [text[0], *[text[1]] * 9, -1] for text in texts)
