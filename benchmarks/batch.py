"""What does decoding many sequences in one pass gain, with drafts and without?

Arms, each with 1, 2, 4 and 8 sequences that run at a time:

  turns plain               sequences take turns of one round, each with its own caches
  batch plain, batch K=n    one pass for all sequences, each with its own drafts
  batch adaptive            the same, with lengths from the policy
  mlx-lm                    its BatchGenerator

A figure is the tokens a second of all sequences together, from the moment when all of them decode until the
first one ends. The arms of a block decode the same prompts. They take turns of a few rounds, so that a slow
moment of the machine affects all of them. At the end of a turn they wait for the device. A ratio compares
arms of one block. All texts are compared to the texts of "turns plain".

With `--acceptance`, drafts are scripted and take no time. Each is accepted with that probability, which is
drawn once for each position. `--float32` decodes with dequantized weights.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from arms import PROMPTS, Folders, Prompt
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.utils import dequantize_model
from timing import finish, interval, parser, table

from mlx_spec import load
from mlx_spec.decode import Batch
from mlx_spec.decode.loop import decode, generate
from mlx_spec.decode.running import RunningSequence
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy, calibrate
from mlx_spec.policy.batch import BatchPolicies
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Sampler

COUNTS = (1, 2, 4, 8)
BASE, TURNS, ADAPTIVE = "mlx-lm", "turns plain", "batch adaptive"
MORE_TRUTH = 20  # scripted tokens after the last one that counts

Emitted = tuple[int, list[int]]  # index of a sequence, and its tokens
Arm = Callable[[Sequence[list[int]], int], Iterator[list[Emitted]]]  # steps; the first when all run


@dataclass(frozen=True)
class Script(Prompt):
    """A prompt, its true continuation, and the positions at which the draft is accepted."""

    truth: tuple[int, ...] = ()
    right: tuple[bool, ...] = ()


class Scripted:
    """Drafts the truth at the script's accepted positions, another token at the others."""

    needs = FeatureSpec()

    def __init__(self, script: Script, vocab: int) -> None:
        lines = zip(script.truth, script.right, strict=True)
        self._tokens = [*script.tokens, *(token if right else (token + 1) % vocab for token, right in lines)]

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return Draft(mx.array(self._tokens[len(history) : len(history) + limit], dtype=mx.int32))


def main() -> None:
    settings = arguments()
    started = time.time()
    folders = Folders.find(settings.target, settings.drafter)
    folders = folders.cast(settings.dtype) if settings.dtype else folders
    pair = load(folders.target, folders.drafter or "lookup")
    if settings.float32:
        pair._model.set_dtype(mx.float32)
        dequantize_model(pair._model)
    prompts = read_prompts(settings, pair)
    arms = arms_of(pair, settings, scripts(pair, prompts, settings))
    results = {count: measure(arms, prompts, count, settings) for count in settings.counts}
    report(results, list(arms))
    finish("batch", {str(count): result for count, result in results.items()}, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--target", default="demo")
    options.add_argument("--drafter")
    options.add_argument("--dtype", help="cast all weights to this type")
    options.add_argument("--float32", action="store_true", help="dequantize the target's weights")
    options.add_argument("--acceptance", type=float, help="script the drafts")
    options.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    options.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4], help="draft tokens")
    options.add_argument("--tokens", type=int, default=64, help="tokens of each sequence")
    options.add_argument("--blocks", type=int, default=5)
    options.add_argument("--turn", type=int, default=8, help="rounds of one arm before the next one's")
    options.add_argument("--prompts", type=Path, help="a text file, one prompt a line")
    settings = options.parse_args()
    if settings.quick:
        settings.counts, settings.lengths, settings.tokens, settings.blocks = [2], [2], 8, 1
    return settings


