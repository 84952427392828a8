"""The options of `mlx-spec serve`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlx_spec.apps.server import main
from mlx_spec.apps.server.settings import GB, Limits, ServedModel, Settings, parse


def test_defaults():
    assert parse([]) == Settings((ServedModel("demo", "demo"),))


def test_options():
    words = "--target a/b --drafter lookup --model c=d,e --model f=g --alias h=c --pin c --port 0"
    words += " --num-draft-tokens 3 --kv-bits 8 --api-key k --host 0.0.0.0 --allow-host me --memory 1.5"
    words += " --cors-origin http://localhost:3000 --idle 60 --max-waiting 5 --parallel 2 --conversations 1"
    found = parse(words.split())
    assert found.models == (
        ServedModel("b", "a/b", "lookup", 3, 8),
        ServedModel("c", "d", "e", 3, 8, pinned=True),
        ServedModel("f", "g", None, 3, 8),
    )
    assert found.aliases == (("h", "c"),) and found.limits == replace(Limits(), waiting=5, running=2)
    assert (found.host, found.port, found.api_key, found.hosts) == ("0.0.0.0", 0, "k", ("me",))
    assert (found.memory_bytes, found.idle_seconds) == (round(1.5 * GB), 60)
    assert parse(["--model", "c=d"]).models == (ServedModel("demo", "demo"), ServedModel("c", "d"))
    assert parse(["--model", "demo=d"]).models == (ServedModel("demo", "d"),)
    assert parse(["--allow-extra-parameters"]).allow_extra_parameters
    assert parse(["--draft-rank", "1"]).draft_rank == 1
    assert parse(["--target", "t", "--ahead"]).models == (ServedModel("t", "t", ahead=True),)
    found = parse(["--cache-folder", "~/c", "--cache-folder-gb", "0.5"])
    assert (found.cache_folder, found.cache_folder_bytes) == (Path.home() / "c", GB // 2)


def test_a_model_that_is_not_there_is_named_before_any_address(capsys):
    assert main(["--port", "0", "--model", "a=/nonexist"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("mlx-spec: there is no folder /nonexist")


def test_key_from_a_file(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    assert parse(["--api-key-file", str(tmp_path / "key")]).api_key == "secret"
