"""Does the demo pair answer right, and are its drafts accepted?

Asks the bundled pair about taught facts, in phrasings that it was never trained on. An answer counts only if
it is exactly the taught one. The pair should decline names of the library that it was not taught. Decoding is
greedy with K draft tokens a round. `tokens a round` is the mean of accepted + 1; for K = 1, 2, 3 the same
rounds are cut short.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field

from timing import finish, parser, table

import mlx_spec
from demo_pair.questions import HELD_OUT, asked
from demo_pair.taught import REFUSAL, Fact, read_taught


@dataclass
class Score:
    right: int = 0
    asked: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)  # a round that drafted K tokens

    def length(self, limit: int) -> float | None:
        """Return tokens a round if each had drafted at most `limit`."""
        return (
            round(1 + sum(min(a, limit) for a in self.accepted) / len(self.accepted), 2)
            if self.accepted
            else None
        )


def questions(per_kind: int, rng: random.Random) -> list[tuple[str, str, str]]:
    """Return (kind, question, right answer) of `per_kind` facts of each kind; of all if 0."""
    taught = read_taught()
    kinds: dict[str, list[Fact]] = defaultdict(list)
    for fact in taught.facts:
        kinds[fact["kind"]].append(fact)
    kinds["declined"] = [
        {"kind": "what", "name": n, "noun": "function", "answer": REFUSAL} for n in taught.declined
    ]
    chosen = {
        kind: rng.sample(facts, min(per_kind or len(facts), len(facts))) for kind, facts in kinds.items()
    }
    return [
        (kind, asked(fact, HELD_OUT[fact["kind"]], rng), fact["answer"])
        for kind, facts in chosen.items()
        for fact in facts
    ]


def ask(pair: mlx_spec.Pair, question: str, sampling: mlx_spec.Sampling, score: Score) -> str:
    """Return the answer; add its rounds to the score."""
    prompt = pair.tokenizer.prompt([{"role": "user", "content": question}])
    tokens: list[int] = []
    for step in pair.generate(prompt, sampling=sampling, max_tokens=100):
        tokens += step.tokens
        score.tokens += len(step.tokens)
        score.seconds += step.seconds
        if step.drafted:
            score.accepted.append(step.accepted)
    return pair.tokenizer.decode(tokens)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--per-kind", type=int, default=60, help="questions a kind; 0: every fact")
    arguments.add_argument("--num-draft-tokens", type=int, default=4)
    arguments.add_argument("--temperature", type=float, default=0.0)
    arguments.add_argument("--drafter", default=None, help='"none" to decode without one')
    arguments.add_argument("--wrong", action="store_true", help="print the answers that are not right")
    settings = arguments.parse_args()
    started = time.time()
    drafts = None if settings.drafter == "none" else settings.num_draft_tokens
    pair = mlx_spec.load("demo", settings.drafter, num_draft_tokens=drafts)
    sampling = mlx_spec.Sampling(temperature=settings.temperature, seed=settings.seed)
    scores: dict[str, Score] = defaultdict(Score)
    for kind, question, answer in questions(
        6 if settings.quick else settings.per_kind, random.Random(settings.seed)
    ):
        got = ask(pair, question, sampling, scores[kind])
        scores[kind].asked += 1
        scores[kind].right += got == answer
        if settings.wrong and got != answer:
            print(json.dumps({"question": question, "answer": got, "right": answer}))
    report(scores, settings, started)


def report(scores: dict[str, Score], settings, started: float) -> None:
    """Print a row for each kind, and the record."""
    every = Score(
        sum(s.right for s in scores.values()),
        sum(s.asked for s in scores.values()),
        sum(s.tokens for s in scores.values()),
        sum(s.seconds for s in scores.values()),
        [a for s in scores.values() for a in s.accepted],
    )
    limits = range(1, settings.num_draft_tokens + 1)
    head = ["kind", "asked", "exactly right", *(f"tokens a round, K = {k}" for k in limits), "tokens/s"]
    results = []
    for kind, score in [*scores.items(), ("all", every)]:
        share = f"{100 * score.right / score.asked:.1f} %"
        lengths = [score.length(k) for k in limits]
        speed = round(score.tokens / score.seconds)
        results.append(dict(zip(head, [kind, score.asked, share, *lengths, speed], strict=True)))
    table(head, [list(r.values()) for r in results])
    finish("measure_answers", results, settings, started)


if __name__ == "__main__":
    main()
