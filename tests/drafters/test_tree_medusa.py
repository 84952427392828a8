"""Medusa's small trees at work: the target's own text, side branches accepted, and what users see of it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import fitted
import grammars
import lossless
import mlx.core as mx
import numpy as np
import pytest
import tiny
from drafting import QUESTIONS, converted
from fitted import opened
from synthetic import Checkpoint
from test_logprobs import recorded

from mlx_spec import load
from mlx_spec.drafters.drawing import SequenceDrafter
from mlx_spec.drafters.medusa import GuessRates
from mlx_spec.drafters.model_free import GrammarFilter
from mlx_spec.model.target import LMTarget
from mlx_spec.model.tree import Tree, tree_of, tree_template
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, AdaptivePolicy, FixedPolicy, Table
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Round, Sampler

GOLDEN = Path(__file__).parents[1] / "golden"
HEADS, COUNT = 4, 48
RATES = [[0.6, 0.15, 0.07, 0.04]] * HEADS
TARGETS = {"full": None, "sliding": None, "shared": None, "quantized": 8}
PENALTIES = Sampling(0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.1, seed=3)


def small(nodes: int, height: int = HEADS) -> Tree:
    return tree_template(nodes, RATES[:height]).tree(nodes)


@cache
def fit(
    kind: str, sampling: Sampling = lossless.GREEDY
) -> tuple[fitted.nn.Module, list[int], list[int], Checkpoint]:
    """A target, a prompt, its text, and heads whose first guess is right, or else the second."""
    model, prompt = getattr(tiny, "full" if kind == "quantized" else kind)(), tiny.prompt(25)
    truth = text(model, kind, prompt, Scripted([]), sampling, 0)[0]
    made = fitted.medusa(len(model.layers), HEADS)
    with tempfile.TemporaryDirectory() as folder:
        needs = opened(made, Path(folder)).needs
    target = LMTarget(model, needs, kv_bits=TARGETS.get(kind))
    target.prefill(prompt[:-1])
    hidden = []
    for token in [prompt[-1], *truth[:-1]]:
        target.verify(mx.array([token]))
        hidden.append(np.array(target.commit(1).final_hidden)[0])
    changes = {}
    for k in range(HEADS):
        wanted = [*truth[k + 1 :], *[0] * (k + 1)]
        other = [(token + 1) % 256 for token in wanted]
        swapped = [(i + k) % 3 == 1 for i in range(len(wanted))]
        first = [b if s else a for a, b, s in zip(wanted, other, swapped, strict=True)]
        second = [a if s else b for a, b, s in zip(wanted, other, swapped, strict=True)]
        changes[f"{k}__0__linear__weight"] = mx.zeros((64, 64))
        changes[f"{k}__0__linear__bias"] = mx.zeros(64)
        changes[f"{k}__1__weight"] = 2 * fitted.head_of(np.array(hidden), first) + fitted.head_of(
            np.array(hidden), second
        )
    return model, prompt, truth, made.changed(**changes)


class Scripted(SequenceDrafter):
    """Trees whose path of truth goes now by first guesses and now by others, and ends now and then."""

    def __init__(self, truth: Sequence[int], needs: FeatureSpec | None = None) -> None:
        self.truth, self.drafts, self.needs = list(truth), 0, needs or FeatureSpec()

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        ahead = self.truth[len(history) : len(history) + limit]
        self.drafts += 1
        if not ahead:
            return Draft(mx.array([], dtype=mx.int32))
        tree = small(14, len(ahead))
        leaves = [path for path in tree.paths if len(path) > 1]
        path = leaves[5 * self.drafts % len(leaves)][1:]
        tokens = [
            (ahead[depth - 1] + 1 + rank) % 256 for depth, rank in zip(tree.depths, tree.ranks, strict=True)
        ][1:]
        for row in path:
            tokens[row - 1] = ahead[tree.depths[row] - 1]
        return Draft(mx.array(tokens, dtype=mx.int32), parents=tree.parents)


def text(
    model: fitted.nn.Module,
    kind: str,
    prompt: list[int],
    drafter: Drafter,
    sampling: Sampling,
    K: int,
) -> tuple[list[int], list[Round]]:
    """Tokens and rounds; K is the most tokens of a tree."""
    target = LMTarget(model, drafter.needs, kv_bits=TARGETS.get(kind))
    done = lossless.rounds(target, drafter, K, prompt, COUNT, sampling=sampling)
    return lossless.emitted(done), done


# --- the draft


def test_a_tree_of_the_heads_likeliest_tokens(tmp_path: Path) -> None:
    """Node by node from the heads' own rows, in the order of an independent ranking."""
    _, prompt, _, made = fit("full")
    source, row = opened(made, tmp_path), fitted.random_rows(1, 1)[0]
    trees, chain = (each.make(None) for each in (source.trees, source))
    sampler = lossless.GREEDY.sampler(1, 256)
    assert trees.draft(prompt, 9, sampler).tokens.size == 0  # nothing was observed
    trees.observe(prompt, Features(final_hidden=row))
    chain.observe(prompt, Features(final_hidden=row))
    ranked = np.argsort(-np.array(source.network(row, HEADS)), axis=-1, kind="stable")
    for nodes in (1, 2, 7, 16):
        draft = trees.draft(prompt, nodes, sampler)
        tree = tree_of(draft.parents)
        assert len(tree.parents) == nodes and draft.probs is None
        for j, token in enumerate(draft.tokens.tolist()):
            assert token == ranked[tree.depths[j + 1] - 1, tree.ranks[j + 1]]
    likeliest = chain.draft(prompt, HEADS, sampler).tokens.tolist()
    assert draft.tokens.tolist()[: tree.height] == likeliest[: tree.height]
    assert trees.draft(prompt, 0, sampler).tokens.size == 0
    assert trees.draft([*prompt, 1], 9, sampler).tokens.size == 0


