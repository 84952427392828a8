"""What does the host do in a round beyond what it does in mlx-lm? CPU time of the main thread.

A GPU computes a pass of a 4-bit model of 1 to 4 billion weights in 8 to 20 ms. A queued token hides the work
of the host; after a draft was read, the device waits until the next pass begins. So two times count: all work
of a round without evaluations and reads, as a paired difference to mlx-lm's loop, and the time from the read
of a drafted round to the first work of the next pass. Operations are counted as on Metal: normalization,
rotary embedding and attention are one each, and layers start as on a GPU. The arms take turns of 16 rounds.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support import tiny
from support.pairs import TEMPLATE, TOKENIZER
from support.virtual_clock import CURVES

from mlx_spec.decode import round as one_round
from mlx_spec.drafters.lookup import lookup_source
from mlx_spec.model import hooks
from mlx_spec.pair import Pair, PairInfo
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate

BURST = 16  # rounds of an arm in a turn
now = time.thread_time


class Watch:
    """CPU seconds in evaluations, and from each read to the evaluation after it."""

    def __init__(self) -> None:
        self.evaluating, self.read_at, self.was_draft = 0.0, 0.0, False
        self.idle = list[float]()  # after drafted rounds

    def evaluation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            start = now()
            if self.read_at:
                self.idle += [start - self.read_at] if self.was_draft else []
                self.read_at = 0.0
            try:
                return function(*given)
            finally:
                self.evaluating += now() - start

        return timed

    def read(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            start = now()
            found = function(*given)
            self.read_at = now()
            self.evaluating += self.read_at - start
            return found

        return timed


class AsOnMetal:
    """MLX for `hooks.py`, which asks for the device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def default_device(self) -> mx.Device:
        return mx.Device(mx.gpu)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=28)
    options.add_argument("--turns", type=int, default=40)
    settings, started = options.parse_args(), time.time()
    count, layers = (3, 2) if settings.quick else (settings.turns, settings.layers)
    mx.fast.rms_norm = lambda x, weight, eps, **_: mx.negative(x)  # type: ignore[assignment]
    mx.fast.rope = lambda x, *_, **__: mx.negative(x)  # type: ignore[assignment]
    mx.fast.scaled_dot_product_attention = lambda q, k, v, **_: mx.depends([mx.negative(q)], [k, v])[0]  # type: ignore[assignment]
    hooks.mx = AsOnMetal()  # type: ignore[assignment]
    model, watch = tiny.full(settings.seed, vocab_size=tiny.VOCAB, num_hidden_layers=layers), Watch()
    arms = {"mlx-lm": mlx_lm(model), **{name: rounds(model, name) for name in ("plain", "K = 4", "adaptive")}}
    for arm in arms.values():
        for _ in range(BURST):
            next(arm)
    real = mx.async_eval, mx.eval, one_round._read
    mx.async_eval, mx.eval = watch.evaluation(mx.async_eval), watch.evaluation(mx.eval)
    one_round._read = watch.read(one_round._read)
    gc.collect()
    gc.freeze()
    spent, idle = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    names = list(arms)
    for _ in range(count):
        names = [*names[1:], names[0]]
        for name in names:
            watch.evaluating, watch.read_at = 0.0, 0.0
            watch.idle.clear()
            start = now()
            for _ in range(BURST):
                watch.was_draft = next(arms[name])
            spent[name].append(1e3 * (now() - start - watch.evaluating) / BURST)
            idle[name] += [1e3 * each for each in watch.idle]
    mx.async_eval, mx.eval, one_round._read = real
    results = {}
    for name, times in spent.items():
        beside = [own - theirs for own, theirs in zip(times, spent["mlx-lm"], strict=True)]
        results[name] = {
            "ms a round": round(statistics.median(times), 3),
            "more than mlx-lm": round(statistics.median(beside), 3),
            "ms from a read to the next pass": round(statistics.median(idle[name]), 3) if idle[name] else "",
            "least": round(min(idle[name]), 3) if idle[name] else "",
        }
    columns = list(results["plain"])
    table(["arm", *columns], [[name, *(row[key] for key in columns)] for name, row in results.items()])
    finish("host", results, settings, started)


def mlx_lm(model: Any) -> Iterator[bool]:
    """Yield False after each token of mlx-lm's loop."""
    for _ in generate_step(mx.array(prompt()), model, max_tokens=10**6):
        yield False


def rounds(model: Any, name: str) -> Iterator[bool]:
    """Yield after each round whether it drafted. The tiny model repeats itself, so lookup has drafts."""
    source = [] if name == "plain" else [lookup_source()]
    names = [each for one in source for each in one.names]
    policies: AdaptivePolicies | FixedPolicy = FixedPolicy(4 if name == "K = 4" else 0, names=names)
    if name == "adaptive":
        policies = AdaptivePolicies(names, copying=names)
        policies.use(CURVES["M3 Max"].table([0.0] * len(names)))
    tokenizer = Tokenizer(TOKENIZER, ChatTemplate(TEMPLATE, {}), ())
    pair = Pair(PairInfo("tiny", name, tiny.VOCAB, None, 0, 0), tokenizer, model, source, policies)
    for each in pair.generate(prompt(), max_tokens=10**6):
        yield each.kind == "draft"


def prompt() -> list[int]:
    return list(range(40, 56)) * 6


if __name__ == "__main__":
    main()
