"""Are JSON schemas enforced: does each random answer end, parse and match, and which schemas are refused?

Schemas are built in (a hundred fixed ones, and seeded random ones), or other people's, in files: JSON with
names and schemas, or the list of tools of an MCP server. An answer is a series of random allowed tokens, with
some drafts that are rewound. `jsonschema` judges it; `nullable` and the bounds of draft 4 are rewritten for
it. An answer that has not ended after `LONGEST` tokens, such as a text without a limit, is not judged.

All texts, lists and numbers in built-in schemas have bounds, because a small model writes digits without end.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from time import time as clock
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend, validator_for
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.schemas import SCHEMAS, Draws, Schema

from mlx_spec import demo
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Grammar
from mlx_spec.grammar.json_schema import enforceable
from mlx_spec.grammar.matcher import TokenBits, compile_grammar
from mlx_spec.tokenizer import Tokenizer, read_tokenizer

LONGEST = 600  # tokens of an answer
DRAFT_SHARE = 0.1  # share of the tokens before which a draft is checked and rewound


# --- random answers


def walk(grammar: Grammar, tokenizer: Tokenizer, draw: random.Random) -> str | None:
    """Return a random answer, None if it is too long. Raises InvalidValue if no token is allowed."""
    matcher, tokens = grammar.matcher([]), list[int]()
    closers = {token for word in CLOSERS for token in tokenizer.encode(word)}
    while len(tokens) < LONGEST:
        allowed = _allowed(matcher.allowed(tokens, [], 1)[0])
        others = [token for token in allowed if token not in tokenizer.eos]
        if not allowed:
            raise InvalidValue("no token is allowed")
        if not others or (len(others) < len(allowed) and draw.random() < 0.4):
            return tokenizer.decode_raw(tokens)
        soon = [token for token in others if token in closers]
        token = draw.choice(soon if soon and draw.random() < len(tokens) / 60 else others)
        if draw.random() < DRAFT_SHARE:
            matcher.allowed(tokens, [token, draw.choice(others), draw.choice(others)], 4)
        tokens.append(token)
    return None


CLOSERS = ('"', "}", "]", '"}', '"]', "}}", "]}", ", ", "0", "a")


def _allowed(bits: TokenBits) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))]


def multiple_of(_: Any, divisor: float, value: Any, schema: Any) -> Iterator[ValidationError]:
    """Judge a multiple by its digits: jsonschema divides floats."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and Decimal(repr(value)) % Decimal(repr(divisor)):
        yield ValidationError(f"{value} is not a multiple of {divisor}")


def judged(schema: Any) -> Any:
    """Return a schema in words that jsonschema knows."""
    if isinstance(schema, list):
        return [judged(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: judged(each) for key, each in schema.items()}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    if found.pop("nullable", None) is True:
        return {"anyOf": [found, {"type": "null"}]}
    return found


def verdicts(schema: Schema, tokenizer: Tokenizer, walks: int, name: str) -> Counter[str]:
    """Return the result of a schema and counts of its random answers."""
    found: Counter[str] = Counter(schemas=1)
    try:
        rewritten, unenforced = enforceable(schema, closed=True)
        grammar = compile_grammar(
            "json_schema", json.dumps(rewritten), tokenizer, len(tokenizer.vocabulary()), seconds=10
        )
    except InvalidValue as error:
        print(f"{name}: {error}")
        return found + Counter(refused=1)
    found["partly"] += bool(unenforced)
    base = validator_for(schema, Draft202012Validator)
    judge = extend(base, {"multipleOf": multiple_of})(judged(schema))
    for number in range(walks):
        try:
            answer = walk(grammar, tokenizer, random.Random(f"{name} {number}"))
            if answer is None:
                found["long"] += 1
                continue
            found["answers"] += 1
            if not unenforced:
                judge.validate(json.loads(answer))
                found["right"] += 1
        except (InvalidValue, ValidationError, ValueError) as error:
            found["wrong"] += 1
            print(f"{name}: {str(error).splitlines()[0]}")
        except re.error:  # a pattern that Python does not know
            found["unjudged"] += 1
    return found


def read_schemas(file: Path) -> dict[str, Schema]:
    """Return the schemas of a file by name."""
    given = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(given, dict):
        return given
    return {tool["name"]: tool["inputSchema"] for tool in given}


def main() -> None:
    started, options = clock(), parser(__doc__)
    options.add_argument("files", type=Path, nargs="*", help="schemas of other people")
    options.add_argument("--drawn", type=int, default=60, help="random schemas of our own")
    options.add_argument("--walks", type=int, default=25, help="random answers to each")
    settings = options.parse_args()
    tokenizer = read_tokenizer(read_checkpoint(demo.TARGET))
    groups = {"fixed": SCHEMAS, "drawn": Draws(0).schemas(settings.drawn)}
    named = {group: {str(i): each for i, each in enumerate(them)} for group, them in groups.items()}
    named |= {file.stem: read_schemas(file) for file in settings.files}
    counts: dict[str, Counter[str]] = {}
    for group, them in named.items():
        chosen = list(them.items())[:: 20 if settings.quick else 1]
        each = [verdicts(schema, tokenizer, settings.walks, f"{group} {name}") for name, schema in chosen]
        counts[group] = sum(each, Counter[str]())
    counts["all"] = sum(counts.values(), Counter[str]())
    columns = ["schemas", "refused", "partly", "answers", "right", "wrong", "unjudged", "long"]
    table(
        ["group", *columns], [[group, *(found[name] for name in columns)] for group, found in counts.items()]
    )
    settings.files = [file.name for file in settings.files]
    finish("schemas", {group: dict(found) for group, found in counts.items()}, settings, started)


if __name__ == "__main__":
    main()
