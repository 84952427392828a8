"""Native MTP heads against transformers' numbers, at work with their targets, and at the door."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import drafting
import mlx.core as mx
import mlx.nn as nn
import pytest
import random_sources
from drafting import K, drafted, fresh, largest, rows
from lossless import GREEDY, Scripted, emitted, mlx_lm_greedy, plain, rounds
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from one_pass_law import control_excess, drafted_excess

from mlx_spec.convert.source import open_source
from mlx_spec.convert.target import open_model
from mlx_spec.drafters import open_drafter
from mlx_spec.drafters.conditioned import NetworkSource, Rows
from mlx_spec.drafters.mtp import LAYERS
from mlx_spec.engine import generate
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.policy import Fixed
from mlx_spec.sampling import Sampling
from mlx_spec.target import LMTarget
from mlx_spec.types import Features, FeatureSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "mtp"
TRAINED = GOLDEN.parent / "trained" / "qwen"
NAMES = {
    "qwen3_5_text": "qwen_mtp",
    "qwen3_next": "qwen_mtp",
    "glm4_moe": "glm_mtp",
    "glm4_moe_lite": "glm_mtp",
    "deepseek_v3": "deepseek_mtp",
}
V = 64
TOLERANCE = 1e-5
Open = Callable[..., NetworkSource]
Load = Callable[[str], nn.Module]


@cache
def facts(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / kind / "golden.json").read_text())
    return found


@cache
def golden(kind: str) -> dict[str, mx.array]:
    tensors = mx.load(str(GOLDEN / kind / "golden.safetensors"))
    assert isinstance(tensors, dict)
    return tensors


def features(kind: str) -> Features:
    """What transformers computed, after the final norm."""
    return Features(final_hidden=golden(kind)["hidden"])


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a golden head, with other conventions where they are given."""

    def source(kind: str, **conventions: Any) -> NetworkSource:
        folder = tmp_path_factory.mktemp(kind) / "drafter"
        return drafting.open_converted(GOLDEN / kind, GOLDEN / kind, folder, **conventions)

    return source


@cache
def model_of(kind: str) -> nn.Module:
    """The target in a golden folder, without its head, in float32."""
    found = open_model(open_source(str(GOLDEN / kind)), None, "float32")
    with tempfile.TemporaryDirectory() as folder:
        mx.save_safetensors(str(Path(folder) / "model.safetensors"), found.tensors)
        (Path(folder) / "config.json").write_text(json.dumps(found.config))
        model, _ = load_model(Path(folder))
    return model


def errors(kind: str, source: NetworkSource, chunks: Sequence[int] = ()) -> list[list[float]]:
    """Of each draft token's logits, by round."""
    return [
        [largest(a, b) for a, b in zip(seen.logits, golden(kind)[f"draft.{i}"], strict=True)]
        for i, seen in enumerate(drafting.in_rounds(model_of(kind), source, facts(kind), chunks))
    ]


# --- the same numbers as transformers


@pytest.mark.parametrize("chunks", [(12,), (1, 4, 7)])
@pytest.mark.parametrize("kind", NAMES)
def test_drafts_of_five_rounds(opened: Open, kind: str, chunks: tuple[int, ...]) -> None:
    """3, 1, 5 and 2 tokens are kept of rounds that draft 4."""
    source = opened(kind)
    assert source.name == NAMES[kind]
    assert max(map(max, errors(kind, source, chunks))) < TOLERANCE
    found = drafting.in_rounds(model_of(kind), source, facts(kind))
    assert [seen.tokens for seen in found] == facts(kind)["drafts"]


