"""The memory of a Mac by MLX's rules: freed buffers, their pool, and the residency set. Nothing is allocated.

Each rule names its lines of MLX 846d1762 (August 2026), in its folder mlx/; a file's folder is named once.
"""

from __future__ import annotations

import collections
import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass

PAGE = 16_384  # bytes of a page of memory on Apple silicon (vm_page_size)
GIB = 2**30


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
