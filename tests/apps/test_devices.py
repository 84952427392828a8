"""The table of chips, and finding the present device in it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mlx_spec.tuning.devices import CHIPS, GIB, Chip, find, named

# GB/s and full GPU, from Apple's specifications; typed a second time, to catch a slip in the table.
SPECIFIED = {
    "M1": (68.25, 8),
    "M1 Pro": (204.8, 16),
    "M1 Max": (409.6, 32),
    "M1 Ultra": (819.2, 64),
    "M2 Max": (409.6, 38),
    "M2 Ultra": (819.2, 76),
    "M3 Pro": (153.6, 18),
    "M3 Max": (409.6, 40),
    "M3 Ultra": (819.2, 80),
    "M4 Pro": (273.0, 20),
    "M4 Max": (546.0, 40),
    "M5": (153.6, 10),
    "M5 Max": (614.0, 40),
}


@pytest.mark.parametrize("name", SPECIFIED)
def test_bandwidth_and_cores(name):
    chip = find(f"Apple {name}")
    assert (chip.bandwidth, chip.gpu_cores) == SPECIFIED[name]


@pytest.mark.parametrize("spelling", ["Apple M4 Pro", "M4 Pro", "m4pro", "M4-PRO", "apple m4  pro"])
def test_any_spelling(spelling):
    assert find(spelling).name == "M4 Pro"


@pytest.mark.parametrize("device", ["M4 Pr", "M", "", "Apple", "Apple M5 Ultra", "AMD EPYC", "NVIDIA H200"])
def test_other_devices_are_not_in_the_table(device):
    assert find(device) is None
    assert named(device) == ()


@pytest.mark.parametrize(
    ("name", "memory", "cores"),
    [
        ("M3 Max", 36, 30),
        ("M3 Max", 96, 30),
        ("M3 Max", 128, 40),
        ("M4 Max", 36, 32),
        ("M4 Max", 64, 40),
        ("M4 Max", 7, 40),  # sold with neither: the full GPU
        ("M4 Pro", 48, 20),
    ],
)
def test_memory_tells_the_variant(name, memory, cores):
    assert find(f"Apple {name}", memory * GIB).gpu_cores == cores


def test_without_memory_the_full_gpu():
    assert [chip.gpu_cores for chip in named("M3 Max")] == [40, 30]
    assert find("Apple M3 Max").gpu_cores == 40


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"{chip.name} {chip.gpu_cores}")
def test_table_is_consistent(chip):
    assert chip.generation == 12 + int(chip.name[1])
    assert (chip.matrix_tflops is not None) == (chip.generation >= 17)
    assert list(chip.memory) == sorted(chip.memory)
    assert set(chip.estimated) <= {field.name for field in fields(Chip)}
    assert 0.4 * chip.bandwidth < chip.sustained < chip.bandwidth
    assert 20 < 1000 * chip.alu_tflops / chip.bandwidth < 50  # operations a byte: alike on all of them


def test_memory_for():
    chip = find("M4 Max")
    assert chip.memory == (48, 64, 128)
    assert chip.memory_for(17.3e9) == 48
    assert chip.memory_for(40e9) == 64  # 48 GB leave 38.7e9 bytes to the GPU
    assert chip.memory_for(200e9) is None
    assert find("M1").memory_for(6e9) == 16  # small ones leave two thirds
