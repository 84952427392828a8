"""A target over two processes on this machine: the text of one process, and a clear end when one is lost."""

from __future__ import annotations

import json
import select
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from support import rank_program, tiny
from support.forked import start_python
from support.rank_processes import launched as launched_by
from support.waiting import LIMIT, wait_until

import mlx_spec
from mlx_spec import demo
from mlx_spec.apps.chat import main
from mlx_spec.distributed import ranks as module
from mlx_spec.distributed.shard import _check_heads, _is_dense, _pad
from mlx_spec.errors import BadCheckpoint

pytestmark = pytest.mark.skipif(
    not mx.distributed.is_available("ring"), reason="this MLX has no mx.distributed"
)

SIZES = tiny.SIZES | tiny.EPS | {"vocab_size": 2816, "tie_word_embeddings": True, "rope_theta": 1e4}

launched = partial(launched_by, start=start_python())


def checkpoint(folder: Path, kind: str, seed: int = 0, **changes: Any) -> str:
    """Write a tiny model in float32 with the tokenizer of the demo. Return its folder."""
    config = {"model_type": kind, "num_hidden_layers": 2, "max_position_embeddings": 4096} | SIZES | changes
    module = import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    tiny.randomize(model, 0.2)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(demo.TARGET) / name, folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": checkpoint(folder / "llama", "llama"),
        "tuned": checkpoint(folder / "tuned", "llama", seed=1),
        "draft": checkpoint(folder / "draft", "llama", num_hidden_layers=1),
        "qwen3": checkpoint(folder / "qwen3", "qwen3"),
        "odd heads": checkpoint(
            folder / "odd", "llama", num_attention_heads=9, num_key_value_heads=3, intermediate_size=129
        ),
    }


def program(target: str, drafter: str, *ahead: str) -> list[str]:
    return [rank_program.__file__, target, drafter, *ahead]


def is_ready(address: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{address}/health", timeout=LIMIT).status == 200)
    except urllib.error.HTTPError:  # 503 while it loads
        return False


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def error_of(process: subprocess.Popen[str]) -> str:
    """Return what a process that ends with status 1 said: one line."""
    _, text = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    lines = [line for line in text.splitlines() if line.startswith("mlx-spec: ")]
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize(
    ("target", "ahead", "lost"),
    [("llama", (), 1), ("odd heads", (), 0), ("llama", ("ahead",), 1)],
    ids=["a part of the target", "one padded", "a drafter"],
)
def test_text_is_that_of_one_process_until_a_rank_is_killed(
    tmp_path: Path, models: dict[str, str], target: str, ahead: Sequence[str], lost: int
) -> None:
    command = program(models[target], models["draft"], *ahead)
    with launched(tmp_path, command, command) as ranks:
        said = json.loads(line_of(ranks[0]))
        ranks[lost].kill()
        assert f"rank {lost} was lost: its process ended" in error_of(ranks[1 - lost])
    assert said == rank_program.generate(mlx_spec.load(models[target], "none"))


def test_another_drafter_on_rank_1_is_refused_on_both(tmp_path: Path, models: dict[str, str]) -> None:
    commands = [program(models["llama"], models[drafter], "ahead") for drafter in ("draft", "tuned")]
    with launched(tmp_path, *commands) as ranks:
        for process in ranks:
            assert "rank 1 has another config.json " in error_of(process)


def test_text_is_that_of_one_process_until_a_rank_is_stopped(tmp_path: Path, models: dict[str, str]) -> None:
    command = program(models["qwen3"], "lookup")
    with launched(tmp_path, command, command, environment={"SILENCE_S": "2"}) as ranks:
        said = json.loads(line_of(ranks[0]))
        ranks[1].send_signal(signal.SIGSTOP)
        assert "rank 1 was lost: nothing was heard of it for 2 s" in error_of(ranks[0])
        assert ranks[1].wait(LIMIT) == -signal.SIGKILL  # mlx.launch would wait for it
    assert module.SILENCE_S + module.BEAT_S < 10, "seconds in which every rank is to end"
    assert said == rank_program.generate(mlx_spec.load(models["qwen3"], "none"))


@pytest.mark.parametrize(("beats", "is_lost"), [(6, False), (7, True)])
def test_silence_is_counted_by_the_beats_of_this_process(
    monkeypatch: pytest.MonkeyPatch, beats: int, is_lost: bool
) -> None:
    """Ranks that were stopped together, as by Ctrl-Z, took each other for lost as they went on."""
    silent = [[]] * beats
    poll = SimpleNamespace(register=lambda *_: None, poll=lambda _: silent.pop() if silent else ["readable"])
    monkeypatch.setattr(module, "select", SimpleNamespace(poll=lambda: poll, POLLIN=select.POLLIN))
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"[1]\n[2]\nan unfinished one")
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(TimeoutError) if is_lost else nullcontext():
            assert list(module._lines(here)) == [b"[1]", b"[2]"]


