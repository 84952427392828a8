"""Drafting ahead, in a thread and on another rank: the text stays plain decoding's.

Only the right outcome is answered from the store. `test_ranks` has ranks that are processes.
"""

from __future__ import annotations

import copy
import gc
import json
import queue
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from support import chi_square, exact_distribution, lossless, random_sources, recited, tiny
from support.exact_distribution import PLAIN, V
from support.forked import start_python
from support.lossless import emitted
from support.waiting import wait_until

from mlx_spec.ahead.drafter import Ahead, AheadThread, LocalCopy, ahead_source
from mlx_spec.ahead.ranks import NO_PARTS, RemoteDrafter, draft_for_rank_0
from mlx_spec.decode import Batch
from mlx_spec.decode.loop import generate
from mlx_spec.decode.running import RunningSequence
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.draft_model import (
    BranchCall,
    DraftModel,
    Outcome,
    Pard,
    VocabularySizes,
    draft_model_source,
)
from mlx_spec.drafters.lookup import lookup_source
from mlx_spec.errors import InvalidValue
from mlx_spec.load import load
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Reason, Round, Sampler

SAME = VocabularySizes(tiny.VOCAB, tiny.VOCAB)
K = 4
AHEAD = FixedPolicy(K, ahead=True)
PROMPT = tiny.prompt(25)
NOTHING = Features()
GREEDY = Sampling().sampler(len(PROMPT), tiny.VOCAB)
TOKENS = 240  # the wrong store is seen after 200


class Inline(AheadThread):
    """Drafts at once: every draft is ready when the verdict comes."""

    def run(self, job: Callable[[], None]) -> None:
        job()


class Waiting(AheadThread):
    """The real thread; its drafts are waited for."""

    def run(self, job: Callable[[], None]) -> None:
        done = threading.Event()
        super().run(job)
        super().run(done.set)
        done.wait()


class Treeless(DraftModel):
    """A draft model that cannot read trees."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._model.tree_obstacle = "it is said to be so"


class Line:
    """One end of a connection within this process, as `Ranks`. Messages are JSON, as between processes."""

    def __init__(self, incoming: queue.Queue[str], outgoing: queue.Queue[str]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.sent = list[Any]()
        self._count = 0

    def number(self, owner: object) -> int:
        self._count += 1
        weakref.finalize(owner, self.send, "drop", self._count)
        return self._count

    def receive(self) -> Any:
        return json.loads(self._incoming.get())

    def send(self, *message: Any) -> None:
        self.sent.append(message)
        self._outgoing.put(json.dumps(message))


@contextmanager
def rank_of(source: DrafterSource, vocab: int = tiny.VOCAB) -> Iterator[Any]:
    """Give rank 0's end of a line to a rank that drafts in a thread."""
    there, back = queue.Queue[str](), queue.Queue[str]()
    ours: Any = Line(back, there)

    def work() -> None:
        theirs: Any = Line(there, back)
        draft_for_rank_0(theirs, source, vocab)
        mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    yield ours
    ours.send("end", 0)
    thread.join()


@contextmanager
def helped(
    where: str, source: DrafterSource, vocab: int = tiny.VOCAB, mean: float = 3
) -> Iterator[DrafterSource]:
    """Give the source of drafters that also draft ahead, at once, in a thread, or on another rank."""
    threads = {"at once": Inline, "thread": Waiting, "rank": Waiting, "real thread": AheadThread}
    with rank_of(source, vocab) if where == "rank" else nullcontext() as ranks:
        make_copy = None if ranks is None else partial(RemoteDrafter, ranks)
        yield ahead_source(source, make_copy, mean, threads[where]())


def model_of(kind: str) -> nn.Module:
    return vars(tiny)[kind](num_hidden_layers={"full": 1, "sliding": 2}[kind])


@cache
def target_of(kind: str = "full") -> nn.Module:
    return model_of(kind)


