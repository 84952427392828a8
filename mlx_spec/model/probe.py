"""Check at load that one pass of several rows gives the logits of several passes of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_spec.errors import BadCheckpoint, Mismatch, NotRewindable
from mlx_spec.model.hooks import decoder_of
from mlx_spec.model.layer_caches import AttentionCache
from mlx_spec.model.target import LMTarget
from mlx_spec.model.tree import POSITION_ERRORS


def arrays_of(model: nn.Module) -> list[mx.array]:
    """Return all arrays of a model."""
    weights = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    return [array for _, array in weights]


def rounding_of(model: nn.Module) -> float:
    """Return the largest relative error that rounding explains in a model."""
    types = {array.dtype for array in arrays_of(model)}
    # Shares of the largest logit or state.
    return 0.05 if types & {mx.bfloat16, mx.float16} else 0.01


def check_rows(model: nn.Module, make: Callable[[], LMTarget], lengths: Sequence[int] = ()) -> mx.Dtype:
    """Verify rows together, one by one and after a rollback. Return the type of the activations.

    `make` returns new targets of the model. Passes that end at each of `lengths` are verified, too: rotary
    embeddings, masks and scales of some models change with the position. Raises NotRewindable if rows differ,
    and BadCheckpoint for logits that are not numbers: all comparisons with them would pass.
    """
    prompt, rows = [1, 2, 3], [2, 1, 3, 1]  # tokens that every vocabulary has
    kept = 2  # rows that a rollback keeps
    target = make()
    with _types_given(target) as types:
        target.prefill(prompt)
    block = target.verify(mx.array(rows))
    target.commit(kept)
    again = target.verify(mx.array(rows[kept:]))
    target.commit(0)
    if target.rewind(len(prompt)) < len(prompt):
        target = make()
        target.prefill(prompt)
    types |= {array.dtype for state in target.caches.recurrent for array in state.arrays()}
    single = _one_by_one(target, rows)
    rounding = rounding_of(model)
    _compare(mx.concatenate([block, again]), mx.concatenate([single, single[kept:]]), rounding)
    _check_lengths(model, make, target, lengths, rounding)
    return next((dtype for dtype in (mx.bfloat16, mx.float16) if dtype in types), mx.float32)


@contextmanager
def _types_given(target: LMTarget) -> Iterator[set[mx.Dtype]]:
    """Collect the types of the keys and values that a model gives its caches, whatever type these store."""
    types, caches = set[mx.Dtype](), target.caches.attention

    def watch(cache: AttentionCache) -> None:
        write = cache.update_and_fetch

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            types.update((keys.dtype, values.dtype))
            return write(keys, values)

        vars(cache)["update_and_fetch"] = update_and_fetch

    for cache in caches:
        watch(cache)
    try:
        yield types
    finally:
        for cache in caches:
            del vars(cache)["update_and_fetch"]


def _check_lengths(
    model: nn.Module,
    make: Callable[[], LMTarget],
    target: LMTarget,
    lengths: Sequence[int],
    rounding: float,
) -> None:
    """Compare passes that end at each length, by the first layers that show all kinds of layers.

    They are compared more strictly, because they round less often. The whole model decides if they differ, or
    cannot run alone.
    """
    layers = len(decoder_of(model).layers)
    few = _layers_of_all_kinds(model, target) if lengths else layers
    for length in lengths:
        rows = [[2, 1], [2, 1, 3, 1, 2, 3, 1, 2]]
        if few < layers:
            try:
                with _only_layers(model, few):
                    _compare_at(target, length, rows[0], rounding / 10)
                continue
            except (NotRewindable, Mismatch, *POSITION_ERRORS) as error:
                rows = rows[isinstance(error, NotRewindable) :]
                target = make()
                target.prefill([1, 2, 3])
        _check_length(target, length, rows, rounding)


def _layers_of_all_kinds(model: nn.Module, target: LMTarget) -> int:
    """Return how many of the first layers have one of each kind: alike but for their weights."""
    layers, caches = decoder_of(model).layers, target.caches.layers
    if len(caches) != len(layers):
        return len(layers)
    windows = (cache.columns.window if isinstance(cache, AttentionCache) else 0 for cache in caches)
    described = [
        (_numbers(layer), type(cache), window)
        for layer, cache, window in zip(layers, caches, windows, strict=True)
    ]
    return 1 + max(described.index(layer) for layer in described)


def _numbers(layer: nn.Module) -> str:
    """Return the classes and numbers in a layer, with its angles and without its weights."""
    modules = list[Any]()
    for path, module in layer.named_modules():
        simple = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
        angles = {k: v.tolist() for k, v in module.items() if k[0] == "_" and isinstance(v, mx.array)}
        modules.append((path, type(module).__name__, sorted(simple.items()), sorted(angles.items())))
    return repr(sorted(modules, key=repr))


@contextmanager
def _only_layers(model: nn.Module, count: int) -> Iterator[None]:
    """Let a model have its first layers only, for checks."""
    decoder = decoder_of(model)
    name = next(name for name, value in decoder.owner.items() if value is decoder.layers)
    decoder.owner[name] = decoder.layers[:count]
    try:
        yield
    finally:
        decoder.owner[name] = decoder.layers


def _check_length(target: LMTarget, length: int, choices: list[list[int]], rounding: float) -> None:
    """Compare passes of a target that end at a length, with one of several choices of rows.

    A model that builds masks by itself may expect more rows before them: it is not compared.
    """
    for rows in choices:
        try:
            _compare_at(target, length, rows, rounding)
            return
        except POSITION_ERRORS:
            target.commit(0)
            return
        except NotRewindable:  # of two rows, one may have another expert
            if rows is choices[-1]:
                raise


def _compare_at(target: LMTarget, length: int, rows: list[int], rounding: float) -> None:
    """Compare rows that end at a length. The rows before them are few, and not of a text."""
    target.move_to(length - len(rows))
    block = target.verify(mx.array(rows))
    target.commit(0)
    _compare(block, _one_by_one(target, rows), rounding, f" at a length of {length} tokens")


def _one_by_one(target: LMTarget, rows: Sequence[int]) -> mx.array:
    """Return the logits [T, V] of rows in a pass for each."""
    single = []
    for row in rows:
        single.append(target.verify(mx.array([row])))
        target.commit(1)
    return mx.concatenate(single)


def _compare(actual: mx.array, right: mx.array, rounding: float, where: str = "") -> None:
    """Raise NotRewindable if logits [T, V] differ, and BadCheckpoint if they are not numbers.

    The median error counts. Single rows may have a larger one, because another expert is chosen at a near
    tie. A wrong mask or position spoils most rows.
    """
    right, actual = right.astype(mx.float32), actual.astype(mx.float32)
    if mx.isnan(right).any():
        raise BadCheckpoint(
            "the logits of this target are not numbers: its weights are damaged, or its activations exceed "
            "their type; download it again, or get it in bfloat16"
        )
    right, actual = (mx.where(mx.isinf(logits), 0, logits) for logits in (right, actual))  # of banned tokens
    largest = mx.maximum(mx.abs(right).max(axis=-1), 1e-30)  # of weights that are all zeros, 0
    errors = mx.abs(actual - right).max(axis=-1) / largest
    error = float(mx.sort(errors)[errors.size // 2])
    if not error <= rounding:  # nor where it is not a number
        raise NotRewindable(
            f"in this target a token depends on those that are read in the same pass{where} (logits differ "
            f"by {error:.1%}): drafts would change its text; use it with mlx-lm"
        )
