"""A tree of drafts in one pass of the target: every path equals its chain, and caches keep one path."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import rope_utils
from support import tiny
from support.fitted import largest
from support.targets import read, write

from mlx_spec.model.target import LMTarget
from mlx_spec.model.tree import RowwiseRope, Tree, tree_template
from mlx_spec.types import FeatureSpec

TOLERANCE = 1e-5  # measured: 0
DIFFERS = 1e-2  # a mistake changes logits by more; measured: more than 1
TREE = Tree((0, 1, 2, 3, 2, 1, 6, 1, 0, 9, 10, 0))
SIDE = (0, 9, 10, 11)  # a path of three tokens that begins with a second guess
KINDS = ["full", "qwen", "shared", "quantized"]  # the last one has windows, too
LENGTHS = [2, 40]  # of the prompt; the window is 16
EVERYTHING = FeatureSpec(hidden_layers=(1, 3), final_hidden=True, shared_kv=True)


def target_of(kind: str, prompt: list[int], needs: FeatureSpec | None = None) -> LMTarget:
    return read(tiny.shallow(kind), prompt, needs, kv_bits=tiny.bits_of(kind))


def draft(target: LMTarget, tokens: list[int], path: tuple[int, ...]) -> None:
    """Verify a tree and keep a path."""
    target.verify_tree(mx.array(tokens), TREE.parents)
    target.commit_path(path)


def tokens_of(seed: int, tree: Tree = TREE) -> list[int]:
    """The pending token and a draft."""
    return [(31 * seed + 17 * row + 3) % 256 for row in range(len(tree.paths))]


def logits_of_path(kind: str, prompt: list[int], path: list[int]) -> np.ndarray:
    return np.array(target_of(kind, prompt).verify(mx.array(path)))


# --- the shape


def test_a_template_holds_the_likeliest_places() -> None:
    rates = [[0.45, 0.3, 0.02, 0.0], [0.5, 0.24, 0.1, 0.05], [0.4, 0.31, 0.0, 0.0]]
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]
    reach = {path: float(np.prod([rates[i][rank] for i, rank in enumerate(path)])) for path in every}
    likely = sorted(every, key=lambda path: -reach[path])
    for nodes in (1, 2, 5, 9, 16):
        template = tree_template(nodes, rates)
        assert set(template.paths) == set(likely[:nodes])
        assert template.reach == pytest.approx([reach[path] for path in template.paths])
    assert tree_template(3, [[0.4, 0.35], [0.4, 0.1]]).tree(3).parents == (0, 1, 0)
    assert tree_template(9, [[0.4, 0.35], [0.4, 0.1]]).tree(9).parents == (0, 1, 1, 0, 4, 4)


# --- the pass


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_path_equals_its_chain(kind: str, length: int) -> None:
    prompt, tokens = tiny.prompt(length), tokens_of(length)
    target = target_of(kind, prompt)
    logits = np.array(target.verify_tree(mx.array(tokens), TREE.parents))
    for leaf in set(range(len(tokens))) - set(TREE.parents):
        path = TREE.paths[leaf]
        alone = logits_of_path(kind, prompt, [tokens[row] for row in path])
        assert largest(logits[list(path)], alone) < TOLERANCE


def test_a_window_shorter_than_the_tree() -> None:
    """Tokens of the path itself fall out of it."""
    model, prompt, tokens = tiny.sliding(sliding_window=3), tiny.prompt(9), tokens_of(2)
    target, alone = read(model, prompt), read(model, prompt)
    logits = target.verify_tree(mx.array(tokens), TREE.parents)
    path = list(TREE.paths[4])
    assert len(path) > 3
    assert largest(logits[mx.array(path)], alone.verify(mx.array([tokens[row] for row in path]))) < TOLERANCE


# --- commit and rewind


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [SIDE, SIDE[:2], (0, 1, 2)])
def test_decoding_goes_on_from_a_kept_path(kind: str, length: int, path: tuple[int, ...]) -> None:
    prompt, tokens = tiny.prompt(length), tokens_of(length)
    target = target_of(kind, prompt)
    draft(target, tokens, path)
    assert (target.size, target.uncommitted) == (length + len(path), 0)
    kept = [tokens[row] for row in path]
    alone = logits_of_path(kind, prompt, [*kept, 9, 8, 7])
    assert largest(target.verify(mx.array([9, 8, 7])), alone[len(kept) :]) < TOLERANCE


@pytest.mark.parametrize("kind", ["full", "quantized"])
def test_rows_that_are_not_moved_are_caught(kind: str) -> None:
    prompt, tokens = tiny.prompt(20), tokens_of(0)
    target = target_of(kind, prompt)
    target.verify_tree(mx.array(tokens), TREE.parents)
    target.commit(len(SIDE))  # the first rows instead of the path
    kept = [tokens[row] for row in SIDE]
    assert largest(target.verify(mx.array([9])), logits_of_path(kind, prompt, [*kept, 9])[-1:]) > DIFFERS


@pytest.mark.parametrize("kind", ["shared", "quantized"])
def test_many_trees_past_the_window_and_its_slack(kind: str) -> None:
    """Trees and chains in turn, over more rows than a buffer of a sliding window holds."""
    history = tiny.prompt(20)
    target = target_of(kind, history)
    paths = [SIDE, (0,), (0, 1, 2), (0, 12), tuple(range(5)), (0, 1, 6, 7)]
    for i in range(78):
        tokens = tokens_of(i)
        if i % 4 == 3:
            write(target, tokens[:6], 3)
            history += tokens[:3]
            continue
        path = paths[i % len(paths)]
        draft(target, tokens, path)
        history += [tokens[row] for row in path]
    assert len(history) > 256
    assert largest(target.verify(mx.array([5])), logits_of_path(kind, history, [5])) < TOLERANCE


def test_features_and_shared_rows_of_a_path() -> None:
    prompt, tokens = tiny.prompt(40), tokens_of(4)
    tree, chain = (target_of("shared", prompt, EVERYTHING) for _ in range(2))
    tree.verify_tree(mx.array(tokens), TREE.parents)
    chain.verify(mx.array([tokens[row] for row in SIDE]))
    ours, theirs = tree.commit_path(SIDE), chain.commit(len(SIDE))
    for a, b in zip([*ours.hidden, ours.final_hidden], [*theirs.hidden, theirs.final_hidden], strict=True):
        assert a.shape[0] == len(SIDE) and largest(a, b) < TOLERANCE
    for kind, rows in ours.shared_kv().items():
        assert largest(rows.keys, theirs.shared_kv()[kind].keys) < TOLERANCE
        assert largest(rows.values, theirs.shared_kv()[kind].values) < TOLERANCE


@pytest.mark.parametrize("kind", ["full", "quantized"])
def test_a_dropped_tree_and_a_rewind_leave_no_trace(kind: str) -> None:
    prompt, tokens = tiny.prompt(30), tokens_of(0)
    target = target_of(kind, prompt)
    target.verify_tree(mx.array(tokens), TREE.parents)
    target.commit(0)
    draft(target, tokens, SIDE)
    assert target.rewind(31) == 31
    after = target.verify(mx.array([4, 2]))
    assert largest(after, logits_of_path(kind, prompt, [tokens[0], 4, 2])[1:]) < TOLERANCE


def test_chains_are_verified_as_before_afterwards() -> None:
    """Also by another target of the model, whose rotary embeddings were wrapped meanwhile."""
    model, prompt = tiny.full(), tiny.prompt(30)
    before, block = read(model, prompt).verify(mx.array([1, 2, 3])), mx.array([1, 2, 3])
    mx.eval(before)
    LMTarget(model).verify_tree(mx.array(tokens_of(0)), TREE.parents)
    assert mx.array_equal(read(model, prompt).verify(block), before)


@pytest.mark.parametrize("scaled", ["RoPE", "Llama3RoPE", "SuScaledRoPE", "YarnRoPE", "ProportionalRoPE"])
def test_every_known_rotary_embedding_takes_an_offset_for_each_row(scaled: str) -> None:
    config = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ropes = {
        "RoPE": lambda: nn.RoPE(16),
        "Llama3RoPE": lambda: rope_utils.Llama3RoPE(16, 2048, False, 1e4, config),
        "SuScaledRoPE": lambda: rope_utils.SuScaledRoPE(16, short_factor=[1.0] * 8, long_factor=[2.0] * 8),
        "YarnRoPE": lambda: rope_utils.YarnRoPE(16, scaling_factor=4.0),
        "ProportionalRoPE": lambda: rope_utils.ProportionalRoPE(16, 8),
    }
    rope, x, positions = ropes[scaled](), mx.random.normal((1, 3, 4, 16)), [7, 8, 8, 5000]
    apart = RowwiseRope(rope)(x, offset=mx.array(positions))
    for row, position in enumerate(positions):
        assert largest(apart[:, :, row], rope(x[:, :, row : row + 1], offset=position)[:, :, 0]) < TOLERANCE
