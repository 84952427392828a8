"""Read a model with mlx-lm, for targets, draft models and conversions."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from glob import escape, glob
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, ChunkedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_spec.checkpoint.config import Checkpoint, integer, text_config
from mlx_spec.checkpoint.files import AGAIN, LOADING_ERRORS, one_line, shortened
from mlx_spec.checkpoint.headers import WEIGHTS
from mlx_spec.checkpoint.layouts import model_classes
from mlx_spec.checkpoint.rope_formulas import without_longrope
from mlx_spec.checkpoint.unread import source_of, unread_keys, unread_window
from mlx_spec.checkpoint.weights import gguf_dtype
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.ropes import apply_stated_ropes


def read_model(
    checkpoint: Checkpoint,
    *,
    lazy: bool = False,
    config: Mapping[str, Any] | None = None,
    classes: Any = model_classes,
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of a checkpoint and its config.json, repaired or overridden by `config`.

    `classes` finds the model's class. Raises BadCheckpoint for checkpoints that mlx-lm cannot read, and for
    integer weights, with which it would compute.
    """
    checkpoint.check_quantizer()
    folder, changes = checkpoint.folder, checkpoint.changes if config is None else dict(config)
    config = {**checkpoint.config, **changes}
    keys = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
    layers = integer(text_config(config), *keys) or 0
    tensors, many = len(checkpoint.headers.tensors), 1024
    if layers > max(tensors, many):  # to build them would take all memory
        raise BadCheckpoint(
            f"config.json of {folder} has {layers} layers, its weights are {tensors} tensors: they belong to "
            f"different models; {AGAIN}"
        )
    try:
        with _searchable(checkpoint) as searched:
            hidden = without_longrope(config)
            model, loaded = load_model(
                searched, lazy=lazy, model_config={**changes, **hidden}, get_model_classes=classes
            )
    except (*LOADING_ERRORS, SystemExit) as error:  # one file of mlx-lm exits if a package is missing
        raise BadCheckpoint(
            f"{folder} cannot be loaded as {config.get('model_type')}: {_obstacle(error)}"
        ) from error
    if (dtype := gguf_dtype(loaded)) is not None:  # scales and norms of the file are wider than activations
        model.set_dtype({"float16": mx.float16, "bfloat16": mx.bfloat16}.get(dtype, mx.float32))
    if checkpoint.is_fp8:
        loaded.pop("quantization_config")
    loaded |= {key: config[key] for key in hidden}
    apply_stated_ropes(model, loaded)
    if unread := _unread(model, loaded):
        print(
            f"mlx-lm does not read {', '.join(unread)} of config.json: the text may differ from the original "
            "model's",
            file=sys.stderr,
        )
    unquantized = (nn.Linear, nn.Embedding)  # quantized ones are of other classes
    for name, module in model.named_modules():
        if isinstance(module, unquantized) and mx.issubdtype(module.weight.dtype, mx.integer):
            raise BadCheckpoint(
                f"{folder}: {name}.weight holds {module.weight.dtype}, quantized in a way that mlx-lm does "
                "not know; get the model in full precision, or as mlx-community has it"
            )
    return model, loaded


def _unread(model: nn.Module, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that may change logits and that the classes of a model do not read."""
    # A part of a model may be a class of ours that extends mlx-lm's.
    modules = [sys.modules[base.__module__] for base in type(model).__mro__ if "mlx_lm." in base.__module__]
    source, windowed = "\n".join(map(source_of, modules)), RotatingKVCache | ChunkedKVCache
    caches: list[Any] = make_prompt_cache(model)
    windows = [
        any(isinstance(c, windowed) for c in (cache.caches if isinstance(cache, CacheList) else [cache]))
        for cache in caches
    ]
    return unread_keys(config, source) + unread_window(config, source, windows)


def _obstacle(error: BaseException) -> str:
    """Return the reason why mlx-lm does not load a model, and the way out."""
    text = one_line(error)
    way = "get a copy that mlx-lm converted, such as mlx-community has"
    if isinstance(error, SystemExit):
        return "mlx-lm's file for it needs a package that is not installed"
    if "required positional argument" in text:
        keys = re.findall(r"'([a-z_0-9]+)'", str(error))
        return f"config.json lacks {shortened(keys)}: {way}"
    if "'NoneType'" in text:  # mlx-lm reads a key without checking that it is there
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        if key := re.search(r"\b(?:args|config)\.([a-z_0-9]+)", line):
            return f"config.json lacks {key[1]}: {way}"
    if match := re.match(r"(Received|Missing) \d+ parameters[^:]*: *(.*)", " ".join(str(error).split())):
        names = shortened(match[2].removesuffix(".").replace(" ", "").split(","))
        return f"{'mlx-lm does not know' if match[1] == 'Received' else 'it lacks'} {names}: {way}"
    return text


@contextlib.contextmanager
def _searchable(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield a folder in which mlx-lm finds the files of a model, and no others.

    mlx-lm reads all files that match a pattern, and reads brackets in a path as a pattern, too.
    """
    folder, files = checkpoint.folder, checkpoint.headers.files
    if escape(str(folder)) == str(folder) and {*map(str, files)} == {*glob(str(folder / WEIGHTS))}:
        yield folder
        return
    with tempfile.TemporaryDirectory() as links:
        for number, file in enumerate(files):
            Path(links, f"model-{number:05}.safetensors").symlink_to(file.absolute())
        configs = ("config.json", "generation_config.json", "hf_quant_config.json")  # that mlx-lm reads
        for name in configs:
            if (folder / name).is_file():
                Path(links, name).symlink_to((folder / name).absolute())
        yield Path(links)
