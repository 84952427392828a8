"""Forbidden tokens, penalties and grammar masks, which change logits before they become a distribution."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx
import numpy as np

from mlx_spec.grammar import Grammar, Matcher, limits, read_tokens, row_limits


class Suppressed:
    """Tokens that a model never says, and others that do not begin its answers."""

    def __init__(self, always: Collection[int], first: Collection[int], vocab_size: int) -> None:
        self._always, self._first = _mask(always, vocab_size), _mask({*always, *first}, vocab_size)
        self._has_first = bool(first)

    def leave_out(self, logits: mx.array, first: Sequence[int]) -> mx.array:
        """Return logits [R, V] without them. The rows `first` draw the first token of an answer.

        They keep a finite logit: a grammar may allow no other token.
        """
        lowest = mx.array(-6e4 if logits.dtype == mx.float16 else -1e30, logits.dtype)
        masked = self._always
        if first and self._has_first:
            rows = np.zeros((logits.shape[0], 1), np.bool_)
            rows[list(first)] = True
            masked = mx.where(mx.array(rows), self._first, masked)
        return mx.where(masked, lowest, logits)


def _mask(tokens: Collection[int], vocab_size: int) -> mx.array:
    """Return True for tokens [V]. Evaluated, because another thread may read it."""
    mask = np.zeros(vocab_size, np.bool_)
    mask[[token for token in tokens if token < vocab_size]] = True
    return mx.array(mask)


class Penalties:
    """Lowers the logits of tokens that occurred. It counts the tokens of one generation."""

    def __init__(
        self, repetition: float, presence: float, frequency: float, prompt_length: int, vocab_size: int
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._prompt_length, self._vocab_size = prompt_length, vocab_size
        self._counted = 0  # tokens of the history that the fields below include
        self._known: set[int] = set()  # different tokens of the history
        self._seen = mx.array([], dtype=mx.int32)  # [N], the same tokens
        # Evaluated, because another thread may count, and a lazy array belongs to the thread that made it.
        size = 0 if self.is_idle else vocab_size
        self._in_prompt = mx.array(np.zeros(size, np.bool_))  # tokens of the prompt
        self._generated = mx.array(np.zeros(size, np.float32))  # how often each token was generated

    @property
    def is_idle(self) -> bool:
        """Return True if logits stay as they are."""
        return self._repetition == 1 and not self._presence and not self._frequency

    def fresh(self) -> Penalties:
        sizes = self._prompt_length, self._vocab_size
        return Penalties(self._repetition, self._presence, self._frequency, *sizes)

    def apply(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Return logits [T, V] with the penalties for the prompt, the output and each row's draft tokens.

        Only tokens that occurred change.
        """
        T, K = logits.shape[0], drafted.shape[0]
        self._count(history)
        ids = mx.concatenate([self._seen, drafted])  # [N]; equal ids get equal values
        if not ids.size:
            return logits
        counts = mx.broadcast_to(self._generated[ids], (T, ids.size))
        if K:
            within = mx.arange(K) <= mx.arange(T)[:, None] + (K - T)  # [T, K]: the row follows the token
            counts = counts + (within[..., None] & (drafted[:, None] == ids)).sum(axis=1)
        scores = logits[:, ids]
        if self._repetition != 1:  # arXiv:1909.05858, as in Hugging Face and vLLM
            penalty = self._repetition
            penalised = mx.where(scores > 0, scores / penalty, scores * penalty)
            scores = mx.where(self._in_prompt[ids] | (counts > 0), penalised, scores)
        scores = scores - self._presence * (counts > 0) - self._frequency * counts
        return mx.put_along_axis(logits, mx.broadcast_to(ids, scores.shape), scores, axis=-1)

    def _count(self, history: Sequence[int]) -> None:
        """Count the tokens of a history. Copy only new ones to the device."""
        assert len(history) >= max(self._counted, self._prompt_length), "a history only grows"
        if self._counted < self._prompt_length:
            self._in_prompt[mx.array(list(history[: self._prompt_length]))] = True
        if fresh := list(history[max(self._counted, self._prompt_length) :]):
            self._generated = self._generated.at[mx.array(fresh)].add(1.0)
        new = list(dict.fromkeys(token for token in history[self._counted :] if token not in self._known))
        if new:
            self._seen = mx.concatenate([self._seen, mx.array(new, dtype=mx.int32)])
            self._known.update(new)
        self._counted = len(history)


class GrammarMask:
    """The masks of one generation, whose history starts with `prompt_length` prompt tokens."""

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self._grammar = grammar
        self._prompt_length = prompt_length
        self._matcher: Matcher | None = None

    def limits(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Return upper limits of logits [T, V], -inf for forbidden tokens. Waits for the draft only.

        It does not wait for a queued token if the device can choose between two masks by that token.
        """
        if self._matcher is None:
            self._matcher = self._grammar.matcher(history[: self._prompt_length])
        if logits.shape[0] == drafted.shape[0] == 1:  # after a queued token
            unread = self._matcher.after_unread(history, start=self._prompt_length)
            if unread is not None:
                token, *either = unread
                after, otherwise = (mx.array(bits.view(np.uint8)) for bits in either)
                bits = mx.where(drafted[0] == token, after, otherwise)
                return limits(bits[None], logits.shape[-1], logits.dtype)
        mx.async_eval(drafted)  # apart from the logits: arrays evaluated together are ready together
        mx.async_eval(logits)  # the device runs the target's pass while the host follows the draft
        drafts, start = read_tokens(drafted), self._prompt_length
        allowed = self._matcher.allowed(history, drafts, logits.shape[0], start=start)
        return row_limits(allowed, logits.shape[-1], logits.dtype)
