"""Does speculation win where memory is the limit? Dense float32 weights and an optimized BLAS, on a CPU.

MLX's CPU backend multiplies float32 matrices with cblas_sgemm. The BLAS that comes with MLX for Linux is
plain: a pass over M rows costs M passes. An optimized one reads the weights once for a few rows, as GPUs do.
`--blas FILE` starts the script again with that library in front, such as libopenblas.so.0 of Debian's
libopenblas0-pthread; `--coretype` is for an OpenBLAS that does not recognise the processor.

The target is random (Llama's layers, few and wide), so acceptance is scripted: the draft token for a position
is the true one with a given probability, and whether it is, is drawn once for each position: every arm has
the same luck. Drafting costs nothing, as with lookup. The arms are mlx-lm, mlx_spec plain, at fixed K and
adaptive, which gets neither the probability nor a confidence; it keeps one policy for each probability. The
protocol is that of decode.py, the kinds of prompt are the probabilities.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from arms import Decoder, Prompt, Read, Step
from decode import progress, report, show
from mlx_lm.generate import generate_step
from random_models import RandomPair, llama_f32
from timing import AGAIN, BASE, PLAIN, Block, finish, interval, measure, parser, summary, table, within

from mlx_spec.engine import generate, prefill
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.policy.calibrate import measure as calibrate
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, DraftLengthPolicy, Features, FeatureSpec, Sampler

FIXED = tuple(range(1, 9))


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
    use_blas(settings)
    started = time.time()
    mx.random.seed(settings.seed)
    pair = llama_f32(hidden=settings.hidden, layers=settings.layers)
    curve = costs(pair, settings)
    scripts = [script(pair, a, i, settings) for a in settings.acceptance for i in range(settings.prompts)]
    decoders = arms(pair)
    names = [name for name in decoders if name != BASE]
    blocks = measure(decoders, names, list[Prompt](scripts), settings)
    results = summary(blocks, list[Prompt](scripts), names, settings)
    report(results, list[Prompt](scripts))
    results |= {"megabytes": round(pair.read / 1e6, 1), "verify": curve}
    used = within(blocks, list[Prompt](scripts), settings.spread)[0]
    results["best"] = {kind: best(results, kind, scripts, used, settings.seed) for kind in results["kinds"]}
    conclude(results)
    finish("blas", results, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    blas_options(options)
    options.add_argument("--hidden", type=int, default=1280)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.8, 0.9])
    options.add_argument("--prompts", type=int, default=2, help="for each acceptance")
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--repeats", type=int, default=9, help="blocks a prompt; the first is dropped")
    options.add_argument("--burst", type=int, default=16, help="tokens of a turn")
    options.add_argument("--spread", type=float, default=0.04)
    settings = options.parse_args()
    if settings.quick:
        settings.acceptance, settings.prompts, settings.tokens, settings.repeats = [0.8], 1, 12, 2
        settings.hidden = 64
    return settings


def blas_options(options: argparse.ArgumentParser) -> None:
    """Add the options that choose a BLAS."""
    options.add_argument("--blas", type=Path, help="a shared library with cblas_sgemm; without it: MLX's own")
    options.add_argument("--coretype", help="kernels of OpenBLAS, such as SKYLAKEX, ZEN or HASWELL")
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="of OpenBLAS")


def use_blas(settings: argparse.Namespace) -> None:
    """Restart with the library of `--blas` preloaded, if it is not: it must be there before MLX is loaded."""
    if not settings.blas or os.environ.get("LD_PRELOAD") == str(settings.blas):
        return
    if not settings.blas.is_file():
        sys.exit(f"--blas: there is no file {settings.blas}")
    named = {"OPENBLAS_CORETYPE": settings.coretype} if settings.coretype else {}
    wanted = {"LD_PRELOAD": str(settings.blas), "OPENBLAS_NUM_THREADS": str(settings.threads), **named}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def costs(pair: RandomPair, settings: argparse.Namespace) -> dict[str, float]:
    """Return the cost of a pass by its rows, in passes of one row."""
    target = LMTarget(pair.model)
    history = text(pair, 0, settings)
    target.prefill(history[:-1])
    points = calibrate(target, (), history, time_limit_s=0.02 if settings.quick else 5.0)
    one = points.verify[1]
    print(f"{pair.read / 1e6:.0f} MB of weights, {1e3 * one:.1f} ms for one row, ", end="")
    print(f"{pair.read / one / 1e9:.1f} GB/s; plain token {1e3 * points.plain:.1f} ms\n")
    curve = {str(rows): round(seconds / one, 3) for rows, seconds in sorted(points.verify.items())}
    table(["rows", *curve], [["cost", *curve.values()]])
    return curve


def text(pair: RandomPair, index: int, settings: argparse.Namespace) -> list[int]:
    """Return a prompt of 32 random tokens."""
    chance = random.Random(settings.seed * 1000 + index)
    return [chance.randrange(pair.vocab) for _ in range(32)]


def script(pair: RandomPair, acceptance: float, index: int, settings: argparse.Namespace) -> Script:
    """Return the plain continuation with randomly chosen accepted positions."""
    prompt = Script(f"acceptance {acceptance}", text(pair, index, settings), settings.tokens)
    truth = [token for step, _ in decode(pair, (), FixedPolicy(0), prompt, lambda: None) for token in step]
    chance = random.Random(f"{settings.seed} {index} {acceptance}")
    right = tuple(chance.random() < acceptance for _ in truth)
    return replace(prompt, truth=tuple(truth), right=right)


def arms(pair: RandomPair) -> dict[str, Decoder]:
    """Return the arms: mlx-lm, plain, every fixed K, adaptive."""
    learned: dict[str, Learning] = {}

    def mlx_lm(prompt: Prompt, read: Read) -> Iterator[Step]:
        settings = {"max_tokens": prompt.count, "prompt_progress_callback": progress(read)}
        for token, _ in generate_step(mx.array(prompt.tokens), pair.model, **settings):
            yield [int(token)], 0

    def fixed(k: int, prompt: Prompt, read: Read) -> Iterator[Step]:
        assert isinstance(prompt, Script)
        return decode(pair, (Scripted(prompt, pair.vocab),), FixedPolicy(k), prompt, read)

    def adaptive(prompt: Prompt, read: Read) -> Iterator[Step]:
        assert isinstance(prompt, Script)
        if prompt.kind not in learned:
            learned[prompt.kind] = Learning(pair)
        return learned[prompt.kind].run(prompt, read)

    found: dict[str, Decoder] = {BASE: mlx_lm, PLAIN: partial(fixed, 0), AGAIN: partial(fixed, 0)}
    found |= {f"K={k}": partial(fixed, k) for k in FIXED}
    return {**found, "adaptive": adaptive}


class Learning:
    """Return the adaptive policies of a pair, with measured costs."""

    def __init__(self, pair: RandomPair) -> None:
        self._policies = AdaptivePolicies(["scripted"])
        self._pair = pair

    def run(self, script: Script, read: Read) -> Iterator[Step]:
        drafters = (Scripted(script, self._pair.vocab),)
        if self._policies.costs is None:
            target = LMTarget(self._pair.model)
            target.prefill(script.tokens[:-1])
            self._policies.use(calibrate(target, drafters, script.tokens))
        return decode(self._pair, drafters, self._policies.policy(), script, read)


def decode(
    pair: RandomPair,
    drafters: tuple[Drafter, ...],
    policy: DraftLengthPolicy,
    prompt: Prompt,
    read: Read,
) -> Iterator[Step]:
    """Decode greedily."""
    target = LMTarget(pair.model)
    sampler = Sampling().sampler(len(prompt.tokens), pair.vocab)
    for _ in prefill(target, drafters, prompt.tokens):
        pass
    read()
    for done in generate(target, drafters, policy, sampler, prompt.tokens, max_tokens=prompt.count):
        yield done.tokens, done.drafted


def best(
    results: dict[str, Any], kind: str, scripts: list[Script], blocks: list[list[Block]], seed: int
) -> dict[str, Any]:
    """Return the best fixed K, and the adaptive policy against it in the same blocks."""
    found = results["kinds"][kind]
    k = max((0, *FIXED), key=lambda k: found[f"K={k}" if k else PLAIN]["to plain"][0])
    name = f"K={k}" if k else PLAIN
    ratios = [
        [block.ratio("adaptive", name, "decode") for block in by_prompt]
        for by_prompt, script in zip(blocks, scripts, strict=True)
        if script.kind == kind and by_prompt
    ]
    return {"K": k, "to plain": found[name]["to plain"], "adaptive to it": interval(ratios, seed)}


def conclude(results: dict[str, Any]) -> None:
    print("The adaptive policy, against plain decoding and against the best fixed K of its kind:\n")
    rows = []
    for kind, found in results["best"].items():
        gain = show(results["kinds"][kind]["adaptive"]["to plain"])
        rows.append([kind, gain, f"K={found['K']}", show(found["to plain"]), show(found["adaptive to it"])])
    table(["", "adaptive to plain", "best fixed", "to plain", "adaptive to best fixed"], rows)


if __name__ == "__main__":
    main()
