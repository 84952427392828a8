"""The DFlash family beside its authors' torch, and every reading of a checkpoint that would be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import fitted
from support.fitted import largest, opened
from support.synthetic import Checkpoint

from mlx_spec.drafters import DrafterSource, dflash
from mlx_spec.drafters.dflash import View
from mlx_spec.types import Features, TargetParts

GOLDEN = Path(__file__).parents[1] / "golden" / "dflash"
FACTS: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
HISTORY, BEGINS, CASES = FACTS["history"], FACTS["begins"], FACTS["cases"]
TOLERANCE = 1e-5


@cache
def golden() -> dict[str, mx.array]:
    return mx.load(str(GOLDEN / "golden.safetensors"))


class Given:
    """A sampler that draws the tokens it is given, the likeliest without them, and keeps the logits."""

    def __init__(self, tokens: mx.array | None = None) -> None:
        self.tokens, self.logits = tokens, list[mx.array]()

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        place = len(self.logits)
        self.logits.append(logits)
        chosen = logits.argmax(axis=-1) if self.tokens is None else self.tokens[place : place + 1]
        return chosen.astype(mx.int32), None


def published(case: str, **config: object) -> Checkpoint:
    tensors = mx.load(str(GOLDEN / f"{CASES[case]['weights']}.safetensors"))
    return Checkpoint(tensors, CASES[case]["config"] | config, fitted.target_config(5, 16, 40))


def opened_case(
    case: str, folder: Path, edit: Callable[[dict[str, Any]], object] = id, **config: object
) -> Any:
    return opened(published(case, **config), folder, edit)


def differences(
    case: str, source: DrafterSource, patch: pytest.MonkeyPatch, chunks: Sequence[int] = ()
) -> tuple[float, float]:
    """Return the largest difference of hidden states and of distributions over all rounds.

    The greedy path is compared where both are small.
    """
    g, history = golden(), HISTORY
    parts = TargetParts(lambda ids: g["embed"][ids], lambda x: x @ g["head"].T, lambda ids: lambda x: x)
    outputs = dict(zip(sorted(source.needs.hidden_layers), mx.split(g["features"], 3, axis=-1), strict=True))
    layers = [outputs[index] for index in source.needs.hidden_layers]
    drafter, start, result = source.make(parts), 0, [0.0, 0.0]
    hidden = list[mx.array]()
    follow = type(source.network).follow

    def recorded(self: Any, row: mx.array, *rest: Any) -> Any:
        hidden.append(row)
        return follow(self, row, *rest)

    patch.setattr(type(source.network), "follow", recorded)
    for i, begin in enumerate(BEGINS):
        for end in (*(chunk for chunk in chunks if start < chunk < begin - 1), begin - 1):
            drafter.observe(history[: end + 1], Features(tuple(layer[start:end] for layer in layers)))
            start = end
        tokens = g[f"{case}.tokens.{i}"]
        given, greedy = Given(tokens), Given()
        hidden.clear()
        drafter.draft(history[:begin], tokens.size, given)
        found = mx.concatenate(hidden)
        result[0] = max(result[0], largest(found, g[f"{case}.hidden.{i}"]))
        result[1] = max(result[1], largest(mx.softmax(mx.concatenate(given.logits), -1), g[f"{case}.q.{i}"]))
        path = drafter.draft(history[:begin], tokens.size, greedy).tokens.tolist()
        assert max(result) > TOLERANCE or path == g[f"{case}.path.{i}"].tolist()
    return result[0], result[1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunks", [(), (3, 4, 7)], ids=["whole", "chunks"])
def test_rounds_are_those_of_torch(case, chunks, monkeypatch, tmp_path):
    """Hidden states, greedy paths, and the distributions along a path that was drawn."""
    assert max(differences(case, opened_case(case, tmp_path), monkeypatch, chunks)) < TOLERANCE


def test_a_window_of_the_first_row_is_not_that_of_the_others(monkeypatch, tmp_path):
    def of_the_first(self: View, before: int, rows: int) -> tuple[int, mx.array | None]:
        low, _ = right(View(self.window, False), before, rows)
        return low, right(View(None, self.causal), before - low, rows)[1]

    right = View.mask
    monkeypatch.setattr(dflash.View, "mask", of_the_first)
    for case in ("sliding", "sliding, not causal"):
        assert differences(case, opened_case(case, tmp_path / case), monkeypatch)[0] > 1e-3


def edited(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        for key, value in changes.items():
            part = config["mlx_spec"] if key in config["mlx_spec"] else config
            part = config["layer_config"] if key in config["layer_config"] and key not in part else part
            part[key] = value

    return edit


# A case, and what a wrong reading makes of the converted config.json or of its network.
WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], None] | None, Callable[[Any], object]]] = {
    "shift": ("full", edited(shift=1), id),
    "order of the layers": ("full", edited(capture=[1, 0, 3]), id),
    "causal full layers": ("full", edited(causal=[True, True]), id),
    "sliding layers that are not causal": ("sliding", edited(causal=[False, False]), id),
    "sliding layers that are causal": ("sliding, not causal", edited(causal=[True, False]), id),
    "full layers that are not causal": ("causal", edited(causal=[True, False]), id),
    "another window": ("sliding", edited(sliding_window=7), id),
    "no window": ("sliding, not causal", edited(use_sliding_window=False), id),
}
for part in ("attention", "mlp"):
    for what, change in {
        "taps backwards": lambda x: x[:, ::-1],
        "kernels of input and output swapped": lambda x: x[::-1],
    }.items():

        def turn(network: Any, part: str = part, change: Callable[[mx.array], mx.array] = change) -> None:
            for layer in network.layers:
                layer[f"{part}_conv"].base_kernel = change(layer[f"{part}_conv"].base_kernel)

        WRONG[f"{part}: {what}"] = ("dflash2", None, turn)


def swap_codebooks(network: Any) -> None:
    selector = network.candidate_selector
    pair = selector.predecessor_codebook, selector.successor_codebook
    selector.successor_codebook, selector.predecessor_codebook = pair


def zero(name: str) -> Callable[[Any], None]:
    def change(network: Any) -> None:
        layer = network.markov_head[name]
        layer.weight = mx.zeros_like(layer.weight)

    return change


def first_before(network: Any) -> None:
    """Every slot follows the pending token."""
    head, seen = network.markov_head, list[mx.array]()

    def wrong(hidden: mx.array, before: mx.array, state: Any) -> Any:
        seen.append(before)
        return head(hidden, seen[len(seen) - 1 - (len(seen) - 1) % 4], state)

    network.markov_head = wrong


def no_state(network: Any) -> None:
    head = network.markov_head
    network.markov_head = lambda hidden, before, state: head(hidden, before, None)


def every_layer(**values: Any) -> Callable[[Any], None]:
    def change(network: Any) -> None:
        for layer in network.layers:
            for key, value in values.items():
                owner = layer if key in layer else layer.self_attn
                setattr(owner, key, value)

    return change


def set_all(**values: Any) -> Callable[[Any], None]:
    return lambda network: [setattr(network, key, value) for key, value in values.items()]


def pop(*names: str) -> Callable[[Any], None]:
    return lambda network: [network.pop(name) for name in names]


WRONG |= {
    "codebooks swapped": ("dflash2", None, swap_codebooks),
    "another top k": ("dflash2", edited(selector_top_k=4), id),
    "no bias": ("dspark", None, zero("markov_w2")),
    "no gate": ("dspark, gated", None, zero("gate_proj")),
    "no state": ("dspark, rnn", None, no_state),
    "the first slot drafts nothing": ("dspark", edited(shift=0, block_size=5), id),
    "every slot follows the pending token": ("dspark", None, first_before),
    "the target's head": ("dspark", None, pop("lm_head")),
    "the target's embedding": ("dspark", None, pop("embed_tokens")),
    "an unscaled embedding": ("gemma4_dspark", None, set_all(_scale=1.0)),
    "no softcap": ("gemma4_dspark", None, set_all(_softcap=None)),
    "no scalar of a layer": ("gemma4_dspark", None, every_layer(layer_scalar=1.0)),
    "a scale of attention": ("gemma4_dspark", None, every_layer(_scale=0.25)),
    "a whole rotation": (
        "gemma4_dspark",
        edited(rope_parameters={"rope_type": "default", "rope_theta": 1e3}),
        id,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reading_moves_a_number(name, monkeypatch, tmp_path):
    case, edit, change = WRONG[name]
    source = opened_case(case, tmp_path, edit or id)
    change(source.network)
    assert max(differences(case, source, monkeypatch)) > 1e-3


# --- what config.json says

CAUSAL: list[tuple[dict[str, Any], list[bool]]] = [
    ({}, [True, False]),
    ({"is_causal": False}, [False, False]),
    ({"is_causal": True}, [True, True]),
    ({"dflash_config": {"causal": True}}, [True, True]),
    ({"dflash_config": {"causal": False}}, [False, False]),
    ({"sliding_window_non_causal": False}, [True, False]),
    ({"sliding_window_non_causal": True}, [False, False]),
    ({"speculators_model_type": "dflash"}, [False, False]),
    ({"speculators_model_type": "dflash", "sliding_window_non_causal": False}, [True, False]),
]


@pytest.mark.parametrize(("said", "causal"), CAUSAL)
def test_who_is_causal(said, causal, tmp_path):
    config = CASES["sliding"]["config"]
    special = config["dflash_config"] | said.get("dflash_config", {})
    made = published("sliding", **{**said, "dflash_config": special})
    source = opened(made, tmp_path)
    assert [layer.self_attn._view.causal for layer in source.network.layers] == causal
    assert [layer.self_attn._view.window for layer in source.network.layers] == [8, None]


SPECFORGE = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
ANCHORS: list[tuple[dict[str, Any], int]] = [
    ({}, 1),  # DeepSpec does not say it
    ({"architectures": ["DSparkDraftModel"], "dflash_config": SPECFORGE}, 0),
    ({"architectures": ["DSparkDraftModel"], "sample_from_anchor": True}, 1),
    ({"architectures": ["DSparkDraftModel"], "dflash_config": {"sample_from_anchor": True}}, 1),
    ({"sample_from_anchor": False}, 0),
    ({"dspark_bonus_anchor": True}, 0),
    ({"architectures": ["DSparkDraftModel"], "dspark_bonus_anchor": False}, 1),
]


@pytest.mark.parametrize(("said", "shift"), ANCHORS)
def test_which_slot_drafts_first(said, shift, tmp_path):
    """A block is as long in both layouts; without the pending token's slot it drafts one token less."""
    source = opened_case("dspark", tmp_path, **said)
    g = golden()
    parts = TargetParts(lambda ids: g["embed"][ids], lambda x: x @ g["head"].T, lambda ids: lambda x: x)
    drafter = source.make(parts)
    drafter.observe(HISTORY[:9], Features(tuple(mx.split(g["features"][:8], 3, axis=-1))))
    assert drafter.draft(HISTORY[:9], 16, Given()).tokens.size == 3 + shift
