"""Account for the tensors that mlx-lm's `sanitize` drops: a known reason, a warning, or an error."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlx_spec.checkpoint.config import text_config
from mlx_spec.checkpoint.files import shortened
from mlx_spec.checkpoint.owners import MULTI_TOKEN_HEAD, OWNERS, owner_of
from mlx_spec.checkpoint.targets import Config


def layer_of(name: str) -> int:
    """Return the decoder layer that a tensor belongs to, -1 for none."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def reason_left_out(name: str, config: Config) -> str | None:
    """Return why a language model does not need a tensor; None if no reason is known."""
    if (part := owner_of(name)) is not None:
        return OWNERS[part][1]
    text = text_config(config)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    if name.endswith("lm_head.weight") and tied:
        return "a copy of the embedding table"
    layers = int(text.get("num_hidden_layers") or sys.maxsize)
    if layer_of(name) >= layers:
        return MULTI_TOKEN_HEAD
    owner = re.search(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.", name)
    if owner and int(owner[1]) >= layers - int(text.get("num_kv_shared_layers") or 0):
        return "a layer that reuses K and V of an earlier one"
    return None


def check_dropped(config: Config, before: Mapping[str, mx.array], after: Mapping[str, mx.array]) -> None:
    """Compare the tensors of a checkpoint with the result of `sanitize`, without reading them.

    Raises ValueError if the bias of a router is dropped. Prints one line about other tensors that are dropped
    without a known reason.
    """
    stored, kept = {id(array) for array in before.values()}, {id(array) for array in after.values()}
    kinds: dict[str, str] = {}  # name with "#" for numbers -> one such tensor: all of a kind fare alike
    for name, array in before.items():
        if id(array) not in kept and reason_left_out(name, config) is None:
            kinds.setdefault(re.sub(r"\d+", "#", name), name)
    computed = [array for array in after.values() if id(array) not in stored]
    dropped = set(kinds.values()) - sources_of({name: before[name] for name in kinds.values()}, computed)
    # The bias of a router decides which experts a token gets.
    if biases := sorted(n for n in dropped if re.search(r"(correction|expert|router|gate)_bias$", n)):
        raise ValueError(
            f"mlx-lm leaves out {shortened(biases)}, so that tokens would go to other experts and the text "
            "would be another: use another model"
        )
    if dropped:
        print(
            f"mlx-lm leaves out {shortened(sorted(dropped))}: the text may differ from the original model's",
            file=sys.stderr,
        )


def sources_of(
    seen: Mapping[str, mx.array], results: Sequence[mx.array], named_at_once: int = 1000
) -> frozenset[str]:
    """Return the names of the arrays in `seen` on which `results` depend, without reading them.

    One call of MLX's export can name `named_at_once` arrays.
    """
    unchanged = {id(array) for array in results} & {id(array) for array in seen.values()}
    sources = {name for name, array in seen.items() if id(array) in unchanged}
    # The comparison gives each result a consumer: a source that is returned unchanged would have none.
    computed = [array == array for array in results if id(array) not in unchanged]
    others = [name for name in seen if name not in sources] if computed else []
    for start in range(0, len(others), named_at_once):
        graph = io.StringIO()
        named = {f"source:{name}": seen[name] for name in others[start : start + named_at_once]}
        mx.export_to_dot(graph, *computed, **named)
        sources.update(re.findall(r'^"source:(.*)" ->', graph.getvalue(), re.MULTILINE))
    return frozenset(sources)
