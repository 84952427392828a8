"""The block to paste into an issue: what it says, and what it must not say."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support import mac

import mlx_spec
from mlx_spec.apps import report
from mlx_spec.apps.bench import QUESTIONS
from mlx_spec.apps.doctor import version
from mlx_spec.apps.report import block, hiding, main
from mlx_spec.apps.selftest import Effort


def test_the_block_names_machine_versions_text_and_speeds(one_layer):
    effort = Effort(seconds=600.0, questions=1, tokens=5)
    lines, is_fine = block(lambda: mlx_spec.load(*one_layer), hiding(), effort, tokens=8, most=1)
    out = "\n".join(lines)
    assert is_fine and max(map(len, lines)) <= 90
    for expected in (
        f"mlx-spec {mlx_spec.__version__}, mlx {version('mlx')}",
        "verdict      lossless",
        "machine ",
    ):
        assert expected in out
    arms = [line.split()[0] for line in lines if line.startswith(("plain ", "K = ", "adaptive "))]
    assert arms == ["plain", "K", "K", "adaptive"]
    for secret in (str(Path.home()) + "/", *QUESTIONS):
        assert secret not in out


def test_what_fails_is_in_the_block_without_its_place(tmp_path, monkeypatch, capsys):
    """On a Mac the block ends with what only a Mac can tell, also then."""
    mac.imitate_system(monkeypatch, mac.MACS[16])
    monkeypatch.setenv("LOGNAME", "ludwig")
    monkeypatch.setattr(socket, "gethostname", lambda: "ludwigs-mac.local")
    place = tmp_path / "of ludwig" / "my models"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{")
    assert main([str(place)]) == 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "```text" and "problem: " in out and "config.json" not in out
    for secret in ("ludwig", str(tmp_path), "my models"):
        assert secret not in out
    asked = [line[2:].split(":")[0] for line in lines if line.startswith("- ")]
    assert asked == [question.split(":")[0] for question in report.undecided()]
    assert len(asked) > 15 and lines[-1] == "```"


@pytest.mark.parametrize(
    "text, shown",
    [
        ("there is no folder /mnt/data/x y", "there is no folder (a path) y"),
        ("/mnt/my models/a/config.json: damaged", "(a path): damaged"),
        ("~/models/a and ../b/c", "(a path) and (a path)"),
        ("owner/name at 20 tokens/s, 1/2", "owner/name at 20 tokens/s, 1/2"),
    ],
)
def test_paths_are_hidden(text, shown):
    assert hiding("/mnt/my models/a")(text) == shown
