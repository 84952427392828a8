"""The result as a table for people, or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlx_spec.apps.roofline.arguments import Options
from mlx_spec.apps.roofline.models import Models, Named
from mlx_spec.hub.weights import WeightFormat
from mlx_spec.tuning.roofline import Prediction

if TYPE_CHECKING:
    from mlx_spec.apps.roofline.present import Present

COLUMNS = (
    # heading, its second line
    ("", "chip (GPU cores)"),
    ("nominal", "GB/s"),
    ("predicted", "ceiling tok/s"),
    ("predicted", "plain tok/s"),
    ("predicted", "best k"),
    ("predicted", "speed-up"),
    ("predicted", "tok/s"),
    ("predicted", "memory"),
)
ESTIMATED = "~ the chip's arithmetic rate is an estimate"


def table(options: Options, models: Models, predictions: Sequence[Prediction]) -> list[str]:
    """The lines about what is predicted."""
    rows = [[heading for heading, _ in COLUMNS], [unit for _, unit in COLUMNS], *map(_cells, predictions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"target {_described(models.target)}"]
    if models.drafter is not None:
        lines.append(f"drafter {_described(models.drafter)}")
    lines.append(f"acceptance {options.acceptance:g} at every position, context {options.context} tokens")
    lines += [*(f"note: {note}" for note in models.notes), ""]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    if any(prediction.chip.estimated for prediction in predictions):
        lines.append(ESTIMATED)
    return lines


def measurements(present: Present) -> list[str]:
    """The lines about the present device."""
    found = present.bandwidth
    lines = [
        "",
        f"this device: {present.device}{_variant(present)}",
        f"measured: memory read {found.read:.1f} GB/s, copy {found.copy:.1f} GB/s, "
        f"weights by a single row {found.row:.1f} GB/s",
    ]
    if present.plain is not None:
        lines.append(
            f"measured: plain decoding {present.plain.tokens_per_second:.1f} tokens/s, "
            f"{present.plain.achieved:.0%} of the measured bandwidth"
        )
    return lines if present.note is None else [*lines, f"note: {present.note}"]


def as_json(
    options: Options, models: Models, predictions: Sequence[Prediction], present: Present | None
) -> str:
    """One JSON object on one line; its keys say what is predicted and what measured."""
    content: dict[str, Any] = {
        "target": _model(models.target),
        "drafter": None if models.drafter is None else _model(models.drafter),
        "acceptance": options.acceptance,
        "context": options.context,
        "notes": models.notes,
        "predicted": [
            {**dataclasses.asdict(prediction), "tokens_per_second": prediction.tokens_per_second}
            for prediction in predictions
        ],
        "measured": None if present is None else dataclasses.asdict(present),
    }
    return json.dumps(content)


def _cells(prediction: Prediction) -> list[str]:
    chip = prediction.chip
    return [
        f"{chip.name} ({chip.gpu_cores}){' ~' if chip.estimated else ''}",
        f"{chip.bandwidth:.0f}",
        f"{prediction.ceiling:.1f}",
        f"{prediction.plain:.1f}",
        f"{prediction.num_draft_tokens}",
        f"{prediction.speed_up:.2f}×",
        f"{prediction.tokens_per_second:.1f}",
        "too small" if prediction.memory is None else f"fits {prediction.memory} GB",
    ]


def _variant(present: Present) -> str:
    if present.chip is None:
        return ", which is not in the table"
    return f", taken for the one with {present.chip.gpu_cores} GPU cores (MLX does not tell)"


def _described(named: Named) -> str:
    model = named.model
    layers = "" if model.layers is None else f", {model.layers} layers"
    cache = f" and {_size(model.kv_read)} of K/V" if model.kv_read else ""
    return (
        f"{named.name}: a token reads {_size(model.read)} of weights ({_stored(model.format)}{layers}){cache}"
    )


def _stored(format: WeightFormat) -> str:
    if format.group_size is None:
        return f"{format.bits}-bit floats"
    mode = "" if format.mode == "affine" else f" {format.mode}"
    return f"{format.bits}-bit{mode} in groups of {format.group_size}"


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def _model(named: Named) -> dict[str, Any]:
    return {"name": named.name, **dataclasses.asdict(named.model)}
