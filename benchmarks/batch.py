"""What does decoding many sequences in one pass gain, with drafts and without?

Arms, each with 1, 2, 4 and 8 sequences that run at a time:

  turns plain, turns K=n    a round of one sequence after the other, each with caches of its own
  batch plain, batch K=n    one pass for all, drafts of their own
  batch adaptive            the same, the policy chooses the lengths
  mlx-lm                    its BatchGenerator

A figure is the tokens a second of all sequences together, from the moment when all run until the first one
ends. The arms of a block run one after the other on the same prompts, in an order that changes from block to
block; ratios are those of one block. The texts of all arms are compared with those of plain turns.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from arms import PROMPTS, Folders
from mlx_lm.generate import BatchGenerator
from timing import finish, interval, parser, table

from mlx_spec import engine, load
from mlx_spec.batch import Batch
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.sampling import Sampling

COUNTS = (1, 2, 4, 8)
BASE = "turns plain"

Emitted = tuple[int, list[int]]  # index of a sequence, and its tokens
Arm = Callable[[Sequence[list[int]], int], Iterator[list[Emitted]]]  # steps; the first when all run


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", default="demo")
    options.add_argument("--drafter")
    options.add_argument("--dtype", help="cast all weights to this type")
    options.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    options.add_argument("--lengths", type=int, nargs="+", default=[2, 4], help="draft tokens")
    options.add_argument("--tokens", type=int, default=64, help="tokens of each sequence")
    options.add_argument("--blocks", type=int, default=5)
    options.add_argument("--prompts", type=Path, help="a text file, one prompt a line")
    settings = options.parse_args()
    if settings.quick:
        settings.counts, settings.lengths, settings.tokens, settings.blocks = [2], [2], 8, 1
    started = time.time()
    folders = Folders.find(settings.target, settings.drafter)
    folders = folders.cast(settings.dtype) if settings.dtype else folders
    pair = load(folders.target, folders.drafter or "lookup")
    if isinstance(pair.policies, AdaptivePolicies):
        pair.calibrate()
    prompts, arms = read_prompts(settings, pair), arms_of(pair, settings.lengths)
    results = {count: measure(arms, prompts, count, settings) for count in settings.counts}
    for key, title in (("speeds", "tokens a second of all"), ("ratios", f"over {BASE}, with 95 % intervals")):
        print(f"\n{title}:\n")
        head = ["arm", *(f"B = {count}" for count in settings.counts)]
        table(
            head, [[arm, *(shown(results[count][key].get(arm)) for count in settings.counts)] for arm in arms]
        )
    differing = sum(result["differing"] for result in results.values())
    print(f"texts that differ from {BASE}: {differing}")
    finish("batch", {str(count): result for count, result in results.items()}, settings, started)


def shown(value: float | list[float] | None) -> str:
    """Return a figure, or a ratio with its interval."""
    if isinstance(value, list):
        return f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"
    return "" if value is None else f"{value:.1f}"


def read_prompts(settings: argparse.Namespace, pair: Pair) -> list[list[int]]:
    """Return as many prompts as the largest count, with contexts of different length."""
    file = settings.prompts or PROMPTS / ("demo.txt" if settings.target == "demo" else "chat.txt")
    lines = itertools.cycle(file.read_text().splitlines())
    found = []
    for i, line in zip(range(max(settings.counts)), lines, strict=False):
        text = f"{line} " * (1 + i % 3)
        message = [{"role": "user", "content": text}]
        found.append(pair.text.prompt(message) if pair.text.chats else pair.text.encode(text))
    return found


def arms_of(pair: Pair, lengths: Sequence[int]) -> dict[str, Arm]:
    """Return the arms by name."""

    def sequences(prompts: Sequence[list[int]], tokens: int, length: int | None) -> list[Any]:
        made = []
        for prompt in prompts:
            parts, sampler = pair.open(), Sampling().sampler(len(prompt), pair.info.vocab_size)
            policy = parts.policy if length is None else FixedPolicy(length)
            made.append(engine.RunningSequence(parts.target, parts.drafters, policy, sampler, prompt, tokens))
            list(made[-1].prefill())
        return made

    def turns(prompts: Sequence[list[int]], tokens: int, length: int) -> Iterator[list[Emitted]]:
        rounds = [engine.decode(each) for each in sequences(prompts, tokens, length)]
        while True:
            yield [(i, next(each).tokens) for i, each in enumerate(rounds)]

    def together(prompts: Sequence[list[int]], tokens: int, length: int | None) -> Iterator[list[Emitted]]:
        batch: Batch = pair.batch(len(prompts))
        if length is not None:
            batch = Batch(batch.share, len(prompts))
        for each in sequences(prompts, tokens, length):
            batch.add(each)
        early: list[Emitted] = []
        while len(batch):
            step: list[Emitted] = []
            for index, round in batch.step():
                assert not isinstance(round, Exception), round
                step.append((index, round.tokens))
            early += step
            if sum(batch.group_sizes) == len(prompts):
                yield early
                early = []
        yield early

    def mlx_lm(prompts: Sequence[list[int]], tokens: int) -> Iterator[list[Emitted]]:
        generator = BatchGenerator(pair._model, max_tokens=tokens, completion_batch_size=len(prompts))
        ids = generator.insert([list(prompt) for prompt in prompts])
        while responses := generator.next_generated():
            yield [(ids.index(response.uid), [response.token]) for response in responses]
        generator.close()

    arms: dict[str, Arm] = {BASE: lambda prompts, tokens: turns(prompts, tokens, 0)}
    for k in lengths:
        arms[f"turns K={k}"] = lambda prompts, tokens, k=k: turns(prompts, tokens, k)
    arms["batch plain"] = lambda prompts, tokens: together(prompts, tokens, 0)
    for k in lengths:
        arms[f"batch K={k}"] = lambda prompts, tokens, k=k: together(prompts, tokens, k)
    if isinstance(pair.policies, AdaptivePolicies):
        arms["batch adaptive"] = lambda prompts, tokens: together(prompts, tokens, None)
    return {**arms, "mlx-lm": mlx_lm}


def run(arm: Arm, prompts: Sequence[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Return the tokens a second of all sequences while all run, and the texts until then."""
    texts: list[list[int]] = [[] for _ in prompts]
    steps = arm(prompts, tokens)
    for index, new in next(steps):
        texts[index] += new
    before, start = sum(map(len, texts)), time.perf_counter()
    for step in steps:
        for index, new in step:
            texts[index] += new
        if max(map(len, texts)) >= tokens:
            break
    seconds = time.perf_counter() - start
    steps.close()  # type: ignore[attr-defined]
    mx.clear_cache()
    return (sum(map(len, texts)) - before) / seconds, texts


def measure(
    arms: dict[str, Arm], prompts: list[list[int]], count: int, settings: argparse.Namespace
) -> dict[str, Any]:
    """Return speeds and ratios of all arms with `count` sequences."""
    order, chance = list(arms), random.Random(settings.seed)
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    differing = 0
    for block in range(settings.blocks + 1):  # the first one compiles
        chance.shuffle(order)
        found = {name: run(arms[name], prompts[:count], settings.tokens) for name in order}
        for name, (speed, texts) in found.items():
            if block or not settings.blocks:
                speeds[name].append(speed)
            pairs = zip(texts, found[BASE][1], strict=True)
            differing += sum(any(x != y for x, y in zip(a, b, strict=False)) for a, b in pairs)
        print(f"B = {count}, block {block}", file=sys.stderr)
    ratios = {
        name: interval([[a / b for a, b in zip(values, speeds[BASE], strict=True)]], settings.seed)
        for name, values in speeds.items()
    }
    middle = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    return {"speeds": middle, "ratios": ratios, "differing": differing}


if __name__ == "__main__":
    main()
