"""`mlx-spec bench`: measure the speed of a pair on this device, with speculation and without.

Ways to decode ("arms") take turns of a few tokens, so that slow changes of the machine affect them alike.
An answer is timed from the end of its prompt, not from its first token. A decoder with a queue computes the
second token before it returns the first, and that pass would not be counted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from mlx_spec.cli.command import Json, LoadOptions, flag, option, program, show, table
from mlx_spec.cli.progress import StageProgress
from mlx_spec.device import device_name, require_backend

if TYPE_CHECKING:
    from mlx_spec.decode.sequence import CachedSequence
    from mlx_spec.pair import Pair
    from mlx_spec.tokenizer import Tokenizer
    from mlx_spec.types import Round

BURST = 8  # tokens of a turn
QUESTIONS = (
    "What does os.path.join do?",
    "How do I use functools.lru_cache?",
    "Explain in three sentences why the sky is blue.",
    "What is the json module for?",
)


@dataclass(frozen=True)
class Options(LoadOptions):
    """Measure how fast a pair decodes: plain, with 2 and 4 draft tokens, and as the pair itself decides.

    With --num-draft-tokens: plain, and with that number. All of them answer the same questions and take turns
    of a few tokens, so that other load on the machine affects them alike.

    With --agent: replay a session of a coding agent, 20 turns with tools and helpers, as the server reads it,
    and show for each turn what was reused and what was read again. --tokens is then the length of an answer.
    """

    tokens: Annotated[int, option(value="N", help="longest answer in tokens", min=16)] = 128
    repeats: Annotated[
        int, option(value="N", help="how often all questions are asked, after one round that warms up", min=1)
    ] = 3
    agent: Annotated[bool, flag("--agent", "replay a session of a coding agent instead")] = False
    json: Json = False


@dataclass(frozen=True)
class Question:
    """A prompt, and its name for people."""

    name: str
    tokens: Sequence[int]  # or a Prompt


@dataclass
class Run:
    """One answer of an arm, decoded a few tokens at a time."""

    rounds: Iterator[Round]  # the rounds to come
    done: list[Round] = field(default_factory=list)
    seconds: float = 0.0  # from the end of the prompt

    @property
    def tokens(self) -> list[int]:
        return [token for round in self.done for token in round.tokens]

    @property
    def is_complete(self) -> bool:
        return bool(self.done) and self.done[-1].finish_reason is not None

    def decode(self, burst: int) -> None:
        """Decode at least `burst` more tokens, and wait for the token that is queued after them.

        Work that was queued before this call is not counted.
        """
        import mlx.core as mx

        mx.synchronize()
        started = time.perf_counter()
        while burst > 0 and not self.is_complete:
            self.done.append(next(self.rounds))
            burst -= len(self.done[-1].tokens)
        if not self.is_complete:
            mx.synchronize()
        self.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class Speed:
    """The speed of one arm over all answers."""

    name: str
    tokens_per_second: float  # over all answers
    gain: float  # tokens_per_second divided by plain decoding's with one row a pass, in the same turns
    spread: tuple[float, float]  # quartiles of the gain over answers
    accepted: float | None  # share of the draft tokens; None if nothing was drafted
    length: float | None  # tokens emitted by a round that drafted
    other_text: int  # number of answers whose tokens differ from plain decoding


def chat_questions(tokenizer: Tokenizer) -> list[Question]:
    """Return built-in questions as chat prompts, or texts to continue if there is no chat template."""
    from mlx_spec.cli.texts import TEXTS

    if not tokenizer.chats:
        return [Question(f"text {i + 1}", tuple(tokenizer.prompt_tokens(t))) for i, t in enumerate(TEXTS)]
    return [Question(q, tuple(tokenizer.prompt([{"role": "user", "content": q}]))) for q in QUESTIONS]


def arm(pair: Pair, num_draft_tokens: int | None) -> CachedSequence:
    """Return a new sequence with a fixed draft length, or with the pair's policy for None."""
    from mlx_spec.policy import FixedPolicy

    sequence, names = pair.open(), pair.fixed_names
    if num_draft_tokens is not None:
        sequence.drafters = sequence.drafters[: len(names)] if num_draft_tokens else ()
        sequence.policy = FixedPolicy(num_draft_tokens, names=names)
    return sequence


def in_turns(
    pair: Pair, arms: Collection[CachedSequence], prompt: Sequence[int], count: int, start: int
) -> list[Run]:
    """Return an answer of each arm, with at most `count` tokens. Arm start + i goes first in turn i."""
    from mlx_spec.decode.loop import decode

    runs = []
    for sequence in arms:
        sequence.target.rewind(0)
        running = pair.prepare(sequence, prompt, max_tokens=count)
        for _ in running.prefill():
            pass
        runs.append(Run(decode(running)))
    while not all(run.is_complete for run in runs):
        for i in range(len(runs)):
            run = runs[(start + i) % len(runs)]
            if not run.is_complete:
                run.decode(BURST)
        start += 1
    return runs


def speeds(names: Iterable[str], answers: Sequence[Sequence[Run]], plain_cost: float = 1.0) -> list[Speed]:
    """Return the speed of each arm. The first is plain decoding; `answers` has the runs of each prompt.

    `plain_cost` is the time of a pass of plain decoding, in passes of one row: gains are multiples of those.
    """
    long = [runs for runs in answers if all(len(run.tokens) > 1 for run in runs)]
    return [_speed(name, [(runs[0], runs[i]) for runs in long], plain_cost) for i, name in enumerate(names)]


