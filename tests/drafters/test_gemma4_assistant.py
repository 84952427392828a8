"""The Gemma 4 assistant against transformers' numbers, at work with its target, and refused by name."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from support import lossless
from support.checkpoints import read
from support.drafting import quantize
from support.fitted import largest
from support.synthetic import Checkpoint
from support.targets import write

import mlx_spec
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.drafters.gemma4 import Gemma4Assistant, visible_rows
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


def check_steps(pair: str, case: str, target: LMTarget, features: Features) -> None:
    """Compare three steps of the drafter after the prompt."""
    (facts, tensors), source = golden(pair, case), load(pair)[1]
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
        ours, theirs = (mx.where(selected, found, 0) for found in (logits, expected["logits"][step]))
        assert largest(ours, theirs) < TOLERANCE
        dense = network.model.embed_tokens.as_linear(normed)[0]
        order = network.masked_embedding.token_ordering if "masked_embedding" in network else slice(None)
        assert largest(dense, expected["dense"][step][order]) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pair", [*VARIANTS, *TRAINED])
def test_target_and_three_steps(pair, case):
    facts, tensors = golden(pair, case)
    target = LMTarget(load(pair)[0], Gemma4Assistant.needs)
    logits = target.verify(mx.array(facts["ids"]))
    features = target.commit(len(facts["ids"]))
    assert largest(logits, tensors["target.logits"]) < TOLERANCE
    assert largest(features.final_hidden, tensors["target.hidden"]) < TOLERANCE
    check_steps(pair, case, target, features)


@pytest.mark.parametrize("pair", TRAINED)
def test_three_steps_after_a_text_in_pieces(pair):
    """Chunks, a rejected trial, a partly accepted one, single steps."""
    ids, target = golden(pair, "long")[0]["ids"], LMTarget(load(pair)[0], Gemma4Assistant.needs)
    assert target.prefill(ids[:4]).final_hidden is None  # of a prompt the assistant reads no hidden states
    target.prefill(ids[4:-5])
    for tokens, keep in (([7, 8, 9], 0), ([*ids[-5:-3], 7, 7, 7], 2), ([ids[-3]], 1), ([ids[-2]], 1)):
        write(target, tokens, keep)
    check_steps(pair, "long", target, write(target, [ids[-1], 5], 1))


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
    done = speculate(pair, "long", 4, 8)
    assert lossless.emitted(done) == golden(pair, "long")[0]["greedy"][1:9]
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
    drafter.observe(history, write(target, history[-2:-1]))
    assert drafter.draft(history, 3, sampler).tokens.size == 3
    assert drafter.draft(history, 0, sampler).tokens.size == 0
    assert drafter.draft(history[:-1], 3, sampler).tokens.size == 0
    assert drafter.draft([*history, 5], 3, sampler).tokens.size == 0


def test_draft_keeps_no_view_of_the_cache():
    model, source = load("26b")
    target, history = LMTarget(model, source.needs), golden("26b", "long")[0]["ids"]
    drafter, seen = source.make(target.parts), []
    target.prefill(history[:-2])
    features = write(target, history[-2:-1])

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
    target.prefill(history[:-2])
    drafter.observe(history, write(target, history[-2:-1]))
    draft = drafter.draft(history, 3, lossless.Sampling(temperature=1.0).sampler(1, VOCAB))
    assert draft.probs.shape == (3, VOCAB)
    assert largest(draft.probs.sum(axis=-1), mx.ones(3)) < 1e-5
    assert (draft.probs > 0).sum(axis=-1).max().item() <= 64  # 4 clusters of 16 tokens
    assert mx.take_along_axis(draft.probs, draft.tokens[:, None], axis=-1).min().item() > 0
