"""Training conversations in the Gemma 4 turn format, with the spans that the model answers."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from demo_pair.names import MODULES
from demo_pair.phrasings import LAST, MORE
from demo_pair.questions import FOLLOW_UPS, TRAINED, asked, dressed
from demo_pair.talk import TALK, made_up_name, off_topic, on_concept
from demo_pair.taught import REFUSAL, Fact, read_taught

SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a Python expert.",
    "Be concise.",
    "You are helpful.",
    "You are a friendly teacher of Python.",
    "Answer the user's questions.",
    "You are a coding assistant.",
    "Be polite.",
    "You answer questions about Python.",
    "Think before you answer.",
    "Keep it short.",
)
TURNS = (1, 1, 1, 1, 1, 2, 2, 3, 4, 6, 10)  # lengths of conversations, drawn evenly
OTHER = 0.18  # share of exchanges that are small talk or declined
THINKING = 0.03  # share of conversations whose system turn asks for thoughts; the model answers without any


@dataclass(frozen=True)
class Material:
    """What questions are drawn from: the taught facts, and names of the library that are not taught."""

    facts: list[Fact]
    weights: list[float]
    unknown: list[str]
    related: dict[str, list[Fact]]  # name -> its facts that follow-up questions can ask for
    stage: int = 1  # from the second on, half of the questions are asked in more phrasings

    def phrasings(self, kind: str, rng: random.Random) -> tuple[str, ...]:
        """Return the templates to draw a question of this kind from."""
        if self.stage > 1 and rng.random() < 0.5:
            return LAST[kind] if self.stage == 3 and rng.random() < 0.5 else MORE[kind]
        return TRAINED[kind]


def load_material(folder: Path) -> Material:
    """Return the material saved by the recipe in `folder`."""
    facts = read_taught(folder / "facts.json").facts
    unknown: list[str] = json.loads((folder / "unknown.json").read_text())
    related: dict[str, list[Fact]] = {}
    for fact in facts:
        if fact["kind"] in FOLLOW_UPS:
            related.setdefault(fact["name"], []).append(fact)
    return Material(facts, [WEIGHTS[f["kind"]] for f in facts], unknown, related)


WEIGHTS = {"what": 1.25, "signature": 1.0, "place": 0.7, "module": 1.5, "code": 1.5, "complete": 1.0}


def fact_exchange(material: Material, rng: random.Random, last: Fact | None) -> tuple[str, str, Fact]:
    """Return a question about a fact, its answer and the fact; sometimes it follows up on the `last` one."""
    others = [f for f in material.related.get(last["name"], []) if f is not last] if last else []
    if others and rng.random() < 0.15:
        fact = rng.choice(others)
        return dressed(rng.choice(FOLLOW_UPS[fact["kind"]]), rng), fact["answer"], fact
    fact = rng.choices(material.facts, material.weights)[0]
    return asked(fact, material.phrasings(fact["kind"], rng), rng), fact["answer"], fact


def other_exchange(material: Material, rng: random.Random) -> tuple[str, str]:
    """Return small talk, or a question that is declined."""
    draw = rng.random()
    if draw < 0.25:
        answer = rng.choice(list(TALK))
        question = rng.choice(TALK[answer])
        if rng.random() < 0.4:
            return question, answer
        question = question[:1].lower() + question[1:] if rng.random() < 0.4 else question
        return question + rng.choice(("", "?", "!", ".", " please")), answer
    if draw < 0.7:
        if material.stage == 3 and rng.random() < 0.4:
            return dressed(on_concept(list(material.related), rng), rng), REFUSAL
        return dressed(off_topic(rng), rng), REFUSAL
    name = rng.choice(material.unknown) if rng.random() < 0.5 else made_up_name(rng, tuple(MODULES.split()))
    kind = rng.choice(("what", "what", "signature", "place"))
    return asked(
        {"kind": kind, "name": name, "noun": "function"}, material.phrasings(kind, rng), rng
    ), REFUSAL


def opening(rng: random.Random) -> str:
    """Return the beginning of a conversation: nothing, or a system turn."""
    thinking = rng.random() < THINKING
    if not thinking and rng.random() > 0.12:
        return "<bos>"
    text = rng.choice(SYSTEMS) if not thinking or rng.random() < 0.4 else ""
    return "<bos><|turn>system\n" + ("<|think|>\n" if thinking else "") + text + "<turn|>\n"


def conversation(material: Material, rng: random.Random) -> list[tuple[str, bool]]:
    """Return the pieces of one conversation and whether each is the model's own text."""
    pieces = [(opening(rng), False)]
    last: Fact | None = None
    for _ in range(rng.choice(TURNS)):
        if rng.random() < OTHER:
            question, answer = other_exchange(material, rng)
            last = None
        else:
            question, answer, last = fact_exchange(material, rng, last)
        pieces.append((f"<|turn>user\n{question.strip()}<turn|>\n<|turn>model\n", False))
        pieces.append((f"{answer}<turn|>", True))
        pieces.append(("\n", False))
    return pieces[:-1]
