"""The models on a disk: listed, pulled, resumed and removed. The Hub is a small one on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import platformdirs
import pytest
import sparse
from hub_stand_in import COMMIT, Hub, serving, sizes_of_incomplete
from huggingface_hub import constants
from mlx_lm.utils import MODEL_REMAPPING

from mlx_spec import hub, known, transfer
from mlx_spec.apps.models import models_main, pull_main, rm_main
from mlx_spec.checkpoint import check_weights
from mlx_spec.convert import cached, catalogue
from mlx_spec.convert.removal import plan_removal
from mlx_spec.errors import BadCheckpoint, NotFound

ROOT = Path(__file__).parents[2]
E2B, ASSISTANT = "mlx-community/gemma-4-e2b-it-4bit", "google/gemma-4-E2B-it-assistant"
RUN = """
import sys
from mlx_spec.apps import models
sys.exit(getattr(models, sys.argv[1] + "_main")(sys.argv[2:]))
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a target, its drafter and a drafter of another target; the other names do not exist."""
    table = {"model.embed_tokens.weight": ("BF16", (1000, 100))}
    target = sparse.checkpoint(tmp_path / "served" / "target", sparse.gemma4("E2B"), table)
    (target / "pytorch_model.bin").write_bytes(b"x")
    (target / "own.py").touch()
    repositories = {
        E2B: target,
        ASSISTANT: sparse.checkpoint(
            tmp_path / "served" / "drafter", sparse.gemma4_assistant("E2B"), {"norm.weight": ("BF16", (9,))}
        ),
        "owner/other": sparse.checkpoint(
            tmp_path / "served" / "other", sparse.gemma4_assistant("31B"), {"norm.weight": ("BF16", (9,))}
        ),
        "owner/copy": target,
    }
    with serving(repositories) as found:
        yield found


@pytest.fixture(autouse=True)
def cache(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an empty folder of pairs, which also processes started here would use."""
    folder = tmp_path / "home" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(platformdirs, "user_data_path", lambda name: tmp_path / "data" / name)
    monkeypatch.setattr(transfer, "PAUSE", 0.0)
    return folder