@pytest.mark.parametrize(("accepted", "chain"), [(HEADS, True), (1, False)])
def test_rates_of_guesses_are_learned(accepted: int, chain: bool) -> None:
    """Where first guesses are right the tree becomes a chain; where only the first one is, it widens."""
    rates, tree = GuessRates(HEADS), small(14)
    drafted = [10 * depth + rank for depth, rank in zip(tree.depths[1:], tree.ranks[1:], strict=True)]
    tokens = [10 * (i + 1) if i < accepted else 99 for i in range(HEADS)]
    for _ in range(300):
        rates.observe(tree, drafted, tokens)
    learned = rates.template().tree(HEADS)
    assert (learned.height == HEADS) is chain
    assert sum(rates.tree_gains()[:HEADS]) == pytest.approx(accepted, abs=0.35)


# --- the text


def check(done: list[Round], nodes: int) -> None:
    """Side branches, whole and partial acceptance, and figures that fit together."""
    trees = [round for round in done if round.nodes]
    assert any(any(round.ranks) for round in trees), "no side branch was accepted"
    assert any(0 < round.accepted < round.drafted for round in trees)
    assert any(rank > 0 and i > 0 for round in trees for i, rank in enumerate(round.ranks))
    for round in trees:
        assert round.accepted <= round.drafted <= round.nodes <= nodes
        assert len(round.ranks) == round.accepted <= len(round.tokens) <= round.accepted + 1


@pytest.mark.parametrize(
    ("kind", "sampling"), [*((kind, lossless.GREEDY) for kind in TARGETS), ("sliding", PENALTIES)]
)
def test_scripted_trees_leave_the_text(kind: str, sampling: Sampling) -> None:
    """Past the sliding window; with penalties, which count the tokens of each path."""
    model, prompt = getattr(tiny, "full" if kind == "quantized" else kind)(), tiny.prompt(25)
    truth, _ = text(model, kind, prompt, Scripted([]), sampling, 0)
    emitted, done = text(model, kind, prompt, Scripted([*prompt, *truth]), sampling, 14)
    assert emitted == truth, lossless.first_difference(emitted, truth)
    check(done, 14)
    assert len(done) < COUNT // 2


@pytest.mark.parametrize(
    ("kind", "nodes", "sampling"),
    [("full", 9, lossless.GREEDY), ("shared", 16, lossless.GREEDY), ("sliding", 16, PENALTIES)],
)
def test_medusa_trees_leave_the_text(kind: str, nodes: int, sampling: Sampling, tmp_path: Path) -> None:
    model, prompt, truth, made = fit(kind, sampling)
    emitted, done = text(model, kind, prompt, opened(made, tmp_path).trees.make(None), sampling, nodes)
    assert emitted == truth, lossless.first_difference(emitted, truth)
    check(done, nodes)


