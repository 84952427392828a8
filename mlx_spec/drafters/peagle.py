"""P-EAGLE (arXiv:2602.01469): EAGLE-3 with several layers that drafts K tokens in one pass.

A row pairs the target's features of a position with the token behind it. Rows of tokens that are not drafted
yet pair a trained feature with the mask token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.conditioned import Rows
from mlx_spec.drafters.context import BACKLOG, Context, check_capture, joined_layers
from mlx_spec.drafters.eagle3_network import Eagle3Config, Eagle3Network
from mlx_spec.drafters.one_pass import behind, drawn
from mlx_spec.drafters.recorded import WHERE, check_target, shift_norms
from mlx_spec.drafters.tables import check_vocabulary, own_parts
from mlx_spec.drafters.weights import load_weights, read_tensors, required
from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft


class PEagleNetwork(Eagle3Network):
    """The layers of EAGLE-3 and the feature of rows whose token is not known."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.mask_hidden = mx.zeros((len(config.recorded.capture) * config.target_hidden_size,))


class Paired:
    """The network and its caches, for rows [T, D + F]: an embedding and the target's features."""

    def __init__(self, network: PEagleNetwork, context: Context) -> None:
        self._network = network
        self._context = context

    def verify(self, tokens: mx.array) -> mx.array:
        """Write rows on trial. Returns what the head reads of each, [T, D]."""
        width = tokens.shape[1] - self._network.mask_hidden.size
        hidden = self._network.fuse(tokens[:, width:])
        return self._network(tokens[:, :width], hidden, self._context.caches)[1]

    def commit(self, keep: int) -> None:
        """Keep the first rows but for the newest one, which the next draft writes again."""
        self._context.settle(keep - 1)


class PEagle:
    """Drafts one sequence. Its caches hold rows of known tokens and never a mask."""

    def __init__(
        self, network: PEagleNetwork, parts: TargetParts, needs: FeatureSpec, mask_token: int
    ) -> None:
        self.needs = needs
        self._parts = parts
        self._context = Context([Rows() for _ in network.layers], paired=True)
        self._stack = Paired(network, self._context)
        mask = parts.embed(mx.array([mask_token], dtype=mx.int32))
        self._mask = mx.concatenate([mask, network.mask_hidden[None]], axis=-1)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """The rows of `features` are to be written."""
        self._context.observe(history, joined_layers(features))
        if self._context.waiting > BACKLOG:
            rows = self._take()
            self._stack.verify(rows)
            self._stack.commit(rows.shape[0])
            mx.async_eval([cache.arrays() for cache in self._context.caches])

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        return self._context.nbytes

    def missing(self, size: int) -> int:
        """Of how many of the first `size` positions it has no row."""
        return self._context.missing(size)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """`limit` tokens; none where the newest row is not that of `history`."""
        if limit < 1 or not self._context.follows(history):
            return no_draft()
        normed = behind(self._stack, self._take(), self._mask, limit)
        return drawn(self._parts.unembed(normed), history, sampler)

    def _take(self) -> mx.array:
        rows, tokens = self._context.take()
        return mx.concatenate([self._parts.embed(mx.array(tokens, dtype=mx.int32)), rows], axis=-1)


@dataclass(frozen=True)
class PEagleSource:
    """One loaded drafter, shared by all sequences."""

    network: PEagleNetwork
    needs: FeatureSpec
    mask_token: int
    vocab_size: int
    name: str = "peagle"

    def make(self, parts: TargetParts) -> PEagle:
        """The drafter of one sequence, with tables of its own where it brings them."""
        own = own_parts(self.network, parts, self.vocab_size)
        return PEagle(self.network, own, self.needs, self.mask_token)


def open_peagle(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> PEagleSource:
    """Load a converted drafter. Raises BadCheckpoint, and Mismatch where it is made for another target."""
    sizes = Eagle3Config.from_dict(config, read_tensors(path).keys())
    check_target(config, target_config)
    record = sizes.recorded
    check_capture(record.capture, config)
    if record.position_offset:
        raise BadCheckpoint(
            f"{WHERE} records position_offset {record.position_offset}: mask rows follow the others, only 0 "
            "is known"
        )
    check_vocabulary(path, sizes.draft_vocab_size, sizes.vocab_size, sizes.tensors)
    network = PEagleNetwork(sizes)
    load_weights(network, path)
    shift_norms(network, record.norm_offset)
    needs = FeatureSpec(hidden_layers=record.capture)
    return PEagleSource(network, needs, required(config, "mask_token_id", int, WHERE), sizes.vocab_size)
