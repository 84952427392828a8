"""`mlx-spec pull` and `hub.find`: downloads, refusals, interruptions, with a small Hub on this machine."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import hf_xet
import huggingface_hub
import pytest
from filelock import FileLock
from huggingface_hub import constants
from support import sparse
from support.commands import run
from support.faults import Writer, sweep
from support.hub_stand_in import ASSISTANT, COMMIT, E2B, PUSHED, ROOT
from support.waiting import LIMIT, wait_until

from mlx_spec import hub
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.files import sha256
from mlx_spec.errors import BadCheckpoint, NotFound
from mlx_spec.hub.download import published_hash
from mlx_spec.hub.local import local_models
from mlx_spec.hub.names import repository_folder

pytestmark = pytest.mark.usefixtures("cache")


def partials(cache: Path) -> list[Path]:
    return list(cache.rglob("*.incomplete"))


def test_pull(served, cache, capsys):
    assert run("pull", "gemma-4-e2b") == 0
    out, err = capsys.readouterr()
    assert out == f"mlx-spec chat --target {E2B}\n"
    assert f"{E2B}: 0.2 MB to fetch, " in err and f"fetching {ASSISTANT}" in err and "\r" not in err
    checkpoint = hub.cached(E2B)
    assert checkpoint is not None
    assert not list(checkpoint.folder.glob("*.py")) + list(checkpoint.folder.glob("*.bin"))
    assert checkpoint.check_weights() > 200_000 and partials(cache) == []
    # it is all there: nobody is asked
    served.asked.clear()
    assert run("pull", "gemma-4-e2b:4bit") == 0
    out, err = capsys.readouterr()
    assert served.asked == [] and out == f"mlx-spec chat --target {E2B}\n" and f"{E2B} is here" in err


def test_pull_without_a_drafter(cache, capsys):
    assert run("pull", E2B, "--drafter", "none") == 0
    assert capsys.readouterr().out == f"mlx-spec chat --target {E2B} --drafter none\n"
    assert hub.cached(E2B) and not hub.cached(ASSISTANT)


@pytest.mark.parametrize("revision", ["main", "v1", COMMIT])
def test_pull_a_revision(revision, served, cache, capsys):
    for asked in (True, False):  # then it is all there
        served.asked.clear()
        assert run("pull", "owner/copy", "--drafter", ASSISTANT, "--revision", revision) == 0
        assert f"models--owner--copy/snapshots/{COMMIT} --drafter {ASSISTANT}" in capsys.readouterr().out
        assert bool(served.asked) == asked
    refs = [file.name for file in cache.glob("models--owner--copy/refs/*")]
    assert refs == [name for name in (revision,) if name != COMMIT]


def test_pull_a_drafter_of_another_target(capsys):
    assert run("pull", E2B, "--drafter", "owner/other") == 1
    out, err = capsys.readouterr()
    assert out == "" and "owner/other does not fit" in err and "hidden size 5376 instead of 1536" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "short names are demo, smollm2, gemma-4-e2b"),
        (["Demo"], "is on this disk already"),
        (["owner/gated"], "owner/gated is gated: accept the licence at"),
        (["owner/nothing"], "there is no repository https://huggingface.co/owner/nothing"),
        (["owner/torn"], "owner/torn cannot be downloaded"),
        (["owner/pickles"], "owner/pickles holds pytorch_model.bin but no model*.safetensors"),
        (["owner/copy", "--revision", "none"], "has no such revision"),
        ([str(ROOT)], "is on this disk already"),
    ],
)
def test_pull_refuses(arguments, message, served, cache, tmp_path, capsys):
    served.repositories["owner/pickles"] = tmp_path / "pickles"
    sparse.checkpoint(tmp_path / "pickles", sparse.QWEN3, {})
    (tmp_path / "pickles" / "model.safetensors").rename(tmp_path / "pickles" / "pytorch_model.bin")
    assert run("pull", *arguments) == 1
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""
    assert not cache.exists()


def test_find(served, monkeypatch, capsys):
    more = {"chat_template.jinja", "merges.txt", "tokenizer.model"}
    for name in more:
        (served.repositories[E2B] / name).write_text(name)
    folder = hub.find(E2B).folder
    names = {file.name for file in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"} | more
    out, err = capsys.readouterr()
    assert err == f"Fetching {E2B} (0.2 MB)\n" and out == ""
    # once it is there, nobody is asked
    served.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.find(E2B).folder == hub.find(str(folder)).folder == folder and served.asked == []
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotFound, match="not complete in the local cache and HF_HUB_OFFLINE"):
        hub.find(E2B)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert hub.find(E2B).folder == folder and read_checkpoint(folder).check_weights() > 200_000
    for name in ("nowhere", "owner/mo--del", "a/b/c"):
        with pytest.raises(
            NotFound, match=f"there is no folder {name}, and a repository .* is named owner/name"
        ):
            hub.find(name)


def test_a_push_between_two_requests(served, tmp_path, cache):
    """Small files came from the newest commit, weights from the one before."""
    newer = sparse.checkpoint(tmp_path / "newer", sparse.gemma4("E4B"), {"b.weight": ("BF16", (7,))})
    plan = hub.plan(E2B)
    served.pushed[E2B] = newer
    for folder in (hub.fetch(plan), hub.find(E2B).folder):
        assert folder.name == COMMIT and partials(cache) == []
        assert {file.name for file in folder.iterdir()} == set(plan.sizes)
        for file in folder.iterdir():
            assert file.read_bytes() == (served.repositories[E2B] / file.name).read_bytes()
    assert hub.fetch(hub.plan(E2B)).name == PUSHED  # another commit is another snapshot
    assert (hub.find(E2B).folder / "config.json").read_bytes() == (newer / "config.json").read_bytes()


@pytest.mark.parametrize("etag", ["../../../../evil", "a\\..\\b", "/etc/x"])
def test_an_etag_is_not_a_path(served, cache, etag):
    served.etag = etag
    with pytest.raises(BadCheckpoint, match="names an ETag"):
        hub.find(E2B)
    assert not list(cache.parent.parent.rglob("*evil*"))


def test_a_size_that_was_not_announced(served, cache, monkeypatch):
    download = hub.plan(E2B)
    sizes = {**download.sizes, "model.safetensors": 10}
    with pytest.raises(BadCheckpoint, match=r"arrived with .* bytes instead of 10 and was deleted"):
        hub.fetch(replace(download, sizes=sizes))


# --- the disk


def test_full_disk(cache, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_000_000_000))
    assert run("pull", E2B) == 1
    err = capsys.readouterr().err
    assert f"{E2B} and {ASSISTANT} needs 1.0 GB on the disk of" in err and "1.0 GB are free" in err
    with pytest.raises(hub.NoSpace, match=f"^{E2B} needs 1.0 GB on the disk of"):
        hub.find(E2B)
    assert not cache.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    hub.check_space(E2B, 0, cache)  # nothing is missing


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.ENOSPC, hub.NoSpace, "make room there and run it again, what arrived is kept"),
        (errno.EROFS, NotFound, "make it writable, or set HF_HOME to another folder"),
    ],
)
def test_disk_that_cannot_be_written(number, kind, advice, monkeypatch):
    error = OSError(number, os.strerror(number))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=error))
    with pytest.raises(kind, match=f"cannot be written to .*{os.strerror(number)}.*{advice}"):
        hub.find(E2B)


def test_the_nth_write_fails(served, tmp_path, monkeypatch):
    """Complete files are kept, so a try that failed may have written the whole snapshot."""

    def write(folder: Path) -> None:
        served.take_place(monkeypatch, folder / "hub")
        hub.find(E2B)

    def check(folder: Path, done: bool) -> None:
        found = hub.cached(E2B)
        assert found is not None or not done
        if found is not None:
            weights = (found.folder / "model.safetensors").resolve()
            assert sha256(weights) == published_hash(weights)
        assert not list(folder.glob("hub/*/refs/*.tmp"))

    (tmp_path / "sweep").mkdir()
    assert sweep(Writer(write, check, places=10, missed=3), tmp_path / "sweep", ("full",)) >= 10


# --- interruptions


def test_connection_that_stays_broken(served, cache, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    served.cut_after, served.cuts = 0, 100
    with pytest.raises(NotFound, match="check the network and run it again, what arrived is kept"):
        hub.find(E2B)
    assert sum("safetensors" in path for path in served.asked) < 20 and partials(cache) == []
    assert not list(cache.glob("*/refs/*"))  # a revision leads to a whole snapshot only


def test_a_broken_file_goes_on(served, cache, monkeypatch):
    def send_no_more(seconds: float) -> None:
        served.cut_after = 0

    monkeypatch.setattr(time, "sleep", send_no_more)  # before huggingface_hub tries again
    whole = (served.repositories[E2B] / "model.safetensors").read_bytes()
    served.cut_after, served.cuts = 60_000, 6
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what it keeps in memory at most
    with pytest.raises(NotFound, match="check the network and run it again, what arrived is kept"):
        hub.find(E2B)
    (part,) = partials(cache)
    assert part.read_bytes() == whole[:60_000]
    assert hub.plan(E2B).total - hub.plan(E2B).missing == 60_000 + sum(
        file.stat().st_size for file in cache.glob("*/blobs/*") if file != part
    )
    served.asked.clear()
    served.sent = 0
    folder = hub.find(E2B).folder
    assert (folder / "model.safetensors").read_bytes() == whole and partials(cache) == []
    assert [path.split()[-1] for path in served.asked if " from " in path] == ["60000"]
    assert len(whole) - 60_000 <= served.sent < len(whole) - 30_000  # other answers are small


@pytest.mark.parametrize("end", [0, 60_000, None])
def test_xet_goes_on(end, served, cache, tmp_path):
    weights = served.repositories[E2B] / "model.safetensors"
    storage = f"local://{tmp_path / 'xet'}"
    (tmp_path / "xet").mkdir()
    with hf_xet.XetSession().new_upload_commit(endpoint=storage) as commit:
        upload = commit.start_upload_file(str(weights))
    served.xet = storage, upload.result().xet_info.hash
    part = hub.download.partial_file(hub.plan(E2B).folder, sha256(weights))
    part.parent.mkdir(parents=True)
    part.write_bytes(weights.read_bytes()[:end])
    folder = hub.find(E2B).folder
    assert (folder / "model.safetensors").read_bytes() == weights.read_bytes() and partials(cache) == []
    assert served.sent < 30_000  # the weights came from the storage


def _damaged_part(served, place):
    hub.download.partial_file(place.parent.parent, place.name).write_bytes(bytes(1000))


def _blob_of_another_program(served, place):
    """Another program, or a commit with the same file, may have left it; its size is right."""
    place.write_bytes(bytes((served.repositories[E2B] / "model.safetensors").stat().st_size))


def _other_content(served, place):
    served.swapped = b"x" * (served.repositories[E2B] / "model.safetensors").stat().st_size


@pytest.mark.parametrize("damage", [_damaged_part, _blob_of_another_program, _other_content])
def test_content_with_another_hash_goes(damage, served, cache):
    digest = sha256(served.repositories[E2B] / "model.safetensors")
    place = hub.plan(E2B).folder / "blobs" / digest
    place.parent.mkdir(parents=True)
    damage(served, place)
    with pytest.raises(BadCheckpoint, match=f"instead of {digest} and was deleted: download it again"):
        hub.find(E2B)
    assert not list(cache.glob(f"*/blobs/{digest}*")) and hub.cached(E2B) is None
    served.swapped = None
    part = hub.download.partial_file(place.parent.parent, digest)
    part.write_bytes(bytes(1_000_000))  # longer than the file: it begins again
    assert hub.find(E2B).check_weights() > 200_000 and partials(cache) == []


def test_a_cache_without_links_has_each_file_once(served, cache, monkeypatch):
    monkeypatch.setattr(huggingface_hub.file_download, "are_symlinks_supported", lambda _: False)
    folder = hub.find(E2B).folder
    assert not (folder / "model.safetensors").is_symlink()
    assert not list(cache.glob(f"*/blobs/{sha256(served.repositories[E2B] / 'model.safetensors')}*"))


def test_ctrl_c(served, cache, tmp_path, capsys):
    served.breaks.clear()
    served.cut_after, served.cuts = 60_000, 1
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "mlx_spec", "pull", "gemma-4-e2b"],
        env=served.variables(tmp_path / "home") | {"HF_HUB_DOWNLOAD_TIMEOUT": str(10 * LIMIT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: not served.cuts or process.poll() is not None)
    assert served.cuts == 0 and process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)  # although the connection stands still
    assert process.returncode == 130 and out == b""
    assert b"`mlx-spec pull gemma-4-e2b` goes on from there" in err and b"Traceback" not in err
    assert run("models") == 0
    assert f"incomplete: `mlx-spec pull {E2B}` fetches the rest" in capsys.readouterr().out
    served.breaks.set()
    assert run("pull", "gemma-4-e2b") == 0 and partials(cache) == []


@pytest.mark.parametrize("sent", [100, 190_000])
def test_killed(served, cache, tmp_path, sent):
    """After these bytes of weights. What is there is not taken for whole, and the next download ends well."""
    served.breaks.clear()
    served.cut_after, served.cuts = sent, 1
    command = [sys.executable, "-m", "mlx_spec", "pull", "gemma-4-e2b"]
    variables = served.variables(tmp_path / "home")
    with subprocess.Popen(command, env=variables, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: not served.cuts or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL and hub.cached(E2B) is None
    assert not [model for model in local_models() if model.name == E2B and model.problem is None]
    served.breaks.set()
    assert run("pull", "gemma-4-e2b") == 0 and partials(cache) == []
    assert hub.find(E2B).check_weights() > 200_000


def test_unfinished_files_go_with_the_next_download(served, cache):
    """Of killed processes and of old commits, but not what another process is writing."""
    digest, old, running = sha256(served.repositories[E2B] / "model.safetensors"), "0" * 64, "1" * 64
    blobs, locks = repository_folder(E2B) / "blobs", cache / ".locks" / repository_folder(E2B).name
    blobs.mkdir(parents=True)
    locks.mkdir(parents=True)
    for name in (f"{digest}.0badcafe", f"{old}.part", f"{running}.part"):
        (blobs / f"{name}.incomplete").write_bytes(bytes(1000))
    with FileLock(locks / f"{running}.lock"):
        assert hub.find(E2B).check_weights() > 200_000
    assert partials(cache) == [blobs / f"{running}.part.incomplete"]


@pytest.mark.parametrize(
    ("commit", "file"),
    [
        ("../../x", "config.json"),
        ("a" * 40, "../../evil.json"),
        ("a" * 40, "/x.json"),
        ("a" * 40, "a\\b.json"),
    ],
)
def test_a_hub_cannot_name_paths_outside_its_folder(commit, file, served):
    """Such as a mirror in HF_ENDPOINT."""
    served.named = commit, file
    with pytest.raises(BadCheckpoint, match="the hub names a commit or file"):
        hub.plan(E2B)
