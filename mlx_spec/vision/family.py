"""Define a family: its tower and its input, the words around a picture, and who sees its rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.prompt import Sight
from mlx_spec.vision.pixels import Preparation

Config = Mapping[str, Any]
Rows = Generator[mx.array, None, mx.array]  # yields what a step is to evaluate, returns the rows


@dataclass(frozen=True)
class Words:
    """The words of a picture in a prompt: the placeholder of the chat template, and what replaces it."""

    placeholder: str  # once for a picture
    row: str  # once for each row
    before: str
    after: str


@dataclass(frozen=True)
class Family:
    """The models that read pictures in one way."""

    tower: Callable[[Config, int], nn.Module]  # of vision_config and the model's width
    preparation: Callable[[Config, Config], Preparation]  # of config.json and the processor file
    sight: Callable[[Config], Sight]  # of text_config
    tokens: Mapping[str, int]  # of a row, and before and after a picture, where config.json is silent
    words: Callable[..., Words]  # of these tokens
    renamed: Callable[[str, mx.array], tuple[str, mx.array]] = lambda name, array: (name, array)


def in_steps(layers: Sequence[Callable[..., mx.array]], x: mx.array, *options: Any) -> Rows:
    """Apply layers one after the other; yield after each.

    Sequences that decode get a turn there: a whole tower takes 0.2 to 0.6 s.
    """
    for layer in layers:
        x = layer(x, *options)
        yield x
    return x
