"""`mlx-spec roofline`: what speculation should gain on Apple chips, and the bandwidth of this device.

A pass over M rows reads the weights once or more, or computes on M rows, whichever takes longer, and each
layer costs a fixed time. Which kernel runs follows mlx/backend/metal/quantized.cpp of MLX 0.32. Rates were
fitted to published times: they agree within 22 % for single kernels, within 25 % for whole rounds
(tests/apps/test_roofline.py lists both).
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlx_spec.device import NoBackend, device_name, require_backend
from mlx_spec.errors import NotFound

from .command import MODEL, BadOptions, Json, above_zero, guarded, option, parse, show, table

if TYPE_CHECKING:
    from mlx_spec.hub.weights import DecodeSizes, WeightFormat

# Share of the nominal bandwidth that reading weights reaches: M5 Air 79 % in STREAM, M1 Pro 86 % and M3 Pro
# 89 % in llama.cpp (discussion 4167), M3 Max 97 % and M5 Max 94 % in one kernel (mlx#3863, mlxcel), M3 Ultra
# 650 to 690 GB/s (mlx#3266), M1 Ultra 18 tokens/s with 17.3 GB (mlxcel).
SUSTAINED = {"": 0.82, "Pro": 0.9, "Max": 0.95, "Ultra": 0.83, "M1 Ultra": 0.45}
TILE = 5  # rows for which qmv_wide reads the weights once
WIDE_GENERATION = 3  # the first chip with wide kernels for affine and dense weights
MATMUL_TILE = 32  # rows of a matmul tile: fewer cost as much
DENSE_WIDE_ROWS = 15  # the most rows of gemv_wide (mlx#3888)
REREAD = 0.8  # of a pass, for each further row of qmv: 0.35 to 0.77 plain steps on M1 Ultra (mlxcel)
# Share of the peak rate that kernels reach, fitted to mlx#3839, #3852, #3863 and mlxcel's LM head.
ROW_RATE, MATMUL_RATE, MATRIX_RATE = 0.31, 0.75, 0.3
LAYER_SECONDS = 0.15e-3  # beside reading: 0.08 to 0.3 ms in published rates of 4B to 31B models
FIXED_SHARE = 0.25  # the same as a share of reading if the layers are not known (mlx-lm's BENCHMARKS.md)
HOST_SHARE = 0.05  # of a plain step, for the host's part of a round: 3 to 6 % (mlxcel)
FUSED_ROWS, UNFUSED = 8, 2.5  # beyond 8 rows attention takes 2.3 to 2.8 times as long (mlx#3826)
MAX_DRAFT_TOKENS = 16
DENSE, GROUP = 16, 64  # bits of a weight that is not quantized; weights that share a scale
PROBE_BYTES, PROBE_SECONDS = 2**28, 1.0  # a buffer beyond all caches; how long it is read
PASSES, WIDTH = 8, 4096  # passes handed over at once; numbers in a row of the matrix
KERNEL_BITS, KERNEL_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # of affine weights
LENGTHS = (1, 2, 3, 4, 6, 8)  # draft tokens of the columns
HEAD = ("chip (GPU cores)", "GB/s", "ceiling", "plain", *(f"k={k}" for k in LENGTHS), "best tokens/s")
DEMO = "demo"
MODELS = "Models (of a repository only what is on this machine is looked at)"


@dataclass(frozen=True)
class Chip:
    """One variant of a chip, with Apple's nominal figures."""

    name: str  # as MLX names the device, without "Apple"
    gpu_cores: int
    bandwidth: float  # GB/s
    alu_tflops: float  # of the shader cores; from third parties for M2 and later, about ±10 %
    matrix_tflops: float | None = None  # float16 on matrix units: 1024 operations a core and clock

    @property
    def generation(self) -> int:
        """Return 1 for M1, 5 for M5."""
        return int(self.name[1])

    @property
    def sustained(self) -> float:
        """Return the bytes/s with which weights are read."""
        tier = self.name if self.name in SUSTAINED else self.name.partition(" ")[2]
        return SUSTAINED[tier] * self.bandwidth * 1e9


# The full GPU of a chip comes first; others follow if their bandwidth differs.
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
    Chip("M5", 10, 153.6, 4.2, 16.0),
    Chip("M5 Pro", 20, 307.0, 9.0, 33.0),
    Chip("M5 Max", 40, 614.0, 18.0, 70.0),
    Chip("M5 Max", 32, 460.0, 14.4, 56.0),
)


