"""Read the tower of a checkpoint: which tensors are its own, and what becomes of them."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from mlx_spec.checkpoint.config import Checkpoint, text_config
from mlx_spec.checkpoint.files import LOADING_ERRORS, one_line
from mlx_spec.checkpoint.owners import tower_names
from mlx_spec.errors import BadCheckpoint, NoVision
from mlx_spec.vision import gemma3, gemma4, qwen

VISION_FAMILIES = {
    "gemma3": gemma3.FAMILY,
    "gemma4": gemma4.WITH_TOWER,
    "gemma4_unified": gemma4.WITHOUT_TOWER,
    "qwen3_5": qwen.FAMILY,
    "qwen3_5_moe": qwen.FAMILY,
}


def tower_tensors(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Return the tensors of a tower as they are stored, unread, under the names that mlx-lm passes over.

    These are without "model." in front, and the tower of Qwen is `vision_tower`, as mlx-vlm has it.
    Empty if there is no tower that is known here. Raises BadCheckpoint for damaged files.
    """
    names = set(tower_names(checkpoint.config, checkpoint.headers.tensors))
    stored = checkpoint.tensors() if names else {}
    renamed = {
        name: re.sub(r"^(model\.)?(visual\.)?", lambda m: "vision_tower." if m[2] else "", name)
        for name in names
    }
    return {renamed[name]: array for name, array in stored.items() if name in names}


def read_tower(checkpoint: Checkpoint) -> Any:
    """Return the tower of a checkpoint of a known family. Its weights are read when they are used.

    Raises NoVision if they are others than config.json says.
    """
    try:
        return _read(checkpoint)
    except (BadCheckpoint, *LOADING_ERRORS) as error:
        raise NoVision(
            f"{checkpoint.folder} holds another vision tower than its config.json says ({one_line(error)}): "
            "get the model again"
        ) from error


def _read(checkpoint: Checkpoint) -> nn.Module:
    config = checkpoint.config
    family = VISION_FAMILIES[config["model_type"]]
    tower = family.tower(config["vision_config"], text_config(config)["hidden_size"])
    weights = dict(family.renamed(*item) for item in tower_tensors(checkpoint).items())
    expected = dict(tree_flatten(tower.parameters()))
    unused = r"\.(input|output)_(min|max)$"  # ranges that are stored where config.json clips nothing
    weights = {name: a for name, a in weights.items() if name in expected or not re.search(unused, name)}

    def settings(path: str, module: nn.Module) -> bool | dict[str, Any]:
        return dict(infer_quant_config(path, module, weights)) if f"{path}.scales" in weights else False

    nn.quantize(tower, class_predicate=settings)
    tower.load_weights(list(weights.items()))
    for name, module in tower.named_modules():
        if isinstance(module, nn.Linear) and mx.issubdtype(module.weight.dtype, mx.integer):
            raise ValueError(f"{name} is quantized in a way that mlx-lm does not know")
    return tower
