"""Read GGUF files: metadata, and tensors in the form that MLX's quantized layers hold.

A block of a quantized tensor holds integers, scales and offsets: w = scale * q + bias. MLX has the same form
in groups of 32; types with other groups become floats. Scales have a type that holds them exactly: float16 as
in the file, or float32 if they are products. `gguf_model` turns the result into a checkpoint.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_spec.checkpoint.files import AGAIN
from mlx_spec.errors import BadCheckpoint

MAGIC = b"GGUF"
GROUP = 32  # weights that share a scale
CHUNK = 1 << 24  # weights that are unpacked at a time: a few hundred MB

Bytes = npt.NDArray[Any]  # of uint8; NumPy's operations on uint8 are typed wider
Floats = npt.NDArray[Any]
Arrays = dict[str, Bytes | Floats]  # weight, and scales and biases if it is quantized; each [blocks, ..]


@dataclass(frozen=True)
class BlockType:
    """The block format of a type of tensors."""

    name: str
    weights: int  # in a block
    nbytes: int  # of a block
    bits: int = 0  # of an integer in MLX; 0 for floats
    unpack: Callable[[Bytes], Arrays] | None = None  # None for floats that are stored as such
    dtype: type[np.generic] = np.uint8  # of these floats; bfloat16 as its bits


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header describes it."""

    kind: BlockType
    shape: tuple[int, ...]
    start: int  # byte of the file

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes in the file."""
        return math.prod(self.shape) // self.kind.weights * self.kind.nbytes

    @property
    def mlx_bytes(self) -> int:
        """Return the bytes that it takes in MLX's form, at most."""
        weights = math.prod(self.shape)
        if not self.kind.bits:
            return max(self.nbytes, 2 * weights)
        return weights * self.kind.bits // 8 + weights // GROUP * 8  # with a scale and a bias


