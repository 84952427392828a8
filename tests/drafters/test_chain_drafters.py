"""EAGLE-3 and native MTP heads: the numbers of independent constructions, their state, their refusals."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from support import drafting
from support.drafting import K, Seen, drafted
from support.fitted import largest
from support.lossless import emitted, mlx_lm_greedy, plain, rounds
from support.synthetic import Checkpoint

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.convert.converted import convert_model
from mlx_spec.convert.plan import Conversion, open_source
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.types import Drafter, Features

ROOT = Path(__file__).parents[1] / "golden"
EAGLE = ("official", "speculators")
MTP = {
    "qwen3_5_text": "qwen_mtp",
    "qwen3_next": "qwen_mtp",
    "glm4_moe": "glm_mtp",
    "glm4_moe_lite": "glm_mtp",
    "deepseek_v3": "deepseek_mtp",
}
NAMES = (*EAGLE, *MTP)
TOLERANCE = 1e-5


class Golden:
    """A published drafter, its target, and the features and logits of an independent construction."""

    def __init__(self, name: str) -> None:
        self.is_eagle = name in EAGLE
        root = ROOT / "eagle3" if self.is_eagle else ROOT / "mtp" / name
        self.published = root / name if self.is_eagle else root
        self.target_folder = root / "llama" if self.is_eagle else root
        self.facts = drafting.read(root, "golden.json")
        self.history, self.prompt = self.facts["history"], self.facts["prompt"]
        self.drafts = self.facts["drafts"][name] if self.is_eagle else self.facts["drafts"]
        self.vocab = 96 if self.is_eagle else 64
        self.ids = mx.array(self.facts["draft_ids"] if self.is_eagle else list(range(self.vocab)))
        tensors = mx.load(str(root / "golden.safetensors"))
        prefix = name if self.is_eagle else "draft"
        self.logits = [tensors[f"{prefix}.{i}"] for i in range(len(self.drafts))]
        if self.is_eagle:
            self.features = Features(tuple(mx.split(tensors["features"], 3, axis=-1)))
        else:
            self.features = Features(final_hidden=tensors["hidden"])

    @cached_property
    def model(self) -> nn.Module:
        """The target, without a head in its checkpoint, in float32."""
        found = convert_model(Conversion(open_source(str(self.target_folder)), dtype="float32"))
        with tempfile.TemporaryDirectory() as folder:
            model, _ = load_model(Checkpoint(found.tensors, found.config, {}).write(Path(folder)))
        return model

    @cached_property
    def source(self) -> DrafterSource:
        """The drafter as it should be, for those who do not change it."""
        return self.open()

    def open(self, **conventions: Any) -> DrafterSource:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "drafter"
            source = drafting.open_converted(self.published, self.target_folder, path, **conventions)
            mx.eval(source.network.parameters())
        return source

    def errors(self, rounds: Iterable[Seen]) -> list[list[float]]:
        """Return the largest difference of each draft token's logits, by round."""
        return [
            [largest(ours[self.ids], theirs) for ours, theirs in zip(seen.logits, expected, strict=True)]
            for seen, expected in zip(rounds, self.logits, strict=True)
        ]

    def rounds(self, source: DrafterSource, chunks: Sequence[int] = ()) -> list[Seen]:
        return list(drafting.in_rounds(self.model, source, self.facts, chunks))

    def target(self, source: DrafterSource) -> LMTarget:
        return LMTarget(self.model, source.needs)

    def fresh(self, source: DrafterSource, history: Sequence[int]) -> Drafter:
        """A new drafter that has seen `history`, a beginning of the golden one."""
        return drafting.fresh(source, self.target(source), history, self.features)

    def difference(self, ours: Drafter, theirs: Drafter, history: Sequence[int]) -> float:
        one, other = drafted(ours, history), drafted(theirs, history)
        assert one.tokens == other.tokens
        return largest(one.logits[:, self.ids], other.logits[:, self.ids])


