"""The Gemma 4 assistant against transformers' numbers, at work with its target, and refused by name."""

from __future__ import annotations

import copy
import dataclasses
import re
import weakref
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from support import lossless
from support.checkpoints import read, stored
from support.drafting import quantize
from support.fitted import largest
from support.synthetic import Checkpoint

import mlx_spec
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.drafter_families import OPENED_AS
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.drafters.gemma4 import AssistantConfig, Gemma4Assistant, check_fit, visible_rows
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Features

GOLDEN = Path(__file__).parents[1] / "golden"
VARIANTS = ("e2b", "e4b", "26b", "31b", "12b")
# With a head of centroids, without one, and with experts; the other two pairs take the same code.
TRAINED = ("e2b-trained", "12b-trained", "26b-trained")
CASES = ("short", "long")
VOCAB = 512
TOLERANCE = 1e-4
BUNDLED = Path(mlx_spec.__file__).parent / "demo" / "smollm2"
SLIDING, FULL = "sliding_attention", "full_attention"


def config_of(pair: str, part: str) -> dict:
    return read(GOLDEN / pair / part)


def open_pair_drafter(pair: str) -> DrafterSource:
    source = open_drafter(
        read_checkpoint(GOLDEN / pair / "assistant"),
        config_of(pair, "assistant"),
        config_of(pair, "target"),
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
    return read(GOLDEN / pair, "golden.json")["cases"][case], found


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


def speculate(pair: str, case: str, K: int, count: int) -> list:
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
    facts, done = golden(pair, case)[0], speculate(pair, case, 3, 64)
    accepted = [round.accepted for round in done[:-1]]  # the last one is cut off
    assert lossless.emitted(done) == facts["greedy"][1:65]
    assert accepted == facts["accepted"][: len(accepted)]
    assert {0, 3} < set(accepted)  # none, all and some


@pytest.mark.parametrize("pair", VARIANTS)
def test_same_tokens_when_all_drafts_fail(pair):
    done = speculate(pair, "long", 4, 16)
    assert lossless.emitted(done) == golden(pair, "long")[0]["greedy"][1:17]
    assert sum(round.accepted for round in done) <= 1


KEPT = "model.layers.1.mlp.up_proj"


def open_quantized(pair: str, bits: int, folder: Path) -> DrafterSource:
    """The drafter as `mlx_lm.convert` would write it."""
    network = copy.deepcopy(open_pair_drafter(pair).network)
    if "masked_embedding" in network:
        order = network.masked_embedding.token_ordering
        network.model.embed_tokens.weight = network.model.embed_tokens.weight[mx.argsort(order)]
    quantize(network, bits, 64, KEPT)
    config = config_of(pair, "assistant") | {"quantization": {"group_size": 64, "bits": bits}}
    made = Checkpoint(dict(tree_flatten(network.parameters())), config, config_of(pair, "target"))
    return open_drafter(read_checkpoint(made.write(folder)), made.config, made.target)


@pytest.mark.parametrize(("pair", "bits"), [*((pair, 4) for pair in TRAINED), ("e2b-trained", 8)])
def test_quantized(pair, bits, tmp_path):
    model = copy.deepcopy(load(pair)[0])
    quantize(model, bits, 64, KEPT)
    source = open_quantized(pair, bits, tmp_path)
    layers = dict(source.network.named_modules())
    assert isinstance(layers["model.embed_tokens"], nn.QuantizedEmbedding)
    assert layers["pre_projection"].bits == bits
    assert isinstance(layers[KEPT], nn.Linear)
    prompt = golden(pair, "long")[0]["ids"]
    target = LMTarget(model, source.needs)
    done = lossless.rounds(target, source.make(target.parts), 3, prompt, 20, VOCAB)
    plain = lossless.rounds(LMTarget(model), lossless.Scripted([]), 0, prompt, 20, VOCAB)
    assert lossless.emitted(done) == lossless.emitted(plain)
    assert sum(round.accepted for round in done) >= 6


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
    model, source = load("e2b-trained")
    target, history = LMTarget(model, source.needs), golden("e2b-trained", "long")[0]["ids"]
    drafter = source.make(target.parts)
    drafter.observe(history, write_whole(target, history[:-1]))
    draft = drafter.draft(history, 3, lossless.Sampling(temperature=1.0).sampler(1, VOCAB))
    assert draft.probs.shape == (3, VOCAB)
    assert largest(draft.probs.sum(axis=-1), mx.ones(3)) < 1e-5
    assert (draft.probs > 0).sum(axis=-1).max().item() <= 64  # 4 clusters of 16 tokens
    assert mx.take_along_axis(draft.probs, draft.tokens[:, None], axis=-1).min().item() > 0


# --- what is refused: config.json


@pytest.mark.parametrize("pair", VARIANTS)
def test_made_for_each_other(pair):
    config = AssistantConfig.from_dict(config_of(pair, "assistant"))
    check_fit(config, config_of(pair, "target"))
    with pytest.raises(Mismatch, match="use the assistant made for this target"):
        check_fit(config, config_of({"e2b": "e4b", "31b": "26b"}.get(pair, "31b"), "target"))


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("top", "num_centroids", None, "has no 'num_centroids'"),
        ("text", "layer_types", None, "has no 'layer_types'"),
        ("top", "backbone_hidden_size", "64", "backbone_hidden_size' = '64', which is not of type int"),
        ("top", "num_centroids", 31, "num_centroids 31 does not divide its vocab_size 512"),
        ("top", "tie_word_embeddings", False, "its own LM head"),
        ("text", "layer_types", [SLIDING, "chunked_attention"], "chunked_attention"),
        ("text", "rope_parameters", {FULL: {"rope_theta": 1e6}}, "has no 'sliding_attention'"),
    ],
)
def test_bad_value(where, key, value, message):
    config = config_of("e2b", "assistant")
    part = config["text_config"] if where == "text" else config
    part[key] = value
    if value is None:
        del part[key]
    with pytest.raises(BadCheckpoint, match=re.escape(message)):
        AssistantConfig.from_dict(config)


