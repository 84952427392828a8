"""Drafter families and name tables: which source tensor becomes which of ours.

A table is a tuple of rows. `take` reads a checkpoint by one: nothing missing, every shape as the configs say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.checkpoint import KEY, Conventions, required
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.hub.checkpoint import text_config
from mlx_spec.hub.files import shortened

Tensors = Mapping[str, mx.array]  # lazy, by the names of the checkpoint
Config = Mapping[str, Any]  # of a config.json
Sizes = Mapping[str, int]  # length of an axis by its name in the tables
Change = Callable[[mx.array, Sizes], tuple[mx.array, ...]]

# As other quantizers name their parts. Full precision is asked for instead: quantizing twice loses twice.
QUANTIZED = (".scales", ".qweight", ".weight_packed", ".weight_scale")
FP8_SCALE = "_scale_inv"  # one factor a block of an 8-bit weight (DeepSeek-V3)
FP8_BLOCK = 128
COMPUTED = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Converted:
    """A drafter in our form. Every tensor of the source is in `used` or in `dropped`."""

    config: dict[str, Any]  # config.json to write; its model_type is the name of the family
    tensors: dict[str, mx.array]  # lazy, by our names
    used: frozenset[str]  # source tensors that went in
    dropped: Mapping[str, str]  # source tensor -> why it is rightly left out
    quantizable: Callable[[str], bool]  # by our names
    notes: tuple[str, ...] = ()  # conventions found, for pair.json


@dataclass(frozen=True)
class Family:
    """One drafter family."""

    name: str  # our model_type
    # (tensors, config.json, that of the target). Raises BadCheckpoint and Mismatch.
    convert: Callable[[Tensors, Config, Config], Converted]
    kind: str | None = None  # the kind of hub.catalog that it converts
    # (config.json, names of the tensors), for families that live inside a target
    recognizes: Callable[[Config, Collection[str]], bool] | None = None


@dataclass(frozen=True)
class Row:
    """One line of a table. `{e}` numbers the experts, the first axis of ours."""

    source: str
    ours: str  # several, blank-separated, where `change` makes several of one
    form: str  # the axes of the source tensor, blank-separated, by their names in Sizes
    change: Change | None = None
    optional: bool = False


@dataclass(frozen=True)
class PublishedTensors:
    """A checkpoint under the names of a table."""

    tensors: Tensors
    names: Mapping[str, str]  # name in the table -> name in the checkpoint
    title: str  # for the errors: "the EAGLE-3 drafter"
    block: int = FP8_BLOCK


@dataclass(frozen=True)
class Taken:
    """The tensors that a table took from a source."""

    tensors: dict[str, mx.array]  # by our names
    used: frozenset[str]  # by the names of the checkpoint
    origins: Mapping[str, str]  # our name -> theirs, of tensors taken unchanged


def same(name: str, form: str, *, optional: bool = False) -> Row:
    """Return a row for a tensor that keeps its name."""
    return Row(name, name, form, optional=optional)


def under(source: str, ours: str, rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return `rows` with prefixes before both names."""
    return tuple(
        replace(row, source=source + row.source, ours=" ".join(ours + name for name in row.ours.split()))
        for row in rows
    )


def spell(
    title: str, tensors: Tensors, config: Mapping[str, Any], prefixes: Iterable[tuple[str, str]] = ()
) -> PublishedTensors:
    """Replace `prefixes` (theirs, ours) of names. Raises BadCheckpoint for a clash."""
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
    return PublishedTensors({new: tensors[old] for new, old in names.items()}, names, title, block)


def take(rows: Iterable[Row], source: PublishedTensors, sizes: Sizes) -> Taken:
    """Return the tensors of `rows` by our names, unread.

    Raises BadCheckpoint for tensors that are missing, quantized already, or of another shape than in `sizes`.
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


def finished(source: PublishedTensors, converted: Converted) -> Converted:
    """Return it: what is dropped was not used. Raises BadCheckpoint for tensors not accounted for."""
    computed = {old: "computed from config.json" for new, old in source.names.items() if COMPUTED in new}
    dropped = {**computed, **converted.dropped}
    left = sorted(set(source.names.values()) - converted.used - dropped.keys())
    if left:
        raise BadCheckpoint(
            f"{source.title} has tensors that its family {converted.config['model_type']} does not know, "
            f"{len(left)} of {len(source.names)} ({shortened(left)}): it is of another kind, or newer than "
            "this version"
        )
    return replace(converted, used=converted.used - converted.dropped.keys(), dropped=dropped)


def all_but(*kept: str) -> Callable[[str], bool]:
    """Return a rule: quantize weights, but no norms and no name that ends in `kept`."""

    def quantizable(name: str) -> bool:
        parts = name.split(".")
        return parts[-1] == "weight" and not any("norm" in part for part in parts) and not name.endswith(kept)

    return quantizable


def _sources(row: Row, sizes: Sizes) -> list[str]:
    if "{e}" not in row.source:
        return [row.source]
    return [row.source.replace("{e}", str(expert)) for expert in range(sizes["experts"])]


def _read(source: PublishedTensors, name: str) -> mx.array:
    """Return a tensor; an 8-bit one with a factor a block becomes bfloat16."""
    tensor = source.tensors[name]
    scales = source.tensors.get(name + FP8_SCALE)
    if scales is None:
        return tensor
    rows, columns = tensor.shape
    factors = mx.repeat(mx.repeat(scales, source.block, axis=0), source.block, axis=1)[:rows, :columns]
    return (mx.from_fp8(tensor, dtype=mx.float32) * factors).astype(mx.bfloat16)


def _refuse_quantized(source: PublishedTensors, wanted: Mapping[str, Row]) -> None:
    marks = {name.removesuffix(".weight") + end for name in wanted for end in QUANTIZED} & set(source.tensors)
    for name in source.tensors.keys() & wanted.keys():
        is_packed = name.endswith(".weight") and mx.issubdtype(source.tensors[name].dtype, mx.integer)
        if is_packed and name + FP8_SCALE not in source.tensors:
            marks.add(name)
    if marks:
        raise BadCheckpoint(
            f"{source.title} is quantized already ({shortened(sorted(marks))}): "
            "convert it from the original repository, in full precision"
        )


def _refuse_shapes(source: PublishedTensors, wanted: Mapping[str, Row], sizes: Sizes) -> None:
    found = {name: tuple(source.tensors[name].shape) for name in wanted}
    said = {name: _shape(row, sizes) for name, row in wanted.items()}
    wrong = [name for name in wanted if found[name] != said[name]]
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


# --- configs

TARGET = "the target's config.json"
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_interleave")
STORAGE_KEYS = ("quantization", "quantization_config", "vision_config", "audio_config", "auto_map")
OTHER_DRAFTER = "use the drafter made for this target"


def config_of(model_type: str, conventions: Conventions, target: Config, **fields: Any) -> dict[str, Any]:
    """Return a config.json: family, conventions, the target it fits, and `fields`."""
    text = text_config(target)
    fits = {key: text.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    if "model_type" in target:
        fits["model_type"] = target["model_type"]
    rope = {key: text[key] for key in ROPE_KEYS if text.get(key) is not None}
    return {"model_type": model_type, KEY: asdict(conventions), "target": {**fits, "rope": rope}, **fields}


def own_config(config: Config) -> dict[str, Any]:
    """Return the config of a drafter's layers, without the keys of its storage."""
    return {key: value for key, value in text_config(config).items() if key not in STORAGE_KEYS}


