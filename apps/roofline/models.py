"""From the options to the sizes of the two models, without loading or downloading them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_spec.apps.roofline.arguments import DEMO, Options
from mlx_spec.errors import BadCheckpoint, NotFound
from mlx_spec.hub import cached
from mlx_spec.hub.catalog import LOOKUP, MANIFEST, made_for
from mlx_spec.hub.files import read_object
from mlx_spec.hub.weights import DecodeSizes, WeightFormat, decode_sizes, in_format

GROUP_SIZE = 64
DENSE = 16  # bits
BITS = 4  # of a target that is only a size


@dataclass(frozen=True)
class Named:
    """A model and what to call it."""

    name: str
    model: DecodeSizes
    folder: Path | None = None  # None: only its size is known


@dataclass(frozen=True)
class Models:
    """What to predict for."""

    target: Named
    drafter: Named | None  # None: drafting costs nothing
    notes: tuple[str, ...]  # what was left out


def models_of(options: Options) -> Models:
    """The target and the drafter that were asked for. Raises SpecError."""
    notes: list[str] = []
    target, own = _target(options)
    if options.target_gb is not None and options.context:
        notes.append("K/V is not counted: a size does not tell it")
    drafter = _drafter(options, own, notes)
    if drafter is None and options.drafter != LOOKUP:
        notes.append("no drafter: drafting is taken to cost nothing, as lookup does (see --drafter-gb)")
    return Models(target, drafter, tuple(notes))


def _target(options: Options) -> tuple[Named, str | None]:
    """The target, and the drafter made for it."""
    if options.target_gb is not None:
        size = 1e9 * options.target_gb
        model = DecodeSizes(size, size, _format(BITS if options.bits is None else options.bits))
        return Named(f"{options.target_gb:g} GB", model), None
    name = options.target or DEMO
    path, own = _paths(name)
    folder = _local(path, "--target")
    model = decode_sizes(folder, options.context)
    if options.bits is not None:
        model = in_format(model, _format(options.bits))
    return Named(name, model, folder), own


def _drafter(options: Options, own: str | None, notes: list[str]) -> Named | None:
    if options.drafter_gb is not None:
        size = 1e9 * options.drafter_gb
        return Named(f"{options.drafter_gb:g} GB", DecodeSizes(size, size, _format(DENSE)))
    chosen = options.drafter or own
    if chosen in (None, LOOKUP):
        return None
    if chosen == DEMO:
        chosen = _paths(DEMO)[1]
    try:
        folder = _local(str(chosen), "--drafter")
    except NotFound as error:
        if options.drafter is not None:
            raise
        notes.append(str(error))
        return None
    name = DEMO if options.target == DEMO and options.drafter is None else str(chosen)
    return Named(name, decode_sizes(folder, options.context), folder)


def _paths(target: str) -> tuple[str, str | None]:
    """Where the target and its own drafter are: the bundled pair, a manifest, or a pair that is known."""
    if target == DEMO:
        from mlx_spec import demo

        return str(demo.TARGET), str(demo.DRAFTER)
    folder = Path(target).expanduser()
    if not (folder / MANIFEST).is_file():
        return target, made_for(target)
    manifest = read_object(folder / MANIFEST)
    path, own = manifest.get("target", "."), manifest.get("drafter")
    if not isinstance(path, str) or not isinstance(own, str | None):
        raise BadCheckpoint(f"{folder / MANIFEST}: target and drafter must be paths relative to it")
    return str(folder / path), None if own is None else str(folder / own)


def _local(name: str, option: str) -> Path:
    """The folder of a checkpoint on this machine. Raises NotFound."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    found = cached(name)
    if found is None:
        raise NotFound(f"{name} is not on this machine: give its size with {option}-gb, or download it first")
    return found


def _format(bits: int) -> WeightFormat:
    return WeightFormat(bits, None if bits == DENSE else GROUP_SIZE)
