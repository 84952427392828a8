"""Checkpoints are recognized from config.json and headers alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub import constants
from support import sparse
from support.checkpoints import exchanged
from support.commands import run
from support.drafting import GOLDEN
from support.hub_stand_in import COMMIT, ROOT
from support.waiting import LIMIT

import mlx_spec
from mlx_spec.apps import models
from mlx_spec.checkpoint.weights import is_dequantized
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair, inspect

WEIGHT = {"model.embed_tokens.weight": ("BF16", (64, 32))}


def one(folder: Path) -> CheckpointInfo:
    """The description of a folder, which must also make lines and JSON."""
    found = inspect(str(folder))
    assert isinstance(found, CheckpointInfo)
    assert json.loads(json.dumps(models.as_json(found)))["name"] == str(folder)
    assert all("\n" not in line for line in models.description(found))
    return found


# --- sizes and numbers


def test_the_memory_of_a_gguf_file(tmp_path, monkeypatch):
    """On a CPU its weights become float32. Models are listed without MLX, too."""
    folder = sparse.checkpoint(tmp_path / "target", {"model_type": "llama", "gguf": "a.gguf"}, WEIGHT)
    size = 4 if mx.default_device().type == mx.cpu else 2
    assert one(folder).memory.weights == size * 64 * 32
    config = {
        "model_type": "llama",
        "gguf": "a.gguf",
        "gguf_weights": 10**15,
        "gguf_read": 9,
        "dtype": "bfloat16",
    }
    large = one(sparse.checkpoint(tmp_path / "large", config, WEIGHT))  # too large to be dense
    assert (large.memory.weights, large.read, large.gguf_read) == (size * 64 * 32, size * 64 * 32, 9)
    assert not is_dequantized(config)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    assert one(folder).memory.weights == 2 * 64 * 32


def test_layers_beyond_all_bounds_take_no_memory(tmp_path):
    sizes = {"num_hidden_layers": 2**63, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32}
    found = one(sparse.checkpoint(tmp_path, {"model_type": "llama", **sizes}, WEIGHT))
    assert found.layers == 2**63


def test_target(tmp_path):
    table = {"language_model.model.embed_tokens.weight": ("BF16", (262144, 1536))}
    folder = sparse.checkpoint(tmp_path / "target", sparse.gemma4("E2B"), table)
    (folder / "chat_template.jinja").touch()
    found = one(folder)
    assert (found.family, found.kind, found.precision) == ("gemma4", None, "bfloat16")
    assert found.parameters == 262144 * 1536
    assert found.size == (folder / "model.safetensors").stat().st_size > 800e6
    assert (found.layers, found.hidden_size, found.heads, found.kv_heads) == (35, 1536, 8, 1)
    assert (found.vocab_size, found.window, found.context) == (262144, 512, 131072)
    assert (found.head_dim, found.global_head_dim, found.global_kv_heads) == (256, 512, 1)
    assert (found.has_tokenizer, found.has_template, found.problem) == (True, True, None)
    assert found.goes_with == ("google/gemma-4-E2B-it-assistant",)
    assert found.speculative_heads == "none"


def test_the_context_of_gpt_2_has_another_name(tmp_path):
    config = {"model_type": "gpt2", "n_positions": 1024}
    assert one(sparse.checkpoint(tmp_path / "target", config, FLOATS)).context == 1024


MLX_4 = {"l.weight": ("U32", (64, 8)), "l.scales": ("BF16", (64, 1)), "l.biases": ("BF16", (64, 1))}
HEAD_8 = {"h.weight": ("U32", (10, 16)), "h.scales": ("F16", (10, 2)), "h.biases": ("F16", (10, 2))}
FP8 = {"l.weight": ("F8_E4M3", (128, 64)), "l.weight_scale_inv": ("F32", (1, 1))}
NVFP4 = {
    "l.weight": ("U8", (64, 32)),
    "l.weight_scale": ("F8_E4M3", (64, 4)),
    "l.weight_scale_2": ("F32", ()),
}
FLOATS = {"l.weight": ("F32", (4, 4)), "l.bias": ("F32", (4,))}
IN_4 = {"bits": 4, "group_size": 64}


def theirs(method: str, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **settings}}


@pytest.mark.parametrize(
    ("settings", "tensors", "precision", "parameters"),
    [
        ({}, FLOATS, "float32", 20),
        ({}, {"next.weight": ("I32", (8,))}, "int32", 0),
        ({"quantization": IN_4}, MLX_4, "4-bit MLX, groups of 64", 64 * 64),
        (
            {"quantization": {**IN_4, "h": {"bits": 8, "group_size": 32}}},
            MLX_4 | HEAD_8,
            "4-bit MLX, groups of 64, some layers 8-bit",
            64 * 64 + 10 * 64,
        ),
        (theirs("fp8", weight_block_size=[128, 128]), FP8, "FP8", 128 * 64),
        (theirs("modelopt", quant_algo="NVFP4"), NVFP4, "ModelOpt NVFP4", 4096),
        ({"quantization": "odd", "quantization_config": 3}, {"l.weight": ("F16", (2, 2))}, "float16", 4),
    ],
)
def test_precision(tmp_path, settings, tensors, precision, parameters):
    found = one(sparse.checkpoint(tmp_path / "x", {"model_type": "llama"} | settings, tensors))
    assert (found.precision, found.parameters) == (precision, parameters)


# --- drafters


@pytest.mark.parametrize("size", sparse.GEMMA4)
def test_assistant_fits_its_target_alone(tmp_path, size):
    folder = sparse.checkpoint(tmp_path / "assistant", sparse.gemma4_assistant(size), WEIGHT)
    found = one(folder)
    assert found.kind == "Gemma 4 assistant"
    assert found.goes_with == (f"google/gemma-4-{size}-it",)
    for other in sparse.GEMMA4:
        target = sparse.checkpoint(tmp_path / other, sparse.gemma4(other), WEIGHT)
        (tmp_path / "pair.json").write_text(json.dumps({"target": other, "drafter": "assistant"}))
        pair = inspect(str(tmp_path))
        assert isinstance(pair, ConvertedPair) and pair.target is not None
        assert (pair.problem is None) == (other == size), (target, pair.problem)


HEADS = {"0.0.linear.weight": ("F16", (64, 64)), "0.1.weight": ("F16", (320, 64))}
EAGLE = {"fc.weight": ("BF16", (64, 192)), "d2t": ("I64", (32,)), "t2d": ("BOOL", (320,))}
DFLASH = {"fc.weight": ("BF16", (64, 320)), "hidden_norm.weight": ("BF16", (64,))}
MTP = {"mtp.fc.weight": ("BF16", (64, 128)), "mtp.norm.weight": ("BF16", (64,))}
MASK = {"mask_hidden": ("BF16", (1, 1, 192))}
CONVERTED = {"target": {"hidden_size": 96, "vocab_size": 99, "num_hidden_layers": 7, "rope": {}}}
LAYER = {"model_type": "llama", "hidden_size": 64, "vocab_size": 320, "num_hidden_layers": 1}
VERIFIER = {"speculators_config": {"verifier": {"name_or_path": "owner/target"}}}
SPECULATOR = {"model_type": "mlp_speculator", "emb_dim": "64.64", "vocab_size": 320}
FLASH = {"dflash_config": {"mask_token_id": 1}, "num_target_layers": 36}


@pytest.mark.parametrize(
    ("config", "tensors", "kind", "needs"),
    [
        (LAYER | {"draft_vocab_size": 32} | VERIFIER, EAGLE, "EAGLE-3", (64, 320, None)),
        (LAYER, EAGLE, "EAGLE-3", (64, 320, None)),
        (LAYER, EAGLE | MASK, "P-EAGLE", (64, 320, None)),
        (LAYER | FLASH, DFLASH, "DFlash", (64, 320, 36)),
        (LAYER | FLASH | {"architectures": ["DFlash2DraftModel"]}, DFLASH, "DFlash2", (64, 320, 36)),
        (LAYER | FLASH | {"markov_rank": 8}, DFLASH, "DSpark", (64, 320, 36)),
        (LAYER | {"architectures": ["Gemma4DSparkModel"]}, DFLASH, "Gemma 4 DSpark", (64, 320, None)),
        (SPECULATOR, WEIGHT, "MLP speculator", (64, 320, None)),
        (LAYER | {"pard_token": 319}, WEIGHT, "PARD", (None, None, None)),
        ({"model_type": "llama", "medusa_num_heads": 2}, HEADS, "Medusa", (64, None, None)),
        (LAYER | {"model_type": "qwen3_5_mtp"}, WEIGHT, "MTP head", (64, 320, None)),
        (LAYER, MTP, "MTP head", (64, 320, None)),
        ({"model_type": "dflash", "layer_config": LAYER} | CONVERTED, WEIGHT, "DFlash", (96, 99, 7)),
        ({"speculators_model_type": "eagle3", "model_type": "x"}, WEIGHT, "EAGLE-3", (None, 64, None)),
        (LAYER, WEIGHT, None, None),
    ],
)
def test_kinds(tmp_path, config, tensors, kind, needs):
    found = one(sparse.checkpoint(tmp_path / "drafter", config, tensors))
    assert found.kind == kind and ("owner/target" in found.goes_with) == ("speculators_config" in config)
    shape = found.needs
    assert (shape and (shape.hidden_size, shape.vocab_size, shape.layers)) == needs


@pytest.mark.parametrize(
    ("config", "tensor", "state"),
    [
        ({"num_nextn_predict_layers": 1}, "model.layers.36.eh_proj.weight", "present"),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, "mtp.fc.weight", "present"),
        ({"num_nextn_predict_layers": 1}, "model.layers.36.mlp.up_proj.weight", "stripped"),
        ({}, "model.norm.weight", "none"),
        ({}, "medusa_head.0.0.linear.weight", "present"),
    ],
)
def test_own_heads(tmp_path, config, tensor, state):
    tensors = WEIGHT | {tensor: ("BF16", (2, 2))}
    found = one(sparse.checkpoint(tmp_path / "target", sparse.QWEN3 | config, tensors))
    assert (found.kind, found.speculative_heads) == (None, state)
    assert any(state in line for line in models.description(found) if "own draft heads" in line)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no: it is a text model: its config.json names no vision tower"),
        ({"model_type": "qwen3_vl"}, "no: the vision tower of qwen3_vl is not read here; those of gemma3, "),
        (
            {"model_type": "qwen3_5"},
            "no: its config.json names a vision tower, but the checkpoint holds none",
        ),
        ({"model_type": "gemma3"}, "no: its config.json names a vision tower, but the checkpoint holds none"),
        ({"model_type": "gemma4"}, "yes, by a vision tower of "),
    ],
)
def test_pictures(tmp_path, config, words):
    tensors = (
        WEIGHT | {"model.vision_tower.encoder.weight": ("BF16", (99, 999))} if "yes" in words else WEIGHT
    )
    given = sparse.QWEN3 | config | ({"vision_config": {"hidden_size": 8}} if config else {})
    lines = models.description(one(sparse.checkpoint(tmp_path / "target", given, tensors)))
    assert any(words in line for line in lines if line.split()[0] == "pictures")


# --- what is damaged


def _write(name, text):
    return lambda folder: (folder / name).write_text(text)


def _edit(change):
    def damage(folder):
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return damage


def _link(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nowhere")


INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_edit(lambda whole: whole[:-1]), "bytes, its header promises"),
        (_edit(lambda whole: whole + b"x"), "bytes, its header promises"),
        (_edit(lambda whole: POINTER), "is a Git LFS pointer"),
        (_edit(lambda whole: b"\xff" * 50), "is not a safetensors file"),
        (_edit(lambda whole: b"\x10" + bytes(7) + b"no json at all.."), "damaged header"),
        (_edit(lambda whole: whole.replace(b"[64, 32]", b"[64, 33]")), "size than their shape: model.emb"),
        (_link, "target lacks model.safetensors: download"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
        (_write(INDEX, '{"weight_map": {"a.weight": "model.safetensors"}}'), "lists a.weight, which no file"),
        (_write(INDEX, '{"weight_map": 1}'), "has no weight_map"),
    ],
)
def test_what_is_damaged_is_named(damage, message, tmp_path):
    folder = sparse.checkpoint(tmp_path / "target", sparse.QWEN3, WEIGHT)
    damage(folder)
    assert message in (one(folder).problem or "")
    assert run("inspect", str(folder)) == 1


def test_files_that_an_index_names_elsewhere_are_not_read(tmp_path):
    folder = sparse.checkpoint(tmp_path / "target", sparse.QWEN3, WEIGHT)
    _write(INDEX, json.dumps({"weight_map": {"a.weight": "x" * 300}}))(folder)
    assert one(folder).problem is None  # left over from another checkpoint
    sparse.checkpoint(tmp_path / "other", sparse.QWEN3, {"b.weight": ("F32", (9, 9))})
    _write(INDEX, json.dumps({"weight_map": {"b.weight": "../other/model.safetensors"}}))(folder)
    assert one(folder).parameters == 64 * 32


def test_a_config_that_makes_no_sense(tmp_path):
    """Everything that reads it says so in one line; a load had ended in a traceback."""
    text = {"layer_types": ["full_attention"], "per_layer_config": [1]}
    config = {"model_type": "gemma4", "text_config": text}
    folder = sparse.checkpoint(tmp_path / "target", config, WEIGHT)
    for read in (inspect, mlx_spec.load):
        with pytest.raises(BadCheckpoint, match=r"config\.json is malformed"):
            read(str(folder))
    folder = sparse.checkpoint(tmp_path / "other", sparse.QWEN3 | {"architectures": 3}, WEIGHT)
    assert one(folder).problem is None
    folder = sparse.checkpoint(tmp_path / "nameless", {"hidden_size": 32}, WEIGHT)
    for read in (inspect, mlx_spec.load):
        with pytest.raises(BadCheckpoint, match=r"config\.json.* has no model_type"):
            read(str(folder))


# --- converted pairs


def test_pair(tmp_path, capsys):
    sparse.checkpoint(tmp_path / "target", sparse.gemma4("E4B"), WEIGHT)
    sparse.checkpoint(tmp_path / "drafter", sparse.gemma4_assistant("E4B"), WEIGHT)
    test = {"result": "passed", "acceptance": 0.61234, "prompts": ["x"]}
    manifest = {"target": "target", "drafter": "drafter", "self_test": test, "format": 9}
    (tmp_path / "pair.json").write_text(json.dumps(manifest))
    assert run("inspect", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "self-test          passed, acceptance 0.612" in out and "Gemma 4 assistant" in out
    assert run("inspect", str(tmp_path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["self_test"] == test and found["drafter"]["needs"]["hidden_size"] == 2560
    shutil.rmtree(tmp_path / "drafter")
    assert run("inspect", str(tmp_path)) == 1
    assert "no config.json" in capsys.readouterr().out
    (tmp_path / "pair.json").write_text(json.dumps({"target": "target", "drafter": None, "self_test": 3}))
    assert run("inspect", str(tmp_path)) == 0
    (tmp_path / "pair.json").write_text(json.dumps({"target": 3}))
    assert run("inspect", str(tmp_path)) == 1
    assert "target must be a path" in capsys.readouterr().out


def test_a_draft_model_of_other_tokens(tmp_path):
    other = Path(shutil.copytree(GOLDEN / "31b-trained" / "target", tmp_path / "other"))
    for differs in (False, True):
        if differs:
            exchanged(other, 300, 301)
        manifest = {"target": str(GOLDEN / "12b-trained" / "target"), "drafter": str(other)}
        (tmp_path / "pair.json").write_text(json.dumps(manifest))
        found = inspect(str(tmp_path))
        assert isinstance(found, ConvertedPair) and (found.problem, found.retokenized) == (None, differs)


# --- without MLX, at once, from afar


def test_no_mlx_and_no_weights():
    code = """
