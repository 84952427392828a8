"""Prefixes in files: read once, exactly as they were, by this server or the next, and never a wrong token."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support import random_sources, spans, tiny
from support.pairs import KINDS, MODELS, alone, make_pair, shallow
from support.served import DEMO, answer, begin, body, closed, load_tiny, working
from support.served import raw as raw_request

from mlx_spec.apps.server.engine import prefix_files
from mlx_spec.apps.server.engine.prefix_cache import PrefixCache
from mlx_spec.apps.server.engine.prefix_files import CacheFolder, PrefixFiles, StoredPrefix, model_key
from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import temporary_file
from mlx_spec.decode import running
from mlx_spec.decode.loop import decode
from mlx_spec.decode.sequence import CachedSequence, Reread
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.draft_model import VocabularySizes, draft_model_source
from mlx_spec.drafters.retokenized import retokenized_source
from mlx_spec.errors import InvalidValue
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import Prompt, text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Drafter, Round

GB = 10**9
PROMPT = tiny.prompt(300)  # so long that the buffers of a window have moved
shallow_models = pytest.fixture(shallow, scope="module", autouse=True)
VOCABULARY = VocabularySizes(tiny.VOCAB, tiny.VOCAB)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models, small steps."""
    monkeypatch.setattr(prefix_files, "MIN_TOKENS", 64)
    monkeypatch.setattr(running, "PREFILL_STEP", 128)


def pair_with(kind: str, drafter: str) -> Pair:
    """A tiny pair; the drafter is one of `make_pair` or of a family."""
    if drafter in ("none", "lookup", "same", "other"):
        return make_pair(kind, drafter)
    plain = make_pair(kind, "none")
    made: dict[str, Callable[[], DrafterSource]] = {
        "eagle3": lambda: random_sources.eagle3(64, tiny.VOCAB, range(tiny.VOCAB), (0, 1, 2)),
        "mtp": lambda: random_sources.mtp(64, tiny.VOCAB),
        "recurrent": lambda: draft_model_source("recurrent", MODELS["recurrent"], VOCABULARY),
        "sliding": lambda: draft_model_source("sliding", MODELS["sliding"], VOCABULARY),
        "retokenized": lambda: retokenized_source(
            "r", MODELS["full"], tiny.VOCAB, plain.tokenizer, plain.tokenizer
        ),
        "assistant": tiny.assistant,
    }
    return Pair(plain.info, plain.tokenizer, MODELS[kind], [made[drafter]()], FixedPolicy(4))


def files(pair: Pair, folder: Path, name: str = "a", max_bytes: int = GB) -> PrefixFiles:
    return PrefixFiles(CacheFolder(folder, max_bytes), {"model": name}, pair)


def generate(
    pair: Pair, sequence: CachedSequence, prompt: Sequence[int], count: int = 8, most: int | None = None
) -> list[Round]:
    """Answer a prompt; the client hangs up after `most` rounds."""
    sequence.rewind_to_prefix(text_prompt(prompt))
    rounds = []
    with closing(decode(pair.prepare(sequence, prompt, max_tokens=count))) as running:  # type: ignore[type-var]
        for round in islice(running, most):
            sequence.append(round.tokens)
            rounds.append(round)
    return rounds


def facts(rounds: list[Round]) -> list[tuple[object, ...]]:
    return [(r.tokens, r.drafted, r.accepted, r.kind) for r in rounds]


def write(found: PrefixFiles, pair: Pair, prompt: Sequence[int], rounds: int = 1) -> CachedSequence:
    """Answer a prompt, offer it and wait until it is written."""
    sequence = pair.open()
    generate(pair, sequence, prompt, most=rounds)
    found.offer(sequence)
    found.close([])
    return sequence


def stored(pair: Pair, folder: Path) -> CachedSequence:
    """A sequence that was written into a folder, and nothing else."""
    sequence = write(files(pair, folder), pair, PROMPT, 3)
    assert len(list(folder.iterdir())) == 1
    return sequence


CASES = [
    *((kind, "same", 0) for kind in KINDS),
    *((kind, "same", 30) for kind in ("sliding", "recurrent")),
    *(("full", drafter, 30) for drafter in ("lookup", "eagle3", "recurrent", "sliding", "retokenized")),
    ("full", "none", 0),
    ("full", "mtp", 0),
    ("recurrent", "mtp", 30),
    ("recurrent", "other", 0),  # rejected tokens: the newest rows are replayed
    ("shared", "assistant", 30),
]


