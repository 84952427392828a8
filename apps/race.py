"""`mlx-spec race` and `/race`: answer one question twice at the same time, with drafts and plain.

Both answers take turns of a few tokens, so that other load on the machine affects them alike. One turn of
each makes a pair. The multiple is the median of the speed ratios of the pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mlx_spec.cli.command import ERROR, BadOptions, LoadOptions, option, program, show
from mlx_spec.device import require_backend
from mlx_spec.errors import InvalidValue

from .bench import BURST, QUESTIONS, Run, arm

if TYPE_CHECKING:
    from mlx_spec.decode.running import RunningSequence
    from mlx_spec.pair import Pair
    from mlx_spec.sampling.sampling import Sampling
    from mlx_spec.tokenizer import Tokenizer

NAMES = ("with drafts", "plain")


@dataclass(frozen=True)
class Options(LoadOptions):
    """Answer one question twice at once, with drafts and plain: how much faster, and is the text the same?"""

    prompt: Annotated[str, option("--prompt", "-p", value="TEXT", help="the question")] = QUESTIONS[0]
    tokens: Annotated[int, option(value="N", help="longest answer in tokens", min=16)] = 256
    temperature: Annotated[float, option(value="T", help="0 is greedy", min=0)] = 0.0
    seed: Annotated[int, option(value="N", help="of both answers, at a temperature above 0")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_draft_tokens == 0:
            raise BadOptions("--num-draft-tokens 0 drafts nothing to race with: give at least 1")


@dataclass(frozen=True)
class Race:
    """Two answers to one prompt, complete or not."""

    runs: tuple[Run, Run]  # with drafts, and plain
    ratios: Sequence[float]  # of the two speeds in each pair of turns
    # Tokens and seconds of each answer's first turn, which compiles kernels and does not count.
    first: Sequence[tuple[int, float]] = ((0, 0.0), (0, 0.0))
    plain_cost: float = 1.0  # time of a pass of the plain answer, in passes of one row

    def pace(self, i: int) -> float | None:
        """Return the tokens a second of answer `i`, without its first turn; None before any."""
        run, (tokens, seconds) = self.runs[i], self.first[i]
        if len(run.tokens) == tokens:
            tokens, seconds = 0, 0.0
        return (len(run.tokens) - tokens) / (run.seconds - seconds) if run.seconds > seconds else None

    @property
    def multiple(self) -> tuple[float, float, float] | None:
        """Return the median gain with its interval, as (low, median, high); None before six ratios.

        A gain is a multiple of plain decoding with one row a pass. The plain answer may have two, so that
        both write one text.
        """
        from mlx_spec.policy.ratios import median_interval

        if len(self.ratios) < 6:  # fewer have no interval
            return None
        gains = [ratio / self.plain_cost for ratio in self.ratios]
        low, high = median_interval(gains)
        return low, statistics.median(gains), high

    @property
    def doubt(self) -> str | None:
        """Return why the text with drafts may differ from the plain one; None if it cannot."""
        return next((round.doubt for run in self.runs for round in run.done if round.doubt), None)

    @property
    def difference(self) -> int | None:
        """Return the index of the first token that differs; None if all are the same so far."""
        drafted, plain = (run.tokens for run in self.runs)
        same = min(len(drafted), len(plain))
        if drafted[:same] != plain[:same]:
            return next(i for i in range(same) if drafted[i] != plain[i])
        both_ended = all(run.is_complete for run in self.runs)
        return same if both_ended and len(drafted) != len(plain) else None


def race(
    pair: Pair,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
    step: int | None = None,
) -> Iterator[Race]:
    """Yield the race after each chunk of the prompt and after each turn.

    A chunk has `step` tokens; None for as many as a pass may have. Tokens in `stop` also end an answer.
    Raises InvalidValue without drafts, or at a temperature without a seed.
    """
    from mlx_spec.decode.loop import decode
    from mlx_spec.decode.running import PREFILL_STEP
    from mlx_spec.sampling.sampling import Sampling

    if not pair.drafts:
        raise InvalidValue(
            f"nothing drafts with {pair.info.target}, so there is no race: type /draft auto, "
            "or start without --drafter none and --num-draft-tokens 0"
        )
    sampling = sampling or Sampling()
    if sampling.temperature > 0 and sampling.seed is None:
        raise InvalidValue("draws without a seed differ: set one with /set seed N, or temperature 0")
    sequences = [
        pair.prepare(arm(pair, length), prompt, sampling=sampling, max_tokens=count, stop=stop)
        for length in (None, 0)
    ]
    runs = Run(decode(sequences[0])), Run(decode(sequences[1]))
    return _race(sequences, runs, step or PREFILL_STEP, pair.rows.cost)


def _race(
    sequences: Sequence[RunningSequence], runs: tuple[Run, Run], step: int, plain_cost: float
) -> Iterator[Race]:
    ratios, first = list[float](), [(0, 0.0), (0, 0.0)]
    for sequence in sequences:
        for _ in sequence.prefill(lambda: step):
            yield Race(runs, ratios, plain_cost=plain_cost)
    turn = 0
    while not all(run.is_complete for run in runs):
        speeds: list[float | None] = [None, None]
        for i in (0, 1) if turn % 2 else (1, 0):
            speeds[i] = _turn(runs[i])
            if not turn:
                first[i] = len(runs[i].tokens), runs[i].seconds
            yield Race(runs, ratios, first, plain_cost)
        drafted, plain = speeds
        if turn and drafted and plain:
            ratios.append(drafted / plain)
        turn += 1
    yield Race(runs, ratios, first, plain_cost)


def _turn(run: Run) -> float | None:
    """Decode BURST more tokens. Return tokens a second; None if the answer ended before."""
    if run.is_complete:
        return None
    tokens, seconds = len(run.tokens), run.seconds
    run.decode(BURST)
    count = len(run.tokens) - tokens
    return count / max(run.seconds - seconds, 1e-9) if count >= BURST else None


def verdict(race: Race, tokenizer: Tokenizer) -> list[str]:
    """Return lines with the result of a race: both speeds, the multiple, and whether tokens are equal."""
    lines = [
        f"{name:<12}{race.pace(i) or 0:.1f} tokens/s, {len(race.runs[i].tokens)} tokens"
        for i, name in enumerate(NAMES)
    ]
    lines.append(_multiple_words(race))
    if race.plain_cost > 1:
        lines.append(
            f"the plain answer runs two rows a pass, so that both write one text; with one row it would be "
            f"{race.plain_cost:.2f} × as fast, and the multiple counts that"
        )
    if (position := race.difference) is None:
        so_far = "" if all(run.is_complete for run in race.runs) else " so far"
        exact = "" if race.doubt is None else f" (likely, not certain: {race.doubt})"
        return [*lines, f"every token the same{so_far}{exact} ✓"]
    words = [repr(tokenizer.decode(run.tokens[position : position + 4])) for run in race.runs]
    why = "`mlx-spec doctor` tells a rounding from a bug"
    return [
        *lines,
        f"the first difference is token {position + 1}: {words[0]} with drafts, {words[1]} plain; "
        + (why if race.doubt is None else f"{race.doubt}; {why}"),
    ]


def _multiple_words(race: Race) -> str:
    if race.multiple is None:
        return "the answer is too short to compare: ask for one of 60 tokens or more"
    (low, middle, high), count = race.multiple, len(race.ratios)
    what = "plain speed, too close to call" if low <= 1 <= high else "faster" if middle > 1 else "plain speed"
    return f"{middle:.2f} × {what} (likely {low:.2f} to {high:.2f}; median of {count} pairs of turns)"


def show_race(
    pair: Pair, prompt: Sequence[int], count: int, sampling: Sampling | None, is_stopped: Callable[[], bool]
) -> list[str]:
    """Show a race on a terminal while it runs, in two rows on stderr. Return the lines about its result."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False, markup=False)
    last = None
    rows = Live(console=console, transient=True, auto_refresh=False)
    with rows if console.is_terminal else nullcontext() as live:
        for last in race(pair, prompt, count, sampling):
            if live is not None:
                live.update(_rows(last, pair.tokenizer, console.width), refresh=True)
            if is_stopped():
                break
    return [] if last is None else verdict(last, pair.tokenizer)


