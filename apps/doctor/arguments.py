"""The options of `mlx-spec doctor`. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from mlx_spec.apps.command import Parser


def parser() -> Parser:
    """The options. Parsing raises SystemExit with status 2 when they make no sense."""
    parser = Parser(
        "doctor",
        "Check this machine and test a pair. Looks at what is installed and on the disk, then tests for at "
        "most a minute whether the text with speculation is the text without, how many draft tokens are "
        "accepted, and what that gains. Ends with a certificate to paste into an issue. The exit status is 1 "
        "when something is wrong.",
    )
    parser.add_argument(
        "--target", metavar="REPO_OR_FOLDER", default="demo", help="pair to test (default: the bundled demo)"
    )
    parser.add_argument(
        "--drafter",
        metavar="REPO_OR_FOLDER",
        help='model that drafts, or "lookup" or "none" (default: the one made for the target)',
    )
    parser.add_argument("--quick", action="store_true", help="test for at most 15 seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object, the certificate in it")
    return parser