def _speed(name: str, runs: Sequence[tuple[Run, Run]], plain_cost: float) -> Speed:
    """Return the speed of an arm. Each pair in `runs` is a plain run and the arm's run of the same prompt."""
    import numpy as np

    paces = [(len(run.tokens) / run.seconds, len(plain.tokens) / plain.seconds) for plain, run in runs]
    ratios = [drafted / (plain * plain_cost) for drafted, plain in paces]
    speeds = [
        sum(len(r.tokens) for r in arm) / sum(r.seconds for r in arm) for arm in zip(*runs, strict=True)
    ]
    speculative = [round for _, run in runs for round in run.done if round.drafted]
    drafted = sum(round.drafted for round in speculative)
    emitted = sum(len(round.tokens) for round in speculative)
    low, high = np.quantile(ratios, (0.25, 0.75)) if ratios else (0.0, 0.0)
    return Speed(
        name,
        speeds[1] if speeds else 0.0,
        speeds[1] / (speeds[0] * plain_cost) if speeds else 0.0,
        (float(low), float(high)),
        sum(round.accepted for round in speculative) / drafted if drafted else None,
        emitted / len(speculative) if speculative else None,
        sum(run.tokens != plain.tokens for plain, run in runs),
    )


def measured(
    pair: Pair, tokens: int, repeats: int, length: int | None = None, most: int | None = None
) -> tuple[list[Speed], int]:
    """Measure all arms. Return their speeds, plain decoding first, and the number of answers of each.

    `length` is the fixed draft length of the pair; None if its policy is adaptive. At most
    `most` questions are asked; None for all.
    """
    lengths: dict[str, int | None] = {"plain": 0}
    if pair.drafter_names and length is not None:
        lengths |= {f"K = {length}": None}
    elif pair.drafter_names:
        # Fixed lengths, to compare the adaptive policy with.
        lengths |= {**{f"K = {k}": k for k in (2, 4)}, "adaptive": None}
    arms = [arm(pair, length) for length in lengths.values()]  # they keep their policies between prompts
    questions = chat_questions(pair.tokenizer)[:most]
    answers: list[list[Run]] = []
    progress = StageProgress(sys.stderr) if sys.stderr.isatty() else None
    total = (repeats + 1) * len(questions)
    for index in range(total):  # the first round of all questions warms up
        repeat, i = divmod(index, len(questions))
        if progress is not None:
            progress.show("measuring", index, total, "" if repeat else "(warms up)")
        runs = in_turns(pair, arms, questions[i].tokens, tokens, index)
        answers += [runs] if repeat else []
    if progress is not None:
        progress.end()
    return speeds(lengths, answers, pair.rows.cost), len(answers)


def _run(options: Options) -> int:
    require_backend()
    from mlx_spec import load

    if options.agent:
        return _run_agent(options)
    pair = load(**vars(options.spec))
    speeds, answers = measured(pair, options.tokens, options.repeats, options.num_draft_tokens)
    if not options.json:
        show(*_report(pair, speeds, answers))
        return 0
    figures = {
        "device": device_name(),
        "target": pair.info.target,
        "drafter": pair.info.drafter,
        "answers": answers,
        "decoders": [dataclasses.asdict(speed) for speed in speeds],
    }
    show(json.dumps(figures))
    return 0


def _run_agent(options: Options) -> int:
    from .server import replay

    turns, progress = [], StageProgress(sys.stderr) if sys.stderr.isatty() else None
    for turn in replay.replay(options.spec, options.tokens):
        turns.append(turn)
        if progress is not None:
            progress.show("replaying", len(turns), replay.TURNS, turn.agent)
    if progress is not None:
        progress.end()
    if options.json:
        figures = [dataclasses.asdict(turn) for turn in turns]
        show(json.dumps({"device": device_name(), "target": options.spec.target, "turns": figures}))
    else:
        show(f"{options.spec.target} on {device_name()}: an agent's session", "", *replay.report(turns))
    return 0


def speed_table(speeds: Sequence[Speed]) -> list[str]:
    """Return the lines of a table of speeds, and of the explanation of its columns."""
    head = ("decoder", "tokens/s", "× plain", "middle half", "accepted", "tokens a round")
    return [
        *table([head, *map(_row, speeds)], right=(1, 2)),
        "",
        "× plain: tokens/s divided by the tokens/s of plain decoding in the same turns",
        "middle half: half of the answers had a ratio between these two",
        "accepted: of the draft tokens; tokens a round: of the rounds that drafted",
    ]


def _report(pair: Pair, speeds: Sequence[Speed], answers: int) -> list[str]:
    who = dict.fromkeys(name if name == "lookup" else "its drafter" for name in pair.drafter_names)
    names = f"{pair.info.target} with {' and '.join(who) or 'no drafter'}"
    lines = [f"{names} on {device_name()}, answers of each: {answers}", "", *speed_table(speeds)]
    if not pair.drafter_names:
        lines += ["", "this target has no drafter here: name one with --drafter, or use lookup"]
    if other := [f"{speed.name}: {speed.other_text}" for speed in speeds if speed.other_text]:
        way = "`mlx-spec doctor` tells a rounding from a bug"
        lines += ["", f"answers with other tokens than plain decoding ({', '.join(other)}): {way}"]
    return lines


def _row(speed: Speed) -> tuple[str, ...]:
    low, high = speed.spread
    return (
        speed.name,
        f"{speed.tokens_per_second:.1f}",
        f"{speed.gain:.2f}",
        f"{low:.2f} to {high:.2f}",
        "" if speed.accepted is None else f"{speed.accepted:.0%}",
        "" if speed.length is None else f"{speed.length:.2f}",
    )


main = program("bench", Options, _run)
