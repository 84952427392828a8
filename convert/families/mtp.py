"""MTP heads, which Qwen, DeepSeek and GLM publish inside a target's checkpoint.

Our names for all of them (D hidden, V vocabulary; DeepSeek-V3, arXiv 2412.19437, section 2.2):
    norm_embedding.weight [D], norm_hidden.weight [D]   norms of the two inputs
    fc.weight [D, 2D]                                   columns of the embedding, then of the hidden state
    layers.0.*                                          a decoder layer, by mlx-lm's names
    norm.weight [D]                                     before the LM head, and before the next draft step
    embed_tokens.weight, lm_head.weight [V, D]          only where they differ from the target's

In Qwen3-Next, Qwen3.5 and Qwen3.6 the head is `mtp.*`, a full-attention layer with an output gate. Folders
without that prefix or with stacked experts are read, too. In DeepSeek-V3 and GLM-4.5 it is one more decoder
layer after the L layers of the target, `model.layers.{L}.*`, with copies of the target's tables.
"""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx
import numpy as np

from mlx_spec.checkpoint.config import text_config
from mlx_spec.checkpoint.files import one_line, shortened
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.drafters.layers import add_tables
from mlx_spec.drafters.mtp import MTPNetwork
from mlx_spec.errors import BadCheckpoint

from . import common
from .common import Converted, Prefixes, PublishedTensors, Tensors

COPIES = {  # our name -> names of the same table in the target; the first that it has counts
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "lm_head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}
SPELLINGS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("model.mtp.", "mtp."),
)
CONVENTIONS = Conventions(hidden="post_norm", chain="post_norm")
quantizable = common.all_but("fc.weight", "mlp.gate.weight", "shared_expert_gate.weight")

QWEN_TITLE, QWEN_KEY = "the Qwen MTP head", "mtp_num_hidden_layers"
NEXTN_KEY = "num_nextn_predict_layers"


# --- all heads


def _read_head(
    title: str, origin: str, tensors: Tensors, config: Config, prefix: str, further: str, renames: Prefixes
) -> PublishedTensors:
    """Return the tensors below `prefix`; experts are stacked and latent K and V split, as mlx-lm does.

    `origin` names repositories with complete checkpoints, for errors. Raises BadCheckpoint for a head that
    was stripped, and for a head with several layers, which has tensors below `further`.
    """
    names = [common.spelled(name, SPELLINGS) for name in tensors]
    if not any(name.startswith(prefix) for name in names):
        raise BadCheckpoint(
            f"{title} was stripped, the checkpoint has no {prefix}* although its config.json promises them: "
            f"take the original repository ({origin})"
        )
    if any(name.startswith(further) for name in names):
        raise BadCheckpoint(f"{title} has several MTP layers: this version converts heads of one layer")
    text, below = text_config(config), [(prefix + theirs, ours) for theirs, ours in renames]
    try:
        source = common.read(title, tensors, config, SPELLINGS, below, in_target=True)
        _stack_experts(source, int(text.get("num_experts") or text.get("n_routed_experts") or 0))
        _split_latent(source, text)
    except (ValueError, KeyError) as error:  # shapes or sizes do not agree
        raise BadCheckpoint(
            f"{title} has other tensors than its config.json says ({one_line(error)}): weights and "
            "config.json belong to different models"
        ) from error
    return source


def _stack_experts(source: PublishedTensors, count: int) -> None:
    """Stack the routed experts into one tensor for each projection, from any form of checkpoint."""
    tensors, parts, mlp = source.tensors, ("gate_proj", "up_proj", "down_proj"), "layers.0.mlp."
    fused = [f"{mlp}experts.gate_up_proj", f"{mlp}experts.down_proj"]
    if not tensors.keys().isdisjoint(fused):
        source.refuse_missing(set(fused) - tensors.keys(), len(source.names))
        stacked = [*mx.split(tensors.pop(fused[0]), 2, axis=-2), tensors.pop(fused[1])]
    elif any(name.startswith(f"{mlp}experts.") for name in tensors):
        if count > len(tensors):
            raise ValueError(f"{count} experts")
        names = [[f"{mlp}experts.{i}.{part}.weight" for i in range(count)] for part in parts]
        missing = {name for group in names for name in group} - tensors.keys()
        source.refuse_missing(missing, len(source.names))
        stacked = [mx.stack([tensors.pop(name) for name in group]) for group in names]
    else:  # stacked already, or no experts
        return
    for part, array in zip(parts, stacked, strict=True):
        tensors[f"{mlp}switch_mlp.{part}.weight"] = array