@pytest.fixture
def start(served: Hub, tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """A program of ours in a process of its own."""

    def run(*arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        command = [sys.executable, "-W", "error", "-c", RUN, *arguments]
        return subprocess.Popen(command, env=served.variables(tmp_path / "home"), cwd=ROOT, **pipes)

    return run


def repository(cache: Path, name: str) -> Path:
    return cache / ("models--" + name.replace("/", "--"))


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert models_main([*arguments, "--json"]) == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}


def pair(folder: Path) -> Path:
    """A converted pair."""
    sparse.checkpoint(folder / "target", sparse.gemma4("E2B"), {"a.weight": ("BF16", (1000, 10))})
    sparse.checkpoint(folder / "drafter", sparse.gemma4_assistant("E2B"), {"b.weight": ("BF16", (5,))})
    manifest = {"target": "target", "drafter": "drafter", "self_test": {"result": "passed"}}
    (folder / "pair.json").write_text(json.dumps(manifest))
    return folder


# --- pull


def test_pull(served: Hub, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull_main(["gemma-4-e2b"]) == 0
    out, err = capsys.readouterr()
    assert out == f"mlx-spec chat --target {E2B}\n"
    assert f"{E2B}: 0.2 MB to fetch, " in err and f"fetching {ASSISTANT}" in err and "\r" not in err
    folder = hub.cached(E2B)
    assert folder is not None and not list(folder.glob("*.py")) + list(folder.glob("*.bin"))
    assert check_weights(folder) > 200_000
    assert not list(cache.rglob("*.incomplete"))
    # it is all there: nobody is asked
    served.asked.clear()
    assert pull_main(["gemma-4-e2b:4bit"]) == 0
    out, err = capsys.readouterr()
    assert served.asked == [] and out == f"mlx-spec chat --target {E2B}\n" and f"{E2B} is here" in err


def test_pull_without_a_drafter(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull_main([E2B, "--drafter", "none"]) == 0
    assert capsys.readouterr().out == f"mlx-spec chat --target {E2B} --drafter none\n"
    assert not repository(cache, ASSISTANT).exists()


def test_pull_a_revision(capsys: pytest.CaptureFixture[str]) -> None:
    assert pull_main(["owner/copy", "--drafter", ASSISTANT, "--revision", COMMIT]) == 0
    out = capsys.readouterr().out
    assert f"models--owner--copy/snapshots/{COMMIT} --drafter {ASSISTANT}" in out
    assert pull_main(["owner/copy", "--revision", "none"]) == 1
    assert "has no such revision" in capsys.readouterr().err


def test_pull_a_drafter_of_another_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert pull_main([E2B, "--drafter", "owner/other"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "owner/other does not fit" in err and "hidden size 5376 instead of 1536" in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma-4-e2x", "is no known model: there are gemma-4-e2b"),
        ("nothing", "is no known model: there are gemma-4-12b"),
        ("owner/gated", "owner/gated is gated: accept the licence at"),
        ("owner/nothing", "there is no repository https://huggingface.co/owner/nothing"),
        ("owner/torn", "owner/torn cannot be downloaded"),
        ("a/b/c", "is no known model"),
        (str(ROOT), "is on this disk already"),
    ],
)
def test_pull_refuses(name: str, message: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull_main([name]) == 1
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""
    assert not cache.exists()


def test_pull_pickles(served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    (served.repositories["owner/copy"] / "model.safetensors").unlink()
    assert pull_main(["owner/copy"]) == 1
    assert "holds pytorch_model.bin but no model*.safetensors" in capsys.readouterr().err


def test_pull_offline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert pull_main([E2B]) == 1
    err = capsys.readouterr().err
    assert f"{E2B} cannot be downloaded" in err and "check the network" in err and err.count("\n") == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull_main([E2B]) == 1
    assert "HF_HUB_OFFLINE forbids" in capsys.readouterr().err


def test_no_room(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_000_000_000))
    assert pull_main([E2B]) == 1
    err = capsys.readouterr().err
    assert f"{E2B} and {ASSISTANT} needs 1.0 GB on the disk of" in err and "1.0 GB are free" in err
    assert not cache.exists()


def test_disk_that_fills_up(served: Hub, cache: Path) -> None:
    download = hub.plan(E2B)
    large = next(file for file in download.files if file.is_hashed)
    download.partial(large).parent.mkdir(parents=True)
    download.partial(large).symlink_to("/dev/full")
    with pytest.raises(hub.NoSpace, match=f"cannot be written to .*{os.strerror(errno.ENOSPC)}.*is kept"):
        hub.fetch(download, lambda here, total: None)


# --- interrupted


def test_connection_that_breaks(served: Hub) -> None:
    served.cut_after, served.cuts = 50_000, 2
    seen: list[tuple[int, int]] = []
    folder = hub.find(E2B, progress=lambda here, total: seen.append((here, total)))
    assert check_weights(folder) > 200_000
    parts = [path.rpartition(" ")[2] for path in served.asked if " from " in path]
    assert parts == ["50000", "100000"]
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_connection_that_stays_broken(served: Hub, cache: Path) -> None:
    served.cut_after, served.cuts = 0, 100
    with pytest.raises(NotFound, match="check the network and run it again, what has arrived is kept"):
        hub.find(E2B)
    assert sum("safetensors" in path for path in served.asked) < 10


def test_resume_after_the_end_of_a_process(served: Hub, cache: Path) -> None:
    whole = (served.repositories[E2B] / "model.safetensors").read_bytes()
    download = hub.plan(E2B)
    large = next(file for file in download.files if file.is_hashed)
    part = download.partial(large)
    part.parent.mkdir(parents=True)
    part.write_bytes(whole[:150_000])
    assert download.missing == download.total - 150_000
    hub.find(E2B)
    assert any(path.endswith(" from 150000") for path in served.asked)
    assert (part.parent / large.blob).read_bytes() == whole and not part.exists()


@pytest.mark.parametrize("start", [0, 150_000])
def test_wrong_content(served: Hub, cache: Path, start: int) -> None:
    whole = (served.repositories[E2B] / "model.safetensors").read_bytes()
    served.swapped = b"x" * len(whole)
    download = hub.plan(E2B)
    large = next(file for file in download.files if file.is_hashed)
    assert large.blob == hashlib.sha256(whole).hexdigest()
    if start:
        download.partial(large).parent.mkdir(parents=True)
        download.partial(large).write_bytes(whole[:start])
    with pytest.raises(BadCheckpoint, match=f"instead of {large.blob} and was deleted"):
        hub.find(E2B)
    assert not download.partial(large).exists() and hub.cached(E2B) is None
    served.swapped = None
    hub.find(E2B)


def test_hash_that_is_a_path(served: Hub, cache: Path, tmp_path: Path) -> None:
    served.sha256 = "../../../../outside"
    assert not any(file.is_hashed for file in hub.plan(E2B).files)
    assert check_weights(hub.find(E2B)) > 200_000
    assert not list(tmp_path.glob("outside*"))


def test_two_at_once(served: Hub, cache: Path) -> None:
    import fcntl

    download = hub.plan(E2B)
    large = next(file for file in download.files if file.is_hashed)
    download.partial(large).parent.mkdir(parents=True)
    with download.partial(large).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(NotFound, match="is being downloaded by another process"):
            hub.find(E2B)
    hub.find(E2B)


def test_ctrl_c(
    served: Hub,
    cache: Path,
    start: Callable[..., subprocess.Popen[bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    served.breaks.clear()
    served.cut_after, served.cuts = 60_000, 1
    process = start("pull", "gemma-4-e2b")
    until = time.monotonic() + 30
    while 60_000 not in sizes_of_incomplete(cache):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    before = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - before < 2  # although the connection stands still
    assert process.returncode == 130 and out == b""
    assert b"`mlx-spec pull gemma-4-e2b` goes on from there" in err and b"Traceback" not in err
    found = listed(capsys)[E2B]
    assert "incomplete: `mlx-spec pull" in found["problem"] and 60_000 < found["size"] < 100_000
    served.breaks.set()
    assert pull_main(["gemma-4-e2b"]) == 0
    assert "0.1 MB are here" in capsys.readouterr().err
    assert any(path.endswith(" from 60000") for path in served.asked)


# --- models


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull_main(["gemma-4-e2b"]) == 0 and pull_main(["owner/other"]) == 0
    pair(tmp_path / "data" / "mlx_spec" / "models" / "mine")
    pair(tmp_path / "elsewhere" / "yours")
    capsys.readouterr()
    found = listed(capsys, str(tmp_path / "elsewhere"))
    assert [entry["origin"] for entry in found.values()] == [
        "bundled",
        "converted",
        "converted",
        *["cached"] * 3,
    ]
    assert found[E2B]["partners"] == [ASSISTANT] and found[ASSISTANT]["partners"] == [E2B]
    assert found["owner/other"]["partners"] == []
    assert all(entry["problem"] is None for entry in found.values())
    assert 200_000 < found[E2B]["size"] < 210_000
    assert models_main([str(tmp_path / "elsewhere")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[0].startswith("demo ")
    line = next(line for line in lines if line.startswith(E2B))
    assert "cached     0.2 MB" in line and line.endswith(f"gemma4 100.0 k, bfloat16 · goes with {ASSISTANT}")
    assert sum("self-test: passed" in line for line in lines) == 2
    assert models_main([str(tmp_path / "nowhere")]) == 1


def test_list_of_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(listed(capsys)) == ["demo"] and not cache.exists()
    cache.parent.mkdir()
    cache.write_text("a file where a folder belongs")
    assert list(listed(capsys)) == ["demo"]


def test_odd_cache(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (E2B, ASSISTANT, "owner/other", "owner/copy"):
        hub.find(name, progress=lambda here, total: None)
    # not ours
    (cache / "models--a--file").write_text("x")
    (cache / "version.txt").write_text("1")
    for name in (
        "datasets--a--b",
        "models--legacy",
        "models--a--empty",
        "models--a--b--c",
        "models--o--",
        "x",
    ):
        (cache / name).mkdir()
    for name, content in {
        "bert": {"model_type": "bert"},
        "none": {},
        "path": {"model_type": "../llama"},
    }.items():
        place = cache / f"models--a--{name}" / "snapshots" / "1"
        sparse.checkpoint(place, content, {"a.weight": ("F16", (2, 2))})
    only_pickles = cache / "models--a--pickles" / "snapshots" / "1"
    sparse.checkpoint(only_pickles, sparse.QWEN3, {})
    (only_pickles / "model.safetensors").rename(only_pickles / "pytorch_model.bin")
    # broken
    missing = cache / "models--a--linked" / "snapshots" / "1"
    sparse.checkpoint(missing, sparse.QWEN3, {})
    (missing / "model.safetensors").unlink()
    (missing / "model.safetensors").symlink_to("nowhere")
    (missing.parent.parent / "refs").mkdir()
    (missing.parent.parent / "refs" / "main").write_text("1")
    next(repository(cache, ASSISTANT).glob("snapshots/*/model.safetensors")).resolve().unlink()
    (repository(cache, "owner/other") / "refs" / "main").write_text("f" * 40)
    config = next(repository(cache, "owner/copy").glob("snapshots/*/config.json"))
    config.unlink()
    config.write_text("{")
    shards = cache / "models--a--shards" / "snapshots" / "1"
    sparse.checkpoint(shards, sparse.QWEN3, {"a.weight": ("F16", (2, 2))})
    (shards / "model.safetensors").rename(shards / "model-00001-of-00002.safetensors")
    (cache / "models--a--shards" / "refs").mkdir()
    (cache / "models--a--shards" / "refs" / "main").write_text("1")
    loop = cache / "models--a--loop"
    loop.symlink_to(loop)
    found = listed(capsys)
    assert set(found) == {"demo", E2B, ASSISTANT, "owner/other", "owner/copy", "a/shards", "a/linked"}
    assert found[E2B]["problem"] is None
    for name in (ASSISTANT, "owner/other", "a/shards", "a/linked"):
        assert found[name]["problem"] == f"incomplete: `mlx-spec pull {name}` fetches the rest"
    assert "config.json is not valid JSON" in found["owner/copy"]["problem"]
    assert models_main([]) == 0


def test_broken_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data" / "mlx_spec" / "models"
    (pair(folder / "a") / "pair.json").write_text("no")
    shutil.rmtree(pair(folder / "b") / "drafter")
    pair(folder / ".c.partial-17")
    pair(folder / "d" / "too deep")
    found = listed(capsys)
    assert set(found) == {"demo", str(folder / "a"), str(folder / "b")}
    assert "is not valid JSON" in found[str(folder / "a")]["problem"]
    assert "no config.json" in found[str(folder / "b")]["problem"]


def test_what_mlx_lm_calls_otherwise() -> None:
    assert set(MODEL_REMAPPING) == cached.RENAMED


# --- rm


def test_remove_a_repository(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of the repository has the same commit: it must stay."""
    hub.find(E2B, progress=lambda here, total: None)
    hub.find("owner/copy", progress=lambda here, total: None)
    assert rm_main([E2B]) == 1
    assert "add --yes" in capsys.readouterr().err and hub.cached(E2B)
    assert rm_main(["gemma-4-e2b", "--yes"]) == 0
    err = capsys.readouterr().err
    assert "0.2 MB are free again" in err and f"`mlx-spec rm {ASSISTANT}` removes that" in err
    assert not repository(cache, E2B).exists() and hub.cached("owner/copy")
    assert rm_main([E2B, "--yes"]) == 1
    assert f"{E2B} is not in the cache" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["snapshots", "refs/main", "snapshots/*/config.json"])
def test_remove_what_the_hub_cannot_read(cache: Path, damage: str) -> None:
    hub.find(E2B, progress=lambda here, total: None)
    place = next(repository(cache, E2B).glob(damage))
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.resolve().unlink()
    assert rm_main([E2B, "--yes"]) == 0
    assert not repository(cache, E2B).exists()


def test_remove_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data" / "mlx_spec" / "models"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (pair(folder / "mine") / ".DS_Store").touch()
    (folder / "mine" / "target" / "link").symlink_to(outside)
    shutil.rmtree(pair(folder / "half") / "drafter")
    assert rm_main(["mine", "--yes"]) == 0 and rm_main([str(folder / "half"), "--yes"]) == 0
    assert list(folder.iterdir()) == [] and (outside / "kept").exists()
    assert rm_main(["mine", "--yes"]) == 1
    assert "there is no mine to remove" in capsys.readouterr().err


def test_remove_refuses(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(name: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert rm_main([str(name), "--yes"]) == 1
        out, err = capsys.readouterr()
        assert sorted(tmp_path.rglob("*")) == before and out == "" and err.count("\n") == 1
        return err

    mine = pair(tmp_path / "mine")
    assert "uninstall the package" in refused("demo")
    assert "uninstall the package" in refused(ROOT / "mlx_spec" / "demo")
    assert "uninstall the package" in refused(ROOT / "mlx_spec" / "demo" / "target")
    assert "holds no pair.json" in refused(mine / "target")
    assert "holds no pair.json" in refused(tmp_path)
    assert "holds no pair.json" in refused(mine / "pair.json")
    (tmp_path / "link").symlink_to(mine)
    assert "is a link, which is not followed" in refused(tmp_path / "link")
    (mine / "notes.txt").touch()
    assert "notes.txt beside a converted pair" in refused(mine)
    (mine / "notes.txt").unlink()
    (mine / "drafter").rename(tmp_path / "real")
    (mine / "drafter").symlink_to(tmp_path / "real")
    assert "drafter beside a converted pair" in refused(mine)
    for target in (".", "..", "../real", str(tmp_path / "real"), "target/../../real", ""):
        (mine / "pair.json").write_text(json.dumps({"target": target}))
        assert "beside a converted pair" in refused(mine)
    (mine / "pair.json").write_text("{}")
    assert "beside a converted pair" in refused(mine)
    repository(cache, "owner/linked").parent.mkdir(parents=True)
    repository(cache, "owner/linked").symlink_to(tmp_path / "real")
    assert "is a link, which is not followed" in refused("owner/linked")
    for name in ("owner/..", "../mine/none", "owner/nothing", "a/b/c", "/none", ".../x"):
        assert name in refused(name)


@pytest.mark.parametrize(
    ("answer", "removed"), [(b"n\n", False), (b"\n", False), (b"\x04", False), (b"y\n", True)]
)
def test_remove_asks(
    cache: Path, start: Callable[..., subprocess.Popen[bytes]], answer: bytes, removed: bool
) -> None:
    hub.find(ASSISTANT, progress=lambda here, total: None)
    ours, theirs = pty.openpty()
    process = start("rm", ASSISTANT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(ours, 1000)
    os.write(ours, answer)
    assert process.wait(timeout=30) == (0 if removed else 1)
    os.close(ours)
    assert repository(cache, ASSISTANT).exists() != removed


def test_removal_says_what_it_frees(cache: Path) -> None:
    hub.find(E2B, progress=lambda here, total: None)
    (repository(cache, E2B) / "blobs" / "x.incomplete").write_bytes(bytes(1000))
    removal = plan_removal(E2B)
    blobs = sum(file.stat().st_size for file in (repository(cache, E2B) / "blobs").iterdir())
    assert blobs <= removal.size < blobs + 2000


# --- the catalogue


def test_aliases() -> None:
    found = catalogue.aliases()
    assert found["gemma-4-e2b"] == catalogue.Ready(E2B, ASSISTANT)
    assert catalogue.resolve("Gemma-4-31B-it:8bit").target == "mlx-community/gemma-4-31b-it-8bit"
    assert catalogue.resolve("gemma-4-12b-bf16").target == "google/gemma-4-12B-it"
    for ready in found.values():
        assert ready.target.count("/") == 1 and ready.drafter is not None
        own = known.drafter_of(ready.target)
        assert own is None or own == ready.drafter
        assert ("gemma" in ready.target) == (own is not None)
    assert set(catalogue.SHAPES) == set(known.DRAFTERS)
    assert catalogue.drafter_for("mlx-community/qwen3-14b-4bit") == "mlx-community/Qwen3-0.6B-4bit"
