"""The packages that are installed, and what mlx-spec itself asks for."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from mlx_spec import __version__

SHOWN = ("mlx", "mlx-lm", "numpy", "sentencepiece", "huggingface_hub", "transformers")
BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")  # each is all of MLX
OURS = "mlx-spec"
DEVELOPERS = ("test", "clients")  # extras that nobody needs who only uses it


class NotInstalled(Exception):
    """mlx-spec runs from its sources: nothing says what it asks for."""


def version(name: str) -> str:
    """The installed version, or "none"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def versions() -> dict[str, str]:
    """Of mlx-spec and of what it stands on."""
    return {OURS: __version__, **{name: version(name) for name in SHOWN}}


def backends() -> list[str]:
    """Backends of MLX on Linux; more than one overwrite each other."""
    return [name for name in BACKENDS if version(name) != "none"]


def extras() -> list[str]:
    """The extras of mlx-spec that people use, but for those that choose a backend."""
    try:
        names = metadata.metadata(OURS).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []
    return [str(name) for name in names if name not in DEVELOPERS and not _is_backend(str(name))]


def problems(extra: str | None) -> list[str]:
    """What is missing of an extra, or of mlx-spec itself, or too old or too new. Raises NotInstalled."""
    return [problem for wanted in _wanted(extra) if (problem := _problem(wanted))]


def _wanted(extra: str | None) -> list[Requirement]:
    try:
        lines = metadata.requires(OURS) or []
    except metadata.PackageNotFoundError as error:
        raise NotInstalled from error
    every = [Requirement(line) for line in lines]
    if extra is None:
        return [wanted for wanted in every if wanted.marker is None or wanted.marker.evaluate({"extra": ""})]
    return [wanted for wanted in every if _only_for(wanted, extra)]


def _only_for(wanted: Requirement, extra: str) -> bool:
    marker = wanted.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _problem(wanted: Requirement) -> str | None:
    found = version(wanted.name)
    if found == "none":
        return f"{wanted.name} is missing"
    if wanted.specifier.contains(found, prereleases=True):
        return None
    return f"{wanted.name} is {found}, not {wanted.specifier}"


def _is_backend(extra: str) -> bool:
    """Whether the extra is MLX itself, on some system."""
    lines = metadata.requires(OURS) or []
    return any(
        Requirement(line).name == "mlx" and f'extra == "{extra}"' in line.replace("'", '"') for line in lines
    )
