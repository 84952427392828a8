"""A rank of a target over several processes: `python rank_program.py TARGET DRAFTER [ahead]`.

With `ahead`, the drafter also works on rank 1, and the target is whole on rank 0. Rank 0 prints the texts of
`generate`, again and again.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

from mlx_spec import NoVision, Sampling, load
from mlx_spec.distributed import ranks as module
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.load import draft_for, follow
from mlx_spec.pair import Pair

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [11, 12, 13, 14, 11, 12, 13, 14, 11], [21, 22, 23, 24, 21, 22, 23]]
SEEDED = Sampling(temperature=0.9, seed=7)
TOKENS = 8


def generate(pair: Pair) -> list[list[int]]:
    """Return what a pair generates: greedy and alone, then seeded and in a batch."""
    alone = [token for round in pair.generate(PROMPTS[0], max_tokens=TOKENS) for token in round.tokens]
    batch: list[list[int]] = [[] for _ in PROMPTS]
    for i, round in pair.generate_batch(PROMPTS, sampling=SEEDED, max_tokens=TOKENS, max_running=3):
        batch[i] += round.tokens
    return [alone, *batch]


def main(target: str, drafter: str, *ahead: str) -> None:
    patient_s = 120.0  # until the first text is there, however busy the machine is
    silence_s, module.SILENCE_S = float(os.environ.get("SILENCE_S", patient_s)), patient_s
    ranks = module.join()
    assert ranks is not None

    def run() -> int:
        if ranks.rank and ahead:
            return draft_for(PairSpec(target, drafter), ranks)
        if ranks.rank:
            return follow(target, ranks)
        over = {"draft_ranks": ranks} if ahead else {"ranks": ranks}
        pair = load(target, drafter, num_draft_tokens=3, **over)
        if not ahead:
            with suppress(NoVision):
                raise AssertionError(f"{pair.vision} over several machines")
        while True:
            print(json.dumps(generate(pair)), flush=True)
            module.SILENCE_S = silence_s

    sys.exit(ranks.run(run))


if __name__ == "__main__":
    main(*sys.argv[1:])
