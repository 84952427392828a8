"""`mlx-spec bench`: how fast a pair decodes here, with speculation and without, measured in turns."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlx_spec.apps.command import Parser, guarded, integer
from mlx_spec.backend import require_backend

if TYPE_CHECKING:
    from mlx_spec.apps.turns import Run, Speed
    from mlx_spec.pair import Pair

FIXED = (2, 4)  # draft tokens
HEAD = ("decoder", "tokens/s", "to plain", "half of the answers", "accepted", "tokens a round")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns its exit status; an error of ours is one line on stderr and status 1.

    A command line that makes no sense raises SystemExit with status 2.
    """
    options = parser().parse_args(arguments)
    return guarded(lambda: _run(options))


def parser() -> Parser:
    """The options. Parsing raises SystemExit with status 2 when they make no sense."""
    parser = Parser(
        "bench",
        "Measure how fast a pair decodes: plain, with 2 and 4 draft tokens, and as the pair itself decides. "
        "All of them answer the same questions and take turns of a few tokens, so that whatever else the "
        "machine does meets them alike.",
    )
    parser.add_argument(
        "--target", metavar="REPO_OR_FOLDER", default="demo", help="(default: the bundled demo)"
    )
    parser.add_argument("--drafter", metavar="REPO_OR_FOLDER", help="(default: the one made for the target)")
    parser.add_argument("--kv-bits", metavar="{4,8}", type=int, choices=(4, 8), help="quantize the KV cache")
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=integer(16),
        default=128,
        help="of an answer at most, 16 or more (default %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=integer(1),
        default=3,
        help="how often all questions are asked, behind once to warm up (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _run(options: argparse.Namespace) -> int:
    require_backend()
    from mlx_spec import load
    from mlx_spec.apps.turns import arm, speeds

    pair = load(options.target, options.drafter, kv_bits=options.kv_bits)
    arms = [arm(pair, "plain", 0)]
    if pair.drafter_names:
        arms += [arm(pair, f"K = {k}", k) for k in FIXED] + [arm(pair, "adaptive", None)]
    answers = []
    for repeat in range(options.repeats + 1):
        if sys.stderr.isatty():
            print(f"\rround {repeat} of {options.repeats}", end="", file=sys.stderr, flush=True)
        runs = _all_questions(pair, arms, options.tokens, repeat)
        answers += runs if repeat else []
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    found = speeds(arms, answers)
    if options.json:
        print(json.dumps(_as_json(pair, found, answers)), flush=True)
    else:
        print("\n".join(_report(pair, found, len(answers))), flush=True)
    return 0


def _all_questions(pair: Pair, arms: Sequence[Any], tokens: int, start: int) -> list[list[Run]]:
    from mlx_spec.apps.questions import asked
    from mlx_spec.apps.turns import in_turns

    questions = asked(pair.text)
    return [in_turns(pair, arms, q.tokens, tokens, start + i) for i, q in enumerate(questions)]


def _as_json(pair: Pair, found: Sequence[Speed], answers: Sequence[Sequence[Run]]) -> dict[str, Any]:
    from mlx_spec.tuning.bandwidth import device_name

    return {
        "device": device_name(),
        "target": pair.info.target,
        "drafter": pair.info.drafter,
        "answers": len(answers),
        "decoders": [dataclasses.asdict(speed) for speed in found],
    }


def _report(pair: Pair, found: Sequence[Speed], answers: int) -> list[str]:
    from mlx_spec.apps.described import table
    from mlx_spec.tuning.bandwidth import device_name

    names = f"{pair.info.target} with {', '.join(pair.drafter_names) or 'no drafter'}"
    lines = [f"{names} on {device_name()}, answers of each: {answers}", "", *table([HEAD, *map(_row, found)])]
    if not pair.drafter_names:
        lines += ["", "this target has no drafter here: --drafter names one, or is lookup"]
    other = [f"{speed.name}: {speed.other_text}" for speed in found if speed.other_text]
    if other:
        way = "`mlx-spec doctor` tells a rounding from a bug"
        lines += ["", f"answers with other tokens than plain decoding ({', '.join(other)}): {way}"]
    return lines


def _row(speed: Speed) -> tuple[str, ...]:
    low, high = speed.spread
    return (
        speed.name,
        f"{speed.tokens_per_second:.1f}",
        f"{speed.gain:.2f}",
        f"{low:.2f} to {high:.2f}",
        "" if speed.accepted is None else f"{speed.accepted:.0%}",
        "" if speed.length is None else f"{speed.length:.2f}",
    )
