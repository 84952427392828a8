"""How fast is decoding, against mlx-lm and mlx-vlm on the same weights in the same run?

Arms: mlx-lm (its `generate_step`; "text" is `stream_generate`, which also detokenises), mlx_spec plain, at
fixed K, adaptive (one policy for all prompts, as in a conversation; "cold": a new one each time) and with
lookup, mlx-vlm plain and with its own MTP rounds. All are greedy, ignore end-of-text tokens and generate the
same number of tokens: as many as the plain answer has, at most `--tokens`.

Protocol: for each prompt and repeat one block, mlx-lm first and last, the other arms between in the order of
a balanced Latin square. An arm's ratio is taken to the mean of the two mlx-lm runs of its block; the second
of them against the first is the null arm. The first block of each prompt is dropped, and so are blocks whose
null is off by more than `--spread`. Medians of ratios with bootstrap 95 % intervals, prompts drawn first.

"decode" counts from the first tokens on, so the prompt is left out; "whole" is end to end. Tokens are
compared with mlx-lm's: how many prompts differ, and the first position that does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arms
import mlx.core as mx
from timing import finish, interval, latin_square, parser, table

from mlx_spec.pair import Pair
from mlx_spec.tuning.policy import Fixed

BASE = "mlx-lm"
OURS = ["plain", *(f"K={k}" for k in range(1, 7)), "adaptive", "adaptive, cold", "lookup"]
DEFAULT = ["mlx-lm, text", *OURS, "mlx-vlm", *(f"mlx-vlm K={k}" for k in range(1, 5))]


@dataclass(frozen=True)
class Run:
    tokens: list[int]
    decode: float  # tokens a second behind the first
    whole: float  # tokens a second from the start


@dataclass(frozen=True)
class Block:
    """All arms once on one prompt."""

    first: Run
    last: Run
    runs: dict[str, Run]

    @property
    def null(self) -> float:
        return self.last.decode / self.first.decode

    def ratio(self, arm: str, measure: str) -> float:
        base = (getattr(self.first, measure) + getattr(self.last, measure)) / 2
        return float(getattr(self.runs[arm], measure) / base)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", default="demo", help="demo, or a folder")
    options.add_argument("--drafter", help="a folder")
    options.add_argument("--prompts", type=Path, help="a file with one prompt a line")
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--least", type=int, default=16, help="tokens of a shorter answer are gone on with")
    options.add_argument("--repeats", type=int, default=9, help="blocks a prompt; the first is dropped")
    options.add_argument("--arms", nargs="+", default=DEFAULT)
    options.add_argument("--dtype", help="cast all weights, as to float32")
    options.add_argument("--spread", type=float, default=0.04)
    settings = options.parse_args()
    if settings.quick:
        settings.tokens, settings.repeats = 8, 2
        settings.arms = ["plain", "K=2", "adaptive", "lookup", "mlx-vlm", "mlx-vlm K=2"]
    started = time.time()
    folders = arms.Folders.find(settings.target, settings.drafter)
    if settings.dtype:
        folders = folders.cast(settings.dtype)
    pair, own = arms.ours(folders)
    decoders = {**arms.of_mlx_lm(folders), **own, **arms.of_mlx_vlm(folders)}
    names = [name for name in settings.arms if name in decoders]
    prompts = read_prompts(settings, pair)
    blocks = measure(decoders, names, prompts, settings)
    results = summary(blocks, names, settings)
    report(results, prompts)
    results["parameters"] = arms.size(folders)
    finish("decode", results, settings, started)


def read_prompts(settings: argparse.Namespace, pair: Pair) -> list[tuple[list[int], int]]:
    """Prompts as tokens, each with the number of tokens to generate."""
    result = []
    for prompt in arms.prompts(settings, pair):
        length = pair.facts.context_length
        most = min(settings.tokens, length - len(prompt)) if length else settings.tokens
        answer = [t for r in arms.rounds(pair, Fixed(0), prompt, most) for t in r.tokens]
        ends = [i + 1 for i, token in enumerate(answer) if token in pair.text.eos]
        result.append((prompt, min(most, max(ends[0] if ends else most, settings.least))))
    return result


def measure(
    decoders: dict[str, arms.Decoder],
    names: list[str],
    prompts: list[tuple[list[int], int]],
    settings: argparse.Namespace,
) -> list[list[Block]]:
    """Blocks by prompt, the first of each already dropped."""
    square = latin_square(names)
    random.Random(settings.seed).shuffle(square)
    done: list[list[Block]] = [[] for _ in prompts]
    for repeat in range(settings.repeats):
        for i, (prompt, count) in enumerate(prompts):
            order = square[(repeat * len(prompts) + i) % len(square)]
            first, *runs, last = [run(decoders[n], prompt, count) for n in (BASE, *order, BASE)]
            block = Block(first, last, dict(zip(order, runs, strict=True)))
            if repeat > 0:
                done[i].append(block)
        print(f"repeat {repeat + 1} of {settings.repeats}", file=sys.stderr, flush=True)
    return done


def run(decoder: arms.Decoder, prompt: list[int], count: int) -> Run:
    mx.synchronize()
    tokens: list[int] = []
    start = time.perf_counter()
    first, at = 0, start
    for new in decoder(prompt, count):
        tokens += new
        end = time.perf_counter()
        if first == 0:
            first, at = len(tokens), end
        if len(tokens) >= count:
            break
    mx.synchronize()  # mlx-lm has queued one step more
    return Run(tokens, (len(tokens) - first) / (end - at), len(tokens) / (end - start))


def summary(blocks: list[list[Block]], names: list[str], settings: argparse.Namespace) -> dict[str, Any]:
    quiet = [[b for b in by_prompt if abs(b.null - 1) <= settings.spread] for by_prompt in blocks]
    total, kept = sum(map(len, blocks)), sum(map(len, quiet))
    used = quiet if all(quiet) else blocks
    flat = [b for by_prompt in used for b in by_prompt]
    base = [r.decode for b in flat for r in (b.first, b.last)]
    rows: dict[str, Any] = {}
    for name in names:
        decode = [[b.ratio(name, "decode") for b in by_prompt] for by_prompt in used]
        whole = [[b.ratio(name, "whole") for b in by_prompt] for by_prompt in used]
        rows[name] = {
            "decode": interval(decode, settings.seed),
            "whole": interval(whole, settings.seed),
            "tokens/s": round(statistics.median(b.runs[name].decode for b in flat), 1),
            **differences(name, blocks),
        }
    null = [[b.null for b in by_prompt] for by_prompt in blocks]
    nulls = sorted(n for by_prompt in null for n in by_prompt)
    return {
        "arms": rows,
        "mlx-lm tokens/s": round(statistics.median(base), 1),
        "null": interval(null, settings.seed),
        "null, quartiles": [round(nulls[len(nulls) * i // 4], 3) for i in (1, 3)],
        "blocks": total,
        "blocks within the spread": kept,
        "noisy blocks used": used is blocks,
    }


def differences(name: str, blocks: list[list[Block]]) -> dict[str, Any]:
    """How many prompts gave other tokens than mlx-lm, and where the first of them did."""
    places: dict[int, int] = defaultdict(int)
    for i, by_prompt in enumerate(blocks):
        for block in by_prompt:
            a, b = block.first.tokens, block.runs[name].tokens
            if a != b:
                places[i] = next(j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return {"differ": len(places), "first at": min(places.values(), default=None)}


def report(results: dict[str, Any], prompts: list[tuple[list[int], int]]) -> None:
    lengths = [count for _, count in prompts]
    low, high = results["null, quartiles"]
    quiet, total = results["blocks within the spread"], results["blocks"]
    print(f"\n{len(prompts)} prompts, {min(lengths)} to {max(lengths)} new tokens; ratios to mlx-lm")
    print(f"mlx-lm: {results['mlx-lm tokens/s']} tokens/s")
    print(f"null arm: {show(results['null'])}, quartiles {low} to {high}")
    print(f"{quiet} of {total} blocks are within the spread", end="")
    print("; all were used\n" if results["noisy blocks used"] else "\n")
    head = ["arm", "decode", "whole", "tokens/s", "prompts that differ", "first at"]
    rows = [
        [name, show(r["decode"]), show(r["whole"]), r["tokens/s"], r["differ"], r["first at"] or "-"]
        for name, r in results["arms"].items()
    ]
    table(head, rows)


def show(values: list[float]) -> str:
    return f"{values[0]:.3f} [{values[1]:.3f}, {values[2]:.3f}]"


if __name__ == "__main__":
    main()
