"""EAGLE-3 (arXiv:2503.01840): a layer of its own over three of the target's, and a reduced vocabulary.

What the target says is never restricted to that vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.drafters.conditioned import Conditioned, check_conventions
from mlx_spec.drafters.context import check_capture
from mlx_spec.drafters.eagle3_network import Eagle3Config, Eagle3Network
from mlx_spec.drafters.recorded import LAYERS, check_target, shift_norms
from mlx_spec.drafters.tables import check_vocabulary, own_parts
from mlx_spec.drafters.weights import load_weights, read_tensors
from mlx_spec.types import FeatureSpec, TargetParts


@dataclass(frozen=True)
class Eagle3Source:
    """One loaded drafter, shared by all sequences."""

    network: Eagle3Network
    needs: FeatureSpec
    vocab_size: int
    position_offset: int = 0
    name: str = "eagle3"

    def make(self, parts: TargetParts) -> Conditioned:
        """The drafter of one sequence."""
        own = own_parts(self.network, parts, self.vocab_size)
        return Conditioned(self.network, own, self.needs, position_offset=self.position_offset)


def open_eagle3(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> Eagle3Source:
    """Load the checkpoint in `path`. Raises Mismatch where it is not made for the target, BadCheckpoint."""
    text = target_config.get("text_config") or target_config
    names = read_tensors(path).keys()
    found = Eagle3Config.from_dict(config, names, text.get("max_position_embeddings"))
    check_conventions(found.recorded, (LAYERS,))
    check_target(config, target_config)
    check_capture(found.recorded.capture, config)
    check_vocabulary(path, found.draft_vocab_size, found.vocab_size, found.tensors)
    network = Eagle3Network(found)
    load_weights(network, path)
    shift_norms(network, found.recorded.norm_offset)
    needs = FeatureSpec(hidden_layers=found.recorded.capture)
    return Eagle3Source(network, needs, found.vocab_size, found.recorded.position_offset)
