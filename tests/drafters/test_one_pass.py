"""Families that draft in one pass: lossless, exact, converted, loaded and refused alike."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import drafting
import fitted
import lossless
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from drafting import emitted
from exact_distribution import Liar
from fitted import Checkpoint, largest, logits_of, opened, random_rows
from mlx.utils import tree_flatten
from one_pass_law import control_excess, drafted_excess, excess, law_target, seeded_texts
from test_session import TEMPLATE, TOKENIZER

import mlx_spec
from mlx_spec.convert.convert import Request, convert
from mlx_spec.drafters import DrafterSource
from mlx_spec.engine import decode
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.hub.progress import StageProgress
from mlx_spec.model.sequence import CachedSequence
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair, PairInfo
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.text import Text
from mlx_spec.text.chat_template import ChatTemplate
from mlx_spec.types import Draft, Features

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("medusa", "pard", "dflash", "peagle")
MADE: dict[str, Any] = {
    "medusa": fitted.medusa,
    "dflash": lambda layers, **config: fitted.dflash(layers, (0, 1, 2), **config),
    "peagle": lambda layers, **config: fitted.peagle(layers, (0, 1, 2), **config),
}
TARGETS = {"full": None, "sliding": None, "recurrent": None, "quantized": 8}


# --- at work


@cache
def fit(family: str, kind: str) -> tuple[nn.Module, list[int], list[int], Checkpoint]:
    """A target, a prompt, its greedy text, and a drafter that knows most of it."""
    model, prompt = getattr(tiny, "full" if kind == "quantized" else kind)(), tiny.prompt(25)
    truth = lossless.plain(model, prompt, 40, TARGETS[kind])
    layers = len(model.layers)
    if family == "pard":  # the target itself, disturbed, where it can be one; else a stranger
        own = kind in ("full", "quantized")
        made = fitted.pard(tiny.full(), layers, 0.02) if own else fitted.pard(tiny.full(seed=1), layers)
        made.config["max_position_embeddings"] = 512
        return model, prompt, truth, made
    made = MADE[family](layers)
    with tempfile.TemporaryDirectory() as folder:
        source = opened(made, Path(folder))
        if family == "medusa":
            return model, prompt, truth, made.changed(**_medusa_heads(model, prompt, truth, source))
        rows, wanted = fitted.gather(source, model, prompt, truth, 4)
    return model, prompt, truth, made.changed(lm_head__weight=fitted.head_of(rows, wanted))


def _medusa_heads(
    model: nn.Module, prompt: list[int], truth: list[int], source: DrafterSource
) -> dict[str, mx.array]:
    """Heads whose blocks do nothing."""
    target = LMTarget(model, source.needs)
    target.verify(mx.array([*prompt, *truth][:-1]))
    hidden = np.array(target.commit(len(prompt) + 39).final_hidden)[len(prompt) - 1 :]
    changes = {}
    for k in range(4):
        wanted = [*truth[k + 1 :], *[0] * (k + 1)]
        wanted = [(token + 1) % 256 if (i + k) % 6 == 3 else token for i, token in enumerate(wanted)]
        changes[f"{k}__0__linear__weight"] = mx.zeros((64, 64))
        changes[f"{k}__0__linear__bias"] = mx.zeros(64)
        changes[f"{k}__1__weight"] = fitted.head_of(hidden, wanted)
    return changes


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_lossless(family, kind, tmp_path):
    model, prompt, truth, made = fit(family, kind)
    accepted = fitted.lossless_rounds(opened(made, tmp_path), model, prompt, truth, 4, TARGETS[kind])
    if family != "pard" or kind in ("full", "quantized"):
        assert set(accepted) & {1, 2, 3}


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
        return opened(fitted.pard(law_target.__wrapped__(), 2, 0.2), folder)
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
    drafter: Any = Posing(source.make(LMTarget(law_target(), source.needs).parts))
    assert excess(source, drafter, 200) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_seeded_text_is_the_same_without(family, tmp_path):
    with_drafter, without = seeded_texts(law_source(family, tmp_path))
    assert with_drafter == without


# --- from published checkpoints to text


def write_target(folder: Path, model: nn.Module) -> Path:
    """Write `model` as a checkpoint with a tokenizer."""
    kept = shutil.ignore_patterns("*.safetensors", "generation_config.json")
    shutil.copytree(GOLDEN / "12b" / "target", folder, ignore=kept)
    config = {key: value for key, value in vars(model.args).items() if value is not None}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    weights = {
        name.replace(".layer.", "."): w for name, w in tree_flatten(model.parameters())
    }  # wrapped layers
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def converted(family: str, folder: Path, bits: tuple[str, str] = ("none", "none")) -> dict[str, Any]:
    """Convert a fitted pair to `folder`/out and return its manifest; bits of target and drafter."""
    model, _, _, published = fit(family, "full")
    target, drafter = write_target(folder / "target", model), published.write(folder / "drafter")
    asked = Request(str(target), str(drafter), folder / "out", bits[0], 32, bits[1], None, True)
    return convert(asked, StageProgress(io.StringIO()))


@pytest.mark.parametrize("bits", ["none", "8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_pairs_generate_the_target_s_text(family, bits, tmp_path):
    _, prompt, truth, _ = fit(family, "full")
    part = converted(family, tmp_path, (bits, "8"))["parts"]["drafter"]
    assert part["family"] == family and "quantization" in part
    pair = mlx_spec.load(tmp_path / "out", num_draft_tokens=4)
    assert pair.drafter_names == (family,)
    rounds = list(pair.generate(prompt, max_tokens=len(truth)))
    plain = mlx_spec.load(tmp_path / "out", "none").generate(prompt, max_tokens=len(truth))
    assert emitted(rounds) == emitted(list(plain)) and len(emitted(rounds)) > 10
    assert rounds[-1].finish_reason in ("stop", "length")
    if bits == "none":
        assert emitted(rounds) == truth[: len(emitted(rounds))]
        assert sum(round.accepted for round in rounds) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_pairs_accept_in_full_and_in_part_and_reject(family, tmp_path):
    """All texts run past the target's window of 16: greedy ones, and with a seed."""
    trained, out = str(GOLDEN / "trained" / family), tmp_path / "out"
    manifest = drafting.prove(GOLDEN / "12b-trained" / "target", trained, out)
    part, proof = manifest["parts"]["drafter"], manifest["self_test"]
    assert part["family"] == family and proof["result"] == "passed"
    assert proof["acceptance"]["length"] > 1.5
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
        opened(fit(family, "full")[3], tmp_path, edit=lambda config: config.update(changes))
