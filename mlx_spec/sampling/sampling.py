"""Logits to a law, and draws from it. Every filter, penalty and bias lives here.

Order: repetition penalty, presence and frequency penalty, logit bias, grammar, temperature, top_k, top_p,
min_p (that of Hugging Face; vLLM adds the bias first and applies min_p before the other two). Tokens tied
with the last one that a filter keeps stay too, so that the law never depends on how a sort breaks ties.
"""

from __future__ import annotations

import copy
import itertools
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import mlx.core as mx

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Constraint, Grammar
from mlx_spec.model.tree import tree_of
from mlx_spec.sampling.verify import Rule, block, match
from mlx_spec.sampling.verify_tree import drawn_everywhere, recursive, walk
from mlx_spec.types import Draft, Sampler

LARGEST_BIAS = 1e9  # stays finite in float32 when divided by the lowest temperature
BANNED = -1e30  # the bias of a banned token under a grammar: taken only where the grammar leaves no other


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. The defaults are greedy decoding.

    At temperature 0 the most likely token is taken: penalties and bias count, the other fields are idle.
    With a seed, the text depends on the seed and the model alone, not on the drafter.
    """

    temperature: float = 0.0  # 0, or 0.0001 to 10000
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest of the most likely tokens whose probabilities reach p together
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the most likely one
    repetition_penalty: float = 1.0  # divides the logits of tokens seen so far, multiplies them if negative
    presence_penalty: float = 0.0  # subtracted from the logit of every token generated so far
    frequency_penalty: float = 0.0  # subtracted once for each time the token was generated
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # added; -inf bans a token
    seed: int | None = None  # any integer, taken modulo 2**64
    grammar: Grammar | None = None  # what the answer must look like; it stands above a ban by logit_bias

    def __post_init__(self) -> None:
        if self.temperature != 0:
            _check_number("temperature", self.temperature, 1e-4, 1e4, also="0 or ")
        _check_integer("top_k", self.top_k, least=0)
        _check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise InvalidValue("top_p=0 keeps no token: give a number above 0, up to 1")
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _check_integer("seed", self.seed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def sampler(self, prompt_length: int, vocab_size: int) -> Sampler:
        """The sampler of one generation, whose history starts with `prompt_length` tokens of prompt."""
        law = Law(self, prompt_length, vocab_size)
        if self.temperature == 0:
            return Greedy(law)
        return Unseeded(law) if self.seed is None else Seeded(law, self.seed)


class Law:
    """Logits to scores: the logarithm of a law, up to a constant. Counts the tokens of one generation."""

    def __init__(self, sampling: Sampling, prompt_length: int, vocab_size: int) -> None:
        self._sampling = sampling
        self._prompt_length = prompt_length
        added = sampling.presence_penalty or sampling.frequency_penalty
        self._penalises = bool(added) or sampling.repetition_penalty != 1
        self._bias = _bias_vector(sampling.logit_bias, vocab_size)
        self._constraint: Constraint | None = None
        self.free = self  # the same law without its grammar
        if sampling.grammar is not None:
            self._constraint = Constraint(sampling.grammar, prompt_length)
            self.free = Law(replace(sampling, grammar=None), prompt_length, vocab_size)
        self._vocab_size = vocab_size
        self._counted = 0  # tokens of the history already in the counts below
        self._prompt: mx.array | None = None  # [V] bool, tokens of the prompt
        self._generated: mx.array | None = None  # [V] float32, how often each token was generated

    def scores(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Scores [T, V] from logits [T, V], -inf where masked. Rows are conditioned as `Sampler` says.

        float32, but logits come back as they are where greedy decoding asks for nothing.
        """
        sampling, logits = self._sampling, self.processed(logits, history, drafted)
        if sampling.temperature == 0:
            return logits
        scores = logits.astype(mx.float32) / sampling.temperature
        candidates = scores
        if 0 < sampling.top_k < self._vocab_size:
            candidates = mx.topk(scores, sampling.top_k)
            scores = keep_top_k(scores, candidates)
        if sampling.top_p < 1:
            scores = keep_top_p(scores, candidates, sampling.top_p)
        return keep_min_p(scores, sampling.min_p) if sampling.min_p > 0 else scores

    def processed(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Logits [T, V] with penalties, bias and grammar, before temperature and filters."""
        mask = None if self._constraint is None else self._constraint.mask(logits, history, drafted)
        if self._penalises:
            logits = self._penalise(logits.astype(mx.float32), history, drafted)
        if self._bias is not None:
            bias = self._bias if mask is None else mx.maximum(self._bias, BANNED)
            logits = logits.astype(mx.float32) + bias
        return logits if mask is None else mx.where(mask, logits, -mx.inf)

    def _penalise(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Logits [T, V] less the penalties for prompt, output and the drafted prefix of each row."""
        sampling = self._sampling
        prompt, generated = self._count(history)
        counts = _with_drafted(generated, drafted, logits.shape[0])
        if sampling.repetition_penalty != 1:  # arXiv:1909.05858 as Hugging Face and vLLM have it
            penalty = sampling.repetition_penalty
            penalised = mx.where(logits > 0, logits / penalty, logits * penalty)
            logits = mx.where(prompt | (counts > 0), penalised, logits)
        if sampling.presence_penalty:
            logits = logits - sampling.presence_penalty * (counts > 0)
        if sampling.frequency_penalty:
            logits = logits - sampling.frequency_penalty * counts
        return logits

    def _count(self, history: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Prompt tokens [V] bool and counts of generated ones [V]; only new tokens go to the device."""
        assert len(history) >= max(self._counted, self._prompt_length), "a history only grows"
        if self._prompt is None or self._generated is None:
            self._prompt = mx.zeros((self._vocab_size,), dtype=mx.bool_)
            self._generated = mx.zeros((self._vocab_size,))
            if self._prompt_length:
                self._prompt[mx.array(list(history[: self._prompt_length]))] = True
        fresh = list(history[max(self._counted, self._prompt_length) :])
        if fresh:
            self._generated = self._generated.at[mx.array(fresh)].add(1.0)
        self._counted = len(history)
        return self._prompt, self._generated


class Walking(ABC):
    """A sampler that judges trees by its own draws."""

    @abstractmethod
    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """One token a row, and the law they were drawn from."""

    def verify_tree(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        """Int32 [2]: row of the last accepted token, next token."""
        assert draft.parents is not None
        chosen, _ = drawn_everywhere(self.draw, logits, history, draft)
        return walk(chosen, draft.tokens, tree_of(draft.parents))


class Rejecting(Walking):
    """... and those that come with their laws by recursive rejection."""

    @abstractmethod
    def next_key(self) -> mx.array:
        """A key that is used once."""

    def verify_tree(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        """Int32 [2]: row of the last accepted token, next token."""
        if draft.probs is None or draft.parents is None:
            return super().verify_tree(logits, history, draft)
        _, p = drawn_everywhere(self.draw, logits, history, draft)
        assert p is not None
        uniform = mx.random.uniform(shape=(draft.tokens.size,), key=self.next_key())
        noise = gumbel((p.shape[-1],), self.next_key())
        return recursive(p, draft.tokens, draft.probs, uniform, noise, tree_of(draft.parents))


class Greedy(Walking):
    """Takes the most likely token. Exact by `verify.match`."""

    def __init__(self, law: Law) -> None:
        self._law = law

    @property
    def drafting(self) -> Sampler:
        """The same without the grammar."""
        return self if self._law.free is self._law else Greedy(self._law.free)

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Tokens [T] int32, and None: no chance involved."""
        return self._law.scores(logits, history, drafted).argmax(axis=-1).astype(mx.int32), None

    def verify(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        """Int32 [2]: number accepted, next token."""
        return match(self.draw(logits, history, draft.tokens)[0], draft.tokens)

    def agreement(self, logits: mx.array, history: Sequence[int], token: mx.array, draft: Draft) -> mx.array:
        """1 where the drafted token is the one drawn, else 0; float32 [1]."""
        return (token == draft.tokens[:1]).astype(mx.float32)


class Seeded(Walking):
    """Draws with noise that depends on the seed and the token's position alone, shared by drafter and target.

    The text is the same with any drafter or none (Gumbel coupling, arXiv:2408.07978).
    """

    def __init__(self, law: Law, seed: int) -> None:
        self._law = law
        self._seed = seed

    @property
    def drafting(self) -> Sampler:
        """The same without the grammar: the noise stays shared."""
        return self if self._law.free is self._law else Seeded(self._law.free, self._seed)

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Tokens [T] int32, and None: the chance is not the draw's own."""
        T, V = logits.shape
        first = len(history) + drafted.shape[0] - T + 1  # index in the sequence of the token that row 0 draws
        keys = mx.array([key_of(self._seed, first + j) for j in range(T)], dtype=mx.uint32)
        noise = mx.vmap(partial(gumbel, (V,)))(keys)
        scores = self._law.scores(logits, history, drafted)
        return (scores + noise).argmax(axis=-1).astype(mx.int32), None

    def verify(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        """Int32 [2]: number accepted, next token."""
        return match(self.draw(logits, history, draft.tokens)[0], draft.tokens)

    def agreement(self, logits: mx.array, history: Sequence[int], token: mx.array, draft: Draft) -> mx.array:
        """1 where the drafted token is the one drawn, else 0; float32 [1]."""
        return (token == draft.tokens[:1]).astype(mx.float32)


class Unseeded(Rejecting):
    """Draws with fresh noise each time; drafts that come with their law are judged by `rule`."""

    def __init__(self, law: Law, *, rule: Rule = block, key: int | None = None) -> None:
        self._law = law
        self._rule = rule
        self._seed = secrets.randbits(64) if key is None else key
        self._keys = itertools.count(1)

    @property
    def drafting(self) -> Sampler:
        """The same without the grammar; no noise is used twice."""
        free = copy.copy(self)
        free._law = self._law.free
        return free

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Tokens [T] int32 and the law [T, V] float32 they were drawn from."""
        scores = self._law.scores(logits, history, drafted)
        return self._choose(scores), mx.softmax(scores, axis=-1)

    def verify(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        """Int32 [2]: number accepted, next token."""
        scores = self._law.scores(logits, history, draft.tokens)
        K = draft.tokens.shape[0]
        if draft.probs is None or K == 0:
            return match(self._choose(scores), draft.tokens)
        uniform = mx.random.uniform(shape=(K,), key=self.next_key())
        noise = gumbel((scores.shape[-1],), self.next_key())
        return self._rule(mx.softmax(scores, axis=-1), draft.tokens, draft.probs, uniform, noise)

    def agreement(self, logits: mx.array, history: Sequence[int], token: mx.array, draft: Draft) -> mx.array:
        """What target and drafter have in common, the sum of min(p, q), or p of a token not drawn; [1]."""
        p = mx.softmax(self._law.scores(logits, history, draft.tokens[:0]), axis=-1)
        if draft.probs is None:
            return mx.take_along_axis(p, draft.tokens[:1, None], axis=-1)[:, 0]
        return mx.minimum(p, draft.probs[:1]).sum(axis=-1)

    def _choose(self, scores: mx.array) -> mx.array:
        """One token a row, [T] int32."""
        noise = gumbel(tuple(scores.shape), self.next_key())
        return (scores + noise).argmax(axis=-1).astype(mx.int32)

    def next_key(self) -> mx.array:
        """A key that is used once."""
        return mx.array(key_of(self._seed, next(self._keys)), dtype=mx.uint32)


def _with_drafted(counts: mx.array, drafted: mx.array, rows: int) -> mx.array:
    """Counts [T, V]: those given, [V], plus the drafted prefix that each of T rows is conditioned on."""
    K = drafted.shape[0]
    counts = mx.broadcast_to(counts, (rows, counts.shape[0]))
    if K == 0:
        return counts
    row = mx.arange(rows)[:, None]
    within = mx.arange(K) <= row + (K - rows)  # [T, K]
    return counts.at[row, drafted].add(within.astype(mx.float32))


def _bias_vector(bias: Mapping[int, float] | None, vocab_size: int) -> mx.array | None:
    """The bias [V] float32, or None where there is none."""
    if not bias:
        return None
    if max(bias) >= vocab_size:
        raise InvalidValue(f"logit_bias has token id {max(bias)}, but the model ends at {vocab_size - 1}")
    return mx.zeros((vocab_size,)).at[mx.array(list(bias))].add(mx.array(list(bias.values())))


def _checked_bias(bias: Mapping[int, float]) -> Mapping[int, float]:
    """A copy that nobody can change, once every id and value is in range."""
    for token, value in bias.items():
        _check_integer("logit_bias token id", token, least=0)
        if value != -math.inf:
            _check_number(f"logit_bias of token {token}", value, -LARGEST_BIAS, LARGEST_BIAS, also="-inf or ")
    return MappingProxyType(dict(bias))


def _check_number(name: str, value: float, least: float, most: float, *, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise InvalidValue(f"{name}={value!r} is not allowed: give {also}a number from {least:g} to {most:g}")


def _check_integer(name: str, value: int, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise InvalidValue(f"{name}={value!r} is not allowed: give an integer{bound}")


def keep_top_k(scores: mx.array, largest: mx.array) -> mx.array:
    """Mask scores [T, V] below the least of the k largest [T, k]. Ties with it stay."""
    return mx.where(scores < largest.min(axis=-1, keepdims=True), -mx.inf, scores)


def keep_top_p(scores: mx.array, candidates: mx.array, p: float) -> mx.array:
    """Mask scores [T, V] of the tokens not needed to reach the mass p; at least one stays, and all its ties.

    candidates [T, k] hold the k largest scores, and nothing but ties with the k-th is finite beyond them.
    """
    ordered = -mx.sort(-candidates, axis=-1)
    probs = mx.exp(ordered - mx.logsumexp(scores, axis=-1, keepdims=True))
    before = mx.cumsum(probs, axis=-1, inclusive=False)  # mass of all more likely tokens
    least = mx.where(before < p, ordered, mx.inf).min(axis=-1, keepdims=True)
    return mx.where(scores < least, -mx.inf, scores)


def keep_min_p(scores: mx.array, p: float) -> mx.array:
    """Mask scores [T, V] of tokens less than p times as likely as the most likely one."""
    return mx.where(scores < scores.max(axis=-1, keepdims=True) + math.log(p), -mx.inf, scores)


HALF_STEP = 2.0**-33  # half the spacing of `mx.random.uniform` near 0


def gumbel(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Gumbel noise, float32, always finite.

    The token that wins has a small exponential, so that end gets the finer one of the uniform's ends: spacing
    2**-32 where -log(u) would have 2**-24, too coarse for a law over 262,144 tokens.
    """
    uniform = mx.maximum(mx.random.uniform(shape=shape, key=key), HALF_STEP)
    return -mx.log(-mx.log1p(-uniform))


def key_of(seed: int, index: int) -> list[int]:
    """Two 32-bit words, one pair for each (seed, index): splitmix64, started at the mixed seed."""
    start = _mix(seed % 2**64)
    word = _mix((start + index * 0x9E3779B97F4A7C15) % 2**64)
    return [word >> 32, word % 2**32]


def _mix(word: int) -> int:
    """The finaliser of splitmix64, a bijection of 64-bit words."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)