@cache
def noisy(kind: str = "full") -> nn.Module:
    """Return a model that often says what the target of this kind says."""
    model = model_of(kind)
    mx.random.seed(4)
    model.update(tree_map(lambda x: x + 0.006 * mx.random.normal(x.shape), model.parameters()))
    mx.eval(model.parameters())
    return model


SOURCES: dict[str, Callable[[], DrafterSource]] = {
    "draft model": lambda: draft_model_source("other", noisy(), SAME),
    "sliding": lambda: draft_model_source("other", noisy("sliding"), SAME),
    "treeless": lambda: draft_model_source("other", noisy(), SAME, Treeless),
    "pard": lambda: draft_model_source("pard", noisy(), SAME, partial(Pard, mask_token=255)),
    "lookup": lookup_source,
}
SAMPLINGS = {
    "greedy": Sampling(),
    "penalised": Sampling(repetition_penalty=1.3, presence_penalty=0.5, logit_bias={7: 2.0, 9: -100.0}),
    "seeded": Sampling(0.8, seed=3),
    "filtered": Sampling(1.1, top_k=20, top_p=0.9, frequency_penalty=0.2, seed=5),
}


def plain(model: nn.Module, sampling: Sampling, prompt: list[int] = PROMPT, count: int = 32) -> list[int]:
    return lossless.plain(model, prompt, count, sampling=sampling)


def drafted(
    model: nn.Module, source: DrafterSource, sampling: Sampling, prompt: list[int] = PROMPT, count: int = 32
) -> list[Round]:
    target = LMTarget(model)
    return lossless.rounds(target, source.make(target.parts), AHEAD, prompt, count, sampling=sampling)


def hits(done: Sequence[Round]) -> float:
    """Return the share of drafts that were there at once, of those for which something was prepared."""
    tried = [round.ahead for round in done if round.ahead is not None]
    assert len(tried) > len([r for r in done if r.kind == "draft"]) / 2
    return sum(tried) / len(tried)


# --- the text


@cache
def plain_text(kind: str, sampling: str) -> list[int]:
    """Return the text of plain decoding, once for all ways to draft ahead."""
    return plain(target_of(kind), SAMPLINGS[sampling], PROMPT * 2, 15)


@pytest.mark.parametrize(
    ("where", "name", "sampling"),
    [
        *(("at once", "draft model", sampling) for sampling in SAMPLINGS),
        *(("at once", name, "filtered") for name in [*SOURCES][1:]),
        ("rank", "draft model", "penalised"),
        ("rank", "pard", "filtered"),
        ("thread", "draft model", "filtered"),
        ("real thread", "draft model", "filtered"),
    ],
)
def test_text_is_plain_decoding_s(where: str, name: str, sampling: str) -> None:
    """Whether the drafts are ready or not: with the thread of programs, that is a matter of chance."""
    kind = "sliding" if name == "sliding" else "full"
    with helped(where, SOURCES[name]()) as source:
        done = drafted(target_of(kind), source, SAMPLINGS[sampling], PROMPT * 2, 15)
    assert emitted(done) == plain_text(kind, sampling)
    assert name == "lookup" or where == "real thread" or hits(done) > 0.05


@pytest.mark.parametrize("kind", recited.KINDS)
def test_retokenized_text_is_plain_decoding_s(kind: str) -> None:
    pair = recited.pair_of(kind, K)
    pair = pair.with_drafters([ahead_source(pair._drafters[0], thread=Inline())], AHEAD)
    prompt, target = recited.prompt_of(kind), recited.target_of(kind)
    done = list(pair.generate(prompt, max_tokens=28))
    assert emitted(done) == plain(target, Sampling(), prompt)[: len(emitted(done))]
    assert hits(done) > 0.1  # it recites: all is accepted, and its own next token follows


