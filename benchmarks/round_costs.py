"""What does a round cost on this device? The staircase of verification, the draft, and what the host adds.

At every context length, interleaved passes over the same live sequence: plain tokens (pipelined, a run of 8),
verification of 1 to 17 rows, drafts of 1 to 8 tokens, an empty read, and whole rounds of the engine. Every
pass ends when its result is on the host and leaves no trace in the caches. Medians and quartiles over
`--repeats` turns, the first of which is dropped; the order of the jobs changes from turn to turn. Beside them
stands what `mlx_spec.tuning.calibrate` measures in a second, which is what the draft-length policy goes by.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arms import Folders
from shapes import SHAPES
from subject import Live, Subject, of_checkpoint, of_shape
from timing import finish, parser, table

from mlx_spec.apps import roofline
from mlx_spec.tuning import calibrate
from mlx_spec.types import Round

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
        "bandwidth, GB/s": round(speed, 2),
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
    """Everything at one context length: quartiles in milliseconds, by job and its size."""
    live = subject.open(context)
    points = calibrate.measure(live.target, live.drafters, live.history, settings.budget)
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
    """One turn of all jobs, in an order of its own."""
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
    """First quartile, median and third, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return [round(1e3 * s, 5) for s in cuts]


def calibrated(points: calibrate.Points) -> dict[str, Any]:
    """What the calibration found, as `measure` gives its own."""
    draft = points.draft.get(0, {})
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


if __name__ == "__main__":
    main()
