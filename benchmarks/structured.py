"""What does an answer under a JSON schema cost, with speculation and without, against a free answer?

Schemas: a hundred fixed ones; `--drawn N` random ones by `--seed`; or `--records`, three of the kind that
classification and extraction ask for. For each schema, `--repeats` blocks of four arms in the order of a
balanced Latin square, the first block dropped: answers under the schema, drafted (by the pair's own drafters
and by what the grammar forces) and plain, and free answers to the same question, drafted and plain. Ratios
are of seconds a token in the engine, paired in a block; below 1 is faster. Geometric means of medians,
bootstrap 95 % intervals, schemas drawn first.

All arms are greedy. Every drafted answer must be the plain one, and every answer must end and match its
schema. `--tokens` is the length of free answers; those under a schema end by themselves, or at `--most`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time
from time import time as clock
from typing import Any

import jsonschema
from schemas import RECORDS, SCHEMAS, Draws, Schema
from timing import finish, interval, latin_square, parser, table

import mlx_spec
from mlx_spec.engine import decode
from mlx_spec.grammar import Grammar
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling
from mlx_spec.types import Round

ARMS = {  # name: (under the grammar, drafted)
    "grammar, drafted": (True, True),
    "grammar, plain": (True, False),
    "free, drafted": (False, True),
    "free, plain": (False, False),
}
RATIOS = [
    ("grammar, drafted", "grammar, plain"),
    ("grammar, drafted", "free, drafted"),
    ("grammar, drafted", "free, plain"),
    ("grammar, plain", "free, plain"),
]
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "uuid"])
FORMATS.checks("date-time", ValueError)(lambda text: bool(datetime.fromisoformat(text.upper())))
FORMATS.checks("time", ValueError)(lambda text: bool(time.fromisoformat(text.upper())))
QUESTION = "What does the function {} do?"
NAMES = ("os.path.join", "json.dumps", "math.sqrt", "random.choice", "time.sleep")


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    seconds: float  # a token
    rounds: int
    forced: int  # tokens that the grammar drafted
    ended: bool


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", default="demo")
    options.add_argument("--drafter")
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--most", type=int, default=1500)
    options.add_argument("--repeats", type=int, default=4, help="blocks a schema; the first is dropped")
    options.add_argument("--drawn", type=int, metavar="N", help="N random schemas")
    options.add_argument("--records", action="store_true", help="three schemas of records")
    settings = options.parse_args()
    if settings.quick:
        settings.repeats, settings.tokens = 2, 8
    started = clock()
    pairs = {
        True: mlx_spec.load(settings.target, settings.drafter),
        False: mlx_spec.load(settings.target, "none"),
    }
    schemas = RECORDS if settings.records else SCHEMAS
    if settings.drawn:
        schemas = Draws(settings.seed).schemas(settings.drawn)
    elif settings.quick and not settings.records:
        schemas = schemas[::25]
    results = measured(pairs, schemas, settings)
    report(results)
    finish("structured", results, settings, started)


def measured(pairs: Mapping[bool, Pair], schemas: list[Schema], settings: Any) -> dict[str, Any]:
    ratios: dict[tuple[str, str], list[list[float]]] = {pair: [] for pair in RATIOS}
    counts = dict.fromkeys(("tokens", "forced", "ended", "invalid", "different"), 0)
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    orders = latin_square(list(ARMS))
    for number, schema in enumerate(schemas):
        blocks = []
        for repeat in range(settings.repeats):
            order = orders[(number + repeat) % len(orders)]
            lengths = {name: settings.most if ARMS[name][0] else settings.tokens for name in order}
            blocks.append({name: answer(pairs, schema, number, name, lengths[name]) for name in order})
        last = blocks[-1]
        drafted, plain = last["grammar, drafted"], last["grammar, plain"]
        counts["tokens"] += len(drafted.tokens)
        counts["forced"] += drafted.forced
        counts["ended"] += drafted.ended
        counts["invalid"] += not (plain.ended and valid(pairs[False], plain, schema))
        counts["different"] += sum(
            b["grammar, drafted"].tokens != b["grammar, plain"].tokens
            or b["free, drafted"].tokens != b["free, plain"].tokens
            for b in blocks
        )
        for a, b in RATIOS:
            ratios[a, b].append([block[a].seconds / block[b].seconds for block in blocks[1:]])
        for name in ARMS:
            times[name] += [block[name].seconds for block in blocks[1:]]
    return {
        "schemas": len(schemas),
        **counts,
        "tokens/s": {name: round(1 / statistics.median(values)) for name, values in times.items()},
        "ratios": {f"{a} / {b}": interval(values, settings.seed) for (a, b), values in ratios.items()},
    }


def answer(pairs: Mapping[bool, Pair], schema: Schema, number: int, arm: str, count: int) -> Answer:
    constrained, drafted = ARMS[arm]
    pair = pairs[drafted]
    question = QUESTION.format(NAMES[number % len(NAMES)])
    prompt = pair.text.prompt([{"role": "user", "content": question}])
    grammar: Grammar | None = None
    if constrained:
        size = pair.info.vocab_size
        grammar = compile_grammar("json_schema", json.dumps(schema), pair.text, size, seconds=5.0)
    parts = pair.open()
    rounds = list(decode(pair.prepare(parts, prompt, sampling=Sampling(grammar=grammar), max_tokens=count)))
    return summed(rounds, len(parts.drafters))


def summed(rounds: list[Round], forced: int) -> Answer:
    """`forced` is the index of the drafter that knows the grammar."""
    tokens = tuple(token for round in rounds for token in round.tokens)
    return Answer(
        tokens,
        sum(round.seconds for round in rounds) / len(tokens),
        len(rounds),
        sum(round.accepted for round in rounds if round.drafter == forced),
        rounds[-1].finish_reason == "stop",
    )


def valid(pair: Pair, found: Answer, schema: Schema) -> bool:
    text = pair.text.decode_raw(found.tokens[:-1])
    return jsonschema.Draft202012Validator(schema, format_checker=FORMATS).is_valid(json.loads(text))


def report(results: dict[str, Any]) -> None:
    tokens, forced = results["tokens"], results["forced"]
    print(f"\n{results['schemas']} schemas: {results['ended']} ended, {results['invalid']} are invalid,")
    print(f"{results['different']} drafted answers are not the plain ones.")
    print(f"{forced} of {tokens} tokens were forced and drafted for nothing.\n")
    table(["arm", "tokens/s"], list(results["tokens/s"].items()))
    rows = [[name, f"{r[0]:.3f} [{r[1]:.3f}, {r[2]:.3f}]"] for name, r in results["ratios"].items()]
    table(["seconds a token", "ratio"], rows)


if __name__ == "__main__":
    main()