def _rows(race: Race, tokenizer: Tokenizer, width: int) -> str:
    paces = [race.pace(i) or 0.0 for i in range(len(NAMES))]
    most, rows = max(*paces, 1e-9), list[str]()
    for name, pace, run in zip(NAMES, paces, race.runs, strict=True):
        bar = "█" * round(12 * pace / most)
        head = f"{name:<12}{bar:<12} {pace:7.1f} tokens/s {len(run.tokens):5} tokens  "
        tail = " ".join(tokenizer.decode(run.tokens[-32:]).split())
        space = max(width - len(head) - 1, 0)
        rows.append(head + tail[max(len(tail) - space, 0) :])
    return "\n".join(row[: max(width - 1, 0)] for row in rows)


def question(tokenizer: Tokenizer, words: str, system: str | None = None) -> list[int]:
    """Return the prompt of a question: as a chat, or plain text if the target has no chat template."""
    if not tokenizer.chats:
        return tokenizer.prompt_tokens(words)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.prompt([*messages, {"role": "user", "content": words}])


def _run(options: Options) -> int:
    require_backend()
    from mlx_spec import load
    from mlx_spec.sampling.sampling import Sampling

    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    pair = load(**vars(options.spec))
    lines = show_race(pair, question(pair.tokenizer, options.prompt), options.tokens, sampling, lambda: False)
    show(*lines)
    return 0 if lines[-1].endswith("✓") else ERROR


main = program("race", Options, _run)
