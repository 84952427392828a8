"""How weights are quantized, in MLX's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.errors import InvalidValue

BITS = ("4", "5", "6", "8")
FIXED = {"mxfp4": (4, 32), "nvfp4": (4, 16)}  # mode -> (bits, group size), which MLX does not let one choose
GROUP_SIZES = (32, 64, 128)
GROUP_SIZE = 64


@dataclass(frozen=True)
class Quantization:
    """Bits of a weight, weights that share a scale, and MLX's mode."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __str__(self) -> str:
        name = f"{self.bits}-bit" if self.mode == "affine" else self.mode
        return f"{name}, groups of {self.group_size}"

    def settings(self) -> dict[str, Any]:
        """As config.json has them."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def quantization(choice: str, group_size: int | None) -> Quantization | None:
    """The quantization a user asked for: bits, a mode or "none". Raises InvalidValue."""
    if choice in FIXED:
        bits, fixed = FIXED[choice]
        if group_size not in (None, fixed):
            raise InvalidValue(f"{choice} has groups of {fixed}: leave --group-size out")
        return Quantization(bits, fixed, choice)
    if group_size not in (None, *GROUP_SIZES):
        raise InvalidValue(f"--group-size is {group_size}, it must be 32, 64 or 128")
    return None if choice == "none" else Quantization(int(choice), group_size or GROUP_SIZE)


def described(config: Mapping[str, Any]) -> str:
    """The quantization that a config.json names, for the user."""
    found = config.get("quantization") or config.get("quantization_config") or {}
    bits, method = found.get("bits"), found.get("mode") or found.get("quant_method")
    return " ".join(str(part) for part in (f"{bits} bits" if bits else None, method) if part) or "quantized"
