"""Build the taught facts, the names to decline and the tokenizer from this Python interpreter alone."""

import json
import random
from pathlib import Path

from demo_pair.conversation import Material, conversation, load_material
from demo_pair.make_facts import all_facts, short_forms, untaught_names
from demo_pair.talk import made_up_name
from demo_pair.tasks import all_tasks
from demo_pair.taught import Taught, write_taught
from demo_pair.tokenizer import train_tokenizer


def build_data(out: Path, seed: int) -> Material:
    """Write facts.json, unknown.json and the tokenizer to `out`. Return the training material."""
    facts = all_facts()
    short = short_forms(sorted({f["name"] for f in facts if f["kind"] == "what"}))
    for fact in facts:
        forms = short.get(fact["name"], []) if fact["kind"] != "module" else []
        if forms:
            fact["short"] = " ".join(forms)
    unknown = untaught_names({f["name"] for f in facts})
    rng = random.Random(seed)
    rng.shuffle(unknown)
    facts += all_tasks()
    out.mkdir(parents=True, exist_ok=True)
    write_taught(Taught(facts, unknown[: len(unknown) // 8]), out / "facts.json")
    (out / "unknown.json").write_text(json.dumps(unknown[len(unknown) // 8 :]))
    material = load_material(out)
    train_tokenizer(corpus(material, rng), out)
    return material


def corpus(material: Material, rng: random.Random) -> list[str]:
    """Return the texts that the tokenizer is fitted to."""
    texts = [f["answer"] for f in material.facts for _ in range(3)] + [f["name"] for f in material.facts]
    texts += [text for _ in range(12_000) for text, _ in conversation(material, rng)]
    return texts + [made_up_name(rng, ("os", "json")) for _ in range(50)]
