"""Is an answer that is held to a record's schema faster than the same request without one, both drafted?

Three schemas of records (choices and flags, as classification and extraction ask for), four questions of the
demo pair, in turns. Seconds a token in the engine, the constrained answer to the free one; quartiles.
"""

from __future__ import annotations

import json
import statistics
import time

from timing import finish, parser, table

import mlx_spec
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.model.sequence import SequenceParts
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling

FLAG = {"type": "boolean"}
QUESTIONS = (
    "What does zip do?",
    "What does os.path.join do?",
    "What is functools.lru_cache for?",
    "Write code that reads a JSON file",
)


def record(**properties: object) -> dict[str, object]:
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


SCHEMAS = {
    "function": record(
        function={"enum": ["zip", "map", "filter"]},
        module={"enum": ["builtins", "os", "json"]},
        is_builtin=FLAG,
        deprecated=FLAG,
    ),
    "city": record(
        city={"enum": ["Rome", "Oslo"]}, temperature_unit={"enum": ["celsius", "fahrenheit"]}, ok=FLAG
    ),
    "nested": record(
        result=record(kind={"enum": ["function", "class"]}, pure=FLAG), confidence={"enum": ["low", "high"]}
    ),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=9, help="the first is dropped")
    settings = options.parse_args()
    started = time.time()
    pair = mlx_spec.load("demo")
    vocabulary = pair.info.vocab_size
    grammars = {
        name: compile_grammar("json_schema", json.dumps(schema), pair.text, vocabulary, seconds=10)
        for name, schema in SCHEMAS.items()
    }
    ratios: dict[str, list[float]] = {name: [] for name in SCHEMAS}
    held, free = pair.open(), pair.open()
    for repeat in range(2 if settings.quick else settings.repeats):
        for question in QUESTIONS:
            prompt = pair.text.prompt([{"role": "user", "content": question}])
            base = seconds(pair, free, Sampling(), prompt)
            for name, grammar in grammars.items():
                taken = seconds(pair, held, Sampling(grammar=grammar), prompt)
                ratios[name] += [taken / base] if repeat else []
    found = {name: [round(x, 3) for x in statistics.quantiles(values)] for name, values in ratios.items()}
    table(["schema", "low", "median", "high"], [[name, *values] for name, values in found.items()])
    finish("records", found, settings, started)


def seconds(pair: Pair, decoding: SequenceParts, sampling: Sampling, prompt: list[int]) -> float:
    """A token of an answer."""
    decoding.target.rewind(0)
    rounds = list(pair.run(decoding, prompt, sampling=sampling, max_tokens=60))
    return sum(round.seconds for round in rounds) / sum(len(round.tokens) for round in rounds)


if __name__ == "__main__":
    main()