@pytest.mark.parametrize("place", [13, 16, 17])
def test_a_stop_token_inside_a_path(place: int) -> None:
    """The text ends with it, the caches hold all before it, and what follows is right."""
    model, prompt = tiny.sliding(), tiny.prompt(25)
    truth, _ = text(model, "sliding", prompt, Scripted([]), lossless.GREEDY, 0)
    place = truth.index(truth[place])
    target = LMTarget(model)
    drafter = Scripted([*prompt, *truth])
    rounds = lossless.rounds(target, drafter, 14, prompt, COUNT, stop=[truth[place]])
    emitted = lossless.emitted(rounds)
    assert emitted == truth[: place + 1] and rounds[-1].finish_reason == "stop"
    assert rounds[-1].accepted <= len(rounds[-1].tokens)
    assert target.size == len(prompt) + place and target.uncommitted == 0
    again = lossless.rounds(target, drafter, 14, [*prompt, *emitted], COUNT - place - 1)
    assert lossless.emitted(again) == truth[place + 1 :]


# --- heads that were trained, from `load` on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "pair"
    converted(GOLDEN / "12b-trained" / "target", GOLDEN / "trained" / "medusa", out)
    return out


PLAIN = 0.03  # seconds of a plain token


class Simulated(AdaptivePolicies):
    """Adaptive policies on a virtual clock: every pass takes as long, drafts take no time."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.now = 0.0
        self.use(Table(PLAIN, {1: PLAIN, 17: PLAIN}, [{} for _ in names]))

    def policy(self, clock=None, gains=None) -> AdaptivePolicy:
        policy = super().policy(lambda: self.now, gains)
        observe = policy.observe

        def observe_later(round: Round) -> None:
            self.now += PLAIN
            observe(round)

        policy.observe = observe_later
        return policy


@pytest.fixture(scope="module")
def pairs(folder: Path) -> tuple[Pair, Pair]:
    """Trained heads with their target, and the target alone."""
    return load(folder), load(folder, "none")


@pytest.mark.parametrize("sampling", [lossless.GREEDY, Sampling(0.8, top_p=0.95, seed=6)])
def test_trained_heads_draft_trees_where_width_is_free(pairs: tuple[Pair, Pair], sampling: Sampling) -> None:
    """Past the target's window of 16; every answer is the first of its conversation."""
    pair, alone = pairs
    assert pair.drafter_names == ("medusa", "medusa trees", "lookup")
    pair.policies = Simulated(pair.drafter_names)
    done: list[Round] = []
    for question in QUESTIONS:
        prompt = [2, *pair.text.encode(question)]
        found = list(pair.generate(prompt, sampling=sampling, max_tokens=COUNT))
        plain = lossless.emitted(list(alone.generate(prompt, sampling=sampling, max_tokens=COUNT)))
        assert lossless.emitted(found) == plain, question
        done += found
    check(done, 16)
    trees = [round for round in done if round.nodes]
    assert len(trees) > 0.6 * sum(round.drafted > 0 for round in done)
    assert {0, 3} <= {round.accepted for round in trees}
    assert sum(round.accepted for round in trees) > 1.5 * len(trees)


# --- what is seen of it


@pytest.mark.parametrize("sampling", [lossless.GREEDY, PENALTIES])
def test_log_probabilities_along_side_branches(sampling: Sampling) -> None:
    """They equal those of plain decoding, token for token."""
    model, prompt = tiny.sliding(), tiny.prompt(25)
    found, truth = [], list[int]()
    for K in (0, 14):
        rounds, said = recorded(model, Scripted([*prompt, *truth]), FixedPolicy(K), sampling, prompt)
        truth = lossless.emitted(rounds)
        found.append(said)
    check(rounds, 14)
    for plain, drafted in zip(*found, strict=True):
        assert (plain.token, [a.token for a in plain.top]) == (drafted.token, [a.token for a in drafted.top])
        assert drafted.logprob == pytest.approx(plain.logprob, abs=1e-4)


def test_a_grammar_holds_on_every_path() -> None:
    model, prompt = tiny.full(), tiny.prompt(25)
    sampling = Sampling(grammar=grammars.compiled("regex", "[a-f]{30}[0-9]{40}"))
    truth, _ = text(model, "full", prompt, Scripted([]), sampling, 0)
    assert (
        bytes(truth[:32]).isalnum()
        and truth != text(model, "full", prompt, Scripted([]), lossless.GREEDY, 0)[0]
    )
    matcher = sampling.grammar.matcher(prompt)
    drafter = GrammarFilter(Scripted([*prompt, *truth]), matcher, len(prompt))
    emitted, done = text(model, "full", prompt, drafter, sampling, 14)
    assert emitted == truth, lossless.first_difference(emitted, truth)
    check(done, 14)
