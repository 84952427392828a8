"""Does a first answer show its gain, and is what it shows true? Measured against interleaved plain decoding.

Each question is the first answer of a pair that was loaded anew; costs are measured anew after every ten.
Beside it the same answer is decoded plain, in turns of 8 tokens. The true cost of a round is the median over
all answers of its seconds, divided by the plain ones beside it, of rounds with as many rows. An answer's true
gain follows from its rounds. "busy": two other processes compute all the time. Its answers are judged by the
true costs of the quiet machine: rounds are counted, and only their costs are moved by load. `--costs` keeps
these costs in a file, so that both machines can be measured at different times.

  exact, bound  answers that show a gain, or its bound
  none          answers with drafts that show neither
  judged        answers whose rounds were all timed five times or more on the quiet machine
  off           exact gains that are off by more than 15 %
  above         bounds that are above the true gain by more than 2 %, and the greatest share
  disagree      answers with accepted drafts whose reason says "off"
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from arms import temporary_folder
from timing import finish, parser, table

import mlx_spec
from mlx_spec.apps.bench import arm, in_turns
from mlx_spec.apps.race import question
from mlx_spec.decode.statistics import Statistics
from mlx_spec.types import Round

Costs = dict[str, float]  # in plain tokens, by kind of round
Answer = tuple[list[Round], list[Round]]  # with drafts, and plain

QUESTIONS = """
What does os.path.join do?|What does zip do?|Show me how to read a JSON file|What is the signature of re.sub?
How do I count words in a string?|What does functools.lru_cache do?|What does itertools.groupby do?|hello
How do I sort a list of dicts?|Where is OrderedDict?|List ten animals|Write a short poem about rain
Explain gravity to a child|What is the capital of France?|Write a loop over ten numbers|Count to twenty
What does enumerate do?|What does subprocess.run do?|Name five rivers|What is a list comprehension?
"""


def main() -> None:
    settings = parser(__doc__)
    settings.add_argument("--models", nargs="+", default=["demo"])
    settings.add_argument("--answers", type=int, default=40)
    settings.add_argument("--tokens", type=int, default=48)
    settings.add_argument("--machines", nargs="+", choices=("quiet", "busy"), default=["quiet", "busy"])
    settings.add_argument("--costs", type=Path, help="file of true costs: quiet writes, busy reads")
    options = settings.parse_args()
    options.answers = 4 if options.quick else options.answers
    asked = [each for line in QUESTIONS.strip().split("\n") for each in line.split("|")]
    os.environ["XDG_CACHE_HOME"] = str(temporary_folder())  # the costs of the user stay
    started, rows, results = time.time(), list[list[str]](), list[dict[str, Any]]()
    for model in options.models:
        true = _read(options.costs, model)
        for machine in options.machines:
            is_busy = machine == "busy"
            others = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(2 * is_busy)]
            for other in others:
                other.start()
            questions = [asked[i % len(asked)] for i in range(options.answers)]
            answers = [_answer(model, each, i, options.tokens) for i, each in enumerate(questions)]
            for other in others:
                other.kill()
            true = true if is_busy and true else _true_costs(answers)
            if options.costs and not is_busy:
                _write(options.costs, model, true)
            found = _checked(answers, true)
            results.append({"model": model, "busy": is_busy, **found})
            above = f"{found['above']} ({found['worst']:.2f})"
            counts = [str(found[key]) for key in ("drafted", "exact", "bound", "none", "judged", "off")]
            rows.append([model, machine, *counts, above, str(found["disagree"])])
    table(
        ["model", "machine", "drafted", "exact", "bound", "none", "judged", "off", "above", "disagree"], rows
    )
    finish("gains", results, options, started)


def _answer(model: str, words: str, index: int, tokens: int) -> Answer:
    """Return the rounds of the first answer of a new pair, with drafts and plain, decoded in turns."""
    pair = mlx_spec.load(model)
    if index and index % 10 == 0 and pair.policies.folder is not None:
        shutil.rmtree(pair.policies.folder, ignore_errors=True)
        pair = mlx_spec.load(model)
    drafted, plain = in_turns(
        pair, [arm(pair, None), arm(pair, 0)], question(pair.tokenizer, words), tokens, index
    )
    return drafted.done, plain.done  # the rounds alone: a run keeps its pair in memory


def _true_costs(answers: list[Answer], least: int = 5) -> Costs:
    """Return the true costs of the rounds of which `least` were timed, in plain tokens."""
    costs = defaultdict[str, list[float]](list)
    for drafted, plain in answers:
        token = median(round.seconds for round in plain[1:] or plain)
        for round in drafted[1:]:
            costs[_kind(round)].append(round.seconds / token)
    true = {kind: max(median(ratios), 1.0) for kind, ratios in costs.items() if len(ratios) >= least}
    return true | {_kind(answers[0][1][0]): 1.0}


def _checked(answers: list[Answer], true: Costs) -> dict[str, Any]:
    """Compare what the answers show with the true costs of their rounds."""
    names = ("drafted", "exact", "bound", "none", "judged", "off", "above", "disagree")
    counts, worst = dict.fromkeys(names, 0), 0.0
    for drafted, _ in answers:
        shown = Statistics()
        for round in drafted:
            shown = shown.plus(round, 0.0)
        if not shown.drafted:
            continue
        counts["drafted"] += 1
        counts["exact"] += shown.known_gain is not None
        counts["bound"] += shown.known_gain is None and shown.gain_words is not None
        counts["none"] += shown.gain_words is None
        counts["disagree"] += bool(shown.accepted) and not shown.reason.is_on
        if any(_kind(round) not in true for round in drafted):
            continue
        gain = shown.generated_tokens / sum(true[_kind(round)] for round in drafted)
        counts["judged"] += 1
        counts["off"] += shown.known_gain is not None and not 1 / 1.15 < shown.known_gain / gain < 1.15
        if shown.known_gain is None and shown.gain_at_least is not None:
            counts["above"] += shown.gain_at_least > 1.02 * gain
            worst = max(worst, shown.gain_at_least / gain)
    return {**counts, "worst": worst}


def _kind(round: Round) -> str:
    """Return what decides the cost of a round: its rows, and whether a model drafted."""
    is_copied = not round.drafted or round.source in ("lookup", "earlier", "prediction")
    return f"{round.drafted} {'copied' if is_copied else 'drafted'}"


def _read(file: Path | None, model: str) -> Costs:
    return dict(json.loads(file.read_text()).get(model, {})) if file and file.exists() else {}


def _write(file: Path, model: str, true: Costs) -> None:
    others = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(others | {model: true}, indent=2))


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
