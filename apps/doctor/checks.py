"""What can be seen without a model: machine, backend, packages, disk, models, saved costs.

No line has a path or the name of a host: all of it may be shown to others.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_spec.apps.doctor import packages
from mlx_spec.device import NoBackend, require_backend

SCARCE = 5e9  # free bytes; a small target and its drafter take about as much
GB = 1e9


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: Literal["ok", "note", "wrong"]
    text: str


def all_checks() -> Iterator[Check]:
    """In the order of the report, as they are made."""
    backend = _backend()
    yield Check("machine", "ok", f"{machine()}; {system()}")
    yield backend
    yield _installed()
    yield from _extras()
    yield _disk()
    yield _models()
    if backend.state != "wrong":
        yield _profiles()


def machine() -> str:
    """The chip and its memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{_chip()}, {os.cpu_count()} cores, {memory / GB:.0f} GB"


def system() -> str:
    """The operating system and Python."""
    mac = platform.mac_ver()[0]
    name = f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"
    return f"{name}, {platform.machine()}, Python {platform.python_version()}"


def _chip() -> str:
    try:
        require_backend()
    except NoBackend:
        return platform.processor() or platform.machine()
    from mlx_spec.device import device_name

    return device_name()


def _backend() -> Check:
    """Whether MLX is there, alone, and can multiply."""
    try:
        require_backend()
    except NoBackend as error:
        return Check("backend", "wrong", str(error))
    import mlx.core as mx

    several = packages.backends()
    if len(several) > 1:
        wrong = f"{' and '.join(several)} overwrite each other's files: uninstall all, then install one"
        return Check("backend", "wrong", wrong)
    rows = mx.arange(64).reshape(8, 8).astype(mx.float32)
    if not bool(mx.array_equal(rows @ mx.eye(8), rows)):
        return Check("backend", "wrong", "MLX multiplies a matrix by one and gets another: install it again")
    return Check("backend", "ok", f"MLX {packages.version('mlx')} on {device()}")


def device() -> str:
    """What MLX computes on."""
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        return "the CPU"
    return "the GPU, by Metal" if mx.metal.is_available() else "the GPU, by CUDA"


def _installed() -> Check:
    text = ", ".join(f"{name} {version}" for name, version in packages.versions().items())
    try:
        problems = packages.problems(None)
    except packages.NotInstalled:
        return Check("packages", "note", f"{text}; mlx-spec runs from its sources, versions are not checked")
    if problems:
        return Check("packages", "wrong", f"{'; '.join(problems)}: pip install -U mlx-spec")
    return Check("packages", "ok", text)


def _extras() -> Iterator[Check]:
    for extra in packages.extras():
        problems = packages.problems(extra)
        way = f"{'; '.join(problems)}: pip install 'mlx-spec[{extra}]'"
        yield Check(f"[{extra}]", "note" if problems else "ok", way if problems else "complete")


def _disk() -> Check:
    from mlx_spec import hub
    from mlx_spec.convert.cached import cache_folder

    free = hub.free_bytes(cache_folder())
    text = f"{free / GB:.1f} GB free where models are kept"
    return Check("disk", "ok" if free >= SCARCE else "note", text)


def _models() -> Check:
    from mlx_spec.convert.cached import local_models

    models = local_models()
    shown = [f"{Path(m.name).name if m.origin == 'converted' else m.name} ({m.origin})" for m in models]
    broken = [name for name, m in zip(shown, models, strict=True) if m.problem]
    damage = f"; not to be loaded: {', '.join(broken)}, see `mlx-spec models`" if broken else ""
    whole = ", ".join(name for name in shown if name not in broken)
    return Check("models", "note" if broken else "ok", f"{whole or 'none'}{damage}")


def _profiles() -> Check:
    from mlx_spec.tuning import profile
    from mlx_spec.device import device_name

    found = [_measured_on(file) for file in sorted(profile.folder().glob("*.json"))]
    ours = found.count((device_name(), packages.version("mlx")))
    damaged = found.count(None)
    text = f"{len(found)} saved, {ours} of this device and this MLX"
    if damaged:
        return Check("costs", "note", f"{text}; {damaged} damaged, which will be measured again")
    return Check("costs", "ok", text)


def _measured_on(file: Path) -> tuple[str, str] | None:
    """Device and version of MLX of a saved profile; None: it is damaged."""
    try:
        key = json.loads(file.read_text(encoding="utf-8"))["key"]
        return str(key["device"]), str(key["mlx"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
