"""The nouns of one decode round: values that go down, values that come up.

Shapes, everywhere in the package: T block length (K + 1), K draft tokens, V vocabulary, D hidden size,
S context length. p is the target's law and q the drafter's; those letters are used only in `verify.py`.
Terms follow the papers and vLLM: *draft tokens*, *accepted*, *recovered* (drawn after a rejection),
*bonus* (drawn when all K are accepted). The *pending* token is the last one of the history: emitted, but
not yet in the target's cache.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import mlx.core as mx


class Reason(enum.StrEnum):
    """Why a round drafted as many tokens as it did; shown to the user."""

    FIXED = "fixed by user"
    DISABLED = "disabled by user"
    NO_DRAFTER = "no drafter"
    WARMING_UP = "warming up"
    PAYS = "speculation pays"
    WAITING = "no draft to be had now"
    COST = "verification costs more than it gains"
    ACCEPTANCE = "too few draft tokens accepted"
    LEDGER = "speculation has lost time so far"
    PROBE = "probing"


@dataclass(frozen=True)
class FeatureSpec:
    """What a drafter reads from its target."""

    hidden_layers: tuple[int, ...] = ()  # decoder-layer outputs (residual stream), 0-based; -1 is the last
    final_hidden: bool = False  # output of the final norm: what the LM head reads
    shared_kv: bool = False  # K/V of the last cache-owning layer of each attention type
    prompt: bool = True  # False: hidden states are wanted of generated tokens, not of those of a prompt


@dataclass(frozen=True)
class KVRows:
    """K and V of committed positions, in temporal order, as the layer's own attention sees them."""

    keys: mx.array  # [1, H, S, Dk], rope applied
    values: mx.array  # [1, H, S, Dv]


@dataclass(frozen=True)
class Features:
    """Target activations of T positions that were just committed.

    Row j belongs to the position just before `history[-T:][j]`, so that it pairs with the token that
    follows it. Of a prompt there are no hidden states where `FeatureSpec.prompt` is False. `shared_kv` is a
    function: a drafter calls it while drafting and drops what it returned, because a view that outlives the
    draft would force the next write to copy the whole buffer.
    """

    hidden: tuple[mx.array, ...] = ()  # each [T, D], in the order of FeatureSpec.hidden_layers
    final_hidden: mx.array | None = None  # [T, D]
    shared_kv: Callable[[], Mapping[str, KVRows]] | None = None  # by attention type, committed rows only


@dataclass(frozen=True)
class TargetParts:
    """What a drafter borrows from its target, given to its constructor."""

    embed: Callable[[mx.array], mx.array]  # [T] -> [T, D], scaled as the target scales it
    unembed: Callable[[mx.array], mx.array]  # [T, D] -> [T, V], softcap included


@dataclass(frozen=True)
class Draft:
    """K guesses for the tokens after the pending one; K may be 0."""

    tokens: mx.array  # [K] int32
    probs: mx.array | None = (
        None  # [K, V] float32, the law each token was drawn from; None: no chance involved
    )
    confidence: mx.array | None = None  # [K] float32: the largest probability of the law behind each token
    # Known before that token is drawn, on purpose: a decision to verify a token that looks at the token
    # itself changes the law of what is verified.
    parents: tuple[int, ...] | None = None  # by token of a tree: the row it follows (tree.py); None: chain


@cache
def no_draft() -> Draft:
    """A draft of no tokens: the next pass is plain decoding."""
    return Draft(mx.array([], dtype=mx.int32))


@dataclass(frozen=True)
class Choice:
    """A drafter, by its index, and the most tokens to draft with it."""

    drafter: int
    limit: int
    selective: bool = False  # read the confidence, too, and ask the policy how many of them to verify


@dataclass(frozen=True)
class Decision:
    """What to draft in the next round, and why."""

    choices: tuple[Choice, ...]  # in this order until one drafts a token; none: plain decoding
    reason: Reason
    shadow: int | None = None  # plain decoding, but this drafter drafts one token that is not verified
    plain_seconds: float | None = None  # measured time of one plain token here; None: not known
    unlikely: bool = False  # none is expected to have a draft: plain decoding goes on one token ahead
    certainty: bool = False  # of a round without a draft: say how sure the target was of its token


