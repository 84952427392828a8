"""What does choosing tokens cost on a large vocabulary: now, before, and in mlx-lm?

Logits are random, for 262,144 tokens, the size of Gemma's vocabulary. Each setting chooses the token of one
row, as in plain decoding, and judges a draft of four tokens by five rows. mlx-lm chooses a token for each
row: it has no rule for drafts that keeps a distribution. Three processes take turns call by call, in changing
order. Figures are medians of the CPU milliseconds of a process, all threads together, which other load hardly
changes.

`--before` is a revision, or a folder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import finish, parser, table
from unchanged import ROOT, Checkout, unpacked

BEFORE, AFTER, THEIRS = "before", "now", "mlx-lm"
ROWS = (1, 5)

# Name -> settings of ours, and of mlx-lm's sampler and logits processors; None where it has none.
SETTINGS: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], dict[str, Any]] | None]] = {
    "greedy": ({}, ({"temp": 0.0}, {})),
    "temperature 0.8": ({"temperature": 0.8}, ({"temp": 0.8}, {})),
    "temperature 0.8, seed": ({"temperature": 0.8, "seed": 1}, None),
    "top_k 40": ({"temperature": 0.8, "top_k": 40}, ({"temp": 0.8, "top_k": 40}, {})),
    "top_k 64, top_p 0.95": (
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        ({"temp": 1.0, "top_k": 64, "top_p": 0.95}, {}),
    ),
    "top_k 64, top_p 0.95, seed": ({"temperature": 1.0, "top_k": 64, "top_p": 0.95, "seed": 1}, None),
    "top_p 0.95": ({"temperature": 1.0, "top_p": 0.95}, ({"temp": 1.0, "top_p": 0.95}, {})),
    "min_p 0.05": ({"temperature": 0.8, "min_p": 0.05}, ({"temp": 0.8, "min_p": 0.05}, {})),
    "penalties": (
        {"repetition_penalty": 1.1, "presence_penalty": 0.5},
        ({"temp": 0.0}, {"repetition_penalty": 1.1, "presence_penalty": 0.5}),
    ),
    "logprobs 5": ({}, ({"temp": 0.0}, {})),
    "JSON": ({}, None),
}

# The program of each process. It must run with the code of any commit, so it only uses what does not change.
CHILD = """
import json, sys, time
import mlx.core as mx
import numpy as np
import mlx_spec
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.logprobs import LogprobRecorder
from mlx_spec.types import Draft

settings, V, seed = json.loads(sys.stdin.readline())
mx.random.seed(seed)
base = mx.random.normal((5, V)) * 3
history = [int(token) for token in np.random.default_rng(seed).integers(0, V, 500)]
drafted, none = mx.array([5, 6, 7, 8], dtype=mx.int32), mx.array([], dtype=mx.int32)
start = len(history) - 100

def json_sampler():
    from mlx_spec.grammar.matcher import compile_grammar
    from mlx_spec.tokenizer import Tokenizer
    from tokenizers import AddedToken, Tokenizer as FastTokenizer, decoders, models, pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [a + b + c for a in letters for b in letters[:64] for c in letters[:64]]
    fast = FastTokenizer(models.BPE({t: i for i, t in enumerate(["<end>", *letters, *words][:V])}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<end>", special=True)])
    grammar = compile_grammar("json_object", "", Tokenizer(fast, None, [0]), V, seconds=600)
    ids = {letter: letters.index(letter) + 1 for letter in '{"abc'}
    sampler = Sampling(grammar=grammar).sampler(0, V)
    return sampler, [ids['{'], ids['"']], [ids[letter] for letter in "abc"]

samplers = {}
print(json.dumps(mlx_spec.__file__), flush=True)
for count, line in enumerate(sys.stdin):
    name, rows, is_ours = json.loads(line)
    ours, theirs = settings[name]
    logits, past, draft = base[:rows] + 0, history, drafted  # an array that no cache knows
    mx.eval(logits)
    if (name, is_ours) not in samplers:
        if name == "JSON":
            samplers[name, is_ours] = json_sampler()
        elif is_ours:
            made = Sampling(**ours).sampler(start, V)
            samplers[name, is_ours] = LogprobRecorder(made, None, 5) if name == "logprobs 5" else made
        else:
            samplers[name, is_ours] = make_sampler(**theirs[0]), make_logits_processors(**theirs[1])
    chosen = samplers[name, is_ours]
    if name == "JSON":
        chosen, past, letters = chosen
        past = past + [letters[count % 3], letters[count // 3 % 3]]
        draft = mx.array([letters[(count + i) % 3] for i in range(4)], dtype=mx.int32)
    mx.eval(draft)
    tokens = mx.array(history)
    begun = time.process_time()
    if not is_ours:
        for process in chosen[1]:
            logits = process(tokens, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        found = [chosen[0](logprobs)]
        if name == "logprobs 5":
            best = mx.argpartition(logprobs, kth=-5, axis=-1)[..., -5:]
            found.append(mx.take_along_axis(logprobs, best, axis=-1))
    elif rows == 1:
        found = [chosen.draw(logits, past, none)[0]]
    else:
        found = [chosen.verify(logits, past, Draft(draft))]
    if name == "logprobs 5" and is_ours:
        found += list(chosen._rows.values())
    mx.eval(found)
    print(json.dumps(time.process_time() - begun), flush=True)
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--before", default="7c97cfd")
    options.add_argument("--vocabulary", type=int, default=262_144)
    options.add_argument("--repeats", type=int, default=15)
    settings = options.parse_args()
    if settings.quick:
        settings.vocabulary, settings.repeats = 1000, 1
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        trees = {BEFORE: unpacked(settings.before, Path(folder)), AFTER: ROOT, THEIRS: ROOT}
        found = measure(trees, settings)
    results = {
        name: {
            str(rows): {arm: round(1e3 * seconds, 3) for arm, seconds in arms.items()}
            for rows, arms in by.items()
        }
        for name, by in found.items()
    }
    report(results)
    finish("sampling", results, settings, started)


def measure(trees: dict[str, Path], settings: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    """Return the median CPU seconds of a call by setting, rows and arm."""
    opening = [SETTINGS, settings.vocabulary, settings.seed]
    checkouts = {arm: Checkout(folder, CHILD, opening) for arm, folder in trees.items()}
    found: dict[str, dict[int, dict[str, float]]] = {}
    try:
        for name, (_, theirs) in SETTINGS.items():
            names = [arm for arm in trees if arm != THEIRS or theirs is not None]
            for rows in ROWS:
                times: dict[str, list[float]] = {arm: [] for arm in names}
                for repeat in range(settings.repeats + 1):
                    for i in range(len(names)):
                        arm = names[(repeat + i) % len(names)]
                        times[arm].append(checkouts[arm].ask([name, rows, arm != THEIRS]))
                # the first call of each makes what the others use
                medians = {arm: statistics.median(each[1:]) for arm, each in times.items()}
                found.setdefault(name, {})[rows] = medians
    finally:
        for checkout in checkouts.values():
            checkout.close()
    return found


def report(results: dict[str, dict[str, dict[str, float]]]) -> None:
    head = [
        "CPU ms",
        *(f"{arm}, {rows}" for rows in ROWS for arm in (BEFORE, AFTER, THEIRS)),
        "before / now, 5",
    ]
    lines = []
    for name, by in results.items():
        cells = [by[str(rows)].get(arm, "-") for rows in ROWS for arm in (BEFORE, AFTER, THEIRS)]
        lines.append([name, *cells, f"{by['5'][BEFORE] / by['5'][AFTER]:.1f}"])
    table(head, lines)


if __name__ == "__main__":
    main()
