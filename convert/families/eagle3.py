"""EAGLE-3 (arXiv 2503.01840): one layer that reads an embedding and three of the target's layers.

Read from safetensors of SafeAILab, SpecForge and speculators. Ours (D hidden, T hidden of the target, n
captured layers, V vocabulary, W <= V draft vocabulary):
    fc.weight [D, nT]; input_norm.weight [nT] or fc_norm.{i}.weight [T] where its input is normed
    layers.0.{input_layernorm,hidden_norm}.weight [D]   norms of the embedding and of the hidden
    layers.0.self_attn.{q,k,v}_proj.weight [.., 2D], o_proj; layers.{i}.* of width D; mlp.*, norms
    norm.weight [D], lm_head.weight [W, D], embed_tokens.weight [V, D]
    draft_ids [W] int32   the target's id of each draft id; sources call it d2t and store offsets
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_spec.convert.families import blocks
from mlx_spec.convert.families.conventions import Conventions, config_of
from mlx_spec.convert.families.family import Config, Converted, Family, Tensors
from mlx_spec.convert.families.fit import check_fit, check_layers, own_config, size, target_size
from mlx_spec.convert.families.table import Row, Sizes, Source, all_but, finished, same, spell, take, under
from mlx_spec.convert.families.vocabulary import INVERSE, draft_ids

NAME, TITLE = "eagle3", "the EAGLE-3 drafter"
SPELLINGS = (("model.", ""), ("midlayer.", "layers.0."))
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
VERIFIER = "the target's own"
TARGETS = {"verifier_norm.weight": VERIFIER, "verifier_lm_head.weight": VERIFIER}
HEAD = (
    same("fc.weight", "hidden fused"),
    same("norm.weight", "hidden"),
    same("embed_tokens.weight", "vocab hidden", optional=True),
    same("t2d", "vocab", optional=True),
)
quantizable = all_but("fc.weight")


@dataclass(frozen=True)
class Drafter:
    """What the config.json files say of a drafter of this shape."""

    title: str
    layer: dict[str, Any]  # config of its layers
    top: Config
    capture: tuple[int, ...]  # layer outputs
    note: str  # how the layer ids were read
    sizes: Sizes


def recognises(config: Config, names: Collection[str]) -> bool:
    """A config that says so, or the fusing projection beside a `midlayer` or a map of vocabularies."""
    if config.get("speculators_model_type") is not None:
        return bool(config["speculators_model_type"] == NAME)
    if any("eagle3" in str(name).lower() for name in config.get("architectures") or ()):
        return True
    marked = any("midlayer." in name or name.endswith("d2t") for name in names)
    return marked and any(name in ("fc.weight", "model.fc.weight") for name in names)


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """An EAGLE-3 drafter in our form. Raises BadCheckpoint and Mismatch."""
    return assemble(NAME, read(TITLE, config, target), tensors, target)


def read(title: str, config: Config, target: Config) -> Drafter:
    """What `config` and `target` say. Raises Mismatch where they contradict each other."""
    nested = config.get("transformer_layer_config")
    layer = dict(nested) if isinstance(nested, Mapping) else own_config(config)
    hidden, vocab = size(layer, "hidden_size", title), size(layer, "vocab_size", title)
    theirs = int(config.get("target_hidden_size") or hidden)
    check_fit(title, {"hidden_size": theirs, "vocab_size": vocab}, target)
    capture, note = captured(config, target_size(target, "num_hidden_layers"))
    check_layers(title, capture, target)
    sizes = {
        **blocks.attention_sizes(layer, title),
        "hidden": hidden,
        "2hidden": 2 * hidden,
        "inner": size(layer, "intermediate_size", title),
        "target": theirs,
        "fused": len(capture) * theirs,
        "vocab": vocab,
        "draft": int(config.get("draft_vocab_size") or vocab),
        "one": 1,
    }
    return Drafter(title, layer, config, capture, note, sizes)


def captured(config: Config, layers: int) -> tuple[tuple[int, ...], str]:
    """The layer outputs that fc reads, of a target of `layers`, and how they were found.

    vLLM and speculators number a layer's input, SGLang (`eagle_config`) its output; both default to the
    inputs of layers 2, L // 2 and L - 3, by which an explicit list is told apart where it can be.
    """
    default = (2, layers // 2, layers - 3)
    outputs = tuple(index - 1 for index in default)
    nested = config.get("eagle_config")
    inner = nested.get(LAYER_IDS) if isinstance(nested, Mapping) else None
    ids = tuple(config.get(LAYER_IDS) or inner or ())
    if not ids:
        return outputs, f"no {LAYER_IDS}: inputs of layers {list(default)}, the reference's"
    if ids != default and (ids == outputs or not config.get(LAYER_IDS)):
        return ids, f"{LAYER_IDS} {list(ids)} read as layer outputs"
    return tuple(index - 1 for index in ids), f"{LAYER_IDS} {list(ids)} read as layer inputs"


def rows(drafter: Drafter) -> tuple[Row, ...]:
    """The table of a drafter: what its config says it has."""
    top, layer, sizes = drafter.top, drafter.layer, drafter.sizes
    count = int(layer.get("num_hidden_layers") or 1)
    biases = blocks.QKV_BIASES if layer.get("attention_bias") else ()
    norms = tuple(replace(row, optional=True) for row in blocks.QK_NORMS)
    rest = (*blocks.NORMS, *biases, *norms, *blocks.dense())
    first = (*blocks.attention("2hidden"), same("hidden_norm.weight", "hidden"), *rest)
    table = [*HEAD, *under("layers.0.", "layers.0.", first)]
    for index in range(1, count):
        name = f"layers.{index}."
        table += under(name, name, (*blocks.attention(), *rest))
    if biases:
        table += [replace(row, optional=True) for row in _output_biases(count)]
    if top.get("norm_before_fc"):
        table.append(same("input_norm.weight", "fused"))
    if top.get("fc_norm"):
        table += [same(f"fc_norm.{index}.weight", "target") for index in range(len(drafter.capture))]
    reduced = sizes["draft"] != sizes["vocab"]
    table.append(same("lm_head.weight", "draft hidden", optional=not reduced))
    table.append(same("d2t", "draft", optional=not reduced))
    return tuple(table)


def assemble(
    name: str, drafter: Drafter, tensors: Tensors, target: Config, extra: tuple[Row, ...] = (), **fields: Any
) -> Converted:
    """The drafter's tensors by `rows` and `extra`, its maps resolved, its config with `fields`."""
    source = spell(drafter.title, tensors, drafter.top, SPELLINGS)
    taken = take((*rows(drafter), *extra), source, drafter.sizes)
    ours, notes = dict(taken.tensors), [drafter.note]
    d2t, t2d = ours.pop("d2t", None), ours.pop("t2d", None)
    if d2t is not None:
        ours["draft_ids"], note = draft_ids(drafter.title, d2t, t2d, drafter.sizes["vocab"])
        notes.append(note)
    dropped = _dropped(source, drafter, t2d)
    conventions = Conventions(
        hidden="layers",
        capture=drafter.capture,
        chain="post_norm" if drafter.top.get("norm_output") else "pre_norm",
        fc_order=("embedding", "hidden"),
    )
    config = config_of(
        name,
        conventions,
        target,
        layer_config=drafter.layer,
        draft_vocab_size=drafter.sizes["draft"],
        target_hidden_size=drafter.sizes["target"],
        norm_before_residual=bool(drafter.top.get("norm_before_residual")),
        norm_before_fc=bool(drafter.top.get("norm_before_fc")),
        fc_norm=bool(drafter.top.get("fc_norm")),
        **fields,
    )
    used = taken.used - dropped.keys()
    return finished(source, Converted(config, ours, used, dropped, quantizable, tuple(notes)))


def _output_biases(count: int) -> list[Row]:
    return [same(f"layers.{index}.self_attn.o_proj.bias", "hidden") for index in range(count)]


def _dropped(source: Source, drafter: Drafter, t2d: mx.array | None) -> dict[str, str]:
    reasons = dict(TARGETS)
    if t2d is not None:
        reasons["t2d"] = INVERSE
    if not drafter.top.get("norm_before_fc"):
        reasons["input_norm.weight"] = "norm_before_fc is off in its config.json"
    return {source.names[name]: why for name, why in reasons.items() if name in source.names}


EAGLE3 = Family(NAME, runnable=True, recognises=recognises, convert=convert)
