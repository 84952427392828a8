"""Drafters that are converted: lossless, exact, loaded, refused, and as good as new after any rounds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import drafting, fitted, lossless, random_sources, synthetic, tiny
from support.checkpoints import edit_tensors
from support.drafting import GOLDEN, emitted
from support.exact_distribution import (
    FILTERED,
    PLAIN,
    drafted_excess,
    drawn_excess,
    law_target,
    seeded,
)
from support.fitted import MADE, largest, logits_of, opened, random_rows, replay
from support.grammars import byte_text, compiled
from support.pairs import pair_with

import mlx_spec
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.decode import round as one_round
from mlx_spec.decode.loop import decode
from mlx_spec.drafters import open_drafter
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Features, Round

CHAINS = ("eagle3", "mtp")
BLOCKS = ("dflash", "dflash2", "dspark", "gemma4_dspark")
CONDITIONAL = (*BLOCKS[1:], "mlp_speculator")  # each token depends on the one before it
ROWS = ("dflash", "gemma4_dspark", "peagle")  # their caches hold rows of several layers of the target


# --- the rows it keeps


@pytest.mark.parametrize("family", ROWS)
def test_after_a_long_prompt_and_any_rounds_it_is_as_good_as_new(family, tmp_path):
    length, parts = 104, LMTarget(tiny.full()).parts
    source, rows = opened(MADE[family](), tmp_path), random_rows(length + 30, 3)
    history = tiny.prompt(length + 31)
    begins = [length, length + 1, length + 5, length + 5, length + 8, length + 9]
    found = replay(source.make(parts), history, rows, begins, 4)
    for begin, logits in zip(begins, found, strict=True):
        assert largest(logits, replay(source.make(parts), history, rows, [begin], 4)[0]) < 5e-5


@pytest.mark.parametrize("family", ROWS)
def test_cold_start(family, tmp_path):
    """A prefix that the target held already was never seen: drafts from what there is."""
    source, history = opened(MADE[family](), tmp_path), tiny.prompt(31)
    sampler, features = lossless.GREEDY.sampler(1, 256), Features(tuple(random_rows(5, 3)))
    drafter, again = (source.make(LMTarget(tiny.full()).parts) for _ in range(2))
    assert drafter.draft(history[:1], 4, sampler).tokens.size == 0
    drafter.observe(history[:21], features)
    again.observe(history[15:21], features)
    for _ in range(2):
        assert largest(logits_of(drafter, history[:21], 4), logits_of(again, history[15:21], 4)) < 1e-4
    assert [drafter.draft(history[:21], k, sampler).tokens.size for k in (0, 1, 3)] == [0, 1, 3]
    for stranger in (history[:20], [*history[:20], 3], history[:22]):
        assert drafter.draft(stranger, 4, sampler).tokens.size == 0


@pytest.mark.parametrize("family", ["dflash", "dspark", "peagle"])
def test_reduced_vocabulary(family, tmp_path):
    """d2t holds offsets; other tokens have no probability."""
    kept = [i for i in range(256) if i % 5 == 2]
    head = mx.random.normal((len(kept), 64), key=mx.random.key(3))
    config = {"speculators_model_type": "dflash"} if family == "dflash" else {}
    made = MADE[family](draft_vocab_size=len(kept), **config)
    biases = {"markov_head__markov_w2__weight": mx.random.normal((len(kept), 8), key=mx.random.key(4))}
    heads = {"lm_head__weight": head, **(biases if family == "dspark" else {})}
    source = opened(made.changed(**heads, d2t=mx.array(kept) - mx.arange(len(kept))), tmp_path)
    history, drafter = tiny.prompt(10), source.make(LMTarget(tiny.full()).parts)
    drafter.observe(history, Features(tuple(random_rows(9, 3))))
    logits = logits_of(drafter, history, 4)
    assert mx.isfinite(logits).sum(axis=-1).tolist() == [len(kept)] * 4
    wide = {name: mx.zeros((256, t.shape[1])).at[mx.array(kept)].add(t) for name, t in heads.items()}
    full = opened(MADE[family]().changed(**wide), tmp_path / "full")
    whole = full.make(LMTarget(tiny.full()).parts)
    whole.observe(history, Features(tuple(random_rows(9, 3))))
    assert largest(logits[:, mx.array(kept)], logits_of(whole, history, 4)[:, mx.array(kept)]) < 1e-4
    draft = drafter.draft(history, 4, Sampling(1.0).sampler(1, 256))
    assert mx.where(mx.arange(256) % 5 == 2, 0, draft.probs).max().item() == 0
    path = tmp_path / "converted"
    edit_tensors(path, lambda tensors: tensors.update(draft_ids=tensors["draft_ids"] + 200))
    with pytest.raises(BadCheckpoint, match="'draft_ids' has tokens from 202 to 452"):
        open_drafter(
            read_checkpoint(path), drafting.read(path), made.target
        )  # MLX would write beyond the logits


# --- the distribution


def law_source(family: str, folder: Path) -> Any:
    if family in CHAINS:
        known = (1, 2, 4, 7)  # half of the eight tokens
        source = random_sources.mtp(16, 8)
        if family == "eagle3":
            source = random_sources.eagle3(16, 8, known, (0,), seed=7)
        source.network.norm.weight *= 0.15  # its distribution is far from its likeliest token
        return source
    if family == "medusa":
        return opened(fitted.medusa(2, hidden=16, vocab=8), folder)
    if family == "pard":
        return opened(fitted.pard(law_target.__wrapped__(), 2, 0.2), folder)
    # Each is far from its likeliest token, so that it matters what is drawn.
    if family == "mlp_speculator":
        made = synthetic.mlp_speculator(2, 16, 8, 16, 2)
        return opened(made.scaled(".head.", 0.3), folder)
    if family in BLOCKS:
        made = vars(synthetic)[family](2, (0, 1), 16, 8)
        return opened(made.scaled("norm.weight", 0.5) if family == "dflash2" else made, folder)
    assert family == "peagle", f"a distribution of {family} far from its likeliest token is missing here"
    return opened(fitted.peagle(2, (0, 1), 16, 8).scaled("norm.weight", 0.5), folder)


@pytest.mark.parametrize("family", [family for family in (*MADE, *CHAINS) if family != "medusa"])
def test_drafts_are_drawn_from_the_distributions_that_they_name(family, tmp_path):
    """With top-p and penalties where a token depends on the one before in the same pass.

    Argmax drafts that pose as drawn are caught. Medusa draws nothing.
    """
    source = law_source(family, tmp_path)
    assert drawn_excess(source, FILTERED if family in CONDITIONAL else PLAIN) < 1
    assert drawn_excess(source, lies=True) > 1


@pytest.mark.parametrize(("family", "sampler"), [("dflash2", None), ("eagle3", seeded(FILTERED))])
def test_what_is_emitted_keeps_the_distribution(family, sampler, tmp_path):
    """Of candidates that were drawn, and with a seed of a reduced vocabulary. Rounds are the same for all."""
    assert drafted_excess(law_source(family, tmp_path), FILTERED, sampler) < 1


SAMPLINGS = (
    Sampling(),
    Sampling(0.9, top_p=0.9, seed=6),
    Sampling(0.9, top_p=0.9, seed=6, grammar=compiled("regex", "[a-h ]{20,60}")),
)


PROMPTS = [tiny.prompt(length, seed=length) for length in (5, 20, 13)]


def tiny_pair(*sources: Any) -> Pair:
    return pair_with(tiny.model_of("full"), sources, 3, byte_text(), kv_bits=8)


TOKENS = 14


@cache
def plain_texts() -> list[list[int]]:
    """Return the answers of plain decoding, once for all drafters."""
    pair = tiny_pair()
    asked = zip(PROMPTS, SAMPLINGS, strict=True)
    return [emitted(list(pair.generate(p, sampling=each, max_tokens=TOKENS))) for p, each in asked]


@pytest.mark.parametrize("family", CONDITIONAL)
def test_seeds_grammars_batches_and_quantized_kv_change_no_text(family, tmp_path, monkeypatch):
    """Alone there is one copy to the host a round."""
    pair = tiny_pair(opened(MADE[family](), tmp_path))
    read, copies = one_round._read, list[int]()
    monkeypatch.setattr(one_round, "_read", lambda array: copies.append(array.size) or read(array))
    asked = list(zip(PROMPTS, SAMPLINGS, strict=True))
    plain_texts()
    copies.clear()
    rounds = [list(pair.generate(p, sampling=each, max_tokens=TOKENS)) for p, each in asked]
    assert [emitted(done) for done in rounds] == plain_texts()
    assert len(copies) == sum(map(len, rounds))
    assert all(sum(round.drafted for round in done) > 10 for done in rounds)
    batch, together = pair.batch(), dict[int, list[int]]()
    for prompt, sampling in asked:
        added = pair.prepare(pair.open(), prompt, sampling=sampling, max_tokens=TOKENS)
        together[batch.add(added)] = []
    for id, round in batch.run():
        assert isinstance(round, Round)
        together[id] += round.tokens
    assert list(together.values()) == plain_texts()


# --- from published checkpoints to text


EIGHT = {"quantization": "8", "group_size": 32, "drafter_bits": "8", "dtype": None}


@pytest.fixture(scope="module")
def eight_bit_text(tmp_path_factory):
    """What the target of most trained pairs says with 8 bits, plainly."""
    folder = tmp_path_factory.mktemp("eight")
    drafting.converted(GOLDEN / "12b-trained" / "target", "none", folder / "out", **EIGHT)
    pair = mlx_spec.load(folder / "out", "none")
    prompt = [2, *pair.tokenizer.encode(drafting.QUESTIONS[0])]
    return emitted(list(pair.generate(prompt, max_tokens=14)))


@pytest.mark.parametrize("family", [family for family in MADE if family in drafting.TRAINED])
def test_quantized_pairs_generate_the_target_s_text(family, tmp_path, eight_bit_text):
    out = tmp_path / "out"
    part = drafting.converted(*drafting.TRAINED[family], out, **EIGHT)["parts"]["drafter"]
    assert part["family"] == family and "quantization" in part
    loaded = mlx_spec.load(out, num_draft_tokens=4)
    pair = loaded.with_policies(FixedPolicy(4))  # that of a loaded pair times plain tokens, too
    assert pair.drafter_names == (family,)
    prompt = [2, *pair.tokenizer.encode(drafting.QUESTIONS[0])]
    text = emitted(list(pair.generate(prompt, max_tokens=14)))
    assert text == eight_bit_text and len(text) > 10


@pytest.mark.parametrize("family", drafting.TRAINED)
def test_trained_pairs_accept_in_full_and_in_part_and_reject(family, tmp_path):
    """Greedy and seeded texts run past the window of a target that has one."""
    target, out = drafting.TRAINED[family][0], tmp_path / "out"
    manifest = drafting.prove(*drafting.TRAINED[family], out)
    part, proof = manifest["parts"]["drafter"], manifest["self_test"]
    assert part["family"] == family and proof["result"] == "passed"
    assert proof["acceptance"]["length"] > 1.5
    loaded = mlx_spec.load(out, num_draft_tokens=3)
    pair = loaded.with_policies(FixedPolicy(3))  # that of a loaded pair times plain tokens, too
    greedy = drafting.generate_with(pair, target, (0,))
    seeded = drafting.generate_with(pair, target, (1,), Sampling(0.8, top_p=0.95, seed=7))
    drafting.check_acceptance([*greedy, *seeded])
    for done in (greedy, seeded):
        assert len({round.accepted for round in done if round.drafted == 3}) > 1


# --- a target that holds a prefix which its drafter never saw


def pair_of(family: str, folder: Path) -> Pair:
    if family == "eagle3":
        target, published = drafting.TRAINED[family]
        drafter = drafting.write_converted(published, target, folder / "drafter")
        return mlx_spec.load(target, drafter, num_draft_tokens=2)
    return pair_with(tiny.model_of("full"), [opened(MADE[family](), folder)], 2)


@pytest.mark.parametrize("family", ["dflash", "eagle3", "peagle"])
def test_tokens_that_a_drafter_never_saw_are_counted(family, tmp_path):
    pair = pair_of(family, tmp_path)
    prompt = [2, *tiny.prompt(40)[1:]]
    warm, cold = pair.open(), pair.open()
    cold.target.prefill(prompt[:25])
    cold.append(prompt[:25])
    expected: list[int] = []
    for cached, before in ((warm, (0, 0)), (cold, (25, 25))):
        assert (cached.rewind_to_prefix(text_prompt(prompt)), cached.drafter_missing) == before
        tokens = emitted(list(decode(pair.prepare(cached, prompt, max_tokens=8))))
        expected = expected or tokens
        assert tokens == expected
        cached.append(tokens)
    longer = [*prompt, *expected[:5], 9, 9]
    kept = len(prompt) + 5
    assert (warm.rewind_to_prefix(text_prompt(longer)), warm.drafter_missing) == (kept, 0)
    assert (cold.rewind_to_prefix(text_prompt(longer)), cold.drafter_missing) == (
        kept,
        25,
    )  # those rows are gone for good


@pytest.mark.parametrize(("kind", "missing"), [("rwkv7", "embedding"), ("plamo2", "last hidden state")])
def test_a_drafter_of_a_target_whose_parts_are_not_known_is_refused_at_load(kind: str, missing: str) -> None:
    """With a fixed draft length nothing is measured, so the first answer would raise it."""
    pair = pair_with(tiny.make(kind), [random_sources.mtp(128, 256)], 3)
    with pytest.raises(Mismatch, match=f"the {missing} of its target, which is not known for {kind}"):
        pair.check()
