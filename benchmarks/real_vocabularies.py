"""Are tokens and texts of published vocabularies right, or are they refused by name?

FOLDER is searched for two kinds of vocabularies:

- `NAME.gguf` with `NAME.gguf.inp` and `NAME.gguf.out`, which have texts and their expected tokens, as in
  llama.cpp. Files without expected tokens are only read.
- Folders with `tokenizer.json` or other files that transformers reads: the tokens of seeded random texts are
  compared to transformers'. `PreTrainedTokenizerFast` follows tokenizer.json. Classes of some models build
  another tokenizer instead, such as GPT-2's pre-tokenizer for GPT-4o; these are not compared.

Then each text is streamed from a random token on. The pieces must make up the text of all tokens without the
text of the tokens before. Random tokens are streamed, too. If they are not UTF-8, a decoder of all tokens may
change a character that was streamed already; such streams are counted separately.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from timing import finish, parser, table
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.gguf import read_gguf
from mlx_spec.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from mlx_spec.errors import SpecError
from mlx_spec.tokenizer import Tokenizer, read_fast_tokenizer
from mlx_spec.tokenizer.detokenizer import REPLACEMENT
from mlx_spec.tokenizer.stream import AnswerStream
from mlx_spec.types import Round

BETWEEN = "\n__ggml_vocab_test__\n"  # between two texts of an .inp file
PIECES = (
    *("Hello", " World", "I'LL", " we've", "12345", " 3.14", "  ", "\n\n", " \n", "\t", "camelCase", "!!"),
    *("日本語", " Ünï", "e\u0301", "👍🏽", "한국어", " العربية", "½", "\u200b", " हिन्दी", "ไทย"),
    *("</a>", "\\n", "_x", '{"a": 1}'),
)


@dataclass
class Counts:
    """The counts of a vocabulary."""

    name: str
    texts: int = 0
    differ: int = 0  # texts with other tokens
    streams: int = 0
    torn: int = 0  # streams that do not make up the text
    broken: int = 0  # streams with bytes that are not UTF-8
    rewritten: int = 0  # those that differ from one decode
    refused: str = ""
    examples: list[str] = field(default_factory=list)


def main() -> None:
    settings = arguments()
    started = time.time()
    found = [check(file, settings) for file in vocabularies(settings.folder)]
    if not found:
        raise SystemExit(
            f"{settings.folder} has no vocabularies: give a folder with files .gguf or tokenizer.json"
        )
    read = [each for each in found if not each.refused]
    table(
        ["vocabulary", "texts", "other tokens", "streams", "torn", "not UTF-8", "written anew"],
        [[c.name, c.texts, c.differ, c.streams, c.torn, c.broken, c.rewritten] for c in read],
    )
    table(["refused", "reason"], [[each.name, each.refused] for each in found if each.refused])
    right = sum(not (each.differ or each.torn) for each in read)
    totals = {
        "vocabularies": len(found),
        "right": right,
        "wrong": len(read) - right,
        "refused": len(found) - len(read),
        "texts": sum(each.texts for each in read),
        "streams": sum(each.streams for each in read),
    }
    finish("real_vocabularies", totals | {"each": [asdict(each) for each in found]}, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("folder", type=Path, help="where the vocabularies are")
    options.add_argument("--texts", type=int, default=200, help="of a seed, where transformers is compared")
    options.add_argument("--random", type=int, default=200, help="streams of random tokens")
    settings = options.parse_args()
    if settings.quick:
        settings.texts = settings.random = 5
    return settings


def vocabularies(folder: Path) -> Iterator[Path]:
    """Yield files .gguf, and folders that hold a tokenizer."""
    yield from sorted(folder.rglob("*.gguf"))
    kinds = ("tokenizer.json", "tokenizer.model", "vocab.json")
    yield from sorted({file.parent for kind in kinds for file in folder.rglob(kind)})


def check(place: Path, settings: argparse.Namespace) -> Counts:
    counts, chance = Counts(str(place.relative_to(settings.folder))), random.Random(settings.seed)
    try:
        if place.suffix == ".gguf":
            tokenizer = Tokenizer(read_gguf_tokenizer(place, read_gguf(place).metadata)[0], None, ())
            expected = list(expected_of_file(place))
        else:
            tokenizer = Tokenizer(read_fast_tokenizer(Checkpoint(place)), None, ())
            expected = list(expected_of_transformers(place, settings.texts, chance))
    except SpecError as error:
        counts.refused = str(error).removeprefix(str(place)).strip()
        return counts
    for source, tokens in expected:
        counts.texts += 1
        if tokenizer.encode(source) != tokens:
            counts.differ += 1
            counts.examples.append(source[:40])
        stream(tokenizer, tokens, chance, counts)
    size = len(tokenizer.vocabulary())
    for _ in range(settings.random):
        stream(tokenizer, [chance.randrange(size) for _ in range(chance.randint(2, 12))], chance, counts)
    return counts


def expected_of_file(file: Path) -> Iterator[tuple[str, list[int]]]:
    texts, tokens = (file.with_name(f"{file.name}.{kind}") for kind in ("inp", "out"))
    if texts.is_file() and tokens.is_file():
        sources = texts.read_text(encoding="utf-8").split(BETWEEN)
        for source, line in zip(sources, tokens.read_text().split("\n"), strict=False):
            yield source, [int(token) for token in line.split()]


def expected_of_transformers(
    folder: Path, count: int, chance: random.Random
) -> Iterator[tuple[str, list[int]]]:
    has_own = (folder / "tokenizer.json").is_file()
    try:
        theirs = (PreTrainedTokenizerFast if has_own else AutoTokenizer).from_pretrained(folder)
    except Exception as error:
        raise SpecError(f"{folder} is not read by transformers ({type(error).__name__})") from error
    names = list(theirs.get_added_vocab())[:8]
    for _ in range(count):
        source = "".join(chance.choices([*PIECES, *names], k=chance.randint(1, 12)))
        yield source, theirs.encode(source, add_special_tokens=False)


def stream(tokenizer: Tokenizer, tokens: Sequence[int], chance: random.Random, counts: Counts) -> None:
    """Stream the tokens after a random one, and count whether the pieces make up the text."""
    at = chance.randint(0, len(tokens))
    before, whole = tokenizer.decode(tokens[:at]), tokenizer.decode(tokens)
    answer = AnswerStream(tokenizer, None, before=tokens[:at])
    parts = [part for token in tokens[at:] for part in answer.read(Round([token], 0, 0, "plain"))]
    said = "".join(part.text for part in [*parts, *answer.end()])
    counts.streams += 1
    if REPLACEMENT in whole + before:
        counts.broken += 1
        counts.rewritten += before + said != whole
    elif before + said != whole:
        counts.torn += 1
        counts.examples.append(f"{tokens} from {at}")


if __name__ == "__main__":
    main()
