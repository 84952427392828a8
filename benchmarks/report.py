"""Write the tables of RESULTS.md from the records in results/, or check that they are current.

In RESULTS.md a block is

    <!-- table: NAME [RECORD] -->
    <!-- end -->

NAME is decode, kinds, restart, architectures or templates. RECORD is a file of results/ without its
ending; without it, the newest record of that benchmark is shown. `--check` writes nothing and fails if
anything would change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"<!-- table: (\w+)(?: ([\w.-]+))? -->\n(?:.*?\n)??<!-- end -->", re.DOTALL)
Results = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """The JSON object that a benchmark printed on its last line."""

    file: Path
    content: dict[str, Any]

    @property
    def results(self) -> Results:
        found: Results = self.content["results"]
        return found

    @property
    def source(self) -> str:
        """Return device, versions, commit and date in a line."""
        c = self.content
        where = f"{c['device']}, {c['cores']} cores, MLX {c['versions']['mlx']}"
        where += ", GPU" if "gpu" in c["backend"] else ", CPU"
        where += f" with {c['blas']}" if c["blas"] else ""
        return f"{where}; commit `{c['commit']}`, {c['time'][:10]}, `benchmarks/results/{self.file.name}`"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--document", type=Path, default=ROOT / "benchmarks" / "RESULTS.md")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--check", action="store_true")
    settings = options.parse_args()
    text = settings.document.read_text("utf-8")
    wanted = rendered(text, settings.document, settings.results)
    if wanted == text:
        return
    if settings.check:
        sys.exit(f"{settings.document}: not what the records say; run python benchmarks/report.py")
    temporary = settings.document.with_name(f".{settings.document.name}.tmp")
    temporary.write_text(wanted, "utf-8")
    temporary.replace(settings.document)


def rendered(text: str, document: Path, results: Path) -> str:
    """Return the text with every block as its record says."""

    def block(found: re.Match[str]) -> str:
        name, stem = found.groups()
        if name not in TABLES:
            sys.exit(f"{document}: no table is called {name!r}, there are {', '.join(TABLES)}")
        benchmark, table = TABLES[name]
        record = read(results, benchmark, stem)
        opening = found[0].splitlines()[0]
        return f"{opening}\n{table(record.results)}\n\n{record.source}\n<!-- end -->"

    return BLOCK.sub(block, text)


def read(results: Path, benchmark: str, stem: str | None) -> Record:
    """Return the record of that name, or the newest one of a benchmark; runs with --quick do not count."""
    found = []
    for file in sorted(results.glob(f"{stem or '*'}.txt")):
        try:
            content = json.loads(file.read_text("utf-8").strip().splitlines()[-1])
        except (ValueError, IndexError):
            continue
        if content["benchmark"] == benchmark and not content["settings"].get("quick"):
            found.append(Record(file, content))
    if not found:
        sys.exit(f"{results} has no record {stem or ''} of {benchmark}: run benchmarks/{benchmark}.py")
    return max(found, key=lambda record: str(record.content["time"]))


def decode(results: Results) -> str:
    rows = [
        [name, *(ratio(arm[m]) for m in ("decode", "whole", "to plain")), arm["tokens/s"], arm["differ"]]
        for name, arm in results["arms"].items()
    ]
    head = [
        "",
        "decode, to mlx-lm",
        "whole, to mlx-lm",
        "decode, to plain",
        "tokens/s",
        "prompts that differ",
    ]
    null, (low, high) = ratio(results["null"]), results["null, quartiles"]
    blocks = f"{results['blocks within the spread']} of {results['blocks']} blocks were quiet"
    blocks += ", all were used" if results["noisy blocks used"] else ""
    notes = f"mlx-lm: {results['mlx-lm tokens/s']} tokens/s; {blocks}; mlx-lm against itself {null}, "
    return f"{markdown(head, rows)}\n\n{notes}quartiles {low:.2f} to {high:.2f}."


def kinds(results: Results) -> str:
    """Return ratios to plain; an asterisk marks texts that differ from mlx-lm's."""
    found = results["kinds"].values()
    rows = [
        [name, *(ratio(kind[name]["to plain"]) + ("*" if kind[name]["differ"] else "") for kind in found)]
        for name in results["arms"]
    ]
    return markdown(["", *results["kinds"]], rows)


def restart(results: Results) -> str:
    rows = [
        [name, f"{arm['seconds']:.2f}", f"{100 * arm['of first']:.2f} %", arm["cached"]]
        for name, arm in results["arms"].items()
    ]
    notes = f"{results['prompt tokens']} tokens, {results['megabytes']} MB; answers and draft tokens are "
    notes += "the same" if results["same"] else "NOT the same"
    return f"{markdown(['', 'seconds', 'of first', 'cached tokens'], rows)}\n\n{notes}."


def architectures(results: Results) -> str:
    found: dict[str, list[str]] = results["found"]
    rows = []
    for result in results["counts"]:
        named = [name for name, (what, _) in found.items() if what == result]
        rows.append([result, len(named), "" if result == "equal" else ", ".join(named)])
    return markdown(["", "architectures", "which"], rows)


def templates(results: Results) -> str:
    verdicts = ("equal", "better", "refused", "wrong")
    found = {**results["conversations"], "all": results["all"]}
    rows = [[name, *(counts.get(verdict, 0) for verdict in verdicts)] for name, counts in found.items()]
    why = results["better because transformers"]
    notes = f"{results['templates']} templates. Where ours is better, transformers fails {why['fails']}"
    notes += f" times, loses a text {why['loses']} times and writes parts as data {why['parts']} times."
    return f"{markdown(['', *verdicts], rows)}\n\n{notes}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def ratio(values: Sequence[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"


TABLES: dict[str, tuple[str, Callable[[Results], str]]] = {  # by name: the benchmark, and its table
    "decode": ("decode", decode),
    "kinds": ("decode", kinds),
    "restart": ("restart", restart),
    "architectures": ("architectures", architectures),
    "templates": ("templates", templates),
}


if __name__ == "__main__":
    main()
