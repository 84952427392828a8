"""A pair takes the memory of its two checkpoints: no drafter copies a tensor of the target."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from support.drafting import GOLDEN, TRAINED, converted, write_converted

import mlx_spec

FAMILIES = ("gemma4_assistant", "qwen_mtp", "eagle3", "medusa", "pard", "dflash")
# Bytes: rotary frequencies, and at most 8 KB for each of a few tensors in buffers that MLX reuses.
SLACK = 2**15


def held_bytes(target: Path, drafter: Path | str) -> int:
    """Return the bytes that a pair holds after an answer, without its caches."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    pair = mlx_spec.load(target, drafter, num_draft_tokens=3)
    rounds = list(pair.generate([2, *pair.tokenizer.encode("where is the red fox")], max_tokens=12))
    assert any(round.drafted for round in rounds) == (drafter != "none")
    del rounds
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory() - before


@cache
def held_alone(target: Path) -> int:
    """Return the bytes of a target without a drafter, measured once for all its drafters."""
    return held_bytes(target, "none")


def tensor_bytes(folder: Path) -> int:
    return sum(array.nbytes for file in folder.glob("*.safetensors") for array in mx.load(str(file)).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_without_a_copy_of_the_target(family: str, tmp_path: Path) -> None:
    """The smallest tensor that drafters share, the target's embedding, is far larger than the slack."""
    if family == "gemma4_assistant":
        target, drafter = GOLDEN / "12b-trained" / "target", GOLDEN / "12b-trained" / "assistant"
    elif family == "qwen_mtp":  # conversion takes the drafter out of the target
        converted(*TRAINED[family], tmp_path)
        target, drafter = tmp_path / "target", tmp_path / "drafter"
    else:
        target = TRAINED[family][0]
        drafter = write_converted(Path(TRAINED[family][1]), target, tmp_path)
    held_bytes(target, drafter)  # MLX keeps a few kilobytes of the first answer of a process
    alone, pair = held_alone(target), held_bytes(target, drafter)
    assert pair - alone <= tensor_bytes(drafter) + SLACK
    assert alone <= tensor_bytes(target) + SLACK


def test_trees_beside_passes_of_one_row_class_are_loaded_and_never_drafted(tmp_path: Path) -> None:
    """In half precision a tree has other bits, so it is not measured either: that ended the load."""
    target = TRAINED["medusa"][0]
    pair = mlx_spec.load(target, write_converted(Path(TRAINED["medusa"][1]), target, tmp_path))
    assert pair.rows.is_bitwise and pair.policies.names == (
        "medusa",
        "medusa trees",
        *pair.policies.names[2:],
    )
    rounds = list(pair.generate([2, *pair.tokenizer.encode("where is the red fox")], max_tokens=30))
    assert {round.source for round in rounds} <= {None, "medusa", "lookup"}