def report(results: dict[int, dict[str, Any]], arms: list[str]) -> None:
    """Print the tables."""
    head = ["arm", *(f"B = {count}" for count in results)]
    for key, title in (("speeds", "tokens a second of all"), ("ratios", f"over {BASE}, with 95 % intervals")):
        print(f"\n{title}:\n")
        table(head, [[arm, *(shown(each[key].get(arm)) for each in results.values())] for arm in arms])
    print("batch adaptive over the best of plain and fixed lengths, and what it did:\n")
    rows = [[name, *(shown(each["best"][name]) for each in results.values())] for name in ("arm", "ratio")]
    table(head, [*rows, ["tokens a round", *(each["adaptive"] for each in results.values())]])
    print(f"texts that differ from {TURNS}: {sum(each['differing'] for each in results.values())}")


def shown(value: float | list[float] | str | None) -> str:
    """Return a figure, or a ratio with its interval."""
    if isinstance(value, str):
        return value
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
        found.append(pair.tokenizer.prompt(message) if pair.tokenizer.chats else pair.tokenizer.encode(text))
    return found


def scripts(
    pair: Pair, prompts: list[list[int]], settings: argparse.Namespace
) -> dict[tuple[int, ...], Script]:
    """Return the script of each prompt; none if drafts are not scripted."""
    found = {}
    for i, prompt in enumerate(prompts if settings.acceptance else ()):
        sampler, count = Sampling().sampler(len(prompt), pair.info.vocab_size), settings.tokens + MORE_TRUTH
        rounds = generate(pair.open().target, (), FixedPolicy(0), sampler, prompt, max_tokens=count)
        truth = tuple(token for round in rounds for token in round.tokens)
        chance = random.Random(f"{settings.seed} {i} {settings.acceptance}")
        right = tuple(chance.random() < settings.acceptance for _ in truth)
        found[tuple(prompt)] = Script("scripted", prompt, settings.tokens, truth=truth, right=right)
    return found


def arms_of(
    pair: Pair, settings: argparse.Namespace, scripted: dict[tuple[int, ...], Script]
) -> dict[str, Arm]:
    """Return the arms by name."""
    vocab, policies = pair.info.vocab_size, pair.policies
    if scripted:
        policies = BatchPolicies(["scripted"])
        prompt, script = next(iter(scripted.items()))
        target = pair.open().target
        target.prefill(list(prompt[:-1]))
        watch = calibrate.Stopwatch(limit_s=1.0)
        measuring = calibrate.measure(target, (Scripted(script, vocab),), list(prompt), vocab, (), watch)
        while True:
            try:
                next(measuring)
            except StopIteration as done:
                policies.use(done.value)
                break
    else:
        for _ in pair.calibrate():
            pass
    assert isinstance(policies, BatchPolicies)

    def sequences(prompts: Sequence[list[int]], tokens: int, length: int | None) -> list[Any]:
        made = []
        for prompt in prompts:
            parts, sampler = pair.open(), Sampling().sampler(len(prompt), vocab)
            drafters: Sequence[Drafter] = parts.drafters
            if scripted:
                drafters = (Scripted(scripted[tuple(prompt)], vocab),)
            policy = policies.policy() if length is None else FixedPolicy(length, names=pair.fixed_names)
            parts_of = (parts.target, drafters, policy, sampler, text_prompt(prompt), tokens)
            made.append(RunningSequence(*parts_of))
            list(made[-1].prefill())
        return made

    def turns(prompts: Sequence[list[int]], tokens: int) -> Iterator[list[Emitted]]:
        rounds = [decode(each) for each in sequences(prompts, tokens, 0)]
        while True:
            yield [(i, next(each).tokens) for i, each in enumerate(rounds)]

    def together(prompts: Sequence[list[int]], tokens: int, length: int | None) -> Iterator[list[Emitted]]:
        batch = Batch(pair.batch(1).target_batch, len(prompts), policies.group if length is None else None)
        for each in sequences(prompts, tokens, length):
            batch.add(each)
        early: list[Emitted] = []
        while len(batch):
            step: list[Emitted] = []
            for index, round in batch.step():
                assert not isinstance(round, Exception), round
                step.append((index, round.tokens))
            early += step
            if batch.group_sizes == [len(prompts)]:
                yield early
                early = []
        yield early

    def mlx_lm(prompts: Sequence[list[int]], tokens: int) -> Iterator[list[Emitted]]:
        generator = BatchGenerator(pair._model, max_tokens=tokens, completion_batch_size=len(prompts))
        ids = generator.insert([list(prompt) for prompt in prompts])
        while responses := generator.next_generated():
            yield [(ids.index(response.uid), [response.token]) for response in responses]
        generator.close()

    arms: dict[str, Arm] = {TURNS: turns}
    for k in (0, *settings.lengths):
        name = f"batch K={k}" if k else "batch plain"
        arms[name] = lambda prompts, tokens, k=k: together(prompts, tokens, k)
    arms[ADAPTIVE] = lambda prompts, tokens: together(prompts, tokens, None)
    return {**arms, BASE: mlx_lm}


