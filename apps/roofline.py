"""`mlx-spec roofline`: predict the gain of speculation on Apple chips, and measure this device's bandwidth.

A pass over a few rows reads the weights and computes with them. The longer of the two times counts, plus a
fixed time for each layer. The choice of kernels follows mlx/backend/metal/quantized.cpp of MLX 0.32. Rates
were fitted to published times: they agree within 10 %, but for a few that tests/apps/test_roofline.py lists
with the reason. `mlx-spec tune` measures instead.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from mlx_spec import hub
from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.weights import DecodeSizes, WeightFormat, decode_sizes
from mlx_spec.cli.command import BadOptions, Json, PairOptions, option, program, show, table, tell
from mlx_spec.device import NoBackend, device_name, require_backend
from mlx_spec.errors import BadCheckpoint, InvalidValue, NotFound
from mlx_spec.hub.catalog import DEMO, PairSpec

LONGEST_DRAFT = 8  # draft tokens: more rows take other kernels
SIZE = re.compile(r"(\d*\.?\d+) ?GB", re.IGNORECASE)


@dataclass(frozen=True)
class Chip:
    """One variant of a chip, with Apple's nominal figures."""

    name: str  # as MLX names the device, without "Apple"
    gpu_cores: int
    bandwidth: float  # GB/s
    tflops: float  # of the shader cores; from third parties for M2 and later, about ±10 %

    @property
    def sustained(self) -> float:
        """Return the bytes/s with which weights are read."""
        # M5 Air 79 % of the nominal bandwidth in STREAM, M1 Pro 86 % and M3 Pro 89 % in llama.cpp (discussion
        # 4167), M3 Max 97 % and M5 Max 94 % in one kernel (mlx#3863, mlxcel), M3 Ultra 650 to 690 GB/s
        # (mlx#3266), M1 Ultra 18 tokens/s with 17.3 GB (mlxcel).
        shares = {"": 0.82, "Pro": 0.9, "Max": 0.95, "Ultra": 0.83, "M1 Ultra": 0.45}
        tier = self.name if self.name in shares else self.name.partition(" ")[2]
        return shares[tier] * self.bandwidth * 1e9

    def is_wide(self, format: WeightFormat) -> bool:
        """Return True if the kernel for a few rows reads the weights once for all rows of a tile."""
        is_float = format.group_size is not None and format.mode != "affine"
        # M3 is the first chip with wide kernels for affine and dense weights.
        return is_float or int(self.name[1]) >= 3


CHIPS = (
    Chip("M1", 8, 68.25, 2.6),
    Chip("M1 Pro", 16, 204.8, 5.2),
    Chip("M1 Max", 32, 409.6, 10.4),
    Chip("M1 Ultra", 64, 819.2, 20.8),
    Chip("M2", 10, 102.4, 3.6),
    Chip("M2 Pro", 19, 204.8, 6.8),
    Chip("M2 Max", 38, 409.6, 13.5),
    Chip("M2 Ultra", 76, 819.2, 27.2),
    Chip("M3", 10, 102.4, 4.1),
    Chip("M3 Pro", 18, 153.6, 7.4),
    Chip("M3 Max", 40, 409.6, 14.3),
    Chip("M3 Max", 30, 307.2, 10.7),
    Chip("M3 Ultra", 80, 819.2, 28.0),
    Chip("M4", 10, 120.0, 4.6),
    Chip("M4 Pro", 20, 273.0, 9.2),
    Chip("M4 Max", 40, 546.0, 18.4),
    Chip("M4 Max", 32, 410.0, 13.7),
    Chip("M5", 10, 153.6, 4.2),
    Chip("M5 Pro", 20, 307.0, 9.0),
    Chip("M5 Max", 40, 614.0, 18.0),
    Chip("M5 Max", 32, 460.0, 14.4),
)
NAMES = tuple(dict.fromkeys(chip.name for chip in CHIPS))


@dataclass(frozen=True)
class Options(PairOptions):
    """Predict what speculation gains on Apple chips, and measure the bandwidth of this device.

    The model may also be a size, such as 17GB.
    """

    chip: Annotated[list[str] | None, option(value="NAME", help="only this chip; may be repeated")] = None
    acceptance: Annotated[
        float | None,
        option(
            value="A",
            help="of draft tokens, 0 to 1",
            min=0,
            max=1,
            default="what training measured of this drafter, else 0.8",
        ),
    ] = None
    context: Annotated[int, option(value="N", help="tokens of context", min=0)] = 1024
    json: Json = False

    def check_name(self) -> None:
        if not SIZE.fullmatch(self.chosen or ""):
            super().check_name()

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.chip or () if _key(name) not in map(_key, NAMES)]:
            raise BadOptions(f"--chip {unknown[0]!r} is not known: give one of {', '.join(NAMES)}")


def this_chip() -> Chip | None:
    """Return the chip of this machine; None if it is not Apple's. Does not import MLX, which is slow."""
    if sys.platform != "darwin":
        return None
    command = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
    name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return next((chip for chip in CHIPS if _key(chip.name) == _key(name)), None)