@dataclass(frozen=True)
class GGUF:
    """An open file."""

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    content: Bytes

    def read(self, name: str) -> Arrays:
        """Return the arrays of a tensor.

        bfloat16 comes as its bits in uint16, packed integers come as uint32. Q6_K comes as floats, with the
        steps of its groups of 16.
        """
        tensor = self.tensors[name]
        kind, shape = tensor.kind, tensor.shape
        raw = self.content[tensor.start : tensor.start + tensor.nbytes]
        if kind.unpack is None:
            return {"weight": raw.view(kind.dtype).reshape(shape)}
        blocks = raw.reshape(-1, kind.nbytes)
        step = max(1, CHUNK // kind.weights)
        parts = [kind.unpack(blocks[i : i + step]) for i in range(0, len(blocks), step)]
        return {
            key: np.concatenate([part[key] for part in parts]).reshape(*shape[:-1], -1) for key in parts[0]
        }


def unread(file: Path, why: str) -> BadCheckpoint:
    """Return the error for a file that is not read."""
    return BadCheckpoint(f"{file} {why}: get the model in safetensors")


def is_gguf(file: Path) -> bool:
    """Return True for a file that is GGUF by its suffix or its content: Ollama's files have no suffix."""
    if file.suffix.lower() == ".gguf":
        return True
    try:
        with file.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(file: Path) -> GGUF:
    """Read the header of a file. Raises BadCheckpoint, also if a tensor is missing or of an unknown type."""
    try:
        content = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise BadCheckpoint(f"{file} cannot be read ({error.strerror})") from error
    if content[:4].tobytes() != MAGIC:
        raise BadCheckpoint(f"{file} is not a GGUF file: download it again")
    reader = _Reader(content)
    try:
        version, count, keys = reader.number("I"), reader.number("Q"), reader.number("Q")
        if version not in (2, 3):
            raise BadCheckpoint(f"{file} is GGUF of version {version}, versions 2 and 3 are read: {AGAIN}")
        metadata = {reader.string(): reader.value(reader.number("I")) for _ in range(keys)}
        entries = [reader.tensor() for _ in range(count)]
        alignment = operator.index(metadata.get("general.alignment", 0)) or 32  # bytes between tensors
    except (
        struct.error,
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        MemoryError,
        RecursionError,
    ) as error:
        raise BadCheckpoint(f"{file} ends inside its header, or the header is damaged: {AGAIN}") from error
    start = -(-reader.place // alignment) * alignment
    unknown = sorted({NAMES.get(kind, f"number {kind}") for _, _, kind, _ in entries if kind not in TYPES})
    if unknown:
        raise BadCheckpoint(
            f"{file} holds tensors of type {', '.join(unknown)}, which are not read: get it as "
            "Q8_0, Q6_K, Q5_K_M, Q4_K_M, Q4_0 or F16, or its original in safetensors"
        )
    tensors = {
        name: StoredTensor(TYPES[kind], shape, start + offset) for name, shape, kind, offset in entries
    }
    promised = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=0)
    if promised > len(content):
        raise BadCheckpoint(f"{file} has {len(content)} bytes, its header promises {promised}: {AGAIN}")
    return GGUF(file, metadata, tensors, content)


class _Reader:
    """Reads a header from its beginning to its end."""

    # Kinds of metadata values by number, and the struct format of the others.
    STRING, ARRAY = 8, 9
    FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}

    def __init__(self, content: Bytes) -> None:
        self._content = content.data
        self.place = len(MAGIC)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._content, self.place)
        self.place += struct.calcsize(code)
        return value

    def bytes(self, count: int) -> bytes:
        if count > len(self._content) - self.place:
            raise ValueError("beyond the end")
        self.place += count
        return self._content[self.place - count : self.place].tobytes()

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == self.STRING:
            return self.string()
        if kind != self.ARRAY:
            return self.number(self.FORMATS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner in (self.STRING, self.ARRAY):
            return [self.value(inner) for _ in range(count)]
        code = self.FORMATS[inner]
        return np.frombuffer(self.bytes(count * struct.calcsize(code)), f"<{code}").tolist()

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.string(), self.number("I")
        if dimensions > 4:  # as in llama.cpp; the product of thousands takes seconds
            raise ValueError("too many dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self.number("I"), self.number("Q")


# --- types


def _pack(integers: Bytes, bits: int, scales: Floats, biases: Floats) -> Arrays:
    """Return w = scales * integers + biases as MLX packs it: `bits` of each integer, the lowest first."""
    if bits == 8:
        packed = np.ascontiguousarray(integers)
    elif bits == 4:
        packed = integers[:, ::2] | integers[:, 1::2] << 4
    else:
        single = np.unpackbits(integers[..., None], axis=-1, count=bits, bitorder="little")
        packed = np.packbits(single.reshape(len(integers), -1), axis=1, bitorder="little")
    return {"weight": packed.view(np.uint32), "scales": scales, "biases": biases}


def _halves(part: Bytes) -> Bytes:
    """Return the low, then the high four bits of each byte."""
    return np.concatenate([part & 15, part >> 4], axis=1)


def _shifted(part: Bytes, bits: Iterable[int]) -> Bytes:
    """Return bytes [..., 1, N] shifted right by each number of bits: [..., bits, N]."""
    shifts = np.array([[count] for count in bits], np.uint8)
    return np.right_shift(part, shifts).astype(np.uint8, copy=False)


def _float16(part: Bytes) -> Floats:
    return np.ascontiguousarray(part).view(np.float16)


def _simple(bits: int, has_bias: bool) -> Callable[[Bytes], Arrays]:
    """Return the function that unpacks a block: scale, perhaps bias, perhaps fifth bits, low bits."""
    rest = 4 if has_bias else 2

    def unpack(block: Bytes) -> Arrays:
        scales = _float16(block[:, :2])
        biases = _float16(block[:, 2:4]) if has_bias else scales * np.float16(-1 << bits - 1)
        integers = block[:, rest:] ^ 128 if bits == 8 else _halves(block[:, -16:])
        if bits == 5:
            integers = integers | np.unpackbits(block[:, rest : rest + 4], axis=1, bitorder="little") << 4
        return _pack(integers, bits, scales, biases)

    return unpack


def _k_scales(block: Bytes) -> tuple[Floats, Floats]:
    """Return scales and biases of the eight groups of Q4_K and Q5_K."""
    low, high, mixed = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = np.concatenate([low & 63, mixed & 15 | low >> 6 << 4], axis=1)
    offsets = np.concatenate([high & 63, mixed >> 4 | high >> 6 << 4], axis=1)
    factors = _float16(block[:, :4]).astype(np.float32)
    return factors[:, :1] * scales, -factors[:, 1:] * offsets


def _k_halves(part: Bytes) -> Bytes:
    """Return the integers in 128 bytes: for each 32 bytes the low four bits, then the high ones."""
    return _halves(part.reshape(-1, GROUP)).reshape(len(part), -1)


def _q4_k(block: Bytes) -> Arrays:
    return _pack(_k_halves(block[:, 16:]), 4, *_k_scales(block))


def _q5_k(block: Bytes) -> Arrays:
    high = _shifted(block[:, None, 16:48], range(8)) & 1
    return _pack(_k_halves(block[:, 48:]) | high.reshape(len(block), -1) << 4, 5, *_k_scales(block))


def _q6_k(block: Bytes) -> Arrays:
    low = _shifted(block[:, :128].reshape(-1, 2, 1, 64), (0, 4)) & 15
    high = _shifted(block[:, 128:192].reshape(-1, 2, 1, 32), (0, 2, 4, 6)) & 3
    integers = low.reshape(len(block), -1) | high.reshape(len(block), -1) << 4
    scales = block[:, 192:208].view(np.int8) * _float16(block[:, 208:]).astype(np.float32)
    values = (integers - np.uint8(32)).view(np.int8) * np.repeat(scales, 16, axis=1)
    return {"weight": values.astype(np.float32, copy=False), "steps": scales.astype(np.float32, copy=False)}


TYPES = {
    0: BlockType("F32", 1, 4, dtype=np.float32),
    1: BlockType("F16", 1, 2, dtype=np.float16),
    2: BlockType("Q4_0", 32, 18, 4, _simple(4, False)),
    3: BlockType("Q4_1", 32, 20, 4, _simple(4, True)),
    6: BlockType("Q5_0", 32, 22, 5, _simple(5, False)),
    7: BlockType("Q5_1", 32, 24, 5, _simple(5, True)),
    8: BlockType("Q8_0", 32, 34, 8, _simple(8, False)),
    12: BlockType("Q4_K", 256, 144, 4, _q4_k),
    13: BlockType("Q5_K", 256, 176, 5, _q5_k),
    14: BlockType("Q6_K", 256, 210, 0, _q6_k),  # groups of 16, which MLX lacks
    30: BlockType("BF16", 1, 2, dtype=np.uint16),
}
NAMES = {
    **{10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"},
    39: "MXFP4",
}
