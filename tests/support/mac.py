"""Imitate the process of a program on a Mac, whose MLX computes on Metal.

`imitate` changes this process, for a test or for good. `pytest --mac` runs tests in such a process, and the
programs that they start are such processes, too (`mac_start/`). Each fact names what it imitates. Lines are
those of MLX 846d1762 (August 2026), in its folder mlx/; a file's folder is named once. The CPU backend
computes all arrays, so kernels, their roundings and their times are not imitated.
"""

from __future__ import annotations

import builtins
import errno
import importlib.machinery
import importlib.util
import io
import os
import platform
import resource
import stat
import sys
import sysconfig
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from support.mac_memory import GIB as GIB
from support.mac_memory import MACS, Allocator, Mac

IS_REAL = sys.platform == "darwin"  # this machine is a Mac, so there is nothing to imitate


class Patch(Protocol):
    """What changes a process: pytest's MonkeyPatch, or `ForGood`."""

    def setattr(self, target: Any, name: str, value: Any, raising: bool = True) -> None: ...

    def delattr(self, target: Any, name: str, raising: bool = True) -> None: ...

    def setitem(self, target: Any, name: Any, value: Any) -> None: ...


class ForGood:
    """Changes a process until it ends."""

    def setattr(self, target: Any, name: str, value: Any, raising: bool = True) -> None:
        setattr(target, name, value)

    def delattr(self, target: Any, name: str, raising: bool = True) -> None:
        if raising or hasattr(target, name):
            delattr(target, name)

    def setitem(self, target: Any, name: Any, value: Any) -> None:
        target[name] = value


@dataclass
class Metal:
    """The state of Metal in this process. The lists hold what the process set, the last one at the end."""

    mac: Mac
    allocator: Allocator
    device: Any  # the default device of all threads (device.cpp:12)
    wired_limits: list[int] = field(default_factory=list)
    cache_limits: list[int] = field(default_factory=list)
    memory_limits: list[int] = field(default_factory=list)
    clears: int = 0  # calls of clear_cache


def imitate(patch: Patch, mac: Mac | None = None) -> Metal:
    """Make this process one of a Mac. Programs that it starts are not changed."""
    import mlx.core as mx

    mac = mac or MACS[16]
    imitate_system(patch, mac)
    return imitate_metal(patch, mac, mx)


def imitate_metal(patch: Patch, mac: Mac, mx: Any) -> Metal:
    """Let `mlx.core` describe a GPU that Metal drives. Its arrays stay those of the CPU backend."""
    metal = Metal(mac, Allocator(mac), mx.Device(mx.gpu))
    allocator, real_clear, real_limit = metal.allocator, mx.clear_cache, mx.set_cache_limit

    def is_available() -> bool:  # backend/metal/metal.cpp:18, whatever the default device is
        return not _is_asked_by_kernels()

    def default_device() -> Any:
        return mx.Device(mx.cpu) if _is_asked_by_kernels() else metal.device

    def set_default_device(device: Any) -> None:
        metal.device = device if isinstance(device, mx.Device) else mx.Device(device)

    def device_info(device: Any = None) -> dict[str, str | int]:  # python/src/device.cpp:78
        device = metal.device if device is None else device
        # A CPU has these two only, the first from sysctl (backend/cpu/device_info.cpp:108).
        return mac.info if device == mx.gpu else {"device_name": mac.chip, "architecture": "arm64"}

    def set_wired_limit(limit: int) -> int:
        metal.wired_limits.append(limit)
        return allocator.set_wired_limit(limit)

    def set_cache_limit(limit: int) -> int:
        metal.cache_limits.append(limit)
        real_limit(limit)
        return allocator.set_cache_limit(limit)

    def set_memory_limit(limit: int) -> int:
        metal.memory_limits.append(limit)
        return allocator.set_memory_limit(limit)

    def clear_cache() -> None:
        metal.clears += 1
        real_clear()

    on_gpu: dict[int, Any] = {}  # streams that are said to be the GPU's, by id

    def streams(real: Any) -> Any:
        def make(device: Any) -> Any:
            stream = real(mx.cpu)
            if device == mx.gpu:
                on_gpu[id(stream)] = stream
            return stream

        return make

    real_stream, real_default = mx.stream, mx.default_stream

    @contextmanager
    def stream(given: Any) -> Any:  # utils.h:29: also sets the default device, of all threads
        is_device = isinstance(given, mx.Device | mx.DeviceType)
        device = given if is_device else mx.gpu if id(given) in on_gpu else mx.cpu
        before = metal.device
        set_default_device(device)
        try:
            with real_stream(mx.cpu if is_device else given):
                yield
        finally:
            set_default_device(before)

    patch.setattr(mx.metal, "is_available", is_available)
    replaced = {
        "is_available": lambda device: True,
        "device_count": lambda device: 1,
        "default_stream": lambda device: real_default(mx.cpu),
        **{
            name: streams(getattr(mx, name))
            for name in dir(mx)
            if name.startswith("new_") and "stream" in name
        },
    }
    own = (
        default_device,
        set_default_device,
        device_info,
        set_wired_limit,
        set_cache_limit,
        set_memory_limit,
    )
    replaced |= {function.__name__: function for function in (*own, clear_cache, stream)}
    for name, function in replaced.items():
        patch.setattr(mx, name, function)
    return metal


