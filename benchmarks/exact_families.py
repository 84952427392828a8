"""Does a draft of any family change a bit in half precision, with the kernels of a Mac?

A random target and a random drafter of each family answer random prompts, in float16, where kernels that
differ change eight times as many numbers as in bfloat16. Of three drafts one is the drafter's own, one is the
truth, and one is the truth with a wrong token. Half of the texts are greedy, half are seeded. All tokens and
the bits of all K and V are compared with plain decoding of the same row class. "off" are the same texts
without row classes, so a text can differ. Differences are SIMULATED: `exact.py` says how.

    exact_families.py [--chips M1 M3 M5] [--texts 5] [--tokens 150]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from arms import temporary_folder
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support import fitted, metal, random_sources, tiny
from support.exact_arms import Comparison, compared
from support.lossless import Guided, emitted, lengths, rounds

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.lookup import Lookup
from mlx_spec.model.row_bits import measure_rows
from mlx_spec.model.row_class import RowClass
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import GREEDY, Sampling

CHIPS = {"M1": metal.M1, "M3": metal.M3, "M5": metal.M5}
KINDS = ("full", "sliding", "shared")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--chips", nargs="+", choices=CHIPS, default=["M3"])
    options.add_argument("--texts", type=int, default=5, help="of each family")
    options.add_argument("--tokens", type=int, default=150, help="of a text")
    settings = options.parse_args()
    if settings.quick:
        settings.texts, settings.tokens = 1, 8
    started, results = time.time(), dict[str, Any]()
    sources = families()
    for chip in settings.chips:
        with metal.metal(CHIPS[chip]):
            results[chip] = measure(sources, settings)
        print(f"\n{chip}")
        head = ["family", "target", "class", "texts", "differ", "differ, off"]
        table(head, [list(row.values()) for row in results[chip]])
    finish("exact_families", results, settings, started)


def families() -> dict[str, DrafterSource]:
    """Return a random drafter of each family, for targets of 64 features and 256 tokens."""
    sources = {name: make() for name, make in random_sources.FOR_TINY.items()}
    sources["lookup"] = DrafterSource("lookup", Lookup.needs, lambda parts: Lookup(1, 16))
    folder = temporary_folder()
    return sources | {name: fitted.opened(make(), folder / name) for name, make in fitted.MADE.items()}


def measure(sources: dict[str, DrafterSource], settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Return how many texts of each family differ, with and without row classes."""
    models = {kind: in_half_precision(kind) for kind in KINDS}
    classes = {kind: measure_rows(model, LMTarget(model), tiny.VOCAB) for kind, model in models.items()}
    found = []
    for i, (name, source) in enumerate(sources.items()):
        kind = "shared" if name == "gemma4 assistant" else KINDS[i % len(KINDS)]
        pairs = [(seed, rows) for seed in range(settings.texts) for rows in (classes[kind], RowClass())]
        equal = [answer(models[kind], source, rows, seed, settings.tokens).is_equal for seed, rows in pairs]
        rows = classes[kind]
        found.append(
            {
                "family": name,
                "target": kind,
                "class": f"{rows.base} to {rows.most} rows",
                "texts": settings.texts,
                "differ": equal[::2].count(False),
                "differ, off": equal[1::2].count(False),
            }
        )
        print(found[-1], file=sys.stderr, flush=True)
    return found


def in_half_precision(kind: str) -> nn.Module:
    """Return a random target whose dense layers take other kernels for one row, few rows and more."""
    model = tiny.model_of(kind)
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


def answer(model: nn.Module, source: DrafterSource, rows: RowClass, seed: int, count: int) -> Comparison:
    """Compare a drafted answer with the plain one."""
    prompt = tiny.prompt(20 + 3 * seed, seed=seed)
    sampling = GREEDY if seed % 2 == 0 else Sampling(temperature=0.8, seed=seed)
    alone = LMTarget(model, rows=rows)
    plain = emitted(rounds(alone, (), 0, prompt, count, sampling=sampling))
    target = LMTarget(model, source.needs, rows=rows)
    guided = Guided(source.make(target.parts))
    guided.truth = [*prompt, *plain]
    policy = FixedPolicy(rows.most - 1 if rows.limits else 4) if seed % 3 else lengths(0, 0, 4, 4, 0, 1, 1, 2)
    text = emitted(rounds(target, guided, policy, prompt, count, sampling=sampling))
    return compared(source.name, plain, text, alone, target)


if __name__ == "__main__":
    main()
