"""The facts that the demo model was taught and names that it should decline, as the recipe saved them."""

import json
from dataclasses import dataclass
from pathlib import Path

FACTS = Path(__file__).with_name("facts.json")
Fact = dict[str, str]  # kind, name, noun, short (other ways to write the name, may be missing), answer
ABOUT_NAMES = ("what", "signature", "place")
REFUSAL = (
    "I do not know that. I am the small mlx_spec demo model and only know the Python standard library. "
    "Load a real model for that."
)


@dataclass(frozen=True)
class Taught:
    """What the model should answer, and names of the library that it never saw."""

    facts: list[Fact]
    declined: list[str]


def read_taught(file: Path = FACTS) -> Taught:
    """Return the content of a facts.json, facts in the order in which they were written."""
    content = json.loads(file.read_text(encoding="utf-8"))
    facts = []
    for record in content["facts"]:
        about = {k: v for k, v in record.items() if k in ("name", "noun", "short")}
        facts += [{"kind": k, **about, "answer": v} for k, v in record.items() if k not in about]
    return Taught(facts, content["declined"])


def write_taught(taught: Taught, file: Path) -> None:
    """Write one record a name: its noun, its short forms and the answer of each kind."""
    records: dict[tuple[str, str], Fact] = {}
    for fact in taught.facts:
        group = "name" if fact["kind"] in ABOUT_NAMES else fact["kind"]
        about = {k: v for k, v in fact.items() if k in ("name", "noun", "short") and v}
        records.setdefault((group, fact["name"]), about)[fact["kind"]] = fact["answer"]
    lines = ",\n".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) for r in records.values())
    declined = json.dumps(taught.declined)
    file.write_text(f'{{"facts":[\n{lines}\n],\n"declined":{declined}}}\n', encoding="utf-8")
