"""Read a model by mlx-lm, for targets, draft models and conversions."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from glob import escape, glob
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from mlx_spec.checkpoint.config import WEIGHTS, StoredModel, read_checkpoint
from mlx_spec.checkpoint.layouts import model_classes

NEVER_INTEGERS = (nn.Linear, nn.Embedding)  # quantized ones are of other classes
CONFIGS = ("config.json", "generation_config.json", "hf_quant_config.json")  # that mlx-lm reads


def read_model(
    folder: Path,
    *,
    lazy: bool = False,
    config: Mapping[str, Any] | None = None,
    classes: Any = model_classes,
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model in `folder` and its config.json, repaired or overridden by `config`.

    `classes` finds the model's class. Raises what mlx-lm raises, and ValueError for weights that are
    integers, which it computes with. Raises BadCheckpoint for weights that no part can read.
    """
    checkpoint = read_checkpoint(folder)
    checkpoint.check_quantizer()
    given = checkpoint.changes if config is None else dict(config)
    with _searchable(checkpoint) as place:
        model, found = load_model(place, lazy=lazy, model_config=given, get_model_classes=classes)
    if checkpoint.is_fp8:
        found.pop("quantization_config")
    for name, module in model.named_modules():
        if isinstance(module, NEVER_INTEGERS) and mx.issubdtype(module.weight.dtype, mx.integer):
            raise ValueError(
                f"{name}.weight holds {module.weight.dtype}, quantized in a way that mlx-lm does not know; "
                "get the model in full precision, or as mlx-community has it"
            )
    return model, found


@contextlib.contextmanager
def _searchable(checkpoint: StoredModel) -> Iterator[Path]:
    """Yield a folder in which mlx-lm finds the files of a model, and no others.

    It reads all files of one pattern, and takes brackets in a path for a pattern.
    """
    folder, files = checkpoint.folder, checkpoint.headers.files
    if escape(str(folder)) == str(folder) and {*map(str, files)} == {*glob(str(folder / WEIGHTS))}:
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        for number, file in enumerate(files):
            Path(place, f"model-{number:05}.safetensors").symlink_to(file.absolute())
        for name in CONFIGS:
            if (folder / name).is_file():
                Path(place, name).symlink_to((folder / name).absolute())
        yield Path(place)