# --- the target


@pytest.mark.parametrize(
    ("pair", "key", "value", "message"),
    [
        ("26b", "hidden_size", 128, "expects hidden size 64, target has 128"),
        ("26b", "vocab_size", 1024, "expects vocabulary size 512, target has 1024"),
        ("26b", "num_key_value_heads", 1, "expects sliding_attention K/V heads 2, target has 1"),
        ("26b", "head_dim", 64, "expects sliding_attention head dimension 16, target has 64"),
        ("26b", "sliding_window", 32, "expects sliding window 16, target has 32"),
        ("26b", "layer_types", [FULL] * 4, "reads sliding_attention K/V, the target has ['full_attention']"),
        (
            "26b",
            "rope_parameters",
            {FULL: {"partial_rotary_factor": 0.5}},
            "expects full_attention partial_rotary_factor 0.25, target has 0.5",
        ),
        # In the last layers of E2B nothing is stored: of [s s s s f s | s s s f] it would read 4 and 5.
        ("e2b", "num_kv_shared_layers", 6, "reads full_attention K/V"),
    ],
)
def test_misfit(pair, key, value, message):
    config, target = AssistantConfig.from_dict(config_of(pair, "assistant")), config_of(pair, "target")
    target["text_config"][key] = value
    with pytest.raises(Mismatch, match=re.escape(message)):
        check_fit(config, target)


@pytest.mark.parametrize("layer_types", [{}, {"layer_types": None}], ids=["absent", "null"])
def test_target_without_layer_types(layer_types):
    """All layers of a Llama are full attention; its config.json does not say so."""
    target = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    target |= {"num_hidden_layers": 30, "rope_parameters": {"rope_theta": 1e5}, **layer_types}
    config = AssistantConfig.from_dict(read(BUNDLED))
    check_fit(config, target)
    with pytest.raises(Mismatch, match="expects full_attention K/V heads 3, target has 9"):
        check_fit(config, target | {"num_key_value_heads": 9})


# --- the tensors


def open_changed(folder: Path, changes: dict[str, mx.array | None]) -> DrafterSource:
    """Write the assistant of E2B with other tensors, without those that are None, and open it."""
    tensors = stored(GOLDEN / "e2b" / "assistant" / "model.safetensors")
    made = Checkpoint(tensors, config_of("e2b", "assistant"), config_of("e2b", "target")).changed(**changes)
    return open_drafter(read_checkpoint(made.write(folder)), made.config, made.target)


def test_copy_of_the_head_is_ignored(tmp_path):
    assert open_changed(tmp_path, {"lm_head.weight": mx.zeros((512, 32))}).name == "gemma4_assistant"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.2.layer_scalar": None}, "Missing 1 parameters: model.layers.2.layer_scalar"),
        ({"spare": mx.zeros(1)}, "Received 1 parameters not in model: spare"),
        ({"pre_projection.weight": mx.zeros((64, 64))}, "(64, 64) for parameter pre_projection.weight"),
        ({"masked_embedding.token_ordering": mx.zeros(512)}, "masked_embedding.token_ordering is mlx.core.f"),
        ({"masked_embedding.token_ordering": mx.arange(512) + 1}, "has tokens from 1 to 512"),
    ],
)
def test_a_tensor_that_is_missing_or_of_no_use_or_of_another_form(tmp_path, changes, message):
    with pytest.raises(BadCheckpoint, match=re.escape(message)):
        open_changed(tmp_path, changes)


# --- the registry


@pytest.mark.parametrize("model_type", [None, "eagle1", "../llama", "no_such_model"])
def test_unknown_family(model_type, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint) as caught:
        open_drafter(read_checkpoint(tmp_path), {"model_type": model_type}, {})
    text = str(caught.value)
    assert "has no 'model_type'" in text if model_type is None else repr(model_type) in text
    assert model_type is None or all(family in text for family in OPENED_AS)
