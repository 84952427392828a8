"""Trees of draft tokens: which token follows which, and how a model reads them.

Row 0 of the target's pass is the pending token and row j + 1 is draft token j. A token comes after its
parent, and guesses for one place are in order, the likeliest first. In depth-first order, the tokens up to
the first leaf are a chain. A model reads a tree with a mask by path and rotary positions by depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from mlx_spec.checkpoint.files import one_line
from mlx_spec.model.caches import Caches
from mlx_spec.model.hooks import ModuleWrapper, decoder_of
from mlx_spec.model.layer_caches import AttentionCache, Packed

# Errors of a model that expects one int and gets the positions of several rows or sequences.
POSITION_ERRORS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError)
ROPE = "rope"  # attribute of mlx-lm's attention modules that holds their rotary embedding


@dataclass(frozen=True)
class Tree:
    """A tree of K draft tokens: T = K + 1 rows with the pending token."""

    parents: tuple[int, ...]  # [K] the row that each draft token follows

    def __post_init__(self) -> None:
        assert all(0 <= row <= j for j, row in enumerate(self.parents)), f"no tree: {self.parents}"

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Return the distance of every row from the pending token, [T]."""
        depths = [0]
        for row in self.parents:
            depths.append(depths[row] + 1)
        return tuple(depths)

    @property
    def height(self) -> int:
        """Return the number of draft tokens of the longest path."""
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return for every row how many likelier guesses follow the same row, [T]."""
        return (0, *(self.parents[:j].count(row) for j, row in enumerate(self.parents)))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Return for every row the rows from the pending token to it, both included."""
        paths: list[tuple[int, ...]] = [(0,)]
        for j, row in enumerate(self.parents):
            paths.append((*paths[row], j + 1))
        return tuple(paths)

    @cached_property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Return all rows in segments; in a segment each row is the parent of the next one."""
        segments: list[list[int]] = [[0]]
        for j, row in enumerate(self.parents):
            if row == j:
                segments[-1].append(j + 1)
            else:
                segments.append([j + 1])
        return tuple(map(tuple, segments))

    def ancestors(self) -> list[list[bool]]:
        """Return [T, T]: True where the column's row is on the path to the row, itself included."""
        rows = [[True, *[False] * len(self.parents)]]
        for j, row in enumerate(self.parents):
            rows.append([*rows[row][: j + 1], True, *rows[row][j + 2 :]])
        return rows

    def earlier_siblings(self) -> list[list[bool]]:
        """Return [K, K]: True where the column's token is an earlier guess after the same row."""
        numbered = list(enumerate(self.parents))
        return [[row == other and i < j for i, other in numbered] for j, row in numbered]


@lru_cache(maxsize=256)
def tree_of(parents: tuple[int, ...]) -> Tree:
    """Return the tree with these parents, from a cache that keeps its tables."""
    return Tree(parents)


@dataclass(frozen=True)
class TreeTemplate:
    """Nodes for draft tokens, the likeliest first: the first n of them are a tree for every n."""

    paths: tuple[tuple[int, ...], ...]  # each node as the ranks on the path to it
    reach: tuple[float, ...]  # probability that the whole path is accepted

    def tree(self, nodes: int) -> Tree:
        """Return the tree of the first `nodes` nodes, in depth-first order."""
        ordered = [(), *sorted(self.paths[:nodes])]
        return tree_of(tuple(ordered.index(path[:-1]) for path in ordered[1:]))


def tree_template(nodes: int, rates: Sequence[Sequence[float]]) -> TreeTemplate:
    """Return the likeliest `nodes` nodes. `rates[depth][rank]`: acceptance of a guess, best rank first.

    Medusa builds its trees like this (arXiv:2401.10774), from counts over a calibration text.
    """
    paths, reach = list[tuple[int, ...]](), list[float]()
    front: dict[tuple[int, ...], float] = {(0,): rates[0][0]}  # nodes next to the chosen ones
    while front and len(paths) < nodes:
        best = max(front, key=lambda path: front[path])
        likely = front.pop(best)
        paths.append(best)
        reach.append(likely)
        depth, rank = len(best), best[-1]
        if depth < len(rates):
            front[(*best, 0)] = likely * rates[depth][0]
        if rank + 1 < len(rates[depth - 1]):
            parent = likely / rates[depth - 1][rank] if rates[depth - 1][rank] else 0.0
            front[(*best[:-1], rank + 1)] = parent * rates[depth - 1][rank + 1]
    return TreeTemplate(tuple(paths), tuple(reach))


# --- how a model reads a tree


