"""The Gemma 4 assistant against transformers' numbers, at work with its target, and at the door."""

from __future__ import annotations

import copy
import dataclasses
import json
import weakref
from functools import cache
from pathlib import Path

import lossless
import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import read
from fitted import largest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

import mlx_spec
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.drafters.gemma4 import Gemma4Assistant, visible_rows
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Features

GOLDEN = Path(__file__).parents[1] / "golden"
VARIANTS = ("e2b", "e4b", "26b", "31b", "12b")
TRAINED = tuple(f"{variant}-trained" for variant in VARIANTS)
CASES = ("short", "long")
VOCAB = 512
TOLERANCE = 1e-4


def config_of(pair: str, part: str) -> dict:
    return read(GOLDEN / pair / part)


def open_pair_drafter(pair: str) -> DrafterSource:
    source = open_drafter(
        GOLDEN / pair / "assistant", config_of(pair, "assistant"), config_of(pair, "target")
    )
    source.network.set_dtype(mx.float32)
    return source


@cache
def load(pair: str) -> tuple[nn.Module, DrafterSource]:
    model, _ = load_model(GOLDEN / pair / "target")
    model.set_dtype(mx.float32)
    return model, open_pair_drafter(pair)


@cache
def golden(pair: str, case: str) -> tuple[dict, dict[str, mx.array]]:
    tensors = mx.load(str(GOLDEN / pair / "golden.safetensors"))
    found = {name.replace(f".{case}", ""): array for name, array in tensors.items() if f".{case}" in name}
    return json.loads((GOLDEN / pair / "golden.json").read_text())["cases"][case], found


# --- the same numbers as transformers


def write_whole(target: LMTarget, ids: list[int]) -> Features:
    """The last row apart: of a prompt the assistant reads no hidden states."""
    assert target.prefill(ids[:-1]).final_hidden is None
    target.verify(mx.array(ids[-1:]))
    return target.commit(1)


def write_in_pieces(target: LMTarget, ids: list[int]) -> Features:
    """Chunks, a rejected trial, a partly accepted one, single steps."""
    target.prefill(ids[:4])
    target.prefill(ids[4:-5])
    target.verify(mx.array([7, 8, 9]))
    target.commit(0)
    target.verify(mx.array([*ids[-5:-3], 7, 7, 7]))
    target.commit(2)
    for token in ids[-3:-1]:
        target.verify(mx.array([token]))
        target.commit(1)
    target.verify(mx.array([ids[-1], 5]))
    return target.commit(1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pair", [*VARIANTS, *TRAINED])
def test_target(pair, case):
    facts, tensors = golden(pair, case)
    target = LMTarget(load(pair)[0], Gemma4Assistant.needs)
    logits = target.verify(mx.array(facts["ids"]))
    features = target.commit(len(facts["ids"]))
    assert largest(logits, tensors["target.logits"]) < TOLERANCE
    assert largest(features.final_hidden, tensors["target.hidden"]) < TOLERANCE


@pytest.mark.parametrize("write", [write_whole, write_in_pieces])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pair", [*VARIANTS, *TRAINED])
def test_three_steps(pair, case, write):
    facts, tensors = golden(pair, case)
    model, source = load(pair)
    target = LMTarget(model, source.needs)
    features = write(target, facts["ids"])
    expected = {key: tensors[f"draft.pos0_exact.{key}"] for key in ("logits", "dense", "hidden", "tokens")}
    network, shared = source.network, visible_rows(features.shared_kv(), source.make(target.parts)._window)
    hidden, token = features.final_hidden[-1:], facts["greedy"][0]
    for step in range(3):
        embedded = target.parts.embed(mx.array([token]))
        hidden, normed = network(embedded, hidden, mx.array(facts["length"]), shared)
        logits, token = network.logits(normed)[0], facts["drafts"][step]
        assert logits.argmax().item() == token
        assert largest(hidden[0], expected["hidden"][step]) < TOLERANCE
        unselected = expected["logits"][step].min() if "masked_embedding" in network else -mx.inf
        selected = expected["logits"][step] > unselected
        assert mx.array_equal(logits > -mx.inf, selected)
        assert (
            largest(mx.where(selected, logits, 0), mx.where(selected, expected["logits"][step], 0))
            < TOLERANCE
        )
        dense = network.model.embed_tokens.as_linear(normed)[0]
        order = network.masked_embedding.token_ordering if "masked_embedding" in network else slice(None)
        assert largest(dense, expected["dense"][step][order]) < TOLERANCE


# --- at work


def speculate(pair: str, case: str, K: int, count: int = 207) -> list:
    """Rounds behind the first greedy token, which comes without a draft: where the golden rounds begin."""
    model, source = load(pair)
    target = LMTarget(model, source.needs)
    facts = golden(pair, case)[0]
    first, *done = lossless.rounds(target, source.make(target.parts), K, facts["ids"], count + 1, VOCAB)
    assert first.tokens == facts["greedy"][:1] and not first.drafted
    return done


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pair", TRAINED)
def test_rounds_are_those_of_an_exact_engine(pair, case):
    facts, done = golden(pair, case)[0], speculate(pair, case, 3)
    accepted = [round.accepted for round in done]
    assert lossless.emitted(done) == facts["greedy"][1:]
    assert accepted[: len(facts["accepted"])] == facts["accepted"]
    assert {0, 1, 3} <= set(accepted)


@pytest.mark.parametrize("K", [0, 1, 4, 7])
@pytest.mark.parametrize("pair", [*VARIANTS, *TRAINED])
def test_same_tokens_as_plain_decoding(pair, K):
    """Also where all drafts fail, as those of random weights do."""
    facts, done = golden(pair, "long")[0], speculate(pair, "long", K, 40)
    accepted = sum(round.accepted for round in done)
    assert lossless.emitted(done) == facts["greedy"][1:41]
    assert not K or (accepted > 10 if pair in TRAINED else accepted <= 2)


PROMPTS = ["The capital of", "def fib(n):\n    if n", "one two three four five six seven eight nine ten"]


# The mixture of experts is missing: on the CPU MLX gathers expert weights in float32 only.
@pytest.mark.parametrize("pair", ["e2b-trained", "e4b-trained", "12b-trained", "31b-trained"])
def test_bfloat16_text_is_the_same_with_and_without_the_drafter(pair: str) -> None:
    target, drafter = GOLDEN / pair / "target", GOLDEN / pair / "assistant"
    drafted = mlx_spec.load(target, drafter, num_draft_tokens=3)
    plain = mlx_spec.load(target, "none")
    accepted = 0
    for text in PROMPTS:
        prompt = [2, *plain.text.encode(text)]
        for sampling in (mlx_spec.Sampling(), mlx_spec.Sampling(temperature=0.8, seed=4)):
            rounds = list(drafted.generate(prompt, sampling=sampling, max_tokens=40))
            expected = [t for r in plain.generate(prompt, sampling=sampling, max_tokens=40) for t in r.tokens]
            assert [t for r in rounds for t in r.tokens] == expected
            accepted += sum(r.accepted for r in rounds)
    assert accepted > 0


KEPT = "model.layers.1.mlp.up_proj"


def quantize(model: nn.Module, bits: int) -> None:
    """All layers that allow it, but one."""

    def chosen(path: str, layer: nn.Module) -> bool:
        return path != KEPT and hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 64 == 0

    nn.quantize(model, 64, bits, class_predicate=chosen)


def save_quantized(pair: str, bits: int, folder: Path) -> None:
    """The drafter as `mlx_lm.convert` would write it."""
    network = copy.deepcopy(open_pair_drafter(pair).network)
    if "masked_embedding" in network:
        order = network.masked_embedding.token_ordering
        network.model.embed_tokens.weight = network.model.embed_tokens.weight[mx.argsort(order)]
    quantize(network, bits)
    config = config_of(pair, "assistant") | {"quantization": {"group_size": 64, "bits": bits}}
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(network.parameters())))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("pair", "bits"), [*((pair, 4) for pair in TRAINED), ("e2b-trained", 8)])
def test_quantized(pair, bits, tmp_path):
    model = copy.deepcopy(load(pair)[0])
    quantize(model, bits)
    save_quantized(pair, bits, tmp_path / "drafter")
    source = open_drafter(tmp_path / "drafter", read(tmp_path / "drafter"), config_of(pair, "target"))
    layers = dict(source.network.named_modules())
    assert isinstance(layers["model.embed_tokens"], nn.QuantizedEmbedding)
    assert layers["pre_projection"].bits == bits
    assert isinstance(layers[KEPT], nn.Linear)
    prompt = golden(pair, "long")[0]["ids"]
    target = LMTarget(model, source.needs)
    done = lossless.rounds(target, source.make(target.parts), 3, prompt, 32, VOCAB)
    plain = lossless.rounds(LMTarget(model), lossless.Scripted([]), 0, prompt, 32, VOCAB)
    assert lossless.emitted(done) == lossless.emitted(plain)
    assert sum(round.accepted for round in done) >= 10


