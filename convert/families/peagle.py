"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 drafter of several layers that drafts in one pass.

Ours: as EAGLE-3, its trained embed_tokens.weight, and
    mask_hidden [nT]   the feature of the rows that stand for tokens not drafted yet
"""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx

from mlx_spec.convert.families import eagle3
from mlx_spec.convert.families.family import Config, Converted, Family, Tensors
from mlx_spec.convert.families.table import Row, Sizes
from mlx_spec.errors import BadCheckpoint

NAME, TITLE = "peagle", "the P-EAGLE drafter"
MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")


def recognises(config: Config, names: Collection[str]) -> bool:
    """A feature for masked rows, or a config that says so."""
    named = any("peagle" in str(name).lower() for name in config.get("architectures") or ())
    marked = any(name.endswith("mask_hidden") for name in names)
    return marked or named or config.get("speculators_model_type") == "peagle"


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """A P-EAGLE drafter in our form. Raises BadCheckpoint and Mismatch."""
    drafter = eagle3.read(TITLE, config, target)
    mask = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    if mask is None or not str(mask).isdigit() or int(mask) >= drafter.sizes["vocab"]:
        raise BadCheckpoint(
            f"config.json of {TITLE} has no mask token below its {drafter.sizes['vocab']} tokens "
            f"({', '.join(MASK_KEYS)}; found {mask!r}): take a complete checkpoint"
        )
    shape = next((tensor.ndim for name, tensor in tensors.items() if name.endswith("mask_hidden")), 3)
    row = Row("mask_hidden", "mask_hidden", " ".join(["one"] * (shape - 1) + ["fused"]), flat)
    return eagle3.assemble(NAME, drafter, tensors, target, (row,), mask_token_id=int(mask))


def flat(feature: mx.array, sizes: Sizes) -> tuple[mx.array, ...]:
    """[1, 1, nT] as [nT]."""
    return (feature.reshape(-1),)


PEAGLE = Family(NAME, runnable=True, recognises=recognises, convert=convert)
