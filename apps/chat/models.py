"""From the options to what the library works with."""

from __future__ import annotations

from dataclasses import replace

from mlx_spec import load
from mlx_spec.apps.chat.arguments import Options
from mlx_spec.errors import InvalidValue
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling


def sampling_of(options: Options) -> Sampling:
    """The sampling that was asked for. Raises InvalidValue."""
    return replace(Sampling(), **options.sampling)


def pair_of(options: Options) -> Pair:
    """The pair that was asked for, loaded. Raises SpecError."""
    pair = load(
        options.target,
        options.drafter,
        num_draft_tokens=options.num_draft_tokens,
        kv_bits=options.kv_bits,
    )
    if options.think and not pair.text.thinks:
        raise InvalidValue(f"{options.target} cannot be asked to think first: leave out --think")
    return pair