import sys
sys.modules["mlx"] = sys.modules["mlx_lm"] = None  # an import fails
from mlx_spec.apps.cli import main
code = main(["inspect", "demo"])
assert sys.modules["mlx"] is None and "mlx.core" not in sys.modules and "numpy" not in sys.modules
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert "gemma4_assistant" in done.stdout and "no " not in done.stderr


def test_repository_that_is_not_here(served, cache, tmp_path, monkeypatch, capsys):
    folder = sparse.checkpoint(tmp_path / "repo", sparse.gemma4("E2B"), {"a.weight": ("BF16", (4096, 4096))})
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (folder / "own.py").touch()

    served.repositories["owner/model"] = folder
    assert run("inspect", "owner/model", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 4096 * 4096 and found["size"] > 33e6
    assert (found["family"], found["has_tokenizer"], found["has_template"]) == ("gemma4", True, True)
    assert served.sent < 1e6 and not cache.exists()
    assert all(COMMIT in path for path in served.asked if "/resolve/" in path)  # a push does not mix two
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert run("inspect", "owner/model") == 1
    assert "owner/model lacks model-00002-of-00002.safetensors" in capsys.readouterr().out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run("inspect", "owner/model") == 1
    out, err = capsys.readouterr()
    assert "HF_HUB_OFFLINE forbids" in err and err.count("\n") == 1 and out == ""