@cache
def golden(name: str) -> Golden:
    return Golden(name)


# --- the same numbers as independent constructions


@pytest.mark.parametrize("name", NAMES)
def test_features_and_text_of_the_target(name):
    g = golden(name)
    found, source = g.features, g.source
    ours = g.target(source).prefill(g.history)
    for a, b in zip((*ours.hidden, ours.final_hidden), (*found.hidden, found.final_hidden), strict=True):
        assert a is b or largest(a, b) < TOLERANCE
    assert plain(g.model, g.history[: g.prompt], len(g.history) - g.prompt) == g.history[g.prompt :]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_all_rounds(name):
    """Rounds keep some, none or all of 4 draft tokens; the prompt comes whole or in pieces."""
    g = golden(name)
    assert g.source.name == MTP.get(name, "eagle3")
    by_mlx_vlm = mx.load(str(ROOT / "eagle3" / "mlx_vlm.safetensors"))
    for chunks in ((), (1, 4, g.prompt - 6)):
        found = g.rounds(g.source, chunks)
        assert max(map(max, g.errors(found))) < TOLERANCE
        assert [seen.tokens for seen in found] == g.drafts
        for i, logits in enumerate(seen.logits for seen in found):
            assert logits.shape == (K, g.vocab)
            assert mx.isfinite(logits).sum() == K * g.ids.size  # -inf outside the drafter's vocabulary
            assert not g.is_eagle or largest(logits[:, g.ids], by_mlx_vlm[f"{name}.{i}"]) < TOLERANCE


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_rounds_are_those_of_transformers_generate(name):
    """Drafts of one token: the same logits, the same acceptance, the same text."""
    g, source = golden(name), golden(name).source
    facts = drafting.read(g.published, "generated.json")
    logits = mx.load(str(g.published / "generated.safetensors"))["logits"]
    history, begins = facts["history"], facts["begins"]
    target = g.target(source)
    drafter, start = source.make(target.parts), 0
    for begin, theirs in zip(begins, logits, strict=True):
        drafter.observe(history[:begin], target.prefill(history[start : begin - 1]))
        start = begin - 1
        assert largest(drafted(drafter, history[:begin], 1).logits[0], theirs) < TOLERANCE
    target, prompt = g.target(source), history[: facts["prompt"]]
    done = rounds(target, source.make(target.parts), 1, prompt, len(history) - len(prompt), g.vocab)
    assert prompt + emitted(done) == history
    ends = [len(prompt) + sum(len(r.tokens) for r in done[: i + 1]) for i in range(len(done))]
    assert ends[:-1] == begins[: len(ends) - 1]  # transformers has no draft in its first round
    assert any(r.accepted for r in done) and any(r.drafted > r.accepted for r in done)


WRONG: list[tuple[str, dict[str, Any]]] = [
    *((name, {"capture": capture}) for name in EAGLE for capture in ([0, 2, 3], [2, 4, 5])),
    *((name, {"rope": "own"}) for name in EAGLE),
    *((name, {"hidden": "pre_norm"}) for name in MTP),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_wrong_conventions_change_every_draft(name, wrong):
    g = golden(name)
    assert min(map(max, g.errors(g.rounds(g.open(**wrong))))) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["official", *MTP])
def test_wrong_chaining_changes_all_but_the_first_token(name):
    g = golden(name)
    chain = "post_norm" if g.is_eagle else "pre_norm"
    for first, *rest in g.errors(g.rounds(g.open(chain=chain))):
        assert first < TOLERANCE and max(rest) > 100 * TOLERANCE


# --- their state


