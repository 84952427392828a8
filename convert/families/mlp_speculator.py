"""MLP speculator (arXiv 2404.19124) and Arctic's LSTM variant: a small network after the target's last norm.

Reads safetensors of fms-extras and ArcticInference. Ours (D hidden of the target, I inner, V vocabulary; if
the steps are tied there is one i, and two for `proj`):
    emb.{i}.weight [V, I], proj.{i}.weight [I, D or I], ln.{i}.{weight,bias} [I], head.{i}.weight [V, I]
LSTM: proj.{i}.weight [4 I, D or I], the forget, input, output and cell gates in this order; cell_ln.0
"""

from __future__ import annotations

import re

import mlx.core as mx

from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import Conventions, Count
from mlx_spec.drafters.mlp_speculator import NETWORKS, SpeculatorSizes
from mlx_spec.errors import BadCheckpoint

from . import common
from .common import Converted, PublishedTensors, Tensors

TITLE = "the MLP speculator"


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert an MLP or LSTM speculator. Raises BadCheckpoint and Mismatch."""
    keys = (
        "emb_dim inner_dim proj_dim input_hidden_dim n_predict vocab_size tie_weights tie_lstm_embs "
        "scale_input method "
        "top_k_tokens_per_head n_candidates num_lookahead_tokens"  # for trees and servers: without effect
    )
    common.refuse_switches(TITLE, config, keys.split())
    method, tied = config.get("method") or "sum_rnn", bool(config.get("tie_weights"))
    if method not in ("sum_rnn", "sum_lstm"):
        raise BadCheckpoint(f"{TITLE} has method {method!r}: known are 'sum_rnn' and 'sum_lstm'")
    gated = method == "sum_lstm"
    if gated and not (tied and config.get("tie_lstm_embs")):
        raise BadCheckpoint(f"{TITLE} is an LSTM whose steps or embeddings are not tied: tied ones are known")
    hidden = _dim(config, "input_hidden_dim", gated) or _dim(config, "emb_dim", gated)
    inner, vocab = _dim(config, "inner_dim", gated) or hidden, common.size(config, "vocab_size", TITLE)
    common.check_fit(TITLE, {"hidden_size": hidden, "vocab_size": vocab}, target)
    steps = common.size(config, "n_predict", TITLE, Count)
    prefix = "speculator."
    renames = [(name, _ours(name)) for name in (name.removeprefix(prefix) for name in tensors)]
    source = common.read(TITLE, tensors, config, ((prefix, ""),), renames)
    if gated:
        _merge_gates(source)
    if tied:
        _drop_tied(source)
    name = "lstm_speculator" if gated else "mlp_speculator"
    written = common.config_of(
        name,
        Conventions(hidden="post_norm", rope="none"),
        target,
        inner_size=inner,
        steps=steps,
        tied=tied,
        scaled=bool(config.get("scale_input")),
    )
    network = NETWORKS[name](SpeculatorSizes.from_config(written))
    norms = tuple(f"ln.{step}.weight" for step in range(steps))
    return common.finish(source, network, written, common.all_but(*norms))


def _dim(config: Config, key: str, gated: bool) -> int:
    """Return a size; 0 if it is absent. A size may be a string, and a list with one size for each layer."""
    sizes = str(config.get(key) or 0).strip("[]").replace(",", ".").split(".")
    if not all(size.strip().isdigit() for size in sizes) or (len(sizes) > 1 and not gated):
        raise BadCheckpoint(f"config.json of {TITLE} has {key} {config[key]!r}: only one size is supported")
    return int(sizes[0])  # an LSTM reads only the first


def _ours(name: str) -> str:
    """Return our name of a tensor. Arctic's names have an additional ".0"."""
    match = re.fullmatch(r"(\w+)\.(\d+)(?:\.0)?\.(weight|bias)", name)
    part = {"forget_emb": "emb", "state_ln": "ln"}.get(match[1], match[1]) if match else ""
    return f"{part}.{match[2]}.{match[3]}" if match else name


def _merge_gates(source: PublishedTensors) -> None:
    """Join the projections of the gates, and drop the embeddings that repeat the first gate's."""
    tensors = source.tensors
    gates = ("forget", "input", "output", "cell")  # in the order of a projection
    names = [f"{gate}_proj.{step}.weight" for step in (0, 1) for gate in gates]
    source.refuse_missing({*names, "emb.0.weight"} - tensors.keys(), len(source.names))
    for step in (0, 1):
        parts = [tensors.pop(f"{gate}_proj.{step}.weight") for gate in gates]
        tensors[f"proj.{step}.weight"] = mx.concatenate(parts)
    for gate in gates[1:]:
        _drop_copy(source, f"{gate}_emb.0.weight", "emb.0.weight")


def _drop_tied(source: PublishedTensors) -> None:
    """Drop tensors that repeat the first step; for projections, the second step."""
    for name in sorted(source.tensors):
        part, step, kind = name.split(".") if name.count(".") == 2 else ("", "0", "")
        first = 1 if part == "proj" else 0
        if step.isdigit() and int(step) > first:
            _drop_copy(source, name, f"{part}.{first}.{kind}")


def _drop_copy(source: PublishedTensors, name: str, other: str) -> None:
    """Drop a tensor that is a copy of `other`. Raises BadCheckpoint if it is not."""
    tensors = source.tensors
    if not {name, other} <= tensors.keys():
        return  # `finish` names missing tensors
    if not mx.array_equal(tensors[name], tensors[other]).item():
        raise BadCheckpoint(
            f"{TITLE} has {source.names[name]}, which config.json says is tied, and it differs: the two "
            "belong to different models"
        )
    source.drop(name, f"a copy of {source.names[other]}")
