"""Read a model by mlx-lm, for targets, draft models and conversions."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes, load_config, load_model

from mlx_spec.hub.catalog import repairs

NEVER_INTEGERS = (nn.Linear, nn.Embedding)  # quantized ones are of other classes


def read_model(
    folder: Path, *, lazy: bool = False, config: Mapping[str, Any] | None = None, classes: Any = _get_classes
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model in `folder` and its config.json, repaired or overridden by `config`.

    `classes` finds the model's class. Raises what mlx-lm raises, and ValueError for weights that are
    integers, which it computes with.
    """
    given = dict(repairs(load_config(folder)) if config is None else config)
    with _searchable(folder) as place:
        model, found = load_model(place, lazy=lazy, model_config=given, get_model_classes=classes)
    for name, module in model.named_modules():
        if isinstance(module, NEVER_INTEGERS) and mx.issubdtype(module.weight.dtype, mx.integer):
            raise ValueError(
                f"{name}.weight holds {module.weight.dtype}, quantized in a way that mlx-lm does not know; "
                "get the model in full precision, or as mlx-community has it"
            )
    return model, found


@contextlib.contextmanager
def _searchable(folder: Path) -> Iterator[Path]:
    """Yield a path of `folder` that mlx-lm finds weights in: brackets in a path are a pattern to it."""
    if escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        link = Path(place, "model")
        link.symlink_to(folder.absolute())
        yield link
