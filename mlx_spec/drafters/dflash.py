"""DFlash (arXiv:2602.06036): a block of tokens in one pass over the target's own activations.

The block is the pending token and masks, as long as it was in training whatever part of it is wanted. A slot
says what its own token is, so the first one, whose token is known, has nothing to say; checkpoints that draft
from it, too, record a shift of 1. Slots do not see each other's tokens: each draws from its marginal law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.conditioned import Rows
from mlx_spec.drafters.context import BACKLOG, Context, check_capture, joined_layers
from mlx_spec.drafters.dflash_network import DFlashConfig, DFlashNetwork
from mlx_spec.drafters.one_pass import drawn
from mlx_spec.drafters.recorded import WHERE, Recorded, check_target, shift_norms
from mlx_spec.drafters.tables import check_vocabulary, own_parts
from mlx_spec.drafters.weights import load_weights, read_tensors, required
from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft

PLAIN = {  # switches of a config, and the only value that is known
    "is_causal": False,
    "causal": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
}
SOFTCAP = "final_logit_softcapping"


@dataclass(frozen=True)
class Block:
    """What a block consists of."""

    size: int  # B slots
    mask_token: int
    shift: int  # 0: slot j says what token j of the block is; 1: what comes after it
    position_offset: int

    @property
    def length(self) -> int:
        """Tokens that it drafts."""
        return self.size - 1 + self.shift


class DFlash:
    """Drafts one sequence. Its caches hold the context and, while it drafts, the block."""

    def __init__(self, network: DFlashNetwork, parts: TargetParts, needs: FeatureSpec, block: Block) -> None:
        self.needs = needs
        self._network = network
        self._parts = parts
        self._block = block
        self._context = Context([Rows() for _ in network.layers])

    def observe(self, history: Sequence[int], features: Features) -> None:
        """The context grows by the rows of `features`."""
        self._context.observe(history, joined_layers(features))
        if self._context.waiting > BACKLOG:
            self._write()
            mx.async_eval([cache.arrays() for cache in self._context.caches])

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        return self._context.nbytes

    def missing(self, size: int) -> int:
        """Of how many of the first `size` positions it has no row."""
        return self._context.missing(size)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Tokens up to the end of the block; none where the context is not that of `history`."""
        limit = min(limit, self._block.length)
        if limit < 1 or not self._context.follows(history):
            return no_draft()
        self._write()
        block = [history[-1], *[self._block.mask_token] * (self._block.size - 1)]
        embedded = self._parts.embed(mx.array(block, dtype=mx.int32))
        slots = self._network(embedded, self._context.caches, self._block.position_offset)
        self._context.settle(0)
        first = 1 - self._block.shift
        return drawn(self._parts.unembed(slots[first : first + limit]), history, sampler)

    def _write(self) -> None:
        if self._context.waiting:
            rows, _ = self._context.take()
            self._network.remember(rows, self._context.caches)
            self._context.settle(rows.shape[0])


@dataclass(frozen=True)
class DFlashSource:
    """One loaded drafter, shared by all sequences."""

    network: DFlashNetwork
    needs: FeatureSpec
    block: Block
    vocab_size: int
    name: str = "dflash"

    def make(self, parts: TargetParts) -> DFlash:
        """The drafter of one sequence, with tables of its own where it brings them."""
        own = own_parts(self.network, parts, self.vocab_size)
        return DFlash(self.network, own, self.needs, self.block)


def open_dflash(path: Path, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> DFlashSource:
    """Load a converted drafter. Raises BadCheckpoint, and Mismatch where it is made for another target."""
    record = Recorded.from_config(config)
    check_target(config, target_config)
    _check_switches(config, target_config)
    check_capture(record.capture, config)
    sizes = DFlashConfig.from_dict(config, len(record.capture), read_tensors(path).keys())
    check_vocabulary(path, sizes.draft_vocab_size, sizes.vocab_size, sizes.tensors)
    network = DFlashNetwork(sizes)
    load_weights(network, path)
    shift_norms(network, record.norm_offset)
    mask, size = (required(config, key, int, WHERE) for key in ("mask_token_id", "block_size"))
    block = Block(size, mask, record.shift, record.position_offset)
    return DFlashSource(network, FeatureSpec(hidden_layers=record.capture), block, sizes.vocab_size)


def _check_switches(config: Mapping[str, Any], target_config: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint for what this runtime does not do."""
    for key, known in PLAIN.items():
        if config.get(key, known) != known:
            raise BadCheckpoint(f"{WHERE} has {key} = {config[key]!r}, only {known!r} is supported")
    target: Mapping[str, Any] = target_config.get("text_config") or target_config
    if config.get(SOFTCAP) not in (None, target.get(SOFTCAP)):
        raise BadCheckpoint(
            f"{WHERE} has {SOFTCAP} {config[SOFTCAP]!r}, the target {target.get(SOFTCAP)!r}: only "
            "the target's is supported"
        )
