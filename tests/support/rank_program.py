"""A rank of a target over several processes: `python rank_program.py TARGET DRAFTER`. Rank 0 prints texts.

`texts` is what a single process generates, too.
"""

from __future__ import annotations

import json
import sys

from mlx_spec import Sampling, load
from mlx_spec.load import follow
from mlx_spec.model.ranks import join
from mlx_spec.pair import Pair

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 13], [21, 22, 23]]
TOKENS = 16
SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(temperature=0.9, seed=7)}


def texts(pair: Pair) -> dict[str, list[list[int]]]:
    """Return what a pair generates alone, in a batch, and after going back to a shared prefix."""
    found = {}
    for name, sampling in SAMPLINGS.items():
        rounds = pair.generate(PROMPTS[0], sampling=sampling, max_tokens=TOKENS)
        found[name] = [[token for round in rounds for token in round.tokens]]
        batch: list[list[int]] = [[] for _ in PROMPTS]
        for index, round in pair.generate_batch(PROMPTS, sampling=sampling, max_tokens=TOKENS, max_running=3):
            batch[index] += round.tokens
        found[f"{name} batch"] = batch
    return found


def main(target: str, drafter: str) -> None:
    ranks = join()
    assert ranks is not None
    if ranks.rank:
        follow(target, ranks)

    def run() -> int:
        print(json.dumps(texts(load(target, drafter, num_draft_tokens=3, ranks=ranks))), flush=True)
        return 0

    sys.exit(ranks.lead(run))


if __name__ == "__main__":
    main(*sys.argv[1:])
