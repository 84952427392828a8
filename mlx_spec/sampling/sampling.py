"""Sampling settings, the distribution that they define, and the samplers that draw from it.

Order: repetition penalty, presence and frequency penalty, logit bias, grammar, temperature, top_k, top_p,
min_p. This is the order of Hugging Face; vLLM adds the bias first and applies min_p before top_k and top_p.
"""

from __future__ import annotations

import copy
import itertools
import math
import numbers
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

import mlx.core as mx

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar import Grammar
from mlx_spec.model.tree import Tree, tree_of
from mlx_spec.sampling.candidates import FILTERS, Candidates, likeliest, shortlist_length
from mlx_spec.sampling.logits import GrammarMask, Penalties
from mlx_spec.sampling.noise import draw_by_weight, noise_key, seeded_noise
from mlx_spec.sampling.verify import accept_block, accept_recursive, match, walk
from mlx_spec.types import Draft, TokenLogprob

# Tokens [T] and the distribution [T, V] that they were drawn from, as `types.Sampler.draw` returns them.
Drawn = tuple[mx.array, mx.array | None]


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. The defaults are greedy decoding.

    At temperature 0 the most likely token is taken: top_k, top_p, min_p and the seed have no effect. With a
    seed, the text depends on the seed and the model alone, not on the drafter.
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
    grammar: Grammar | None = None  # the grammar of answers; it wins over a ban by logit_bias

    def __post_init__(self) -> None:
        bounds = {
            **{name: (kept.least, kept.most) for name, kept in FILTERS.items()},
            "repetition_penalty": (0.01, 100),
            "presence_penalty": (-2, 2),
            "frequency_penalty": (-2, 2),
        }
        if self.temperature != 0:
            bounds["temperature"] = 1e-4, 1e4
        checked: dict[str, object] = {}  # Python's own numbers and a copy of what is mutable
        for name, (least, most) in bounds.items():
            also = "0 or " if name == "temperature" else ""
            checked[name] = _checked_number(name, vars(self)[name], least, most, also=also)
        if self.top_p == 0:
            raise InvalidValue("top_p=0 keeps no token: give a number above 0, up to 1")
        checked |= {
            name: checked_integer(name, vars(self)[name], least=0) for name in ("top_k", "min_tokens")
        }
        if self.seed is not None:
            checked["seed"] = checked_integer("seed", self.seed)
        late = (checked_integer("late_tokens token id", token, least=0) for token in self.late_tokens)
        checked["late_tokens"] = frozenset(late)
        if self.logit_bias is not None:
            checked["logit_bias"] = _checked_bias(self.logit_bias)
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidValue(f"grammar={self.grammar!r} is not allowed: give what compile_grammar returns")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def sampler(self, prompt_length: int, vocab_size: int) -> Greedy:
        """Return the sampler of one generation. Its history starts with `prompt_length` prompt tokens."""
        banned = {token for token, value in (self.logit_bias or {}).items() if value == -math.inf}
        banned |= self.late_tokens if self.min_tokens else frozenset()
        if self.grammar is None and len(banned) >= vocab_size and banned.issuperset(range(vocab_size)):
            raise InvalidValue(
                f"logit_bias and late_tokens ban all {vocab_size} tokens of the model: leave one of them"
            )
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
        self._penalties = Penalties(
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            prompt_length,
            vocab_size,
        )
        self._bias = _bias_vector(sampling.logit_bias, vocab_size)
        late = {token: -math.inf for token in sampling.late_tokens if token < vocab_size}
        self._late_ban = _bias_vector(late if sampling.min_tokens else None, vocab_size)
        self._grammar_mask: GrammarMask | None = None
        self.without_grammar = self
        if sampling.grammar is not None:
            self._grammar_mask = GrammarMask(sampling.grammar, prompt_length)
            self.without_grammar = LogitsProcessor(replace(sampling, grammar=None), prompt_length, vocab_size)
        self.vocab_size = vocab_size
        # Arguments and result of `process`.
        self._last: tuple[mx.array, mx.array, int, mx.array] | None = None

    @property
    def is_idle(self) -> bool:
        """Return True if tokens are the argmax of unchanged logits."""
        changes = self._bias, self._late_ban, self._grammar_mask
        is_changed = not self._penalties.is_idle or any(change is not None for change in changes)
        return self.sampling.temperature == 0 and not is_changed

    def fresh(self) -> LogitsProcessor:
        """Return a processor without a grammar that has counted nothing."""
        free = copy.copy(self.without_grammar)
        free.without_grammar, free._last = free, None
        free._penalties = self._penalties.fresh()
        return free

    def candidates(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, *, exact: bool = False
    ) -> Candidates:
        """Return the candidates of logits [T, V] at a temperature above 0. Rows are as in `types.Sampler`.

        With `exact` they hold every nucleus, however large.
        """
        sampling, processed = self.sampling, self.process(logits, history, drafted)
        length = shortlist_length(sampling.top_k, sampling.top_p, self.vocab_size)
        if exact and length < (sampling.top_k or self.vocab_size):
            length = 0
        candidates = Candidates.of(processed, sampling.top_k, sampling.temperature, length)
        for name, rule in FILTERS.items():
            if (value := vars(sampling)[name]) != rule.off:
                candidates = rule.keep(candidates, value)
        return candidates

    def process(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Return logits [T, V] with penalties, bias and grammar, before temperature and filters.

        Idle settings return the logits as they are. The last result is kept, because a record of
        log-probabilities asks for the rows of a draw again.
        """
        last = self._last
        if last is None or last[0] is not logits or last[1] is not drafted or last[2] != len(history):
            processed = self._processed(logits, history, drafted)
            self._last = last = logits, drafted, len(history), processed
        return last[3]

    def _processed(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        mask = self._grammar_mask
        most = None if mask is None else mask.limits(logits, history, drafted)
        if not self._penalties.is_idle:
            logits = self._penalties.apply(logits.astype(mx.float32), history, drafted)
        if (bias := self._row_bias(logits.shape[0], len(history) + drafted.shape[0])) is not None:
            # A finite bias: a banned token is drawn only if the grammar allows no other.
            bias = bias if most is None else mx.maximum(bias, -1e30)
            logits = logits.astype(mx.float32) + bias
        return logits if most is None else mx.minimum(logits, most)

    def _row_bias(self, rows: int, length: int) -> mx.array | None:
        """Return the bias, [V] or [T, V], of rows the last of which follows `length` tokens."""
        before = length - rows + 1 - self.prompt_length  # tokens generated before row 0
        # Rows that draw one of the first `min_tokens`. Bounded, because MLX may not hold that number.
        early = min(self.sampling.min_tokens - before, rows)
        if self._late_ban is None or early <= 0:
            return self._bias
        ban = mx.where(mx.arange(rows)[:, None] < early, self._late_ban, 0.0)
        return ban if self._bias is None else self._bias + ban


class Greedy:
    """Takes the token with the highest score. Accepts draft tokens that equal its own choices."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor
        self.fits: list[mx.array] = []  # see `types.Sampler`

    @property
    def is_argmax(self) -> bool:
        return self.processor.is_idle

    @property
    def vocab_size(self) -> int:
        return self.processor.vocab_size

    @property
    def drafting(self) -> Self:
        """Return the sampler without the grammar. It shares the seed and the count of draws."""
        return self._with(self.processor.without_grammar)

    def fresh(self) -> Self:
        """Return a drafting sampler that has counted no tokens. It shares the seed and the count of draws."""
        return self._with(self.processor.fresh())

    def rank(self, logits: mx.array, history: Sequence[int], drafted: mx.array, count: int) -> mx.array:
        return likeliest(self.processor.process(logits, history, drafted), count)

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, *, exact: bool = False
    ) -> Drawn:
        return self.processor.process(logits, history, drafted).argmax(axis=-1).astype(mx.int32), None

    def verify(
        self, logits: mx.array, history: Sequence[int], draft: Draft, *, exact: bool = False
    ) -> mx.array:
        draft = replace(draft, tokens=_inside(draft.tokens, logits.shape[-1]))
        if draft.parents is None:
            verdict = match(self.draw(logits, history, draft.tokens, exact=exact)[0], draft.tokens)
            # For all rows: a decision to draw again must not depend on the drawn tokens.
            self.fits = _all_fit(self.fits)
            return verdict
        tree, chosen, fits = tree_of(draft.parents), list[mx.array](), list[mx.array]()
        for rows, path in _segments(tree, logits, draft.tokens):
            chosen.append(self.draw(rows, history, path, exact=exact)[0])
            fits += self.fits
        self.fits = _all_fit(fits)
        return walk(mx.concatenate(chosen), draft.tokens, tree)

    def logprobs(self, first_position: int, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        return ()

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

    def rank(self, logits: mx.array, history: Sequence[int], drafted: mx.array, count: int) -> mx.array:
        candidates, scores = self._noisy(logits, history, drafted)
        return likeliest(candidates.over_vocabulary(scores, -math.inf, logits.shape[-1]), count)

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, *, exact: bool = False
    ) -> Drawn:
        candidates, scores = self._noisy(logits, history, drafted)
        tokens, self.fits = candidates.tokens(scores.argmax(axis=-1)), candidates.fits
        if exact and self.fits:  # a row whose shortlist fits keeps its noise, so it does not depend on others
            whole, scores = self._noisy(logits, history, drafted, exact)
            tokens, self.fits = mx.where(self.fits[0], tokens, whole.tokens(scores.argmax(axis=-1))), []
        return tokens, None

    def _noisy(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, exact: bool = False
    ) -> tuple[Candidates, mx.array]:
        """Return the candidates, and their scores [T, C] with the noise of the seed."""
        candidates = self.processor.candidates(logits, history, drafted, exact=exact)
        first = len(history) + drafted.shape[0] - logits.shape[0] + 1  # position of the token of row 0
        T, C = candidates.scores.shape
        return candidates, candidates.scores + seeded_noise(self._seed, first, (T, C), candidates.ids)


