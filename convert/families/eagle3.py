"""EAGLE-3 (arXiv 2503.01840) and P-EAGLE, which read embeddings and outputs of target layers.

Read from safetensors of SafeAILab, SpecForge and speculators. Ours (D hidden, T hidden of the target, n
captured layers, V vocabulary, W <= V draft vocabulary):
    fc.weight [D, nT]; input_norm.weight [nT] or fc_norm.{i}.weight [T] if the input of fc is normed
    layers.0.{input_layernorm,hidden_norm}.weight [D]   norms of the embedding and of the hidden state
    layers.0.self_attn.{q,k,v}_proj.weight [.., 2D], o_proj; layers.{i}.* of width D; mlp.*, norms
    norm.weight [D], lm_head.weight [W, D], embed_tokens.weight [V, D]
    draft_ids [W] int32   the target's id of each draft id; sources call it d2t and store offsets

P-EAGLE (arXiv 2602.01469) is an EAGLE-3 with several layers that drafts in one pass. Ours also has
embed_tokens, and mask_hidden [nT], which stands for the target's features in rows of tokens that are not
drafted yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_spec.checkpoint.config import text_config
from mlx_spec.checkpoint.files import one_line
from mlx_spec.checkpoint.rope_formulas import stated_ropes, stated_rotation
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.drafters.eagle3 import Eagle3Network
from mlx_spec.errors import BadCheckpoint
from mlx_spec.types import SLIDING

from . import common
from .common import Converted, Tensors

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
KEYS = {
    *common.LAYER_KEYS,
    *"norm_before_residual norm_before_fc fc_norm norm_output draft_vocab_size target_hidden_size "
    "mask_token_id ptd_token_id pard_token".split(),
    LAYER_IDS,
}


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert an EAGLE-3 drafter. Raises BadCheckpoint and Mismatch."""
    return _convert("eagle3", "the EAGLE-3 drafter", tensors, config, target)


def convert_peagle(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a P-EAGLE drafter. Raises BadCheckpoint and Mismatch."""
    title, keys = "the P-EAGLE drafter", ("mask_token_id", "ptd_token_id", "pard_token")
    vocab = common.size(common.layer_config(config), "vocab_size", title)
    mask = next((config[key] for key in keys if config.get(key) is not None), None)
    if mask is None or not str(mask).isdigit() or int(mask) >= vocab:
        raise BadCheckpoint(
            f"config.json of {title} has no mask token below its {vocab} tokens "
            f"({', '.join(keys)}; found {mask!r}): take a complete checkpoint"
        )
    flat = {name: t.reshape(-1) if name.endswith("mask_hidden") else t for name, t in tensors.items()}
    return _convert("peagle", title, flat, config, target, mask_token_id=int(mask))


def _convert(
    name: str, title: str, tensors: Tensors, config: Config, target: Config, **fields: Any
) -> Converted:
    layer, nested = common.layer_config(config), config.get("eagle_config") or {}
    for settings in (config, layer, nested):
        common.refuse_switches(title, settings, {*KEYS, "eagle_config", "transformer_layer_config"})
    if SLIDING in (layer.get("layer_types") or ()):
        raise BadCheckpoint(
            f"{title} has layer_types with a sliding window: only full attention is supported"
        )
    capture, note = _captured(config, common.target_size(target, "num_hidden_layers"))
    config = {**nested, **{key: value for key, value in config.items() if value is not None}}
    sizes = common.check_captured(title, config, capture, target)
    source = common.read(title, tensors, config, (("model.", ""), ("midlayer.", "layers.0.")))
    vocab = common.size(layer, "vocab_size", title)
    notes = common.resolve_map(source, vocab, sizes["draft_vocab_size"])
    chain = "post_norm" if config.get("norm_output") else "pre_norm"
    layer, is_own, rope_note = _own_rope(layer, target)
    rope = "own" if is_own else "target"
    conventions = Conventions(hidden="layers", capture=capture, chain=chain, rope=rope)
    named = ("norm_before_residual", "norm_before_fc", "fc_norm")
    switches = {key: bool(config.get(key)) for key in named}
    written = common.config_of(name, conventions, target, layer_config=layer, **sizes, **switches, **fields)
    return common.finish_layers(source, Eagle3Network, written, target, (note, *notes, *rope_note))


def _own_rope(layer: Config, target: Config) -> tuple[dict[str, Any], bool, tuple[str, ...]]:
    """Return the config of the layers, whether their rotary embedding is not the target's, and a note.

    A base or scaling that the drafter states holds, as for its authors and vLLM; else the target's does.
    """
    text = text_config(target)
    theirs, stated = stated_ropes(text), stated_ropes(layer).get(None) or {}
    scaling = layer.get("rope_scaling") or layer.get("rope_parameters")
    if None not in theirs or (stated.get("rope_theta") is None and not scaling):
        return dict(layer), False, ()
    base = stated.get("rope_theta") or theirs[None]["rope_theta"]
    if "rope_scaling" not in layer and not scaling:
        scaling = text.get("rope_scaling") or text.get("rope_parameters")
    longest = layer.get("max_position_embeddings") or text.get("max_position_embeddings")
    written = {**layer, "rope_theta": base, "rope_scaling": scaling, "max_position_embeddings": longest}
    written.pop("rope_parameters", None)
    dims = int(layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"])
    try:
        (mine,) = stated_ropes(written).values()
        if stated_rotation(mine, dims).is_near(stated_rotation(theirs[None], dims)):
            return dict(layer), False, ()
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BadCheckpoint(
            f"the drafter's rotary parameters {scaling} cannot be used ({one_line(error)}): correct them"
        ) from error
    words = (f"{rope['rope_type']}, base {rope['rope_theta'] or 1e4:g}" for rope in (mine, theirs[None]))
    return written, True, ("rotary embedding of its own config.json: {}; the target has {}".format(*words),)


def _captured(config: Config, depth: int) -> tuple[tuple[int, ...], str]:
    """Return the layer outputs that fc reads, of a target of `depth` layers, and a note.

    vLLM and speculators number the inputs of layers, SGLang (`eagle_config`) the outputs. Both default to the
    inputs of layers 2, L // 2 and L - 3. So an explicit list of these layers shows what is numbered. NVIDIA
    numbers inputs in `eagle_config`, too; there the id L occurs, which cannot be an output.
    """
    default = (2, depth // 2, depth - 3)
    outputs = tuple(index - 1 for index in default)
    nested = config.get("eagle_config")
    inner = nested.get(LAYER_IDS) if isinstance(nested, Mapping) else None
    ids = tuple(config.get(LAYER_IDS) or inner or ())
    if not ids:
        return outputs, f"no {LAYER_IDS}: inputs of layers {list(default)}, the reference's"
    if ids != default and depth not in ids and (ids == outputs or not config.get(LAYER_IDS)):
        return ids, f"{LAYER_IDS} {list(ids)} read as layer outputs"
    return tuple(index - 1 for index in ids), f"{LAYER_IDS} {list(ids)} read as layer inputs"
