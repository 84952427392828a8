"""What the present device gives, measured: its bandwidth, and how near plain decoding comes to it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from mlx_spec.apps.roofline.models import Named
from mlx_spec.hub.catalog import NONE
from mlx_spec.hub.weights import decode_sizes
from mlx_spec.load import load
from mlx_spec.pair import Pair
from mlx_spec.tuning.bandwidth import Bandwidth, device_memory, device_name, measure
from mlx_spec.tuning.devices import Chip, find

LOADABLE = 0.5  # share of the memory that weights may take to be loaded for this
TOKENS, PROMPTS, PROMPT, SKIPPED = (
    48,
    8,
    16,
    3,
)  # tokens to time, prompts at most, their length, tokens to warm up
DISPATCH = 0.5  # below this share of a token's time spent on reading, something else decides


@dataclass(frozen=True)
class Plain:
    """Plain decoding by mlx_spec."""

    tokens_per_second: float
    achieved: float  # share of the best measured bandwidth that its reading comes to
    reading: float  # share of a token's time that reading takes at the rate measured for a row


@dataclass(frozen=True)
class Present:
    """All of it measured here."""

    device: str  # as MLX names it
    chip: Chip | None  # None: not in the table
    bandwidth: Bandwidth
    plain: Plain | None  # None: no target to load
    note: str | None  # why there is none, or what limits it


def present_chip() -> Chip | None:
    """The entry of the table for this device."""
    return find(device_name(), device_memory())


def measured(target: Named) -> Present:
    """Measure bandwidth for two seconds, then plain decoding. Raises SpecError for a damaged target."""
    bandwidth = measure(target.model.format)
    if target.folder is None:
        return Present(device_name(), present_chip(), bandwidth, None, None)
    model = decode_sizes(target.folder, PROMPT + TOKENS // 2)
    if model.held > LOADABLE * device_memory():
        note = f"{target.name} is too large to be loaded here: its plain decoding was not measured"
        return Present(device_name(), present_chip(), bandwidth, None, note)
    rate = _plain_rate(load(target.folder, NONE))
    moved = (model.read + model.kv_read) / 1e9
    plain = Plain(rate, rate * moved / bandwidth.best, rate * moved / bandwidth.row)
    return Present(device_name(), present_chip(), bandwidth, plain, _limit(plain))


def _plain_rate(pair: Pair) -> float:
    """Tokens a second: the median over some tokens of greedy text, from prompts of no meaning."""
    times: list[float] = []
    for first in range(PROMPTS):
        size = pair.info.vocab_size
        prompt = [(31 * first + 7 * place + 1) % size for place in range(PROMPT)]
        ends = [time.perf_counter() for _ in pair.generate(prompt, max_tokens=TOKENS + SKIPPED + 1)]
        times += [after - before for before, after in zip(ends[SKIPPED:], ends[SKIPPED + 1 :], strict=False)]
        if len(times) >= TOKENS:
            break
    return 1 / statistics.median(times) if times else 0.0


def _limit(plain: Plain) -> str | None:
    if plain.reading >= DISPATCH:
        return None
    return (
        f"reading takes {plain.reading:.0%} of a token's time: so small a model waits for the dispatch of "
        "its kernels, not for memory"
    )