class Unseeded(Greedy):
    """Draws with fresh noise. A draft with `probs` is verified by them, any other by match."""

    def __init__(self, processor: LogitsProcessor, *, key: int | None = None) -> None:
        super().__init__(processor)
        self._seed = secrets.randbits(64) if key is None else key
        self._indices = itertools.count(1)  # shared with `drafting`, so that no noise is used twice

    def rank(self, logits: mx.array, history: Sequence[int], drafted: mx.array, count: int) -> mx.array:
        candidates = self.processor.candidates(logits, history, drafted)
        return likeliest(candidates.over_vocabulary(candidates.scores, -math.inf, logits.shape[-1]), count)

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, *, exact: bool = False
    ) -> Drawn:
        candidates = self.processor.candidates(logits, history, drafted, exact=exact)
        self.fits = candidates.fits
        tokens = candidates.tokens(draw_by_weight(candidates.weights, self._next_key()))
        return tokens, candidates.over_vocabulary(candidates.probs, 0.0, logits.shape[-1])

    def verify(
        self, logits: mx.array, history: Sequence[int], draft: Draft, *, exact: bool = False
    ) -> mx.array:
        if draft.probs is None:
            return super().verify(logits, history, draft, exact=exact)
        tokens = _inside(draft.tokens, logits.shape[-1])
        uniform = mx.random.uniform(shape=tokens.shape, key=self._next_key())
        tree = None if draft.parents is None else tree_of(draft.parents)
        segments = [(logits, tokens)] if tree is None else _segments(tree, logits, tokens)
        judged = [self.processor.candidates(rows, history, path, exact=exact) for rows, path in segments]
        self.fits = _all_fit([fits for candidates in judged for fits in candidates.fits])
        ids: mx.array | None = None
        if tree is None:
            beside, columns, q = judged[0].beside(tokens, draft.probs)
            n, weights = accept_block(beside.probs, columns, q, uniform)
            ids = beside.ids
        else:
            p = mx.concatenate([c.over_vocabulary(c.probs, 0.0, logits.shape[-1]) for c in judged])
            n, weights = accept_recursive(p, tokens, draft.probs, uniform, tree)
        token = draw_by_weight(weights[None], self._next_key())
        return mx.concatenate([n[None], token if ids is None else ids[n][token]])

    def _next_key(self) -> mx.array:
        return mx.array(noise_key(self._seed, next(self._indices)), dtype=mx.uint32)