class Run:
    """One arm in one block: its texts so far, and the time since all sequences run."""

    def __init__(self, arm: Arm, prompts: Sequence[list[int]], tokens: int) -> None:
        self.texts: list[list[int]] = [[] for _ in prompts]
        self._steps, self._limit = arm(prompts, tokens), tokens
        self._before, self._seconds, self._rounds = 0, 0.0, 0
        self._read(next(self._steps))
        self._before = sum(map(len, self.texts))
        self._wait()

    @property
    def is_done(self) -> bool:
        return max(map(len, self.texts)) >= self._limit

    @property
    def speed(self) -> float:
        """Return the tokens a second of all sequences."""
        return (sum(map(len, self.texts)) - self._before) / self._seconds

    @property
    def tokens_a_round(self) -> float:
        """Return the tokens of a sequence in a round."""
        return (sum(map(len, self.texts)) - self._before) / self._rounds / len(self.texts)

    def take_turn(self, rounds: int) -> None:
        """Decode a turn of `rounds` rounds, fewer if a sequence ends."""
        start = time.perf_counter()
        while rounds and not self.is_done:
            self._read(next(self._steps))
            self._rounds, rounds = self._rounds + 1, rounds - 1
        self._wait()
        self._seconds += time.perf_counter() - start

    def close(self) -> None:
        self._steps.close()  # type: ignore[attr-defined]

    def _read(self, step: list[Emitted]) -> None:
        for index, new in step:
            self.texts[index] += new

    def _wait(self) -> None:
        """Wait for the token that the arm may have queued."""
        mx.synchronize()
        mx.synchronize(generation_stream)


def measure(
    arms: dict[str, Arm], prompts: list[list[int]], count: int, settings: argparse.Namespace
) -> dict[str, Any]:
    """Return speeds and ratios of all arms with `count` sequences."""
    order, chance = list(arms), random.Random(settings.seed)
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    differing, lengths = 0, list[float]()
    for block in range(settings.blocks + 1):  # the first one compiles
        runs = {name: Run(arms[name], prompts[:count], settings.tokens) for name in order}
        while left := [name for name in order if not runs[name].is_done]:
            chance.shuffle(left)
            for name in left:
                runs[name].take_turn(settings.turn)
        for name, run in runs.items():
            run.close()
            if block or not settings.blocks:
                speeds[name].append(run.speed)
            pairs = zip(run.texts, runs[TURNS].texts, strict=True)
            differing += sum(any(x != y for x, y in zip(a, b, strict=False)) for a, b in pairs)
        lengths.append(runs[ADAPTIVE].tokens_a_round)
        mx.clear_cache()
        print(f"B = {count}, block {block}", file=sys.stderr)

    def ratio(name: str, base: str) -> list[float]:
        return interval([[a / b for a, b in zip(speeds[name], speeds[base], strict=True)]], settings.seed)

    middle = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    best = max((name for name in arms if name not in (TURNS, ADAPTIVE, BASE)), key=lambda name: middle[name])
    return {
        "speeds": middle,
        "ratios": {name: ratio(name, BASE) for name in arms},
        "best": {"arm": best, "ratio": ratio(ADAPTIVE, best)},
        "adaptive": round(statistics.median(lengths), 2),
        "differing": differing,
    }


if __name__ == "__main__":
    main()
