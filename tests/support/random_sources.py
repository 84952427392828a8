"""Random drafters of the families that read features, for a target of any hidden size and vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_spec.drafters.eagle3 import Eagle3Source
from mlx_spec.drafters.eagle3_network import Eagle3Config, Eagle3Network, Rope
from mlx_spec.drafters.mtp import MTPNetwork, MTPSource
from mlx_spec.drafters.recorded import Recorded
from mlx_spec.types import FeatureSpec


def _recorded(hidden: str, chain: str, capture: tuple[int, ...] = ()) -> Recorded:
    return Recorded(
        hidden=hidden,
        chain=chain,
        capture=capture,
        hidden_first=False,
        shift=1,
        position_offset=0,
        norm_offset=0,
        own_rope=False,
    )


def _spread(network: nn.Module, seed: int) -> None:
    mx.random.seed(seed)
    network.update(tree_map(lambda x: x + 0.3 * mx.random.normal(x.shape), network.trainable_parameters()))


def eagle3(D: int, vocab: int, ids: Sequence[int], capture: tuple[int, ...], seed: int = 3) -> Eagle3Source:
    """EAGLE-3 that knows the tokens `ids`."""
    config = Eagle3Config(
        hidden_size=D,
        target_hidden_size=D,
        vocab_size=vocab,
        draft_vocab_size=len(ids),
        intermediate_size=D,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        recorded=_recorded("layers", "pre_norm", capture),
        rope=Rope(1e4, None, 1.0, None),
        tensors=frozenset({"draft_ids", "lm_head.weight"}),
    )
    network = Eagle3Network(config)
    _spread(network, seed)
    network.draft_ids = mx.array(list(ids), dtype=mx.int32)
    return Eagle3Source(network, FeatureSpec(capture), vocab)


def mtp(D: int, vocab: int, seed: int = 4) -> MTPSource:
    """A head with a layer of Qwen3.5."""
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": D,
        "vocab_size": vocab,
        "intermediate_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "full_attention_interval": 2,
    }
    recorded = _recorded("post_norm", "post_norm")
    network = MTPNetwork({"text_config": text, "layer_type": "qwen3_5_text"}, recorded)
    _spread(network, seed)
    return MTPSource(network, FeatureSpec(final_hidden=True), "qwen_mtp", vocab)