def _inside(tokens: mx.array, vocab_size: int) -> mx.array:
    """Return draft tokens with -1 for those outside the vocabulary, which no rule accepts."""
    return mx.where((tokens >= 0) & (tokens < vocab_size), tokens, -1)


def _all_fit(fits: list[mx.array]) -> list[mx.array]:
    """Return whether all rows fit, in the form of `types.Sampler.fits`."""
    return [mx.concatenate(fits).all(keepdims=True)] if fits else []


def _segments(tree: Tree, logits: mx.array, tokens: mx.array) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield the logits of each segment of a tree, and the draft tokens of the path to its last row."""
    for segment in tree.segments:
        path = [row - 1 for row in tree.paths[segment[-1]][1:]]
        yield logits[segment[0] : segment[-1] + 1], tokens[mx.array(path, dtype=mx.int32)]


def _bias_vector(bias: Mapping[int, float] | None, vocab_size: int) -> mx.array | None:
    """Return the bias [V] float32; None if there is none."""
    if not bias:
        return None
    if max(bias) >= vocab_size:
        raise InvalidValue(f"logit_bias has token id {max(bias)}, but the model ends at {vocab_size - 1}")
    return mx.zeros((vocab_size,)).at[mx.array(list(bias))].add(mx.array(list(bias.values())))


def _checked_bias(bias: Mapping[int, float]) -> Mapping[int, float]:
    """Return a read-only copy. Raises InvalidValue for an id or value out of range."""
    if not isinstance(bias, Mapping):
        raise InvalidValue(f"logit_bias={bias!r} is not allowed: give a mapping from token ids to numbers")
    most = 1e9  # stays finite in float32 after division by the lowest temperature
    checked = dict[int, float]()
    for token, value in bias.items():
        key = checked_integer("logit_bias token id", token, least=0)
        if value != -math.inf:
            value = _checked_number(f"logit_bias of token {token}", value, -most, most, also="-inf or ")
        checked[key] = value
    return MappingProxyType(checked)


def _checked_number(name: str, value: float, least: float, most: float, *, also: str = "") -> float:
    """Return a number, such as one of NumPy, as a float. Raises InvalidValue outside the bounds."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if not least <= number <= most:
        raise InvalidValue(f"{name}={value!r} is not allowed: give {also}a number from {least:g} to {most:g}")
    return number


def checked_integer(name: str, value: int, least: int | None = None) -> int:
    """Return an integer, such as one of NumPy, as an int. Raises InvalidValue if it is below `least`."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise InvalidValue(f"{name}={value!r} is not allowed: give an integer{bound}")
    return int(value)


GREEDY = Sampling()  # the likeliest token, always