class TreeCacheView:
    """Appends the rows of a tree from row `start` on to a cache. The mask hides all rows off a row's path.

    The cache already holds the rows before `start`. In a sliding window they take as much room as one path.
    """

    def __init__(self, cache: AttentionCache, tree: Tree, start: int = 0) -> None:
        self._cache = cache
        self._tree = tree
        self._start = start
        assert isinstance(cache.offset, int), "a tree is of one sequence"
        # The index of the pending token; rotary positions are shifted after pictures.
        self._base = cache.columns.first[0] + cache.columns.starts[0] - start
        self.window = cache.columns.window
        # A list, because only RowwiseRope can compute with it: other code that uses positions raises.
        self.offset = [cache.offset - start + depth for depth in tree.depths[start:]]
        self.has_masked = False  # True once the model has asked for a mask

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array] | tuple[Packed, Packed]:
        """Append [1, H, T, D] and return the rows of the cache."""
        assert keys.shape[2] == len(self.offset), f"{keys.shape[2]} rows for a tree of {len(self.offset)}"
        return self._cache.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the cache: `bits` of a quantized one, or the rows for KV-shared layers."""
        return getattr(self._cache, name)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the mask over the rows that `update_and_fetch` will return, bool [N, rows]."""
        assert len(self.offset) == N, f"mask of {N} rows for a tree of {len(self.offset)}"
        self.has_masked = True
        window = min((w for w in (window_size, self.window) if w), default=None)
        columns = self._cache.columns
        first, end = columns.low + columns.first[0], columns.high + columns.first[0]  # that are returned
        before = max(self._base - first, 0)
        on_path = mx.array(self._tree.ancestors()[self._start :])
        seen = mx.concatenate([mx.ones((N, before), dtype=mx.bool_), on_path], axis=1)
        if window is not None:
            tree = self._base + mx.array(self._tree.depths)
            positions = mx.concatenate([mx.arange(self._base - before, self._base), tree])
            seen = seen & (tree[self._start :, None] - positions < window)
        return seen[:, first - end :]


class RowwiseRope(ModuleWrapper):
    """A rotary embedding that also takes one offset for each row of one sequence.

    Offsets for several sequences, one each, are left to the embedding itself.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.runs = 0  # calls that rotated several rows from one offset on, which is wrong for a tree

    def __call__(self, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        """Rotate [1, H, T, D] from one offset on, or by offsets [T]."""
        rotate = self.layer
        offset = mx.array(offset) if isinstance(offset, list) else offset
        if not isinstance(offset, mx.array) or offset.size == 1 or x.shape[0] > 1:
            self.runs += x.shape[2] > 1
            rotated: mx.array = rotate(x, offset=offset, **options)
            return rotated
        by_row: mx.array = rotate(x.transpose(2, 1, 0, 3), offset=offset, **options)  # rows on the batch axis
        return by_row.transpose(2, 1, 0, 3)


def rope_obstacle(model: nn.Module, layers: Sequence[nn.Module]) -> str | None:
    """Return why rows cannot have separate positions in these layers of a model; None if they can."""
    for index, layer in enumerate(layers):
        if not any(ROPE in owner for owner in layer.modules()):
            return f"layer {index} has no rotary embedding"
    for owner in rope_owners(model):
        rope = owner[ROPE]
        inner = rope.layer if isinstance(rope, RowwiseRope) else rope
        if not _rotates_rows_independently(inner):
            holders = (i for i, layer in enumerate(layers) if any(m is owner for m in layer.modules()))
            owner_name = next((f"layer {i}" for i in holders), "a module outside the layers")
            return f"{owner_name} has positions by {type(inner).__name__}"
    return None


def has_rowwise_ropes(model: nn.Module) -> bool:
    """Return True if all rotary embeddings of a model take an offset for each row."""
    return all(isinstance(owner[ROPE], RowwiseRope) for owner in rope_owners(model))


def runs_of(model: nn.Module) -> list[int]:
    """Return how often each rotary embedding of a model rotated several rows from one offset on."""
    return [owner[ROPE].runs for owner in rope_owners(model)]


def wrap_ropes(model: nn.Module) -> None:
    """Let all rotary embeddings of a model take an offset for each row."""
    for owner in rope_owners(model):
        if not isinstance(owner[ROPE], RowwiseRope):
            owner[ROPE] = RowwiseRope(owner[ROPE])


def unwrap_ropes(model: nn.Module) -> None:
    """Undo `wrap_ropes`."""
    for owner in rope_owners(model):
        if isinstance(owner[ROPE], RowwiseRope):
            owner[ROPE] = owner[ROPE].layer


def rope_owners(model: nn.Module) -> list[nn.Module]:
    """Return all modules with rotary embeddings. Layers that reuse K/V may be in a separate list."""
    return [owner for owner in model.modules() if ROPE in owner]


def _rotates_rows_independently(rope: Any) -> bool:
    if isinstance(rope, rope_utils.DynamicNTKScalingRoPE):  # its frequencies depend on the longest position
        return False
    known = (base.__module__ == rope_utils.__name__ for base in type(rope).mro())
    return isinstance(rope, nn.RoPE) or any(known)


def model_obstacle(model: nn.Module) -> str | None:
    """Return why a model cannot verify a tree of draft tokens; None if it can, from then on."""
    if (reason := rope_obstacle(model, decoder_of(model).layers)) or has_rowwise_ropes(model):
        return reason
    wrap_ropes(model)
    if reason := misread_tree(model):
        unwrap_ropes(model)
    return reason


def misread_tree(model: nn.Module) -> str | None:
    """Return how a model reads the rows of a tree as a chain; None if it reads them as a tree."""
    caches = Caches.of_model(model)
    caches.begin(3)
    views = [TreeCacheView(cache, tree_of((0, 0))) for cache in caches.attention]
    runs = runs_of(model)
    try:  # builds the graph and computes nothing
        model(mx.zeros((1, 3), mx.int32), cache=caches.for_model(views))
    except POSITION_ERRORS as error:
        return f"its model calculates with positions ({one_line(error, 80)})"
    if runs_of(model) != runs:
        return "some layers rotate all rows from one position on"
    masked = {view.window for view in views if view.has_masked}
    if any(view.window not in masked for view in views):
        return "its model builds masks by itself"
    return None
