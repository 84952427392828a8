"""PARD (arXiv 2504.18583): a small model that drafts in one pass over mask tokens.

Our names are mlx-lm's names of the model; `layer_config` is the config.json from which mlx-lm builds it.
"""

from __future__ import annotations

from typing import Annotated

import mlx.nn as nn
from mlx_lm.utils import _get_classes

from mlx_spec.checkpoint.files import LOADING_ERRORS, one_line
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import Conventions, Count
from mlx_spec.errors import BadCheckpoint, Mismatch

from . import common
from .common import Converted, Tensors


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a PARD drafter. Raises BadCheckpoint and Mismatch."""
    title, key, known = "the PARD drafter", "pard_token", ("llama", "qwen2", "qwen3")
    model_type = str(config.get("model_type"))
    if model_type not in known:
        raise BadCheckpoint(f"{title} is a {model_type} model: known are {', '.join(known)}")
    vocab = common.size(config, "vocab_size", title)
    mask = common.size(config, key, title, Annotated[int, range(vocab)])
    theirs = common.target_size(target, "vocab_size")
    if abs(vocab - theirs) > max(vocab, theirs) // 100:  # tables for one tokenizer may differ in padding
        raise Mismatch(
            f"{title} is made for a target of vocab size {vocab}, this one has {theirs}: "
            f"{common.OTHER_DRAFTER}"
        )
    model_class, args_class = _get_classes(dict(config))
    common.refuse_switches(
        title, config, {key, *common.LAYER_KEYS, *vars(args_class)["__dataclass_fields__"]}
    )
    source, layer = common.read(title, tensors, config), common.own_config(config)
    layer.setdefault("tie_word_embeddings", "lm_head.weight" not in tensors)
    if layer["tie_word_embeddings"]:
        source.drop("lm_head.weight", "tied to embed_tokens")
    conventions = Conventions(hidden="none", rope="own")
    written = common.config_of("pard", conventions, target, layer_config=layer, mask_token_id=mask)
    common.size(layer, "num_hidden_layers", title, Count)
    try:
        network: nn.Module = model_class(args_class.from_dict(layer))
    except LOADING_ERRORS as error:
        raise BadCheckpoint(
            f"config.json of {title} describes no {model_type}: {one_line(error)}; download it again"
        ) from error
    return common.finish(source, network, written)