@pytest.mark.parametrize(("variant", "drafter"), [("31b", "assistant"), ("qwen", "mtp")])
def test_files_tell_pictures_apart(variant: str, drafter: str, tmp_path: Path) -> None:
    pair = spans.pair_of(variant, drafter)
    first, second = (spans.golden(variant, f"again.{turn}") for turn in range(2))
    held, found = pair.open(), files(pair, tmp_path)
    held.rewind_to_prefix(first.prompt)
    for round in decode(pair.prepare(held, first.prompt, max_tokens=24)):
        held.append(round.tokens)
    found.offer(held)
    found.close([])
    restored = files(pair, tmp_path).restore(second.prompt, 0, pair.open)
    assert restored is not None
    assert restored.target.rotary == held.target.rotary
    assert restored.rewind_to_prefix(second.prompt) >= first.prompt.spans[0].end
    rounds = decode(pair.prepare(restored, second.prompt, max_tokens=8))
    assert [token for round in rounds for token in round.tokens] == second.greedy[:8]
    others = tuple(replace(span, digest=b"another") for span in second.prompt.spans)
    assert found.restore(Prompt(second.prompt.tokens, others), 0, pair.open) is None


@pytest.mark.parametrize(("kind", "drafter", "cut"), CASES)
def test_a_restored_sequence_goes_on_as_the_one_in_memory(
    kind: str, drafter: str, cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn, or a prompt that differs before the end of the first, past the window."""
    if drafter == "eagle3":
        monkeypatch.setitem(MODELS, "full", tiny.model_of("full"))  # its three layers
    pair = pair_with(kind, drafter)
    kept = stored(pair, tmp_path)
    prompt = [*PROMPT[:-cut], 9, 9, 9] if cut else [*kept.identity.tolist(), 5, 6, 7]
    reused = kept.reusable(text_prompt(prompt))
    restored = files(pair, tmp_path).restore(text_prompt(prompt), 0, pair.open)
    assert restored is not None
    assert (
        len(restored.identity) == restored.rewind_to_prefix(text_prompt(prompt)) == reused >= len(PROMPT) - 40
    )
    for theirs, ours in zip(kept.drafters, restored.drafters, strict=True):
        assert bool(ours.nbytes) == bool(theirs.nbytes)  # it does not read the prompt again
    expected, found = generate(pair, kept, prompt), generate(pair, restored, prompt)
    assert (facts(found), restored.drafter_missing) == (facts(expected), kept.drafter_missing)
    assert found[0].drafted or drafter in ("none", "lookup", "assistant")
    left, right = kept.state().arrays, restored.state().arrays
    same = [name for name in left if name in right and left[name].shape == right[name].shape]
    assert len(same) > 1 and all(mx.array_equal(left[name], right[name]) for name in same)
    tokens = [token for round in found for token in round.tokens]
    assert kind != "full" or tokens == alone(pair, kind, prompt, 8, Sampling())


# --- files


@pytest.fixture(scope="module")
def plain() -> Pair:
    return make_pair("full", "none")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-500],
    "bit": lambda data: data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:],
    "header": lambda data: data[:8] + b"x" * 32 + data[40:],
    "other key": lambda data: data.replace(b"model", b"nodel", 1),
    "exchanged pages": lambda data: data[:-8192] + data[-4096:] + data[-8192:-4096],
    "exchanged words": lambda data: data[:-16] + data[-8:] + data[-16:-8],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_ignored_with_one_line(
    plain: Pair, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(plain, tmp_path)
    file = next(tmp_path.iterdir())
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    (tmp_path / "notes.txt").write_text("mine")
    found = files(plain, tmp_path)
    assert [found.restore(text_prompt([*PROMPT, 1, 2]), 0, plain.open) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1 and "is ignored" in caplog.text and "\n" not in caplog.messages[0]


def test_damage_on_the_way_to_the_disk_is_found(
    plain: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checksum is that of the buffers."""
    sync = os.fsync

    def damage(handle: int) -> None:
        os.pwrite(handle, b"damage", os.fstat(handle).st_size - 100)
        sync(handle)

    with monkeypatch.context() as worn:
        worn.setattr(os, "fsync", damage)
        stored(plain, tmp_path)
    assert files(plain, tmp_path).restore(text_prompt([*PROMPT, 1, 2]), 0, plain.open) is None
    assert "its content was changed" in caplog.text


def test_the_engine_thread_reads_no_header(
    plain: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of a shared folder: files of others are found, and forgotten once they are gone."""
    readers: list[str] = []

    def read(path: Path) -> StoredPrefix:
        readers.append(threading.current_thread().name)
        return read_entry(path)

    read_entry = prefix_files._read_entry
    monkeypatch.setattr(prefix_files, "_read_entry", read)
    ours, prompt = files(plain, tmp_path), text_prompt([*PROMPT, 1, 2])
    assert ours.restore(prompt, 0, plain.open) is None
    stored(plain, tmp_path)  # by another server
    for _ in range(500):
        if restored := ours.restore(prompt, 0, plain.open):
            break
        time.sleep(0.01)
    assert restored is not None and restored.reusable(prompt) == len(PROMPT)
    assert readers and all(name.startswith("mlx_spec writing") for name in readers)
    next(tmp_path.iterdir()).unlink()
    assert ours.restore(prompt, 0, plain.open) is None


def test_arrays_of_another_shape_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The key says the same, the content does not."""
    stored(make_pair("full", "none"), tmp_path)
    other = make_pair("shared", "none")
    assert files(other, tmp_path).restore(text_prompt([*PROMPT, 1, 2]), 0, other.open) is None
    assert "belong to another model" in caplog.text


def test_the_key_holds_all_that_caches_depend_on(tmp_path: Path, plain: Pair) -> None:
    weights = tmp_path / "m" / "model.safetensors"
    weights.parent.mkdir()
    (weights.parent / "config.json").write_text('{"model_type": "llama"}')
    mx.save_safetensors(str(weights), {"a": mx.zeros(3)})
    checkpoint = Checkpoint(weights.parent)
    key = partial(model_key, [checkpoint], ("eagle3",), None)
    before = key()
    assert key() == before
    assert key(2) != before != key(is_float32=True), "other bits, other types"
    assert model_key([checkpoint], ("eagle3",), 8) != before != model_key([checkpoint], (), None)
    mx.save_safetensors(str(weights), {"a": mx.ones(3)})  # a fine-tune: same config, names, shapes and size
    assert key() != before
    stored(plain, tmp_path / "c")
    assert files(plain, tmp_path / "c", "b").restore(text_prompt([*PROMPT, 1, 2]), 0, plain.open) is None


def test_only_the_owner_can_read(plain: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "cache"
    stored(plain, folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert next(folder.iterdir()).stat().st_mode & 0o777 == 0o600
    owner = os.geteuid()
    for mode, user in ((0o770, owner), (0o702, owner), (0o700, owner + 1)):
        folder.chmod(mode)
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with pytest.raises(InvalidValue, match="written by others"):
            CacheFolder(folder, GB)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValue, match="cannot be used"):
        CacheFolder(tmp_path / "file", GB)


def test_small_chats_and_small_growth_are_not_written(plain: Pair, tmp_path: Path) -> None:
    found, names = files(plain, tmp_path), []
    for length in (60, 120, 150, 190, 300):  # 1.25 times and 64 more
        write(found, plain, PROMPT[:length])
        names.append([path.name for path in tmp_path.iterdir()])
    assert [len(each) for each in names] == [0, 1, 1, 1, 1]  # the longer one replaces the others
    assert names[1] == names[2] and len({*names[2], *names[3], *names[4]}) == 3
    sequence = write(found, plain, [*PROMPT, *range(70)])
    assert [path.name for path in tmp_path.iterdir()] == names[4]
    found.close([sequence])  # the last chance
    assert [path.name for path in tmp_path.iterdir()] != names[4]


def test_a_file_stays_if_a_longer_one_cannot_be_rewound_to_it(tmp_path: Path) -> None:
    pair = make_pair("recurrent", "none")
    found = files(pair, tmp_path)
    for length in (120, 300):
        write(found, pair, PROMPT[:length])
    assert len(list(tmp_path.iterdir())) == 2
    assert found.restore(text_prompt([*PROMPT[:120], 1, 2]), 0, pair.open) is not None


def test_the_sequence_used_last_is_written_first(
    plain: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No write begins once the time is over, so the older one is lost."""
    cache = PrefixCache(plain.open, 4, lambda: GB)
    prompts = [tiny.prompt(80, seed=seed) for seed in (5, 6)]
    for prompt in prompts:
        sequence = cache.take(text_prompt(prompt))
        generate(plain, sequence, prompt, most=1)
        cache.give_back(sequence)
    cache.files = files(plain, tmp_path)
    with monkeypatch.context() as slow:
        slow.setattr(time, "monotonic", count(step=6).__next__)
        cache.close()
    restored = [cache.files.restore(text_prompt([*p, 1, 2]), 0, plain.open) for p in prompts]
    assert restored[0] is None and restored[1] is not None


def test_tokens_of_a_file_that_is_not_used_count_as_read_again(plain: Pair, tmp_path: Path) -> None:
    """It would save fewer than a file must."""
    stored(plain, tmp_path)
    cache = PrefixCache(plain.open, 4, lambda: GB, files(plain, tmp_path))
    sequence = cache.take(text_prompt([*PROMPT[:50], 9, 9, 9]))
    assert sequence.reread == Reread(50, "evicted")


def test_size_and_age_have_limits(plain: Pair, tmp_path: Path) -> None:
    stored(plain, tmp_path)
    first = next(tmp_path.iterdir())
    found = files(plain, tmp_path, max_bytes=int(2.5 * first.stat().st_size))
    for seed in (5, 6):
        for age, path in enumerate(sorted(tmp_path.iterdir(), key=lambda path: path != first)):
            os.utime(path, (time.time(), time.time() - 60 + age))  # the first is the oldest
        assert found.restore(text_prompt([*PROMPT, 1, 2]), 0, plain.open) is not None  # but used
        write(found, plain, tiny.prompt(300, seed=seed))
        assert len(list(tmp_path.iterdir())) == 2 and first.exists()
    CacheFolder(tmp_path, first.stat().st_size // 2)
    assert not list(tmp_path.iterdir())
    answers = [tmp_path / f"{name}.answers" for name in "ab"]
    for i, file in enumerate(answers):
        file.write_bytes(bytes(800))
        os.utime(file, (time.time(), time.time() + i))
    CacheFolder(tmp_path, 1000)
    assert list(tmp_path.iterdir()) == answers[1:]
    answers[1].unlink()
    stored(plain, tmp_path)
    old = time.time() - prefix_files.MAX_AGE_S - 60
    os.utime(next(tmp_path.iterdir()), (old, old))
    CacheFolder(tmp_path, GB)
    assert not list(tmp_path.iterdir())


def test_a_writer_that_is_killed_leaves_a_usable_folder(
    plain: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote goes at once, whatever the clock says; a file that is being written stays and counts."""

    def killed(*names: object) -> None:
        raise SystemExit

    with monkeypatch.context() as ending:  # nothing is cleaned up
        ending.setattr(os, "replace", killed)
        ending.setattr(Path, "unlink", lambda path, missing_ok: None)
        write(files(plain, tmp_path), plain, PROMPT)
    left = next(tmp_path.iterdir())
    assert left.stat().st_size > 100_000  # all but its name
    found = files(plain, tmp_path)
    assert found.restore(text_prompt([*PROMPT, 1, 2]), 0, plain.open) is None
    assert not left.exists()
    stored(plain, tmp_path)
    with temporary_file(tmp_path) as other:
        other.write(bytes(1000))
        other.flush()
        os.utime(other.name, (0, 0))
        CacheFolder(tmp_path, 2000)
        assert [path.name for path in tmp_path.iterdir()] == [Path(other.name).name]
        (tmp_path / "a.answers").write_bytes(bytes(1500))
        CacheFolder(tmp_path, 2000)
        assert [path.name for path in tmp_path.iterdir()] == [Path(other.name).name]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_warning(
    plain: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, sequence = files(plain, tmp_path), plain.open()
    generate(plain, sequence, PROMPT)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for _ in range(3):
        found.offer(sequence)
        found.close([sequence])
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_conversation_goes_on_while_it_is_written(plain: Pair, tmp_path: Path) -> None:
    """The file holds what was offered, whatever is written into the caches meanwhile."""
    found, sequence = files(plain, tmp_path), plain.open()
    generate(plain, sequence, PROMPT)
    tokens, before = sequence.identity, {n: mx.array(a) for n, a in sequence.state().arrays.items()}
    mx.eval(before)
    found.offer(sequence)
    generate(plain, sequence, [*PROMPT[:30], *range(200)], 4)
    found.close([])
    restored = files(plain, tmp_path).restore(text_prompt([*tokens, 0, 0]), 0, plain.open)
    assert restored is not None and np.array_equal(restored.identity, tokens)
    after = restored.state().arrays
    assert all(mx.array_equal(before[name], after[name]) for name in before)


# --- through the server


def test_a_key_reuses_its_own_prompts_alone(tmp_path: Path) -> None:
    """In memory, and from the files of an earlier server."""
    settings = replace(DEMO, cache_folder=tmp_path / "cache")
    prompt = "".join(f"What does os.path.join do, and why not {i}? " for i in range(8))
    cached: list[int] = []
    for keys in (("alice", "bob", "alice", ""), ("bob", "alice", "carol", "")):
        with working(settings, load_tiny) as served:
            found = [closed(answer(served, raw_request(prompt, key=key))).usage for key in keys]
            cached += [usage.cached_tokens for usage in found]
    again = found[0].prompt_tokens - 2
    assert cached == [0, 0, again, 0, again, again, 0, again]


def test_answers_go_on_while_a_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(DEMO, cache_folder=tmp_path / "cache")
    prompt = "".join(f"What does os.path.join do, and why not {i}? " for i in range(8))
    with working(settings, load_tiny) as served:
        answer(served, raw_request(prompt))
    checked, is_whole = threading.Event(), prefix_files._is_whole
    monkeypatch.setattr(prefix_files, "_is_whole", lambda path: checked.wait(60) and is_whole(path))
    with working(settings, load_tiny) as served:
        late = begin(served, raw_request(prompt))
        assert closed(answer(served, raw_request("Another text"))).usage.cached_tokens == 0
        assert not late.sent
        checked.set()
        usage = closed(late.all()).usage
    assert usage.cached_tokens == usage.prompt_tokens - 2


def test_a_restart_reads_a_prompt_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(DEMO, cache_folder=tmp_path / "cache")
    prompt = "".join(f"What does os.path.join do, and why not {i}? " for i in range(8))
    answers, cached = [], []
    for _ in range(2):
        with working(settings) as served:
            events = answer(served, raw_request(prompt))
            answers.append(body(events))
            cached.append(closed(events).usage.cached_tokens)
            counted = served.metrics.json()["models"]["demo"]
            assert counted["cached_tokens_total"] == cached[-1]
            assert counted["prefix_cache_forks_total"] == counted["prefix_cache_evicted_tokens_total"] == 0
    length = closed(events).usage.prompt_tokens
    assert cached == [0, length - 2] and answers[0] == answers[1]
    monkeypatch.setattr(Drafter, "nbytes", 8)
    with working(settings) as served:  # one line, and it serves
        assert closed(answer(served, raw_request(prompt))).usage.cached_tokens == 0
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "demo: --cache-folder is not used: the drafter Gemma4Assistant cannot save its caches"
    ]


def test_what_makes_room_is_written_first(plain: Pair, tmp_path: Path) -> None:
    """A sequence that is dropped or taken over, even if it has grown by less than a quarter."""
    cache = PrefixCache(plain.open, 1, lambda: GB, files(plain, tmp_path), min_fork=8)
    first = write(cache.files, plain, PROMPT)  # type: ignore[arg-type]
    longer = [*first.identity.tolist(), *tiny.prompt(66, seed=4)]
    for prompt in (longer, [*PROMPT[:100], *tiny.prompt(60, seed=9)], tiny.prompt(90, seed=8)):
        sequence = cache.take(text_prompt(prompt))
        generate(plain, sequence, prompt, most=1)
        cache.give_back(sequence)
        cache.files.close([])  # type: ignore[union-attr]
    restored = files(plain, tmp_path).restore(text_prompt([*longer, 1, 2]), 0, plain.open)
    assert restored is not None and len(restored.identity) == len(longer)