def layer_config(config: Config) -> dict[str, Any]:
    """Return the config of a drafter's layers, nested in the form of speculators or not."""
    nested = config.get("transformer_layer_config")
    return dict(nested) if isinstance(nested, Mapping) else own_config(config)


def size(config: Config, key: str, title: str) -> int:
    """Return `config[key]`. Raises BadCheckpoint if it is absent or no integer."""
    return required(config, key, int, f"config.json of {title}")


def target_size(target: Config, key: str) -> int:
    """Return a size of the target. Raises BadCheckpoint if its config.json lacks it."""
    return required(text_config(target), key, int, TARGET)


def check_fit(title: str, ours: Mapping[str, int], target: Config) -> None:
    """Compare sizes with the target's config.json. Raises Mismatch."""
    for key, value in ours.items():
        theirs = target_size(target, key)
        if value != theirs:
            what = key.replace("_", " ")
            raise Mismatch(
                f"{title} is made for a target of {what} {value}, this one has {theirs}: {OTHER_DRAFTER}"
            )


def check_layers(title: str, capture: Iterable[int], target: Config) -> None:
    """Check that captured layers exist. Raises Mismatch and BadCheckpoint.

    The input of layer 0 counts as output -1 while layer ids are read. It is never recorded: for the target's
    hooks, and for Python, -1 is the last.
    """
    layers = target_size(target, "num_hidden_layers")
    for index in capture:
        if index == -1:
            raise BadCheckpoint(
                f"{title} reads the embedding of its target (the input of layer 0), and only outputs of "
                "layers can be captured: use a drafter that reads those"
            )
        if not 0 <= index < layers:
            raise Mismatch(
                f"{title} reads layer {index} of its target, this one has {layers} layers: {OTHER_DRAFTER}"
            )


# --- reduced vocabularies

INVERSE_MAP = "the inverse of d2t, checked against it"


def draft_ids(title: str, d2t: mx.array, t2d: mx.array | None, vocab_size: int) -> tuple[mx.array, str]:
    """Return the target's id of each draft id, int32 [draft vocabulary], and a note.

    Checkpoints store offsets (id + d2t[id], as the reference) and rarely ids. Raises BadCheckpoint if neither
    reading gives distinct ids that t2d marks, Mismatch for ids outside the target's vocabulary.
    """
    stored = np.array(d2t, dtype=np.int64)
    marked = None if t2d is None else np.flatnonzero(np.array(t2d))
    for ids, note in ((stored + np.arange(stored.size), "d2t holds offsets"), (stored, "d2t holds ids")):
        distinct = np.unique(ids)
        if distinct.size != ids.size or (marked is not None and not np.array_equal(distinct, marked)):
            continue
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= vocab_size:
            raise Mismatch(
                f"{title} drafts the tokens {lowest} to {highest}, the target knows {vocab_size}: "
                f"{OTHER_DRAFTER}"
            )
        return mx.array(ids.astype(np.int32)), note
    theirs = "" if marked is None else f", or not the {marked.size} that t2d marks"
    raise BadCheckpoint(
        f"{title} has a d2t of {stored.size} entries that names some token twice{theirs}: "
        "download it again, or take another checkpoint"
    )


def resolve_map(
    source: PublishedTensors, tensors: dict[str, mx.array], vocab_size: int
) -> tuple[list[str], dict[str, str]]:
    """Replace d2t and t2d in `tensors` by draft_ids. Return notes, and why source tensors are dropped."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    notes = []
    if d2t is not None:
        tensors["draft_ids"], note = draft_ids(source.title, d2t, t2d, vocab_size)
        notes.append(note)
    reasons = dict.fromkeys(("verifier_norm.weight", "verifier_lm_head.weight"), "the target's own")
    reasons |= {"t2d": INVERSE_MAP} if t2d is not None else {}
    return notes, {source.names[name]: why for name, why in reasons.items() if name in source.names}
