"""Open a checkpoint for load, inspect and convert: each of its files once, when it is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_spec.checkpoint.files import AGAIN, one_line, parse_object, read_file, read_object, read_optional
from mlx_spec.checkpoint.headers import HOLDS_GGUF, WEIGHTS, Headers, read_headers
from mlx_spec.checkpoint.quantizers import is_fp8, obstacle
from mlx_spec.checkpoint.repairs import TEXT_CONFIGS, decode_floats, repair_config
from mlx_spec.checkpoint.rope_formulas import ALWAYS_LONG, is_split, stated_ropes, stretch_of
from mlx_spec.checkpoint.targets import MANIFEST, Config, mlx_lm_module
from mlx_spec.errors import BadCheckpoint, NotFound

if TYPE_CHECKING:
    import mlx.core as mx

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is enough


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder with a config.json and weights, complete or not.

    Headers and JSON files are read when they are asked for, and once. Tensors are read each time, because who
    holds a tensor holds its memory.
    """

    folder: Path
    name: str = ""  # as users name it: a path or a repository; without one, the folder
    header_reader: Callable[[Path], Headers] = field(default=read_headers, repr=False)
    _objects: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or str(self.folder))

    def json(self, name: str) -> dict[str, Any]:
        """Return a copy of the JSON object in a file, empty without it. Raises BadCheckpoint."""
        if name not in self._objects:
            self._objects[name] = read_optional(self.folder / name)
        return dict(self._objects[name])

    @cached_property
    def headers(self) -> Headers:
        """Return the headers of the weights."""
        return self.header_reader(self.folder)

    @cached_property
    def _config_file(self) -> bytes | None:
        file = self.folder / "config.json"
        return read_file(file) if file.is_file() else None

    @cached_property
    def published(self) -> Config:
        """Return config.json without repairs, with ModelOpt's settings added; empty without it.

        Raises BadCheckpoint.
        """
        content = self._config_file
        published = {} if content is None else parse_object(self.folder / "config.json", content)
        if "quantization_config" not in published:  # ModelOpt writes its settings beside it
            settings = self.json("hf_quant_config.json")
            published |= {"quantization_config": settings} if settings else {}
        return published

    @cached_property
    def is_fp8(self) -> bool:
        """Return True if the weights are FP8 and are dequantized when they are read."""
        return is_fp8(self.published, self.headers.tensors)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return config.json as mlx-lm reads it, perhaps without `model_type`. Weights give missing sizes.

        Raises NotFound if there is no config.json, BadCheckpoint if it is malformed or needs its own code.
        """
        if self._config_file is None:
            raise NotFound(_no_config(self.folder))
        file = self.folder / "config.json"
        try:
            config = repair_config(self.published, self.headers.tensors)
        except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise BadCheckpoint(f"{file} is malformed ({error}): {AGAIN}") from error
        _check_config(self.folder, config)
        if self.is_fp8:
            texts = (config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), dict))
            for settings in (config, *texts):
                settings.pop("quantization_config", None)
        return config

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
    def is_complete(self) -> bool:
        """Return True if config.json and all weight files exist, even if a file is damaged."""
        return (self.folder / "config.json").is_file() and not self.headers.missing

    @property
    def has_tokenizer(self) -> bool:
        """Return True if the checkpoint brings a tokenizer."""
        return any((self.folder / name).is_file() for name in TOKENIZERS)

    @property
    def context(self) -> int | None:
        """Return the longest context in tokens, None if it is not known."""
        return context_length(self.config)

    def check_weights(self) -> int:
        """Return the bytes of the weights. Raises BadCheckpoint unless they are complete."""
        if self.headers.problem is not None:
            raise BadCheckpoint(self.headers.problem)
        return self.headers.size

    @property
    def _own_code(self) -> str:
        return ", and the code it brings is never run" if "auto_map" in self.config else ""

    @property
    def model_type(self) -> str:
        """Return the model type. Raises BadCheckpoint without one."""
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise BadCheckpoint(f"{self.folder / 'config.json'} has no model_type{self._own_code}: {AGAIN}")
        return model_type

    def check_model_type(self) -> None:
        """Raise BadCheckpoint if there is no model type, or mlx-lm does not know it."""
        if mlx_lm_module(self.model_type) is None:
            raise BadCheckpoint(
                f"{self.folder} is of model_type {self.model_type}, which mlx-lm does not "
                f"support{self._own_code}: use a model of another architecture, or a newer mlx-lm"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 digits that change with the config, the tensors' names and shapes, or the files' sizes.

        Weights are not read: fine-tunes of a model look alike, and cost alike. Raises BadCheckpoint.
        """
        self.check_weights()
        digest = hashlib.sha256(self._config_file or b"")
        for file, header in zip(self.headers.files, self.headers.contents, strict=True):
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode() + header)
        return digest.hexdigest()[:16]

    def tensors(self) -> dict[str, mx.array]:
        """Return every tensor, lazily. Raises BadCheckpoint."""
        import mlx.core as mx

        self.check_weights()
        tensors: dict[str, mx.array] = {}
        for file in self.headers.files:
            try:
                loaded = mx.load(str(file))
            except (RuntimeError, ValueError) as error:  # such as for a type that MLX does not have
                raise BadCheckpoint(f"{file} cannot be read ({one_line(error)}): {AGAIN}") from error
            assert isinstance(loaded, dict)
            tensors |= loaded
        return tensors

    def check_quantizer(self) -> None:
        """Raise BadCheckpoint if the weights are quantized in a way that cannot be read."""
        if problem := obstacle(self.published, self.headers.tensors):
            raise BadCheckpoint(f"{self.folder} {problem}")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint and its config.json. Damaged weights are not an error. Raises as `config`."""
    checkpoint = Checkpoint(folder)
    _ = checkpoint.config
    return checkpoint


def _check_config(folder: Path, config: Config) -> None:
    """Raise BadCheckpoint if a config.json needs code of its own, or has values that make no sense."""
    if config.get("model_file") is not None:
        raise BadCheckpoint(
            f"{folder} needs its own code ({config['model_file']}), which is never run: "
            "use a checkpoint of a model that mlx-lm knows"
        )
    file = folder / "config.json"
    for key in TEXT_CONFIGS:
        if not isinstance(config.get(key), Mapping | None):
            raise BadCheckpoint(f"{file} has a {key} that is not an object: {AGAIN}")
    context = integer(text_config(config), "max_position_embeddings")
    if context is not None and context < 1:
        raise BadCheckpoint(f"{file} has max_position_embeddings {context}: {AGAIN}")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the part of a config.json that describes the language model."""
    parts = (config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), Mapping) and config[key])
    return dict(next(parts, config))


