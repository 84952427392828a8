"""The options of `mlx-spec chat`. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from mlx_spec.cli.command import LoadOptions, NoEarlierAnswers, Version, expanded, flag, option

OUTPUT = "Output"  # a panel of the help page
_output = partial(option, panel=OUTPUT)
_sampling = partial(option, panel="Sampling (at temperature 0 the others have no effect)")


@dataclass(frozen=True)
class Options(LoadOptions):
    """Chat with a model. With -p or piped text: answer once, then exit."""

    prompt: Annotated[
        str | None,
        option("--prompt", "-p", value="TEXT", help="answer TEXT and exit; piped text is appended"),
    ] = None
    image: Annotated[
        list[Path] | None,
        option(value="FILE", help="a picture before the prompt or first message; may be repeated"),
    ] = None
    continued: Annotated[
        bool, option("--continue", "-c", value=" ", help="go on with the conversation that was held last")
    ] = False
    system: Annotated[str | None, option(value="TEXT", help="system prompt")] = None
    max_tokens: Annotated[int, option(value="N", help="longest answer, thinking included", min=1)] = 2048
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
        Path | None, _output(value="FILE", help="write one JSON line a round to FILE", callback=expanded)
    ] = None
    no_history: Annotated[
        bool, flag("--no-history", "neither keep what is typed nor conversations", OUTPUT)
    ] = False
    no_earlier_answers: NoEarlierAnswers = False

    temperature: Annotated[
        float | None, _sampling(value="T", help="0 is greedy; default: the model's own, else 0")
    ] = None
    top_p: Annotated[float | None, _sampling(value="P", help="likeliest tokens that reach P together")] = None
    top_k: Annotated[int | None, _sampling(value="N", help="the N likeliest tokens; 0 is all", min=0)] = None
    min_p: Annotated[float | None, _sampling(value="P", help="at least P times as likely as the best")] = None
    seed: Annotated[int | None, _sampling(value="N", help="same seed, same text")] = None
