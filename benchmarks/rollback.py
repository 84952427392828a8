"""Is taking back rejected tokens free, whatever the context length?

Table 1, per kind of cache: 8 rows are written and 5 of them dropped (`verify(8)`, `commit(3)`).
Microseconds, and bytes: how far memory rose above what was in use before, with everything evaluated that the
rollback might have left to be computed. Beside it mlx-lm's `trim_prompt_cache(5)` on its own caches. "next
pass" is the rise during the following pass of 8 rows: a buffer that cannot be written in place shows there.

Table 2, per drafter: the rise over whole rounds (draft, verify, commit, verify ...) in units of the largest
K buffer, and milliseconds a round. Attention scores take a part of a unit; 1 or more is a buffer copied.
MLX writes into a buffer only when nothing queued still reads it, so this depends on how far the host runs
ahead of the device.

Claim: time at 64k is at most 1.2 x the time at 1k, and 0 bytes are copied. Weights are random: nothing here
depends on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from random_models import HEAD_DIM, KV_HEADS, VOCAB, Toy, assistant
from timing import finish, parser, table

from mlx_spec.drafters.draft_model import DraftModel, VocabularySizes
from mlx_spec.engine import generate
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Sampler

WRITTEN, KEPT = 8, 3
CHUNK = 1024
LAYERS = ("full", "sliding", "full", "sliding", "full")
CACHES: dict[str, tuple[tuple[str, ...], int | None]] = {  # layers, kv_bits
    "full": (("full", "full"), None),
    "sliding": (("sliding", "sliding"), None),
    "8-bit": (("full", "full"), 8),
    "4-bit": (("full", "full"), 4),
    "recurrent": (("recurrent", "recurrent"), None),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    options.add_argument("--repeats", type=int, default=50, help="rollbacks measured at each context")
    options.add_argument(
        "--warm",
        type=int,
        default=10,
        help="rollbacks on a short context before one is timed: behind a long pass all code is cold",
    )
    options.add_argument("--rounds", type=int, default=10, help="rounds measured")
    settings = options.parse_args()
    if settings.quick:
        settings.contexts, settings.repeats, settings.warm, settings.rounds = [256], 1, 1, 1
    started = time.time()
    mx.random.seed(settings.seed)
    print(f"rollback: {WRITTEN} rows written, {KEPT} kept; medians of {settings.repeats}, us and bytes\n")
    rollbacks = [r for kind in CACHES for r in measure_rollbacks(kind, settings)]
    columns = list(rollbacks[0])
    table(columns, [[show(r[c]) for c in columns] for r in rollbacks])
    ratios = {kind: flatness(kind, rollbacks) for kind in CACHES}
    ends = f"{settings.contexts[-1]} / {settings.contexts[0]}"
    print(f"time of commit at {ends}: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()) + "\n")
    rounds = measure_rounds(settings)
    columns = list(rounds[0])
    table(columns, [[show(r[c]) for c in columns] for r in rounds])
    results = {
        "rollback": rollbacks,
        "ratios": ratios,
        "bytes": max(r["bytes"] for r in rollbacks),
        "rounds": rounds,
    }
    finish("rollback", results, settings, started)


def measure_rollbacks(kind: str, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all contexts in turns, so that a slow moment of the machine meets all of them."""
    layers, bits = CACHES[kind]
    small, ours = Ours(layers, bits, CHUNK), [Ours(layers, bits, c) for c in settings.contexts]
    theirs = [Theirs(layers, bits, context) for context in settings.contexts]
    samples: list[dict[str, list[float]]] = [defaultdict(list) for _ in settings.contexts]
    order = list(range(len(settings.contexts)))
    for repeat in range(settings.repeats + 1):
        for i in [*order[repeat % len(order) :], *order[: repeat % len(order)]]:
            once = {**ours[i].measure(small, settings.warm), **theirs[i].measure(settings.warm)}
            for what, value in once.items() if repeat else ():  # the first pays for compilation
                samples[i][what].append(value)
    return [
        {"cache": kind, "context": context, **summary(found)}
        for context, found in zip(settings.contexts, samples, strict=True)
    ]


class Ours:
    """A target with a filled cache."""

    def __init__(self, layers: tuple[str, ...], bits: int | None, context: int) -> None:
        self.model = Toy(layers)
        self.target = LMTarget(self.model, kv_bits=bits)
        for low in range(0, context, CHUNK):
            self.target.prefill(text(low, min(low + CHUNK, context)))

    def write(self) -> None:
        """Write a block without committing it."""
        mx.eval(self.target.verify(mx.array(text(0, WRITTEN), dtype=mx.int32)))

    def settle(self) -> None:
        """Compute what the caches have left unevaluated."""
        mx.eval(self.target._caches.arrays())
        mx.synchronize()

    def measure(self, small: Ours, warm: int) -> dict[str, float]:
        found = {"next pass": rise(self.write)[1]}
        for _ in range(warm):
            small.write()
            small.target.commit(0)
        seconds = rise(lambda: self.target.commit(0))[0]
        found["drop all us"] = seconds * 1e6
        self.write()
        for _ in range(warm):
            small.write()
            small.target.commit(KEPT)
        seconds, grown = rise(lambda: self.target.commit(KEPT), self.settle)
        return {**found, "commit us": seconds * 1e6, "bytes": grown}


