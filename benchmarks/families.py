"""What does a drafter of each family cost, and what does it bring, on this device?

Every family drafts for a tiny trained pair of tests/golden, converted in float32 by `mlx-spec convert`. Such
targets are so small that a pass costs what its dispatch costs: the figures compare families with each other
here and with plain decoding of the same target; they say nothing about published checkpoints.

"draft" is the median of seconds until 1 and 4 draft tokens are there, behind a token that was just observed,
in plain tokens of the same target. The arms (plain twice, fixed K, adaptive) decode the same prompts in
turns, `--burst` tokens at a time, in the order of a balanced Latin square; families take turns, too, and the
first repeat of each is dropped. "seconds a token" is an arm's, over the mean of the two plain arms of its
block: below 1 is faster than plain. Geometric means of medians, bootstrap 95 % intervals,
prompts drawn first. The text of every arm is compared with plain's.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arms import Decoder, Folders, Prompt, ours
from round_costs import Live, of_checkpoint
from timing import AGAIN, PLAIN, Run, finish, in_turns, interval, latin_square, parser, shape, table

from mlx_spec.convert.convert import convert
from mlx_spec.convert.options import ConversionOptions
from mlx_spec.hub.progress import StageProgress
from mlx_spec.pair import Pair

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
PAIRS = {  # family -> target and drafter; "auto": it is in the target's checkpoint
    "gemma4_assistant": ("12b-trained/target", "12b-trained/assistant"),
    "qwen_mtp": ("trained/qwen", "auto"),
    "eagle3": ("trained/llama", "trained/eagle3"),
    "dflash": ("12b-trained/target", "trained/dflash"),
    "peagle": ("12b-trained/target", "trained/peagle"),
    "pard": ("12b-trained/target", "trained/pard"),
    "medusa": ("12b-trained/target", "trained/medusa"),
}
TEXTS = (
    "The cat sat on the mat. The dog",
    "What is the capital of Italy? The capital",
    "def fib(n):\n    if n < 2:",
    "Roses are red, violets are blue,",
)
ARMS = [PLAIN, AGAIN, "K=1", "K=4", "adaptive"]
DRAFTS = (1, 4)
CONTEXT = 64  # tokens before a draft is timed


@dataclass(frozen=True)
class Family:
    """A loaded pair, its decoders, prompts and live sequence."""

    pair: Pair
    decoders: dict[str, Decoder]
    prompts: list[Prompt]
    live: Live


@dataclass
class Found:
    """The measurements of one family."""

    blocks: list[list[dict[str, Run]]]  # by prompt
    plain: list[float]  # seconds a token
    drafts: dict[int, list[float]]  # by K, seconds


def main() -> None:
    settings = arguments()
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        families = {name: opened(name, Path(folder), settings) for name in settings.families}
        found = measure(families, settings)
    results = {name: summary(families[name], found[name], settings) for name in families}
    report(results)
    finish("families", results, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--families", nargs="+", choices=PAIRS, default=list(PAIRS))
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--repeats", type=int, default=5, help="blocks a prompt; the first is dropped")
    options.add_argument("--burst", type=int, default=16, help="tokens of a turn")
    options.add_argument("--drafts", type=int, default=40, help="drafts that are timed, of each length")
    settings = options.parse_args()
    if settings.quick:
        settings.tokens, settings.repeats, settings.drafts = 8, 2, 2
    return settings


def opened(name: str, folder: Path, settings: argparse.Namespace) -> Family:
    """Convert and load the pair of a family."""
    target, drafter = (path if path == "auto" else str(GOLDEN / path) for path in PAIRS[name])
    out = folder / name
    convert(
        ConversionOptions(target, out, drafter, "none", None, "none", "float32", True),
        StageProgress(io.StringIO()),
    )
    folders = Folders(out / "target", out / "drafter")
    pair, arms = ours(folders, settings.seed)
    texts = TEXTS[:2] if settings.quick else TEXTS
    prompts = [Prompt("text", [2, *pair.text.encode(text)], settings.tokens) for text in texts]
    live = of_checkpoint(name, folders, None).open(CONTEXT)
    return Family(pair, {arm: arms[arm]() for arm in ARMS}, prompts, live)


def measure(families: dict[str, Family], settings: argparse.Namespace) -> dict[str, Found]:
    """Measure all families in turn; drop the first block of each prompt."""
    found = {
        name: Found([[] for _ in family.prompts], [], {k: [] for k in DRAFTS})
        for name, family in families.items()
    }
    square = latin_square(ARMS)
    random.Random(settings.seed).shuffle(square)
    for repeat in range(settings.repeats):
        for i in range(len(next(iter(families.values())).prompts)):
            for name, family in families.items():
                order = square[(repeat * len(family.prompts) + i) % len(square)]
                runs = in_turns([family.decoders[arm] for arm in order], family.prompts[i], settings.burst, i)
                if repeat:
                    found[name].blocks[i].append(dict(zip(order, runs, strict=True)))
        print(f"repeat {repeat + 1} of {settings.repeats}", file=sys.stderr, flush=True)
    for _ in range(settings.drafts):
        for name, family in families.items():
            time_drafts(family.live, found[name])
    return found


def time_drafts(live: Live, found: Found) -> None:
    """Time plain tokens and one draft of each length."""
    found.plain.append(live.plain())
    for k in DRAFTS:
        live.grow()
        found.drafts[k].append(live.draft(k))


def summary(family: Family, found: Found, settings: argparse.Namespace) -> dict[str, Any]:
    plain = statistics.median(found.plain)
    facts = family.pair.info
    return {
        "arms": {arm: of_arm(arm, found.blocks, settings.seed) for arm in ARMS},
        "plain, microseconds": round(1e6 * plain, 1),
        "draft, microseconds": {k: round(1e6 * statistics.median(s), 1) for k, s in found.drafts.items()},
        "draft, plain tokens": {k: round(statistics.median(s) / plain, 2) for k, s in found.drafts.items()},
        "drafter bytes": facts.drafter_bytes,
        "drafter to target, bytes": round(facts.drafter_bytes / facts.target_bytes, 3),
        "hashes of the texts": [blocks[0][PLAIN].hash for blocks in found.blocks],
    }


def of_arm(arm: str, blocks: list[list[dict[str, Run]]], seed: int) -> dict[str, Any]:
    """Return seconds a token over plain's, tokens a step, and how many prompts gave another text."""

    def ratio(block: dict[str, Run]) -> float:
        others = [block[name].decode for name in (PLAIN, AGAIN) if name != arm]
        return statistics.mean(others) / block[arm].decode

    runs = [block[arm] for by_prompt in blocks for block in by_prompt]
    same = [{block[arm].hash for block in one} == {one[0][PLAIN].hash} for one in blocks]
    return {
        "seconds a token, to plain": interval([[ratio(b) for b in by_prompt] for by_prompt in blocks], seed),
        "tokens/s": round(statistics.median(run.decode for run in runs), 1),
        **shape(runs),
        "differ": same.count(False),
    }


def report(results: dict[str, Any]) -> None:
    head = ["family", "draft(1)", "draft(4)", "tokens a step, K=4", *ARMS[1:], "bytes", "texts that differ"]
    rows = [
        [
            name,
            *(f"{r['draft, plain tokens'][k]:.2f}" for k in DRAFTS),
            r["arms"]["K=4"]["tokens a step"],
            *(shown(r["arms"][arm]["seconds a token, to plain"]) for arm in ARMS[1:]),
            r["drafter bytes"],
            sum(arm["differ"] for arm in r["arms"].values()),
        ]
        for name, r in results.items()
    ]
    print("\nDrafts in plain tokens; seconds a token of each arm over plain's, below 1 is faster.\n")
    table(head, rows)


def shown(values: list[float]) -> str:
    return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"


if __name__ == "__main__":
    main()