def integer(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first integer among the values of `keys`, None if there is none."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def vocab_size(config: Config) -> int | None:
    """Return the number of columns of the logits, padding included, None if config.json does not say it."""
    return integer(text_config(config), "vocab_size") or integer(config, "vocab_size")


def stated_dtype(config: Config) -> Any:
    """Return the type of activations that config.json states, None if it does not."""
    return config.get("dtype") or config.get("torch_dtype") or text_config(config).get("dtype")


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
    lengths = [[length for key in keys if (length := integer(part, key))] for part in (text, config)]
    longest = min(lengths[0] or lengths[1], default=None)
    if stated := integer(text, "model_max_length") or integer(config, "model_max_length"):
        return stated
    if longest is None or "gemma3" in str(text.get("model_type", config.get("model_type"))):
        return longest
    model_type = str(text.get("model_type") or config.get("model_type"))
    reached = [_reached(rope, longest, model_type) for rope in stated_ropes(text).values()]
    return min(reached) if min(reached, default=longest) < longest else max([longest, *reached])


def _reached(rope: Config, length: int, model_type: str) -> int:
    """Return the context that a rope reaches with exact frequencies, from a context of `length` tokens.

    Those of dynamic NTK change with the length of a text, which would depend on how it is read.
    """
    original = int(rope["original_max_position_embeddings"] or length)
    if is_split(rope) and model_type not in ALWAYS_LONG:
        return original
    return max(length, int(original * stretch_of(rope)))


def critical_lengths(config: Config) -> list[int]:
    """Return the shortest texts that a model may compute otherwise than shorter ones, and the longest."""
    context, ropes = context_length(config), stated_ropes(text_config(config)).values()
    limits = {rope[f"{key}max_position_embeddings"] for rope in ropes for key in ("original_", "")}
    lengths = {context, *(limit + 1 for limit in limits if isinstance(limit, int))}
    return sorted(n for n in lengths if n is not None and 16 <= n <= (context or n))


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
        return HOLDS_GGUF.format(folder)
    if (folder / MANIFEST).is_file():
        return f"{folder} is a converted pair: give {folder / 'target'} or {folder / 'drafter'}"
    return f"no config.json in {folder}: give the folder of a model in Hugging Face or MLX format"
