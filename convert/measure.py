"""Measure a model: logits and perplexity on built-in texts. Define what is tested."""

from __future__ import annotations

import contextlib
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

from mlx_spec import drafters
from mlx_spec.drafters.checkpoint import KEY
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
SAME_TYPE, NARROWED = 1e-4, 0.5  # tolerated differences of logits, in standard deviations
ROWS = 4  # last rows of each text, whose logits are compared
# Folders for the time of the test: the drafter in our form but not quantized, and as published but cast.
UNQUANTIZED, PUBLISHED = ".unquantized", ".published"

# --- the texts, built in so that the self-test needs no network

TEXTS = (
    "The harbour was quiet when the last ferry came in. Two fishermen sat on the wall and mended a net, and "
    "above them the gulls waited for what the day had left over. In winter nobody took the path along the "
    "cliff, but now, in the first warm week of the year, you could hear people talking up there until it was "
    "dark, and sometimes somebody sang.",
    "def mean(values):\n    total = 0.0\n    count = 0\n    for value in values:\n        total += value\n"
    "        count += 1\n    if count == 0:\n        raise ValueError('mean of nothing')\n"
    "    return total / count\n\n\ndef variance(values):\n    center = mean(values)\n"
    "    return mean([(value - center) ** 2 for value in values])\n",
    "Water boils at a lower temperature on a mountain than at the coast, because the air above presses on it "
    "with less force. At sea level it takes 100 degrees Celsius; at a height of 3000 metres about 90 are "
    "enough. That is why pasta needs more time in a hut in the Alps, although the water in the pot bubbles "
    "just as much as at home.",
    "Question: A train leaves at 9:40 and arrives at 11:05. How long is the journey?\nAnswer: From 9:40 to "
    "10:40 it is one hour, and from 10:40 to 11:05 it is 25 minutes more, so the journey takes 1 hour and 25 "
    "minutes.\nQuestion: And how far does it go at 80 kilometres an hour?\nAnswer: 1 hour and 25 minutes are "
    "85 minutes, and 80 times 85 divided by 60 is about 113 kilometres.",
)

PROMPTS = (  # to be continued as they are
    "The capital of",
    "Once upon a time",
    "def fib(n):\n    if n",
    "one two three four five six",
    "for i in range(10):\n",
)

QUESTIONS = (  # to be answered, where the target has a chat template
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
)

# --- what is tested


class SelfTestFailed(SpecError):
    """A converted pair that differs from its source."""


@dataclass(frozen=True)
class Conversion:
    """The type and the quantization given for one part, None as in the source."""

    dtype: str | None
    quantization: Quantization | None

    @property
    def changes(self) -> bool:
        """Return True if the result computes something else than the source."""
        return self.dtype is not None or self.quantization is not None

    def reference_dtype(self, source: Source) -> mx.Dtype | None:
        """Return the wider of `source`'s type and the new one, None as stored."""
        if self.dtype is None:
            return None
        sizes: Counter[mx.Dtype] = Counter()
        for array in source.tensors().values():
            if mx.issubdtype(array.dtype, mx.floating):
                sizes[array.dtype] += array.size
        stored = sizes.most_common(1)[0][0]
        return (mx.zeros(1, dtype=stored) + mx.zeros(1, dtype=DTYPES[self.dtype])).dtype

    def narrows(self, source: Source) -> bool:
        """Return True if the new type holds less than the source's."""
        return self.dtype is not None and DTYPES[self.dtype] != self.reference_dtype(source)


@dataclass(frozen=True)
class ConversionPlan:
    """Both sources, and what to make of them."""

    target: Source
    target_conversion: Conversion
    drafter: Source | None  # the target for native heads, None without a drafter
    family: Family | None  # of the drafter, None for a language model or no drafter
    drafter_conversion: Conversion
    hashes: Mapping[str, Mapping[str, str]]  # by part: the published hashes of the weights

    @property
    def is_embedded(self) -> bool:
        """Return True if the drafter is a head inside the target's checkpoint."""
        return self.drafter is self.target


@dataclass(frozen=True)
class TestedConversion(ConversionPlan):
    """A conversion to test."""

    folder: Path  # of the converted parts

    @property
    def unquantized_folder(self) -> Path:
        """Return the folder of the drafter in our form, not quantized."""
        return self.folder / (UNQUANTIZED if self.drafter_conversion.quantization else DRAFTER)

    @property
    def original_drafter(self) -> Path:
        """Return the drafter to compare with: as published if it runs, or in our form."""
        assert self.drafter is not None
        known = self.drafter.config.get("model_type") in drafters.FAMILIES
        # Where the conversion records conventions, the drafter does not run without them.
        if self.family is not None and (not known or KEY in read_config(self.folder / DRAFTER)):
            return self.unquantized_folder
        cast = self.folder / PUBLISHED
        return cast if cast.is_dir() else self.drafter.folder


# --- the measurement


@dataclass(frozen=True)
class Measured:
    """The results of a model on the built-in texts."""

    losses: Floats  # negative log-likelihood of each token, nats
    logits: Floats  # [R, V], of a few rows

    @property
    def perplexity(self) -> float:
        """Return the perplexity of all texts together."""
        return float(np.exp(np.minimum(self.losses.mean(), 700)))


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


def measure(folder: Path, dtype: mx.Dtype | None, tokens: mx.array) -> Measured:
    """Run one forward pass over texts [B, S].

    The graph alone holds the weights, so that each is read when its turn comes and dropped afterwards: a
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
    """Return the largest distance of logits [R, V], in standard deviations of the reference."""
    return float(np.abs(logits - reference).max()) / (float(reference.std()) or 1.0)


def check_logits(distance: float, source: Source, conversion: Conversion) -> float | None:
    """Return the tolerated distance from `source`, None for a quantized target. Raises SelfTestFailed."""
    if conversion.quantization is not None:
        return None
    tolerance = NARROWED if conversion.narrows(source) else SAME_TYPE
    if not distance <= tolerance:
        raise SelfTestFailed(
            f"the logits of the converted target differ from the original's by {distance:.2g} standard "
            f"deviations, {tolerance:g} are tolerated: nothing was written; please report this"
        )
    return tolerance