@pytest.mark.parametrize("kind", NAMES)
def test_hidden_and_text_of_the_target(kind: str) -> None:
    history, prompt = facts(kind)["history"], facts(kind)["prompt"]
    target = LMTarget(model_of(kind), FeatureSpec(final_hidden=True))
    found = target.prefill(history).final_hidden
    assert found is not None and largest(found, golden(kind)["hidden"]) < TOLERANCE
    assert plain(model_of(kind), history[:prompt], len(history) - prompt) == history[prompt:]


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_rounds_are_those_of_transformers_generate(opened: Open, kind: str) -> None:
    """Drafts of one token: the same logits, the same acceptance, the same text."""
    facts = json.loads((GOLDEN / kind / "generated.json").read_text())
    logits, source = mx.load(str(GOLDEN / kind / "generated.safetensors"))["logits"], opened(kind)
    history, begins = facts["history"], facts["begins"]
    target = LMTarget(model_of(kind), source.needs)
    drafter, start = source.make(target.parts), 0
    for begin, theirs in zip(begins, logits, strict=True):
        drafter.observe(history[:begin], target.prefill(history[start : begin - 1]))
        start = begin - 1
        assert largest(drafted(drafter, history[:begin], 1).logits[0], theirs) < TOLERANCE
    target = LMTarget(model_of(kind), source.needs)
    prompt = history[: facts["prompt"]]
    done = rounds(target, source.make(target.parts), 1, prompt, len(history) - len(prompt), V)
    assert prompt + emitted(done) == history
    ends = [len(prompt) + sum(len(r.tokens) for r in done[: i + 1]) for i in range(len(done))]
    assert ends[:-1] == begins[: len(ends) - 1]  # transformers has no draft in its first round
    assert any(r.accepted for r in done) and any(r.drafted > r.accepted for r in done)


WRONG: dict[str, dict[str, Any]] = {
    "hidden before the final norm": {"hidden": "pre_norm"},
    "hidden before embedding": {"fc_order": ["hidden", "embedding"]},
    "1 in the norms once more": {"norm_offset": 1},
    "1 not in the norms": {"norm_offset": -1},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", NAMES)
def test_wrong_conventions_change_every_draft(opened: Open, kind: str, wrong: str) -> None:
    assert min(map(max, errors(kind, opened(kind, **WRONG[wrong])))) > 100 * TOLERANCE


@pytest.mark.parametrize("wrong", [{"chain": "pre_norm"}, {"position_offset": -1}])
@pytest.mark.parametrize("kind", NAMES)
def test_wrong_chaining_changes_all_but_the_first(opened: Open, kind: str, wrong: dict[str, Any]) -> None:
    for first, *rest in errors(kind, opened(kind, **wrong)):
        assert first < TOLERANCE and max(rest) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", NAMES)
def test_features_of_the_next_position_change_the_draft(opened: Open, kind: str) -> None:
    source, end = opened(kind), facts(kind)["prompt"]
    drafter = source.make(LMTarget(model_of(kind), source.needs).parts)
    history = facts(kind)["history"][:end]
    drafter.observe(history, rows(features(kind), 1, end))
    assert largest(drafted(drafter, history).logits[0], golden(kind)["draft.0"][0]) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", NAMES)
def test_a_pair_that_is_missing_at_a_border_changes_the_draft(opened: Open, kind: str) -> None:
    source, history, end = opened(kind), facts(kind)["history"], facts(kind)["prompt"]
    drafter = fresh(source, LMTarget(model_of(kind), source.needs), history[:6], features(kind))
    drafter.observe(history[:end], rows(features(kind), 6, end - 1))
    assert largest(drafted(drafter, history[:end]).logits[0], golden(kind)["draft.0"][0]) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", NAMES)
def test_another_rope_changes_every_draft(opened: Open, kind: str, tmp_path: Path) -> None:
    folder = drafting.write_converted(GOLDEN / kind, GOLDEN / kind, tmp_path / "drafter")
    config, theirs = drafting.read(folder), drafting.read(GOLDEN / kind)
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 30.0}
    changed = {**config["text_config"], "rope_theta": 30.0, "rope_parameters": rope}
    source: Any = open_drafter(folder, {**config, "text_config": changed}, theirs)
    source.network.set_dtype(mx.float32)
    assert min(map(max, errors(kind, source))) > 100 * TOLERANCE


# --- its state


