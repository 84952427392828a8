"""The options of `mlx-spec chat`. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlx_spec import __version__
from mlx_spec.apps.command import Parser, integer, number

MAX_TOKENS = 2048
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True)
class Options:
    """A parsed command line. None: not given, the default of the library holds."""

    prompt: str | None
    json: bool
    trace: Path | None
    target: str | None
    drafter: str | None
    num_draft_tokens: int | None
    kv_bits: int | None
    system: str | None
    max_tokens: int
    think: bool
    stats: bool
    highlight: bool
    history: bool
    sampling: Mapping[str, Any]  # the fields of Sampling that were given


def parse(arguments: Sequence[str] | None) -> Options:
    """Options from a command line. Leaves with status 2 and one line on stderr when it makes no sense."""
    found = vars(parser().parse_args(arguments))
    sampling = {name: found.pop(name) for name in SAMPLING}
    return Options(**found, sampling={name: value for name, value in sampling.items() if value is not None})


def refuse(problem: str) -> NoReturn:
    """Leave with status 2 and one line on stderr that says where help is."""
    parser().error(problem)


def parser() -> Parser:
    """The options. Parsing raises SystemExit with status 2 when they make no sense."""
    parser = Parser("chat", "Chat with a model. With -p or piped text: answer once, then exit.")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer TEXT and exit; piped text is appended")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=integer(1),
        default=MAX_TOKENS,
        help="longest answer, thinking included (default %(default)s)",
    )
    parser.add_argument(
        "--think", action="store_true", help="let the model think first, if it is made for that"
    )
    parser.add_argument("--version", action="version", version=f"mlx-spec {__version__}")
    _add_output(parser)
    _add_models(parser)
    _add_sampling(parser)
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--stats", action="store_true", help="print more than one line after each answer")
    group.add_argument(
        "--highlight",
        action="store_true",
        help="colour each token by where it came from, on a terminal with colours",
    )
    group.add_argument(
        "--json", action="store_true", help="with -p or piped text: print one JSON object with timings"
    )
    group.add_argument("--trace", metavar="FILE", type=Path, help="write one JSON line a round to FILE")
    group.add_argument(
        "--no-history", dest="history", action="store_false", help="neither read nor keep what was typed"
    )


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        metavar="REPO_OR_FOLDER",
        help="model that answers: Hugging Face name or folder (default: the pair used last, or else demo, "
        "the small bundled one)",
    )
    group.add_argument(
        "--drafter",
        metavar="REPO_OR_FOLDER",
        help='model that drafts; "lookup" copies from the text so far, "none" is plain decoding '
        "(default: the one made for the target, if there is one)",
    )
    group.add_argument(
        "--num-draft-tokens",
        metavar="K",
        type=integer(0),
        help="draft tokens in each round; 0 is no speculation (default: what pays)",
    )
    group.add_argument(
        "--kv-bits", metavar="{4,8}", type=int, choices=(4, 8), help="quantize the KV cache (default: do not)"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "At temperature 0 the others have no effect.")
    group.add_argument("--temperature", metavar="T", type=number, help="0, the default, is greedy decoding")
    group.add_argument("--top-p", metavar="P", type=number, help="most likely tokens that reach P together")
    group.add_argument("--top-k", metavar="N", type=integer(0), help="the N most likely tokens; 0 is all")
    group.add_argument(
        "--min-p", metavar="P", type=number, help="tokens P times as likely as the best, or more"
    )
    group.add_argument("--seed", metavar="N", type=integer(None), help="same seed, same text")
