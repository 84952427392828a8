"""What a drafter's weights do not say about themselves: written into its config.json as "mlx_spec".

The field's checkpoints differ in all of these, and a wrong one costs acceptance without an error.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlx_spec.convert.families.family import Config
from mlx_spec.convert.families.fit import rope_of, text_config

KEY = "mlx_spec"
Norm = Literal["post_norm", "pre_norm"]


@dataclass(frozen=True)
class Conventions:
    """How to run a drafter. Row i belongs to the target's input token x_i, whose logits predict x_{i+1}."""

    hidden: Norm | Literal["layers", "none"]  # what it reads: after or before the final norm, or of `capture`
    capture: tuple[int, ...] = ()  # outputs of these layers, from 0 and never negative, in the order of fc
    chain: Norm | Literal["none"] = "none"  # what its own next step reads instead of the target's hidden
    fc_order: tuple[str, ...] = ()  # the columns of fc, from the left
    shift: int = 1  # 1: row i predicts the token after its newest input; 0: a slot predicts itself
    position_offset: int = 0  # added to the positions of the drafted rows
    norm_offset: int = 0  # added to the norm weights; what checkpoints leave out is folded in already
    rope: Literal["target", "own", "none"] = "target"  # whose rotary parameters hold


def config_of(model_type: str, conventions: Conventions, target: Config, **fields: Any) -> dict[str, Any]:
    """A config.json of ours: the family, its conventions, the target it fits, and the family's `fields`."""
    text = text_config(target)
    fits = {key: text.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    if "model_type" in target:
        fits["model_type"] = target["model_type"]
    return {
        "model_type": model_type,
        KEY: asdict(conventions),
        "target": {**fits, "rope": rope_of(text)},
        **fields,
    }