def test_rows_of_its_own_do_not_stay(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft wrote behind the newest row would change every round but the first."""
    source, kind = opened("glm4_moe"), "glm4_moe"
    monkeypatch.setattr(Rows, "cut", lambda self, size, position: None)
    first, *rest = map(max, errors(kind, source))
    assert first < TOLERANCE and min(rest) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", NAMES)
def test_after_any_round_it_is_as_good_as_new(opened: Open, kind: str) -> None:
    source, history = opened(kind), facts(kind)["history"]
    target = LMTarget(model_of(kind), source.needs)
    drafter, end = fresh(source, target, history[:6], features(kind)), 6
    for kept in (5, 2, 1, 5, 2, 1, 2):
        drafted(drafter, history[:end])
        end += kept
        drafter.observe(history[:end], rows(features(kind), end - 1 - kept, end - 1))
        ours = drafted(drafter, history[:end])
        theirs = drafted(fresh(source, target, history[:end], features(kind)), history[:end])
        assert ours.tokens == theirs.tokens and largest(ours.logits, theirs.logits) < TOLERANCE


@pytest.mark.parametrize("kind", NAMES)
def test_rounds_over_three_turns_equal_plain_decoding(opened: Open, kind: str) -> None:
    """Recurrent targets go back to marks, others to any place; the head follows them."""
    model, source = model_of(kind), opened(kind)
    for limit in (0, 1, 4, 7):
        target = LMTarget(model, source.needs)
        drafter, prompt = source.make(target.parts), facts(kind)["history"][:7]
        for turn in range(3):
            answer = emitted(rounds(target, drafter, limit, prompt, 9, V))
            assert answer == emitted(rounds(LMTarget(model), Scripted([]), 0, prompt, 9, V))
            if limit == 4:
                assert answer == mlx_lm_greedy(model, prompt, 9)
            prompt = prompt + answer + [3 * turn, 5, 7]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "deepseek_v3"])
def test_a_shortened_history(opened: Open, kind: str) -> None:
    """The target goes back; rows of the head from there on are dropped."""
    source, history = opened(kind), facts(kind)["history"]
    target = LMTarget(model_of(kind), source.needs)
    drafter = source.make(target.parts)
    drafter.observe(history, target.prefill(history[:-1]))
    kept = target.rewind(9)
    other = [*history[:10], 1, 2, 3]
    drafter.observe(other, target.prefill(other[kept:-1]))
    whole = LMTarget(model_of(kind), source.needs)
    expected = source.make(whole.parts)
    expected.observe(other, whole.prefill(other[:-1]))
    assert largest(drafted(drafter, other).logits, drafted(expected, other).logits) < TOLERANCE


def test_no_draft_without_the_features_of_this_history(opened: Open) -> None:
    source, history = opened("glm4_moe"), facts("glm4_moe")["history"]
    sampler = GREEDY.sampler(1, V)
    drafter = source.make(LMTarget(model_of("glm4_moe"), source.needs).parts)
    assert drafter.draft(history[:1], 3, sampler).tokens.size == 0
    drafter.observe(history[:9], rows(features("glm4_moe"), 0, 8))
    assert drafter.draft(history[:9], 3, sampler).tokens.size == 3
    assert drafter.draft(history[:9], 0, sampler).tokens.size == 0
    assert drafter.draft(history[:10], 3, sampler).tokens.size == 0
    assert drafter.draft([*history[:8], history[8] + 1], 3, sampler).tokens.size == 0


# --- at work


@pytest.mark.parametrize("kind", NAMES)
def test_draws_with_chance_leave_their_law(opened: Open, kind: str) -> None:
    source, history = opened(kind), facts(kind)["history"]
    drafter = fresh(source, LMTarget(model_of(kind), source.needs), history, features(kind))
    draft = drafter.draft(history, K, Sampling(temperature=1.0).sampler(1, V))
    assert draft.probs is not None and draft.probs.shape == (K, V)
    assert largest(draft.probs.sum(axis=-1), mx.ones(K)) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_seeded_text_is_the_same_with_and_without_a_head(opened: Open, kind: str) -> None:
    source, prompt, sampling = opened(kind), facts(kind)["history"][:7], Sampling(0.8, seed=4)
    texts = []
    for limit in (0, 1, 4):
        target = LMTarget(model_of(kind), source.needs)
        sampler = sampling.sampler(len(prompt), V)
        drafters = [source.make(target.parts)]
        done = list(generate(target, drafters, Fixed(limit), sampler, prompt, max_tokens=40))
        texts.append(emitted(done))
        assert limit == 0 or sum(r.accepted for r in done) > 0
    assert texts[0] == texts[1] == texts[2]


def law_source() -> NetworkSource:
    """A head whose law is far from its likeliest token."""
    source = random_sources.mtp(16, 8)
    source.network.norm.weight *= 0.15
    return source


def test_sampled_drafts_keep_the_law() -> None:
    assert drafted_excess(law_source()) < 1


def test_argmax_drafts_that_pose_as_sampled_are_caught() -> None:
    assert control_excess(law_source()) > 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_quantized(opened: Open, tmp_path: Path, kind: str, bits: int) -> None:
    """Experts and latent attention, too, where their rows are long enough."""
    folder = drafting.write_converted(GOLDEN / kind, GOLDEN / kind, tmp_path / "drafter")
    network = opened(kind).network

    def chosen(path: str, layer: nn.Module) -> bool:
        return path != "fc" and hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0

    nn.quantize(network, 32, bits, class_predicate=chosen)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(network.parameters())))
    source = open_drafter(folder, drafting.read(folder), drafting.read(GOLDEN / kind))
    layers = dict(source.network.named_modules())
    assert type(layers["layers.0.mlp.switch_mlp.up_proj"]).__name__ == "QuantizedSwitchLinear"
    history, target = facts(kind)["history"], LMTarget(model_of(kind), source.needs)
    done = emitted(rounds(target, source.make(target.parts), 3, history[:13], 11, V))
    assert done == history[13:]


def test_trained_pair_converted_loaded_and_at_work(tmp_path: Path) -> None:
    """The head is inside the target's checkpoint; two of its four layers are recurrent."""
    manifest = drafting.prove(TRAINED, "auto", tmp_path / "out")
    part, proof = manifest["parts"]["drafter"], manifest["self_test"]
    assert part["family"] == "qwen_mtp" and part["runnable"] and proof["result"] == "passed"
    assert proof["acceptance"]["length"] > 2
    drafting.check_acceptance(drafting.generate_with(tmp_path / "out"))


# --- at the door


def refused(folder: Path, kind: type[Exception], target: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(kind) as caught:
        open_drafter(folder, {**drafting.read(folder), **changes}, target)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_refusals(tmp_path: Path) -> None:
    kind = "glm4_moe"
    folder = drafting.write_converted(GOLDEN / kind, GOLDEN / kind, tmp_path / "drafter")
    config, theirs = drafting.read(folder), drafting.read(GOLDEN / kind)
    recorded = config["mlx_spec"]
    assert "hidden size 32" in refused(folder, Mismatch, {**theirs, "hidden_size": 48})
    assert "'layers'" in refused(folder, BadCheckpoint, theirs, mlx_spec={**recorded, "hidden": "layers"})
    assert "shift 0" in refused(folder, BadCheckpoint, theirs, mlx_spec={**recorded, "shift": 0})
    text = refused(folder, BadCheckpoint, theirs, layer_type="glm_moe_dsa")
    assert "glm_moe_dsa" in text and all(known in text for known in LAYERS)
    sparse = {**config["text_config"], "index_n_heads": 4}
    text = refused(folder, BadCheckpoint, theirs, layer_type="glm_moe_dsa", text_config=sparse)
    assert text.startswith(
        "the MTP head of a glm_moe_dsa attends through an indexer (index_n_heads 4), which"
    )
    assert "lacks the tensors" in refused(folder, BadCheckpoint, theirs, layer_type="deepseek_v3")
    short = {**config["text_config"], "num_attention_heads": None}
    assert "glm4_moe" in refused(folder, BadCheckpoint, theirs, text_config=short)
