"""Random drafters of the families that read features, for a target of any hidden size and vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.drafters.conditioned import network_source
from mlx_spec.drafters.draft_model import VocabularySizes, draft_model_source
from mlx_spec.drafters.eagle3 import Eagle3Network
from mlx_spec.drafters.layers import LayerConfig
from mlx_spec.drafters.mtp import MTPNetwork
from mlx_spec.types import FeatureSpec
from support import tiny

SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
}


def _spread(network: nn.Module) -> None:
    network.update(tree_map(lambda x: x + 0.3 * mx.random.normal(x.shape), network.trainable_parameters()))


def eagle3(D: int, vocab: int, ids: Sequence[int], capture: tuple[int, ...], seed: int = 3) -> DrafterSource:
    """EAGLE-3 that knows the tokens `ids`."""
    config = {
        "mlx_spec": asdict(Conventions(hidden="layers", chain="pre_norm", capture=capture, rope="own")),
        "layer_config": SIZES | {"hidden_size": D, "vocab_size": vocab, "intermediate_size": D},
        "draft_vocab_size": len(ids),
        "target_hidden_size": D,
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm"), False),
    }
    mx.random.seed(seed)
    network = Eagle3Network(LayerConfig.from_dict(config, {"draft_ids", "lm_head.weight"}, {}))
    _spread(network)
    network.draft_ids = mx.array(list(ids), dtype=mx.int32)
    return network_source("eagle3", network, FeatureSpec(capture), vocab)


def mtp(D: int, vocab: int, seed: int = 4) -> DrafterSource:
    """A head with a layer of Qwen3.5."""
    text = SIZES | {"hidden_size": D, "vocab_size": vocab, "intermediate_size": D, "num_hidden_layers": 2}
    text |= {"model_type": "qwen3_5_text", "full_attention_interval": 2}
    conventions = Conventions(hidden="post_norm", chain="post_norm")
    mx.random.seed(seed)
    network = MTPNetwork({"text_config": text, "layer_type": "qwen3_5_text"}, conventions)
    _spread(network)
    return network_source("qwen_mtp", network, FeatureSpec(final_hidden=True), vocab)


# For the targets of `tiny`, which have 64 features and 256 tokens.
FOR_TINY = {
    "draft model": lambda: draft_model_source("other", tiny.full(seed=1), VocabularySizes(256, 256)),
    "eagle3": lambda: eagle3(64, 256, range(0, 256, 2), (0, 1, 2)),
    "mtp": lambda: mtp(64, 256),
    "gemma4 assistant": tiny.assistant,
}
