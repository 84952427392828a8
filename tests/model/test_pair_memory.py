"""A pair takes the memory of its two checkpoints: no drafter copies a tensor of the target."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import pytest
from support.drafting import GOLDEN, TRAINED, converted

import mlx_spec

FAMILIES = ("gemma4_assistant", "qwen_mtp", "eagle3", "medusa", "pard", "dflash")
SLACK = 8192  # bytes: constants such as rotary frequencies


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


def tensor_bytes(folder: Path) -> int:
    return sum(array.nbytes for file in folder.glob("*.safetensors") for array in mx.load(str(file)).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_without_a_copy_of_the_target(family: str, tmp_path: Path) -> None:
    """The smallest tensor that drafters share, the target's embedding, is far larger than the slack."""
    mine = GOLDEN / "12b-trained" / "target", GOLDEN / "12b-trained" / "assistant"
    if family != "gemma4_assistant":
        converted(*TRAINED[family], tmp_path / "out")
        mine = tmp_path / "out" / "target", tmp_path / "out" / "drafter"
    alone, pair = held_bytes(mine[0], "none"), held_bytes(*mine)
    assert pair - alone <= tensor_bytes(mine[1]) + SLACK
    assert alone <= tensor_bytes(mine[0]) + SLACK