def _is_asked_by_kernels() -> bool:
    """Return True if who asks builds Metal kernels, which cannot run here, or measures those that do run."""
    measured = ("mlx_spec.model.row_bits", "mlx_spec.model.layers_alone")
    return str(sys._getframe(2).f_globals.get("__name__")).startswith(("mlx_lm.models", *measured))


NOT_ON_A_MAC = ("/dev/full", "/proc")  # Apple's devfs has no `full`, and there is no procfs


def imitate_system(patch: Patch, mac: Mac) -> None:
    """Let Python say that this is macOS, in a framework build, and take away what only Linux has."""
    patch.setitem(sysconfig.get_config_vars(), "PYTHONFRAMEWORK", "Python")  # read by sys.platform, so first
    patch.setattr(sys, "platform", "darwin")
    patch.setattr(sys, "_framework", "Python", raising=False)
    patch.setattr(platform, "system", lambda: "Darwin")
    patch.setattr(platform, "machine", lambda: "arm64")
    patch.setattr(platform, "mac_ver", lambda *_: (mac.system, ("", "", ""), "arm64"))
    for name in ("sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "memfd_create"):
        patch.delattr(os, name, raising=False)
    # A module of CPython for macOS, which `urllib.request` asks for the proxies of the system.
    proxies = types.ModuleType("_scproxy")
    proxies.__dict__.update(_get_proxy_settings=lambda: {}, _get_proxies=lambda: {})
    patch.setitem(sys.modules, "_scproxy", proxies)
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "listdir")):
        patch.setattr(module, name, _without_linux(getattr(module, name)))


def _without_linux(real: Any) -> Any:
    def call(path: Any = ".", *rest: Any, **options: Any) -> Any:
        if isinstance(path, str | Path) and str(path).startswith(NOT_ON_A_MAC):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return real(path, *rest, **options)

    return call


def ignore_case(patch: Patch, folder: Path) -> None:
    """Let names below a folder mean files in any letter case, as the file systems of Macs do by default."""
    listdir = os.listdir

    def meant(path: Any) -> Any:
        if not isinstance(path, str | os.PathLike) or not Path(path).is_relative_to(folder):
            return path
        place = str(folder)
        for part in Path(path).relative_to(folder).parts:
            names = listdir(place) if real_isdir(place) else []
            place = os.path.join(place, next((n for n in names if n.lower() == part.lower()), part))
        return place

    def following(real: Any, paths: int) -> Any:
        return lambda *given, **more: real(*map(meant, given[:paths]), *given[paths:], **more)

    real_stat = os.stat

    def real_isdir(place: str) -> bool:
        try:
            return stat.S_ISDIR(real_stat(place).st_mode)
        except OSError:
            return False

    for module in (builtins, io):
        patch.setattr(module, "open", following(module.open, 1))
    for name in (
        "open",
        "stat",
        "lstat",
        "listdir",
        "scandir",
        "mkdir",
        "rmdir",
        "unlink",
        "remove",
        "readlink",
    ):
        patch.setattr(os, name, following(getattr(os, name), 1))
    for name in ("rename", "replace"):
        patch.setattr(os, name, following(getattr(os, name), 2))


def caffeinate(folder: Path, patch: Patch) -> Path:
    """Return the file into which a stand-in for the program that puts off sleep writes its options.

    It is found in PATH, and not ended before it has written.
    """
    from mlx_spec.device.awake import Awake
    from support.waiting import wait_until

    program, calls, release = folder / "caffeinate", folder / "calls", Awake.release
    program.write_text(f'#!/bin/sh\necho "$@" > {calls}.new\nmv {calls}.new {calls}\nexec sleep 60\n')
    program.chmod(0o700)

    def release_once_written(awake: Awake) -> None:
        wait_until(lambda: awake._process is None or calls.exists())
        release(awake)

    patch.setattr(Awake, "release", release_once_written)
    patch.setitem(os.environ, "PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return calls


# --- programs that tests start


START = Path(__file__).parent / "mac_start"  # has a sitecustomize.py, which Python runs when it starts


def imitate_for_good(mac: Mac | None = None) -> None:
    """Make this process, and every Python that it starts, one of a Mac. MLX may be imported later."""
    mac, patch = mac or MACS[16], ForGood()
    imitate_system(patch, mac)
    # launchd gives 256 files; the hard limit is infinite there (`launchctl limit maxfiles`).
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256 if hard < 0 else min(256, hard), hard))
    path = [str(START), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    sys.meta_path.insert(0, _OnImport(patch, mac))  # type: ignore[arg-type]
    if (mx := sys.modules.get("mlx.core")) is not None:
        imitate_metal(patch, mac, mx)


class _OnImport:
    """Changes `mlx.core` once it has been imported, and finds stand-ins for what only macOS has."""

    def __init__(self, patch: Patch, mac: Mac) -> None:
        self._patch, self._mac = patch, mac

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name == "truststore._macos":  # of a client in tests: it loads Apple's Security
            return importlib.util.spec_from_file_location(name, Path(path[0], "_openssl.py"))
        if name != "mlx.core":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            imitate_metal(self._patch, self._mac, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
