"""`mlx-spec tune`: measure what drafting costs here, show it, and keep, export or import it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_spec.apps.command import Parser, guarded
from mlx_spec.errors import InvalidValue

if TYPE_CHECKING:
    from mlx_spec.pair import Pair
    from mlx_spec.tuning.tuner import Tuner

SHOWN = (1, 2, 3, 4, 5, 6, 8, 11, 17)  # rows of a pass
TEXT = "The quick brown fox jumps over the lazy dog, and then it explains in a few words why it did. "


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns its exit status; an error of ours is one line on stderr and status 1.

    A command line that makes no sense raises SystemExit with status 2.
    """
    options = parser().parse_args(arguments)
    return guarded(lambda: _run(options))


def parser() -> argparse.ArgumentParser:
    """The options. Parsing raises SystemExit with status 2 when they make no sense."""
    parser = Parser("tune", "Measure what passes and drafts cost on this device, and keep it for later.")
    parser.add_argument(
        "--target", metavar="REPO_OR_FOLDER", default="demo", help="(default: the bundled demo)"
    )
    parser.add_argument("--drafter", metavar="REPO_OR_FOLDER", help="(default: the one made for the target)")
    parser.add_argument("--kv-bits", metavar="{4,8}", type=int, choices=(4, 8), help="quantize the KV cache")
    parser.add_argument(
        "--context",
        metavar="N",
        type=_context,
        action="append",
        help="measure behind N tokens; may be repeated (default: 256)",
    )
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--export", metavar="FILE", type=Path, help="write what was measured to FILE, too")
    files.add_argument(
        "--import", metavar="FILE", type=Path, dest="import_", help="use what was measured on the same device"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _context(text: str) -> int:
    if text.isdecimal() and int(text) >= 2:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a number of tokens, 2 or more")


def _run(options: argparse.Namespace) -> int:
    from mlx_spec import load
    from mlx_spec.tuning import profile

    pair = load(options.target, options.drafter, kv_bits=options.kv_bits)
    tuner = _tuner(pair)
    if options.import_ is not None:
        tuner.adopt(profile.import_(options.import_, tuner.key))
    else:
        _measure(pair, tuner, options.context or [256])
    table = tuner.costs.table()
    if options.export is not None:
        profile.export(tuner.key, table, options.export)
    if options.json:
        print(json.dumps({"device": tuner.key.device, "file": str(tuner.file), "milliseconds": table}))
    else:
        print("\n".join(_report(tuner, table)))
    return 0


def _tuner(pair: Pair) -> Tuner:
    from mlx_spec.tuning.tuner import Tuner

    if isinstance(pair.policies, Tuner):
        return pair.policies
    raise InvalidValue(
        f"there is nothing to tune: {pair.info.target} has no drafter here, and plain decoding needs none; "
        "name one with --drafter"
    )


def _measure(pair: Pair, tuner: Tuner, contexts: Sequence[int]) -> None:
    """Begin an answer behind each context: costs are measured in its first rounds."""
    tokens = pair.text.encode(TEXT)
    tuner.forget()
    for context in contexts:
        prompt = (tokens * (context // len(tokens) + 1))[:context]
        for _ in pair.generate(prompt, max_tokens=8):
            pass
        if not tuner.knows(context):
            raise InvalidValue(f"the answer behind {context} tokens ended at once: try another --context")


def _report(tuner: Tuner, table: dict[str, Any]) -> list[str]:
    """The table for people. Seconds are in the file."""
    lines = [f"measured on {tuner.key.device}, milliseconds; kept in {tuner.file}"]
    for context, costs in table.items():
        plain = costs["plain"]
        lines += ["", f"up to {context} tokens of context: plain decoding {plain:.2f} a token"]
        rows = [str(size) for size in SHOWN]
        lines.append("rows of a pass   " + "".join(f"{size:>8}" for size in rows))
        lines.append("verify           " + "".join(f"{costs['verify'][size]:8.2f}" for size in rows))
        lines.append("in plain tokens  " + "".join(f"{costs['verify'][size] / plain:8.2f}" for size in rows))
        for name, draft in costs["draft"].items():
            drafted = [draft[str(size - 1)] if size > 1 else 0.0 for size in SHOWN]
            lines.append(f"{name:16} " + "".join(f"{ms:8.2f}" for ms in drafted))
    return lines
