"""What a drafter family is to the converter: how it is recognised and what becomes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Tensors = Mapping[str, mx.array]  # lazy, by the names of the checkpoint
Config = Mapping[str, Any]  # of a config.json


@dataclass(frozen=True)
class Converted:
    """A drafter in our form. Every tensor of the source is in `used` or in `dropped`."""

    config: dict[str, Any]  # config.json to write; its model_type is the name of the family
    tensors: dict[str, mx.array]  # lazy, by our names
    used: frozenset[str]  # source tensors that went in
    dropped: Mapping[str, str]  # source tensor -> why it is rightly left out
    quantizable: Callable[[str], bool]  # by our names
    notes: tuple[str, ...] = ()  # conventions found, for the manifest


@dataclass(frozen=True)
class Family:
    """One drafter family: a name table and the rules around it."""

    name: str  # our model_type
    runnable: bool  # whether mlx_spec.drafters has its runtime
    recognises: Callable[[Config, Collection[str]], bool]  # (config.json, names of the tensors)
    convert: Callable[[Tensors, Config, Config], Converted]  # (tensors, config.json, that of the target)
