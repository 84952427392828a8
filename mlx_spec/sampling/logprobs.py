"""Log-probabilities of generated tokens and of prompt tokens under the target's distribution.

They come from the target's logits with penalties, bias and grammar, before temperature and filters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import mlx.core as mx

from mlx_spec.errors import NotFinite
from mlx_spec.model.layer_caches import MAX_UNCOMMITTED
from mlx_spec.model.target import LMTarget
from mlx_spec.model.tree import Tree, tree_of
from mlx_spec.sampling.candidates import likeliest
from mlx_spec.sampling.sampling import Drawn, Greedy, LogitsProcessor
from mlx_spec.sampling.softmax import log_total
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.types import Draft, DraftingSampler, Observer, TokenLogprob


class LogprobRecorder:
    """Wraps a sampler and keeps the scores of the target's draws until `logprobs` reads them.

    Drafters draw with `drafting`, which records nothing. A draw of a single row is evaluated at once, so that
    reading it does not wait for the token after it.
    """

    is_argmax = False  # draws are recorded

    def __init__(self, sampler: Greedy, tokenizer: Tokenizer, top: int) -> None:
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._top = top
        self._rows: dict[int, mx.array] = {}  # position in the sequence -> packed row [1, 1 + 2 top]

    @property
    def vocab_size(self) -> int:
        return self._sampler.vocab_size

    @property
    def drafting(self) -> DraftingSampler:
        return self._sampler.drafting

    @property
    def fits(self) -> Sequence[mx.array]:
        return self._sampler.fits

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, *, exact: bool = False
    ) -> Drawn:
        tokens, probs = self._sampler.draw(logits, history, drafted, exact=exact)
        rows = self._record(logits, history, drafted, tokens)
        if len(rows) == 1:
            mx.async_eval(tokens, *rows)
        return tokens, probs

    def verify(
        self, logits: mx.array, history: Sequence[int], draft: Draft, *, exact: bool = False
    ) -> mx.array:
        verdict = self._sampler.verify(logits, history, draft, exact=exact)
        path, accepted = draft.tokens, verdict[:1]
        if draft.parents is not None:
            logits, path, accepted = _as_chain(logits, path, accepted, tree_of(draft.parents))
        tokens = mx.concatenate([path, verdict[1:]])  # those accepted, the one after them in all other places
        tokens = mx.where(mx.arange(tokens.size) < accepted, tokens, verdict[1:])
        self._record(logits, history, path, tokens)
        return verdict

    def logprobs(self, first_position: int, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        rows = mx.concatenate([self._rows.pop(first_position + i) for i in range(len(tokens))])
        return _read(rows, tokens, self._tokenizer)

    def _record(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, tokens: mx.array
    ) -> list[mx.array]:
        """Keep the rows of `tokens` [T]. They replace the rows of the same and later positions."""
        T = logits.shape[0]
        first = len(history) + drafted.shape[0] - T + 1
        scores = self._sampler.processor.process(logits, history, drafted)
        packed = _pack(scores, tokens, self._top)
        rows = [packed[j : j + 1] for j in range(T)]
        self._rows = {position: row for position, row in self._rows.items() if position < first}
        self._rows |= {first + j: row for j, row in enumerate(rows)}
        return rows


def score_prompt(
    target: LMTarget,
    drafters: Sequence[Observer],
    processor: LogitsProcessor,
    tokens: Sequence[int],
    tokenizer: Tokenizer,
    top: int,
) -> Iterator[tuple[TokenLogprob, ...]]:
    """Yield the log-probabilities of a prompt in chunks, from the second token that `target` lacks on.

    With an empty target these are all tokens but the first, which has none. Afterwards target and drafters
    hold the prompt as after `prefill`, so that it can be continued. Chunks have MAX_UNCOMMITTED rows, up to
    which every cache is exact; they are slower than a prefill. No other generation may use `processor`. For
    penalties, tokens after its prompt count as generated.
    """
    end = len(tokens) - 1
    read = list(tokens[: target.size + 1])  # the history so far, one list for all chunks and drafters
    for low in range(target.size, end, MAX_UNCOMMITTED):
        high = min(low + MAX_UNCOMMITTED, end)
        chunk = mx.array(list(tokens[low:high]), dtype=mx.int32)
        following = list(tokens[low + 1 : high + 1])
        scores = processor.process(target.verify(chunk), read, chunk[1:])
        rows = _pack(scores, mx.array(following, dtype=mx.int32), top)
        features = target.commit(high - low)
        read += following
        for drafter in drafters:
            drafter.observe(read, features)
        yield _read(rows, following, tokenizer)
    mx.clear_cache()


def _pack(scores: mx.array, tokens: mx.array, top: int) -> mx.array:
    """Return the log-probabilities to read from scores [T, V], lazy, [T, 1 + 2 top] float32.

    A row has the log-probabilities of its token in `tokens` [T] and of the `top` likeliest tokens, then the
    ids of the likeliest. Ids are exact up to 2**24.
    """
    chosen = mx.take_along_axis(scores, tokens[:, None], axis=-1)
    if top := min(top, scores.shape[-1]):
        best = likeliest(scores, top)
        chosen = mx.concatenate([chosen, mx.take_along_axis(scores, best, axis=-1)], axis=-1)
    total = log_total(scores)
    logprobs = chosen.astype(mx.float32) - total + (total - total)  # NaN if a score is infinite
    return mx.concatenate([logprobs, best.astype(mx.float32)], axis=-1) if top else logprobs


def _read(rows: mx.array, tokens: Sequence[int], tokenizer: Tokenizer) -> tuple[TokenLogprob, ...]:
    """Copy packed rows [T, 1 + 2 top] of T tokens to the host, in one copy. Drop masked alternatives."""
    logprobs, top = list[TokenLogprob](), rows.shape[1] // 2
    for token, row in zip(tokens, cast(list[list[float]], rows.tolist()), strict=True):
        if math.isnan(row[0]):
            raise NotFinite.after(0)
        pairs = zip(row[1 : 1 + top], row[1 + top :], strict=True)
        likely = sorted((-logprob, int(i)) for logprob, i in pairs if logprob > -math.inf)
        best = tuple(TokenLogprob(i, tokenizer.token_bytes(i), -negative) for negative, i in likely)
        logprobs.append(TokenLogprob(token, tokenizer.token_bytes(token), row[0], best))
    return tuple(logprobs)


def _as_chain(
    logits: mx.array, tokens: mx.array, last: mx.array, tree: Tree
) -> tuple[mx.array, mx.array, mx.array]:
    """Return the path to row `last`, int32 [1], as a chain: logits [H + 1, V], tokens [H], accepted [1].

    H is the height of the tree; the last row of the path is repeated up to it.
    """
    table = mx.array([path + path[-1:] * (tree.height + 1 - len(path)) for path in tree.paths])
    rows = table[last[0]]
    depth = mx.array(tree.depths, dtype=mx.int32)[last]
    return logits[rows], tokens[mx.maximum(rows[1:] - 1, 0)], depth
