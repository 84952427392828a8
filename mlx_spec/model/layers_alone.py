"""Run single layers of a model alone, with random rows, as a pass of several rows or of one calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as mlx_lm_base

from mlx_spec.types import MAX_DRAFT_TOKENS

Run = Callable[..., mx.array]


def bits(array: mx.array) -> mx.array:
    """Return an array as unsigned integers."""
    return array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size])


def _same(actual: mx.array, expected: mx.array) -> bool:
    return bool(mx.array_equal(bits(actual), bits(expected[: actual.shape[0]])))


@dataclass(frozen=True)
class Layer:
    """A linear layer, its experts, or the LM head, with random inputs."""

    name: str
    run: Run
    inputs: list[mx.array]
    axis: int  # of the rows, in inputs and in the output

    def plain(self, base: int) -> mx.array:
        """Return each row of plain passes of `base` rows."""
        rows = range(self.inputs[0].shape[self.axis])
        return mx.concatenate([self._rows([row] * base)[:1] for row in rows])

    def agrees(self, T: int, plain: mx.array) -> bool:
        """Return True if passes of T rows have the bits of plain ones."""
        starts = range(0, plain.shape[0] - T + 1, T)
        return _same(mx.concatenate([self._rows(range(start, start + T)) for start in starts]), plain)

    def agrees_side_by_side(self, T: int, plain: mx.array) -> bool:
        """Return True if one row of each of T sequences has these bits, too."""
        if self.axis != 1 or self.inputs[0].shape[0] != 1:  # this layer sees the rows of a batch as it sees T
            return True
        starts = range(0, plain.shape[0] - T + 1, T)
        blocks = [self._rows(range(start, start + T), side_by_side=True) for start in starts]
        return _same(mx.concatenate(blocks), plain)

    def _rows(self, index: Sequence[int], *, side_by_side: bool = False) -> mx.array:
        """Return the outputs [rows, F] of one call with these rows."""
        inputs = [mx.take(array, mx.array(list(index)), axis=self.axis) for array in self.inputs]
        out = self.run(*(array.swapaxes(0, 1) for array in inputs) if side_by_side else inputs)
        return mx.moveaxis(out, 0 if side_by_side else self.axis, 0).reshape(len(index), -1)


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention, with random queries and keys."""

    heads: int  # query heads for each head of keys
    widths: tuple[int, int]  # of keys and values
    dtype: mx.Dtype
    run: Run  # of queries, keys, values and a mask

    def over(self, size: int, window: int | None = None, outputs: int = 2**14) -> RandomRows:
        """Return rows of passes after `size` tokens, with about `outputs` numbers."""
        rows = MAX_DRAFT_TOKENS + 1
        keys = size + rows + 2
        enough = -(-outputs // (rows * self.heads * self.widths[1]))
        most = 2**18 if mx.default_device().type == mx.gpu else 2**12  # keys: 128 MB, or seconds of a CPU
        groups = max(min(enough, most // keys), 1)

        def made(heads: int, rows: int, width: int) -> mx.array:
            return mx.random.normal((1, heads, rows, width)).astype(self.dtype)

        key_width, width = self.widths
        arrays = made(groups * self.heads, rows + 1, key_width), made(groups, keys, key_width)
        return RandomRows(self.run, *arrays, made(groups, keys, width), size, window)


@dataclass(frozen=True)
class RandomRows:
    """Random rows of attention after `size` tokens; row j is at position `size + j`."""

    run: Run
    queries: mx.array  # [1, heads, rows, D]
    keys: mx.array  # [1, heads of keys, positions, D]
    values: mx.array
    size: int
    window: int | None

    def plain(self, base: int) -> mx.array:
        return mx.concatenate([self._rows(row, base)[:1] for row in range(self.queries.shape[2] - 1)])

    def agrees(self, T: int, plain: mx.array, *, has_mask: bool = False) -> bool:
        """Return True if a pass of T rows has the bits of plain ones. With `has_mask` as in a batch."""
        return _same(self._rows(0, T, has_mask=has_mask), plain)

    def _rows(self, start: int, T: int, *, has_mask: bool = False) -> mx.array:
        """Return T rows [T, heads * D] of a pass that begins at row `start`."""
        first, end, low = self.size + start, self.size + start + T, 0
        mask: mx.array | str | None = "causal" if T > 1 else None
        if self.window is not None or has_mask:
            window = self.window or end
            low = max(first - window + 1, 0) // 128 * 128  # a view begins at a multiple of 128
            position, key = mx.arange(first, end)[:, None], mx.arange(low, end)
            mask = (key <= position) & (key > position - window)
        keys, values = self.keys[:, :, low:end], self.values[:, :, low:end]
        out = self.run(self.queries[:, :, start : start + T], keys, values, mask)
        return out.transpose(2, 0, 1, 3).reshape(T, -1)


# --- the layers of a model


@dataclass(frozen=True)
class Call:
    """A call of a layer's method, or of a function of attention."""

    owner: Any
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]


class Recorded(nn.Module):
    """A layer that records how it is called. Subclasses have a list of calls."""

    calls: list[Call]

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append(Call(self, "__call__", args, options))
        return super().__call__(*args, **options)

    def as_linear(self, x: mx.array) -> Any:
        """Act as the LM head whose weights are the embedding's."""
        self.calls.append(Call(self, "as_linear", (x,), {}))
        return super().as_linear(x)  # type: ignore[misc]


def recorded(
    model: nn.Module, run_pass: Callable[[], object], rows: int, outputs: int = 2**16
) -> tuple[list[Layer], list[AttentionKind]]:
    """Return each distinct layer and each kind of attention that a pass of `rows` rows calls.

    A layer gets random rows for about `outputs` numbers: kernels that differ change 1 in 10,000 of them.
    """
    layers, attentions = dict[object, Layer](), dict[object, AttentionKind]()
    with _recording(model) as calls:
        run_pass()
    for call in calls:
        if isinstance(call.owner, nn.Module):
            axis = _row_axis(call.args[0], rows)
            key = _kernel_key(call.owner), call.method
            if axis is not None and key not in layers:
                layers[key] = _layer(call, rows, axis, outputs)
        else:
            attention = _attention(call)
            attentions[attention.heads, attention.widths, call.method] = attention
    return list(layers.values()), list(attentions.values())


@contextmanager
def _recording(model: nn.Module) -> Iterator[list[Call]]:
    """Record the calls of all layers with a matrix, and of attention."""
    calls = list[Call]()
    owned = [m for m in model.modules() if isinstance(w := m.get("weight"), mx.array) and w.ndim > 1]
    classes = [type(module) for module in owned]
    functions = [(mx.fast, "scaled_dot_product_attention")]
    functions += [(mlx_lm_base, "quantized_scaled_dot_product_attention")]
    originals = [vars(owner)[name] for owner, name in functions]

    def spy(original: Run, owner: Any, name: str, *args: Any, **options: Any) -> mx.array:
        calls.append(Call(owner, name, args, options))
        return original(*args, **options)

    for module, module_class in zip(owned, classes, strict=True):
        module.__class__ = type(module_class.__name__, (Recorded, module_class), {"calls": calls})
    for (owner, name), original in zip(functions, originals, strict=True):
        setattr(owner, name, partial(spy, original, owner, name))
    try:
        yield calls
    finally:
        for module, module_class in zip(owned, classes, strict=True):
            module.__class__ = module_class
        for (owner, name), original in zip(functions, originals, strict=True):
            setattr(owner, name, original)


def _kernel_key(module: nn.Module) -> object:
    """Return what layers that take the same kernels have in common."""
    arrays = ((name, a.shape, a.dtype) for name, a in sorted(module.items()) if isinstance(a, mx.array))
    return (
        type(module).__name__,
        *arrays,
        *(vars(module).get(name) for name in ("group_size", "bits", "mode")),
    )


def _row_axis(x: Any, rows: int) -> int | None:
    """Return the axis of an input along which the rows of a pass lie; None if it is not an input of rows."""
    if not isinstance(x, mx.array) or not mx.issubdtype(x.dtype, mx.floating):
        return None
    axes = (1, x.ndim - 2, 0)
    return next((axis for axis in axes if axis < x.ndim - 1 and x.shape[axis] == rows), None)


def _layer(call: Call, rows: int, axis: int, outputs: int) -> Layer:
    """Return a layer with random inputs of the shapes of a call."""
    module, weight = call.owner, call.owner["weight"]
    run = getattr(module, call.method)
    width = run(*call.args, **call.options).size // rows
    longest = MAX_DRAFT_TOKENS + 1
    drawn = min(max(outputs // width, longest), 3 * longest)
    inputs = list[mx.array]()
    for array in call.args:
        shape = [*array.shape[:axis], drawn, *array.shape[axis + 1 :]]
        if mx.issubdtype(array.dtype, mx.floating):
            inputs.append(mx.random.normal(shape).astype(array.dtype))
        else:  # the experts of each row
            inputs.append(mx.random.randint(0, weight.shape[0], shape).astype(array.dtype))
    bits = f", {module.bits} bits" if "scales" in module else ""
    what = "the experts" if weight.ndim > 2 and len(inputs) > 1 else "a layer"
    name = f"{what} of {call.args[0].shape[-1]} x {weight.shape[-2]}{bits}, in {_words(call.args[0].dtype)}"
    return Layer(name, partial(run, **call.options), inputs, axis)


def _attention(call: Call) -> AttentionKind:
    queries, keys, values = call.args[:3]
    heads = queries.shape[1]
    if call.owner is mlx_lm_base:  # packed keys and values: weights, scales, biases
        group_size, bits = call.options["group_size"], call.options["bits"]
        key_heads, width = keys[0].shape[1], values[0].shape[-1] * 32 // bits
        run: Run = partial(_quantized, group_size, bits)
    else:
        key_heads, width = keys.shape[1], values.shape[-1]
        run = partial(_fused, call.options.get("sinks") is not None)
    return AttentionKind(heads // key_heads, (queries.shape[-1], width), queries.dtype, run)


def _fused(
    has_sinks: bool, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
) -> mx.array:
    sinks = mx.zeros((queries.shape[1],), queries.dtype) if has_sinks else None
    scale = queries.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _quantized(
    group_size: int,
    bits: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | str | None,
) -> mx.array:
    packed: Any = [mx.quantize(array, group_size=group_size, bits=bits) for array in (keys, values)]
    attend: Run = mlx_lm_base.quantized_scaled_dot_product_attention
    scale = queries.shape[-1] ** -0.5
    return attend(queries, *packed, scale=scale, mask=mask, group_size=group_size, bits=bits)


def _words(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
