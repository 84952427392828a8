"""Random drafters of the families that read features, for a target of any hidden size and vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import tiny
from mlx.utils import tree_map

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.checkpoint import Conventions, Rope
from mlx_spec.drafters.conditioned import chain_source
from mlx_spec.drafters.draft_model import VocabularySizes, draft_model_source
from mlx_spec.drafters.eagle3 import Eagle3Config, Eagle3Network
from mlx_spec.drafters.mtp import MTPNetwork
from mlx_spec.types import FeatureSpec


def _conventions(hidden: str, chain: str, capture: tuple[int, ...] = ()) -> Conventions:
    return Conventions(hidden=hidden, chain=chain, capture=capture)


def _spread(network: nn.Module, seed: int) -> None:
    mx.random.seed(seed)
    network.update(tree_map(lambda x: x + 0.3 * mx.random.normal(x.shape), network.trainable_parameters()))


def eagle3(D: int, vocab: int, ids: Sequence[int], capture: tuple[int, ...], seed: int = 3) -> DrafterSource:
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
        conventions=_conventions("layers", "pre_norm", capture),
        rope=Rope(1e4, None, 1.0, None),
        tensors=frozenset({"draft_ids", "lm_head.weight"}),
    )
    network = Eagle3Network(config)
    _spread(network, seed)
    network.draft_ids = mx.array(list(ids), dtype=mx.int32)
    return chain_source("eagle3", network, FeatureSpec(capture), vocab)


def mtp(D: int, vocab: int, seed: int = 4) -> DrafterSource:
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
    conventions = _conventions("post_norm", "post_norm")
    network = MTPNetwork({"text_config": text, "layer_type": "qwen3_5_text"}, conventions)
    _spread(network, seed)
    return chain_source("qwen_mtp", network, FeatureSpec(final_hidden=True), vocab)


# For the targets of `tiny`, which have 64 features and 256 tokens.
FOR_TINY = {
    "draft model": lambda: draft_model_source("other", tiny.full(seed=1), VocabularySizes(256, 256)),
    "eagle3": lambda: eagle3(64, 256, range(0, 256, 2), (0, 1, 2)),
    "mtp": lambda: mtp(64, 256),
    "gemma4 assistant": tiny.assistant,
}
