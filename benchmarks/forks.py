"""How long do others wait while a prompt copies the beginning of a conversation that is being answered?

A conversation of `--gigabytes` of K and V decodes, one token a round. The last one has windows as large as
those of Gemma 4 12B instead. Another prompt with the same beginning forks it: between two rounds it copies
one array of one layer. "At once" copies all of them between two rounds. The model computes
nothing: it writes rows of real size. "Round" is the longest round of the conversation meanwhile: it would
copy whole buffers if the fork still referred to them. Memory is what the fork adds at its peak, over the
bytes of its caches. Times are CPU times of the process, because this machine is shared. A step copies one
array: it takes as long as all of them, divided by their number.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from reread import Layer
from support.pairs import TOKENIZER
from support.tiny import VOCAB

from mlx_spec.apps.server.engine.prefix_cache import PrefixCache
from mlx_spec.decode.running import prefill
from mlx_spec.pair import Pair, PairInfo
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.tokenizer import Tokenizer

HEAD_DIM = 1024  # with two arrays a layer: 8 KB a token and layer in float32


class Rows(nn.Module):
    """Layers that write K and V, and compute nothing."""

    def __init__(self, layers: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.embed_tokens, self.norm = nn.Embedding(VOCAB, 1), nn.Identity()
        self.layers = [Layer(0, HEAD_DIM) for _ in range(layers)]
        self.lm_head = nn.Linear(1, VOCAB)

    def make_cache(self) -> list[Any]:
        """Return mlx-lm's caches."""
        return [RotatingKVCache(self.window) if self.window else KVCache() for _ in self.layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Return logits [1, T, V]."""
        x = tokens[..., None].astype(mx.float32)
        for layer, its in zip(self.layers, cache, strict=True):
            x = layer(x, its)
        return mx.broadcast_to(x, (*tokens.shape, VOCAB))


def measure(layers: int, tokens: int, in_steps: bool, window: int = 0) -> dict[str, float]:
    """Return milliseconds of the longest step and round, of all steps, and what the fork takes."""
    pair = Pair(
        PairInfo("rows", None, VOCAB, None, 0, 0),
        Tokenizer(TOKENIZER, None, ()),
        Rows(layers, window),
        [],
        FixedPolicy(0),
    )
    cache = PrefixCache(pair.open, 8, lambda: 10**12)
    prompt = text_prompt(range(tokens))
    sequence = cache.take(prompt)
    sequence.rewind_to_prefix(prompt)
    for _ in prefill(sequence.target, (), prompt):
        pass
    target = sequence.target
    shared = tokens - (1 if window else 200)
    other = text_prompt([*range(shared), *range(5, 105)])
    rounds, steps = [round_ms(target)], list[float]()
    mx.clear_cache()
    mx.reset_peak_memory()
    before, start = mx.get_active_memory(), time.process_time()
    fork = cache.take(other)
    assert cache.counters.forks == 1 and fork.rewind_to_prefix(other) == shared
    copies = fork.target.copies()
    first = 1e3 * (time.process_time() - start)
    while True:
        start = time.process_time()
        made = (
            list(copies) if not in_steps else [array for array in [next(copies, None)] if array is not None]
        )
        mx.eval(made)
        if not made:
            break
        del made
        steps.append(1e3 * (time.process_time() - start))
        rounds.append(round_ms(target))
    added = mx.get_peak_memory() - before
    return {
        "first step ms": round(first, 1),
        "steps": len(steps),
        "longest step ms": round(max(steps), 1),
        "all ms": round(sum(steps)),
        "longest round ms": round(max(rounds), 1),
        "added memory": round(added / fork.nbytes, 2),
    }


def round_ms(target: Any) -> float:
    """Return the milliseconds of a round of one token."""
    start = time.process_time()
    mx.eval(target.verify(mx.array([1])))
    target.commit(1)
    return 1e3 * (time.process_time() - start)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--gigabytes", type=float, nargs="*", default=[0.25, 0.5, 1])
    options.add_argument("--layers", type=int, default=16)
    settings, started = options.parse_args(), time.time()
    sizes = [0.05] if settings.quick else settings.gigabytes
    results: dict[str, Any] = {}
    for size in sizes:
        for name, in_steps in (("in steps", True), ("at once", False)):
            # The buffers have room for the rounds: they grow by 256 rows.
            tokens = int(size * 1e9) // (8 * HEAD_DIM * settings.layers) // 256 * 256 + 16
            results[f"{size} GB, {name}"] = measure(settings.layers, tokens, in_steps)
            mx.clear_cache()
    for name, in_steps in (("in steps", True), ("at once", False)):
        results[f"windows, {name}"] = measure(4 if settings.quick else 40, 1400, in_steps, window=1024)
    table(["fork", *next(iter(results.values()))], [[n, *row.values()] for n, row in results.items()])
    finish("forks", results, settings, started)


if __name__ == "__main__":
    main()
