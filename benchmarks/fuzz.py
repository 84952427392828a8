"""Does damaged input end with one line, in bounded time and memory, whatever reads it?

Seeded fuzzing of all readers (`tests/support/fuzz_readers.py`): checkpoints, tokenizers, templates, files of
this program, pictures and requests. Children read damaged copies of valid files. Findings are tracebacks, too
much CPU or memory, the end of a child, and a cache file that was changed and is read. Exit status 1 if there
are any.

    python benchmarks/fuzz.py --seconds 3600            # of CPU, over all readers
    python benchmarks/fuzz.py --inputs 100 template     # of one reader, and repeatable
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.fuzz import fuzz
from support.fuzz_readers import READERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("readers", nargs="*", help="all unless given", choices=[*READERS, []])
    parser.add_argument("--seconds", type=float, default=3600, help="of CPU, over all readers")
    parser.add_argument("--inputs", type=int, help="of each reader; a fixed number is repeatable")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.readers or list(READERS)
    found = {}
    print(f"{'reader':<14}{'inputs':>9}{'refused':>9}{'CPU s':>8}  findings", flush=True)
    for name in names:
        share = options.seconds / len(names)
        tried = fuzz(name, READERS[name], seed=options.seed, count=options.inputs, seconds=share)
        found[name] = asdict(tried)
        shown = f"{name:<14}{tried.inputs:>9}{tried.refused:>9}{tried.seconds:>8.1f}  {len(tried.findings)}"
        print("\n".join([shown, *(f"    {finding}" for finding in tried.findings)]), flush=True)
    print(json.dumps(found))
    return int(any(tried["findings"] for tried in found.values()))


if __name__ == "__main__":
    sys.exit(main())
