"""The models on this disk: the bundled pair, converted pairs, and what is in the Hugging Face cache."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mlx_spec import hub
from mlx_spec.checkpoint import OTHER_WEIGHTS, WEIGHTS, one_line, read_object
from mlx_spec.convert.catalogue import Shape, drafter_for
from mlx_spec.convert.fitting import misfits
from mlx_spec.convert.inspect import Checkpoint, ConvertedPair, inspect, inspect_folder
from mlx_spec.errors import SpecError
from mlx_spec.load import DEMO, MANIFEST

PREFIX = "models--"  # of a repository's folder in the cache
NAME = re.compile(PREFIX + r"\w((?!--)[\w.-])*--\w((?!--)[\w.-])*")
PARTIALS = "*.incomplete"
# Model types that mlx-lm runs under the name of another (mlx_lm.utils.MODEL_REMAPPING, 0.32.2).
RENAMED = frozenset(
    "mistral llava phi-msft falcon_mamba joyai_llm_flash kimi_k2 qwen2_5_vl minimax_m2 iquestcoder xverse "
    "gemma4_unified deepseek_v41_text".split()
)


@dataclass(frozen=True)
class LocalModel:
    """Something on this disk that can be loaded, or could if it were whole."""

    name: str  # what `load` takes: "demo", a path or a repository
    origin: Literal["bundled", "converted", "cached"]
    folder: Path
    size: int  # bytes on the disk
    last_used: float  # seconds since the epoch
    found: Checkpoint | ConvertedPair | None = field(repr=False)  # None: it cannot be read
    problem: str | None  # why it cannot be loaded as it is

    @property
    def is_drafter(self) -> bool:
        """Whether it is a drafter and nothing else."""
        return isinstance(self.found, Checkpoint) and self.found.kind is not None


def default_folder() -> Path:
    """Where converted pairs are looked for unless something else is said."""
    from platformdirs import user_data_path

    return user_data_path("mlx_spec") / "models"


def cache_folder() -> Path:
    """The Hugging Face cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def local_models(folders: Sequence[Path] = ()) -> list[LocalModel]:
    """Everything there is: the bundled pair, pairs in `folders` and the default folder, the cache."""
    places = dict.fromkeys([*folders, default_folder()])
    pairs = [pair for place in places for pair in converted(place)]
    return [bundled(), *pairs, *repositories()]


def bundled() -> LocalModel:
    """The demo pair."""
    from mlx_spec import demo

    folder = demo.TARGET.parent
    try:
        found, problem = inspect(DEMO), None
    except SpecError as error:
        return LocalModel(DEMO, "bundled", folder, 0, 0.0, None, str(error))
    return LocalModel(
        DEMO, "bundled", folder, found.size, _used(demo.TARGET), found, problem or found.problem
    )


def converted(folder: Path) -> list[LocalModel]:
    """The pairs in `folder`: itself, if it is one, or those directly in it."""
    if (folder / MANIFEST).is_file():
        places = [folder]
    else:
        places = [place for place in _listed(folder) if (place / MANIFEST).is_file()]
    return [_pair(place) for place in places if not place.name.startswith(".")]


def repositories() -> list[LocalModel]:
    """The repositories in the Hugging Face cache that can be targets or drafters, broken ones included."""
    models = (_repository(folder) for folder in _listed(cache_folder()))
    return [model for model in models if model is not None]


def partners(model: LocalModel, models: Iterable[LocalModel]) -> list[str]:
    """The names of the drafters among `models` for a target, or of the targets for a drafter."""
    own = model.found
    if not isinstance(own, Checkpoint):
        return []
    others = [other for other in models if isinstance(other.found, Checkpoint) and other != model]
    if own.kind is None:
        return [other.name for other in others if _go_together(model, other)]
    return [other.name for other in others if _go_together(other, model)]


