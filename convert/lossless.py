"""The pair as `load` gives it: speculative greedy decoding is plain greedy decoding."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert.measure import load_lazily
from mlx_spec.convert.progress import Progress
from mlx_spec.convert.subject import SelfTestFailed, Subject
from mlx_spec.convert.walk import K
from mlx_spec.load import load

# Two steps of a logit of the type, as a share of it. A block of rows and a single row may be summed in
# another order, and on a tie within the last bits both tokens are the most likely one.
STEPS = {mx.bfloat16: 2.0**-6, mx.float16: 2.0**-9, mx.float32: 1e-4}


def check_lossless(
    subject: Subject, prompts: Sequence[list[int]], plain: Sequence[list[int]], progress: Progress
) -> dict[str, Any]:
    """Compare the pair with the target's `plain` continuations of `prompts`. Raises SelfTestFailed."""
    progress.stage("comparing speculative with plain decoding")
    pair = load(subject.target_folder, subject.drafter_folder, num_draft_tokens=K)
    drafted = [
        [token for round in pair.generate(prompt, max_tokens=len(expected)) for token in round.tokens]
        for prompt, expected in zip(prompts, plain, strict=True)
    ]
    del pair
    gc.collect()
    ties = 0
    for prompt, expected, found in zip(prompts, plain, drafted, strict=True):
        if found == expected:
            continue
        at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        if not _tied(subject, [*prompt, *expected[:at]], (found[at], expected[at])):
            raise SelfTestFailed(
                f"the pair says token {found[at]} where the target alone says {expected[at]}, so speculation "
                "is not lossless here: nothing was written; please report this"
            )
        ties += 1
    return {"prompts": len(prompts), "tokens": sum(map(len, plain)), "ended_in_a_tie": ties}


def _tied(subject: Subject, history: list[int], tokens: tuple[int, int]) -> bool:
    """Whether two tokens are equally likely after `history`, as far as the type of the logits can tell."""
    logits = load_lazily(subject.target_folder, None)(mx.array([history]))[0, -1]
    a, b = (float(value) for value in np.array(logits[mx.array(tokens)].astype(mx.float32)))
    return abs(a - b) <= STEPS[logits.dtype] * max(abs(a), abs(b))