def test_texts_in_a_batch() -> None:
    model = target_of()
    source = ahead_source(SOURCES["draft model"](), thread=Waiting())
    batch = Batch(
        lambda: TargetBatch(model, source.needs), 4, clock=lambda: 0.0
    )  # so that they begin together
    prompts = [tiny.prompt(length, seed=length) for length in (3, 20, 35, 30)]
    texts: dict[int, list[int]] = {}
    rounds = list[Round]()
    for prompt, sampling in zip(prompts, SAMPLINGS.values(), strict=True):
        target, sampler = LMTarget(model), sampling.sampler(len(prompt), tiny.VOCAB)
        drafter = source.make(target.parts)
        texts[
            batch.add(RunningSequence(target, [drafter], AHEAD.policy(), sampler, text_prompt(prompt), 14))
        ] = []
    for id, round in batch.run():
        assert isinstance(round, Round)
        texts[id] += round.tokens
        rounds.append(round)
    expected = [plain(model, s, p, 14) for p, s in zip(prompts, SAMPLINGS.values(), strict=True)]
    assert list(texts.values()) == expected
    assert max(round.batch_size for round in rounds) == 4
    assert sum(round.ahead is True for round in rounds) > 5


# --- the distribution


class Peeking(DraftModel):
    """Keeps a draft only if it begins with a low token: what was drawn decides what is stored."""

    def draft_branches(self, request: BranchCall) -> Mapping[Outcome, Draft]:
        found = super().draft_branches(request)
        return {outcome: draft for outcome, draft in found.items() if read(draft.tokens)[0] < 4}


def read(tokens: mx.array) -> list[int]:
    found: list[int] = tokens.tolist()
    return found


def small_source(kind: type[DraftModel] = DraftModel) -> DrafterSource:
    return draft_model_source("other", exact_distribution.model(noise=0.05), VocabularySizes(V, V), kind)


def excesses(source: DrafterSource, count: int = TOKENS) -> tuple[float, float, float]:
    """Return the chi-square of a text over its quantile, by the token before and by place, and the hit rate.

    Drafts have one token. The places are those where a draft ahead might stand, and all others.
    """
    network, prompt = exact_distribution.model(), exact_distribution.PROMPT
    target, sampler = LMTarget(network), exact_distribution.unseeded(PLAIN)(0)
    policy = FixedPolicy(1, ahead=True)
    done = list(generate(target, [source.make(target.parts)], policy, sampler, prompt, max_tokens=count))
    history, tried = [*prompt, *emitted(done)], [r.ahead for r in done if r.ahead is not None]
    places = [i == 0 and r.ahead is not None for r in done for i in range(len(r.tokens))]
    rows = np.array(mx.softmax(network(mx.array([history]))[0, len(prompt) - 1 : -1], axis=-1))
    tokens, before = np.array(history[len(prompt) :]), np.array(history[len(prompt) - 1 : -1])
    by_token, by_place = (
        chi_square.conditional_excess(tokens, rows.astype(np.float64), groups)
        for groups in (before, np.array(places))
    )
    return by_token, by_place, float(np.mean(tried))


@pytest.mark.parametrize("where", ["at once", "rank"])
def test_unseeded_samples_keep_the_distribution(where: str) -> None:
    """A right store is rejected twice in a million; the keys are fixed, so a pass stays a pass."""
    with helped(where, small_source(), V, mean=V) as source:
        by_token, by_place, rate = excesses(source)
    assert by_token < 1 and by_place < 1
    assert rate > 0.9


def test_a_store_that_depends_on_what_was_drawn_is_caught() -> None:
    assert excesses(ahead_source(small_source(Peeking), mean=V, thread=Inline()))[1] > 1


# --- hits


@pytest.mark.parametrize(
    ("where", "sampling"), [("at once", "greedy"), ("at once", "filtered"), ("rank", "filtered")]
)
def test_a_drafter_like_the_target_needs_one_guess(where: str, sampling: str) -> None:
    """With a seed the noise is known, so that the likeliest token by log q + noise is the one drawn."""
    with helped(where, draft_model_source("same", target_of(), SAME), mean=1) as source:
        done = drafted(target_of(), source, SAMPLINGS[sampling])
    assert sum(r.accepted for r in done) == sum(r.drafted for r in done)
    assert hits(done) == 1.0