BUSY = """
import sys, time
from mlx_spec.distributed.ranks import join
ranks = join()
def work():
    if ranks.rank == 0:
        ranks.send("a task")
        return 0
    assert ranks.receive() == ["a task"]
    time.sleep(2)  # longer than rank 0 needs to end
    return ranks.receive()[1]
sys.exit(ranks.run(work))
"""


def test_a_rank_that_is_busy_when_rank_0_ends_ends_without_an_error(tmp_path: Path) -> None:
    with launched(tmp_path, ["-c", BUSY], ["-c", BUSY]) as ranks:
        ended = [(*process.communicate(timeout=LIMIT), process.returncode) for process in ranks]
    assert ended == [("", "", 0)] * 2


def test_an_error_begins_a_line_of_its_own() -> None:
    """The ring of MLX prints its errors in pieces, and ours may come between two of them."""
    use = "from mlx_spec.distributed import ranks"
    script = f"import os; {use}; os.write(2, b'ring'); ranks._end('rank 1 was lost')"
    process = start_python()([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert error_of(process) == "mlx-spec: rank 1 was lost"


@pytest.mark.parametrize("options", [[], ["--draft-rank", "1"]])
def test_the_server_streams_and_ends_all_ranks(
    tmp_path: Path, models: dict[str, str], options: Sequence[str]
) -> None:
    command = ["-m", "mlx_spec.serve", "--target", models["llama"], "--drafter", models["draft"], *options]
    messages = [{"role": "user", "content": "Tell me more."}]
    with launched(tmp_path, *[[*command, "--num-draft-tokens", "2", "--port", "0"]] * 2) as ranks:
        address = [line_of(ranks[0]) for _ in range(3)][-1].split()[1]
        wait_until(lambda: is_ready(address.removesuffix("/v1")))
        body = {"messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            f"{address}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT) as response:
            chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
        for process in ranks:
            process.send_signal(signal.SIGINT)  # Ctrl-C reaches all processes of a terminal
        assert [process.wait(LIMIT) for process in ranks] == [0, 0]
    pair = mlx_spec.load(models["llama"], "none")
    session = pair.session()
    expected = "".join(piece.text for piece in session.stream("Tell me more.", max_tokens=12))
    parts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(parts) == expected != ""


def test_a_fine_tune_on_one_rank_is_refused_on_both(tmp_path: Path, models: dict[str, str]) -> None:
    with launched(tmp_path, program(models["llama"], "none"), program(models["tuned"], "none")) as ranks:
        for process in ranks:
            assert "rank 1 has another model.safetensors " in error_of(process)


def test_a_conversation_over_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "join", object)
    assert main(["--target", "demo"]) == 1
    assert "over several machines one --prompt is answered" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "ministral3"])
def test_heads_of_zeros_change_no_logit(kind: str, bits: int | None) -> None:
    """Three K/V heads over two ranks, and 7 groups of 64 hidden units."""
    changes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 384, "head_dim": 64}
    changes |= {"vocab_size": 64}
    config = {"model_type": kind, "num_hidden_layers": 2, "max_position_embeddings": 4096} | SIZES | changes
    config |= {"intermediate_size": 448, "layer_types": ["full_attention"] * 2}
    if kind == "ministral3":
        rope = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4096}
        config |= {"rope_parameters": rope}
    classes = import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(0)
    model = classes.Model(classes.ModelArgs.from_dict(config))
    tiny.randomize(model, 0.2)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
    assert _is_dense(model)
    tokens = mx.arange(8)[None]
    expected = model(tokens)
    for layer in model.layers:
        _pad(layer, 2)
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    assert (attention.n_heads, attention.n_kv_heads) == (8, 4)
    assert mlp.gate_proj.weight.shape[0] == (448 if bits is None else 512)
    assert mx.allclose(model(tokens), expected, rtol=1e-5, atol=1e-5)


def test_what_else_depends_on_heads_is_not_padded() -> None:
    gated, ours = tiny.full(), tiny.full()
    gated.layers[1].self_attn.gate = nn.Linear(64, 4)
    assert _is_dense(ours) and not any(map(_is_dense, (gated, tiny.recurrent_moe(), tiny.shared())))
    ours.model.gates = nn.Linear(64, 4)
    assert not _is_dense(ours)


def test_groups_of_two_heads_are_not_split() -> None:
    model = tiny.full(head_dim=16)
    nn.quantize(model, group_size=64, bits=4)
    with pytest.raises(ValueError, match="2 heads do not divide the groups of its quantized weights"):
        _pad(model.layers[0], 3)


def test_heads_of_other_models_that_do_not_divide_are_refused_by_name() -> None:
    said = "llama with num_key_value_heads 3 cannot be split over 2 ranks: use 3 ranks"
    with pytest.raises(BadCheckpoint, match=said):
        _check_heads({"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3}, 2)