def pair_acceptance(name: str, drafter: Checkpoint | None) -> float | None:
    """Return the share of draft tokens that held-out answers accepted; None if training measured none."""
    if name == DEMO:
        return 0.8
    try:
        trained = {} if drafter is None else drafter.json("training.json")
    except BadCheckpoint:
        return None
    match trained:
        case {"draft_tokens": int() as count, "tokens_a_round": {"0": {"all": int() | float() as length}}}:
            longest = 16  # tokens of a draft; a file that says more is not ours
            rates = (i / 1000 for i in range(1000))
            lengths = range(min(count, longest) + 1)
            return min(rates, key=lambda rate: abs(sum(rate**i for i in lengths) - length))
    return None


def gains(chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, acceptance: float) -> list[float]:
    """Return the gain over plain decoding by draft tokens from 0 (Leviathan, arXiv:2211.17192)."""
    is_narrow = target.format.group_size is not None and not chip.is_wide(target.format)
    # M1 and M2 take another kernel for 6 rows.
    lengths = range(1 + (4 if is_narrow else LONGEST_DRAFT))
    return [sum(acceptance**i for i in range(k + 1)) / round_cost(chip, target, drafter, k) for k in lengths]


def round_cost(chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, k: int) -> float:
    """Return the time of a round with k draft tokens, as a multiple of a plain round."""
    draft = k * pass_seconds(chip, drafter, 1) if drafter else 0.0
    cost = (pass_seconds(chip, target, k + 1) + draft) / pass_seconds(chip, target, 1)
    return cost + 0.05 if k else cost  # the host's part of a round: 3 to 6 % of a plain one (mlxcel)


def pass_seconds(chip: Chip, model: DecodeSizes, rows: int) -> float:
    """Return the seconds of a forward pass over `rows` tokens."""
    # The fixed time of a layer: 0.08 to 0.3 ms in published rates of 4B to 31B models. If the number of
    # layers is not known: a share of the time of reading (mlx-lm's BENCHMARKS.md).
    fixed = 0.15e-3 * model.layers if model.layers else 0.25 * weight_seconds(chip, model, 1)
    return fixed + weight_seconds(chip, model, rows) + model.kv_read / chip.sustained


def weight_seconds(chip: Chip, model: DecodeSizes, rows: int) -> float:
    """Return the seconds of the matrix multiplications of a pass."""
    reads, rate, computed, first = 1.0, 0.31, float(rows), 0.0
    if chip.is_wide(model.format):
        reads = math.ceil(rows / 5)  # rows for which qmv_wide reads the weights once
        # The share of the peak, and what it costs before the first row, in times of reading. By generation,
        # fitted to mlx#3863 (M3), #3852 and #3839 (M4), #3791 (M5).
        first, rate = {"3": (0.1, 0.335), "4": (0.2, 0.335)}.get(chip.name[1], (0.4, 0.47))
    elif model.format.group_size is not None:
        # Each further row of qmv costs most of a pass: 0.35 to 0.77 plain steps on M1 Ultra (mlxcel).
        reads += 0.75 * (rows - 1)
    elif rows > 1:
        rate, computed = 0.75, 32  # rows of a matmul tile: fewer cost as much
    shared = model.read - model.experts
    reading = shared / chip.sustained
    arithmetic = 2 * computed / model.format.bytes_per_weight / (rate * chip.tflops * 1e12) * shared
    both = max(reads * reading, arithmetic)
    if rows > 1 and first:  # neither hides the other wholly where both take about as long
        both = ((reads * reading) ** 6 + (first * reading + arithmetic) ** 6) ** (1 / 6)
    # gather_qmm reads experts row by row; one row reaches less of the bandwidth than four (mlx#4509).
    experts = (0.38 + 0.62 * rows) * model.experts / chip.sustained
    return both + experts


def measure(format: WeightFormat, *, size: int = 2**28, seconds: float = 1.0) -> float:
    """Return the GB/s with which one row is multiplied by `size` bytes of weights, as in plain decoding."""
    import mlx.core as mx

    settings: dict[str, Any] = {"group_size": format.group_size, "bits": format.bits, "mode": format.mode}
    passes = 8  # handed to the device at once
    row = mx.ones((1, 4096), mx.bfloat16)
    try:
        arrays: Any = mx.quantize(row, **settings)
    except ValueError:  # not quantized, or without a kernel: bfloat16 instead
        arrays, settings = (row,), {}
    row_bytes: int = sum(array.nbytes for array in arrays)
    rows, times = size // row_bytes, list[float]()
    weights: list[Any] = [mx.repeat(array, rows, axis=0) for array in arrays]
    while len(times) < 3 or sum(times) < seconds:  # the first also makes the weights; the median ignores it
        start, result = time.perf_counter(), row
        for _ in range(passes):  # each pass needs the result of the last one
            product = mx.quantized_matmul(result, *weights, **settings) if settings else result @ weights[0].T
            result = row * product[:, :1]
        mx.eval(result)
        times.append(time.perf_counter() - start)
    return passes * rows * row_bytes / statistics.median(times) / 1e9