# --- the store


def prepared(name: str = "draft model", mean: float = 3) -> tuple[Ahead, list[int]]:
    """Return a drafter that has prepared outcomes of a draft after PROMPT."""
    drafter = ahead_source(SOURCES[name](), mean=mean, thread=Inline()).make(LMTarget(target_of()).parts)
    assert isinstance(drafter, Ahead)
    drafter.observe(PROMPT, NOTHING)
    draft = drafter.draft(PROMPT, K, GREEDY)
    drafter.prepare(PROMPT, draft, GREEDY)
    return drafter, read(draft.tokens)


def outcomes(drafter: Ahead) -> Mapping[Outcome, Draft]:
    assert drafter._prepared is not None
    return drafter._prepared.branches.result()


@pytest.mark.parametrize("name", ["draft model", "pard"])
def test_stored_drafts_are_those_of_a_new_drafter(name: str) -> None:
    drafter, tokens = prepared(name)
    found = outcomes(drafter)
    assert {len(outcome) for outcome in found} == set(range(1, K + 2))
    assert not any(list(outcome) == tokens[: len(outcome)] for outcome in found)
    for outcome, draft in found.items():
        assert list(outcome[:-1]) == tokens[: len(outcome) - 1]
        fresh = SOURCES[name]().make(LMTarget(target_of()).parts)
        assert read(draft.tokens) == read(fresh.draft([*PROMPT, *outcome], K, GREEDY).tokens)


def test_a_stored_draft_is_answered_once() -> None:
    drafter, _ = prepared()
    outcome, stored = next(iter(outcomes(drafter).items()))
    history = [*PROMPT, *outcome]
    drafter.observe(history, NOTHING)
    draft = drafter.draft(history, 2, GREEDY)  # fewer than it stored
    assert draft.ahead is True and read(draft.tokens) == read(stored.tokens)[:2] != read(stored.tokens)
    assert drafter.draft(history, 2, GREEDY).ahead is None


def wrong_histories(tokens: list[int], token: int) -> dict[str, list[int]]:
    outcome = [*PROMPT, *tokens[:2], token]
    return {
        "the same": PROMPT,
        "rewound": PROMPT[:-3],
        "rewound and said again": [*PROMPT[:-3], *outcome[-3:]],
        "stopped within the draft": [*PROMPT, *tokens[:3]],
        "edited at the start": [PROMPT[0] + 1, *outcome[1:]],
        "edited in the draft": [*PROMPT, tokens[0], (tokens[1] + 1) % 256, token],
        "another outcome": [*PROMPT, *tokens[:2], (token + 1) % 256],
        "one token more": [*outcome, 5],
        "the next turn": [*outcome, *tiny.prompt(9)],
    }


@pytest.mark.parametrize("case", wrong_histories([1, 2, 3, 4], 5))
@pytest.mark.parametrize("observed", [False, True])
def test_a_store_for_another_text_never_answers(case: str, observed: bool) -> None:
    drafter, tokens = prepared(mean=1)
    token = next(outcome[-1] for outcome in outcomes(drafter) if len(outcome) == 3)
    history = wrong_histories(tokens, token)[case]
    if observed:
        drafter.observe(history, NOTHING)
    draft = drafter.draft(history, K, GREEDY)
    assert not draft.ahead
    if not observed:  # the drafter takes an observed text of that length for an outcome of its own draft
        fresh = SOURCES["draft model"]().make(LMTarget(target_of()).parts)
        assert read(draft.tokens) == read(fresh.draft(history, K, GREEDY).tokens)


