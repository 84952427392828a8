"""Measured costs: shown, saved for the next process, and taken to another machine and back."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import mlx_spec
from mlx_spec.apps.tune import main
from mlx_spec.policy import saved_costs
from mlx_spec.policy.costs import Table


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep saved costs in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return saved_costs.folder()


def test_costs_are_shown_saved_taken_to_a_file_and_back_and_cannot_be_saved(
    cache, one_layer, tmp_path, capsys, monkeypatch
):
    tiny = [f"--target={one_layer[0]}", f"--drafter={one_layer[1]}"]
    monkeypatch.setattr(Table, "dearer", lambda *_: False)  # a busy machine gives dear ones
    exported = tmp_path / "mine.json"
    assert main([*tiny, "--context", "64", "--export", str(exported)]) == 0
    (file,) = cache.glob("*.json")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("measured on ") and lines[-2:] == ["", f"saved in {file}"]
    context = int(re.fullmatch(r"plain decoding at (\d+) tokens of context: \S+ ms a token", lines[2])[1])
    assert context in range(64, 68)  # the measurement generates a few tokens
    heads = ["rows of a p", "verify, ms ", "in plain to", *["draft with "] * 4]  # three of lookup
    assert [line[:11] for line in lines[4:-2]] == heads
    measured = json.loads(file.read_text())
    assert mlx_spec.load(*one_layer).policies.costs.table().context == measured["table"]["context"] == context
    file.unlink()
    assert main([*tiny, "--json", "--import", str(exported)]) == 0
    again = json.loads(capsys.readouterr().out)["seconds"]
    assert again["verify"] == pytest.approx(measured["table"]["verify"])
    assert {**again, "verify": None} == {**measured["table"], "verify": None}
    assert json.loads(file.read_text())["key"] == measured["key"]
    shutil.rmtree(cache)
    cache.touch()  # a file stands where the folder is to be
    assert main([*tiny, "--import", str(exported)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("measured on ") and "saved in" not in out
    assert re.search(r"mlx-spec: .+ cannot be written \(.+\): check its folder\n$", err)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--drafter=none"], "there is nothing to tune: {target} has no drafter here"),
        (["--drafter={drafter}", "--import=/no/such/file"], "there is no file /no/such/file"),
        (["--drafter={drafter}", "--import=mine.json"], "mine.json is damaged"),
    ],
)
def test_refusals(words, problem, one_layer, capsys, tmp_path, monkeypatch):
    names = dict(zip(("target", "drafter"), one_layer, strict=True))
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text("{")
    assert main([f"--target={one_layer[0]}", *(word.format(**names) for word in words)]) == 1
    out, err = capsys.readouterr()
    *progress, line = err.splitlines()
    assert out == "" and line.startswith(f"mlx-spec: {problem.format(**names)}")
    assert not [text for text in progress if not text.startswith("measuring what ")]
    assert "damaged" not in problem or err.endswith(": measure here with `mlx-spec tune`\n")
