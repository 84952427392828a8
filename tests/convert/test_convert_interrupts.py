"""Killed, interrupted or out of space, a conversion leaves nothing that looks finished, and runs again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.checkpoints import full_disk
from support.commands import run
from support.drafting import GOLDEN
from support.golden_pairs import converted
from support.waiting import wait_until

from mlx_spec.checkpoint import files
from mlx_spec.checkpoint.files import new_folder, read_object
from mlx_spec.checkpoint.headers import INDEX
from mlx_spec.convert import convert
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.hub import NoSpace

ROOT = Path(__file__).parents[2]
PAIR = GOLDEN / "e2b"


def arguments(out: Path) -> list[str]:
    parts = [str(PAIR / "target"), "--drafter", str(PAIR / "assistant")]
    return ["convert", *parts, "-o", str(out), "--no-self-test"]


NEVER_DONE = """
import sys, time
from mlx_spec.apps.cli import main
from mlx_spec.convert import convert
convert.write_manifest = lambda *_: time.sleep(1000)  # the last file
main(sys.argv[1:])
"""


def test_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", NEVER_DONE, *arguments(out)], cwd=ROOT) as process:
        wait_until(lambda: list(tmp_path.glob(".out.partial-*/target/*")))
        process.kill()
    assert list(tmp_path.glob(".out.partial-*")) and not out.exists()
    assert run(*arguments(out)) == 0
    assert (out / "pair.json").is_file() and not list(tmp_path.glob(".*"))


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mlx_spec.convert.convert.write_manifest", Mock(side_effect=KeyboardInterrupt))
    assert run(*arguments(tmp_path / "out")) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "mlx-spec: interrupted, nothing was written"
    assert not list(tmp_path.iterdir())


def test_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_disk(100_000):
        assert run(*arguments(tmp_path / "out")) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"mlx-spec: the disk of {tmp_path} is full")
    assert not list(tmp_path.iterdir())


def test_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda place: 1_000)
    with pytest.raises(NoSpace, match=r"target needs .* on the disk of .* are free: make room there"):
        converted("e2b", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("bits", "skip_test", "copies"), [("4", False, 1), ("4", True, 0), ("none", False, 0)]
)
def test_space_for_the_self_test(
    bits: str, skip_test: bool, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes a drafter that is quantized once more, as it is without a quantization."""

    def written(bits: str, role: str) -> int:
        converted("e2b", tmp_path / bits, drafter_bits=bits)
        index = read_object(tmp_path / bits / role / INDEX)
        shutil.rmtree(tmp_path / bits)
        return int(index["metadata"]["total_size"])

    monkeypatch.setattr(convert, "self_test", lambda *_: {"result": "passed"})
    needed = written(bits, "target") + written(bits, "drafter") + copies * written("none", "drafter")
    free = int(needed * 1.05) + 1_000_000_000
    monkeypatch.setattr(files, "free_bytes", lambda place: free - 1)
    with pytest.raises(NoSpace):
        converted("e2b", tmp_path / "out", drafter_bits=bits, skip_test=skip_test)
    monkeypatch.setattr(files, "free_bytes", lambda place: free)
    converted("e2b", tmp_path / "out", drafter_bits=bits, skip_test=skip_test)


def test_one_run_a_place(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_folder(out) as folder:
        (folder / "x").write_text("x")
        with pytest.raises(InvalidValue, match="another run is writing"), new_folder(out):
            pass
        with new_folder(tmp_path / "other"):
            pass
        assert folder.is_dir() and not out.exists()
    assert (out / "x").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "o[u]t*"
    for failure in (SpecError("no"), OSError("no"), KeyboardInterrupt()):
        with pytest.raises(type(failure)), new_folder(out) as folder:
            (folder / "x").write_text("x")
            raise failure
        assert not list(tmp_path.iterdir())


def test_what_dead_runs_left_is_removed(tmp_path: Path) -> None:
    mine, others = tmp_path / ".out.partial-99999", tmp_path / ".out2.partial-99999"
    for folder in (mine, others):
        folder.mkdir()
        (folder / "x").write_text("x")
    (tmp_path / ".out.lock").touch()
    (tmp_path / "out").mkdir()  # empty, so that it is replaced
    with new_folder(tmp_path / "out"):
        assert not mine.exists()
    assert others.exists() and not (tmp_path / ".out.lock").exists()


def test_a_file_and_a_folder_that_appears_meanwhile_are_not_replaced(tmp_path: Path) -> None:
    out, file, link = tmp_path / "out", tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nothing")
    for place in (file, link, out):
        with pytest.raises(InvalidValue, match="exists already"), new_folder(place):
            out.mkdir()
            (out / "mine").write_text("x")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "link", "mine", "out"]
