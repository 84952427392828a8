"""Are plain decoding and the demo pair as fast as at an earlier commit?

Three processes decode the demo pair greedily, each with the code of one checkout: two with the earlier one,
one with the later one. They take turns of `--burst` tokens at the same places of the same texts. Turns never
overlap, and the order changes from turn to turn. A text ends early if a draft was accepted in one process
only. The ratio of a turn is the seconds of the later checkout over the mean of the two earlier ones. The
second earlier process over the first is the null. Each repeat starts new processes, because the memory layout
of a process can cost a percent; their first text is dropped. Figures are medians over processes of the
medians of their turns, with bootstrap 95 % intervals that draw processes first.

Arms: no drafter, a drafter that never drafts (K = 0), and fixed K = 1 and 4. The adaptive policy is left out:
it changes on purpose, and decode.py compares it.

`--before` and `--after` are folders, or revisions, which are unpacked into a temporary folder. Without
`--after` the later checkout is the tree of this file.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from timing import finish, interval, parser, table

ROOT = Path(__file__).parents[1]
ARMS = {"no drafter": None, "K=0": 0, "K=1": 1, "K=4": 4}
BEFORE, AGAIN, AFTER = "before", "before, again", "after"
WITHIN = 0.02

# The program of each process. It must run with the code of any commit, so it only uses the public API.
CHILD = """
import json, sys, time
import mlx.core as mx
import mlx_spec

def opened(k):
    return mlx_spec.load("demo", "none") if k is None else mlx_spec.load("demo", num_draft_tokens=k)

arms, going = json.loads(sys.stdin.readline()), {}
pairs = {arm: opened(k) for arm, k in arms.items()}
print(json.dumps(mlx_spec.__file__), flush=True)
for line in sys.stdin:
    arm, text, count = json.loads(line)
    pair = pairs[arm]
    if text is not None:
        tokenizer = pair.text if hasattr(pair, 'text') else pair.tokenizer  # its former name
        prompt = tokenizer.prompt([{"role": "user", "content": text}])
        sampling = mlx_spec.Sampling(logit_bias=dict.fromkeys(tokenizer.eos, float("-inf")))
        going[arm] = pair.generate(prompt, sampling=sampling, max_tokens=2000)
    tokens, start = [], time.perf_counter()
    while len(tokens) < count:
        tokens += next(going[arm]).tokens
    mx.synchronize()
    print(json.dumps([time.perf_counter() - start, tokens]), flush=True)
"""


class Checkout:
    """A process that runs `child` with the code of one checkout. It reads a line, and answers each with one.

    The first answer is the file of its package.
    """

    def __init__(self, folder: Path, child: str, opening: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )
        found = Path(self.ask(opening))
        if not found.is_relative_to(folder.resolve()):
            sys.exit(f"the code of {folder} was not used, but {found}")

    def go(self, arm: str, prompt: str | None, count: int) -> tuple[float, list[int]]:
        """Return seconds and tokens of a turn; a prompt begins a new text."""
        seconds, tokens = self.ask([arm, prompt, count])
        return seconds, tokens

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def ask(self, question: object) -> Any:
        """Return the answer to a question."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"a process ended with status {self._process.wait()}")
        return json.loads(answer)


