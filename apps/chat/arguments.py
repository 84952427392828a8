"""The options of `mlx-spec chat`. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from .. import command
from ..command import MODEL, Version, flag, option

MAX_TOKENS = 2048
OUTPUT, MODELS, SAMPLING = "Output", "Models", "Sampling (at temperature 0 the others have no effect)"


@dataclass(frozen=True)
class Options:
    """Chat with a model. With -p or piped text: answer once, then exit."""

    prompt: Annotated[
        str | None,
        option("--prompt", "-p", value="TEXT", help="answer TEXT and exit; piped text is appended"),
    ] = None
    system: Annotated[str | None, option(value="TEXT", help="system prompt")] = None
    max_tokens: Annotated[int, option(value="N", help="longest answer, thinking included", min=1)] = (
        MAX_TOKENS
    )
    think: Annotated[bool, flag("--think", "let the model think first, if it is made for that")] = False
    version: Version = False

    stats: Annotated[bool, flag("--stats", "print more than one line after each answer", OUTPUT)] = False
    highlight: Annotated[
        bool,
        flag("--highlight", "colour each token by where it came from, on a terminal with colours", OUTPUT),
    ] = False
    json: Annotated[
        bool, flag("--json", "with -p or piped text: print one JSON object with timings", OUTPUT)
    ] = False
    trace: Annotated[
        Path | None, option(value="FILE", help="write one JSON line a round to FILE", panel=OUTPUT)
    ] = None
    no_history: Annotated[bool, flag("--no-history", "neither read nor keep what was typed", OUTPUT)] = False

    target: Annotated[
        str | None,
        option(
            value=MODEL,
            help="model that answers: Hugging Face name or folder",
            default="the pair used last, or else demo, the small bundled one",
            panel=MODELS,
        ),
    ] = None
    drafter: Annotated[
        str | None,
        option(
            value=MODEL,
            help='model that drafts; "lookup" copies from the text so far, "none" is plain decoding',
            default="the one made for the target, if there is one",
            panel=MODELS,
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        option(
            value="K",
            help="draft tokens in each round; 0 is no speculation",
            default="what pays",
            panel=MODELS,
            min=0,
        ),
    ] = None
    kv_bits: Annotated[
        Literal[4, 8] | None, option(help="quantize the KV cache", default="do not", panel=MODELS)
    ] = None

    temperature: Annotated[
        float | None, option(value="T", help="0, the default, is greedy decoding", panel=SAMPLING)
    ] = None
    top_p: Annotated[
        float | None, option(value="P", help="most likely tokens that reach P together", panel=SAMPLING)
    ] = None
    top_k: Annotated[
        int | None, option(value="N", help="the N most likely tokens; 0 is all", panel=SAMPLING, min=0)
    ] = None
    min_p: Annotated[
        float | None, option(value="P", help="tokens P times as likely as the best, or more", panel=SAMPLING)
    ] = None
    seed: Annotated[int | None, option(value="N", help="same seed, same text", panel=SAMPLING)] = None

    @property
    def history(self) -> bool:
        """Return True if what is typed is kept."""
        return not self.no_history

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Return the fields of `Sampling` that were given."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        return {name: value for name in names if (value := vars(self)[name]) is not None}


def parse(arguments: Sequence[str] | None) -> Options:
    """Return the options of a command line. Raises SystemExit with status 2 if one is wrong."""
    return command.parse(Options, "chat", arguments)


def refuse(problem: str) -> NoReturn:
    """Exit with status 2 and one line on stderr that says where help is."""
    command.refuse("mlx-spec chat", problem)
