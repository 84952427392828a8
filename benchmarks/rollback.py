"""Is taking back rejected tokens free, whatever the context length?

Table 1, per kind of cache: 8 rows are written on trial and 5 of them taken back (`verify(8)`, `commit(3)`).
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
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from timing import finish, parser, table
from toy import HEAD_DIM, KV_HEADS, VOCAB, Toy, assistant

from mlx_spec.cache import RecurrentCache
from mlx_spec.drafters.draft_model import DraftModel, Vocabulary
from mlx_spec.engine import generate
from mlx_spec.sampling import Sampling
from mlx_spec.target import LMTarget
from mlx_spec.tuning.policy import Fixed
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
    options.add_argument("--repeats", type=int, default=100, help="rollbacks measured")
    options.add_argument("--rounds", type=int, default=10, help="rounds measured")
    settings = options.parse_args()
    if settings.quick:
        settings.contexts, settings.repeats, settings.rounds = [256, 512], 3, 1
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


def measure_rollbacks(kind: str, settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    layers, bits = CACHES[kind]
    for context in settings.contexts:
        model = Toy(layers)
        ours = ours_rollback(model, bits, context, settings.repeats)
        theirs = mlx_lm_rollback(model, bits, context, settings.repeats)
        yield {"cache": kind, "context": context, **ours, **theirs}


def ours_rollback(model: Toy, bits: int | None, context: int, repeats: int) -> dict[str, Any]:
    target = LMTarget(model, kv_bits=bits)
    for low in range(0, context, CHUNK):
        target.prefill(text(low, low + CHUNK))
    block = mx.array(text(0, WRITTEN), dtype=mx.int32)
    commits, rewinds, copied, next_pass = [], [], [], []
    for _ in range(repeats + 1):
        size, saved = target.size, [c.snapshot() for c in model.last.caches]
        next_pass.append(rise(lambda: mx.eval(target.verify(block)))[1])
        caches = model.last.caches

        def alone(caches: list[Any] = caches, size: int = size, saved: list[Any] = saved) -> None:
            for cache, before in zip(caches, saved, strict=True):
                if isinstance(cache, RecurrentCache):
                    cache.restore(before)
                else:
                    cache.rewind(size)

        rewinds.append(rise(alone)[0])
        target.commit(0)
        mx.eval(target.verify(block))
        commits.append(rise(lambda: target.commit(KEPT))[0])
        settled(caches)
        mx.eval(target.verify(block))
        copied.append(rise(lambda c=caches: (target.commit(KEPT), settled(c)))[1])
    return {
        "commit us": median_us(commits),
        "rewind us": median_us(rewinds),
        "bytes": max(copied[1:]),
        "next pass": int(statistics.median(next_pass[1:])),
    }


def mlx_lm_rollback(model: Toy, bits: int | None, context: int, repeats: int) -> dict[str, Any]:
    caches = make_prompt_cache(model)
    for low in range(0, context, CHUNK):
        mx.eval(model(mx.array([text(low, low + CHUNK)]), caches), [c.state for c in caches])
    if bits:
        caches[:-1] = [c.to_quantized(group_size=64, bits=bits) for c in caches[:-1]]
    block = mx.array([text(0, WRITTEN)])
    trims, copied, next_pass, taken = [], [], [], 0
    for _ in range(repeats + 1):
        next_pass.append(rise(lambda: mx.eval(model(block, caches)))[1])
        seconds, grown = rise(lambda: trim_prompt_cache(caches, WRITTEN - KEPT))
        trims.append(seconds)
        copied.append(grown)
        taken = trim_prompt_cache(caches, 0) if caches[0].is_trimmable() else -1
    refused = taken < 0
    return {
        "mlx-lm trim us": "refused" if refused else median_us(trims),
        "mlx-lm bytes": "-" if refused else max(copied[1:]),
        "mlx-lm next pass": int(statistics.median(next_pass[1:])),
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
        return generate(target, make(target), Fixed(K), sampler, text(0, context), max_tokens=room)

    return steps


class Scripted:
    """Drafts the same tokens each time; nearly all are rejected."""

    needs = FeatureSpec()

    def observe(self, history: Any, features: Features) -> None:
        pass

    def draft(self, history: Any, limit: int, sampler: Sampler) -> Draft:
        return Draft(mx.array(text(0, limit), dtype=mx.int32))


def draft_model(layers: int) -> Callable[[LMTarget], Drafter]:
    return lambda target: DraftModel(Toy(("full",) * layers), Vocabulary(VOCAB, VOCAB))


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


def rise(action: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and bytes by which memory rose above what was in use."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    return seconds, max(mx.get_peak_memory() - before, 0)


def settled(caches: list[Any]) -> None:
    """Compute whatever the caches were left to compute."""
    mx.eval([c.arrays() for c in caches])
    mx.synchronize()


def text(low: int, high: int) -> list[int]:
    return [(7 * (i % 11) + i // 5) % VOCAB for i in range(low, high)]


def median_us(seconds: list[float]) -> float:
    return round(statistics.median(seconds[1:]) * 1e6, 2)


def flatness(kind: str, results: list[dict[str, Any]]) -> float:
    times = [r["commit us"] for r in results if r["cache"] == kind]
    return round(times[-1] / times[0], 3)


def show(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
