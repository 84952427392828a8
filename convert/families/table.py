"""Name tables: which tensor of a checkpoint becomes which of ours, and of what shape it must be.

A table is a tuple of rows. `take` reads a checkpoint by one: nothing missing, every shape as the configs say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_spec.checkpoint import shortened
from mlx_spec.convert.families.family import Converted, Tensors
from mlx_spec.errors import BadCheckpoint

Sizes = Mapping[str, int]  # length of an axis by its name in the tables
Change = Callable[[mx.array, Sizes], tuple[mx.array, ...]]

# As other quantizers name their parts. Full precision is asked for instead: quantizing twice loses twice.
QUANTIZED = (".scales", ".qweight", ".weight_packed", ".weight_scale")
FP8_SCALE = "_scale_inv"  # one factor a block of an 8-bit weight (DeepSeek-V3)
FP8_BLOCK = 128
COMPUTED = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Row:
    """One line of a table. `{e}` in `source` counts the experts, which become the first axis of ours."""

    source: str
    ours: str  # several, blank-separated, where `change` makes several of one
    form: str  # the axes of the source tensor, blank-separated, by their names in Sizes
    change: Change | None = None
    optional: bool = False


@dataclass(frozen=True)
class Source:
    """A checkpoint under the names of a table."""

    tensors: Tensors
    names: Mapping[str, str]  # name in the table -> name in the checkpoint
    title: str  # for the errors: "the EAGLE-3 drafter"
    block: int = FP8_BLOCK


@dataclass(frozen=True)
class Taken:
    """What a table took out of a source."""

    tensors: dict[str, mx.array]  # by our names
    used: frozenset[str]  # by the names of the checkpoint
    origins: Mapping[str, str]  # ours -> theirs, of those that are one tensor of the checkpoint, unchanged


def same(name: str, form: str, *, optional: bool = False) -> Row:
    """A row for a tensor that keeps its name."""
    return Row(name, name, form, optional=optional)


def under(source: str, ours: str, rows: Iterable[Row]) -> tuple[Row, ...]:
    """`rows` with prefixes before both names."""
    return tuple(
        replace(row, source=source + row.source, ours=" ".join(ours + name for name in row.ours.split()))
        for row in rows
    )


def spell(
    title: str, tensors: Tensors, config: Mapping[str, Any], prefixes: Iterable[tuple[str, str]] = ()
) -> Source:
    """`tensors` with each of `prefixes` (theirs, ours) replaced in turn. Raises BadCheckpoint for a clash."""
    names: dict[str, str] = {}
    for name in tensors:
        spelled = name
        for theirs, ours in prefixes:
            spelled = ours + spelled.removeprefix(theirs) if spelled.startswith(theirs) else spelled
        if spelled in names:
            raise BadCheckpoint(f"{title} holds {spelled} twice, as {names[spelled]} and as {name}")
        names[spelled] = name
    quantization = config.get("quantization_config")
    blocks = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    block = int(blocks[0]) if blocks else FP8_BLOCK
    return Source({new: tensors[old] for new, old in names.items()}, names, title, block)


def take(rows: Iterable[Row], source: Source, sizes: Sizes) -> Taken:
    """The tensors of `rows` by our names, unread.

    Raises BadCheckpoint: tensors that are missing, quantized already, or of another shape than `sizes` says.
    """
    rows = tuple(row for row in rows if not row.optional or _sources(row, sizes)[0] in source.tensors)
    wanted = {name: row for row in rows for name in _sources(row, sizes)}
    _refuse_quantized(source, wanted)
    missing = [name for name in wanted if name not in source.tensors]
    if missing:
        raise BadCheckpoint(
            f"{source.title} lacks {len(missing)} of {len(wanted)} tensors ({shortened(missing)}): "
            "download it again, or take a complete checkpoint"
        )
    _refuse_shapes(source, wanted, sizes)
    tensors: dict[str, mx.array] = {}
    for row in rows:
        parts = [_read(source, name) for name in _sources(row, sizes)]
        whole = mx.stack(parts) if "{e}" in row.source else parts[0]
        changed = row.change(whole, sizes) if row.change else (whole,)
        tensors.update(zip(row.ours.split(), changed, strict=True))
    scales = {name + FP8_SCALE for name in wanted if name + FP8_SCALE in source.tensors}
    used = frozenset(source.names[name] for name in wanted.keys() | scales)
    origins = {row.ours: source.names[row.source] for row in rows if row.source in wanted and not row.change}
    return Taken(tensors, used, origins)


def finished(source: Source, converted: Converted) -> Converted:
    """`converted`, if it accounts for every tensor of `source`. Raises BadCheckpoint for the others."""
    computed = {old: "computed from config.json" for new, old in source.names.items() if COMPUTED in new}
    dropped = {**computed, **converted.dropped}
    left = sorted(set(source.names.values()) - converted.used - dropped.keys())
    if left:
        raise BadCheckpoint(
            f"{source.title} has tensors that its family {converted.config['model_type']} does not know, "
            f"{len(left)} of {len(source.names)} ({shortened(left)}): it is of another kind, or newer than "
            "this version"
        )
    return replace(converted, dropped=dropped)


def all_but(*kept: str) -> Callable[[str], bool]:
    """A rule for `quantizable`: weights, but no norms and none whose name ends in one of `kept`."""

    def quantizable(name: str) -> bool:
        parts = name.split(".")
        return parts[-1] == "weight" and not any("norm" in part for part in parts) and not name.endswith(kept)

    return quantizable


def _sources(row: Row, sizes: Sizes) -> list[str]:
    if "{e}" not in row.source:
        return [row.source]
    return [row.source.replace("{e}", str(expert)) for expert in range(sizes["experts"])]


def _read(source: Source, name: str) -> mx.array:
    """A tensor; from its 8-bit form where it has one factor a block, as bfloat16."""
    tensor = source.tensors[name]
    scales = source.tensors.get(name + FP8_SCALE)
    if scales is None:
        return tensor
    rows, columns = tensor.shape
    factors = mx.repeat(mx.repeat(scales, source.block, axis=0), source.block, axis=1)[:rows, :columns]
    return (mx.from_fp8(tensor, dtype=mx.float32) * factors).astype(mx.bfloat16)


def _refuse_quantized(source: Source, wanted: Mapping[str, Row]) -> None:
    stems = {name.removesuffix(".weight") for name in wanted}
    marks = [
        name
        for name in source.tensors
        for end in QUANTIZED
        if name.endswith(end) and name[: -len(end)] in stems
    ]
    present = [name for name in wanted if name in source.tensors and name.endswith(".weight")]
    marks += [
        name
        for name in present
        if mx.issubdtype(source.tensors[name].dtype, mx.integer) and name + FP8_SCALE not in source.tensors
    ]
    if marks:
        raise BadCheckpoint(
            f"{source.title} is quantized already ({shortened(sorted(marks))}): "
            "convert it from the original repository, in full precision"
        )


def _refuse_shapes(source: Source, wanted: Mapping[str, Row], sizes: Sizes) -> None:
    found = {name: tuple(source.tensors[name].shape) for name in wanted}
    said = {name: _shape(row, sizes) for name, row in wanted.items()}
    wrong = [name for name in wanted if found[name] != said[name]]
    for first in wrong:
        for second in wrong:
            if first < second and found[first] == said[second] and found[second] == said[first]:
                raise BadCheckpoint(
                    f"{source.title} has {first} and {second} swapped: they are {list(found[first])} and "
                    f"{list(found[second])}, by the configs {list(said[first])} and {list(said[second])}"
                )
    if wrong:
        name = wrong[0]
        axes = " × ".join(wanted[name].form.split())
        turned = ", as if transposed" if found[name] == said[name][::-1] else ""
        more = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
        raise BadCheckpoint(
            f"{source.title} has {name} of shape {list(found[name])}{turned}, by the configs it is "
            f"{list(said[name])} ({axes}){more}: weights and config.json belong to different models"
        )


def _shape(row: Row, sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[axis] for axis in row.form.split())
