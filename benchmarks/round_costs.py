"""What does a round cost on this device? The staircase of verification, the draft, and what the host adds.

At every context length, interleaved passes over the same live sequence: plain tokens (pipelined, a run of 8),
verification of 1 to 17 rows, drafts of 1 to 8 tokens, an empty read, and whole rounds of the engine. Every
pass ends when its result is on the host and leaves no trace in the caches. Medians and quartiles over
`--repeats` turns, the first of which is dropped; the order of the jobs changes from turn to turn. Beside them
stands what `mlx_spec.policy.calibrate` measures in a second, which is what the draft-length policy goes by.

"build" is the time to make the graph of a pass: what the host does in Python. "overhead" is what a whole
round takes beyond its draft and its pass. GB/s is the weights of one reading over the time of the pass, and
"of row" relates that to a row times a matrix in the same format, measured here in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from arms import PROMPTS, Folders
from random_models import SHAPES
from timing import finish, parser, table

from mlx_spec import load
from mlx_spec.apps import roofline
from mlx_spec.engine import PREFILL_STEP, generate
from mlx_spec.hub.weights import WeightFormat, decode_sizes
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.policy.calibrate import measure as calibrate
from mlx_spec.policy.costs import Table
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Round, Sampler

WHOLE = (1, 2, 4, 8)  # draft tokens of whole rounds
Seconds = dict[tuple[str, int], float]  # by job and its size


def main() -> None:
    settings = arguments()
    started = time.time()
    subject = opened(settings)
    size = 2**22 if settings.quick else roofline.PROBE_BYTES
    speed = roofline.measure(subject.format, size=size, seconds=settings.stream)
    results: dict[str, Any] = {
        "subject": subject.name,
        "GB read for a token": round(subject.read / 1e9, 4),
        "bandwidth, GB/s": {"row": round(speed, 2)},
        "contexts": {str(c): measure(subject, c, settings) for c in settings.contexts},
    }
    for found in results["contexts"].values():
        report(found, subject, speed)
    finish("round_costs", results, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--target", default="demo", help="demo, or a folder")
    options.add_argument("--drafter", help="a folder")
    options.add_argument("--random", choices=SHAPES, help="random weights of this shape instead")
    options.add_argument("--kv-bits", type=int, choices=(4, 8))
    options.add_argument("--contexts", type=int, nargs="+", default=[64, 512, 2048])
    options.add_argument("--rows", type=int, default=17, help="verify 1 to this many")
    options.add_argument("--draft", type=int, default=8, help="draft 1 to this many tokens")
    options.add_argument("--repeats", type=int, default=30)
    options.add_argument("--budget", type=float, default=1.0, help="seconds of calibration")
    options.add_argument("--stream", type=float, default=0.5, help="seconds for each measure of bandwidth")
    settings = options.parse_args()
    if settings.quick:
        settings.contexts, settings.rows, settings.draft, settings.repeats = [24, 48], 3, 2, 3
        settings.budget = settings.stream = 0.02
    return settings


def opened(settings: argparse.Namespace) -> Subject:
    if settings.random:
        subject = of_shape(settings.random)
    else:
        folders = Folders.find(settings.target, settings.drafter)
        subject = of_checkpoint(Path(settings.target).name, folders, settings.kv_bits)
    longest = subject.longest
    if longest is not None:
        settings.contexts = [c for c in settings.contexts if c + settings.rows <= longest]
    return subject


def measure(subject: Subject, context: int, settings: argparse.Namespace) -> dict[str, Any]:
    """Return quartiles in milliseconds at one context length, by job and size."""
    live = subject.open(context)
    points = calibrate(live.target, live.drafters, live.history, time_limit_s=settings.budget)
    running = {K: subject.rounds(context, K) for K in WHOLE if live.drafts and K in range(settings.draft + 1)}
    samples = defaultdict[str, defaultdict[int, list[float]]](lambda: defaultdict(list))
    chance = random.Random(settings.seed)
    for turn in range(settings.repeats):
        for (job, size), seconds in once(live, running, chance, settings).items() if turn else ():
            samples[job][size].append(seconds)
        print(f"{context} tokens: turn {turn + 1} of {settings.repeats}", file=sys.stderr)
    found = {
        job: {str(size): quartiles(sizes[size]) for size in sorted(sizes)} for job, sizes in samples.items()
    }
    return {"context": context, **found, "calibrated": calibrated(points)}


def once(
    live: Live, running: dict[int, Iterator[Round]], chance: random.Random, settings: argparse.Namespace
) -> Seconds:
    """Run all jobs once, in random order."""
    jobs = [("plain", 1), ("host", 1), *(("verify", rows) for rows in range(1, settings.rows + 1))]
    jobs += [("draft", K) for K in range(1, settings.draft + 1)] if running else []
    jobs += [("round", K) for K in running]
    found: Seconds = {}
    for job, size in chance.sample(jobs, len(jobs)):
        match job:
            case "verify":
                found[job, size], found["build", size] = live.verify(size)
            case "round":
                next(running[size])
                done = next(running[size])
                found |= {(job, size): done.seconds} if done.drafted == size else {}
            case "draft":
                found[job, size] = live.draft(size)
            case _:
                found[job, size] = live.plain() if job == "plain" else live.host()
    for K in running:
        whole, passed = found.get(("round", K)), found.get(("verify", K + 1))
        if whole is not None and passed is not None:
            found["overhead", K] = whole - passed - found["draft", K]
    return found


def quartiles(seconds: list[float]) -> list[float]:
    """Return first quartile, median and third, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return [round(1e3 * s, 5) for s in cuts]


