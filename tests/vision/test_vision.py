"""Towers and prompts against what transformers computes for tiny checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.spans import ROOT, changed, facts, file, picture, tokenizer_of, vision_of

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.vision import qwen
from mlx_spec.vision.conversation import conversation_prompt
from mlx_spec.vision.pictures import read_picture
from mlx_spec.vision.pixels import MergedPatches, Patches
from mlx_spec.vision.vision import Picture, Vision, read_vision

VARIANTS = ("e2b", "e4b", "12b", "26b", "31b", "gemma3", "qwen")


def opened(folder: Path, variant: str) -> Vision:
    """Read a changed checkpoint with the tokenizer of its original, in float32."""
    vision = read_vision(read_checkpoint(folder), tokenizer_of(variant))
    vision.load()
    vision._tower.set_dtype(mx.float32)
    return vision


def rows_of(vision: Vision, shown: Picture) -> mx.array:
    steps = vision.encode(shown)
    while True:
        try:
            mx.eval(next(steps))
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("variant", VARIANTS)
def test_pixels_and_rows_equal_those_of_transformers(variant: str) -> None:
    """A wide picture and a tall one. Rows are compared with their root mean square."""
    _, tensors = facts(variant)
    for name in "bc":
        shown, expected = picture(variant, name), tensors[f"rows.{name}"]
        assert np.array_equal(shown.pixels, np.array(tensors[f"pixels.{name}"]))
        assert shown.count == expected.shape[0]
        error = mx.abs(rows_of(vision_of(variant), shown) - expected).max()
        assert error < 1e-4 * mx.sqrt(mx.mean(expected**2))


# The parts of each turn of the user: pictures by their names, and texts.
CASES = {
    "one": [["a", "What is the capital of Italy?"]],
    "other": [["d", "What is the capital of Italy?"]],
    "two": [["The cat sat on", "b", "and the dog sat on", "c", "one two three"]],
    "later": [["What is the capital of Spain?"], ["a", "Monday Tuesday Wednesday"], ["one two three"]],
    "again": [["a", "one two three"], ["a", "A B C D"]],
}


def said(*parts: str) -> dict[str, Any]:
    """Return a message of the user."""
    content = [{"type": "image"} if p in "abcd" else {"type": "text", "text": p} for p in parts]
    return {"role": "user", "content": content}


def turns_of(variant: str) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yield the messages before each answer of a golden file, and what is known of it."""
    for case, turns in CASES.items():
        messages: list[dict[str, Any]] = []
        for parts, turn in zip(turns, facts(variant)[0][case], strict=True):
            messages.append(said(*parts))
            yield list(messages), turn
            messages.append({"role": "assistant", "content": turn["answer"].strip()})


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_equal_those_of_transformers(variant: str) -> None:
    tokenizer, vision = tokenizer_of(variant), vision_of(variant)
    for messages, turn in turns_of(variant):
        pictures = [picture(variant, name) for name in turn["pictures"]]
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
    tokenizer, shown = tokenizer_of("e2b"), {"type": "image", "image": picture("e2b", "a")}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]
    messages.append({"role": "assistant", "content": "Show me."})
    messages.append({"role": "user", "content": [shown, {"type": "text", "text": "This one."}]})
    for more in (0, 1):
        prompt = conversation_prompt(messages, tokenizer, vision_of("e2b"))
        texts = [tokenizer.decode_raw(prompt[:turn]) for turn in prompt.turns]
        assert [text.count("<turn|>") for text in texts] == [2 + 2 * more, 3 + 2 * more]
        assert all(prompt.whole(turn) == turn for turn in prompt.turns)
        messages += [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}]


def test_a_picture_that_comes_twice_is_encoded_once() -> None:
    vision, pictures = vision_of("e2b"), [picture("e2b", name) for name in "aba"]
    tokens = tokenizer_of("e2b").prompt([said(*"aba")], expand=lambda text: vision.expand(text, pictures))
    first, other, again = vision.prompt(tokens, pictures).spans
    assert first.rows is again.rows and first.rows is not other.rows
    assert first.digest == again.digest != other.digest
    assert [len(list(first.rows.steps())) > 0, len(list(again.rows.steps()))] == [True, 0]


# --- names and forms of published checkpoints


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
    other, shown = opened(changed(variant, tmp_path, rename), variant), picture(variant, "b")
    assert mx.array_equal(rows_of(other, shown), rows_of(vision_of(variant), shown))
    assert other.nbytes == vision_of(variant).nbytes > 50_000


