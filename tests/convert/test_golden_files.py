"""The golden files are complete, agree with themselves, and leave room for float32 noise."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
VARIANTS = ("e2b", "e4b", "26b", "31b", "12b")
PAIRS = (*VARIANTS, *(f"{variant}-trained" for variant in VARIANTS))
CASES = ("short", "long")
KINDS = ("full_attention", "sliding_attention")
NUM_GREEDY = 208
K = 3


def load(pair: str) -> tuple[dict[str, Any], dict[str, mx.array], dict[str, Any]]:
    """Facts, tensors and the target's text config."""
    facts = json.loads((GOLDEN / pair / "golden.json").read_text())
    config = json.loads((GOLDEN / pair / "target" / "config.json").read_text())
    return facts, mx.load(str(GOLDEN / pair / "golden.safetensors")), config["text_config"]


@pytest.mark.parametrize("pair", PAIRS)
def test_folder_is_complete(pair):
    root = GOLDEN / pair
    model = {"config.json", "generation_config.json", "model.safetensors"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    own_copy = tokenizer if pair == "e2b-trained" else set()
    assert {path.name for path in root.iterdir()} == {
        "target",
        "assistant",
        "golden.json",
        "golden.safetensors",
    }
    assert {path.name for path in (root / "target").iterdir()} == model | tokenizer
    assert {path.name for path in (root / "assistant").iterdir()} == model | own_copy
    assert load(pair)[0]["versions"] == {"torch": "2.13.0", "transformers": "5.22.2"}


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_one_tokenizer_for_all(name):
    assert len({path.read_bytes() for path in GOLDEN.glob(f"*/*/{name}")}) == 1


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_shapes(pair, case):
    facts, tensors, text = load(pair)
    length, hidden, vocab = facts["cases"][case]["length"], text["hidden_size"], text["vocab_size"]
    assert (length < facts["sliding_window"]) == (case == "short")
    expected = {
        f"ids.{case}": (length,),
        f"target.{case}.logits": (length, vocab),
        f"target.{case}.hidden": (length, hidden),
        f"draft.{case}.pos0_exact.logits": (K, vocab),
        f"draft.{case}.pos0_exact.dense": (K, vocab),
        f"draft.{case}.pos0_exact.hidden": (K, hidden),
        f"draft.{case}.pos0_exact.tokens": (K,),
    }
    if case == "long":
        heads = text["num_key_value_heads"]
        full_heads = text["num_global_key_value_heads"] or heads
        full, sliding = (full_heads, length, text["global_head_dim"]), (heads, length, text["head_dim"])
        for kind, shape in zip(KINDS, (full, sliding), strict=True):
            expected |= {f"target.long.kv.{kind}.{part}": shape for part in "kv"}
    assert {name: array.shape for name, array in tensors.items() if f".{case}" in name} == expected


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_tensors_and_tokens_agree(pair, case):
    facts, tensors, _ = load(pair)
    case_facts = facts["cases"][case]
    draft_logits = tensors[f"draft.{case}.pos0_exact.logits"]
    assert tensors[f"ids.{case}"].tolist() == case_facts["ids"]
    assert tensors[f"target.{case}.logits"][-1].argmax().item() == case_facts["greedy"][0]
    assert draft_logits.argmax(-1).tolist() == case_facts["drafts"]
    assert tensors[f"draft.{case}.pos0_exact.tokens"].tolist() == case_facts["drafts"]
    assert all(mx.isfinite(array).all().item() for array in tensors.values())


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_margins(pair, case):
    facts = load(pair)[0]["cases"][case]
    assert facts["min_margin"] >= (1e-3 if pair.endswith("-trained") else 2e-3)
    assert facts["min_margin"] >= 20 * facts["cache_difference"]
    assert facts["min_draft_margin"] >= 3e-4


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_rounds_follow_the_greedy_tokens(pair, case):
    facts = load(pair)[0]["cases"][case]
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
    accepted = load(f"{variant}-trained")[0]["cases"][case]["accepted"]
    assert {0, K} < set(accepted)
    assert 1 < sum(accepted) / len(accepted) < 2.7
