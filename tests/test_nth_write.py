"""The n-th write, fsync, rename or new file fails, for each n and each writer of this program.

What was there stays whole, nothing half written has the final name, no temporary file is left, the error is
one line, and the next try works. `tests/hub/test_download.py` does the same with downloads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import platformdirs
import pytest
from support import gguf_files, pairs, tiny
from support.faults import Writer, sweep
from support.golden_pairs import converted

from mlx_spec.apps.chat import saved
from mlx_spec.apps.server.engine import prefix_files
from mlx_spec.apps.server.engine.prefix_files import CacheFolder, PrefixFiles
from mlx_spec.apps.server.protocols.stored_responses import ItemField, ResponseStore
from mlx_spec.checkpoint.files import new_folder, write_json
from mlx_spec.checkpoint.gguf_model import gguf_folder
from mlx_spec.convert.train.answers import RecordedAnswer, read_answer, write_answer
from mlx_spec.drafters.earlier import EarlierAnswers
from mlx_spec.model.row_class import RowClass
from mlx_spec.policy import saved_costs
from mlx_spec.prompt import text_prompt
from mlx_spec.session import Piece
from mlx_spec.types import KVRows

# --- one file


def test_a_saved_conversation(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "a" * 20_000}]}

    def check(folder: Path, done: bool) -> None:
        assert len(saved.read(folder / "a.json")["messages"]) in ([1] if done else [0, 1])

    writer = Writer(
        lambda folder: saved.write(folder / "a.json", talk),
        check,
        lambda folder: saved.write(folder / "a.json", {"messages": []}),
    )
    assert sweep(writer, tmp_path) >= 4


def test_a_kept_conversation(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q" * 9000}, {"role": "assistant", "content": "a" * 9000}]
    notes: list[str] = []

    def write(folder: Path) -> None:
        for file in folder.glob("*"):
            file.unlink()
        journal = saved.Journal(folder, notes.append)
        for i in range(3):
            before = {"messages": turns * i}
            journal.ask("q" * 9000, before)
            journal.add(Piece("a" * 9000, "answer", None))
            journal.keep({"messages": turns * (i + 1)})
        journal.close()

    def check(folder: Path, done: bool) -> None:
        files = [file for file in folder.glob("*") if file.stat().st_size]
        if files or done:
            messages = saved.read(files[0])["messages"]
            assert messages == (turns * 3)[: len(messages)] and (len(messages) == 6 or not done)

    assert sweep(Writer(write, check), tmp_path, ("full", "broken")) >= 9
    assert notes and all("is not kept" in note and "\n" not in note for note in notes)


def test_costs(tmp_path: Path) -> None:
    key = saved_costs.Key("cpu", "t", (), "none", None, "1")

    def write(folder: Path, base: int) -> None:
        saved_costs.write_rows(folder / "r.json", key, RowClass(base, ((0, 12),)))

    def check(folder: Path, done: bool) -> None:
        assert saved_costs.read_rows(folder / "r.json", key).base in ([2] if done else [1, 2])

    writer = Writer(lambda folder: write(folder, 2), check, lambda folder: write(folder, 1))
    assert sweep(writer, tmp_path) >= 4


# --- the server


def test_stored_responses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = [f"resp_{i:032x}" for i in (1, 2)]

    def add(folder: Path, id: str) -> None:
        store = ResponseStore(folder)
        asked = [ItemField.model_validate({"role": "user", "content": "a" * 20_000})]
        store.of("").save({"id": id, "output": []}, asked, None)
        store._writer.shutdown()
        assert store.find("", id) is not None, "it is kept in memory"

    def check(folder: Path, done: bool) -> None:
        found = ResponseStore(folder)
        assert found.find("", ids[0]) is not None and (found.find("", ids[1]) is not None or not done)

    writer = Writer(lambda folder: add(folder, ids[1]), check, lambda folder: add(folder, ids[0]))
    count = sweep(writer, tmp_path)
    warnings = [line for line in caplog.messages if "kept in memory only" in line]
    assert len(warnings) >= 2 * (count - 2) and "damaged" not in caplog.text


def test_cache_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefix_files, "MIN_TOKENS", 64)
    plain, tokens = pairs.pair_with(tiny.smallest(128), [], 0), tiny.prompt(70)
    sequence = plain.open()
    pairs.generate(plain, sequence, tokens, 1)

    def write(folder: Path) -> None:
        found = PrefixFiles(CacheFolder(folder / "c", 10**9), {"model": "a"}, plain)
        found.offer(sequence)
        found.close([])

    def check(folder: Path, done: bool) -> None:
        if not (folder / "c").exists():
            return
        found = PrefixFiles(CacheFolder(folder / "c", 10**9), {"model": "a"}, plain)
        restored = found.restore(text_prompt([*tokens, 1, 2]), 0, plain.open)
        assert restored is not None or not done
        assert len(list((folder / "c").iterdir())) == (restored is not None)

    assert sweep(Writer(write, check, places=6), tmp_path, ("full", "memory")) >= 10
    assert "nothing more is written" in caplog.text and "is ignored" not in caplog.text


def test_earlier_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file is appended to; its older half is dropped when it is long."""

    def add(folder: Path, first: int) -> None:
        earlier = EarlierAnswers(1 << 10)
        earlier.keep_in(folder, "t", 10_000, 3600)
        earlier.add("k", text_prompt([1]), range(first, first + 900))

    def prepare(folder: Path) -> None:
        for i in range(2):
            add(folder, 1000 * i)

    def check(folder: Path, done: bool) -> None:
        again = EarlierAnswers(1 << 10)
        again.keep_in(folder, "t", 10_000, 3600)
        new, old = (again.ring("k").find(list(range(n + 800, n + 820)))[1] for n in (3000, 1000))
        assert new or (old and not done)

    assert sweep(Writer(lambda folder: add(folder, 3000), check, prepare), tmp_path) >= 5
    assert "no more answers are kept" in caplog.text