def main() -> None:
    settings = arguments()
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        before, after = (unpacked(name, Path(folder)) for name in (settings.before, settings.after))
        found = measure({BEFORE: before, AGAIN: before, AFTER: after}, settings)
    results = {arm: summary(blocks, settings.seed) for arm, blocks in found.items()}
    report(results)
    finish("unchanged", {"arms": results, "within": WITHIN}, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--before", required=True, help="a revision, or a folder")
    options.add_argument("--after", default=str(ROOT), help="a revision, or a folder")
    options.add_argument("--prompts", type=int, default=4)
    options.add_argument("--tokens", type=int, default=64, help="of a text")
    options.add_argument("--burst", type=int, default=4, help="tokens of a turn, at least")
    options.add_argument("--repeats", type=int, default=16, help="sets of processes")
    options.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    settings = options.parse_args()
    if settings.quick:
        settings.arms = ["K=0", "K=4"]
        settings.prompts, settings.tokens, settings.repeats = 1, 8, 1
    return settings


def unpacked(name: str, folder: Path) -> Path:
    """Return a checkout: a folder as it is, a revision unpacked below `folder`."""
    if Path(name).is_dir():
        return Path(name).resolve()
    place = folder / name
    if not place.exists():
        command = ["git", "-C", str(ROOT), "archive", name]
        packed = subprocess.run(command, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(place, filter="tar")
    return place


Turns = list[dict[str, float]]  # seconds of each checkout


def measure(folders: dict[str, Path], settings: argparse.Namespace) -> dict[str, list[Turns]]:
    """Return all turns, by arm and set of processes."""
    lines = (ROOT / "benchmarks" / "prompts" / "demo.txt").read_text().splitlines()
    prompts = lines[: settings.prompts]
    found: dict[str, list[Turns]] = {arm: [] for arm in settings.arms}
    for repeat in range(settings.repeats):
        with ExitStack() as stack:
            arms = {arm: ARMS[arm] for arm in settings.arms}
            checkouts = {name: Checkout(folder, CHILD, arms) for name, folder in folders.items()}
            for checkout in checkouts.values():
                stack.callback(checkout.close)
            for arm in settings.arms:
                text(checkouts, arm, prompts[0], settings, repeat)
                turns = [
                    text(checkouts, arm, prompt, settings, repeat + i) for i, prompt in enumerate(prompts)
                ]
                found[arm].append(list(chain(*turns)))
        print(f"repeat {repeat + 1} of {settings.repeats}", file=sys.stderr, flush=True)
    return found


def text(
    checkouts: dict[str, Checkout], arm: str, prompt: str, settings: argparse.Namespace, first: int
) -> Turns:
    """Return the turns of one text after its first token."""
    names = list(checkouts)
    for name in names:
        checkouts[name].go(arm, prompt, 1)
    turns: Turns = []
    for turn in range(settings.tokens // settings.burst):
        shift = (first + turn) % len(names)
        order = names[shift:] + names[:shift]
        went = {
            name: checkouts[name].go(arm, None, settings.burst) for name in order[:: 1 if turn % 2 else -1]
        }
        texts = {tuple(tokens) for _, tokens in went.values()}
        longest = max(texts, key=len)
        if any(each != longest[: len(each)] for each in texts):
            sys.exit(f"{arm}: the checkouts say different things behind {prompt!r}: {texts}")
        if len(texts) > 1:  # a near tie of the drafter, whose rounding varies from process to process
            break  # their next turns would begin at different places
        turns.append({name: seconds for name, (seconds, _) in went.items()})
    return turns


def summary(sets: list[Turns], seed: int) -> dict[str, Any]:
    """Return ratios of seconds, with intervals."""
    after = [[t[AFTER] / statistics.mean([t[BEFORE], t[AGAIN]]) for t in turns] for turns in sets]
    null = [[t[AGAIN] / t[BEFORE] for t in turns] for turns in sets]
    ratio = interval(after, seed)
    return {
        "after to before": ratio,
        "null": interval(null, seed),
        "unchanged": ratio[1] >= 1 - WITHIN and ratio[2] <= 1 + WITHIN,
        "seconds a turn": round(statistics.median(t[BEFORE] for turns in sets for t in turns), 4),
        "turns": sum(map(len, sets)),
    }


def report(results: dict[str, Any]) -> None:
    def shown(values: list[float]) -> str:
        return f"{values[0]:.4f} [{values[1]:.4f}, {values[2]:.4f}]"

    print(
        f"\nSeconds of the later checkout over the earlier one's; unchanged: all of it within {WITHIN:.0%}\n"
    )
    rows = [
        [arm, shown(r["after to before"]), shown(r["null"]), r["unchanged"]] for arm, r in results.items()
    ]
    table(["arm", "after to before", "null", "unchanged"], rows)


if __name__ == "__main__":
    main()
