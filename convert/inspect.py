"""What a checkpoint is, without loading it: works where MLX is missing, and at once for the largest model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_spec import hub
from mlx_spec.checkpoint import read_object
from mlx_spec.convert.catalogue import Shape
from mlx_spec.convert.contents import Contents, of_folder, of_repository
from mlx_spec.convert.fitting import (
    declared_heads,
    drafters_of,
    head_tensors,
    misfits,
    needed_shape,
    number,
    target_shape,
    targets_of,
    text_config,
)
from mlx_spec.convert.numbers import count_parameters, precision
from mlx_spec.errors import BadCheckpoint, NotFound, SpecError
from mlx_spec.known import drafter_kind, mended
from mlx_spec.load import DEMO, MANIFEST, differing_token
from mlx_spec.text import read_text


@dataclass(frozen=True)
class Checkpoint:
    """One target or drafter. None: config.json does not say."""

    name: str
    family: str  # model_type
    kind: str | None  # of a drafter; None for a target
    parameters: int
    size: int  # bytes of the weights
    precision: str
    layers: int | None
    layer_types: Mapping[str, int]  # attention type -> layers; empty if they are all the same
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    global_kv_heads: int | None  # of full layers, where they differ
    head_dim: int | None
    global_head_dim: int | None
    vocab_size: int | None
    window: int | None  # tokens
    context: int | None  # tokens
    has_tokenizer: bool
    has_template: bool
    prediction_layers: int  # that config.json promises, inside a target
    prediction_tensors: int  # that are there
    needs: Shape | None  # what a drafter asks of its target
    offers: Shape = field(repr=False)  # what it has as a target
    goes_with: tuple[str, ...]  # published targets of a drafter, published drafters of a target
    problem: str | None

    @property
    def speculative_heads(self) -> str:
        """Whether a target has prediction layers of its own: present, stripped or none."""
        if self.prediction_tensors:
            return "present"
        return "stripped" if self.prediction_layers else "none"


@dataclass(frozen=True)
class ConvertedPair:
    """A folder with a pair.json."""

    name: str
    target: Checkpoint | None  # None: cannot be read at all, see `problem`
    drafter: Checkpoint | None
    self_test: Mapping[str, Any]
    problem: str | None
    retokenized: bool = False  # whether the drafter has other tokens, so that its text is encoded again

    @property
    def size(self) -> int:
        """Bytes of the weights of both."""
        return sum(part.size for part in (self.target, self.drafter) if part)


def inspect(name: str) -> Checkpoint | ConvertedPair:
    """What `name` is: a folder, a converted pair, "demo", or a repository, in the cache or on Hugging Face.

    Of a repository that is not in the cache, only config.json and the headers are fetched. Raises NotFound or
    BadCheckpoint.
    """
    if name == DEMO:
        from mlx_spec import demo

        parts = describe(DEMO, of_folder(demo.TARGET)), describe(DEMO, of_folder(demo.DRAFTER))
        return ConvertedPair(DEMO, *parts, {}, parts[0].problem or parts[1].problem)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return inspect_folder(folder, name)
    if folder.exists():
        raise NotFound(f"{name} is a file: give the folder that holds it")
    cached = hub.cached(name)
    return describe(name, of_folder(cached) if cached else _remote(name))


def inspect_folder(folder: Path, name: str) -> Checkpoint | ConvertedPair:
    """What the folder holds, to be called `name`. Raises NotFound or BadCheckpoint."""
    if not (folder / MANIFEST).is_file():
        return describe(name, of_folder(folder))
    manifest = read_object(folder / MANIFEST)
    target, why_target = _part(folder, manifest.get("target", "."), "target")
    own = manifest.get("drafter")
    drafter, why_drafter = _part(folder, own, "drafter") if own is not None else (None, None)
    problem = why_target or why_drafter
    if not problem and target and drafter and drafter.needs:
        unfit = misfits(drafter.needs, target.offers)
        problem = f"the drafter expects {', '.join(unfit)} of the target" if unfit else None
    test = manifest.get("self_test")
    tested = test if isinstance(test, dict) else {}
    other = not problem and drafter is not None and drafter.kind is None and _other_tokens(folder, manifest)
    return ConvertedPair(name, target, drafter, tested, problem, other)


def describe(name: str, contents: Contents) -> Checkpoint:
    """A description of `contents`. Raises BadCheckpoint for a config.json that makes no sense."""
    try:
        config = mended(contents.config)
    except (AttributeError, TypeError) as error:
        raise BadCheckpoint(f"config.json of {name} is malformed ({error}): download it again") from error
    text, tensors = text_config(config), contents.tensors
    kind = drafter_kind(config, tensors)
    shape = target_shape(config)
    if kind is None and "model_type" not in config:
        raise BadCheckpoint(f"config.json of {name} has no model_type: download it again")
    types = text.get("layer_types")
    return Checkpoint(
        name=name,
        family=str(config.get("model_type", "unnamed")),
        kind=kind,
        parameters=count_parameters(tensors, config),
        size=contents.size,
        precision=precision(tensors, config),
        layers=shape.layers,
        layer_types=_counted(types) if isinstance(types, list) else {},
        hidden_size=shape.hidden_size,
        heads=number(text, "num_attention_heads"),
        kv_heads=shape.kv_heads,
        global_kv_heads=_other(shape.global_kv_heads, shape.kv_heads),
        head_dim=shape.head_dim,
        global_head_dim=_other(shape.global_head_dim, shape.head_dim),
        vocab_size=shape.vocab_size,
        window=shape.window,
        context=number(text, "max_position_embeddings"),
        has_tokenizer=contents.has_tokenizer,
        has_template=contents.has_template,
        prediction_layers=0 if kind else declared_heads(config),
        prediction_tensors=0 if kind else head_tensors(tensors),
        needs=needed_shape(kind, config, tensors) if kind else None,
        offers=shape,
        goes_with=targets_of(name, kind, config, tensors) if kind else drafters_of(name, config),
        problem=contents.problem,
    )


def _remote(name: str) -> Contents:
    try:
        return of_repository(name)
    except NotFound as error:
        if "local cache" in str(error):
            raise NotFound(f"{error}; `mlx-spec pull {name}` fetches it") from error
        raise


def _other_tokens(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether the tokenizers of a pair differ; not, where one of them cannot be read."""
    target = folder / manifest.get("target", ".")
    try:
        text = read_text(target, read_object(target / "config.json"))
        return differing_token(folder / manifest["drafter"], target, text) is not None
    except SpecError:
        return False


def _part(folder: Path, place: object, role: str) -> tuple[Checkpoint | None, str | None]:
    """One half of a pair, and why it cannot be used, if so."""
    if not isinstance(place, str):
        return None, f"{folder / MANIFEST}: {role} must be a path relative to it"
    try:
        found = describe(str(folder / place), of_folder(folder / place))
    except SpecError as error:
        return None, str(error)
    return found, found.problem


def _counted(types: list[Any]) -> dict[str, int]:
    counts = Counter(str(kind).removesuffix("_attention") for kind in types)
    return dict(counts) if len(counts) > 1 else {}


def _other(value: int | None, usual: int | None) -> int | None:
    return value if value != usual else None
