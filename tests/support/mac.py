"""Imitate the process of a program on a Mac, whose MLX computes on Metal.

`imitate` changes this process, for a test or for good. `pytest --mac` runs tests in such a process, and the
programs that they start are such processes, too (`mac_start/`). Each fact names what it imitates. Lines are
those of MLX 846d1762 (August 2026), in its folder mlx/; a file's folder is named once. The CPU backend
computes all arrays, so kernels, their roundings and their times are not imitated.
"""

from __future__ import annotations

import builtins
import collections
import errno
import importlib.machinery
import importlib.util
import io
import itertools
import os
import platform
import resource
import sys
import sysconfig
import types
from bisect import bisect_left, insort
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

PAGE = 16_384  # bytes of a page of memory on Apple silicon (vm_page_size)
GIB = 2**30
IS_REAL = sys.platform == "darwin"  # this machine is a Mac, so there is nothing to imitate


@dataclass(frozen=True)
class Mac:
    """A machine, as `device_info(gpu)` describes it (backend/metal/device_info.cpp:44)."""

    chip: str = "Apple M4"
    memory: int = 16 * GIB
    working_set: int = 11_453_251_584  # recommendedMaxWorkingSetSize of a 16 GB Mac
    system: str = "26.1"

    @property
    def info(self) -> dict[str, str | int]:
        return {
            "device_name": self.chip,
            "architecture": "applegpu_g16g",
            "max_buffer_length": self.memory * 9 // 16,
            "max_recommended_working_set_size": self.working_set,
            "memory_size": self.memory,
            "resource_limit": 499_000,
        }


MACS = {
    8: Mac(memory=8 * GIB, working_set=5_726_623_061),
    16: Mac(),
    24: Mac(memory=24 * GIB, working_set=16 * GIB),
}


