"""Families that draft in one pass: lossless, exact, converted, loaded and refused alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drafting
import exact_distribution
import fitted
import mlx.core as mx
import pytest
import tiny
from drafting import emitted
from exact_distribution import (
    PLAIN,
    Liar,
    control_excess,
    drafted_excess,
    excess,
    law_drafter,
    law_target,
    seeded_texts,
    unseeded,
)
from fitted import largest, logits_of, opened, random_rows
from test_session import TEMPLATE, TOKENIZER

import mlx_spec
from mlx_spec.engine import decode
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.model.sequence import CachedSequence
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair, PairInfo
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.text import Text
from mlx_spec.text.chat_template import ChatTemplate
from mlx_spec.types import Draft, Features

GOLDEN = Path(__file__).parents[1] / "golden"
MADE: dict[str, Any] = {
    "medusa": fitted.medusa,
    "pard": lambda layers: fitted.pard(tiny.full(max_position_embeddings=512), layers),
    "dflash": lambda layers, **config: fitted.dflash(layers, (0, 1, 2), **config),
    "peagle": lambda layers, **config: fitted.peagle(layers, (0, 1, 2), **config),
}
FAMILIES = tuple(MADE)


@pytest.mark.parametrize("family", ["dflash", "peagle"])
def test_reduced_vocabulary(family, tmp_path):
    """d2t holds offsets; other tokens have no probability."""
    kept = [i for i in range(256) if i % 5 == 2]
    head = mx.random.normal((len(kept), 64), key=mx.random.key(3))
    config = {"speculators_model_type": "dflash"} if family == "dflash" else {}
    made = MADE[family](3, draft_vocab_size=len(kept), **config)
    source = opened(made.changed(lm_head__weight=head, d2t=mx.array(kept) - mx.arange(len(kept))), tmp_path)
    history, drafter = tiny.prompt(10), source.make(LMTarget(tiny.full()).parts)
    drafter.observe(history, Features(tuple(random_rows(9, 3))))
    logits = logits_of(drafter, history, 4)
    assert mx.isfinite(logits).sum(axis=-1).tolist() == [len(kept)] * 4
    full = opened(
        MADE[family](3).changed(lm_head__weight=mx.zeros((256, 64)).at[mx.array(kept)].add(head)),
        tmp_path / "full",
    )
    whole = full.make(LMTarget(tiny.full()).parts)
    whole.observe(history, Features(tuple(random_rows(9, 3))))
    assert largest(logits[:, mx.array(kept)], logits_of(whole, history, 4)[:, mx.array(kept)]) < 1e-4
    draft = drafter.draft(history, 4, Sampling(1.0).sampler(1, 256))
    assert mx.where(mx.arange(256) % 5 == 2, 0, draft.probs).max().item() == 0


# --- the distribution


def law_source(family: str, folder: Path) -> Any:
    if family == "medusa":
        return opened(fitted.medusa(2, hidden=16, vocab=8), folder)
    if family == "pard":
        return opened(fitted.pard(exact_distribution.model(layers=2), 2, 0.2), folder)
    if family == "dflash":
        return opened(fitted.dflash(2, (0, 1), 16, 8, block_size=4), folder)
    made = fitted.peagle(2, (0, 1), 16, 8)
    return opened(made.changed(norm__weight=0.5 * made.tensors["norm.weight"]), folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_keep_the_distribution(family, tmp_path):
    assert drafted_excess(law_source(family, tmp_path)) < 1


@pytest.mark.parametrize(("family", "generations"), [("pard", 200), ("dflash", 200), ("peagle", 300)])
def test_argmax_drafts_that_pose_as_sampled_are_caught(family, generations, tmp_path):
    assert control_excess(law_source(family, tmp_path), generations) > 1


class Posing:
    """A Medusa drafter that says its likeliest tokens were drawn."""

    def __init__(self, drafter: Any) -> None:
        self.inner, self.needs, self.observe = drafter, drafter.needs, drafter.observe

    def draft(self, history, limit, sampler):
        draft = self.inner.draft(history, limit, sampler)
        if not draft.tokens.size:
            return draft
        logits = self.inner._network(self.inner._hidden, limit)
        return Draft(draft.tokens, Liar().draw(logits, history, draft.tokens)[1])


def test_likeliest_tokens_that_pose_as_sampled_are_caught(tmp_path):
    source = law_source("medusa", tmp_path)
    assert excess(Posing(law_drafter(source)), PLAIN, unseeded(PLAIN), 200, law_target()) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_seeded_text_is_the_same_without(family, tmp_path):
    with_drafter, without = seeded_texts(law_source(family, tmp_path))
    assert with_drafter == without


# --- from published checkpoints to text


@pytest.mark.parametrize("bits", ["none", "8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_pairs_generate_the_target_s_text(family, bits, tmp_path):
    published = GOLDEN / "12b-trained" / "target", GOLDEN / "trained" / family
    quantized = {"quantization": bits, "group_size": 32, "drafter_bits": "8"}
    part = drafting.converted(*published, tmp_path / "out", **quantized)["parts"]["drafter"]
    assert part["family"] == family and "quantization" in part
    pair = mlx_spec.load(tmp_path / "out", num_draft_tokens=4)
    assert pair.drafter_names == (family,)
    prompt = [2, *pair.text.encode("What is the capital of")]
    rounds = list(pair.generate(prompt, max_tokens=40))
    plain = mlx_spec.load(tmp_path / "out", "none").generate(prompt, max_tokens=40)
    assert emitted(rounds) == emitted(list(plain)) and len(emitted(rounds)) > 10
    assert rounds[-1].finish_reason in ("stop", "length")
    assert sum(round.accepted for round in rounds) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_pairs_accept_in_full_and_in_part_and_reject(family, tmp_path):
    """All texts run past the target's window of 16: greedy ones, and with a seed."""
    trained, out = str(GOLDEN / "trained" / family), tmp_path / "out"
    manifest = drafting.prove(GOLDEN / "12b-trained" / "target", trained, out)
    part, proof = manifest["parts"]["drafter"], manifest["self_test"]
    assert part["family"] == family and proof["result"] == "passed"
    assert proof["acceptance"]["length"] > 2
    drafting.check_acceptance(drafting.generate_with(out))
    sampling = Sampling(0.8, top_p=0.95, seed=6)
    seeded = drafting.generate_with(out, sampling=sampling, questions=drafting.QUESTIONS[:3])
    assert len({round.accepted for round in seeded if round.drafted == 3}) > 2


