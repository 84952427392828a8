"""Names to a ready pair; whatever is wrong with them is one line that says what and what to do."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import synthetic, tiny
from support.checkpoints import edit_config, edit_tensors, exchanged, read, split, to_float32
from support.lossless import mlx_lm_greedy
from support.pairs import TOKENIZER, refused, save

import mlx_spec
from mlx_spec import demo
from mlx_spec.checkpoint.headers import HOLDS_GGUF
from mlx_spec.convert.plan import open_source
from mlx_spec.errors import BadCheckpoint, InvalidValue, Mismatch, NotFound, SpecError
from mlx_spec.hub.inspect import CheckpointInfo, inspect
from mlx_spec.hub.names import WITHOUT
from mlx_spec.load import load
from mlx_spec.types import Reason

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small target and, in "drafter", a smaller one of its kind."""
    folder = tmp_path_factory.mktemp("models")
    save(tiny.full(), folder / "target")
    save(tiny.full(1), folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden pairs in float32: without a GPU, MLX has experts in no other type."""
    folder = tmp_path_factory.mktemp("golden")
    for name in ("e2b", "12b", "26b"):
        shutil.copytree(GOLDEN / name, folder / name)
        for part in ("target", "assistant"):
            to_float32(folder / name / part)
    return folder


@pytest.fixture
def target(saved: Path, tmp_path: Path) -> Path:
    """A copy of the target to damage."""
    return Path(shutil.copytree(saved / "target", tmp_path / "target"))


# --- what loads


def test_draft_model_and_lookup(saved: Path) -> None:
    prompt = tiny.prompt(15) * 2
    plain = load(saved / "target", "none")
    expected = [t for r in plain.generate(prompt, max_tokens=20) for t in r.tokens]
    for drafter in (saved / "drafter", "lookup"):
        pair = load(saved / "target", drafter, num_draft_tokens=4)
        rounds = list(pair.generate(prompt, max_tokens=20))
        assert [t for r in rounds for t in r.tokens] == expected
        assert {r.reason for r in rounds} == {Reason.FIXED} and sum(r.drafted for r in rounds) > 0
        assert pair.info.drafter == str(drafter)
    assert (plain.info.drafter, plain.info.drafter_bytes) == (None, 0)


OTHER_NAMES = {
    "gpt2": {"n_ctx": 64, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 3,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": 8,
    },
}


@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_a_target_whose_modules_have_other_names(kind: str, tmp_path: Path) -> None:
    """It was refused. Only drafters that borrow its embedding have to know the name of that."""
    module = import_module(f"mlx_lm.models.{kind}")
    sizes = {"model_type": kind, "vocab_size": tiny.VOCAB, "layer_norm_epsilon": 1e-5, **OTHER_NAMES[kind]}
    mx.random.seed(0)
    model = module.Model(module.ModelArgs(**sizes))
    tiny.randomize(model, 0.2)
    prompt = tiny.prompt(15) * 2
    pair = load(save(model, tmp_path, max_position_embeddings=None), "lookup", num_draft_tokens=4)
    rounds = list(pair.generate(prompt, max_tokens=30))
    assert [t for r in rounds for t in r.tokens] == mlx_lm_greedy(model, prompt, 30)
    assert any(r.drafted for r in rounds)
    assert pair.info.context_length == OTHER_NAMES[kind].get("n_positions")
    with pytest.raises(Mismatch, match=f"reads the embedding of its target, which is not known for {kind}"):
        pair.parts.embed(mx.array([1]))


@pytest.mark.parametrize(
    ("drafter", "options", "reasons"),
    [
        # With lookup. Costs are measured beside other programs.
        (None, {}, {Reason.LEARNING, Reason.COST, Reason.ACCEPTANCE}),
        (None, {"num_draft_tokens": 4}, {Reason.FIXED}),
        ("none", {}, {Reason.DISABLED}),
        ("lookup", {"num_draft_tokens": 0}, {Reason.DISABLED}),
    ],
)
def test_reason_is_visible(saved: Path, drafter: str | None, options: dict, reasons: set[Reason]) -> None:
    pair = load(saved / "target", drafter, **options)
    assert pair.info.drafter == (None if drafter == "none" else "lookup")
    assert next(iter(pair.generate([1, 2, 3], max_tokens=5))).reason in reasons


def test_shards(target: Path) -> None:
    split(target, 2)
    assert len(list(load(target, "none").generate([1, 2], max_tokens=3))) == 3
    (target / "model-00002-of-00002.safetensors").unlink()
    message = refused(BadCheckpoint, target)
    assert "lacks model-00002-of-00002.safetensors: download or convert it again" in message


@pytest.mark.parametrize("inside", [False, True])
def test_manifest(saved: Path, tmp_path: Path, inside: bool) -> None:
    shutil.copytree(saved, tmp_path / "pair")
    place = tmp_path / "pair" / ("target" if inside else "")
    manifest = {"drafter": "../drafter"} if inside else {"target": "target", "drafter": "drafter"}
    (place / "pair.json").write_text(json.dumps(manifest))
    pair = load(place)
    assert pair.info.target == str(place) and Path(pair.info.drafter or "").name == "drafter"
    assert load(place, "none").info.drafter is None
    (place / "pair.json").write_text('{"drafter": 3}')
    assert "target and drafter must be paths" in refused(BadCheckpoint, place)


def test_each_file_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what MLX, mlx-lm and the tokenizers library open themselves."""
    opened, original = Counter[str](), io.open

    def counted(file: Any, *arguments: Any, **options: Any) -> Any:
        opened[str(file)] += 1
        return original(file, *arguments, **options)

    monkeypatch.setattr(io, "open", counted)
    load("demo")
    read = {name: count for name, count in opened.items() if str(demo.TARGET.parent) in name}
    assert len(read) == 7 and set(read.values()) == {1}


def test_import_is_light() -> None:
    """Text needs no Pillow: transformers imports it where it is, our programs do without it."""
    code = """
import sys, mlx_spec
sys.modules["PIL"] = None
heavy = {"mlx", "mlx_lm", "transformers", "huggingface_hub"}
assert not heavy & {name.split(".")[0] for name in sys.modules}
import mlx_spec.load, mlx_spec.session
assert callable(mlx_spec.load) and mlx_spec.Session is mlx_spec.session.Session
assert set(dir(mlx_spec)) >= {"load", "__version__"} and all(hasattr(mlx_spec, n) for n in mlx_spec.__all__)
import mlx_spec.pair, mlx_spec.apps.server.app
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="'mlx_spec' has no attribute 'nothing'"):
        _ = mlx_spec.nothing


def test_kv_bits_that_change_nothing_are_named_at_load(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tiny.smallest(), tmp_path / "one layer")
    for kv_bits in (None, 4):
        pair = load(folder, "none", num_draft_tokens=0, kv_bits=kv_bits)
        words = "one layer: kv_bits 4 changes nothing: of full attention this target has one layer with K/V"
        assert (words in capsys.readouterr().err) is (kv_bits is not None)
        assert "--kv-bits" not in pair._too_long_for_memory(9, 8)
    pair = load(saved / "target", "none", num_draft_tokens=0, kv_bits=8)
    assert "changes nothing" not in capsys.readouterr().err
    assert "--kv-bits 4" in pair._too_long_for_memory(9, 8)


# --- what does not


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 17}, "num_draft_tokens is 17, it must be 0 to 16"),
        ({"num_draft_tokens": 2.0}, "num_draft_tokens is 2.0, it must be 0 to 16"),
        ({"kv_bits": 5}, "kv_bits is 5, it must be 4 or 8"),
    ],
)
def test_values(saved: Path, options: dict, message: str) -> None:
    assert message in refused(InvalidValue, saved / "target", **options)


def test_missing_path(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path}/none" in refused(NotFound, tmp_path / "none")
    (tmp_path / "file").touch()
    assert "is a file: give the folder that holds it" in refused(NotFound, tmp_path / "file")
    for name in ("nothing", "a/b/c", "~/nothing/here", "no such/name", "a/b--c/..", "./none"):
        assert "a repository on Hugging Face is named owner/name" in refused(NotFound, name)
    assert "cannot hold a NUL" in refused(InvalidValue, "a\0b")
    assert "caf? has bytes that are not UTF-8" in refused(InvalidValue, os.fsdecode(b"caf\xe9"))
    (tmp_path / "folder").mkdir()
    assert f"no config.json in {tmp_path}" in refused(NotFound, tmp_path / "folder")


Damage = Callable[[Path], object]
NOT_NUMBERS = "the logits of this target are not numbers: its weights"
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"


def written(config: str) -> Damage:
    return lambda folder: (folder / "config.json").write_text(config, encoding="latin-1")


def renamed(name: str) -> Damage:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def edited(edit: Callable[[dict[str, mx.array]], object]) -> Damage:
    return lambda folder: edit_tensors(folder, edit)


def fails(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(rope_traditional="perhaps"))


DAMAGED: list[tuple[Damage, str]] = [
    (written('{"model_type": "llama"'), "config.json is not valid JSON"),
    (
        written('{"model_type": "llama", "model_file": "own.py"}'),
        "needs its own code (own.py), which is never",
    ),
    (written('{"model_type": "nothing_known"}'), "model_type nothing_known, which mlx-lm does not support"),
    (written('{"model_type": "new", "auto_map": {}}'), "not support, and the code it brings is never run"),
    (written('{"model_type": "llama"}'), "cannot be loaded as llama: "),
    (written('{"model_type": "olmo"}'), "cannot be loaded as olmo: "),  # importing mlx-lm's file for it exits
    (written('{"model_type": "llama", "text_config": []}'), "has a text_config that is not an object"),
    (written('{"model_type": "llama", "max_position_embeddings": -5}'), "has max_position_embeddings -5"),
    (
        written('{"model_type": "llama", "num_hidden_layers": 1000000000}'),
        "has 1000000000 layers, its weights",
    ),
    (fails, "fails in its first pass as llama: "),
    *(
        (renamed(name), f"holds {name} but no model*.safetensors, and nothing else is read")
        for name in ("pytorch_model.bin", "model.pt", "consolidated.safetensors")
    ),
    (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    (edited(lambda tensors: tensors.pop(UP)), f"as llama: it lacks {UP}: get a copy"),
    (edited(lambda tensors: tensors.update({UP: mx.zeros((2, 2))})), UP),
    (
        edited(lambda tensors: tensors.update({"extra": mx.zeros(1)})),
        "mlx-lm does not know extra: get a copy",
    ),
    # All comparisons with logits that are not numbers passed, and every token was the first one.
    (edited(lambda tensors: tensors.update({NORM: tensors[NORM] * math.nan})), NOT_NUMBERS),
    (edited(lambda tensors: tensors.update({NORM: tensors[NORM] * math.inf})), NOT_NUMBERS),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGED)
def test_a_damaged_target(target: Path, damage: Damage, words: str) -> None:
    damage(target)
    assert words in refused(BadCheckpoint, target)
    if damage is fails:
        assert words in refused(BadCheckpoint, target, "none")
        assert "as llama with kv_bits 8: " in refused(BadCheckpoint, target, kv_bits=8)


@pytest.mark.parametrize("layers", [{"num_hidden_layers": 0}, {"num_hidden_layers": 99}])
def test_layers_that_are_not_there(golden: Path, tmp_path: Path, layers: dict) -> None:
    folder = tmp_path / "target"
    shutil.copytree(golden / "e2b" / "target", folder)
    edit_config(folder, lambda config: config["text_config"].update(layers))
    assert "cannot be loaded as gemma4: " in refused(BadCheckpoint, folder)


@pytest.mark.parametrize(("place", "error"), [("folder", NotFound), ("checkpoint", BadCheckpoint)])
def test_gguf_beside_other_files(
    saved: Path, target: Path, tmp_path: Path, place: str, error: type[SpecError]
) -> None:
    """One sentence, whoever reads a folder that holds GGUF."""
    name = target if place == "checkpoint" else tmp_path / "folder"
    name.mkdir(exist_ok=True)
    (name / "model.gguf").write_bytes(b"GGUF")
    (name / "model.safetensors").unlink(missing_ok=True)
    sentence = HOLDS_GGUF.format(name)
    assert refused(error, name) == sentence
    said = refused(error, saved / "target", name)
    assert said.removeprefix("drafter: ").removesuffix(f"; {WITHOUT}") == sentence
    with pytest.raises(error, match=sentence):
        open_source(str(name))
    if place == "checkpoint":
        found = inspect(str(name))
        assert isinstance(found, CheckpointInfo) and found.problem == sentence
    else:
        with pytest.raises(NotFound, match=sentence):
            inspect(str(name))


# --- pairs that do not fit


def test_draft_model_without_a_tokenizer(saved: Path, tmp_path: Path) -> None:
    other = save(tiny.full(1, vocab_size=288), tmp_path / "drafter")
    (other / "tokenizer.json").unlink()
    message = refused(Mismatch, saved / "target", other)
    assert f"the draft model {other} knows 288 tokens, the target 256, and without its tokenizer" in message
    same = save(tiny.full(1), tmp_path / "same")
    (same / "tokenizer.json").unlink()
    assert load(saved / "target", same, num_draft_tokens=2).drafter_names == ("llama",)


def test_drafter_with_other_tokens(saved: Path, golden: Path, tmp_path: Path) -> None:
    """A language model goes by way of its text, a family that reads the target by the target's ids."""
    other = Path(shutil.copytree(saved / "drafter", tmp_path / "drafter"))
    exchanged(other)
    assert load(saved / "target", other, num_draft_tokens=2).drafter_names == ("llama, re-tokenized",)
    # written differently, but the same tokens
    same = json.loads((saved / "target" / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(same, indent=1))
    assert load(saved / "target", other, num_draft_tokens=2).drafter_names == ("llama",)
    target, assistant = (
        Path(shutil.copytree(golden / "e2b" / name, tmp_path / name)) for name in ("target", "assistant")
    )
    for folder in (target, assistant):
        TOKENIZER.save(str(folder / "tokenizer.json"))
    a, b = exchanged(assistant)
    message = refused(Mismatch, target, assistant)
    assert f"token 7 is {b!r} for the drafter" in message and f"{a!r} for the target" in message
    assert message.endswith(f"use a drafter with the target's vocabulary; {WITHOUT}")


def test_drafter_that_was_not_converted(saved: Path, tmp_path: Path) -> None:
    folder = synthetic.eagle3().write(tmp_path / "published")
    message = refused(BadCheckpoint, saved / "target", folder)
    assert message == (
        f"{folder} is a drafter of the kind EAGLE-3 as published: run `mlx-spec convert {saved / 'target'} "
        f"--drafter {folder} -o OUT` first, then give OUT as the target"
    )


def test_drafter_that_is_not_there(saved: Path) -> None:
    message = refused(NotFound, saved / "target", saved / "nothing")
    assert message.startswith("drafter: there is no folder") and message.endswith(WITHOUT)


# --- configs in other writers' words


@pytest.mark.parametrize("name", ["26b", "12b"])
def test_configs_as_transformers_saves_them(golden: Path, name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(golden / name / "target", tmp_path / "target"))
    config = read(folder)
    text = config["text_config"]
    full = [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    own = {"head_dim": text.pop("global_head_dim")}
    if (heads := text.pop("num_global_key_value_heads")) is not None:
        own["num_key_value_heads"] = heads
    text["per_layer_config"] = {str(i): own for i in full}
    if name == "12b":
        for key in ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp"):
            text.pop(key)
    config.pop("vocab_size")
    (folder / "config.json").write_text(json.dumps(config))
    pair = load(folder, golden / name / "assistant", num_draft_tokens=3)
    case = json.loads((GOLDEN / name / "golden.json").read_text())["cases"]["short"]
    assert [t for r in pair.generate(case["ids"], max_tokens=10) for t in r.tokens] == case["greedy"][:10]
    assert (pair.info.vocab_size, pair.info.context_length) == (512, 4096)
    tensors = mx.load(str(golden / name / "assistant" / "model.safetensors"))
    assert pair.info.drafter_bytes == sum(array.nbytes for array in tensors.values())


def test_costs_saved_by_a_busy_machine_are_measured_again(saved: Path) -> None:
    """They used to be kept: drafts looked too dear, so none was made that could have shown the opposite."""
    pair = saved / "target", saved / "drafter"
    policies = load(*pair).policies
    table = policies.costs.table()
    dear = {length: 200 * table.plain for length in (1, 4)}
    policies.use(dataclasses.replace(table, draft=[dear, *table.draft[1:]]))
    table = load(*pair).policies.costs.table()
    assert max(table.draft[0].values()) < 100 * table.plain
