"""Damaged input ends with one line, in bounded time and memory: seeded fuzzing, and what it has found.

`python benchmarks/fuzz.py --seconds 3600` tries many more inputs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import pairs, tiny
from support.checkpoints import edit_config
from support.forked import start_python
from support.refusals import refusal

from mlx_spec.apps.server.protocols.stored_responses import ResponseStore
from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.convert.train.answers import read_answer
from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.grammar.json_schema import enforced
from mlx_spec.hub.inspect import inspect_stored
from mlx_spec.model.read import read_model
from mlx_spec.tokenizer import read_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def run(*words: str) -> dict[str, dict[str, Any]]:
    """Return what `benchmarks/fuzz.py` finds, by reader."""
    shown = started(str(ROOT / "benchmarks" / "fuzz.py"), *words)
    found: dict[str, dict[str, Any]] = json.loads(shown.splitlines()[-1])
    return found


def started(*words: str) -> str:
    """Return what a Python program shows."""
    pipe = subprocess.PIPE
    with start_python()(
        [sys.executable, *words], stdout=pipe, stderr=pipe, text=True, cwd=ROOT / "tests"
    ) as process:
        shown, errors = process.communicate(timeout=600)
    assert process.returncode == 0, shown[:3000] + errors[-2000:]
    return shown


def test_every_reader_ends_damaged_input_with_one_line() -> None:
    if sys.platform != "linux":  # the limits of a child are those of Linux
        return
    found = run("--inputs", "24", "--seed", "0")
    assert len(found) == 17 and {tried["inputs"] for tried in found.values()} == {24}
    quiet = {"cache", "answers"}  # what is damaged is left out there, with a warning
    assert all(tried["refused"] > 8 for name, tried in found.items() if name not in quiet)


FAULTS = """
from support.fuzz import Reader, Valid, fuzz
def reader(read, **limits):
    return lambda folder: Reader({"a": Valid(b"[1, 2, 3]", "json")}, read, **limits)
def wrong(): raise KeyError("x")
def long():
    while True: pass
def large(): bytearray(300_000_000)
def dead():
    import os
    os.kill(os.getpid(), 11)
def moved(): assert False, "it is read"
limits = {long: {"cpu_seconds": 0}, large: {"megabytes": 100}}
for read in (wrong, long, large, dead, moved, int):
    count = 1 if read is long else 2  # each takes two seconds
    tried = fuzz("x", reader(read, **limits.get(read, {})), count=count)
    print(tried.inputs, *tried.findings, sep="|")
"""


def test_faults_are_found() -> None:
    if sys.platform != "linux":
        return
    shown = started("-c", FAULTS)
    lines = [line for line in shown.splitlines() if line]
    words = ("KeyError in wrong", "too much CPU", "it took", "SIGSEGV", "it is read", "")
    assert [line[0] for line in lines] == ["2", "1", *"2222"], shown
    for line, word in zip(lines, words, strict=True):
        assert word in line and bool(word) == ("|x 0 0: " in line), line


# --- findings


def checkpoint(folder: Path) -> Path:
    return pairs.save(tiny.smallest(), folder)


CONFIGS: dict[str, dict[str, Any]] = {
    "infinite sizes": {"head_dim": 1e308, "max_position_embeddings": 1e308},
    "two lines": {"model_type": "llama\nx"},
    "a name that no file has": {"model_type": "a" * 300},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_config(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    edit_config(folder, lambda config: config.update(changes))
    for read in (inspect_stored, lambda checkpoint: read_model(read_checkpoint(checkpoint.folder))):
        try:
            read(Checkpoint(folder, "x"))
        except BadCheckpoint as error:
            assert "\n" not in str(error)


FILES = {
    "added_tokens.json": [{"<a>": None, "<b>": float("nan")}, {"<a>": float("inf")}],
    "generation_config.json": [
        {"bad_words_ids": [[[3]], [{}]], "top_k": float("nan")},
        {"top_k": 10**400, "temperature": -(10**400)},
    ],
}


@pytest.mark.parametrize(("name", "content"), [(n, each) for n, listed in FILES.items() for each in listed])
def test_files_beside_the_tokenizer(name: str, content: object, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / name).write_text(json.dumps(content))
    if name.startswith("added"):
        refusal(BadCheckpoint, lambda: read_tokenizer(read_checkpoint(folder)))
    else:
        assert read_tokenizer(read_checkpoint(folder)).generation.suppressed == frozenset()


def test_errors_are_one_line_whatever_they_quote() -> None:
    assert str(BadCheckpoint("a\nb \x1b[31m")) == "a b  [31m"


@pytest.mark.parametrize(
    "schema", ["7", "[1]", '{"minItems": 1e999}', '{"dependentRequired": {"z": [[[]]]}}', '{"maximum": NaN}']
)
def test_schemas(schema: str) -> None:
    refusal(InvalidValue, lambda: enforced(schema))


def test_bounds_that_no_float_holds() -> None:
    enforced(json.dumps({"type": "number", "maximum": 10**400, "minimum": -(10**400)}))


def test_a_stored_response_that_continues_a_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    id = f"resp_{1:032x}"
    stored = {
        "response": {"id": id, "output": []},
        "input": [{"role": "user", "content": "a"}],
        "previous": [],
    }
    (tmp_path / f"{id}.json").write_text(json.dumps(stored))
    assert ResponseStore(tmp_path).of("").store.find("", id) is None and "damaged" in caplog.text


def test_tensors_whose_names_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    mx.save_safetensors(str(file), {"abc": mx.zeros(3)})
    file.write_bytes(file.read_bytes().replace(b'"abc"', b'"\xed\xa0\x80"'))
    refusal(BadCheckpoint, Checkpoint(tmp_path).tensors)


def test_a_token_beyond_31_bits(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    written = json.loads((folder / "tokenizer.json").read_text())
    bos = next(token for token in written["added_tokens"] if token["content"] == "<bos>")
    bos["id"] = written["model"]["vocab"]["<bos>"] = 2**31 + 5
    (folder / "tokenizer.json").write_text(json.dumps(written))
    read = read_tokenizer(read_checkpoint(folder))
    assert 2**31 + 5 in read.prompt([{"role": "user", "content": "Hi<bos>"}])


def test_recorded_answers(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for metadata in ({}, {"kind": "x", "greedy": "True"}):
        mx.save_safetensors(str(file), {"hidden": mx.zeros(3)}, metadata)
        refusal(BadCheckpoint, lambda: read_answer(file))
    content = file.read_bytes().replace(b'"kind":"x"', b'"kind":"\xff"')
    file.write_bytes(content)
    refusal(BadCheckpoint, lambda: read_answer(file))
