"""Towers, prompts and refusals against what transformers computes for tiny checkpoints."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.drafting import GOLDEN

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.errors import InvalidValue, NoVision
from mlx_spec.tokenizer import Tokenizer, read_tokenizer
from mlx_spec.vision import qwen
from mlx_spec.vision.conversation import conversation_prompt
from mlx_spec.vision.pictures import MAX_PICTURES, read_picture
from mlx_spec.vision.pixels import MergedPatches, Patches
from mlx_spec.vision.vision import Picture, Vision, read_vision

ROOT = GOLDEN / "vision"
VARIANTS = ("e2b", "e4b", "12b", "26b", "31b", "gemma3", "qwen")


@cache
def opened(variant: str) -> tuple[Tokenizer, Vision]:
    folder = ROOT / variant
    tokenizer = read_tokenizer(read_checkpoint(folder))
    return tokenizer, in_float32(read_vision(read_checkpoint(folder), tokenizer))


def in_float32(vision: Vision) -> Vision:
    vision.load()
    vision._tower.set_dtype(mx.float32)
    return vision


@cache
def pixels(name: str) -> Any:
    return read_picture((ROOT / f"{name}.png").read_bytes())


def rows_of(vision: Vision, picture: Picture) -> mx.array:
    steps = vision.encode(picture)
    while True:
        try:
            mx.eval(next(steps))
        except StopIteration as end:
            return end.value


def golden(variant: str) -> tuple[dict[str, mx.array], dict[str, Any]]:
    facts = json.loads((ROOT / variant / "golden.json").read_text())
    return mx.load(str(ROOT / variant / "golden.safetensors")), facts


@pytest.mark.parametrize("variant", VARIANTS)
def test_pixels_and_rows_equal_those_of_transformers(variant: str) -> None:
    """A wide picture and a tall one. Rows are compared with their root mean square."""
    tensors, _ = golden(variant)
    vision = opened(variant)[1]
    for name in "bc":
        picture = vision.prepare(pixels(name))
        assert np.array_equal(picture.pixels, np.array(tensors[f"pixels.{name}"]))
        expected = tensors[f"rows.{name}"]
        assert picture.count == expected.shape[0]
        error = mx.abs(rows_of(vision, picture) - expected).max()
        assert error < 1e-4 * mx.sqrt(mx.mean(expected**2))


def turns_of(facts: dict[str, Any]) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """The messages before each answer of a golden file, and what is known of it."""
    found = []
    for case, turns in facts.items():
        messages: list[dict[str, Any]] = []
        for parts, turn in zip(CASES.get(case, ()), turns, strict=False):
            messages.append({"role": "user", "content": [part_of(each) for each in parts]})
            found.append((list(messages), turn))
            messages.append({"role": "assistant", "content": turn["answer"].strip()})
    return found


def part_of(text: str) -> dict[str, str]:
    return {"type": "image"} if text in PICTURES else {"type": "text", "text": text}


PICTURES = "abcd"
CASES = {
    "one": [["a", "What is the capital of Italy?"]],
    "other": [["d", "What is the capital of Italy?"]],
    "two": [["The cat sat on", "b", "and the dog sat on", "c", "one two three"]],
    "later": [["What is the capital of Spain?"], ["a", "Monday Tuesday Wednesday"], ["one two three"]],
    "again": [["a", "one two three"], ["a", "A B C D"]],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_equal_those_of_transformers(variant: str) -> None:
    tokenizer, vision = opened(variant)
    for messages, turn in turns_of(golden(variant)[1]):
        pictures = [vision.prepare(pixels(name)) for name in turn["pictures"]]
        tokens = tokenizer.prompt(messages, expand=lambda text, given=pictures: vision.expand(text, given))
        assert tokens == turn["ids"]
        prompt = vision.prompt(tokens, pictures)
        assert [span.count for span in prompt.spans] == [picture.count for picture in pictures]
        row = vision._tokens[0]
        inside = {i for span in prompt.spans for i in range(span.start, span.end)}
        assert inside == {i for i, token in enumerate(tokens) if token == row}
        assert [span.grid for span in prompt.spans] == [picture.grid for picture in pictures]


def test_turns_beside_pictures() -> None:
    """They are counted after the rows of pictures, and not cut any."""
    tokenizer, vision = opened("e2b")
    picture = {"type": "image", "image": vision.prepare(pixels("a"))}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]
    messages.append({"role": "assistant", "content": "Show me."})
    messages.append({"role": "user", "content": [picture, {"type": "text", "text": "This one."}]})
    for more in (0, 1):
        prompt = conversation_prompt(messages, tokenizer, vision)
        shown = [tokenizer.decode_raw(prompt[:turn]) for turn in prompt.turns]
        assert [one.count("<turn|>") for one in shown] == [2 + 2 * more, 3 + 2 * more]
        assert all(prompt.whole(turn) == turn for turn in prompt.turns)
        messages += [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}]


def test_a_picture_that_comes_twice_is_encoded_once() -> None:
    tokenizer, vision = opened("e2b")
    pictures = [vision.prepare(pixels(name)) for name in "aba"]
    message = {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "image"}]}
    tokens = tokenizer.prompt([message], expand=lambda text: vision.expand(text, pictures))
    first, other, again = vision.prompt(tokens, pictures).spans
    assert first.rows is again.rows and first.rows is not other.rows
    assert first.digest == again.digest != other.digest
    assert [len(list(first.rows.steps())) > 0, len(list(again.rows.steps()))] == [True, 0]


# --- names and forms of published checkpoints


def changed(variant: str, out: Path, rename: Any, **config: Any) -> Path:
    """A copy of a checkpoint whose tower has other names and forms."""
    shutil.copytree(ROOT / variant, out, ignore=shutil.ignore_patterns("golden.*"))
    stored = mx.load(str(out / "model-vision.safetensors"))
    tensors = dict(rename(name, array) for name, array in stored.items())
    mx.save_safetensors(str(out / "model-vision.safetensors"), tensors, {"format": "mlx"})
    written = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(written | config))
    return out


def as_google(name: str, array: mx.array) -> tuple[str, mx.array]:
    name = name.removeprefix("model.")
    return name.replace("vision_tower.", "vision_tower.vision_model."), array


def as_mlx_vlm(name: str, array: mx.array) -> tuple[str, mx.array]:
    name, array = as_google(name, array)
    return name, array.transpose(0, 2, 3, 1) if "patch_embedding.weight" in name else array


def without_prefix(name: str, array: mx.array) -> tuple[str, mx.array]:
    return name.removeprefix("model."), array


def qwen_as_mlx_vlm(name: str, array: mx.array) -> tuple[str, mx.array]:
    name = name.replace("model.visual.", "vision_tower.")
    return name, array.transpose(0, 2, 3, 4, 1) if array.ndim == 5 else array


@pytest.mark.parametrize(
    ("variant", "rename"),
    [
        ("gemma3", as_google),
        ("gemma3", as_mlx_vlm),
        ("31b", without_prefix),
        ("qwen", qwen_as_mlx_vlm),
    ],
)
def test_names_of_published_towers_are_known(variant: str, rename: Any, tmp_path: Path) -> None:
    tokenizer, vision = opened(variant)
    other = in_float32(read_vision(read_checkpoint(changed(variant, tmp_path / "copy", rename)), tokenizer))
    picture = vision.prepare(pixels("b"))
    assert mx.array_equal(rows_of(other, picture), rows_of(vision, picture))
    assert other.nbytes == vision.nbytes > 50_000


def test_tensors_that_rows_do_not_pass_are_left_out(tmp_path: Path) -> None:
    folder = changed("31b", tmp_path / "copy", without_prefix)
    path = str(folder / "model-vision.safetensors")
    more = {
        "vision_tower.encoder.rotary_emb.inv_freq": mx.ones(2),
        "vision_tower.encoder.layers.0.mlp.up_proj.input_max": mx.array(0.1),
        "embed_vision.position_ids": mx.arange(4),
    }
    mx.save_safetensors(path, {**mx.load(path), **more})
    tokenizer, vision = opened("31b")
    picture = vision.prepare(pixels("a"))
    found = rows_of(in_float32(read_vision(read_checkpoint(folder), tokenizer)), picture)
    assert mx.array_equal(found, rows_of(vision, picture))


@pytest.mark.parametrize(
    ("variant", "bits", "names"),
    [
        ("26b", 4, ("embedding_projection", "layers.1.mlp.gate_proj.linear")),
        ("26b", 8, ("embedding_projection", "layers.1.mlp.gate_proj.linear")),
        ("qwen", 8, ("merger.linear_fc1", "blocks.1.attn.qkv")),
    ],
)
def test_a_tower_may_be_quantized_in_part(
    variant: str, bits: int, names: tuple[str, str], tmp_path: Path
) -> None:
    """The projection, as mlx-vlm does it, and one layer of another size."""
    tokenizer, vision = opened(variant)

    def quantized(name: str, array: mx.array) -> list[tuple[str, mx.array]]:
        if not name.endswith(tuple(f"{each}.weight" for each in names)):
            return [(name, array)]
        stem = name.removesuffix("weight")
        return list(
            zip(
                (f"{stem}weight", f"{stem}scales", f"{stem}biases"),
                mx.quantize(array, group_size=32, bits=bits),
                strict=True,
            )
        )

    settings = {"quantization": {"group_size": 64, "bits": 4}}
    folder = changed(variant, tmp_path / "copy", lambda *item: item, **settings)
    path = str(folder / "model-vision.safetensors")
    parts = [pair for item in mx.load(path).items() for pair in quantized(*item)]
    mx.save_safetensors(path, dict(parts))
    other = read_vision(read_checkpoint(folder), tokenizer)
    other.load()
    modules = dict(other._tower.named_modules())
    packed = [name for name, module in modules.items() if isinstance(module, nn.QuantizedLinear)]
    assert len(packed) == 2
    picture = vision.prepare(pixels("a"))
    plain, found = rows_of(vision, picture), rows_of(in_float32(other), picture)
    error = (mx.linalg.norm(found - plain) / mx.linalg.norm(plain)).item()
    assert 0 < error < (0.3 if bits == 4 else 0.02)


# --- rows and steps


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1, 1), (16, 16)),  # small pictures are enlarged
        ((20_000, 1), (1, 280)),
        ((1, 20_000), (280, 1)),
        ((4032, 3024), (14, 19)),
        ((3024, 4032), (19, 14)),
        ((48, 48), (16, 16)),
        ((3000, 10), (1, 280)),
    ],
)
def test_a_grid_fills_the_budget(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """As transformers' get_aspect_ratio_preserving_size does for the published settings."""
    assert Patches(48, 16, 280).grid(size[1], size[0]) == grid


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1, 1), (8, 8)),  # small pictures are enlarged
        ((32, 6400), (200, 1)),
        ((6400, 32), (1, 200)),
        ((4032, 3024), (94, 126)),
        ((5000, 5000), (128, 128)),
        ((640, 400), (12, 20)),
        ((80, 3000), (94, 2)),
        ((2600, 13), (1, 114)),
    ],
)
def test_a_grid_of_qwen_is_near_the_size_of_the_picture(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """As transformers' smart_resize does for the published settings."""
    assert MergedPatches(16, 2, 2**16, 2**24).grid(size[1], size[0]) == grid


@pytest.mark.parametrize(("variant", "shape", "layers"), [("e2b", (576, 32), 5), ("qwen", (256, 32), 3)])
def test_a_tower_works_in_steps(variant: str, shape: tuple[int, int], layers: int) -> None:
    _, vision = opened(variant)
    steps = vision.encode(vision.prepare(pixels("a")))
    assert [step.shape for step in steps] == [shape] * layers


def test_a_large_picture_takes_more_steps_for_the_same_rows() -> None:
    """A photo has 48,000 patches."""
    block = opened("qwen")[1]._tower.blocks[0]
    x, angles = mx.random.normal((50, 32)), mx.random.normal((50, 16))
    whole, parts = (list(block(x, mx.cos(angles), mx.sin(angles), most)) for most in (2**23, 50 * 7))
    assert [part.shape[0] for part in parts] == [7] * 7 + [1]
    assert mx.abs(mx.concatenate(parts) - mx.concatenate(whole)).max() < 1e-5


def test_sixteen_bits_stay_sixteen_bits() -> None:
    tokenizer, vision = opened("qwen")
    stored = read_vision(read_checkpoint(ROOT / "qwen"), tokenizer)
    picture = vision.prepare(pixels("b"))
    rows, exact = rows_of(stored, picture), rows_of(vision, picture)
    assert rows.dtype == mx.bfloat16
    assert mx.linalg.norm(rows - exact) < 0.03 * mx.linalg.norm(exact)


def test_pictures_are_counted_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting the tokens of a request needs headers and JSON alone, also of a model that is not loaded."""
    tokenizer, _ = opened("e2b")
    monkeypatch.delattr(mx, "load")
    vision = read_vision(read_checkpoint(ROOT / "e2b"), tokenizer)
    assert vision.prepare(pixels("b")).count == 65
    assert vision.nbytes > 50_000


# --- refusals


def expanded(texts: str, count: int, variant: str = "e2b") -> list[int]:
    tokenizer, vision = opened(variant)
    parts = [{"type": "image"}] * count + [{"type": "text", "text": texts}]
    pictures = [vision.prepare(pixels("a"))] * count
    return tokenizer.prompt(
        [{"role": "user", "content": parts}], expand=lambda text: vision.expand(text, pictures)
    )


@pytest.mark.parametrize(
    ("variant", "text", "named"),
    [
        ("e2b", "see <|image|>", "holds <|image|>"),
        ("gemma3", "see <|image>", "holds <|image>"),
        ("gemma3", "see <|image|>", "holds <|image|>"),
        ("qwen", "see <|image|>", "holds <|image|>"),
    ],
)
def test_a_placeholder_in_a_text_is_refused_beside_pictures(variant: str, text: str, named: str) -> None:
    with pytest.raises(InvalidValue, match=named.replace("|", r"\|")):
        expanded(text, 1, variant)
    assert expanded(text, 0, "e2b")


def test_too_many_pictures_are_refused() -> None:
    with pytest.raises(InvalidValue, match="21 pictures: 20 are allowed"):
        expanded("x", MAX_PICTURES + 1)


def test_a_template_that_shows_no_pictures_is_named() -> None:
    _, vision = opened("e2b")
    with pytest.raises(InvalidValue, match="shows 0 of 1 pictures"):
        vision.expand("no placeholder", [vision.prepare(pixels("a"))])


@pytest.mark.parametrize(
    ("config", "remove", "words"),
    [
        ({"vision_config": None}, False, "it is a text model"),
        ({}, True, "names a vision tower, but the checkpoint holds none"),
        (
            {"model_type": "qwen3_vl"},
            False,
            "tower of qwen3_vl is not read here; those of gemma3, gemma4, gemma4_unified, qwen3_5",
        ),
        ({"image_token_id": 258_880}, False, "its tokenizer lacks the tokens of pictures"),
        ({"gguf": "x.gguf"}, False, "mmproj"),
    ],
)
def test_a_model_says_why_it_reads_no_pictures(
    config: dict[str, Any], remove: bool, words: str, tmp_path: Path
) -> None:
    folder = changed("e2b", tmp_path / "copy", without_prefix, **config)
    if remove:
        (folder / "model-vision.safetensors").unlink()
    with pytest.raises(NoVision, match=words):
        read_vision(read_checkpoint(folder), opened("e2b")[0])


@pytest.mark.parametrize(
    ("variant", "file", "settings", "words"),
    [
        ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("gemma3", "preprocessor_config.json", {"image_mean": [0.4, 0.5, 0.6]}, "image_mean"),
        ("qwen", "preprocessor_config.json", {"image_mean": [0.0] * 3}, "image_mean"),
        ("qwen", "preprocessor_config.json", {"merge_size": 3}, "merge_size 3, where 2"),
    ],
)
def test_a_processor_that_does_more_is_refused(
    variant: str, file: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = changed(variant, tmp_path / "copy", lambda *item: item)
    (folder / "processor_config.json").unlink()
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(NoVision, match=words):
        read_vision(read_checkpoint(folder), opened(variant)[0])


def test_a_stripe_is_refused_by_qwen() -> None:
    _, vision = opened("qwen")
    assert vision.prepare(np.zeros((2, 400, 3), np.uint8)).grid == (1, 57)
    with pytest.raises(InvalidValue, match="401 x 2 pixels: this model reads none longer than 200 : 1"):
        vision.prepare(np.zeros((2, 401, 3), np.uint8))


def test_published_sections_turn_the_frequencies_of_qwen_in_turn() -> None:
    """Of 32, y and x have 11 and 10, and time has the others, as transformers interleaves them."""
    rope = {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    assert qwen.FAMILY.sight({"head_dim": 256, "rope_parameters": rope}).axes == (*[0, 1, 2] * 10, 0, 1)
    assert qwen.FAMILY.sight({"head_dim": 256}).axes == (*[0, 1, 2] * 10, 0, 1)


def test_a_tower_of_another_form_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    def cut(name: str, array: mx.array) -> tuple[str, mx.array]:
        return name, array[:5] if "q_norm" in name else array

    vision = read_vision(read_checkpoint(changed("e2b", tmp_path / "copy", cut)), opened("e2b")[0])
    with pytest.raises(NoVision, match="another vision tower than its config"):
        vision.load()