@dataclass(frozen=True)
class Alternative:
    """A token that could have stood in a place."""

    token: int
    written: bytes  # its text; half a character is those bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """An emitted token, and the most likely tokens in its place, the most likely first."""

    token: int
    written: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Round:
    """What the caller gets for one pass of the target: at least one token."""

    tokens: list[int]
    drafted: int  # draft tokens that were verified
    accepted: int  # draft tokens among `tokens`
    seconds: float = 0.0  # from the start of the draft until all is committed
    reason: Reason = Reason.NO_DRAFTER
    finish_reason: Literal["stop", "length"] | None = None
    drafter: int | None = None  # the one that drafted, or was asked for a shadow token
    proposed: int = 0  # draft tokens, those not verified included
    confidence: tuple[float, ...] = ()  # of those proposed, where it was read
    agreement: float | None = None  # the chance that an unverified (shadow) token would have been accepted
    certainty: float | None = None  # the target's highest probability for the token, where it was asked for
    plain_seconds: float | None = None  # measured time of one plain token here; None: not known
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, if asked for
    nodes: int = 0  # draft tokens of a tree, of which `drafted` are those of the longest path; 0: a chain
    ranks: tuple[int, ...] = ()  # of the accepted tokens of a tree: guesses for the same place before each


class Target(Protocol):
    """A model with a cache that takes writes on trial."""

    @property
    def size(self) -> int:
        """Committed tokens, S."""
        ...

    @property
    def on_trial(self) -> int:
        """Rows written and not yet committed."""
        ...

    def prefill(self, tokens: list[int]) -> Features:
        """Write and commit one chunk of the prompt, without logits."""
        ...

    def verify(self, tokens: mx.array) -> mx.array:
        """Write T tokens on trial, or T more. Returns logits [T, V]; `commit` ends the trial."""
        ...

    def verify_tree(self, tokens: mx.array, parents: tuple[int, ...]) -> mx.array:
        """Write the pending token and a tree of draft tokens on trial. Returns logits [K + 1, V]."""
        ...

    def commit(self, keep: int) -> Features:
        """Keep the first `keep` rows of the trial and drop the rest. Returns the features of those kept."""
        ...

    def commit_path(self, rows: Sequence[int]) -> Features:
        """Keep these rows of a tree on trial, a path from row 0 on. Returns the features of those kept."""
        ...


class Sampler(Protocol):
    """Logits to a law, draws from it, and the acceptance rule that keeps the law.

    In every method row j of T rows is conditioned on `history + drafted[: len(drafted) - T + 1 + j]`: the
    last row on all of `drafted`, earlier ones on shorter prefixes.
    """

    @property
    def drafting(self) -> Sampler:
        """What drafters draw with: without what only the target's own rows need, such as a grammar."""
        ...

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """One token a row. Returns tokens [T] int32 and the law [T, V] they were drawn from.

        The law is None when the draw involved no chance of its own (greedy, or noise shared with the target).
        """
        ...

    def verify(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        """Judge a draft by logits [K + 1, V]. Returns int32 [2]: number accepted, next token."""
        ...

    def verify_tree(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        """Judge a tree by logits [K + 1, V]. Returns int32 [2]: row of the last one accepted, next token."""
        ...

    def agreement(self, logits: mx.array, history: Sequence[int], token: mx.array, draft: Draft) -> mx.array:
        """The chance, float32 [1], that the first token of a draft would be accepted.

        `token` [1] was drawn from `logits` [1, V] in its place.
        """
        ...


class Drafter(Protocol):
    """Guesses the tokens after the pending one. Holds the state of one sequence."""

    needs: FeatureSpec

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Tokens became final: `history[-T:]` follow the T rows of `features`."""
        ...

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """At most `limit` tokens that may follow `history`."""
        ...


class DraftLengthPolicy(Protocol):
    """Decides how many tokens to draft, and with which drafter."""

    def begin(self) -> None:
        """A new answer begins."""
        ...

    def decide(self, history: Sequence[int]) -> Decision:
        """What to draft after `history`, and why. Called once a round, before anything else in it."""
        ...

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        """How many of the tokens just drafted to verify, from the confidence of each.

        Whether token j is verified may depend on `confidence[: j + 1]` only. Later ones know which token j
        was, and a choice by them would change the law of sampled text.
        """
        ...

    def observe(self, round: Round) -> None:
        """Learn from a finished round."""
        ...