def _run(options: Options) -> int:
    from mlx_spec.hub.names import locate

    name, drafter_path = options.spec.target, options.drafter  # either may be a size, such as 17GB
    target_path, pair_drafter = (name, None) if SIZE.fullmatch(name) else locate(PairSpec(name)).checkpoints
    if drafter_path is None:
        drafter_path = pair_drafter
    elif not SIZE.fullmatch(drafter_path):
        drafter_path = locate(PairSpec(DEMO, drafter_path)).checkpoints[1]
    target = _sizes(target_path, options.context, WeightFormat(4, 64))
    drafter = _sizes(drafter_path, options.context, WeightFormat(16)) if drafter_path else None
    wanted = {_key(name) for name in options.chip or NAMES}
    rate, how = options.acceptance, ""
    if rate is None:
        here = hub.on_disk(drafter_path) if drafter_path and not SIZE.fullmatch(drafter_path) else None
        measured_rate = pair_acceptance(name, here)
        rate = 0.8 if measured_rate is None else measured_rate
        how = ", assumed: --acceptance sets it" if measured_rate is None else ", as measured of this drafter"
    mac = this_chip()
    chips = [chip for chip in CHIPS if _key(chip.name) in wanted]
    chips.sort(key=lambda chip: mac is None or chip.name != mac.name)  # this one first
    predicted = [_predict(chip, target, drafter, rate) for chip in chips]
    report: dict[str, Any] = {
        "target": {"name": name, **asdict(target)},
        "drafter": drafter and {"name": drafter_path, **asdict(drafter)},
        "acceptance": rate,
        "context": options.context,
        "predicted": predicted,
        "measured": None if options.chip else _measure(target.format),
    }
    if options.json:
        show(json.dumps(report))
        return 0
    head = ["chip (GPU cores)", "GB/s", "ceiling", "plain"]
    head += [*(f"k={k}" for k in range(1, LONGEST_DRAFT + 1)), "best tokens/s"]
    show(
        f"{name}, drafts by {drafter_path if drafter else 'lookup, which costs nothing'}",
        f"acceptance {rate:g} at every position{how}; context {options.context} tokens",
        "predicted from nominal bandwidth: plain tokens/s, and the gain over it with k draft tokens;",
        "ceiling: plain tokens/s if all time were reading weights",
        "",
        *table([head, *map(_row, predicted)], range(1, len(head)), optional=(2, *range(8, len(head) - 1))),
    )
    if measured := report["measured"]:
        show("", f"measured on {measured['device']}: weights by one row {measured['row']:.1f} GB/s")
    return 0


def _sizes(name: str, context: int, format: WeightFormat) -> DecodeSizes:
    """Return the sizes of a checkpoint on this machine, or of a name such as "17.3GB".

    Raises NotFound and InvalidValue.
    """
    if match := SIZE.fullmatch(name):
        size = 1e9 * float(match[1])
        if not 0 < size < float("inf"):
            raise InvalidValue(f"{name} is not a model size: give one above 0, such as 17GB")
        return DecodeSizes(size, size, format)
    if (here := hub.on_disk(name)) is None:
        raise NotFound(f"{name} is not on this machine: download it, or give its size, such as 17GB")
    return decode_sizes(here, context)


def _measure(format: WeightFormat) -> dict[str, Any] | None:
    try:
        require_backend()
    except NoBackend as error:
        tell(f"nothing was measured: {error}")
        return None
    return {"device": device_name(), "row": measure(format)}


def _predict(chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, rate: float) -> dict[str, Any]:
    by_length, plain = gains(chip, target, drafter, rate), 1 / pass_seconds(chip, target, 1)
    return {
        "chip": asdict(chip),
        "ceiling": 1e9 * chip.bandwidth / (target.read + target.kv_read),  # plain, if all time were reading
        "plain": plain,
        "gains": by_length,  # by draft tokens from 0
        "num_draft_tokens": by_length.index(max(by_length)),  # 0 if speculation does not pay
        "tokens_per_second": plain * max(by_length),
    }


def _row(prediction: dict[str, Any]) -> list[str]:
    chip, gains = prediction["chip"], [f"{gain:.2f}" for gain in prediction["gains"][1:]]
    mac = this_chip()
    mark = " < this Mac" if mac is not None and mac.name == chip["name"] else ""
    cells = [f"{chip['name']} ({chip['gpu_cores']}){mark}", f"{chip['bandwidth']:.0f}"]
    cells += [f"{prediction['ceiling']:.1f}", f"{prediction['plain']:.1f}", *gains]
    cells += [""] * (LONGEST_DRAFT - len(gains))
    return [*cells, f"k={prediction['num_draft_tokens']} {prediction['tokens_per_second']:.1f}"]


def _key(name: str) -> str:
    return "".join(name.lower().replace("-", " ").split()).removeprefix("apple")


main = program("roofline", Options, _run)