# --- its state


def test_no_draft_without_the_features_of_this_history():
    model, source = load("e2b")
    target, history = LMTarget(model, source.needs), golden("e2b", "short")[0]["ids"]
    drafter, sampler = source.make(target.parts), lossless.GREEDY.sampler(1, VOCAB)
    assert drafter.draft(history[:1], 3, sampler).tokens.size == 0
    drafter.observe(history[:-1], target.prefill(history[:-2]))
    assert drafter.draft(history[:-1], 3, sampler).tokens.size == 0  # behind a prompt
    target.verify(mx.array(history[-2:-1]))
    drafter.observe(history, target.commit(1))
    assert drafter.draft(history, 3, sampler).tokens.size == 3
    assert drafter.draft(history, 0, sampler).tokens.size == 0
    assert drafter.draft(history[:-1], 3, sampler).tokens.size == 0
    assert drafter.draft([*history, 5], 3, sampler).tokens.size == 0


def test_draft_keeps_no_view_of_the_cache():
    model, source = load("26b")
    target, history = LMTarget(model, source.needs), golden("26b", "long")[0]["ids"]
    drafter, seen = source.make(target.parts), []
    features = write_whole(target, history[:-1])

    def shared_kv():
        rows = features.shared_kv()
        seen.extend(weakref.ref(r) for r in rows.values())
        return rows

    drafter.observe(history, dataclasses.replace(features, shared_kv=shared_kv))
    draft = drafter.draft(history, 3, lossless.GREEDY.sampler(1, VOCAB))
    assert draft.tokens.size == 3
    assert len(seen) == 2
    assert all(view() is None for view in seen)


def test_drawn_tokens_come_with_their_distribution():
    model, source = load("e4b-trained")
    target, history = LMTarget(model, source.needs), golden("e4b-trained", "long")[0]["ids"]
    drafter = source.make(target.parts)
    drafter.observe(history, write_whole(target, history[:-1]))
    draft = drafter.draft(history, 3, lossless.Sampling(temperature=1.0).sampler(1, VOCAB))
    assert draft.probs.shape == (3, VOCAB)
    assert largest(draft.probs.sum(axis=-1), mx.ones(3)) < 1e-5
    assert (draft.probs > 0).sum(axis=-1).max().item() <= 64  # 4 clusters of 16 tokens
    assert mx.take_along_axis(draft.probs, draft.tokens[:, None], axis=-1).min().item() > 0
