"""DFlash (arXiv 2602.06036), DFlash2 and DSpark (arXiv 2607.05147): a block of tokens in one pass.

Read from the forms of z-lab, speculators, DeepSpec and SpecForge. Ours (D hidden, n captured layers, V
vocabulary, W <= V draft vocabulary, r a rank):
    fc.weight [D, nD], hidden_norm.weight [D]     the context feature
    layers.{i}.*                                  layers of Qwen3 with q_norm and k_norm, or of Gemma 4
    norm.weight [D]
    embed_tokens.weight, lm_head.weight, draft_ids only where the drafter has them
DFlash2: layers.{i}.{attention,mlp}_conv.{base_kernel,kernel_projection.weight}, and
    candidate_selector.{predecessor,successor}_codebook [V, r], .hidden_projection.weight [r, D]
DSpark: markov_head.markov_w1.weight [V, r], .markov_w2.weight [W, r], .gate_proj or .joint_proj
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import mlx.nn as nn

from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import Conventions, Count
from mlx_spec.drafters.dflash import DFlashNetwork
from mlx_spec.drafters.dflash2 import DFlash2Network
from mlx_spec.drafters.dspark import DSparkNetwork, Gemma4DSparkNetwork
from mlx_spec.drafters.layers import LayerConfig
from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import FULL, SLIDING

from . import common
from .common import Converted, Tensors

KEYS = {
    *common.LAYER_KEYS,
    *"dflash_config transformer_layer_config is_causal causal sliding_window_non_causal use_sliding_window "
    "target_layer_ids aux_hidden_state_layer_ids num_target_layers draft_vocab_size target_hidden_size "
    "block_size sample_from_anchor final_logit_softcapping projector_type".split(),
}
DSPARK_KEYS = {
    *"markov_rank markov_head_type dspark_markov_rank dspark_bonus_anchor dspark_config "
    "enable_confidence_head target_model_type confidence_head_with_markov target_text_model_type".split(),
}
# Gemma 4's configs have these keys for other kinds of layers, for experts and for images.
GEMMA4_KEYS = {
    *"attention_k_eq_v global_head_dim num_global_key_value_heads hidden_activation per_layer_config "
    "use_bidirectional_attention vocab_size_per_layer_input num_experts top_k_experts "
    "moe_intermediate_size".split()
}


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a DFlash drafter. Raises BadCheckpoint and Mismatch."""
    return _convert("dflash", "the DFlash drafter", DFlashNetwork, tensors, config, target)


