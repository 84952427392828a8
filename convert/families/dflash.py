"""DFlash (arXiv 2602.06036): a block of tokens in one pass over the target's K/V.

Read from z-lab's form and from speculators'. Ours (D hidden, n captured layers, V vocabulary):
    fc.weight [D, nD], hidden_norm.weight [D]     the context feature
    layers.{i}.*                                  Qwen3-shaped layers, with q_norm and k_norm
    norm.weight [D]
    embed_tokens.weight, lm_head.weight, draft_ids only where it brings its own
"""

from __future__ import annotations

from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.drafters.dflash import DFlashNetwork
from mlx_spec.errors import BadCheckpoint

from . import common
from .common import Config, Converted, Tensors

NAME, TITLE = "dflash", "the DFlash drafter"
SUCCESSORS = (  # parts of the names of their tensors, and what they are called
    ("candidate_selector", "DFlash2"),
    ("attention_conv", "DFlash2"),
    ("markov", "DSpark"),
    ("confidence_head", "DSpark"),
    ("prefix_gru", "Domino"),
)
SWITCHES = (  # that a runtime needs, if the config has them
    "is_causal causal sliding_window_non_causal input_embedding_scale output_multiplier "
    "final_logit_softcapping"
).split()


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a DFlash drafter. Raises BadCheckpoint and Mismatch."""
    for part, successor in SUCCESSORS:
        if any(part in name for name in tensors):
            raise BadCheckpoint(f"{TITLE} is of the kind {successor} (it has {part}): only DFlash is known")
    layer, special = common.layer_config(config), {**config, **(config.get("dflash_config") or {})}
    capture, note = captured(special)
    vocab = common.size(layer, "vocab_size", TITLE)
    sizes = common.check_captured(TITLE, special, capture, target)
    if "num_target_layers" in special:
        common.check_fit(
            TITLE, {"num_hidden_layers": common.size(special, "num_target_layers", TITLE)}, target
        )
    source = common.read(TITLE, tensors, config, (("model.", ""),))
    notes = common.resolve_map(source, vocab, sizes["draft_vocab_size"])
    shift = int(bool(special.get("sample_from_anchor")))  # then the first slot drafts as well
    mask = common.size(special, "mask_token_id", TITLE)
    if not 0 <= mask < vocab:
        raise BadCheckpoint(f"config.json of {TITLE} has mask_token_id {mask}, it knows {vocab} tokens")
    switches = {key: special[key] for key in SWITCHES if special.get(key) is not None}
    written = common.config_of(
        NAME,
        Conventions(hidden="layers", capture=capture, shift=shift, rope="own"),
        target,
        layer_config=layer,
        draft_vocab_size=sizes["draft_vocab_size"],
        block_size=common.size(special, "block_size", TITLE),
        mask_token_id=mask,
        **switches,
    )
    return common.finish_layers(source, DFlashNetwork, written, target, (note, *notes))


def captured(special: Config) -> tuple[tuple[int, ...], str]:
    """Return the layer outputs that fc reads, and a note.

    z-lab numbers outputs, speculators inputs. Raises BadCheckpoint if neither list exists.
    """
    if special.get("target_layer_ids"):
        ids = tuple(special["target_layer_ids"])
        return ids, f"target_layer_ids {list(ids)} are layer outputs"
    if special.get("aux_hidden_state_layer_ids"):
        ids = tuple(special["aux_hidden_state_layer_ids"])
        return tuple(index - 1 for index in ids), f"aux_hidden_state_layer_ids {list(ids)} are layer inputs"
    raise BadCheckpoint(f"config.json of {TITLE} has no target_layer_ids: which layers it reads is not known")