def _split_latent(source: PublishedTensors, text: Config) -> None:
    """Split kv_b_proj of multi-head latent attention into mlx-lm's embed_q and unembed_out."""
    if text.get("kv_lora_rank"):
        name = "layers.0.self_attn.kv_b_proj.weight"
        source.refuse_missing({name} - source.tensors.keys(), len(source.names))
        heads = source.tensors.pop(name).reshape(text["num_attention_heads"], -1, text["kv_lora_rank"])
        keys, values = heads[:, : text["qk_nope_head_dim"]], heads[:, text["qk_nope_head_dim"] :]
        source.tensors["layers.0.self_attn.embed_q.weight"] = mx.contiguous(keys.swapaxes(-1, -2))
        source.tensors["layers.0.self_attn.unembed_out.weight"] = mx.contiguous(values)


def _drop_copies(source: PublishedTensors, tensors: Tensors) -> None:
    """Drop tables that equal the target's tables in the same checkpoint. Reads both."""
    spelled = {common.spelled(name, SPELLINGS): name for name in tensors}
    for ours, candidates in COPIES.items():
        theirs = next((spelled[name] for name in candidates if name in spelled), None)
        if ours not in source.tensors or theirs is None:
            continue
        if bool(mx.array_equal(source.tensors[ours], tensors[theirs]).item()):
            source.drop(ours, f"a copy of the target's {theirs}")


def _finish(
    model_type: str,
    source: PublishedTensors,
    tensors: Tensors,
    config: Config,
    target: Config,
    notes: tuple[str, ...] = (),
) -> Converted:
    """Return the converted head. Raises Mismatch if it is made for another target."""
    layer = common.own_config(config)
    sizes = {key: common.size(layer, key, source.title) for key in ("hidden_size", "vocab_size")}
    common.check_fit(source.title, sizes, target)
    _drop_copies(source, tensors)
    tables = sorted(source.tensors.keys() & COPIES.keys())
    written = common.config_of(
        model_type,
        CONVENTIONS,
        target,
        layer_type=layer.get("model_type", text_config(target).get("model_type")),
        text_config=layer,
    )
    network = MTPNetwork(written, CONVENTIONS)
    add_tables(network, tables, sizes["hidden_size"], sizes["vocab_size"], sizes["vocab_size"])
    notes = (*notes, f"own {', '.join(tables)}") if tables else notes
    return common.finish(source, network, written, quantizable, notes)


# --- Qwen


def _recognizes_qwen(config: Config, names: Collection[str]) -> bool:
    text = text_config(config)
    kinds = (str(config.get("model_type")), str(text.get("model_type")))
    promised = bool(text.get(QWEN_KEY)) or any("mtp." in name or "pre_fc_norm" in name for name in names)
    return promised and any(kind.startswith(("qwen3_next", "qwen3_5", "qwen3_6")) for kind in kinds)


def _convert_qwen(tensors: Tensors, config: Config, target: Config) -> Converted:
    prefix = "" if "pre_fc_norm_hidden.weight" in tensors else "mtp."
    origin, further = "Qwen/..., in full precision", f"{prefix}layers.1."
    renames = (
        ("pre_fc_norm_embedding.", "norm_embedding."),
        ("pre_fc_norm_hidden.", "norm_hidden."),
        ("", ""),
    )
    source = _read_head(QWEN_TITLE, origin, tensors, config, prefix, further, renames)
    notes = _fold_norms(source)
    return _finish("qwen_mtp", source, tensors, config, target, notes)