def test_tensors_that_rows_do_not_pass_are_left_out(tmp_path: Path) -> None:
    more = {
        "vision_tower.encoder.rotary_emb.inv_freq": mx.ones(2),
        "vision_tower.encoder.layers.0.mlp.up_proj.input_max": mx.array(0.1),
        "embed_vision.position_ids": mx.arange(4),
    }
    other, shown = opened(changed("31b", tmp_path, without_prefix, more), "31b"), picture("31b", "a")
    assert mx.array_equal(rows_of(other, shown), rows_of(vision_of("31b"), shown))


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
    stored = mx.load(str(ROOT / variant / "model-vision.safetensors"))
    packed = dict[str, mx.array]()
    for name in [name for name in stored if name.endswith(tuple(f"{each}.weight" for each in names))]:
        parts = mx.quantize(stored[name], group_size=32, bits=bits)
        stem = name.removesuffix("weight")
        packed |= {
            stem + part: array for part, array in zip(("weight", "scales", "biases"), parts, strict=True)
        }
    settings = {"quantization": {"group_size": 64, "bits": 4}}
    other = opened(changed(variant, tmp_path, more=packed, **settings), variant)
    modules = other._tower.modules()
    assert sum(isinstance(module, nn.QuantizedLinear) for module in modules) == 2
    shown = picture(variant, "a")
    plain, found = rows_of(vision_of(variant), shown), rows_of(other, shown)
    error = (mx.linalg.norm(found - plain) / mx.linalg.norm(plain)).item()
    assert 0 < error < (0.3 if bits == 4 else 0.02)


# --- rows and steps


BUDGET, NEAR = Patches(48, 16, 280), MergedPatches(16, 2, 2**16, 2**24)  # of Gemma 4, and of Qwen


@pytest.mark.parametrize(
    ("patches", "size", "grid"),
    [
        (BUDGET, (1, 1), (16, 16)),  # small pictures are enlarged
        (BUDGET, (20_000, 1), (1, 280)),
        (BUDGET, (1, 20_000), (280, 1)),
        (BUDGET, (4032, 3024), (14, 19)),
        (BUDGET, (3024, 4032), (19, 14)),
        (BUDGET, (48, 48), (16, 16)),
        (BUDGET, (3000, 10), (1, 280)),
        (NEAR, (1, 1), (8, 8)),
        (NEAR, (32, 6400), (200, 1)),
        (NEAR, (6400, 32), (1, 200)),
        (NEAR, (4032, 3024), (94, 126)),
        (NEAR, (5000, 5000), (128, 128)),
        (NEAR, (640, 400), (12, 20)),
        (NEAR, (80, 3000), (94, 2)),
        (NEAR, (2600, 13), (1, 114)),
    ],
)
def test_grids_are_those_of_transformers(
    patches: Patches, size: tuple[int, int], grid: tuple[int, int]
) -> None:
    """One fills its budget, the other is near the size of the picture (`smart_resize`)."""
    assert patches.grid(size[1], size[0]) == grid


@pytest.mark.parametrize(("variant", "shape", "layers"), [("e2b", (576, 32), 5), ("qwen", (256, 32), 3)])
def test_a_tower_works_in_steps(variant: str, shape: tuple[int, int], layers: int) -> None:
    steps = vision_of(variant).encode(picture(variant, "a"))
    assert [step.shape for step in steps] == [shape] * layers


def test_a_large_picture_takes_more_steps_for_the_same_rows() -> None:
    """A photo has 48,000 patches."""
    block = vision_of("qwen")._tower.blocks[0]
    x, angles = mx.random.normal((50, 32)), mx.random.normal((50, 16))
    whole, parts = (list(block(x, mx.cos(angles), mx.sin(angles), most)) for most in (2**23, 50 * 7))
    assert [part.shape[0] for part in parts] == [7] * 7 + [1]
    assert mx.abs(mx.concatenate(parts) - mx.concatenate(whole)).max() < 1e-5


def test_sixteen_bits_stay_sixteen_bits() -> None:
    stored = read_vision(read_checkpoint(ROOT / "qwen"), tokenizer_of("qwen"))
    rows, exact = (rows_of(vision, picture("qwen", "b")) for vision in (stored, vision_of("qwen")))
    assert rows.dtype == mx.bfloat16
    assert mx.linalg.norm(rows - exact) < 0.03 * mx.linalg.norm(exact)


def test_pictures_are_counted_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting the tokens of a request needs headers and JSON alone, also of a model that is not loaded."""
    tokenizer = tokenizer_of("e2b")
    monkeypatch.delattr(mx, "load")
    vision = read_vision(read_checkpoint(ROOT / "e2b"), tokenizer)
    assert vision.prepare(read_picture(file("b"))).count == 65
    assert vision.nbytes > 50_000


def test_published_sections_turn_the_frequencies_of_qwen_in_turn() -> None:
    """Of 32, y and x have 11 and 10, and time has the others, as transformers interleaves them."""
    rope = {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    assert qwen.FAMILY.sight({"head_dim": 256, "rope_parameters": rope}).axes == (*[0, 1, 2] * 10, 0, 1)
    assert qwen.FAMILY.sight({"head_dim": 256}).axes == (*[0, 1, 2] * 10, 0, 1)
