"""Drafters of every one-pass family for the models of tiny.py, through the converter, and a head that fits.

Their layers are random. The head is a least-squares fit to a greedy text of the target, so that on that text
accepting, accepting in part and rejecting all happen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lossless
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import synthetic
from checkpoints import read
from mlx.utils import tree_flatten
from synthetic import Checkpoint, D, V, target_config

from mlx_spec.convert.parts import convert_drafter, family_or_model
from mlx_spec.convert.source import Quantization, open_source
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Drafter, Features, TargetParts

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


def opened(
    made: Checkpoint, folder: Path, bits: int | None = None, edit: Callable[[dict[str, Any]], object] = id
) -> DrafterSource:
    """Converted, written, and loaded; `edit` changes the written config.json."""
    source = open_source(str(made.write(folder / "published")))
    quantization = None if bits is None else Quantization(bits, 32)
    prepared = convert_drafter(source, family_or_model(source), made.target, quantization, None)
    edit(prepared.config)
    ours = folder / "converted"
    ours.mkdir()
    mx.save_safetensors(str(ours / "model.safetensors"), prepared.tensors)
    (ours / "config.json").write_text(json.dumps(prepared.config))
    return open_drafter(ours, read(ours), made.target)


def pard(model: nn.Module, layers: int, noise: float = 0.0) -> Checkpoint:
    """The weights of a language model, disturbed. A row behind known tokens is often right then."""
    mx.random.seed(14)
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
    tensors = {name: w + noise * mx.random.normal(w.shape) for name, w in parameters}
    config = {key: value for key, value in vars(model.args).items() if value is not None}
    vocab = config["vocab_size"]
    return Checkpoint(tensors, {**config, "pard_token": vocab - 1}, target_config(layers, vocab=vocab))


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


def layer_outputs(model: nn.Module, tokens: Sequence[int]) -> list[mx.array]:
    """[S, D] of each decoder layer, by a plain pass without caches."""
    x, found = model.model.embed_tokens(mx.array(list(tokens))[None]), []
    for layer in [getattr(layer, "layer", layer) for layer in model.layers]:
        x = layer(x, mask="causal")
        found.append(x[0])
    return found


def gather(
    source: DrafterSource, model: nn.Module, prompt: list[int], truth: list[int], limit: int
) -> tuple[np.ndarray, list[int]]:
    """Return the head's inputs [N, D] along a text and the tokens it should say, one in seven wrong."""
    target, rows, wanted = LMTarget(model, source.needs), [], []

    def unembed(hidden: mx.array) -> mx.array:
        rows.append(np.array(hidden))
        return mx.zeros((hidden.shape[0], V))

    drafter = source.make(TargetParts(target.parts.embed, unembed, target.parts.select))
    history = list(prompt)
    drafter.observe(history, target.prefill(history[:-1]))
    for i, token in enumerate(truth):
        drafter.draft(history, limit, lossless.GREEDY.sampler(1, V))
        wanted += truth[i : i + limit] + [0] * max(0, i + limit - len(truth))
        target.verify(mx.array(history[-1:]))
        history.append(token)
        drafter.observe(history, target.commit(1))
    spoiled = [(token + 1) % V if i % 7 == 3 else token for i, token in enumerate(wanted)]
    return np.concatenate(rows), spoiled


def head_of(rows: np.ndarray, wanted: Sequence[int], vocab: int = V) -> mx.array:
    """The LM head [V, D] that says `wanted` behind `rows` [N, D], as nearly as squares are least."""
    weights, *_ = np.linalg.lstsq(rows, np.eye(vocab)[list(wanted)], rcond=1e-4)
    return mx.array(weights.T.astype(np.float32))
