"""Logits and perplexity of a model on built-in texts, without holding the model in memory."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_spec.convert.target import load_unread
from mlx_spec.convert.texts import PROMPTS, QUESTIONS, TEXTS
from mlx_spec.errors import InvalidValue
from mlx_spec.text import Text, read_text
from mlx_spec.text.chat_template import special_tokens

Floats = NDArray[np.float32]
TEXT_LENGTH = 64  # tokens of each text
SAME_TYPE, NARROWED = 1e-4, 0.5  # tolerated differences of logits, in standard deviations
ROWS = 4  # last rows of each text, whose logits are kept


@dataclass(frozen=True)
class Measured:
    """A model on the built-in texts."""

    losses: Floats  # negative log-likelihood of each token, nats
    logits: Floats  # [R, V], of a few rows

    @property
    def perplexity(self) -> float:
        """Of all texts together."""
        return float(np.exp(np.minimum(self.losses.mean(), 700)))


def load_lazily(folder: Path, dtype: mx.Dtype | None) -> nn.Module:
    """The model in `folder` by mlx-lm, its weights unread; floats cast to `dtype` if given."""
    seen: dict[str, mx.array] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        model, _ = load_unread(folder, seen)
    seen.clear()
    if dtype is not None:
        model.set_dtype(dtype)
    return model


def encode(folder: Path, text: Text, string: str) -> list[int]:
    """The tokens of `string`, behind the beginning-of-text token if there is one."""
    begin = text.token_id(special_tokens(folder).get("bos_token", ""))
    return [*([] if begin is None else [begin]), *text.encode(string)]


def texts(folder: Path, config: Mapping[str, Any]) -> mx.array:
    """The built-in texts [B, S], cut to one length."""
    text = read_text(folder, config)
    encoded = [encode(folder, text, string) for string in TEXTS]
    length = min(TEXT_LENGTH, *(len(tokens) for tokens in encoded))
    return mx.array([tokens[:length] for tokens in encoded])


def prompts(folder: Path, text: Text) -> list[list[int]]:
    """The built-in prompts, the questions in the target's chat template if it has one."""
    result = [encode(folder, text, string) for string in PROMPTS]
    for question in QUESTIONS if text.chats else ():
        with contextlib.suppress(InvalidValue):  # a template that wants more than a question
            result.append(text.prompt([{"role": "user", "content": question}]))
    return result


def measure(folder: Path, dtype: mx.Dtype | None, tokens: mx.array) -> Measured:
    """One forward pass over texts [B, S].

    The graph alone holds the weights, so that each is read when its turn comes and dropped behind it: a
    model that is larger than memory can be measured.
    """
    model = load_lazily(folder, dtype)
    logits = model(tokens).astype(mx.float32)
    del model
    scores = logits[:, :-1] - mx.logsumexp(logits[:, :-1], axis=-1, keepdims=True)
    losses = -mx.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    rows = logits[:, -ROWS:].reshape(-1, logits.shape[-1])
    del logits, scores
    mx.eval(losses, rows)
    return Measured(np.array(losses), np.array(rows))


def difference(logits: Floats, reference: Floats) -> float:
    """Largest distance of two sets of logits [R, V], in standard deviations of the reference.

    Entries that are -inf in either are left out: a centroid head may choose other clusters.
    """
    both = np.isfinite(logits) & np.isfinite(reference)
    if not both.any():
        return float("inf")
    spread = float(reference[both].std()) or 1.0
    return float(np.abs(logits[both] - reference[both]).max()) / spread
