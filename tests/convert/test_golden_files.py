"""The golden files agree with themselves and leave room for float32 noise."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
VARIANTS = ("e2b", "e4b", "26b", "31b", "12b")
PAIRS = (*VARIANTS, *(f"{variant}-trained" for variant in VARIANTS))
CASES = ("short", "long")
NUM_GREEDY = 208
K = 3


def facts_of(pair: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((GOLDEN / pair / "golden.json").read_text())
    return facts


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_tensors_and_tokens_agree(pair, case):
    tensors = mx.load(str(GOLDEN / pair / "golden.safetensors"))
    case_facts = facts_of(pair)["cases"][case]
    draft_logits = tensors[f"draft.{case}.pos0_exact.logits"]
    assert tensors[f"ids.{case}"].tolist() == case_facts["ids"]
    assert tensors[f"target.{case}.logits"][-1].argmax().item() == case_facts["greedy"][0]
    assert draft_logits.argmax(-1).tolist() == case_facts["drafts"]
    assert tensors[f"draft.{case}.pos0_exact.tokens"].tolist() == case_facts["drafts"]
    assert all(mx.isfinite(array).all().item() for array in tensors.values())


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_margins(pair, case):
    facts = facts_of(pair)["cases"][case]
    assert facts["min_margin"] >= (1e-3 if pair.endswith("-trained") else 2e-3)
    assert facts["min_margin"] >= 20 * facts["cache_difference"]
    assert facts["min_draft_margin"] >= 3e-4


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_rounds_follow_the_greedy_tokens(pair, case):
    facts = facts_of(pair)["cases"][case]
    sequence, position = facts["ids"] + facts["greedy"], facts["length"]
    assert len(facts["greedy"]) == NUM_GREEDY
    assert facts["accepted"] == [accepted for _, accepted, _ in facts["rounds"]]
    assert facts["rounds"][0][2] == facts["drafts"]
    for start, accepted, drafts in facts["rounds"]:
        truth = sequence[position + 1 : position + 1 + K]
        assert start == position
        assert drafts[:accepted] == truth[:accepted]
        assert accepted == K or drafts[accepted] != truth[accepted]
        position += accepted + 1
    assert len(sequence) - position <= K + 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_trained_pairs_accept_reject_and_do_both(variant, case):
    accepted = facts_of(f"{variant}-trained")["cases"][case]["accepted"]
    assert {0, K} < set(accepted)
    assert 1 < sum(accepted) / len(accepted) < 2.7
