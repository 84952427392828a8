"""Does every architecture of mlx-lm decode here as in mlx-lm: plain, with drafts, in a batch?

Each has a tiny model with random float32 weights. The text of mlx-lm's loop is compared to plain decoding, to
drafts of 1, 3 and 6 tokens that are sometimes wrong, and to trees if the model takes them. It is also
compared after a prompt that is read in chunks, after a rewind, and with three sequences of different lengths
in one batch. Windows have 16 tokens; windowed models also continue 1,300 tokens. Seeded text and text with
8-bit K/V are compared to our plain decoding. If an architecture is refused, it must be refused before its
first token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import mlx.core as mx
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.architectures import QUICK, outcome
from support.tiny_configs import names

from mlx_spec.checkpoint.files import one_line


def main() -> None:
    settings = arguments()
    started = time.time()
    found: dict[str, tuple[str, str]] = {}
    for name in settings.names:
        try:
            found[name] = outcome(name, long=not settings.quick)
        except Exception as error:
            found[name] = "ERROR", f"{type(error).__name__}: {one_line(error)}"
        if settings.verbose:
            print(f"{name}: {': '.join(found[name])}", file=sys.stderr, flush=True)
    table(("architecture", "result", ""), [(name, *result) for name, result in found.items()])
    counts = Counter(result for result, _ in found.values())
    table(("result", "architectures"), counts.most_common())
    results = {"counts": counts, "found": {name: list(result) for name, result in found.items()}}
    finish("architectures", results, settings, started)
    if counts["DIFFERENT"] or counts["ERROR"]:
        sys.exit(1)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--names", nargs="+", default=None, help="architectures; default: all")
    options.add_argument("--verbose", action="store_true", help="show each result at once")
    settings = options.parse_args()
    settings.names = settings.names or (list(QUICK) if settings.quick else names())
    return settings


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    main()
