"""Random drafters of every one-pass family for the models of tiny.py, through the converter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.convert.converted import convert_drafter
from mlx_spec.convert.plan import Conversion, family_or_model, open_source
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.types import Drafter, Features
from support import synthetic, tiny
from support.checkpoints import read
from support.synthetic import Checkpoint, D, target_config

HEADS, GROUPS, HEAD, LAYER = synthetic.HEADS, synthetic.GROUPS, synthetic.HEAD, synthetic.LAYER
dflash, medusa, peagle = synthetic.dflash, synthetic.medusa, synthetic.peagle


class Recorder:
    """Greedy; keeps the logits it drew from."""

    def __init__(self) -> None:
        self.logits: list[mx.array] = []

    @property
    def drafting(self) -> Recorder:
        return self

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        assert drafted.size == len(self.logits)
        self.logits.append(logits)
        return logits.argmax(axis=-1).astype(mx.int32), None


def logits_of(drafter: Drafter, history: list[int], limit: int) -> mx.array:
    """Logits [K, V] that a greedy draft was drawn from."""
    recorder = Recorder()
    draft = drafter.draft(history, limit, recorder)
    assert draft.tokens.size == limit and draft.probs is None
    return mx.concatenate(recorder.logits)


def largest(a: mx.array | np.ndarray, b: mx.array | np.ndarray) -> float:
    """Return the largest difference."""
    return float(np.abs(np.array(a, dtype=np.float64) - np.array(b, dtype=np.float64)).max())


def opened(made: Checkpoint, folder: Path, edit: Callable[[dict[str, Any]], object] = id) -> DrafterSource:
    """Converted, written, and loaded; `edit` changes the written config.json."""
    source = open_source(str(made.write(folder / "published")))
    prepared = convert_drafter(Conversion(source, family_or_model(source)), made.target)
    edit(prepared.config)
    ours = Checkpoint(prepared.tensors, prepared.config, {}).write(folder / "converted")
    return open_drafter(read_checkpoint(ours), read(ours), made.target)


def pard(model: nn.Module, layers: int, noise: float = 0.0) -> Checkpoint:
    """The weights of a language model, disturbed. A row behind known tokens is often right then."""
    mx.random.seed(14)
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
    tensors = {name: w + noise * mx.random.normal(w.shape) for name, w in parameters}
    config = {key: value for key, value in vars(model.args).items() if value is not None}
    vocab = config["vocab_size"]
    return Checkpoint(tensors, {**config, "pard_token": vocab - 1}, target_config(layers, vocab=vocab))


# For the targets of `tiny` that have three layers.
MADE: dict[str, Callable[..., Checkpoint]] = {
    "medusa": partial(medusa, 3),
    "pard": lambda: pard(tiny.full(seed=1, max_position_embeddings=512), 3),
    "dflash": partial(dflash, 3, (0, 1, 2)),
    "dflash2": partial(synthetic.dflash2, 3, (0, 1, 2)),
    "dspark": partial(synthetic.dspark, 3, (0, 1, 2)),
    "gemma4_dspark": partial(synthetic.gemma4_dspark, 3, (0, 1, 2)),
    "mlp_speculator": partial(synthetic.mlp_speculator, 3),
    "peagle": partial(peagle, 3, (0, 1, 2)),
}


def replay(
    drafter: Drafter,
    history: list[int],
    hidden: Sequence[mx.array],
    begins: Sequence[int],
    limit: int,
    chunks: Sequence[int] = (),
) -> list[mx.array]:
    """Logits [K, V] of the draft at each length in `begins`; rows of `hidden` [S, D] are observed in between.

    `chunks` are where the pieces end in which they come.
    """
    low, result = 0, []
    for begin in begins:
        for high in (*(chunk for chunk in chunks if low < chunk < begin - 1), begin - 1):
            drafter.observe(history[: high + 1], Features(tuple(h[low:high] for h in hidden)))
            low = high
        result.append(logits_of(drafter, history[:begin], limit))
    return result


def random_rows(count: int, layers: int, width: int = D, seed: int = 21) -> list[mx.array]:
    """Activations of `layers` layers, [S, D] each."""
    mx.random.seed(seed)
    return [mx.random.normal((count, width)) for _ in range(layers)]