def calibrated(points: Table) -> dict[str, Any]:
    """Return the costs of the policy's calibration in the same form."""
    draft = points.draft[0] if points.draft else {}
    return {
        "plain": {"1": round(1e3 * points.plain, 5)},
        "host": {"1": round(1e3 * points.host, 5)},
        "verify": {str(rows): round(1e3 * s, 5) for rows, s in sorted(points.verify.items())},
        "draft": {str(K): round(1e3 * s, 5) for K, s in sorted(draft.items())},
    }


def report(found: dict[str, Any], subject: Subject, speed: float) -> None:
    plain, quick = found["plain"]["1"], found["calibrated"]
    print(f"\n{subject.name}, {found['context']} tokens of context; milliseconds, median and quartiles\n")
    print(f"plain token {show(plain)}, calibrated {quick['plain']['1']:.3f}; ", end="")
    print(f"a read {show(found['host']['1'])}, calibrated {quick['host']['1']:.3f}\n")
    rows = []
    for size, passed in found["verify"].items():
        rate = subject.read / passed[1] / 1e6
        ratios = [f"{passed[1] / found['verify']['1'][1]:.2f}", f"{passed[1] / plain[1]:.2f}"]
        speeds = [f"{rate:.2f}", f"{rate / speed:.2f}"]
        rows.append(
            [size, show(passed), *ratios, short(quick["verify"], size), show(found["build"][size]), *speeds]
        )
    table(["rows", "verify", "to 1 row", "to plain", "calibrated", "build", "GB/s", "of row"], rows)
    if "draft" in found:
        parts = [
            [
                K,
                show(s),
                short(quick["draft"], K),
                *(short(found.get(j, {}), K) for j in ("round", "overhead")),
            ]
            for K, s in found["draft"].items()
        ]
        table(["draft tokens", "draft", "calibrated", "whole round", "overhead"], parts)


def show(cuts: list[float]) -> str:
    return f"{cuts[1]:.3f} [{cuts[0]:.3f}, {cuts[2]:.3f}]"


def short(found: dict[str, Any], size: str) -> str:
    if size not in found:
        return "-"
    return show(found[size]) if isinstance(found[size], list) else f"{found[size]:.3f}"


RUN = 8  # plain tokens, one in flight behind the other
Parts = tuple[LMTarget, tuple[Drafter, ...]]