# --- folders


def test_a_new_folder(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        with new_folder(folder / "out") as place:
            write_json(place / "a.json", {"a": "x" * 20_000})
            (place / "b").write_text("y")

    def check(folder: Path, done: bool) -> None:
        out = folder / "out"
        assert out.exists() or not done
        if out.exists():
            assert json.loads((out / "a.json").read_text()) and (out / "b").read_text() == "y"
            shutil.rmtree(out)  # the last call, after it got its name, may have failed

    assert sweep(Writer(write, check), tmp_path) >= 9


def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", gguf_files.even(tiny.smallest(32)), "llama")
    home = [tmp_path]
    monkeypatch.setattr(platformdirs, "user_data_path", lambda name: home[0] / name)

    def write(folder: Path) -> None:
        home[0] = folder
        gguf_folder(file)

    def check(folder: Path, done: bool) -> None:
        found = list(folder.glob("mlx_spec/models/*"))
        assert len(found) == 1 if done else len(found) < 2
        for each in found:
            assert len(mx.load(str(each / "target" / "model-00001.safetensors"))) > 5
            assert json.loads((each / "pair.json").read_text())["target"] == "target"

    (tmp_path / "sweep").mkdir()
    assert sweep(Writer(write, check, places=8), tmp_path / "sweep", ("full", "memory")) >= 20


def test_conversions(tmp_path: Path) -> None:
    def check(folder: Path, done: bool) -> None:
        assert (folder / "out").exists() or not done
        if (folder / "out").exists():
            assert json.loads((folder / "out" / "pair.json").read_text())["drafter"]
            shutil.rmtree(folder / "out")

    writer = Writer(lambda folder: converted("e2b", folder / "out"), check, places=4)
    assert sweep(writer, tmp_path, ("full",)) >= 20


def test_recorded_answers(tmp_path: Path) -> None:
    rows = KVRows(mx.zeros((1, 1, 12, 4), mx.float16), mx.zeros((1, 1, 12, 4), mx.float16))
    fields = ("code", True, mx.arange(8), mx.zeros((8, 4), mx.float16), {"full_attention": rows}, mx.zeros(8))

    def check(folder: Path, done: bool) -> None:
        file = folder / "000000.safetensors"
        assert file.exists() or not done
        if file.exists():
            assert read_answer(file).tokens.tolist() == list(range(8))
        for left in folder.glob("*.tmp.safetensors"):
            left.unlink()  # the next try does

    writer = Writer(
        lambda folder: write_answer(folder / "000000.safetensors", RecordedAnswer(*fields)), check
    )
    assert sweep(writer, tmp_path) >= 4
