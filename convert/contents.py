"""What a checkpoint holds: its config.json and the headers of its safetensors. Tensor data is never read."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_spec import hub
from mlx_spec.checkpoint import (
    INDEX,
    MAX_HEADER,
    WEIGHTS,
    check_weights,
    one_line,
    read_object,
    read_published,
    shortened,
)
from mlx_spec.errors import BadCheckpoint, NotFound, SpecError

if TYPE_CHECKING:
    from huggingface_hub.utils import SafetensorsFileMetadata

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "BOOL": 8}
BITS |= {"U64": 64, "U32": 32, "U16": 16, "U8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
STREAMS = 8  # headers asked for at the same time


class Tensor(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str  # in the words of safetensors: "BF16"
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Contents:
    """A checkpoint, unloaded."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]  # of the files whose header can be read
    size: int  # bytes of the weights
    has_tokenizer: bool
    has_template: bool  # a chat template
    problem: str | None  # what is missing or damaged, in one line


def of_folder(folder: Path) -> Contents:
    """The contents of a checkpoint folder. Raises NotFound or BadCheckpoint for its config.json."""
    config = read_published(folder)
    tensors, problem = _read_headers(folder)
    files = {file.name for file in folder.iterdir()}
    template = any(fnmatch(name, "*.jinja") for name in files) or (
        _names_template(folder / "tokenizer_config.json") or "chat_template.json" in files
    )
    size = sum(file.stat().st_size for file in folder.glob(WEIGHTS) if file.is_file())
    return Contents(config, tensors, size, not files.isdisjoint(TOKENIZERS), template, problem)


def of_repository(name: str) -> Contents:
    """The contents of a repository on Hugging Face: config.json and headers are fetched, nothing is kept.

    Raises NotFound or BadCheckpoint.
    """
    from huggingface_hub import HfApi

    plan = hub.plan(name)
    weights = [file for file in plan.files if fnmatch(file.name, WEIGHTS)]
    files = {file.name for file in plan.files}
    wanted = [file for file in ("config.json", "tokenizer_config.json") if file in files]
    api = HfApi()

    def header(file: hub.RemoteFile) -> SafetensorsFileMetadata:
        return api.parse_safetensors_file_metadata(name, file.name, revision=plan.commit)

    with tempfile.TemporaryDirectory() as place:
        try:
            for file in wanted:
                api.hf_hub_download(name, file, revision=plan.commit, local_dir=place)
            with ThreadPoolExecutor(STREAMS) as pool:
                headers = list(pool.map(header, weights))
        except Exception as error:  # the hub's own errors and those of its HTTP library
            raise NotFound(hub.explained(name, error)) from error
        config = read_published(Path(place))
        template = any(fnmatch(file, "*.jinja") for file in files)
        template = template or _names_template(Path(place) / "tokenizer_config.json")
    return Contents(
        config,
        {key: Tensor(t.dtype, tuple(t.shape)) for part in headers for key, t in part.tensors.items()},
        sum(file.size for file in weights),
        not files.isdisjoint(TOKENIZERS),
        template,
        None if weights else f"{name} holds no weights ({WEIGHTS})",
    )


def _names_template(file: Path) -> bool:
    try:
        return bool(read_object(file).get("chat_template"))
    except SpecError:
        return False


def _read_headers(folder: Path) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of all files that can be read, and what is wrong, if anything."""
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for file in sorted(folder.glob(WEIGHTS)):
        try:
            found, problem = _parsed(file)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            found, problem = {}, f"{file} has a damaged header ({one_line(error)})"
        tensors |= found
        problems += [problem] if problem else []
    try:
        problem = _missing(folder, tensors)
    except BadCheckpoint as error:
        problem = str(error)
    problems += [problem] if problem else []
    if problems or not tensors:
        try:
            check_weights(folder)  # has the better words, where it finds something too
        except (BadCheckpoint, OSError) as error:
            problems.insert(0, str(error))
    return tensors, problems[0] if problems else None


def _parsed(file: Path) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of a file, and what is wrong with their places in it."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(length, MAX_HEADER)))
    header.pop("__metadata__", None)
    tensors, odd, size = {}, [], 0
    for name, entry in header.items():
        tensor = tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]))
        begin, end = entry["data_offsets"]
        size = max(size, end)
        bits = BITS.get(tensor.dtype)
        if bits is not None and (end - begin) * 8 != tensor.size * bits:
            odd.append(name)
    if odd:
        return tensors, f"{file} has tensors of another size than their shape: {shortened(odd)}"
    whole = file.stat().st_size == 8 + length + size
    return tensors, None if whole else f"{file} does not have the size that its header promises"


def _missing(folder: Path, tensors: Mapping[str, Tensor]) -> str | None:
    """The tensors that the index promises and no file has."""
    if not (folder / INDEX).is_file():
        return None
    promised = read_object(folder / INDEX).get("weight_map")
    if not isinstance(promised, dict):
        return f"{folder / INDEX} has no weight_map"
    absent = sorted(promised.keys() - tensors.keys())
    return f"{folder / INDEX} lists {shortened(absent)}, which no file holds" if absent else None