def size_on_disk(folder: Path) -> int:
    """Bytes of a repository's folder in the cache, partial files included."""
    files = [file for file in folder.rglob("*") if not (file.is_symlink() and "blobs" not in file.parts)]
    return sum(_size(file) for file in files)


def _go_together(target: LocalModel, drafter: LocalModel) -> bool:
    head, tail = target.found, drafter.found
    assert isinstance(head, Checkpoint) and isinstance(tail, Checkpoint)
    if head.kind is not None:
        return False
    if drafter_for(target.name) == drafter.name or drafter.name in head.goes_with:
        return True
    if tail.needs in (None, Shape()):  # these go by the tokenizer, which shapes do not tell
        return False
    return target.name in tail.goes_with or not misfits(tail.needs or Shape(), head.offers)


def _pair(folder: Path) -> LocalModel:
    size = sum(_size(file) for file in folder.rglob("*") if not file.is_symlink())
    try:
        found = inspect_folder(folder, str(folder))
    except SpecError as error:
        return LocalModel(str(folder), "converted", folder, size, _used(folder), None, str(error))
    return LocalModel(str(folder), "converted", folder, size, _used(folder), found, found.problem)


def _repository(folder: Path) -> LocalModel | None:
    """What a folder of the cache holds; None if that is nothing for us."""
    if not NAME.fullmatch(folder.name):
        return None
    name = folder.name.removeprefix(PREFIX).replace("--", "/")
    try:
        whole = hub.cached(name)
        place = whole or _snapshot(folder)
        if place is None or not (place / "config.json").is_file():
            return None
        if "model_type" not in read_object(place / "config.json"):
            return None
        found = inspect_folder(place, name)
    except (SpecError, OSError, ValueError) as error:
        return LocalModel(name, "cached", folder, size_on_disk(folder), 0.0, None, one_line(error))
    if not isinstance(found, Checkpoint) or not (found.kind or _supported(found.family)):
        return None
    if not whole and _has_other_format(place):
        return None
    size = size_on_disk(folder)
    problem = found.problem if whole else f"incomplete: `mlx-spec pull {name}` fetches the rest"
    return LocalModel(name, "cached", folder, size, _used(place), found, problem)


def _snapshot(folder: Path) -> Path | None:
    """The snapshot of the main branch, or the newest one."""
    main = folder / "refs" / "main"
    if main.is_file():
        place = folder / "snapshots" / main.read_text(encoding="utf-8").strip()
        if place.is_dir():
            return place
    return max(_listed(folder / "snapshots"), key=lambda place: place.stat().st_mtime, default=None)


def _has_other_format(snapshot: Path | None) -> bool:
    if (
        snapshot is None
        or any(snapshot.glob(WEIGHTS))
        or any(snapshot.parent.parent.glob(f"blobs/{PARTIALS}"))
    ):
        return False
    return any(file for pattern in OTHER_WEIGHTS for file in snapshot.glob(pattern))


def _supported(model_type: str) -> bool:
    """Whether mlx-lm knows the model type; yes where mlx-lm is not installed. Imports nothing of it."""
    package = importlib.util.find_spec("mlx_lm")
    places = (package.submodule_search_locations if package else None) or []
    files = [Path(place) / "models" / f"{model_type}.py" for place in places if model_type.isidentifier()]
    return not places or model_type in RENAMED or any(file.is_file() for file in files)


def _listed(folder: Path) -> list[Path]:
    """The folders in `folder`, by name; none if it cannot be read."""
    try:
        return sorted(place for place in folder.iterdir() if place.is_dir())
    except OSError:
        return []


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0


def _used(folder: Path) -> float:
    """When the checkpoint was last read, as far as the file system keeps that, or written."""
    times = [0.0]
    for file in (*folder.glob(WEIGHTS), folder / "target" / "config.json", folder / "config.json"):
        try:
            times += [file.stat().st_atime, file.stat().st_mtime]
        except OSError:
            continue
    return max(times)
