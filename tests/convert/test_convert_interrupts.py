"""Killed, interrupted or out of space, a conversion leaves nothing that looks finished, and runs again."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run
from test_convert import GOLDEN, converted
from waiting import LIMIT, wait_until

from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.hub import NoSpace, files
from mlx_spec.hub.files import new_folder

ROOT = Path(__file__).parents[2]
PAIR = GOLDEN / "e2b"
PARTS = [str(PAIR / "target"), "--drafter", str(PAIR / "assistant")]
CODE = """
import resource, sys
from mlx_spec.apps.cli import main
limit = int(sys.argv.pop(1))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
print("started", flush=True)
sys.exit(main(["convert", *sys.argv[1:]]))
"""


def start(out: Path, *, file_limit: int = 0, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """A conversion in a process of its own, which may write files of at most `file_limit` bytes."""
    arguments = [*PARTS, "-o", str(out)]
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CODE, str(file_limit), *arguments, "--no-self-test"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def is_complete(out: Path) -> bool:
    manifest = json.loads((out / "pair.json").read_text())
    return all(
        (out / name / file).stat().st_size == facts["bytes"]
        for name, part in manifest["parts"].items()
        for file, facts in part["files"].items()
    )


def wait_for(process: subprocess.Popen[bytes], holds: Callable[[], object]) -> None:
    """Until `holds`, or the process ends."""
    wait_until(lambda: holds() or process.poll() is not None, pause=0.002)


def test_killed_at_any_point(tmp_path: Path) -> None:
    out, left = tmp_path / "out", 0
    for point in ("", "/target/model.safetensors", "/drafter/config.json"):
        with start(out) as process:
            wait_for(process, lambda point=point: list(tmp_path.glob(f".out.partial-*{point}")))
            time.sleep(random.uniform(0, 0.01))
            process.kill()
        if out.exists():
            assert is_complete(out)
            (out / "pair.json").unlink()
            out.rename(tmp_path / f"done-{point.replace('/', '-')}")
        left += bool(list(tmp_path.glob(".out.partial-*")))
    assert left > 0, "every run was killed too late"
    assert run("convert", *PARTS, "-o", str(out), "--no-self-test") == 0
    assert is_complete(out) and not list(tmp_path.glob(".*"))


def test_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start(out) as process:
        wait_for(process, lambda: list(tmp_path.glob(".out.partial-*/target")))
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) in (130, 0)
        assert process.stderr is not None
        shown = process.stderr.read().decode()
    if process.returncode == 130:
        assert shown.splitlines()[-1] == "mlx-spec: interrupted, nothing was written"
        assert not list(tmp_path.iterdir())


def test_interrupted_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_spec.convert.convert.check_space", interrupt)
    arguments = [str(PAIR / "target"), "--drafter", "none", "-o", str(tmp_path / "out")]
    assert run("convert", *arguments) == 130
    assert not list(tmp_path.iterdir())


def test_full_disk(tmp_path: Path) -> None:
    with start(tmp_path / "out", file_limit=100_000) as process:
        assert process.wait(LIMIT) == 1
        assert process.stderr is not None
        *_, line = process.stderr.read().decode().splitlines()
    assert line.startswith(f"mlx-spec: the disk of {tmp_path} is full")
    assert not list(tmp_path.iterdir())


def test_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SPARE_BYTES", 1 << 60)
    with pytest.raises(NoSpace, match="target needs .* on the disk of .* are free: make room there, or write"):
        converted("e2b", tmp_path / "out")
    assert not list(tmp_path.iterdir())


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
    with new_folder(tmp_path / "out"):
        assert not mine.exists()
    assert others.exists() and not (tmp_path / ".out.lock").exists()


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InvalidValue, match="exists already"), new_folder(out):
        out.mkdir()
        (out / "mine").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]
