"""The options of `mlx-spec roofline`. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_spec.apps.command import Parser
from mlx_spec.tuning.devices import CHIPS, Chip, named

DEMO = "demo"
BITS = (2, 3, 4, 5, 6, 8, 16)


@dataclass(frozen=True)
class Options:
    """A parsed command line."""

    target: str | None  # None: target_gb stands for it
    target_gb: float | None
    drafter: str | None  # None: the target's own, unless drafter_gb is given
    drafter_gb: float | None
    bits: int | None  # None: as stored
    acceptance: float
    context: int  # tokens
    chips: tuple[Chip, ...]  # (): all
    json: bool


def parse(arguments: Sequence[str] | None) -> Options:
    """Options from a command line. Leaves with status 2 and one line on stderr when it makes no sense."""
    found = vars(parser().parse_args(arguments))
    if found["target_gb"] is None and found["target"] is None:
        found["target"] = DEMO
    chips = found.pop("chip") or []
    return Options(**found, chips=tuple(dict.fromkeys(chip for variants in chips for chip in variants)))


def parser() -> argparse.ArgumentParser:
    """The options. Parsing raises SystemExit with status 2 when they make no sense."""
    parser = Parser(
        "roofline", "Predict what speculation brings on Apple chips, and measure the present device."
    )
    parser.add_argument(
        "--chip",
        metavar="NAME",
        type=_chips,
        action="append",
        help='only this chip, such as "M4 Pro"; may be repeated (default: all, and measure this device)',
    )
    parser.add_argument(
        "--acceptance",
        metavar="A",
        type=_acceptance,
        default=0.8,
        help="how often a draft token is accepted if those before it were (default %(default)s)",
    )
    parser.add_argument(
        "--context", metavar="N", type=_tokens, default=1024, help="tokens of context (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_models(parser)
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models", "Of a repository only what is on this machine is looked at.")
    targets, drafters = group.add_mutually_exclusive_group(), group.add_mutually_exclusive_group()
    targets.add_argument(
        "--target", metavar="REPO_OR_FOLDER", help="model that answers (default: the small bundled demo)"
    )
    targets.add_argument("--target-gb", metavar="GB", type=_gigabytes, help="or the size of its weights")
    drafters.add_argument(
        "--drafter",
        metavar="REPO_OR_FOLDER",
        help='model that drafts; "lookup" drafts for free (default: the one made for the target)',
    )
    drafters.add_argument("--drafter-gb", metavar="GB", type=_gigabytes, help="or the size of its weights")
    group.add_argument(
        "--bits",
        type=int,
        choices=BITS,
        help="bits a weight of the target, 16 is not quantized "
        "(default: as they are stored; of --target-gb 4)",
    )


def _chips(text: str) -> tuple[Chip, ...]:
    chips = named(text)
    if not chips:
        known = ", ".join(dict.fromkeys(chip.name for chip in CHIPS))
        raise argparse.ArgumentTypeError(f"{text!r} is not known: give one of {known}")
    return chips


def _acceptance(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a number from 0 to 1")
    return value


def _gigabytes(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a number above 0")
    return value


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give an integer of at least 0")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
