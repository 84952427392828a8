"""Sampling settings, the distribution that they make of logits, and the samplers that draw from it.

Order: repetition penalty, presence and frequency penalty, logit bias, grammar, temperature, top_k, top_p,
min_p. It is the order of Hugging Face; vLLM adds the bias first and applies min_p before the other two.
Tokens tied with the last one that a filter keeps stay too: the distribution does not depend on how a sort
breaks ties.
"""

from __future__ import annotations

import copy
import itertools
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Self

import mlx.core as mx

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Grammar, Matcher, read_tokens
from mlx_spec.model.tree import Tree, tree_of
from mlx_spec.sampling.verify import MIN_NORMAL, accept_block, accept_recursive, match, recover, walk
from mlx_spec.types import Draft, TokenLogprob

# Tokens [T] and the distribution [T, V] that they were drawn from, as `types.Sampler.draw` returns them.
Drawn = tuple[mx.array, mx.array | None]

MAX_BIAS = 1e9  # stays finite in float32 when divided by the lowest temperature


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. The defaults are greedy decoding.

    At temperature 0 the most likely token is taken. Penalties and bias count, and the other fields are idle.
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
    min_tokens: int = 0  # generated tokens before one of `late_tokens` may be drawn
    late_tokens: frozenset[int] = frozenset()  # such as those that end a text
    grammar: Grammar | None = None  # the grammar of answers; it stands above a ban by logit_bias

    def __post_init__(self) -> None:
        if self.temperature != 0:
            _check_number("temperature", self.temperature, 1e-4, 1e4, also="0 or ")
        check_integer("top_k", self.top_k, least=0)
        for name, each in FILTERS.items():
            _check_number(name, vars(self)[name], each.least, each.most)
        if self.top_p == 0:
            raise InvalidValue("top_p=0 keeps no token: give a number above 0, up to 1")
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            check_integer("seed", self.seed)
        check_integer("min_tokens", self.min_tokens, least=0)
        for token in self.late_tokens:
            check_integer("late_tokens token id", token, least=0)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def sampler(self, prompt_length: int, vocab_size: int) -> Greedy:
        """Return the sampler of one generation, whose history starts with `prompt_length` prompt tokens."""
        processor = LogitsProcessor(self, prompt_length, vocab_size)
        if self.temperature == 0:
            return Greedy(processor)
        return Unseeded(processor) if self.seed is None else Seeded(processor, self.seed)


