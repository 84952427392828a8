"""Measure a model: logits and perplexity on built-in texts. Define what is tested."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import dequantize_model
from numpy.typing import NDArray

from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.hub.checkpoint import read_config
from mlx_spec.load import is_dequantized
from mlx_spec.text import Text, read_text
from mlx_spec.text.chat_template import special_tokens

from .families import Family
from .parts import load_unread
from .source import DTYPES, Quantization, Source
from .write import DRAFTER

Floats = NDArray[np.float32]
TEXT_LENGTH = 64  # tokens of each text
ROWS = 4  # last rows of each text, whose logits are compared
UNQUANTIZED = ".unquantized"  # for the time of the test: the drafter in our form but not quantized

# Built in, so that the self-test needs no network: prompts to be continued as they are, and questions to be
# answered where the target has a chat template.
BUILT_IN: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("texts.json").read_text(encoding="utf-8")
)
TEXTS, PROMPTS, QUESTIONS = (BUILT_IN[key] for key in ("texts", "prompts", "questions"))


class SelfTestFailed(SpecError):
    """A converted pair that differs from its source."""


@dataclass(frozen=True)
class ConversionPlan:
    """Both sources, what to make of them, and where. A type or a quantization of None is the source's."""

    folder: Path  # of the converted parts
    target: Source
    drafter: Source | None  # the target for native heads, None without a drafter
    family: Family | None  # of the drafter, None for a language model or no drafter
    dtype: str | None
    quantization: Quantization | None  # of the target
    drafter_quantization: Quantization | None
    hashes: Mapping[str, Mapping[str, str]]  # by part: the published hashes of the weights

    @property
    def is_embedded(self) -> bool:
        """Return True if the drafter is a head inside the target's checkpoint."""
        return self.drafter is self.target

    @property
    def unquantized_folder(self) -> Path:
        """Return the folder of the drafter in our form, not quantized."""
        return self.folder / (UNQUANTIZED if self.drafter_quantization else DRAFTER)

    @property
    def original_drafter(self) -> Path:
        """Return the drafter to compare with: a language model as published, others in our form."""
        assert self.drafter is not None
        return self.drafter.folder if self.family is None else self.unquantized_folder

    def reference_dtype(self) -> mx.Dtype | None:
        """Return the wider of the target's type and the new one, None as stored."""
        if self.dtype is None:
            return None
        sizes: Counter[mx.Dtype] = Counter()
        for array in self.target.tensors().values():
            if mx.issubdtype(array.dtype, mx.floating):
                sizes[array.dtype] += array.size
        stored = sizes.most_common(1)[0][0]
        return (mx.zeros(1, dtype=stored) + mx.zeros(1, dtype=DTYPES[self.dtype])).dtype


# --- the measurement


def load_lazily(folder: Path, dtype: mx.Dtype | None) -> nn.Module:
    """Return the model in `folder`, its weights unread, cast to `dtype` if given.

    It is dense and in float32 where `load` makes it so.
    """
    seen: dict[str, mx.array] = {}
    model, _ = load_unread(folder, seen)
    seen.clear()
    if dtype is not None:
        model.set_dtype(dtype)
    if is_dequantized(read_config(folder)):
        model.set_dtype(mx.float32)
        model = dequantize_model(model)
    return model


def encode(folder: Path, text: Text, string: str) -> list[int]:
    """Return the tokens of `string`, after the beginning-of-text token if there is one."""
    begin = text.token_id(special_tokens(folder).get("bos_token", ""))
    return [*([] if begin is None else [begin]), *text.encode(string)]


def texts(folder: Path, config: Mapping[str, Any]) -> mx.array:
    """Return the built-in texts [B, S], cut to one length."""
    text = read_text(folder, config)
    encoded = [encode(folder, text, string) for string in TEXTS]
    length = min(TEXT_LENGTH, *(len(tokens) for tokens in encoded))
    return mx.array([tokens[:length] for tokens in encoded])


def prompts(folder: Path, text: Text) -> list[list[int]]:
    """Return the built-in prompts; questions only if the target has a chat template."""
    result = [encode(folder, text, string) for string in PROMPTS]
    for question in QUESTIONS if text.chats else ():
        with contextlib.suppress(InvalidValue):  # a template that wants more than a question
            result.append(text.prompt([{"role": "user", "content": question}]))
    return result


def measure(folder: Path, dtype: mx.Dtype | None, tokens: mx.array) -> tuple[float, Floats]:
    """Return the perplexity of texts [B, S] together, and the logits [R, V] of a few rows.

    The graph alone holds the weights, so that each is read when its turn comes and dropped afterwards: a
    model that is larger than memory can be measured.
    """
    model = load_lazily(folder, dtype)
    logits = model(tokens).astype(mx.float32)
    del model
    scores = logits[:, :-1] - mx.logsumexp(logits[:, :-1], axis=-1, keepdims=True)
    loss = -mx.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()
    rows = logits[:, -ROWS:].reshape(-1, logits.shape[-1])
    del logits, scores
    mx.eval(loss, rows)
    return math.exp(min(float(loss), 700)), np.array(rows)