def test_a_conversation_that_is_rewound_and_edited() -> None:
    """The same drafter and target through several answers, each with the text of plain decoding."""
    model, source = target_of(), ahead_source(SOURCES["draft model"](), thread=Inline())
    target = LMTarget(model)
    drafter = source.make(target.parts)
    chance, history = random.Random(1), list(PROMPT)
    for turn in range(6):
        sampling = list(SAMPLINGS.values())[turn % 4]
        stop = [chance.randrange(256) for _ in range(20)]
        sampler = sampling.sampler(len(history), tiny.VOCAB)
        done = list(generate(target, [drafter], AHEAD, sampler, history, max_tokens=8, stop=stop))
        text = emitted(done)
        expected = plain(model, sampling, history, 8)
        assert text == expected[: len(text)] and (len(text) == 8 or text[-1] in stop)
        whole = [*history, *text]
        keep = target.rewind(chance.randrange(2, len(whole) - 1))
        history = [*whole[:keep], *(chance.randrange(256) for _ in range(chance.randrange(1, 5)))]


def test_late_drafts_are_a_miss_and_are_cancelled() -> None:
    class Never(AheadThread):
        def run(self, job: Callable[[], None]) -> None:
            self.job = job

    thread = Never()
    source = ahead_source(SOURCES["draft model"](), thread=thread)
    drafter = source.make(LMTarget(target_of()).parts)
    assert isinstance(drafter, Ahead)
    draft = drafter.draft(PROMPT, K, GREEDY)
    drafter.prepare(PROMPT, draft, GREEDY)
    assert drafter.draft([*PROMPT, *read(draft.tokens), 3], K, GREEDY).ahead is False
    thread.job()
    assert drafter.nbytes == drafter.inner.nbytes  # the other drafter was not even made


def test_a_process_ends_while_drafts_wait() -> None:
    """MLX aborted one process in four without the care of `AheadThread`."""
    program = (
        "import mlx.core as mx; from mlx_spec.ahead.drafter import AheadThread\n"
        "def job(): x = mx.ones((64, 64)) @ mx.ones((64, 64)); mx.eval(x)\n"
        "for thread in [AheadThread() for _ in range(40)]: thread.run(job), thread.run(job)"
    )
    process = start_python()([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert (process.communicate()[1], process.returncode) == ("", 0)


def test_an_error_in_the_thread_turns_drafts_off(draft_errors: list[str]) -> None:
    class Broken(DraftModel):
        def draft_branches(self, request: BranchCall) -> Mapping[Outcome, Draft]:
            raise RuntimeError("broken")

    source = draft_model_source("other", noisy(), SAME, Broken)
    model = target_of()
    rounds = drafted(model, ahead_source(source, thread=Waiting()), Sampling())
    assert lossless.emitted(rounds) == lossless.plain(model, PROMPT, 32)
    assert rounds[-1].reason is Reason.FAILED
    assert "RuntimeError at test_ahead.py" in draft_errors.pop()


# --- who may


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (random_sources.FOR_TINY["eagle3"], "reads hidden states"),
        (random_sources.FOR_TINY["mtp"], "reads hidden states"),
        (random_sources.FOR_TINY["gemma4 assistant"], "reads hidden states"),
        (lambda: draft_model_source("delta", tiny.recurrent(), SAME), "is recurrent"),
    ],
)
def test_drafters_that_read_the_target_or_are_recurrent_are_refused(
    source: Callable[[], DrafterSource], message: str
) -> None:
    made = source()
    with pytest.raises(InvalidValue, match=f"drafter {made.name} {message}"):
        ahead_source(made)


class Table(Drafter):
    """Drafts the token after the last one in a table, without a language model."""

    needs = FeatureSpec()

    def __init__(self, table: nn.Module | None) -> None:
        self._step = 1 if table is None else int(table.weight)

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return Draft(mx.array([(history[-1] + i * self._step) % tiny.VOCAB for i in range(1, limit + 1)]))


def table_source(*, has_network: bool) -> DrafterSource:
    table = nn.Module()
    table.weight = mx.array(1)
    network = table if has_network else None
    return DrafterSource("table", Table.needs, lambda parts: Table(network), network)