class Allocator:
    """Memory of Metal by MLX's rules for freed buffers and for the residency set. Sizes are in bytes.

    A buffer is a number that `malloc` returns. In MLX buffers below 256 bytes share a heap. The freed buffers
    of MLX's CPU backend, which `mx.get_cache_memory` counts, follow the same rules with pages of 4096 bytes.
    """

    def __init__(self, mac: Mac, page: int = PAGE) -> None:
        self.mac, self.page = mac, page
        self.block_limit = int(
            min(1.5 * mac.working_set, 0.95 * mac.memory)
        )  # backend/metal/allocator.cpp:63
        self.gc_limit = min(int(0.95 * mac.working_set), self.block_limit)  # allocator.cpp:64
        self.cache_limit = self.block_limit  # allocator.cpp:65
        self.wired_limit = 0  # allocator.h:71; nothing is wired before a limit is set
        self.active = self.cached = self.wired = 0
        self.peak_held = self.peak_wired = 0
        self._numbers = itertools.count(1)
        self._sizes: dict[int, int] = {}  # of buffers that exist, used or freed
        self._freed: collections.OrderedDict[int, None] = collections.OrderedDict()  # the oldest first
        self._by_size: list[tuple[int, int]] = []  # (size, buffer) of freed buffers, sorted
        self._is_wired: dict[int, bool] = {}

    @property
    def held(self) -> int:
        """Return the bytes of all buffers that the process keeps from others."""
        return self.active + self.cached

    def malloc(self, size: int) -> int:
        """Return a buffer for so many bytes, a freed one if it fits (allocator.cpp:107)."""
        if size > self.mac.info["max_buffer_length"]:  # type: ignore[operator]
            raise RuntimeError(
                f"[metal::malloc] Attempting to allocate {size} bytes which is greater than the maximum"
            )
        if size > self.page:
            size = -(-size // self.page) * self.page
        buffer = self._reused(size)
        if buffer is None:
            needed = self.held + size
            if needed >= self.gc_limit:
                self._release(needed - self.gc_limit)
            buffer = next(self._numbers)
            self._sizes[buffer] = size
            self._insert(buffer)
        self.active += self._sizes[buffer]
        if self.cached > self.cache_limit:
            self._release(self.cached - self.cache_limit)
        self.peak_held = max(self.peak_held, self.held)
        self.peak_wired = max(self.peak_wired, self.wired)
        return buffer

    def free(self, buffer: int) -> None:
        """Keep a buffer for later ones, if the cache has room (allocator.cpp:182)."""
        size = self._sizes[buffer]
        self.active -= size
        if self.cached < self.cache_limit:
            self._freed[buffer] = None
            insort(self._by_size, (size, buffer))
            self.cached += size
        else:
            self._erase(buffer)

    def clear_cache(self) -> None:
        for buffer in [*self._freed]:
            self._drop(buffer)

    def set_cache_limit(self, limit: int) -> int:
        limit, self.cache_limit = self.cache_limit, limit
        return limit

    def set_memory_limit(self, limit: int) -> int:
        limit, self.block_limit = self.block_limit, limit
        self.gc_limit = min(self.block_limit, int(0.95 * self.mac.working_set))  # allocator.cpp:90
        return limit

    def set_wired_limit(self, limit: int) -> int:
        """Wire or release buffers until the residency set fits (resident.cpp:175)."""
        if limit > self.mac.working_set:  # allocator.cpp:255
            raise ValueError(
                "[metal::set_wired_limit] Setting a wired limit larger than the maximum working set size"
            )
        limit, self.wired_limit = self.wired_limit, limit
        for buffer, is_wired in self._is_wired.items():
            if self.wired > self.wired_limit and is_wired:
                self._is_wired[buffer], self.wired = False, self.wired - self._sizes[buffer]
            elif not is_wired and self.wired + self._sizes[buffer] <= self.wired_limit:
                self._is_wired[buffer], self.wired = True, self.wired + self._sizes[buffer]
        self.peak_wired = max(self.peak_wired, self.wired)
        return limit

    def _reused(self, size: int) -> int | None:
        """Return a freed buffer less than twice as large and less than two pages larger; None without one.

        (backend/common/buffer_cache.h:32)
        """
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size) or self._by_size[place][0] >= min(2 * size, size + 2 * self.page):
            return None
        found, buffer = self._by_size.pop(place)
        del self._freed[buffer]
        self.cached -= found
        return buffer

    def _release(self, least: int) -> None:
        """Release freed buffers, the oldest first, or all if most are to go (buffer_cache.h:59)."""
        if least >= 0.9 * self.cached:
            return self.clear_cache()
        end = self.cached - least
        while self._freed and self.cached > end:
            self._drop(next(iter(self._freed)))

    def _drop(self, buffer: int) -> None:
        del self._freed[buffer]
        del self._by_size[bisect_left(self._by_size, (self._sizes[buffer], buffer))]
        self.cached -= self._sizes[buffer]
        self._erase(buffer)

    def _insert(self, buffer: int) -> None:
        """Wire a new buffer if it fits the limit; freed ones stay wired (resident.cpp:150)."""
        fits = self.wired + self._sizes[buffer] <= self.wired_limit
        self._is_wired[buffer] = fits
        self.wired += self._sizes[buffer] * fits

    def _erase(self, buffer: int) -> None:
        self.wired -= self._sizes[buffer] * self._is_wired.pop(buffer)
        del self._sizes[buffer]


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
    allocator, real_info, real_clear, real_limit = (
        metal.allocator,
        mx.device_info,
        mx.clear_cache,
        mx.set_cache_limit,
    )

    def is_available() -> bool:  # backend/metal/metal.cpp:18, whatever the default device is
        return not _is_asked_by_kernels()

    def default_device() -> Any:
        return mx.Device(mx.cpu) if _is_asked_by_kernels() else metal.device

    def set_default_device(device: Any) -> None:
        metal.device = device if isinstance(device, mx.Device) else mx.Device(device)

    def device_info(device: Any = None) -> dict[str, str | int]:  # python/src/device.cpp:78
        device = metal.device if device is None else device
        return mac.info if device == mx.gpu else real_info(mx.cpu)

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
    """Return True if a model of mlx-lm asks: it would build a Metal kernel, which cannot run here."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("mlx_lm.models")


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
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
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