class LogitsProcessor:
    """Turns logits into scores: the logarithm of the distribution, up to a constant.

    It counts the tokens of one generation, so each generation needs its own.
    """

    def __init__(self, sampling: Sampling, prompt_length: int, vocab_size: int) -> None:
        self.sampling = sampling
        self.prompt_length = prompt_length
        added = sampling.presence_penalty or sampling.frequency_penalty
        self._penalises = bool(added) or sampling.repetition_penalty != 1
        self._bias = _bias_vector(sampling.logit_bias, vocab_size)
        late = {token: -math.inf for token in sampling.late_tokens if token < vocab_size}
        self._late_ban = _bias_vector(late if sampling.min_tokens else None, vocab_size)
        self._grammar_mask: GrammarMask | None = None
        self.without_grammar = self
        if sampling.grammar is not None:
            self._grammar_mask = GrammarMask(sampling.grammar, prompt_length)
            self.without_grammar = LogitsProcessor(replace(sampling, grammar=None), prompt_length, vocab_size)
        self._vocab_size = vocab_size
        self._counted = 0  # tokens of the history that the counts below include
        self._in_prompt: mx.array | None = None  # [V] bool, tokens of the prompt
        self._generated: mx.array | None = None  # [V] float32, how often each token was generated

    @property
    def is_idle(self) -> bool:
        """Return True if `scores` returns the logits as they are."""
        changes = self._bias, self._late_ban, self._grammar_mask
        is_changed = self._penalises or any(change is not None for change in changes)
        return self.sampling.temperature == 0 and not is_changed

    def fresh(self) -> LogitsProcessor:
        """Return a processor without a grammar that has counted nothing."""
        free = copy.copy(self.without_grammar)
        free.without_grammar, free._counted, free._in_prompt, free._generated = free, 0, None, None
        return free

    def scores(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Return scores [T, V] of logits [T, V], -inf where masked. `types.Sampler` defines the rows.

        They are float32, but greedy decoding without penalties, bias and grammar returns the logits as they
        are.
        """
        sampling, logits = self.sampling, self.process(logits, history, drafted)
        if sampling.temperature == 0:
            return logits
        scores = logits.astype(mx.float32) / sampling.temperature
        candidates = scores
        if 0 < sampling.top_k < self._vocab_size:
            candidates = mx.topk(scores, sampling.top_k)
            scores = _keep_top_k(scores, candidates)
        for name, each in FILTERS.items():
            if (value := vars(sampling)[name]) != each.off:
                scores = each.keep(scores, candidates, value)
        return scores

    def process(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Return logits [T, V] with penalties, bias and grammar, before temperature and filters."""
        mask = None if self._grammar_mask is None else self._grammar_mask.mask(logits, history, drafted)
        if self._penalises:
            logits = self._penalise(logits.astype(mx.float32), history, drafted)
        if (bias := self._row_bias(logits.shape[0], len(history) + drafted.shape[0])) is not None:
            # bias of a banned token: it is drawn only if the grammar allows no other
            bias = bias if mask is None else mx.maximum(bias, -1e30)
            logits = logits.astype(mx.float32) + bias
        return logits if mask is None else mx.where(mask, logits, -mx.inf)

    def _row_bias(self, rows: int, length: int) -> mx.array | None:
        """Return the bias, [V] or [T, V], of rows the last of which follows `length` tokens."""
        before = length - rows + 1 - self.prompt_length  # tokens generated before row 0
        # rows that draw one of the first `min_tokens`, a number that MLX may not hold
        early = min(self.sampling.min_tokens - before, rows)
        if self._late_ban is None or early <= 0:
            return self._bias
        ban = mx.where(mx.arange(rows)[:, None] < early, self._late_ban, 0.0)
        return ban if self._bias is None else self._bias + ban

    def _penalise(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Return logits [T, V] less the penalties for the prompt, the output and each row's draft tokens."""
        sampling = self.sampling
        in_prompt, generated = self._count(history)
        counts = _with_drafted(generated, drafted, logits.shape[0])
        if sampling.repetition_penalty != 1:  # arXiv:1909.05858, as in Hugging Face and vLLM
            penalty = sampling.repetition_penalty
            penalised = mx.where(logits > 0, logits / penalty, logits * penalty)
            logits = mx.where(in_prompt | (counts > 0), penalised, logits)
        if sampling.presence_penalty:
            logits = logits - sampling.presence_penalty * (counts > 0)
        if sampling.frequency_penalty:
            logits = logits - sampling.frequency_penalty * counts
        return logits

    def _count(self, history: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Return the prompt tokens, bool [V], and the counts of generated ones [V]. Copy only new tokens."""
        assert len(history) >= max(self._counted, self.prompt_length), "a history only grows"
        if self._in_prompt is None or self._generated is None:
            self._in_prompt = mx.zeros((self._vocab_size,), dtype=mx.bool_)
            self._generated = mx.zeros((self._vocab_size,))
            if self.prompt_length:
                self._in_prompt[mx.array(list(history[: self.prompt_length]))] = True
        if fresh := list(history[max(self._counted, self.prompt_length) :]):
            self._generated = self._generated.at[mx.array(fresh)].add(1.0)
        self._counted = len(history)
        return self._in_prompt, self._generated


class GrammarMask:
    """The masks of one generation, whose history starts with `prompt_length` prompt tokens."""

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self._grammar = grammar
        self._prompt_length = prompt_length
        self._matcher: Matcher | None = None
        self._key: tuple[int, list[int], int] | None = None  # the arguments of the last mask
        self._mask = mx.array(True)

    def mask(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Return which of logits [T, V] are allowed, bool [T, V]. Waits for the draft, not for the logits.

        It does not wait where the device can tell by the drafted token itself.
        """
        if self._matcher is None:
            self._matcher = self._grammar.matcher(history[: self._prompt_length])
        if logits.shape[0] == drafted.shape[0] == 1:  # after a queued token
            found = self._matcher.after_unread(history[self._prompt_length :])
            if found is not None:
                token, after, otherwise = found
                return mx.where(drafted[0] == token, after, otherwise)[None]
        mx.async_eval(drafted)  # apart from the logits: arrays evaluated together are ready together
        mx.async_eval(logits)  # the device runs the target's pass while the host follows the draft
        key = (len(history), read_tokens(drafted), logits.shape[0])
        if key != self._key:
            self._key = key
            self._mask = self._matcher.allowed(history[self._prompt_length :], *key[1:])
        return self._mask


class Greedy:
    """Takes the token with the highest score. It accepts the draft tokens that it would have taken itself."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor

    @property
    def is_argmax(self) -> bool:
        return self.processor.is_idle

    @property
    def drafting(self) -> Self:
        """Return the sampler without the grammar. It shares the seed and the count of draws."""
        return self._with(self.processor.without_grammar)

    def fresh(self) -> Self:
        """Return a drafting sampler that has counted no tokens. It shares the seed and the count of draws."""
        return self._with(self.processor.fresh())

    def rank(self, logits: mx.array, history: Sequence[int], drafted: mx.array, count: int) -> mx.array:
        return likeliest(self._known_scores(logits, history, drafted), count)

    def draw(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> Drawn:
        return self._known_scores(logits, history, drafted).argmax(axis=-1).astype(mx.int32), None

    def verify(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        if draft.parents is None:
            return match(self.draw(logits, history, draft.tokens)[0], draft.tokens)
        tree = tree_of(draft.parents)
        runs = _runs(tree, logits, draft.tokens)
        chosen = mx.concatenate([self.draw(rows, history, path)[0] for rows, path in runs])
        return walk(chosen, draft.tokens, tree)

    def logprobs(self, first_position: int, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        return ()

    def _known_scores(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Return scores [T, V] with the noise that is known before it is drawn."""
        return self.processor.scores(logits, history, drafted)

    def _with(self, processor: LogitsProcessor) -> Self:
        other = copy.copy(self)
        other.processor = processor
        return other


class Seeded(Greedy):
    """Adds noise to the scores that depends on the seed and the position alone, shared by drafter and target.

    The text is the same with any drafter or none (Gumbel coupling, arXiv:2408.07978).
    """

    def __init__(self, processor: LogitsProcessor, seed: int) -> None:
        super().__init__(processor)
        self._seed = seed

    def _known_scores(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        T, V = logits.shape
        first = len(history) + drafted.shape[0] - T + 1  # position of the token that row 0 draws
        keys = mx.array([noise_key(self._seed, first + j) for j in range(T)], dtype=mx.uint32)
        noise = mx.vmap(partial(gumbel, (V,)))(keys)
        return self.processor.scores(logits, history, drafted) + noise


class Unseeded(Greedy):
    """Draws with fresh noise. Drafts that come with their distribution are judged by it."""

    def __init__(self, processor: LogitsProcessor, *, key: int | None = None) -> None:
        super().__init__(processor)
        self._seed = secrets.randbits(64) if key is None else key
        self._indices = itertools.count(1)  # shared with `drafting`, so that no noise is used twice

    def draw(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> Drawn:
        scores = self.processor.scores(logits, history, drafted)
        noise = gumbel(tuple(scores.shape), self._next_key())
        return (scores + noise).argmax(axis=-1).astype(mx.int32), mx.softmax(scores, axis=-1)

    def verify(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        if draft.probs is None:
            return super().verify(logits, history, draft)
        tree = None if draft.parents is None else tree_of(draft.parents)
        runs = [(logits, draft.tokens)] if tree is None else _runs(tree, logits, draft.tokens)
        scores = mx.concatenate([self.processor.scores(rows, history, path) for rows, path in runs])
        p = mx.softmax(scores, axis=-1)
        uniform = mx.random.uniform(shape=draft.tokens.shape, key=self._next_key())
        noise = gumbel(p.shape[-1:], self._next_key())
        if tree is None:
            return recover(*accept_block(p, draft.tokens, draft.probs, uniform), noise)
        return recover(*accept_recursive(p, draft.tokens, draft.probs, uniform, tree), noise)

    def _next_key(self) -> mx.array:
        return mx.array(noise_key(self._seed, next(self._indices)), dtype=mx.uint32)


def _runs(tree: Tree, logits: mx.array, tokens: mx.array) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield rows of a tree that follow each other, and the draft tokens of the path to the last one."""
    for run in tree.segments:
        path = [row - 1 for row in tree.paths[run[-1]][1:]]
        yield logits[run[0] : run[-1] + 1], tokens[mx.array(path, dtype=mx.int32)]


def gumbel(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Return Gumbel noise, float32, always finite.

    The token that wins has a small exponential. -log1p(-u) has a spacing of 2**-32 there; -log(u) would have
    2**-24, too coarse for a distribution over 262,144 tokens.
    """
    # half the spacing of `mx.random.uniform` near 0
    uniform = mx.maximum(mx.random.uniform(shape=shape, key=key), 2.0**-33)
    return -mx.log(-mx.log1p(-uniform))


def noise_key(seed: int, index: int) -> list[int]:
    """Return two 32-bit words, another pair for each (seed, index): splitmix64 from the mixed seed on."""
    start = _mix(seed % 2**64)
    word = _mix((start + index * 0x9E3779B97F4A7C15) % 2**64)
    return [word >> 32, word % 2**32]


def _mix(word: int) -> int:
    """Apply the finaliser of splitmix64, a bijection of 64-bit words."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def _keep_top_k(scores: mx.array, largest: mx.array) -> mx.array:
    """Mask scores [T, V] below the least of the k largest [T, k]. Ties with it stay."""
    return mx.where(scores < largest.min(axis=-1, keepdims=True), -mx.inf, scores)


def _keep_top_p(scores: mx.array, candidates: mx.array, p: float) -> mx.array:
    """Mask scores [T, V] of the tokens not needed to reach the mass p. At least one stays, and all its ties.

    candidates [T, k] hold the k largest scores, and nothing but ties with the k-th is finite beyond them.
    """
    ordered = -mx.sort(-candidates, axis=-1)
    probs = mx.exp(ordered - mx.logsumexp(scores, axis=-1, keepdims=True))
    before = mx.cumsum(probs, axis=-1, inclusive=False)  # mass of all more likely tokens
    kept = before < max(p, MIN_NORMAL)  # less than that is 0 in float32
    least = mx.where(kept, ordered, mx.inf).min(axis=-1, keepdims=True)
    return mx.where(scores < least, -mx.inf, scores)


def _keep_min_p(scores: mx.array, candidates: mx.array, p: float) -> mx.array:
    """Mask scores [T, V] of tokens less than p times as likely as the most likely one."""
    return mx.where(scores < scores.max(axis=-1, keepdims=True) + math.log(p), -mx.inf, scores)


@dataclass(frozen=True)
class Filter:
    """A filter of scores [T, V], which sets those of tokens that it drops to -inf.

    `keep(scores, candidates, value)` returns them; the largest scores are among candidates [T, k], too.
    """

    keep: Callable[[mx.array, mx.array, float], mx.array]
    off: float  # the value that drops nothing
    least: float
    most: float


# Field of `Sampling` -> its filter, in the order in which they are applied, after top_k.
FILTERS = {"top_p": Filter(_keep_top_p, 1, 0, 1), "min_p": Filter(_keep_min_p, 0, 0, 1)}


def _with_drafted(counts: mx.array, drafted: mx.array, rows: int) -> mx.array:
    """Return counts [T, V]: those given, [V], plus the draft tokens that each of T rows is conditioned on."""
    K = drafted.shape[0]
    counts = mx.broadcast_to(counts, (rows, counts.shape[0]))
    if K == 0:
        return counts
    row = mx.arange(rows)[:, None]
    within = mx.arange(K) <= row + (K - rows)  # [T, K]
    return counts.at[row, drafted].add(within.astype(mx.float32))


def likeliest(scores: mx.array, count: int) -> mx.array:
    """Return the `count` tokens [T, count] of the largest scores [T, V], the largest first."""
    best = mx.argpartition(-scores, count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(scores, best, axis=-1), axis=-1)
    return mx.take_along_axis(best, order, axis=-1).astype(mx.int32)


def _bias_vector(bias: Mapping[int, float] | None, vocab_size: int) -> mx.array | None:
    """Return the bias [V] float32; None if there is none."""
    if not bias:
        return None
    if max(bias) >= vocab_size:
        raise InvalidValue(f"logit_bias has token id {max(bias)}, but the model ends at {vocab_size - 1}")
    return mx.zeros((vocab_size,)).at[mx.array(list(bias))].add(mx.array(list(bias.values())))


def _checked_bias(bias: Mapping[int, float]) -> Mapping[int, float]:
    """Return a read-only copy. Raises InvalidValue for an id or value out of range."""
    for token, value in bias.items():
        check_integer("logit_bias token id", token, least=0)
        if value != -math.inf:
            _check_number(f"logit_bias of token {token}", value, -MAX_BIAS, MAX_BIAS, also="-inf or ")
    return MappingProxyType(dict(bias))


def _check_number(name: str, value: float, least: float, most: float, *, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise InvalidValue(f"{name}={value!r} is not allowed: give {also}a number from {least:g} to {most:g}")


def check_integer(name: str, value: int, least: int | None = None) -> None:
    """Raise InvalidValue unless the value is an integer, and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise InvalidValue(f"{name}={value!r} is not allowed: give an integer{bound}")
