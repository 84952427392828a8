"""Several targets of one model that decode in one pass: each has its own text, draft and rollback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.model.caches import Caches
from mlx_spec.model.hooks import decoder_of, start_layers_early
from mlx_spec.model.target import LMTarget, captures_of, features_of
from mlx_spec.types import Features, FeatureSpec, KVRows

PROBE_LENGTHS = (3, 6)  # prompt tokens of two sequences: unequal, so that rows need positions of their own
PROBE_ROWS = 4  # of the probe's pass: neither 1 nor the number of sequences, so that no wrong shape fits
MAX_PROBE_ERROR = 0.05  # of the largest logit: above the rounding of 16 bits, below that of a wrong position


class SharedTarget:
    """Targets of one model whose rows are written and verified in one pass.

    A target joins with what it has committed, and is not used by itself until it leaves.
    """

    def __init__(self, model: nn.Module, needs: FeatureSpec) -> None:
        self._model = model
        self._needs = needs
        self._captures = captures_of(model, needs)
        self._eager = start_layers_early(decoder_of(model)["layers"])
        self._caches = Caches()
        self._homes: list[LMTarget] = []
        self._captured: list[mx.array] = []  # by capture, [B, T, D]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the caches."""
        return sum(array.nbytes for array in self._caches.arrays())

    @property
    def takes_drafts(self) -> bool:
        """Return False if the targets are recurrent: a state takes back no single tokens."""
        return not any(home.is_recurrent for home in self._homes)

    def join(self, home: LMTarget) -> None:
        """Move a target with at least one committed token into the shared caches."""
        self._caches.join(home.lend(partial(self._shared_kv, home)))
        self._homes.append(home)

    def leave(self, index: int, *, keep: bool) -> None:
        """Remove a target; the last one takes its index. With `keep` it can go on by itself."""
        home, last = self._homes[index], self._homes.pop()
        if home is not last:
            self._homes[index] = last
        self._caches.leave(index, home.reclaim() if keep else None)

    def verify(self, blocks: Sequence[mx.array]) -> list[mx.array]:
        """Write a block of uncommitted tokens [T_i] for each target. Return logits [T_i, V] of each."""
        T = max(block.size for block in blocks)
        if self._caches.uncommitted:  # the last pass was interrupted
            self._caches.commit([0] * len(blocks))
        self._caches.begin(T)
        tokens = mx.stack([mx.pad(block.astype(mx.int32), (0, T - block.size)) for block in blocks])
        with self._eager.on():
            logits: mx.array = self._model(tokens, cache=self._caches.layers)
        self._captured = [each.outputs.pop() for each in self._captures]
        return [logits[i, : block.size] for i, block in enumerate(blocks)]

    def commit(self, keep: Sequence[int]) -> list[Features]:
        """Keep the first uncommitted rows of each target. Return the features of those kept."""
        self._caches.commit(keep)
        captured, self._captured = self._captured, []
        for home, rows in zip(self._homes, keep, strict=True):
            home.record(rows)
        return [
            features_of(self._needs, [hidden[i, :rows] for hidden in captured], home.shared_kv)
            for i, (home, rows) in enumerate(zip(self._homes, keep, strict=True))
        ]

    def _shared_kv(self, home: LMTarget) -> Mapping[str, KVRows]:
        lane = next(i for i, other in enumerate(self._homes) if other is home)
        return {cache.attention_type: cache.rows(lane, home.size) for cache in self._caches.unquantized}


def batch_obstacle(model: nn.Module) -> str | None:
    """Return why sequences of this model cannot share a pass exactly; None if they can.

    Two unequal sequences decode together and alone. A model that calculates with positions by itself raises,
    or its logits differ.
    """
    prompts = [[7 * i % 11 for i in range(length)] for length in PROBE_LENGTHS]
    targets = [LMTarget(model) for _ in prompts]
    for target, prompt in zip(targets, prompts, strict=True):
        target.prefill(prompt)
    count = 1 if targets[0].is_recurrent else PROBE_ROWS
    blocks = [mx.arange(count, dtype=mx.int32) + i for i in range(len(prompts))]
    alone = [target.verify(block) for target, block in zip(targets, blocks, strict=True)]
    for target in targets:
        target.commit(0)
    shared = SharedTarget(model, FeatureSpec())
    try:
        for target in targets:
            shared.join(target)
        together = shared.verify(blocks)
    except (TypeError, ValueError) as error:
        return f"its model calculates with positions ({error})"
    errors = [mx.abs(a - b).max() / mx.abs(b).max() for a, b in zip(together, alone, strict=True)]
    if (mx.stack(errors) > MAX_PROBE_ERROR).any().item():
        return "its logits for two sequences together are not those of each alone"
    return None
