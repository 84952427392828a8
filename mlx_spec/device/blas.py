"""The BLAS with which MLX's CPU backend multiplies float32 matrices. Importing this needs no MLX.

MLX's wheel for Linux brings the reference BLAS, which takes about 40 times the time of OpenBLAS. `use_blas`
lets MLX call another library. It writes the address of that library's `cblas_sgemm` into the table of calls
of `libmlx.so`. So MLX may be imported before, and the names of the library may have a prefix, as in the wheel
scipy-openblas32.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

CALLED = "cblas_sgemm"  # what MLX calls for a product of float32 matrices


@dataclass(frozen=True)
class Blas:
    """A library that MLX calls."""

    name: str
    is_reference: bool
    is_wanted: bool = False  # by the user, although another one may be there


_decided: list[Blas | None] = []  # empty before the first call of use_blas


def use_blas(*, optimized: bool = True, threads: int | None = None) -> Blas | None:
    """Let MLX call the optimized BLAS of this machine, and return what MLX calls now.

    The first call decides for the process. An MLX that was built with another BLAS than the reference keeps
    it. Returns None where it is not known, as on macOS. The library gets `threads`, else half as many as
    there are processors: the cores, where a core counts as two. Its threads wait for each other in loops.
    So a product takes many times longer while another program keeps one of them from its processor.
    """
    if not _decided:
        slot = _slot() if sys.platform == "linux" and sys.maxsize > 2**32 else None
        blas = None if slot is None else _owner(slot.value)
        if slot is not None and blas is not None and blas.is_reference:
            blas = (_replace(slot, threads) or blas) if optimized else replace(blas, is_wanted=True)
        _decided.append(blas)
    return _decided[0]


def blas_hint() -> str | None:
    """Return how to get an optimized BLAS; None if MLX has one, needs none, or is to use its own."""
    import mlx.core as mx

    blas = use_blas()
    if blas is None or not blas.is_reference or blas.is_wanted or mx.default_device().type != mx.cpu:
        return None
    return (
        "MLX's own BLAS is slow, and drafts gain nothing with it: `pip install scipy-openblas32`, or install "
        "OpenBLAS with the packages of the system, such as libopenblas0"
    )


def gflops(rows: int = 256, inner: int = 512, columns: int = 1024, repeats: int = 5) -> float:
    """Return how many billion operations a second MLX multiplies with. Slow products are repeated once."""
    import mlx.core as mx

    left, right = mx.ones((rows, inner)), mx.ones((inner, columns))
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < repeats and sum(seconds) < 0.1):
        begun = time.perf_counter()
        mx.eval(left @ right)
        seconds.append(time.perf_counter() - begun)
    return 2 * rows * inner * columns / min(seconds) / 1e9


def _replace(slot: ctypes.c_size_t, threads: int | None) -> Blas | None:
    """Write the function of the first library that is there into the slot; None if there is none."""
    if sys.platform != "linux":  # mypy understands this for other platforms, and no assert in a function
        return None
    wheel = find_spec("scipy_openblas32")
    dirs = (wheel and wheel.submodule_search_locations) or ()
    mkl = ("libmkl_rt.so.3", "libmkl_rt.so.2")
    libraries = (  # the wheel comes first, because `make` installs it and tests run with it
        *((f"{path}/lib/libscipy_openblas.so", "scipy_", "scipy_openblas_set_num_threads") for path in dirs),
        ("libopenblas.so.0", "", "openblas_set_num_threads"),
        *((name, "", "MKL_Set_Num_Threads") for name in mkl),
        *((str(Path(sys.prefix, "lib", name)), "", "MKL_Set_Num_Threads") for name in mkl),
    )
    for path, prefix, setter in libraries:
        with suppress(OSError, AttributeError):  # the library is missing, or has another interface
            library = ctypes.CDLL(path)
            address = ctypes.cast(library[prefix + CALLED], ctypes.c_void_p).value
            library[setter](threads or max(1, len(os.sched_getaffinity(0)) // 2))
            slot.value = address or slot.value
            return Blas(Path(path).name, is_reference=False)
    return None


# --- of the dynamic loader; the numbers are ELF's tags, and the sizes of its 64-bit entries


class _LinkMap(ctypes.Structure):  # of <link.h>
    _fields_ = (("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t))


class _SymbolInfo(ctypes.Structure):  # Dl_info of <dlfcn.h>
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _slot() -> ctypes.c_size_t | None:
    """Return the place of the address that libmlx.so calls, made writable; None if it calls none."""
    try:
        import mlx.core
    except ImportError:
        return None
    system, linked = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_LinkMap)()
    try:
        handle = ctypes.CDLL(str(Path(mlx.core.__file__).parent / "lib" / "libmlx.so"))._handle
        if system.dlinfo(ctypes.c_void_p(handle), 2, ctypes.byref(linked)):
            return None
    except (OSError, AttributeError):  # MLX is built in another way, or the C library has no dlinfo
        return None
    address, tags = linked.contents.dynamic, dict[int, int]()
    while (entry := struct.unpack("<qQ", ctypes.string_at(address, 16)))[0]:
        tags[entry[0]], address = entry[1], address + 16
    strings, symbols, size, calls = (tags.get(tag) for tag in (5, 6, 2, 23))
    if strings is None or symbols is None or size is None or calls is None:
        return None
    for offset, info, _ in struct.iter_unpack("<QQq", ctypes.string_at(calls, size)):
        (name,) = struct.unpack("<I", ctypes.string_at(symbols + 24 * (info >> 32), 4))
        if ctypes.string_at(strings + name) == CALLED.encode():
            address = linked.contents.base + offset
            page = address // mmap.PAGESIZE * mmap.PAGESIZE
            if system.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
                return None
            return ctypes.c_size_t.from_address(address)
    return None


def _owner(address: int) -> Blas | None:
    info = _SymbolInfo()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info)):
        return None
    path = Path(info.file.decode(errors="replace"))
    return Blas(
        path.name, is_reference=path.parent.name.startswith("mlx") and path.name.startswith("libblas")
    )