def chips_named(name: str) -> list[Chip]:
    """Return all variants of a name, however it is spelled: "M4 Pro", "m4pro", "Apple M4 Pro"."""

    def plain(text: str) -> str:
        return "".join(text.lower().replace("-", " ").split()).removeprefix("apple")

    return [chip for chip in CHIPS if plain(chip.name) == plain(name)]


def _check_chips(names: list[str] | None) -> list[str] | None:
    for name in names or []:
        if not chips_named(name):
            known = ", ".join(dict.fromkeys(chip.name for chip in CHIPS))
            raise typer.BadParameter(f"{name!r} is not known: give one of {known}")
    return names


Gigabytes = Annotated[
    float | None,
    option(value="GB", help="or the size of its weights", panel=MODELS, callback=above_zero),
]


@dataclass(frozen=True)
class Options:
    """Predict what speculation gains on Apple chips, and measure the bandwidth of this device."""

    chip: Annotated[
        list[str] | None,
        option(value="NAME", help='only this chip, such as "M4 Pro"; may be repeated', callback=_check_chips),
    ] = None
    acceptance: Annotated[
        float, option(value="A", help="how often a draft token is accepted after accepted ones", min=0, max=1)
    ] = 0.8
    context: Annotated[int, option(value="N", help="tokens of context", min=0)] = 1024
    json: Json = False
    target: Annotated[
        str | None, option(value=MODEL, help="model that answers", default="the bundled demo", panel=MODELS)
    ] = None
    target_gb: Gigabytes = None
    drafter: Annotated[
        str | None,
        option(
            value=MODEL,
            help='model that drafts; "lookup" is free',
            default="the one made for the target",
            panel=MODELS,
        ),
    ] = None
    drafter_gb: Gigabytes = None
    bits: Annotated[
        Literal[2, 3, 4, 5, 6, 8, 16] | None,
        option(
            help="bits of a weight of the target; 16 is not quantized",
            default="as stored; 4 with --target-gb",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise BadOptions if a model is named twice."""
        for name in ("target", "drafter"):
            if vars(self)[name] is not None and vars(self)[f"{name}_gb"] is not None:
                raise BadOptions(f"--{name} and --{name}-gb: give one of them")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status. A bad command line raises SystemExit with status 2."""
    options = parse(Options, "roofline", arguments)
    return guarded(lambda: _run(options))


# --- prediction


def gains(chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, acceptance: float) -> list[float]:
    """Return the gain over plain decoding by draft tokens from 0, with one acceptance for all positions.

    Drafts cost nothing without a drafter, as with lookup.
    """
    longest = MAX_DRAFT_TOKENS
    if target.format.group_size is not None and not _is_wide(chip, target.format):
        longest = _matmul_rows(chip, target.format) - 2  # no times of matmul kernels are published for M1, M2
    return [speed_up(chip, target, drafter, acceptance, k) for k in range(longest + 1)]


def speed_up(
    chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, acceptance: float, k: int
) -> float:
    """Return the gain of rounds with k draft tokens over plain decoding (Leviathan, arXiv:2211.17192)."""
    tokens = sum(acceptance**position for position in range(k + 1))
    return tokens / round_cost(chip, target, drafter, k)


def round_cost(chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, k: int) -> float:
    """Return the time of a round with k draft tokens, in plain steps."""
    if k == 0:
        return 1.0
    draft = 0.0 if drafter is None else pass_seconds(chip, drafter, 1)
    return (pass_seconds(chip, target, k + 1) + k * draft) / pass_seconds(chip, target, 1) + HOST_SHARE


def pass_seconds(chip: Chip, model: DecodeSizes, rows: int) -> float:
    """Return the seconds of a forward pass over `rows` tokens."""
    fixed = LAYER_SECONDS * model.layers if model.layers else FIXED_SHARE * weight_seconds(chip, model, 1)
    attention = model.kv_read / chip.sustained * (1 if rows <= FUSED_ROWS else UNFUSED)
    return fixed + weight_seconds(chip, model, rows) + attention


def weight_seconds(chip: Chip, model: DecodeSizes, rows: int) -> float:
    """Return the seconds of the matrix multiplications of a pass."""
    shared, speed = model.read - model.experts, chip.sustained
    rate, computed = ROW_RATE * chip.alu_tflops, rows
    if rows >= _matmul_rows(chip, model.format):
        rate = MATRIX_RATE * chip.matrix_tflops if chip.matrix_tflops else MATMUL_RATE * chip.alu_tflops
        computed = MATMUL_TILE * math.ceil(rows / MATMUL_TILE)
    arithmetic = 2 * computed / model.format.bytes_per_weight / (rate * 1e12) * shared
    reading = weight_reads(chip, model.format, rows) * shared / speed
    return max(reading, arithmetic) + rows * model.experts / speed  # gather_qmv reads experts row by row


def weight_reads(chip: Chip, format: WeightFormat, rows: int) -> float:
    """Return how often the weights are read for `rows` rows."""
    if rows == 1 or rows >= _matmul_rows(chip, format):
        return 1.0
    return math.ceil(rows / TILE) if _is_wide(chip, format) else 1 + REREAD * (rows - 1)


def _is_wide(chip: Chip, format: WeightFormat) -> bool:
    """Return True if the kernel for a few rows reads the weights once for all rows of a tile."""
    is_float = format.group_size is not None and format.mode != "affine"
    return is_float or chip.generation >= WIDE_GENERATION


def _matmul_rows(chip: Chip, format: WeightFormat) -> int:
    """Return the rows from which MLX uses a matmul kernel, for matrices with a side beyond 4096."""
    if format.group_size is None:
        return DENSE_WIDE_ROWS + 1 if _is_wide(chip, format) else 2
    return 12 if chip.name.endswith("Ultra") else 13 if chip.generation >= WIDE_GENERATION else 6


# --- models and this device


def _models(options: Options) -> tuple[str, DecodeSizes, str, DecodeSizes | None]:
    """Return target and drafter with what to call them. Nothing is loaded or downloaded."""
    from mlx_spec.hub.weights import DecodeSizes, WeightFormat, decode_sizes, in_format
    from mlx_spec.load import folders

    def of_size(gigabytes: float, bits: int) -> DecodeSizes:
        return DecodeSizes(
            1e9 * gigabytes, 1e9 * gigabytes, WeightFormat(bits, None if bits == DENSE else GROUP)
        )

    name = options.target or DEMO
    target_path, drafter_path = folders(name, options.drafter)
    if options.target_gb is not None:
        name, target = f"{options.target_gb:g} GB", of_size(options.target_gb, options.bits or 4)
        drafter_path = drafter_path if options.drafter else None
    else:
        target = decode_sizes(_local(target_path, "target"), options.context)
        if options.bits is not None:
            target = in_format(target, of_size(1, options.bits).format)
    if options.drafter_gb is not None:
        return name, target, f"{options.drafter_gb:g} GB", of_size(options.drafter_gb, DENSE)
    try:
        if drafter_path is not None:
            drafter = decode_sizes(_local(drafter_path, "drafter"), options.context)
            return name, target, options.drafter or (DEMO if name == DEMO else drafter_path), drafter
    except NotFound:
        if options.drafter is not None:
            raise
    return name, target, "none: drafts are taken to cost nothing, as with lookup", None


def _local(name: str, option: str) -> Path:
    """Return the folder of a checkpoint on this machine. Raises NotFound."""
    from mlx_spec.hub import cached

    folder = Path(name).expanduser()
    found = folder if folder.is_dir() else cached(name)
    if found is None:
        way = f"give its size with --{option}-gb, or download it first"
        raise NotFound(f"{name} is not on this machine: {way}")
    return found


@dataclass(frozen=True)
class Bandwidth:
    """Measured GB/s of this device, medians."""

    read: float  # sum of a buffer
    row: float  # one row times a matrix, as in plain decoding


def measure(format: WeightFormat, *, size: int = PROBE_BYTES, seconds: float = PROBE_SECONDS) -> Bandwidth:
    """Measure how fast this device reads `size` bytes, and weights in `format`, else in bfloat16."""
    import mlx.core as mx

    bits, group = format.bits, format.group_size
    buffer = mx.ones((size // 4,), mx.float32)
    if format.mode == "affine" and bits in KERNEL_BITS and group in KERNEL_GROUPS:
        words = mx.ones((8 * size // (WIDTH * bits), WIDTH * bits // 32), mx.uint32)
        scales = mx.ones((words.shape[0], WIDTH // group), mx.bfloat16)
        matrix = [words, scales, scales]

        def product(row: mx.array) -> mx.array:
            return mx.quantized_matmul(row, words, scales, scales, group_size=group, bits=bits)
    else:
        matrix = [mx.ones((size // (2 * WIDTH), WIDTH), mx.bfloat16)]

        def product(row: mx.array) -> mx.array:
            return row @ matrix[0].T

    def rate(work: Callable[[], list[mx.array]], nbytes: int) -> float:
        mx.eval(work())
        times: list[float] = []
        while len(times) < 3 or sum(times) < seconds:
            start = time.perf_counter()
            mx.eval(work())
            times.append(time.perf_counter() - start)
        return PASSES * nbytes / statistics.median(times) / 1e9

    def products() -> list[mx.array]:
        row = zeros = mx.zeros((1, WIDTH), mx.bfloat16)
        for _ in range(PASSES):  # each waits for the one before it
            row = zeros + product(row)[:, :1]
        return [row]

    mx.eval(buffer, *matrix)
    read = rate(lambda: [mx.sum(buffer) for _ in range(PASSES)], buffer.nbytes)
    return Bandwidth(read, rate(products, sum(array.nbytes for array in matrix)))


# --- the report


def _run(options: Options) -> int:
    target_name, target, drafter_name, drafter = _models(options)
    chips = [chip for name in options.chip or [] for chip in chips_named(name)] or CHIPS
    predicted = [_predict(chip, target, drafter, options.acceptance) for chip in dict.fromkeys(chips)]
    measured = _measure(options, chips, target.format)
    if options.json:
        report = {
            "target": {"name": target_name, **dataclasses.asdict(target)},
            "drafter": drafter and {"name": drafter_name, **dataclasses.asdict(drafter)},
            "acceptance": options.acceptance,
            "context": options.context,
            "predicted": predicted,
            "measured": measured,
        }
        show(json.dumps(report))
        return 0
    show(
        f"target {target_name}: {_describe(target)}",
        f"drafter {drafter_name}{f': {_describe(drafter)}' if drafter else ''}",
        f"acceptance {options.acceptance:g} at every position, context {options.context} tokens",
        "",
        "predicted from nominal bandwidth: plain tokens/s, and the gain over it with k draft tokens",
        *table([HEAD, *map(_row, predicted)], right=range(1, len(HEAD))),
    )
    if measured:
        rates = f"memory read {measured['read']:.1f} GB/s, weights by one row {measured['row']:.1f} GB/s"
        show("", f"measured on {measured['device']}: {rates}")
    return 0


def _measure(options: Options, chips: Sequence[Chip], format: WeightFormat) -> dict[str, Any] | None:
    """Return the bandwidth of this device, None if other chips were asked for or there is no MLX."""
    try:
        require_backend()
    except NoBackend as error:
        if not options.chip:
            print(f"mlx-spec: nothing was measured: {error}", file=sys.stderr)
        return None
    if options.chip and not set(chips_named(device_name())) & set(chips):
        return None
    return {"device": device_name(), **dataclasses.asdict(measure(format))}


def _predict(
    chip: Chip, target: DecodeSizes, drafter: DecodeSizes | None, acceptance: float
) -> dict[str, Any]:
    found = gains(chip, target, drafter, acceptance)
    plain = 1 / pass_seconds(chip, target, 1)
    return {
        "chip": dataclasses.asdict(chip),
        "ceiling": 1e9 * chip.bandwidth / (target.read + target.kv_read),  # plain, if all time were reading
        "plain": plain,
        "gains": found,  # by draft tokens from 0
        "num_draft_tokens": found.index(max(found)),  # 0 if speculation does not pay
        "speed_up": max(found),
        "tokens_per_second": plain * max(found),
    }


def _row(found: dict[str, Any]) -> list[str]:
    chip, by_length = found["chip"], found["gains"]
    cells = [f"{chip['name']} ({chip['gpu_cores']})", f"{chip['bandwidth']:.0f}"]
    cells += [f"{found[key]:.1f}" for key in ("ceiling", "plain")]
    cells += [f"{by_length[k]:.2f}" if k < len(by_length) else "" for k in LENGTHS]
    return [*cells, f"k={found['num_draft_tokens']} {found['tokens_per_second']:.1f}"]


def _describe(model: DecodeSizes) -> str:
    cache = f" and {model.kv_read / 1e6:.2f} MB of K/V" if model.kv_read else ", K/V not counted"
    bits = 8 * model.format.bytes_per_weight
    return f"a token reads {model.read / 1e6:.2f} MB of weights ({bits:.3g} bits each){cache}"