@dataclass(frozen=True)
class Subject:
    """A target with its drafters, and a text to fill contexts with."""

    name: str
    format: WeightFormat
    read: float  # bytes of weights that one token reads
    vocab: int
    text: list[int]  # to fill contexts with, again and again
    parts: Callable[[], Parts]
    longest: int | None  # context

    def prompt(self, context: int) -> list[int]:
        return (self.text * (context // len(self.text) + 1))[:context]

    def open(self, context: int) -> Live:
        """Return a sequence of `context` tokens after which a drafter can draft."""
        target, drafters = self.parts()
        history = self.prompt(context - 2)
        for low in range(0, len(history) - 1, PREFILL_STEP):
            high = min(low + PREFILL_STEP, len(history) - 1)
            features = target.prefill(history[low:high])
            for drafter in drafters:
                drafter.observe(history[: high + 1], features)
        live = Live(target, drafters, history, Sampling().sampler(context, self.vocab))
        for _ in range(2):  # some drafters wait for the activations of a generated token
            live.grow()
        return live

    def rounds(self, context: int, K: int) -> Iterator[Round]:
        """Generate with K draft tokens in every round."""
        target, drafters = self.parts()
        sampler = Sampling().sampler(context, self.vocab)
        return generate(target, drafters, FixedPolicy(K), sampler, self.prompt(context), max_tokens=2**20)


@dataclass
class Live:
    """A sequence that passes run on. None of them leaves a trace in its caches."""

    target: LMTarget
    drafters: tuple[Drafter, ...]
    history: list[int]
    sampler: Sampler

    def grow(self) -> None:
        token, _ = self.sampler.draw(self.target.verify(self.rows(1)), self.history, self.rows(0))
        self.history += cast(list[int], token.tolist())
        features = self.target.commit(1)
        for drafter in self.drafters:
            drafter.observe(self.history, features)

    def rows(self, count: int) -> mx.array:
        """Return the pending token and tokens of the text after it."""
        return mx.array([self.history[-1], *self.history[:count]][:count], dtype=mx.int32)

    @property
    def drafts(self) -> bool:
        """Return True if there is a drafter and it has a draft."""
        return bool(self.drafters) and self.drafters[0].draft(self.history, 1, self.sampler).tokens.size > 0

    def plain(self) -> float:
        """Return the seconds of a plain token, each queued while the one before it runs."""
        start = time.perf_counter()
        token, before = self.rows(1), None
        for _ in range(RUN):
            token, _ = self.sampler.draw(self.target.verify(token), self.history, self.rows(0))
            mx.async_eval(token)
            if before is not None:
                before.tolist()
            before = token
        token.tolist()
        self.target.commit(0)
        return (time.perf_counter() - start) / RUN

    def host(self) -> float:
        """Return the seconds of one read by the host."""
        start = time.perf_counter()
        (self.rows(1) + 1).tolist()
        return time.perf_counter() - start

    def verify(self, rows: int) -> tuple[float, float]:
        """Return the seconds of a verification pass, and those of building its graph."""
        start = time.perf_counter()
        tokens = self.rows(rows)
        verdict = self.sampler.verify(self.target.verify(tokens), self.history, Draft(tokens[1:]))
        built = time.perf_counter()
        verdict.tolist()
        self.target.commit(0)
        return time.perf_counter() - start, built - start

    def draft(self, K: int) -> float:
        """Return the seconds of K draft tokens."""
        start = time.perf_counter()
        mx.eval(self.drafters[0].draft(self.history, K, self.sampler).tokens)
        return time.perf_counter() - start


def of_checkpoint(name: str, folders: Folders, kv_bits: int | None) -> Subject:
    """Return a pair on disk."""
    pair = load(folders.target, folders.drafter or "none", num_draft_tokens=1, kv_bits=kv_bits)
    model = decode_sizes(folders.target, 1)

    def parts() -> Parts:
        opened = pair.open()
        return opened.target, opened.drafters

    return Subject(
        name,
        model.format,
        model.read,
        pair.info.vocab_size,
        pair.text.encode((PROMPTS / "chat.txt").read_text()),
        parts,
        pair.info.context_length,
    )


def of_shape(name: str) -> Subject:
    """Return a pair with random weights."""
    made = SHAPES[name]()

    def parts() -> Parts:
        target = LMTarget(made.model, made.needs)
        return target, (made.make_drafter(target.parts),) if made.make_drafter else ()

    text = cast(list[int], mx.random.randint(0, made.vocab, (1024,), key=mx.random.key(0)).tolist())
    return Subject(f"{name}, random weights", made.format, made.read, made.vocab, text, parts, None)


if __name__ == "__main__":
    main()