def _fold_norms(source: PublishedTensors) -> tuple[str, ...]:
    """Fold the 1 of (1 + w) into norm weights that lack it. Return a note for each group.

    Other converters fold the 1 in, forget it, or do it twice; the values show which. Folding in bfloat16
    rounds by up to 1 in 256, as the norm rounds its output, and mlx-lm the target's norms; `--dtype float32`
    loses nothing. Raises BadCheckpoint if the 1 was added twice.
    """
    notes, tensors = [], source.tensors
    groups = {  # other converters add the 1 to all norms of a group or to none of them
        "layer": (
            "layers.0.input_layernorm.weight",
            "layers.0.post_attention_layernorm.weight",
            "layers.0.self_attn.q_norm.weight",
            "layers.0.self_attn.k_norm.weight",
        ),
        "head": ("norm_embedding.weight", "norm_hidden.weight", "norm.weight"),
    }
    for group, names in groups.items():
        source.refuse_missing(set(names) - tensors.keys(), len(source.names))
        middle = float(np.median([np.median(np.array(tensors[n].astype(mx.float32))) for n in names]))
        # Trained weights stay close to their first value: 0, or 1 with the 1 of (1 + w), or 2 with it twice.
        if middle >= 1.5:
            raise BadCheckpoint(
                f"{QWEN_TITLE} has norm weights around {middle:.1f} ({shortened(list(names))}), where 0 or 1 "
                "belongs: the 1 of their (1 + w) was added twice; convert it from the original repository"
            )
        dtype = str(tensors[names[0]].dtype).removeprefix("mlx.core.")
        done = "plain, kept"
        if middle < 0.5:
            tensors.update({name: tensors[name] + 1 for name in names})
            done = f"zero-centred, 1 folded in, in {dtype}"
        notes.append(f"norm weights of the {group}: median {middle:.2f}, {done}")
    return tuple(notes)


# --- DeepSeek and GLM


def _nextn_of(config: Config, names: Collection[str]) -> str | None:
    """Return our model_type of a head that is one more layer of the target; None for other checkpoints."""
    text = text_config(config)
    kinds = {config.get("model_type"), text.get("model_type")}
    promised = bool(text.get(NEXTN_KEY)) or any(name.endswith("eh_proj.weight") for name in names)
    ours = (name for name, (_, _, model_types) in NEXTN.items() if kinds & set(model_types))
    return next(ours, None) if promised else None


def _convert_nextn(
    name: str, title: str, origin: str, tensors: Tensors, config: Config, target: Config
) -> Converted:
    text = text_config(config)
    if text.get("index_n_heads"):
        raise BadCheckpoint(
            f"{title} of a {text.get('model_type') or config.get('model_type')} attends through an indexer "
            f"(index_n_heads {text['index_n_heads']}), which this version cannot run: convert its target "
            "with --drafter none, or with another drafter"
        )
    depth = common.size(text, "num_hidden_layers", title)
    prefix, further = f"model.layers.{depth}.", f"model.layers.{depth + 1}."
    renames = (
        ("enorm.", "norm_embedding."),
        ("hnorm.", "norm_hidden."),
        ("eh_proj.", "fc."),
        ("shared_head.norm.", "norm."),
        ("shared_head.head.", "lm_head."),
        ("embed_tokens.", "embed_tokens."),
        ("", "layers.0."),
    )
    source = _read_head(title, origin, tensors, config, prefix, further, renames)
    return _finish(name, source, tensors, config, target)


# --- Qwen, DeepSeek and GLM

NEXTN = {  # our model_type -> (title, origin, model types of targets)
    "deepseek_mtp": ("the DeepSeek MTP head", "deepseek-ai/...", ("deepseek_v3", "deepseek_v32")),
    "glm_mtp": (
        "the GLM MTP head",
        "zai-org/...",
        ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm4v_moe", "glm4v_moe_text"),
    ),
}


def recognizes(config: Config, names: Collection[str]) -> bool:
    """Return True for a target with a known MTP head, and for such a head alone."""
    return _recognizes_qwen(config, names) or _nextn_of(config, names) is not None


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a head. Raises BadCheckpoint and Mismatch."""
    heads = {key: value for key, value in text_config(config).items() if "mtp" in key or "nextn" in key}
    common.refuse_switches("the MTP head", heads, (QWEN_KEY, NEXTN_KEY))
    if _recognizes_qwen(config, tensors.keys()):
        return _convert_qwen(tensors, config, target)
    name = _nextn_of(config, tensors.keys())
    if name is None:
        raise BadCheckpoint(
            f"the MTP head of a {config.get('model_type')} is not known, only Qwen, DeepSeek and GLM"
        )
    title, origin, _ = NEXTN[name]
    return _convert_nextn(name, title, origin, tensors, config, target)
