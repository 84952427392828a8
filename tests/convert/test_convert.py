"""`mlx-spec convert`: five variants come out as transformers computes them, what is wrong is named."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model
from support import drafting, synthetic
from support.checkpoints import edit_tensors, exchanged, read, split, stored
from support.drafting import GOLDEN
from support.fitted import largest
from support.golden_pairs import converted, refusal
from support.lossless import emitted

import mlx_spec
from mlx_spec.apps.models import description
from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.checkpoint.headers import read_headers
from mlx_spec.checkpoint.left_out import sources_of
from mlx_spec.checkpoint.owners import tower_bytes
from mlx_spec.cli.progress import StageProgress
from mlx_spec.cli.texts import PROMPTS
from mlx_spec.convert import write
from mlx_spec.convert.plan import check_hashes, open_source
from mlx_spec.errors import BadCheckpoint, InvalidValue, Mismatch, NotFound
from mlx_spec.hub.inspect import CheckpointInfo, inspect
from mlx_spec.vision.tower import read_tower, tower_tensors

VARIANTS = ("e2b", "e4b", "12b", "26b", "31b")
TOLERANCE = 1e-4


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """A golden pair that can be damaged."""

    def copy(pair: str) -> Path:
        return Path(shutil.copytree(GOLDEN / pair, tmp_path / "source"))

    return copy


# --- what comes out


@pytest.mark.parametrize("pair", VARIANTS)
def test_unquantized_is_what_transformers_computes(
    pair: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of the target all logits. The drafter keeps the weights that test_gemma4_assistant compares."""
    source, out = copied(pair), tmp_path / "out"
    if pair == "e4b":
        split(source / "target", 3)  # several files become one
    converted(source, out)
    index = json.loads((out / "target" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    model: nn.Module = load_model(out / "target")[0]  # by mlx-lm alone
    facts, expected = read(GOLDEN / pair, "golden.json"), stored(GOLDEN / pair / "golden.safetensors")
    for case in ("short", "long"):
        logits = model(mx.array([facts["cases"][case]["ids"]]))[0]
        assert largest(logits, expected[f"target.{case}.logits"]) < TOLERANCE
    published, ours = (stored(f / "model.safetensors") for f in (source / "assistant", out / "drafter"))
    assert all(mx.array_equal(array, published[name]) for name, array in ours.items())


@pytest.mark.parametrize(("variant", "choice"), [("e2b", "8"), ("26b", "mxfp4")])  # 12b: the self-test
def test_speculative_text_is_the_targets_own(variant: str, choice: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bits = "4" if choice == "mxfp4" else choice
    manifest = converted(f"{variant}-trained", out, quantization=choice, drafter_bits=bits)
    drafted, plain = mlx_spec.load(out, num_draft_tokens=3), mlx_spec.load(out, "none")
    prompt = [2, *plain.tokenizer.encode(PROMPTS[2])]
    rounds = list(drafted.generate(prompt, max_tokens=20))
    assert emitted(rounds) == emitted(plain.generate(prompt, max_tokens=20))
    assert sum(r.accepted for r in rounds) > 0
    assert all("quantization" in part for part in manifest["parts"].values())


@pytest.mark.parametrize(
    ("variant", "choice"), [("e2b", "4"), ("12b", "none"), ("gemma3", "8"), ("qwen", "none")]
)
def test_a_vision_tower_is_kept_as_it_is_stored(variant: str, choice: str, tmp_path: Path) -> None:
    source, out = GOLDEN / "vision" / variant, tmp_path / "out"
    changes = {"dtype": None, "quantization": choice, "group_size": 32, "skip_test": variant != "12b"}
    drafter = "auto" if variant == "qwen" else "none"  # a head that is left out is another matter
    manifest = drafting.converted(source, drafter, out, **changes)
    assert not manifest["parts"]["target"].get("left_out")
    load_model(out / "target")  # by mlx-lm alone
    before, after = read_checkpoint(source), read_checkpoint(out / "target")
    stored, kept = tower_tensors(before), tower_tensors(after)
    assert stored.keys() == kept.keys()
    assert all(mx.array_equal(array, kept[name]) for name, array in stored.items())
    read_tower(after)
    assert (out / "target" / "processor_config.json").is_file()
    found = inspect(str(out / "target"))
    assert isinstance(found, CheckpointInfo)
    assert found.vision == tower_bytes(before.config, before.headers.tensors) > 0
    assert any("by a vision tower of 0." in line for line in description(found))


def test_a_tower_of_another_form_is_left_out(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "vision" / "e2b", tmp_path / "source"))
    file = folder / "model-vision.safetensors"
    tower = {name: a for name, a in stored(file).items() if "q_norm" not in name}
    mx.save_safetensors(str(file), tower)
    reasons = drafting.converted(folder, "none", tmp_path / "out")["parts"]["target"]["left_out"]
    assert [("images" in reason, count) for reason, count in reasons.items()] == [(True, len(tower))]
    assert "vision_config" not in read(tmp_path / "out" / "target")


def test_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    returned = converted("e2b", out, quantization="nvfp4", drafter_bits="8")
    manifest = json.loads((out / "pair.json").read_text())
    assert manifest == json.loads(json.dumps(returned))
    assert (manifest["target"], manifest["drafter"], manifest["dtype"]) == ("target", "drafter", "float32")
    assert manifest["versions"].keys() == {"mlx", "mlx_lm", "mlx_spec"}
    assert manifest["self_test"] == {"result": "not run", "why": "--no-self-test"}
    assert manifest["parts"]["target"]["quantization"]["mode"] == "nvfp4"
    assert manifest["parts"]["drafter"]["quantization"] == {"group_size": 64, "bits": 8, "mode": "affine"}
    assert manifest["parts"]["drafter"]["family"] == "gemma4_assistant"
    for name, part in manifest["parts"].items():
        assert part["files"].keys() == {file.name for file in (out / name).iterdir()}
        for file, facts in part["files"].items():
            data = (out / name / file).read_bytes()
            assert facts == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert not list(tmp_path.glob(".*"))


def test_a_draft_model_converts_like_a_target(tmp_path: Path) -> None:
    out = tmp_path / "out"
    drafter = Path(shutil.copytree(GOLDEN / "31b-trained" / "target", tmp_path / "drafter"))
    (drafter / "additional_chat_templates").mkdir()
    (drafter / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    more = {"chat_template.jinja", "merges.txt", "tokenizer.model"}
    for name in more:
        (drafter / name).write_text(name)
    for name in ("pair.json", "pytorch_model.bin.index.json"):  # of the source, which the copy is not
        (drafter / name).write_text("{}")
    manifest = converted("12b-trained", out, drafter=str(drafter), drafter_bits="8")
    assert (out / "drafter" / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"
    copied = {file.name for file in (out / "drafter").iterdir()}
    assert more <= copied and not {"pair.json", "pytorch_model.bin.index.json"} & copied
    assert manifest["parts"]["drafter"]["family"] == "draft model"
    pair = mlx_spec.load(out, num_draft_tokens=2)
    assert (
        sum(r.accepted for r in pair.generate([2, *pair.tokenizer.encode("Once upon a")], max_tokens=12)) > 0
    )


def test_a_draft_model_of_other_tokens_stays_as_it_is(tmp_path: Path) -> None:
    other = Path(shutil.copytree(GOLDEN / "31b-trained" / "target", tmp_path / "other"))
    exchanged(other, 300, 301)
    message = refusal("12b-trained", tmp_path / "out", Mismatch, drafter=str(other))
    assert message.startswith("token 300 is ") and "such a draft model is not converted" in message
    assert message.endswith(
        f"convert the target with --drafter none, then give {other} beside it as the drafter"
    )


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_heads_inside_the_target_are_split_out(kind: str, tmp_path: Path) -> None:
    made, source, out = synthetic.native(kind), tmp_path / "source", tmp_path / "out"
    shutil.copytree(GOLDEN / "12b" / "target", source, ignore=shutil.ignore_patterns("*.safetensors"))
    mx.save_safetensors(str(source / "model.safetensors"), made.tensors)
    (source / "config.json").write_text(json.dumps(made.config))
    manifest = drafting.converted(source, "auto", out, dtype=None)
    drafter = manifest["parts"]["drafter"]
    assert drafter["family"].endswith("_mtp")
    # Copies of the target's tables are in neither; everything else is in one of both.
    counted = sum(manifest["parts"]["target"]["left_out"].values())
    assert counted == 2 and set(manifest["parts"]["target"]["left_out"]) == {"a multi-token head"}
    assert list(mlx_spec.load(out, num_draft_tokens=1).drafter_names) == [drafter["family"]]
    # in another type, all but what decides which experts a token gets, as in mlx-lm
    drafting.converted(source, "none", tmp_path / "half", dtype="bfloat16")
    written = stored(tmp_path / "half" / "target" / "model.safetensors")
    wide = {name for name, array in written.items() if array.dtype != mx.bfloat16}
    assert wide == {name for name in written if name.endswith("e_score_correction_bias")} != set()


def test_several_files_of_weights(tmp_path: Path) -> None:
    """They have the names and the index that every reader expects."""
    tensors = {"b.weight": mx.ones((2, 3)), "a.weight": mx.zeros(4), "c.weight": mx.full((1, 1), 7)}
    expected = {name: array.tolist() for name, array in tensors.items()}
    write.write_tensors(tmp_path, tensors, StageProgress(io.StringIO()), file_gb=0)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    owners = {"a.weight": names[1], "b.weight": names[0], "c.weight": names[2]}
    assert list(index["weight_map"].items()) == list(owners.items())
    assert read_headers(tmp_path).problem is None
    assert {name: array.tolist() for name, array in Checkpoint(tmp_path).tensors().items()} == expected


def test_where_tensors_went(tmp_path: Path) -> None:
    """Taken as they are, split, stacked, cast or not at all; more of them than one export of MLX can name."""
    file = tmp_path / "x.safetensors"
    mx.save_safetensors(str(file), {f"x.{i}": mx.full((2, 2), i) for i in range(1300)})
    seen = stored(file)
    gate, up = mx.split(seen["x.1"], 2)
    stacked = mx.stack([seen[f"x.{i}"] for i in range(4, 1300)])
    used = sources_of(seen, [seen["x.0"], gate, up, stacked, seen["x.2"].astype(mx.float32)])
    assert seen.keys() - used == {"x.3"}


# --- what is refused


def test_tokenizer_is_read_before_anything_is_converted(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    source, shown = copied("12b"), io.StringIO()
    (source / "target" / "tokenizer.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="is not a tokenizer"):
        converted(source, tmp_path / "out", shown=shown)
    assert shown.getvalue() == "" and not list(tmp_path.glob("*out*"))


def test_a_tensor_that_is_missing(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source, name = copied("12b"), "layers.1.mlp.up_proj.weight"
    edit_tensors(source / "target", lambda tensors: tensors.pop(f"model.language_model.{name}"))
    assert name in refusal(source, tmp_path / "out", drafter="none")


def test_tensors_that_mlx_lm_drops(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source = copied("12b")
    odd, known = "model.layers.0.surprise.input_max", "model.vision_tower.x.weight"
    edit_tensors(source / "target", lambda tensors: tensors.update({odd: mx.zeros(2), known: mx.zeros(2)}))
    manifest = converted(source, tmp_path / "out", drafter="none")
    reasons = manifest["parts"]["target"]["left_out"]
    assert sum(reasons.values()) == 2 and any("images" in reason for reason in reasons)
    # dropped by mlx-lm, and nobody knows why
    odd = "model.layers.0.self_attn.surprise_input_max_of"
    edit_tensors(source / "target", lambda tensors: tensors.update({odd: mx.zeros(2)}))
    assert odd in refusal(source, tmp_path / "other", drafter="none", skip_test=False)
    assert odd in refusal("12b", tmp_path / "other", drafter=source / "target")  # of a draft model, too


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_hash_of_a_download(role: str, tmp_path: Path) -> None:
    """In the Hugging Face cache a weight file is a link to a blob that is named by its hash."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(GOLDEN / "12b" / ("target" if role == "target" else "assistant"), snapshot)
    file = snapshot / "model.safetensors"
    data = file.read_bytes()
    blobs = tmp_path / "models--owner--name" / "blobs"
    blobs.mkdir()
    digest = hashlib.sha256(data).hexdigest()
    file.unlink()
    file.symlink_to(blobs / digest)
    (blobs / digest).write_bytes(data)
    source = open_source(str(snapshot))
    assert write.revision(source) == "0" * 40
    assert check_hashes(source, StageProgress(io.StringIO())) == {"model.safetensors": digest}
    (blobs / digest).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    text = refusal("12b", tmp_path / "out", **{role: snapshot})
    assert "does not have the sha256 it is published under" in text and f"remove {blobs / digest}" in text


def test_quantized_already(tmp_path: Path) -> None:
    converted("12b", tmp_path / "first", quantization="4", drafter_bits="4")
    again = {"target": str(tmp_path / "first" / "target"), "drafter": "none", "dtype": None}
    text = refusal("12b", tmp_path / "second", InvalidValue, **again, quantization="8")
    assert "quantized already (4-bit MLX, groups of 64)" in text
    converted("12b", tmp_path / "second", **again, quantization=None)
    weights = [(tmp_path / run / "target" / "model.safetensors").read_bytes() for run in ("first", "second")]
    assert weights[0] == weights[1]
    drafter = str(tmp_path / "first" / "drafter")
    converted("12b", tmp_path / "third", drafter=drafter)  # its values are known, so it is unpacked
    packed, plain = (mx.load(str(tmp_path / run / "drafter/model.safetensors")) for run in ("first", "third"))
    size = json.loads(Path(drafter, "config.json").read_text())["quantization"]["group_size"]
    assert "quantization" not in json.loads((tmp_path / "third/drafter/config.json").read_text())
    names = [name.removesuffix(".scales") for name in packed if name.endswith(".scales")]
    for name in names:
        parts = [packed[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
        assert mx.array_equal(mx.dequantize(*parts, size, 4), plain[f"{name}.weight"]), name
    assert names
    model = {"drafter": str(tmp_path / "first" / "target"), "drafter_bits": "4"}
    assert "use --drafter-bits none" in refusal("12b", tmp_path / "fourth", InvalidValue, **model)


def test_weights_that_are_integers(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """mlx-lm computes with 8-bit floats as with integers, if nobody says how they are scaled."""
    source, name = copied("12b"), "model.language_model.layers.1.mlp.up_proj.weight"
    edit_tensors(source / "target", lambda tensors: tensors.update({name: mx.to_fp8(tensors[name])}))
    assert "up_proj.weight holds mlx.core.uint8" in refusal(source, tmp_path / "out", drafter="none")
    with pytest.raises(BadCheckpoint, match=r"up_proj\.weight holds mlx\.core\.uint8, quantized in a way"):
        mlx_spec.load(source / "target", "none")


def test_values(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = {"target": "nowhere", "quantization": "4", "group_size": 48}  # refused before a download
    assert "32, 64 or 128" in refusal("12b", out, InvalidValue, **asked)
    assert "groups of 32" in refusal("12b", out, InvalidValue, quantization="mxfp4", group_size=64)
    assert "no drafter is known" in refusal("12b", out, InvalidValue, drafter="auto")
    assert "give --drafter none" in refusal("12b", out, InvalidValue, drafter="lookup")
    manifest = converted("12b", tmp_path / "grouped", drafter_bits="4", group_size=32)
    assert manifest["parts"]["drafter"]["quantization"]["group_size"] == 32
    assert "no folder" in refusal("12b", tmp_path / "none" / "out", NotFound)
    assert "no folder nowhere" in refusal("12b", out, NotFound, target="nowhere")
    pair = tmp_path / "grouped"
    assert f"is a converted pair: give {pair}/target" in refusal("12b", out, NotFound, target=str(pair))


def test_names_that_are_patterns(tmp_path: Path) -> None:
    """mlx-lm finds weights by a pattern, and brackets in the name of a folder were one."""
    out, source = tmp_path / "o[u]t", tmp_path / "[a] model"
    shutil.copytree(GOLDEN / "12b-trained", source)
    converted(source, out, drafter=source / "target")
    pair = mlx_spec.load(out, num_draft_tokens=2)
    assert pair.info.drafter and list(pair.generate([2, 5, 7], max_tokens=2))
