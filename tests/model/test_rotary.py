"""Rotary positions in the plane: which they are, how rows are rotated, and what a tree has after pictures."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import YarnRoPE
from support import targets, tiny
from support.spans import facts, golden, pair_of

from mlx_spec.decode.running import prefill
from mlx_spec.model.rotary import MultiAxisRope, multi_axis_rope
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.prompt import LazyRows, RotaryPositions, Sight, Span
from mlx_spec.types import FeatureSpec

SPANS = ((3, 2, 5), (14, 4, 4), (30, 1, 1), (33, 6, 1))  # index, rows, columns; two without text between
END = 50


def reference() -> np.ndarray:
    """Positions as transformers' get_rope_index finds them, [3, END]."""
    found, place, index = [], 0, 0
    for start, rows, columns in SPANS:
        found += [(place + i,) * 3 for i in range(start - index)]
        place += start - index
        found += [(place, place + y, place + x) for y in range(rows) for x in range(columns)]
        place, index = place + max(rows, columns), start + rows * columns
    found += [(place + i,) * 3 for i in range(END - index)]
    return np.array(found).T


def test_positions_of_any_pass() -> None:
    right, rotary = reference(), RotaryPositions((0, 1, 2), SPANS)
    inside = {i for start, rows, columns in SPANS for i in range(start, start + rows * columns)}
    for start in range(END):
        for end in range(start + 1, END + 1):
            assert np.array_equal(rotary.positions(start, end), right[:, start:end])
            assert rotary.crosses(start, end) == bool(inside & {*range(start, end)})
        if start not in inside:
            assert start + rotary.shift(start) == right[0, start]
        assert rotary.before(start).spans == tuple(s for s in SPANS if s[0] + s[1] * s[2] <= start)


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_each_frequency_turns_with_its_axis(kind: str) -> None:
    """With the sections that Qwen publishes: a quarter of 256 dimensions is rotated."""
    rope = nn.RoPE(64, base=1e7) if kind == "default" else YarnRoPE(64, base=1e7, scaling_factor=4.0)
    axes, x = (*[0, 1, 2] * 10, 0, 1), mx.random.normal((1, 2, 9, 256))
    at = mx.array(RotaryPositions(axes, ((1, 2, 3),)).positions(0, 9))
    found = MultiAxisRope(rope, axes, at)(x, offset=77)
    for row in range(9):
        for axis in range(3):
            turned = rope(x[:, :, row : row + 1], offset=at[axis, row].item())[:, :, 0]
            own = [j for j in range(32) if axes[j] == axis]
            own += [j + 32 for j in own]
            assert mx.abs(found[:, :, row, own] - turned[..., own]).max() < 1e-5
    assert mx.array_equal(found[..., 64:], x[..., 64:])


def test_a_model_has_its_own_embeddings_outside_of_a_pass() -> None:
    model, rotary = tiny.full(), RotaryPositions((0, 1, 2), ((5, 2, 2),))
    own = [layer.self_attn.rope for layer in model.layers]
    with multi_axis_rope(model, rotary, 9, 20):
        assert [layer.self_attn.rope for layer in model.layers] == own
    with pytest.raises(ZeroDivisionError), multi_axis_rope(model, rotary, 8, 20):
        assert all(isinstance(layer.self_attn.rope, MultiAxisRope) for layer in model.layers)
        raise ZeroDivisionError
    assert [layer.self_attn.rope for layer in model.layers] == own


def test_a_tree_and_a_batch_after_a_picture_equal_their_chains() -> None:
    """Columns are counted by index, positions are not."""
    model, tree = tiny.full(), (0, 1, 0, 3)
    half = model.layers[0].self_attn.rope.dims // 2
    sight = Sight(0, axes=tuple(i % 3 for i in range(half)))
    rows = mx.random.normal((12, model.args.hidden_size))

    def encode():
        yield rows
        return rows

    span = Span(4, 12, b"", LazyRows(encode), (3, 4))
    prompt, tokens = tiny.prompt(24), [9, 8, 7, 6, 5]

    def read(sight: Sight) -> LMTarget:
        target = LMTarget(model, sight=sight)
        target.prefill(prompt[:10], [span])
        target.prefill(prompt[10:], [span])
        return target

    found = read(sight).verify_tree(mx.array(tokens), tree)
    for path in ([0, 1, 2], [0, 3, 4]):
        chain = mx.array([tokens[row] for row in path])
        assert mx.abs(found[mx.array(path)] - read(sight).verify(chain)).max() < 1e-4
        assert mx.abs(found[mx.array(path)] - read(Sight(0)).verify(chain)).max() > 0.1

    lone, batch = read(sight), TargetBatch(model, FeatureSpec())
    batch.join(targets.read(model, prompt[:9]))
    batch.join(read(sight))
    for token, count in zip(tokens, (2, 1), strict=False):  # beside another sequence, then in its lane
        logits = batch.verify(mx.array([token] * count), [1] * count)[-1]
        assert mx.abs(logits - lone.verify(mx.array([token]))[0]).max() < 1e-4
        batch.commit([1] * count)
        lone.commit(1)
        if count > 1:
            batch.leave(0, keep=False)

    text = read(sight)  # a text after the picture is gone
    assert text.rewind(3) == 3
    targets.assert_goes_on(text, model, prompt[:3], [*prompt[3:20], *tokens])


@pytest.mark.parametrize(("case", "step"), [("two.0", 7), ("again.1", 1024)])
def test_an_mtp_head_has_the_positions_of_its_target(case: str, step: int) -> None:
    """Its logits are those of transformers' layer at the places of the target."""
    wanted, (_, arrays) = golden("qwen", case), facts("qwen")
    parts = pair_of("qwen", "mtp").open()
    list(prefill(parts.target, parts.drafters, wanted.prompt, lambda: step))
    parts.target.verify(mx.array(wanted.prompt[-1:]))
    drafter, first = parts.drafters[0], wanted.greedy[0]
    drafter.observe([*wanted.prompt, first], parts.target.commit(1))
    drafter._write(drafter._num_waiting)
    logits = drafter._parts.unembed(drafter._newest[1])[0]
    assert mx.abs(logits - arrays[f"drafted.{case}"]).max() < 1e-3


def test_a_checkpoint_near_the_end_of_a_prompt_cuts_no_picture() -> None:
    """The next turn would have its rows computed again."""
    target, prompt = pair_of("qwen").open().target, golden("qwen", "one.0").prompt
    list(prefill(target, (), prompt))
    end = prompt.spans[0].end
    assert end > len(prompt) - 32
    assert target.reach() == [(len(prompt) - 1,) * 2, (end, end), (len(prompt) - 1,) * 2]