def convert_dflash2(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a DFlash2 drafter. Raises BadCheckpoint and Mismatch."""
    title, special = "the DFlash2 drafter", _special(config)
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    sizes = {key: common.size(special, key, title) for key in keys}
    exact = ("kernel_projection.weight", "hidden_projection.weight")
    return _convert("dflash2", title, DFlash2Network, tensors, config, target, {*keys}, exact, **sizes)


def convert_dspark(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a DSpark drafter with layers of Qwen3. Raises BadCheckpoint and Mismatch."""
    return _convert_dspark(
        "dspark", "the DSpark drafter", DSparkNetwork, tensors, config, target, DSPARK_KEYS
    )


def convert_gemma4_dspark(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a DSpark drafter with layers of Gemma 4. Raises BadCheckpoint and Mismatch."""
    title, keys = "the Gemma 4 DSpark drafter", DSPARK_KEYS | GEMMA4_KEYS
    if SLIDING in (config.get("layer_types") or ()):
        raise BadCheckpoint(f"{title} has sliding layers: only full attention is supported")
    groups = "num_global_key_value_heads" if config.get("attention_k_eq_v") else "num_key_value_heads"
    shape = {
        "head_dim": common.size(config, "global_head_dim", title),
        "num_key_value_heads": common.size(config, groups, title),
        "hidden_act": config.get("hidden_activation"),
        "rope_parameters": (config.get("rope_parameters") or {}).get(FULL),
    }
    common.refuse_switches(title, config, KEYS | keys)
    plain = {key: value for key, value in config.items() if key not in GEMMA4_KEYS}
    return _convert_dspark(
        "gemma4_dspark", title, Gemma4DSparkNetwork, tensors, {**plain, **shape}, target, keys
    )


def _convert_dspark(
    name: str,
    title: str,
    network: Callable[[LayerConfig], nn.Module],
    tensors: Tensors,
    config: Config,
    target: Config,
    keys: set[str],
) -> Converted:
    special = _special(config)
    anchored, bonus = special.get("sample_from_anchor"), special.get("dspark_bonus_anchor")
    if anchored is None:
        # Without the keys: DeepSpec drafts from the first slot, SpecForge does not.
        names = map(str, config.get("architectures") or ())
        deepspec = any(name.endswith("3DSparkModel") or "Gemma4" in name for name in names)
        anchored = deepspec if bonus is None else not bonus
    rank = special.get("markov_rank") or special.get("dspark_markov_rank")
    head: dict[str, Any] = {
        "markov_rank": rank,
        "markov_head_type": special.get("markov_head_type") or "vanilla",
    }
    config = {**config, "sample_from_anchor": anchored}
    return _convert(name, title, network, tensors, config, target, keys, **head)


def _special(config: Config) -> dict[str, Any]:
    """Return config.json with the keys of its nested `dflash_config` and `dspark_config`."""
    nested = [config.get(key) or {} for key in ("dflash_config", "dspark_config")]
    return {**config, **nested[0], **nested[1]}


def _convert(
    name: str,
    title: str,
    network: Callable[[LayerConfig], nn.Module],
    tensors: Tensors,
    config: Config,
    target: Config,
    keys: set[str] | None = None,
    exact: tuple[str, ...] = (),
    **fields: Any,
) -> Converted:
    layer, special = common.layer_config(config), _special(config)
    for said in (special, layer):
        common.refuse_switches(title, said, KEYS | (keys or set()))
    projector = special.get("projector_type")
    if projector not in (None, name.removeprefix("gemma4_")):
        raise BadCheckpoint(f"{title} has projector_type {projector!r}, so it is of another kind")
    capture, note = captured(title, special)
    vocab = common.size(layer, "vocab_size", title)
    sizes = common.check_captured(title, special, capture, target)
    if "num_target_layers" in special:
        common.check_fit(
            title, {"num_hidden_layers": common.size(special, "num_target_layers", title)}, target
        )
    books = [f"candidate_selector.{which}_codebook" for which in ("predecessor", "successor")]
    spellings = (("model.", ""), *((f"{name}.weight", name) for name in books))
    source = common.read(title, tensors, config, spellings)
    for end in ("weight", "bias"):
        source.drop(f"confidence_head.proj.{end}", "the policy measures acceptance")
    notes = common.resolve_map(source, vocab, sizes["draft_vocab_size"])
    shift = int(bool(special.get("sample_from_anchor")))  # then the first slot drafts as well
    mask = common.size(special, "mask_token_id", title, Annotated[int, range(vocab)])
    if (cap := special.get("final_logit_softcapping")) is not None:
        fields["final_logit_softcapping"] = cap
    written = common.config_of(
        name,
        Conventions(hidden="layers", capture=capture, shift=shift, rope="own"),
        target,
        layer_config=layer,
        causal=_causal(title, layer, special),
        draft_vocab_size=sizes["draft_vocab_size"],
        block_size=common.size(special, "block_size", title, Count),
        mask_token_id=mask,
        **fields,
    )
    return common.finish_layers(source, network, written, target, (note, *notes), exact)


def _causal(title: str, layer: Config, special: Config) -> list[bool]:
    """Return for each layer True if a row of the block does not see later rows of the block.

    `is_causal` (z-lab) and `causal` hold for all layers. Without them sliding layers are causal in z-lab's
    form, and in speculators' form if `sliding_window_non_causal` is false. Older checkpoints of speculators
    lack that key, and their layers are not causal.
    """
    kinds = layer.get("layer_types") or [FULL] * common.size(layer, "num_hidden_layers", title, Count)
    told = next((special[key] for key in ("is_causal", "causal") if special.get(key) is not None), None)
    non_causal = special.get("sliding_window_non_causal", "speculators_model_type" in special)
    return [bool(told) if told is not None else kind == SLIDING and not non_causal for kind in kinds]


def captured(title: str, special: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    """Return the layer outputs that fc reads, and a note.

    z-lab numbers outputs, speculators inputs. Raises BadCheckpoint if neither list exists.
    """
    if special.get("target_layer_ids"):
        ids = tuple(special["target_layer_ids"])
        return ids, f"target_layer_ids {list(ids)} are layer outputs"
    if special.get("aux_hidden_state_layer_ids"):
        ids = tuple(special["aux_hidden_state_layer_ids"])
        return tuple(index - 1 for index in ids), f"aux_hidden_state_layer_ids {list(ids)} are layer inputs"
    raise BadCheckpoint(f"config.json of {title} has no target_layer_ids: which layers it reads is not known")
