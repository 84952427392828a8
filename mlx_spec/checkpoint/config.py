"""Read a checkpoint for load, inspect and convert: config.json and the headers of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_spec.checkpoint.families import MANIFEST, Config, mlx_lm_module
from mlx_spec.checkpoint.files import AGAIN, read_object
from mlx_spec.checkpoint.headers import (
    GGUF,
    INDEX,
    WEIGHTS,
    Headers,
    TensorInfo,
    header_bytes,
    indexed_tensors,
    other_format,
    read_headers,
)
from mlx_spec.checkpoint.quantizers import is_fp8, obstacle, quantizer
from mlx_spec.checkpoint.repairs import TEXT_CONFIGS, decode_floats, repair_config
from mlx_spec.checkpoint.ropes import ALWAYS_LONG, is_split, stated_ropes, stretch_of
from mlx_spec.errors import BadCheckpoint, NotFound

__all__ = [
    "GGUF",
    "INDEX",
    "TOKENIZERS",
    "WEIGHTS",
    "Headers",
    "StoredModel",
    "TensorInfo",
    "check_weights",
    "context_length",
    "critical_lengths",
    "fingerprint",
    "has_weights",
    "indexed_tensors",
    "integer",
    "other_format",
    "read_checkpoint",
    "read_config",
    "read_headers",
    "read_published",
    "text_config",
    "vocab_size",
]

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is enough


@dataclass(frozen=True)
class StoredModel:
    """A folder with a config.json and weights, complete or not."""

    folder: Path
    published: Config  # config.json as it is in the file
    headers: Headers

    @cached_property
    def is_fp8(self) -> bool:
        """Return True if the weights are FP8 and are dequantized when they are read."""
        return is_fp8(self.published, self.headers.tensors)

    @property
    def quantizer(self) -> str | None:
        """Return the program that quantized the weights; None for mlx-lm, or if they are not quantized."""
        return quantizer(self.published, self.headers.tensors)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return config.json as mlx-lm reads it. Missing sizes come from the weights."""
        try:
            found = repair_config(self.published, self.headers.tensors)
        except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise BadCheckpoint(f"{self.folder / 'config.json'} is malformed ({error}): {AGAIN}") from error
        if self.is_fp8:
            for part in (found, *(found[key] for key in TEXT_CONFIGS if isinstance(found.get(key), dict))):
                part.pop("quantization_config", None)
        return found

    @property
    def changes(self) -> dict[str, Any]:
        """Return the keys of config.json whose values change for mlx-lm, with the new values.

        None removes a key, such as the settings of weights that are dequantized.
        """
        stored, gone = decode_floats(self.published), object()
        keys = dict.fromkeys([*self.config, *stored, *(["quantization_config"] if self.is_fp8 else [])])
        changed = (
            key for key in keys if self.config.get(key, gone) != stored.get(key, gone) or key not in stored
        )
        return {key: self.config.get(key) for key in changed}

    @property
    def context(self) -> int | None:
        """Return the longest context in tokens, None if it is not known."""
        return context_length(self.config)

    @property
    def vocab_size(self) -> int | None:
        """Return the number of columns of the logits, padding included, None if it is not known."""
        return vocab_size(self.config)

    def check_weights(self) -> int:
        """Return the bytes of the weights. Raises BadCheckpoint unless they are complete."""
        if self.headers.problem is not None:
            raise BadCheckpoint(self.headers.problem)
        return self.headers.size

    def check_kind(self) -> str:
        """Return the model type. Raises BadCheckpoint if there is none, or mlx-lm does not know it."""
        kind = self.config.get("model_type")
        code = ", and the code it brings is never run" if "auto_map" in self.config else ""
        if not isinstance(kind, str):
            raise BadCheckpoint(f"{self.folder / 'config.json'} has no model_type{code}: {AGAIN}")
        if mlx_lm_module(kind) is None:
            raise BadCheckpoint(
                f"{self.folder} is of model_type {kind}, which mlx-lm does not support{code}: use a model of "
                "another architecture, or a newer mlx-lm"
            )
        return kind

    def check_quantizer(self) -> None:
        """Raise BadCheckpoint if the weights are quantized in a way that cannot be read."""
        if problem := obstacle(self.published, self.headers.tensors):
            raise BadCheckpoint(f"{self.folder} {problem}")