class Theirs:
    """mlx-lm's model and caches, filled."""

    def __init__(self, layers: tuple[str, ...], bits: int | None, context: int) -> None:
        self.model = Toy(layers)
        self.caches, self.small = self.filled(bits, context), self.filled(bits, CHUNK)
        self.block = mx.array([text(0, WRITTEN)])

    def filled(self, bits: int | None, context: int) -> list[Any]:
        caches = make_prompt_cache(self.model)
        for low in range(0, context, CHUNK):
            mx.eval(
                self.model(mx.array([text(low, min(low + CHUNK, context))]), caches),
                [c.state for c in caches],
            )
        if bits:
            caches[:-1] = [c.to_quantized(group_size=64, bits=bits) for c in caches[:-1]]
        return list(caches)

    def measure(self, warm: int) -> dict[str, float]:
        found = {"mlx-lm next pass": rise(lambda: mx.eval(self.model(self.block, self.caches)))[1]}
        for _ in range(warm):
            mx.eval(self.model(self.block, self.small))
            trim_prompt_cache(self.small, WRITTEN - KEPT)
        first = self.caches[0]
        before = first.offset if isinstance(first, KVCache | QuantizedKVCache) else 0
        seconds, grown = rise(lambda: trim_prompt_cache(self.caches, WRITTEN - KEPT))
        if before and first.offset < before:
            found |= {"mlx-lm trim us": seconds * 1e6, "mlx-lm bytes": grown}
        return found


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians; of the bytes of a rollback the maximum."""

    def us(what: str) -> Any:
        return round(statistics.median(found[what]), 2) if what in found else "refused"

    return {
        "commit us": us("commit us"),
        "drop all us": us("drop all us"),
        "bytes": max(found["bytes"]),
        "next pass": int(statistics.median(found["next pass"])),
        "mlx-lm trim us": us("mlx-lm trim us"),
        "mlx-lm bytes": max(found.get("mlx-lm bytes", ["-"])),
        "mlx-lm next pass": int(statistics.median(found["mlx-lm next pass"])),
    }


def measure_rounds(settings: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for context in settings.contexts:
        unit = KV_HEADS * HEAD_DIM * 4 * context  # bytes of K in one full layer, float32
        for arm, make in ARMS.items():
            mx.clear_cache()
            steps = make(context, settings.rounds)
            for _ in range(3):
                next(steps)
            mx.synchronize()
            mx.reset_peak_memory()
            seconds = []
            for _ in range(settings.rounds):
                start = time.perf_counter()
                next(steps)
                seconds.append(time.perf_counter() - start)
            peak = mx.get_peak_memory()
            mx.synchronize()
            grown = peak - mx.get_active_memory()
            steps.close()
            results.append(
                {
                    "context": context,
                    "decoding": arm,
                    "rise / K buffer": round(grown / unit, 2),
                    "ms a round": round(statistics.median(seconds) * 1e3, 2),
                }
            )
    return results


def plain_mlx_lm(context: int, rounds: int) -> Any:
    return generate_step(mx.array(text(0, context)), Toy(LAYERS), max_tokens=rounds + 8)


def speculative(K: int, make: Callable[[LMTarget], Drafter], needs: FeatureSpec) -> Callable[[int, int], Any]:
    def steps(context: int, rounds: int) -> Any:
        target = LMTarget(Toy(LAYERS), needs)
        sampler = Sampling().sampler(context, VOCAB)
        room = (K + 1) * (rounds + 8)
        return generate(target, [make(target)], FixedPolicy(K), sampler, text(0, context), max_tokens=room)

    return steps


class Scripted:
    """Drafts the same tokens each time; nearly all are rejected."""

    needs = FeatureSpec()

    def observe(self, history: Any, features: Features) -> None:
        pass

    def draft(self, history: Any, limit: int, sampler: Sampler) -> Draft:
        return Draft(mx.array(text(0, limit), dtype=mx.int32))


def draft_model(layers: int) -> Callable[[LMTarget], Drafter]:
    return lambda target: DraftModel(Toy(("full",) * layers), VocabularySizes(VOCAB, VOCAB))


ARMS: dict[str, Callable[[int, int], Any]] = {
    "mlx-lm plain": plain_mlx_lm,
    "plain": speculative(0, lambda target: Scripted(), FeatureSpec()),
    "scripted K=4": speculative(4, lambda target: Scripted(), FeatureSpec()),
    "gemma4_assistant K=4": speculative(
        4, lambda target: assistant(target.parts), FeatureSpec(final_hidden=True, shared_kv=True)
    ),
    "draft model, 1 layer, K=4": speculative(4, draft_model(1), FeatureSpec()),
    "draft model, 4 layers, K=4": speculative(4, draft_model(4), FeatureSpec()),
}


def rise(action: Callable[[], Any], then: Callable[[], None] = lambda: None) -> tuple[float, int]:
    """Return the seconds of `action`, and the rise of memory in bytes until after `then`."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    then()
    return seconds, max(mx.get_peak_memory() - before, 0)


def text(low: int, high: int) -> list[int]:
    return [(7 * (i % 11) + i // 5) % VOCAB for i in range(low, high)]


def flatness(kind: str, results: list[dict[str, Any]]) -> float:
    times = [r["commit us"] for r in results if r["cache"] == kind]
    return round(times[-1] / times[0], 3)


def show(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
