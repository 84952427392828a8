"""EAGLE-3 (arXiv 2503.01840) and P-EAGLE: read an embedding and target layers.

Read from safetensors of SafeAILab, SpecForge and speculators. Ours (D hidden, T hidden of the target, n
captured layers, V vocabulary, W <= V draft vocabulary):
    fc.weight [D, nT]; input_norm.weight [nT] or fc_norm.{i}.weight [T] where its input is normed
    layers.0.{input_layernorm,hidden_norm}.weight [D]   norms of the embedding and of the hidden
    layers.0.self_attn.{q,k,v}_proj.weight [.., 2D], o_proj; layers.{i}.* of width D; mlp.*, norms
    norm.weight [D], lm_head.weight [W, D], embed_tokens.weight [V, D]
    draft_ids [W] int32   the target's id of each draft id; sources call it d2t and store offsets

P-EAGLE (arXiv 2602.01469) is an EAGLE-3 of several layers that drafts in one pass. Ours has embed_tokens and
mask_hidden [nT], the feature of the rows for tokens that are not drafted yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub import catalog

from . import layers, table
from .table import Config, Converted, Family, Row, Sizes, Tensors

EAGLE3_TITLE, PEAGLE_TITLE = "the EAGLE-3 drafter", "the P-EAGLE drafter"
MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
SPELLINGS = (("model.", ""), ("midlayer.", "layers.0."))
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
HEAD = (table.same("fc.weight", "hidden fused"), table.same("norm.weight", "hidden"))
quantizable = table.all_but("fc.weight")


@dataclass(frozen=True)
class DraftConfig:
    """A drafter by its config.json and that of its target."""

    title: str
    layer: dict[str, Any]  # config of its layers
    top: Config
    capture: tuple[int, ...]  # layer outputs
    note: str  # how the layer ids were read
    sizes: Sizes


def convert_eagle3(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert an EAGLE-3 drafter. Raises BadCheckpoint and Mismatch."""
    return _assemble("eagle3", _read(EAGLE3_TITLE, config, target), tensors, target)


def convert_peagle(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a P-EAGLE drafter. Raises BadCheckpoint and Mismatch."""
    drafter = _read(PEAGLE_TITLE, config, target)
    mask = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    if mask is None or not str(mask).isdigit() or int(mask) >= drafter.sizes["vocab"]:
        raise BadCheckpoint(
            f"config.json of {PEAGLE_TITLE} has no mask token below its {drafter.sizes['vocab']} tokens "
            f"({', '.join(MASK_KEYS)}; found {mask!r}): take a complete checkpoint"
        )
    axes = next((tensor.ndim for name, tensor in tensors.items() if name.endswith("mask_hidden")), 3)
    form = " ".join(["one"] * (axes - 1) + ["fused"])
    row = Row("mask_hidden", "mask_hidden", form, lambda feature, sizes: (feature.reshape(-1),))
    return _assemble("peagle", drafter, tensors, target, (row,), mask_token_id=int(mask))


def _read(title: str, config: Config, target: Config) -> DraftConfig:
    """Read `config` and `target`. Raises Mismatch if they contradict each other."""
    layer = table.layer_config(config)
    capture, note = _captured(config, table.target_size(target, "num_hidden_layers"))
    sizes = layers.captured_sizes(layer, config, len(capture), target, title)
    table.check_layers(title, capture, target)
    sizes |= {"2hidden": 2 * sizes["hidden"], "one": 1}
    return DraftConfig(title, layer, config, capture, note, sizes)


def _captured(config: Config, depth: int) -> tuple[tuple[int, ...], str]:
    """Return the layer outputs that fc reads, of a target of `depth` layers, and a note.

    vLLM and speculators number a layer's input, SGLang (`eagle_config`) its output; both default to the
    inputs of layers 2, L // 2 and L - 3, which tells an explicit list apart.
    """
    default = (2, depth // 2, depth - 3)
    outputs = tuple(index - 1 for index in default)
    nested = config.get("eagle_config")
    inner = nested.get(LAYER_IDS) if isinstance(nested, Mapping) else None
    ids = tuple(config.get(LAYER_IDS) or inner or ())
    if not ids:
        return outputs, f"no {LAYER_IDS}: inputs of layers {list(default)}, the reference's"
    if ids != default and (ids == outputs or not config.get(LAYER_IDS)):
        return ids, f"{LAYER_IDS} {list(ids)} read as layer outputs"
    return tuple(index - 1 for index in ids), f"{LAYER_IDS} {list(ids)} read as layer inputs"


def _rows(drafter: DraftConfig) -> tuple[Row, ...]:
    top, layer, sizes = drafter.top, drafter.layer, drafter.sizes
    count = int(layer.get("num_hidden_layers") or 1)
    biases = layers.QKV_BIASES if layer.get("attention_bias") else ()
    norms = tuple(replace(row, optional=True) for row in layers.QK_NORMS)
    rest = (*layers.NORMS, *biases, *norms, *layers.dense())
    first = (*layers.attention("2hidden"), table.same("hidden_norm.weight", "hidden"), *rest)
    rows = [*HEAD, *table.under("layers.0.", "layers.0.", first)]
    for index in range(1, count):
        name = f"layers.{index}."
        rows += table.under(name, name, (*layers.attention(), *rest))
    if biases:
        names = [f"layers.{index}.self_attn.o_proj.bias" for index in range(count)]
        rows += [table.same(name, "hidden", optional=True) for name in names]
    if top.get("norm_before_fc"):
        rows.append(table.same("input_norm.weight", "fused"))
    if top.get("fc_norm"):
        rows += [table.same(f"fc_norm.{index}.weight", "target") for index in range(len(drafter.capture))]
    return (*rows, *layers.tables(sizes))


def _assemble(
    name: str,
    drafter: DraftConfig,
    tensors: Tensors,
    target: Config,
    extra: tuple[Row, ...] = (),
    **fields: Any,
) -> Converted:
    """Take the tensors by table and `extra`, and write a config with `fields`."""
    source = table.spell(drafter.title, tensors, drafter.top, SPELLINGS)
    taken = table.take((*_rows(drafter), *extra), source, drafter.sizes)
    ours = dict(taken.tensors)
    notes, dropped = table.resolve_map(source, ours, drafter.sizes["vocab"])
    if "input_norm.weight" in source.names and not drafter.top.get("norm_before_fc"):
        dropped[source.names["input_norm.weight"]] = "norm_before_fc is off in its config.json"
    conventions = Conventions(
        hidden="layers",
        capture=drafter.capture,
        chain="post_norm" if drafter.top.get("norm_output") else "pre_norm",
    )
    config = table.config_of(
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
    result = Converted(config, ours, taken.used, dropped, quantizable, (drafter.note, *notes))
    return table.finished(source, result)


EAGLE3 = Family("eagle3", convert_eagle3, catalog.EAGLE3)
PEAGLE = Family("peagle", convert_peagle, catalog.PEAGLE)