def read_checkpoint(folder: Path) -> StoredModel:
    """Read a checkpoint whose config.json may lack `model_type`. Damaged weights are not an error.

    Raises NotFound if there is no config.json, BadCheckpoint if it is malformed or needs its own code.
    """
    if not (folder / "config.json").is_file():
        raise NotFound(_no_config(folder))
    published = read_object(folder / "config.json")
    modelopt = folder / "hf_quant_config.json"  # NVIDIA's quantizer writes its settings there
    if "quantization_config" not in published and modelopt.is_file():
        published["quantization_config"] = read_object(modelopt)
    found = StoredModel(folder, published, read_headers(folder))
    config = found.config
    if config.get("model_file") is not None:
        raise BadCheckpoint(
            f"{folder} needs its own code ({config['model_file']}), which is never run: "
            "use a checkpoint of a model that mlx-lm knows"
        )
    for key in TEXT_CONFIGS:
        if not isinstance(config.get(key), Mapping | None):
            raise BadCheckpoint(f"{folder / 'config.json'} has a {key} that is not an object: {AGAIN}")
    context = integer(text_config(config), "max_position_embeddings")
    if context is not None and context < 1:
        raise BadCheckpoint(f"{folder / 'config.json'} has max_position_embeddings {context}: {AGAIN}")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint, which has a `model_type`, repaired for mlx-lm.

    Raises as `read_checkpoint`, and BadCheckpoint without a model type.
    """
    config = read_published(folder)
    if not isinstance(config.get("model_type"), str):
        code = ", and the code it brings is never run" if "auto_map" in config else ""
        raise BadCheckpoint(f"{folder / 'config.json'} has no model_type{code}: {AGAIN}")
    return config


def read_published(folder: Path) -> dict[str, Any]:
    """Return a repaired config.json that may lack `model_type`. Raises as `read_checkpoint`."""
    return read_checkpoint(folder).config


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the part of a config.json that describes the language model."""
    found = (config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), Mapping) and config[key])
    return dict(next(found, config))


def integer(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first integer among the values of `keys`, None if there is none."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def vocab_size(config: Config) -> int | None:
    """Return the number of columns of the logits, padding included, None if config.json does not say it."""
    return integer(text_config(config), "vocab_size") or integer(config, "vocab_size")


def context_length(config: Config) -> int | None:
    """Return the longest context of a repaired config.json in tokens; None if it is unknown.

    As in vLLM, except that a length that is already extended is not extended again.
    """
    text = text_config(config)
    # The keys for the longest context that vLLM knows. The smallest value counts.
    keys = (
        "max_position_embeddings n_positions max_seq_len seq_length max_sequence_length max_seq_length "
        "max_context_length seq_len"
    ).split()
    lengths = [[found for key in keys if (found := integer(part, key))] for part in (text, config)]
    longest = min(lengths[0] or lengths[1], default=None)
    if stated := integer(text, "model_max_length") or integer(config, "model_max_length"):
        return stated
    if longest is None or "gemma3" in str(text.get("model_type", config.get("model_type"))):
        return longest
    kind = str(text.get("model_type") or config.get("model_type"))
    reached = [_reached(rope, longest, kind) for rope in stated_ropes(text).values()]
    return min(reached) if min(reached, default=longest) < longest else max([longest, *reached])


def _reached(rope: Config, length: int, kind: str) -> int:
    """Return the context that a rope reaches with exact frequencies, from a context of `length` tokens.

    Those of dynamic NTK change with the length of a text, which would depend on how it is read.
    """
    original = int(rope["original_max_position_embeddings"] or length)
    if is_split(rope) and kind not in ALWAYS_LONG:
        return original
    return max(length, int(original * stretch_of(rope)))


def critical_lengths(config: Config) -> list[int]:
    """Return the shortest texts that a model may compute otherwise than shorter ones, and the longest."""
    context, ropes = context_length(config), stated_ropes(text_config(config)).values()
    limits = {rope[f"{key}max_position_embeddings"] for rope in ropes for key in ("original_", "")}
    found = {context, *(limit + 1 for limit in limits if isinstance(limit, int))}
    return sorted(n for n in found if n is not None and 16 <= n <= (context or n))


def check_weights(folder: Path) -> int:
    """Return the bytes of the weights. Raises BadCheckpoint unless they are complete."""
    headers = read_headers(folder)
    if headers.problem is not None:
        raise BadCheckpoint(headers.problem)
    return headers.size


def has_weights(folder: Path) -> bool:
    """Return True if config.json and all weight files exist, even if a file is damaged."""
    return (folder / "config.json").is_file() and not read_headers(folder).missing


def fingerprint(folder: Path) -> str:
    """Return 16 digits that change with the config, the tensors' names and shapes, or the files' sizes.

    Weights are not read: fine-tunes of a model look alike, and cost alike. Raises BadCheckpoint and OSError.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in read_headers(folder).files:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(header_bytes(file))
    return digest.hexdigest()[:16]


def _no_config(folder: Path) -> str:
    """Return the error for a folder without a config.json: what it holds instead, and the way out."""
    if (file := folder / "adapter_config.json").is_file():  # PEFT and mlx-lm write it
        adapter = read_object(file)
        base = adapter.get("base_model_name_or_path") or adapter.get("model")
        kind = adapter.get("peft_type") or adapter.get("fine_tune_type") or "PEFT"
        return (
            f"{folder} holds a {kind} adapter of {base or 'a model that it does not name'}, not a model: "
            "merge them, by `merge_and_unload` of PEFT or `mlx_lm.fuse`, and give the result"
        )
    if any(folder.glob("*.gguf")) and not any(folder.glob(WEIGHTS)):
        return GGUF.format(folder)
    if (folder / MANIFEST).is_file():
        return f"{folder} is a converted pair: give {folder / 'target'} or {folder / 'drafter'}"
    return f"no config.json in {folder}: give the folder of a model in Hugging Face or MLX format"