@pytest.mark.parametrize("where", ["thread", "rank"])
@pytest.mark.parametrize("name", ["table", "function", "lookup"])
def test_drafters_that_are_no_language_model(name: str, where: str) -> None:
    """Their text is the target's own, and the outcome that they foresee has its draft."""
    source = lookup_source() if name == "lookup" else table_source(has_network=name == "table")
    model = target_of()
    with helped(where, source) as ahead:
        assert lossless.emitted(drafted(model, ahead, Sampling())) == lossless.plain(model, PROMPT, 32)
        if name == "lookup":
            return
        drafter = ahead.make(LMTarget(model).parts)
        draft = drafter.draft([7], 2, GREEDY)
        drafter.prepare([7], draft, GREEDY)
        found = drafter.draft([7, 8, 9, 10], 2, GREEDY)
    assert found.ahead and found.tokens.tolist() == [11, 12]


def test_a_drafter_on_a_rank_without_the_target_cannot_read_it() -> None:
    for part in (NO_PARTS.embed, NO_PARTS.unembed, NO_PARTS.select):
        with pytest.raises(RuntimeError, match="only rank 0 has"):
            part(mx.array([1]))


def test_weights_are_shared_and_quantized_ones_are_not() -> None:
    parts = LMTarget(target_of()).parts
    for bits in (None, 8):
        network = copy.deepcopy(noisy())
        if bits:
            nn.quantize(network, 64, bits)
        drafter = ahead_source(draft_model_source("other", network, SAME), thread=Inline()).make(parts)
        assert isinstance(drafter, Ahead)
        drafter.prepare(PROMPT, drafter.draft(PROMPT, K, GREEDY), GREEDY)
        assert isinstance(drafter._copy, LocalCopy)
        its_copy = drafter._copy._drafter
        assert isinstance(its_copy, DraftModel)
        other, layer = its_copy._model._model, network.model.layers[0].self_attn
        copied = other.model.layers[0].self_attn
        assert copied is not layer
        assert (copied.q_proj.weight is layer.q_proj.weight) is (bits is None)
        assert copied.q_proj.weight.dtype == mx.float32


@pytest.mark.usefixtures("rules_of_a_cpu")  # beside a GPU it is refused
def test_load_offers_it() -> None:
    with pytest.raises(InvalidValue, match="reads hidden states"):
        load("demo", ahead=True)
    pairs = [load("demo", "lookup", num_draft_tokens=4, ahead=on) for on in (True, False)]
    prompt = pairs[0].tokenizer.encode("one two three one two three one two")
    texts = [emitted(list(pair.generate(prompt, max_tokens=20))) for pair in pairs]
    assert texts[0] == texts[1]


# --- another rank


def test_late_drafts_of_another_rank_are_a_miss_and_later_requests_come_in_their_place() -> None:
    may_draft, begun = threading.Event(), list[int]()

    class Slow(DraftModel):
        def draft_branches(self, request: BranchCall) -> Mapping[Outcome, Draft]:
            begun.append(len(request.history))
            may_draft.wait()
            return {}

    source, history = draft_model_source("other", noisy(), SAME, Slow), list(PROMPT)
    with rank_of(source) as line:
        made = ahead_source(SOURCES["draft model"](), partial(RemoteDrafter, line))
        drafter = made.make(LMTarget(target_of()).parts)
        for _ in range(3):
            draft = drafter.draft(history, K, GREEDY)
            assert not draft.ahead
            drafter.prepare(history, draft, GREEDY)
            wait_until(lambda: begun)
            history += [*read(draft.tokens), 3]
        may_draft.set()
        wait_until(lambda: len(begun) == 2)
        drafter.observe([1, 2, 3], NOTHING)
        del drafter

        def has_dropped() -> bool:
            gc.collect()
            return ("drop", 1) in line.sent

        wait_until(has_dropped)
    assert begun == [len(PROMPT), len(PROMPT) + 2 * (K + 1)]
    assert [message[0] for message in line.sent] == ["ahead", "ahead", "drop", "end"]
    assert [len(message[3]) for message in line.sent[:2]] == [len(PROMPT), 2 * (K + 1)]  # what is new
