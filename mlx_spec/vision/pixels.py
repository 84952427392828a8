"""Resize pictures for a tower, without MLX: all that counting the rows of a picture needs.

[H, W, 3] uint8 become the array that the tower reads, still in uint8, and the grid (rows, columns) of what
it returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mlx_spec.errors import InvalidValue

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Grid = tuple[int, int]  # rows and columns


class Preparation(Protocol):
    """Resizes pictures for one tower."""

    def __call__(self, picture: Pixels) -> tuple[Pixels, Grid]:
        """Return what the tower reads of a picture, and the grid of the rows that it returns."""


@dataclass(frozen=True)
class Patches:
    """Pictures in about their own shape, cut into patches: Gemma 4.

    Width and height become multiples of `side` pixels, so that a picture fills at most `most` squares.
    Smaller pictures are enlarged. Each square is one row.
    """

    side: int
    patch: int  # pixels of a side of what the tower reads: `side`, or a part of it
    most: int

    def grid(self, height: int, width: int) -> Grid:
        """Return the largest grid of about this shape."""
        factor = math.sqrt(self.most * self.side**2 / (height * width))
        rows, columns = int(factor * height / self.side), int(factor * width / self.side)
        if not rows:  # a stripe
            return 1, min(max(width // height, 1), self.most)
        if not columns:
            return min(max(height // width, 1), self.most), 1
        return rows, columns

    def __call__(self, picture: Pixels) -> tuple[Pixels, Grid]:
        """Return patches [N, patch * patch * 3], row by row, and the grid of squares."""
        rows, columns = self.grid(*picture.shape[:2])
        height, width, size = rows * self.side, columns * self.side, self.patch
        resized = _resized(picture, height, width, "BICUBIC")
        cut = resized.reshape(height // size, size, width // size, size, 3).transpose(0, 2, 1, 3, 4)
        return np.ascontiguousarray(cut).reshape(-1, size * size * 3), (rows, columns)


@dataclass(frozen=True)
class MergedPatches:
    """Pictures in about their own shape, cut into patches whose neighbours are merged: Qwen.

    Width and height become multiples of `patch * merge` pixels, so that a picture has from `least` to `most`
    pixels. Each square of `merge * merge` patches is one row, and its patches follow one another.
    """

    patch: int
    merge: int
    least: int
    most: int

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of squares. Raises InvalidValue for a stripe."""
        if max(height, width) > 200 * min(height, width):
            raise InvalidValue(
                f"a picture has {width} x {height} pixels: this model reads none longer than 200 : 1; cut it"
            )
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        if (area := rows * columns * side**2) > self.most:
            factor = math.sqrt(height * width / self.most)
            rows, columns = (max(int(length / factor / side), 1) for length in (height, width))
        elif area < self.least:
            factor = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(length * factor / side) for length in (height, width))
        return rows, columns

    def __call__(self, picture: Pixels) -> tuple[Pixels, Grid]:
        """Return patches [N, patch * patch * 3], square by square, and the grid of squares."""
        rows, columns = self.grid(*picture.shape[:2])
        size, merge = self.patch, self.merge
        resized = _resized(picture, rows * merge * size, columns * merge * size, "BICUBIC")
        cut = resized.reshape(rows, merge, size, columns, merge, size, 3).transpose(0, 3, 1, 4, 2, 5, 6)
        return np.ascontiguousarray(cut).reshape(-1, size * size * 3), (rows, columns)


@dataclass(frozen=True)
class Square:
    """Pictures in one size, whatever their shape: Gemma 3."""

    side: int
    grid: Grid

    def __call__(self, picture: Pixels) -> tuple[Pixels, Grid]:
        """Return pixels [side, side, 3] and the grid, which is always the same."""
        return _resized(picture, self.side, self.side, "BILINEAR"), self.grid


def _resized(picture: Pixels, height: int, width: int, filter: str) -> Pixels:
    """Return a picture in another size, as transformers resizes it without torch."""
    from PIL import Image

    if picture.shape[:2] == (height, width):
        return picture
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling[filter]))


def check_processor(processor: Mapping[str, Any]) -> None:
    """Raise InvalidValue if a processor file asks for what is not done here."""
    if processor.get("do_pan_and_scan"):
        raise InvalidValue("its processor cuts pictures into crops (do_pan_and_scan), which is not done here")
    for key, usual in (("image_mean", (0.0, 0.5)), ("image_std", (1.0, 0.5))):
        values = processor.get(key)
        if values is not None and not any(values == [each] * 3 for each in usual):
            raise InvalidValue(f"its processor has {key} {values}, which is not done here")