@pytest.mark.parametrize("name", ["official", "deepseek_v3"])
def test_another_end_of_a_known_prefix(name):
    """The row that read the token that changed is dropped; everything before it stays."""
    g = golden(name)
    source, history = g.source, g.history
    target = g.target(source)
    drafter = source.make(target.parts)
    drafter.observe(history, target.prefill(history[:-1]))
    kept = target.rewind(9)
    other = [*history[:10], 1, 2, 3]
    drafter.observe(other, target.prefill(other[kept:-1]))
    whole = g.target(source)
    expected = source.make(whole.parts)
    expected.observe(other, whole.prefill(other[:-1]))
    assert g.difference(drafter, expected, other) < TOLERANCE


@pytest.mark.parametrize("name", ["official", "deepseek_v3"])
@pytest.mark.parametrize("drafts", [0, 1])  # a draft writes the rows that wait, and leaves rows after them
def test_a_restored_drafter_drafts_as_the_saved_one(name, drafts):
    g = golden(name)
    source, target = g.source, g.target(g.source)
    saved, restored = source.make(target.parts), source.make(target.parts)
    saved.observe(g.history[:9], target.prefill(g.history[:8]))
    for _ in range(drafts):
        drafted(saved, g.history[:9], K)
    saved.observe(g.history, target.prefill(g.history[8:-1]))
    restored.restore(saved.state())
    assert restored.nbytes <= saved.nbytes  # a state has no unused rows
    assert g.difference(saved, restored, g.history) < TOLERANCE


# --- at work


@pytest.mark.parametrize("name", MTP)
def test_rounds_over_three_turns_equal_plain_decoding(name):
    """Recurrent targets go back to checkpoints, others to any place; the head follows them."""
    g = golden(name)
    targets = {limit: g.target(g.source) for limit in (1, 4)}
    drafters, prompt = (
        {limit: g.source.make(target.parts) for limit, target in targets.items()},
        g.history[:7],
    )
    for turn in range(3):
        answer = plain(g.model, prompt, 7)
        assert answer == mlx_lm_greedy(g.model, prompt, 7)
        for limit, target in targets.items():
            assert emitted(rounds(target, drafters[limit], limit, prompt, 7, g.vocab)) == answer
        prompt = prompt + answer + [3 * turn, 5, 7]


def test_drawn_tokens_come_with_their_distribution():
    """Also in half precision, where tokens outside the reduced vocabulary have logits of -inf."""
    g = golden("official")
    source = g.open()
    source.network.set_dtype(mx.bfloat16)
    draft = g.fresh(source, g.history).draft(g.history, K, Sampling(temperature=1.0).sampler(1, g.vocab))
    assert draft.probs is not None and draft.probs.shape == (K, g.vocab)
    assert largest(draft.probs.sum(axis=-1), mx.ones(K)) < 1e-5
    assert ((draft.probs > 0).sum(axis=-1) <= g.ids.size).all()
    assert mx.take_along_axis(draft.probs, draft.tokens[:, None], axis=-1).min().item() > 0


@pytest.mark.parametrize(("name", "bits"), [("official", 8), ("qwen3_next", 4), ("deepseek_v3", 4)])
def test_quantized(name, bits, tmp_path):
    """Experts and latent attention, too, where their rows are long enough."""
    g = golden(name)
    folder = drafting.write_converted(g.published, g.target_folder, tmp_path / "drafter")
    network = g.open().network
    drafting.quantize(network, bits, 32, "fc")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(network.parameters())))
    source: Any = open_drafter(read_checkpoint(folder), drafting.read(folder), drafting.read(g.target_folder))
    layers = dict(source.network.named_modules())
    assert isinstance(layers["fc"], nn.Linear)
    quantized = layers["lm_head" if g.is_eagle else "layers.0.mlp.switch_mlp.up_proj"]
    assert type(quantized).__name__ == ("QuantizedLinear" if g.is_eagle else "QuantizedSwitchLinear")
    target = g.target(source)
    done = rounds(target, source.make(target.parts), 3, g.history[: g.prompt], 11, g.vocab)
    assert emitted(done) == g.history[g.prompt :][:11]
