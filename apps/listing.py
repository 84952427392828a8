"""Build the table of models that `mlx-spec models` and `/model` show."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from mlx_spec import hub
from mlx_spec.checkpoint.files import human_bytes
from mlx_spec.checkpoint.memory import MemoryNeed, total_need
from mlx_spec.checkpoint.weights import decode_sizes
from mlx_spec.cli.command import table
from mlx_spec.device import memory_for_models
from mlx_spec.errors import SpecError
from mlx_spec.hub.catalog import SMOLLM2, PairSpec
from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair
from mlx_spec.hub.local import LocalModel, partners
from mlx_spec.hub.names import locate

from . import roofline


def listed(
    models: Sequence[LocalModel], chip: roofline.Chip | None = None, *, present: str = ""
) -> list[str]:
    """Return the lines of the table, with a mark on `present`, and a line for each model with a problem.

    The gain on `chip` is a column if something is known of it.
    """
    rows = [("model", "size", "fits here", "drafter", "expected gain")]
    for model in models:
        gain = None if chip is None or model.problem else expected_gain(model.name, chip)
        mark = "* " if model.name == present else ""
        cells = (
            mark + model.name,
            human_bytes(model.size),
            _fit(model, models),
            drafter_words(model, models),
        )
        rows.append((*cells, "" if gain is None else f"{gain:.2f} x"))
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]  # type: ignore[misc]  # nothing is known of this chip
    problems = [f"{model.name}: {model.problem}" for model in models if model.problem]
    return [*table(rows, right=(1,)), *problems]


def _fit(model: LocalModel, models: Sequence[LocalModel]) -> str:
    """Return in words whether a model fits, together with the drafter on this disk; "" if it is not known."""
    if model.found is None:
        return ""
    needs, info = [model.found.memory], model.found
    if isinstance(info, CheckpointInfo) and not info.kind:
        here = set(partners(model, models)[:1])
        needs += [other.found.memory for other in models if other.name in here and other.found]
    return fit(total_need(needs))


def fit(need: MemoryNeed) -> str:
    """Return in words whether models with this need fit the memory of this machine."""
    try:
        available = memory_for_models()
    except ImportError:
        return "no MLX"
    verdict = "yes" if need.total <= available else "no"
    return f"{verdict}, {human_bytes(need.total)} of {human_bytes(available)}"


def expected_gain(name: str, chip: roofline.Chip) -> float | None:
    """Return the multiple of plain decoding that a pair should reach; None if its acceptance is not known."""
    with suppress(SpecError, OSError, LookupError, ValueError):
        target, drafter = ((path and hub.on_disk(path)) for path in locate(PairSpec(name)).checkpoints)
        if target and drafter and (rate := roofline.pair_acceptance(name, drafter)) is not None:
            sizes = decode_sizes(target, 1024), decode_sizes(drafter, 1024)
            return max(roofline.gains(chip, *sizes, rate))
    return None


def drafter_words(model: LocalModel, models: Sequence[LocalModel]) -> str:
    """Return in words what drafts for a model, or what a drafter drafts for."""
    info = model.found
    if model.name == SMOLLM2:
        return "bundled"
    if isinstance(info, ConvertedPair):
        return "in the pair" if info.drafter else "lookup"
    here = partners(model, models)
    if isinstance(info, CheckpointInfo) and info.kind:
        return f"drafts for {', '.join(here) or 'none of these'}"
    if here:
        return here[0]
    missing = info.goes_with[:1] if isinstance(info, CheckpointInfo) else ()
    return f"{missing[0]}, which is not here" if missing else "lookup"
