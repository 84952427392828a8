"""Compare the text of an architecture with the loop of mlx-lm: plain, with drafts and in a batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from mlx_spec.decode.loop import generate
from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.scheduler import Batch
from mlx_spec.errors import SpecError
from mlx_spec.model.probe import check_rows
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch, probe_batch
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Sampler, no_draft
from support.tiny import has_windows, make
from support.tiny_configs import NOT_HERE, VOCAB

Texts = dict[int, list[int]]
Check = Callable[[nn.Module, Texts], Iterator[str]]
TWO = {"num_hidden_layers": 2}
QUICK: dict[str, tuple[str, dict[str, Any]]] = {
    # The smallest architecture of each kind that is special, what is expected of it, and settings.
    "plamo3": ("equal", TWO),  # prompts see further than generated tokens
    "afm7": ("equal", {"num_layers": 3}),  # layers that reuse K/V have positions of their own
    "llama4": ("equal", {}),  # chunks
    "falcon_h1": ("equal", TWO),  # two caches in a layer, one of them recurrent
    "baichuan_m1": ("equal", TWO | {"sliding_window_layers": [0]}),  # with windows, and padding not masked
    "deepseek_v32": ("refused", TWO),  # ranks its keys
    "phi3small": ("refused", TWO),  # tokens of one pass see later ones
}
LENGTHS = (30, 5, 47)  # tokens of the prompts; 1,300 are more than a window and its slack of 256
LONG = 1300
COUNT = 12  # tokens of an answer
DRAFTS = (1, 3, 6)
CHUNK = 7  # tokens of a prompt in a pass, at least; no divisor of a window
JOIN_STEPS = 2  # of a batch before the next sequence joins it
SCALES = (0.2, 0.1, 0.4, 0.05)  # of the weights, until the text varies
LEAST_VARIED = 6  # different tokens of a text that says something
SEEDED = Sampling(temperature=0.9, seed=11)
GREEDY = Sampling()


class Guesses(Drafter):
    """Drafts the truth: as a chain that is wrong now and then, or as a tree with wrong guesses beside it."""

    needs = FeatureSpec()

    def __init__(self, truth: Sequence[int], *, tree: bool = False) -> None:
        self.truth, self.tree = list(truth), tree
        self.count = 0

    def observe(self, history: Sequence[int], features: Features) -> None: ...

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        tokens = self.truth[len(history) : len(history) + limit]
        if not tokens:
            return no_draft()
        self.count += 1
        if not self.tree:
            if self.count % 3:
                wrong = self.count % len(tokens)
                tokens[wrong] = (tokens[wrong] + 1) % VOCAB
            return Draft(mx.array(tokens, dtype=mx.int32))
        rows, parents, before = list[int](), list[int](), 0
        for i, token in enumerate(tokens):
            rows += [(token + 1 + i) % VOCAB, token]
            parents += [before, before]
            before = len(rows)
        return Draft(mx.array(rows, dtype=mx.int32), parents=tuple(parents))


def prompt_of(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(VOCAB) for _ in range(length)]


def mlx_lm_text(model: nn.Module, prompt: Sequence[int], count: int = COUNT) -> list[int]:
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count)
    return [int(token) for token, _ in islice(steps, count)]


def text(
    target: LMTarget,
    prompt: Sequence[int],
    K: int = 0,
    truth: Sequence[int] = (),
    *,
    tree: bool = False,
    sampling: Sampling = GREEDY,
) -> list[int]:
    """Return our text: plain, or with drafts of K tokens after those of `truth`."""
    drafters = (Guesses([*prompt, *truth], tree=tree),) if K else ()
    sampler = sampling.sampler(len(prompt), VOCAB)
    rounds = generate(target, drafters, FixedPolicy(K), sampler, list(prompt), max_tokens=COUNT)
    return [token for round in rounds for token in round.tokens]


def plain(model: nn.Module, texts: Texts) -> Iterator[str]:
    for length, truth in texts.items():
        if text(LMTarget(model), prompt_of(length)) != truth:
            yield f"plain after {length}"


def drafts(model: nn.Module, texts: Texts) -> Iterator[str]:
    for i, (length, truth) in enumerate(texts.items()):
        for K in DRAFTS[i % 3 : i % 3 + 1] if i else DRAFTS:
            if text(LMTarget(model), prompt_of(length), K, truth) != truth:
                yield f"drafts of {K} after {length}"


def trees(model: nn.Module, texts: Texts) -> Iterator[str]:
    for length, truth in islice(texts.items(), len(LENGTHS)):
        target = LMTarget(model)
        if target.tree_obstacle is None and text(target, prompt_of(length), 3, truth, tree=True) != truth:
            yield f"trees after {length}"


def chunks(model: nn.Module, texts: Texts) -> Iterator[str]:
    for length, truth in texts.items():
        target, prompt = LMTarget(model), prompt_of(length)
        size = max(CHUNK, length // 8)
        for low in range(0, length - 1, size):
            target.prefill(prompt[low : min(low + size, length - 1)])
        if text(target, prompt, 3, truth) != truth:
            yield f"a prompt of {length} in chunks"


def rewinds(model: nn.Module, texts: Texts) -> Iterator[str]:
    """Go on from the middle of an answer, then from the middle of its prompt."""
    (length, truth), target = next(iter(texts.items())), LMTarget(model)
    prompt = prompt_of(length)
    text(target, prompt, 3, truth)
    for kept in (length + 9, length - 5):
        turn = [*prompt, *truth][:kept] + prompt_of(13)
        target.rewind(kept)
        right = mlx_lm_text(model, turn)
        if text(target, turn, 3, right) != right:
            yield f"a rewind to {kept}"


def company(model: nn.Module, texts: Texts) -> Iterator[str]:
    """Decode in a batch that sequences join one by one and leave at different times."""
    found = probe_batch(model)

    def shared() -> TargetBatch:
        return TargetBatch(model, FeatureSpec(), takes_drafts=found.takes_drafts)

    short = list(texts.items())[: len(LENGTHS)]
    batch = Batch(None if found.obstacle else shared, len(short))
    made: dict[int, list[int]] = {}
    for i, (length, truth) in enumerate(short):
        prompt = prompt_of(length)
        sampler, policy = GREEDY.sampler(length, VOCAB), FixedPolicy((3, 0, 6)[i % 3])
        drafters = (Guesses([*prompt, *truth]),)
        sequence = RunningSequence(
            LMTarget(model), drafters, policy, sampler, text_prompt(prompt), COUNT - 5 * i
        )
        made[batch.add(sequence)] = []
        last = i == len(short) - 1
        steps = batch.run() if last else chain.from_iterable(batch.step() for _ in range(JOIN_STEPS))
        for index, result in steps:
            if isinstance(result, Exception):
                raise result
            made[index] += result.tokens
    for (length, truth), got in zip(short, made.values(), strict=True):
        if got != truth[: len(got)] or len(got) < COUNT - 5 * len(short):
            yield f"{length} in company"


def seeds(model: nn.Module, texts: Texts) -> Iterator[str]:
    for length in islice(texts, 1):
        right = text(LMTarget(model), prompt_of(length), sampling=SEEDED)
        if text(LMTarget(model), prompt_of(length), 3, right, sampling=SEEDED) != right:
            yield "a seed with drafts"


def quantized(model: nn.Module, texts: Texts) -> Iterator[str]:
    for length in islice(texts, 1):
        try:
            LMTarget(model, kv_bits=8).prefill([0])
        except (SpecError, TypeError, ValueError, AttributeError):
            return  # refused when it is loaded: head dimensions, attention sinks, attention of its own
        right = text(LMTarget(model, kv_bits=8), prompt_of(length))
        if text(LMTarget(model, kv_bits=8), prompt_of(length), 3, right) != right:
            yield "8-bit K/V with drafts"


CHECKS: tuple[Check, ...] = (plain, drafts, trees, chunks, rewinds, company, seeds, quantized)


def outcome(
    name: str, lengths: Sequence[int] = LENGTHS, *, long: bool = False, **settings: Any
) -> tuple[str, str]:
    """Return "equal", "refused", "not run" or "DIFFERENT" for an architecture, and details."""
    if name in NOT_HERE:
        return "not run", NOT_HERE[name]
    texts, model, most = dict[int, list[int]](), nn.Module(), 0
    for signs, scale in product((False, True), SCALES):
        made = make(name, scale=scale, signs=signs, **settings)
        try:
            check_rows(made, lambda made=made: LMTarget(made))
        except SpecError as error:
            return "refused", str(error)
        found = {length: mlx_lm_text(made, prompt_of(length)) for length in lengths}
        varied = min(len(set(truth)) for truth in found.values())
        if varied > most:
            model, most, texts = made, varied, found
        if most >= LEAST_VARIED:
            break
    if long and has_windows(name):
        texts[LONG] = mlx_lm_text(model, prompt_of(LONG))
    wrong = [failure for check in CHECKS for failure in check(model, texts)]
    if wrong:
        return "DIFFERENT", ", ".join(wrong)
    target = LMTarget(model)
    notes = [f"{most} different tokens"] if most < LEAST_VARIED else []
    notes += [] if target.tree_obstacle is None else [f"chains: {target.tree_obstacle}"]
    notes += [f"by turns: {reason}"] if (reason := probe_batch(model).obstacle) else []
    return "equal", "; ".join(notes)
