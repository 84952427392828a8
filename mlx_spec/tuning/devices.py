"""What is known of Apple's chips: memory bandwidth and arithmetic, priors until the device was measured.

Bandwidths, core counts and memory are Apple's specifications. Arithmetic rates of M2 and later come from
third parties (hmc-tech.com, a hardware list of Hugging Face), about ±10 %; matrix rates of M5 follow from
1024 operations a core and clock. Generations count as in the name MLX gives a GPU, applegpu_g13 and up. Left
out: M5 Ultra, whose published figures contradict each other, and the chips of phones.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
# Share of the bandwidth that reading weights was seen to reach: M5 Air 79 % in STREAM, M1 Pro 86 % and M3 Pro
# 89 % in whole llama.cpp steps (discussion 4167), M3 Max 97 % and M5 Max 94 % in one MLX kernel (mlx#3863,
# mlxcel), M3 Ultra 650 to 690 GB/s (mlx#3266).
SUSTAINED = {"": 0.82, "Pro": 0.9, "Max": 0.95, "Ultra": 0.83}
SUSTAINED_M1_ULTRA = 0.45  # 18 tokens/s with 17.3 GB (mlxcel)
USABLE = ((36, 2 / 3), (1024, 3 / 4))  # up to so many GB, the share of memory that macOS recommends to a GPU


@dataclass(frozen=True)
class Chip:
    """One variant of a chip. Bandwidth and rates are the nominal ones."""

    name: str  # as MLX names the device, without "Apple"
    gpu_cores: int
    bandwidth: float  # GB/s
    alu_tflops: float  # float16 = float32 on the shader cores
    generation: int  # of the GPU: 13 is M1, 17 is M5
    memory: tuple[int, ...]  # GB, as sold
    matrix_tflops: float | None = None  # float16 on matrix units; None: there are none
    estimated: tuple[str, ...] = ()  # fields nobody has published a specification or a measurement of

    @property
    def tier(self) -> str:
        """ "", "Pro", "Max" or "Ultra"."""
        return self.name.partition(" ")[2]

    @property
    def sustained(self) -> float:
        """Bandwidth in GB/s that reading weights was seen to reach on chips of this tier."""
        share = SUSTAINED_M1_ULTRA if self.name == "M1 Ultra" else SUSTAINED[self.tier]
        return share * self.bandwidth

    def memory_for(self, size: float) -> int | None:
        """The least memory in GB, of those sold, where `size` bytes fit on the GPU; None: it takes more."""
        return next((option for option in self.memory if size <= _usable(option)), None)


ALU, MATRIX = ("alu_tflops",), ("alu_tflops", "matrix_tflops")

# Where a chip is sold with several GPUs the full one comes first; others follow if their bandwidth differs.
CHIPS = (
    Chip("M1", 8, 68.25, 2.6, 13, (8, 16)),
    Chip("M1 Pro", 16, 204.8, 5.2, 13, (16, 32)),
    Chip("M1 Max", 32, 409.6, 10.4, 13, (32, 64)),
    Chip("M1 Ultra", 64, 819.2, 20.8, 13, (64, 128)),
    Chip("M2", 10, 102.4, 3.6, 14, (8, 16, 24)),
    Chip("M2 Pro", 19, 204.8, 6.8, 14, (16, 32)),
    Chip("M2 Max", 38, 409.6, 13.5, 14, (32, 64, 96)),
    Chip("M2 Ultra", 76, 819.2, 27.2, 14, (64, 128, 192)),
    Chip("M3", 10, 102.4, 4.1, 15, (8, 16, 24)),
    Chip("M3 Pro", 18, 153.6, 7.4, 15, (18, 36)),
    Chip("M3 Max", 40, 409.6, 14.3, 15, (48, 64, 128)),
    Chip("M3 Max", 30, 307.2, 10.7, 15, (36, 96)),
    Chip("M3 Ultra", 80, 819.2, 28.0, 15, (96, 256, 512), estimated=ALU),
    Chip("M4", 10, 120.0, 4.6, 16, (16, 24, 32)),
    Chip("M4 Pro", 20, 273.0, 9.2, 16, (24, 48, 64)),
    Chip("M4 Max", 40, 546.0, 18.4, 16, (48, 64, 128)),
    Chip("M4 Max", 32, 410.0, 13.7, 16, (36,)),
    Chip("M5", 10, 153.6, 4.2, 17, (16, 24, 32), 16.0, MATRIX),
    Chip("M5 Pro", 20, 307.0, 9.0, 17, (24, 48, 64), 33.0, MATRIX),
    Chip("M5 Max", 40, 614.0, 18.0, 17, (48, 64, 128), 70.0, MATRIX),
    Chip("M5 Max", 32, 460.0, 14.4, 17, (36,), 56.0, MATRIX),
)


def find(device_name: str, memory: int | None = None) -> Chip | None:
    """The chip that MLX calls `device_name`, such as "Apple M4 Pro"; None: it is not in the table.

    MLX does not tell the number of GPU cores. Of variants of one name it is the one sold with `memory` bytes,
    or else the one with the full GPU.
    """
    variants = named(device_name)
    fitting = [chip for chip in variants if memory is not None and round(memory / GIB) in chip.memory]
    return next(iter([*fitting, *variants]), None)


def named(name: str) -> tuple[Chip, ...]:
    """All variants of a name, however it is spelled: "M4 Pro", "m4pro", "Apple M4 Pro"."""
    wanted = _plain(name)
    return tuple(chip for chip in CHIPS if _plain(chip.name) == wanted)


def _plain(name: str) -> str:
    return "".join(name.lower().replace("-", " ").split()).removeprefix("apple")


def _usable(memory: int) -> float:
    """Bytes of `memory` GB that a GPU can hold."""
    share = next(share for most, share in USABLE if memory <= most)
    return share * memory * GIB
