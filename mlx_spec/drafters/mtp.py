"""Native multi-token prediction heads: Qwen3-Next, Qwen3.5, Qwen3.6, DeepSeek-V3, GLM-4.5 and later.

A head norms the target's hidden and the embedding of the token that follows it, projects both to one, and
runs a decoder layer of the target's own architecture (DeepSeek-V3, arXiv:2412.19437, section 2.2). It is used
again for every further token, on its own output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.drafters import mtp_layers
from mlx_spec.drafters.conditioned import Conditioned, Rows, check_conventions
from mlx_spec.drafters.recorded import POST, PRE, WHERE, Recorded, check_target, joined, shift_norms
from mlx_spec.drafters.tables import own_parts
from mlx_spec.drafters.weights import load_weights, read_tensors, required
from mlx_spec.types import FeatureSpec, TargetParts


class MTPNetwork(nn.Module):
    """The head: two norms, a projection, a decoder layer, a norm. Names are those the converter writes."""

    depth = 1  # layers that have K and V

    def __init__(self, config: Mapping[str, Any], recorded: Recorded) -> None:
        super().__init__()
        text: dict[str, Any] = required(config, "text_config", dict, WHERE)
        where = f"text_config in {WHERE}"
        width, eps = required(text, "hidden_size", int, where), required(text, "rms_norm_eps", float, where)
        layer, kind = mtp_layers.build(required(config, "layer_type", str, WHERE), text)
        self._array_mask, self._recorded = kind.array_mask, recorded
        self.norm_embedding = nn.RMSNorm(width, eps=eps)
        self.norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(width, eps=eps)

    def add_tables(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make room for an embedding and an LM head of its own, where the checkpoint has them."""
        if "embed_tokens.weight" in shapes:
            self.embed_tokens = nn.Embedding(*shapes["embed_tokens.weight"])
        if "lm_head.weight" in shapes:
            rows, width = shapes["lm_head.weight"]
            self.lm_head = nn.Linear(width, rows, bias=False)

    def fuse(self, features: mx.array) -> mx.array:
        """The target's hidden as it is."""
        return features

    def __call__(
        self, embedded: mx.array, hidden: mx.array, caches: Sequence[Rows]
    ) -> tuple[mx.array, mx.array]:
        """[T, D] twice to the hidden of the next step and the final norm, [T, D] each."""
        dtype = self.norm.weight.dtype
        inputs = self.norm_embedding(embedded.astype(dtype)), self.norm_hidden(hidden.astype(dtype))
        x = self.fc(joined(*inputs, hidden_first=self._recorded.hidden_first))[None]
        mask = caches[0].mask(x.shape[1], array=self._array_mask)
        x = self.layers[0](x, mask, caches[0])
        normed: mx.array = self.norm(x)[0]
        return normed if self._recorded.chain == POST else x[0], normed


@dataclass(frozen=True)
class MTPSource:
    """One loaded head, shared by all sequences."""

    network: MTPNetwork
    needs: FeatureSpec
    name: str
    vocab_size: int
    position_offset: int = 0

    def make(self, parts: TargetParts) -> Conditioned:
        """The drafter of one sequence."""
        own = own_parts(self.network, parts, self.vocab_size)
        return Conditioned(self.network, own, self.needs, position_offset=self.position_offset)


def open_mtp(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> MTPSource:
    """Load the head in `path`. Raises Mismatch where it is not made for the target, BadCheckpoint."""
    recorded = Recorded.from_config(config)
    check_conventions(recorded, (POST, PRE))
    check_target(config, target_config)
    network = MTPNetwork(config, recorded)
    size = required(config["text_config"], "vocab_size", int, f"text_config in {WHERE}")
    width = required(config["text_config"], "hidden_size", int, f"text_config in {WHERE}")
    own = {"embed_tokens.weight", "lm_head.weight"} & read_tensors(path).keys()
    network.add_tables({name: (size, width) for name in own})
    load_weights(network, path)
    shift_norms(network, recorded.norm_offset)
    last = FeatureSpec(final_hidden=True) if recorded.hidden == POST else FeatureSpec(hidden_layers=(-1,))
    return MTPSource(network, last, str(config["model_type"]), size, recorded.position_offset)