# --- a target that holds a prefix which its drafter never saw


def pair_of(family: str, folder: Path) -> Pair:
    if family == "eagle3":
        trained = GOLDEN / "trained"
        published = drafting.write_converted(trained / family, trained / "llama", folder / "drafter")
        return mlx_spec.load(trained / "llama", published, num_draft_tokens=2)
    text = Text(TOKENIZER, ChatTemplate(TEMPLATE, {}), ())
    info = PairInfo("tiny", family, tiny.VOCAB, None, 0, 0)
    return Pair(info, text, tiny.full(), [opened(MADE[family](3), folder)], FixedPolicy(2))


@pytest.mark.parametrize("family", ["dflash", "eagle3", "peagle"])
def test_tokens_that_a_drafter_never_saw_are_counted(family, tmp_path):
    pair = pair_of(family, tmp_path)
    prompt = [2, *tiny.prompt(40)[1:]]
    warm, cold = CachedSequence(pair.open()), CachedSequence(pair.open())
    cold.parts.target.prefill(prompt[:25])
    cold.append(prompt[:25])
    expected: list[int] = []
    for cached, before in ((warm, (0, 0)), (cold, (25, 25))):
        assert (cached.rewind_to_prefix(prompt), cached.drafter_missing) == before
        tokens = emitted(list(decode(pair.prepare(cached.parts, prompt, max_tokens=8))))
        expected = expected or tokens
        assert tokens == expected
        cached.append(tokens)
    longer = [*prompt, *expected[:5], 9, 9]
    kept = len(prompt) + 5
    assert (warm.rewind_to_prefix(longer), warm.drafter_missing) == (kept, 0)
    assert (cold.rewind_to_prefix(longer), cold.drafter_missing) == (kept, 25)  # those rows are gone for good


# --- what is refused

OTHER = {"hidden_size": 64, "num_hidden_layers": 5, "vocab_size": 256, "rope": {}}
REFUSALS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *((family, {"mlx_spec": None}, BadCheckpoint, "mlx-spec convert") for family in FAMILIES),
    *((family, {"target": OTHER}, Mismatch, "5, target has 3") for family in ("medusa", "dflash", "peagle")),
    *((family, {"mask_token_id": None}, BadCheckpoint, "mask_token_id") for family in ("pard", "peagle")),
    ("medusa", {"num_heads": None}, BadCheckpoint, "num_heads"),
    ("pard", {"layer_config": {"model_type": "llama", "vocab_size": 256}}, BadCheckpoint, "cannot be loaded"),
    ("dflash", {"is_causal": True}, BadCheckpoint, "is_causal = True"),
]


@pytest.mark.parametrize(("family", "changes", "kind", "text"), REFUSALS)
def test_refusals(family, changes, kind, text, tmp_path):
    with pytest.raises(kind, match=text):
        opened(MADE[family](3), tmp_path, edit=lambda config: config.update(changes))
