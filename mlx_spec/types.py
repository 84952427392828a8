"""The nouns of one decode round: values that go down, values that come up.

Shapes, everywhere in the package: T block length (K + 1), K draft tokens, V vocabulary, D hidden size,
S context length. p is the target's distribution and q the drafter's, in `sampling/verify.py` only.
Terms follow the papers and vLLM: *draft tokens*, *accepted*, *recovered* (drawn after a rejection),
*bonus* (drawn when all K are accepted). The *pending* token is the last one of the history: emitted, but
not yet in the target's cache.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, Protocol

import mlx.core as mx

from mlx_spec.errors import InvalidValue
from mlx_spec.prompt import RotaryPositions

FinishReason = Literal["stop", "length"]
MAX_DRAFT_TOKENS = 16  # draft tokens of one round; published costs of a pass end at 17 rows


class Reason(enum.StrEnum):
    """Why a round drafted as many tokens as it did. Clients read the value, users the words."""

    FIXED = "fixed by user"
    DISABLED = "disabled by user"
    NO_DRAFTER = "no drafter"
    LEARNING = "learning"
    PAYS = "speculation pays"
    WAITING = "no draft available"
    COST = "verification costs more than it gains"
    ACCEPTANCE = "too few draft tokens accepted"
    BUDGET = "speculation has lost time so far"
    PROBE = "probing"
    RECURRENT = "plain while batched: this target's recurrent state cannot be padded"
    EXACT = "plain: passes of more rows would round otherwise"
    LOST = "speculation gained nothing"  # of a whole answer
    FAILED = "drafter failed"

    @property
    def is_on(self) -> bool:
        """Return True if rounds with this reason draft tokens when a draft is available."""
        on = Reason.FIXED, Reason.LEARNING, Reason.PAYS, Reason.WAITING, Reason.PROBE, Reason.LOST
        return self in on

    @property
    def words(self) -> str:
        """Return the reason as users read it, after "drafts: "."""
        return {
            Reason.FIXED: "as many tokens as you asked for",
            Reason.DISABLED: "switched off",
            Reason.NO_DRAFTER: "none, this model has no drafter",
            Reason.LEARNING: "still measuring whether they pay",
            Reason.PAYS: "they pay",
            Reason.WAITING: "none found for this text",
            Reason.COST: "off, checking them costs too much here",
            Reason.ACCEPTANCE: "off, not expected to pay in this text",
            Reason.BUDGET: "off, they have lost time so far",
            Reason.PROBE: "a few, to see whether they pay again",
            Reason.RECURRENT: "off beside other answers, which this model cannot check together",
            Reason.EXACT: "off, checking them would round otherwise than plain decoding",
            Reason.LOST: "they gained nothing in this answer",
            Reason.FAILED: "off in this answer, the drafter failed (the log says why)",
        }[self]


@dataclass(frozen=True)
class FeatureSpec:
    """The features that a drafter reads from its target."""

    hidden_layers: tuple[int, ...] = ()  # decoder-layer outputs (residual stream), 0-based; -1 is the last
    final_hidden: bool = False  # output of the final norm: what the LM head reads
    shared_kv: bool = False  # K/V of the last cache-owning layer of each attention type
    prompt_hidden: bool = True  # False if the drafter reads no hidden states of prompt tokens


SLIDING, FULL = "sliding_attention", "full_attention"  # types of attention in config.json and `shared_kv`


@dataclass(frozen=True)
class KVRows:
    """K and V of committed positions, in temporal order, as the layer's own attention sees them."""

    keys: mx.array  # [B, H, S, Dk], rope applied
    values: mx.array  # [B, H, S, Dv]
    mask: mx.array | None = None  # bool [B, 1, 1, S] of several sequences; None if all see all rows


@dataclass(frozen=True)
class Features:
    """Target activations of T positions that were just committed.

    Row j belongs to the position just before `history[-T:][j]`, so that it pairs with the token that
    follows it. A prompt has no hidden states if `FeatureSpec.prompt_hidden` is False. `shared_kv` is a
    function: a drafter calls it while drafting and drops the result. A view that outlives the draft would
    force the next write to copy the whole buffer.
    """

    hidden: tuple[mx.array, ...] = ()  # each [T, D], in the order of FeatureSpec.hidden_layers
    final_hidden: mx.array | None = None  # [T, D]
    shared_kv: Callable[[], Mapping[str, KVRows]] | None = None  # by attention type, committed rows only
    rotary: RotaryPositions = field(default_factory=RotaryPositions)  # of the target's rows

    def rows(self, low: int, high: int) -> Features:
        """Return the features of the rows from `low` up to `high`."""
        final = None if self.final_hidden is None else self.final_hidden[low:high]
        return replace(self, hidden=tuple(rows[low:high] for rows in self.hidden), final_hidden=final)


@dataclass(frozen=True)
class CacheState:
    """The content of caches in a form that a file can hold: arrays and numbers by name."""

    arrays: dict[str, mx.array] = field(default_factory=dict)
    numbers: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Mapping[str, CacheState]) -> CacheState:
        """Return one state of several: `part.name` is the array `name` of the state `part`."""
        return cls(
            {f"{part}.{name}": array for part, s in parts.items() for name, array in s.arrays.items()},
            {f"{part}.{name}": values for part, s in parts.items() for name, values in s.numbers.items()},
        )

    def part(self, name: str) -> CacheState:
        """Return a part of a joined state; an empty state if no part has that name."""
        start = f"{name}."
        return CacheState(
            {key.removeprefix(start): a for key, a in self.arrays.items() if key.startswith(start)},
            {key.removeprefix(start): n for key, n in self.numbers.items() if key.startswith(start)},
        )


@dataclass(frozen=True)
class TargetParts:
    """The parts of a target that a drafter borrows, given to its constructor."""

    embed: Callable[[mx.array], mx.array]  # [T] -> [T, D], scaled as the target scales it
    unembed: Callable[[mx.array], mx.array]  # [T, D] -> [T, V], softcap included
    select: Callable[[mx.array], Callable[[mx.array], mx.array]]  # ids [W] -> the head [T, D] -> [T, W]


@dataclass(frozen=True)
class Draft:
    """K guesses for the tokens after the pending one; K may be 0."""

    tokens: mx.array  # [K] int32
    probs: mx.array | None = None  # [K, V] float32 that the tokens were drawn from; None if not drawn
    parents: tuple[int, ...] | None = None  # of a tree: the row that each token follows; None for a chain
    # True if drafted while the last pass ran, False if only other outcomes were; None if nothing ran ahead
    ahead: bool | None = None
    source: str | None = None  # a name for users; if None, the round fills in the drafter's name
    drafter_index: int | None = None  # among the policy's drafters; the round fills it in
    drawn: mx.array | None = None  # the tokens as the drafter gave them, if `tokens` were bounded

    def with_choice(self, choice: DraftChoice) -> Draft:
        """Return the draft with the name and the index of the drafter that was chosen."""
        return replace(self, source=self.source or choice.source, drafter_index=choice.drafter_index)


@cache
def no_draft() -> Draft:
    """Return a draft without tokens: the next pass is plain decoding."""
    return Draft(mx.array([], dtype=mx.int32))


@dataclass(frozen=True)
class DraftChoice:
    """A drafter, by its index, and the most tokens to draft with it."""

    drafter_index: int
    limit: int
    source: str = field(compare=False)  # the drafter's name; a draft may name another source
    ahead: bool = False  # draft for likely outcomes while the target verifies this draft


@dataclass(frozen=True)
class Cost:
    """The cost of a round in plain tokens, which does not depend on the load of the machine."""

    shape: Hashable  # rounds of one shape cost the same
    plain_tokens: float  # that plain decoding emits in the same time
    error: float = 0.0  # relative standard deviation of `plain_tokens`


@dataclass(frozen=True)
class Decision:
    """The drafters to try in the next round, and the reason."""

    choices: tuple[DraftChoice, ...]  # tried in this order until one drafts a token; empty for plain decoding
    reason: Reason
    plain_seconds: float | None = None  # time of one plain token here; None if not known
    cost: Callable[[int, int], Cost | None] | None = None  # of a round, by its drafter and draft tokens

    def cost_of(self, longest: Round) -> Cost | None:
        """Return the cost of a pass whose longest draft is this round's: one plain token without a draft."""
        if longest.drafter_index is None:
            return Cost("plain", 1.0)
        return (
            None if self.cost is None else self.cost(longest.drafter_index, longest.nodes or longest.drafted)
        )


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability. An emitted token also has the most likely ones at its position."""

    token: int
    token_bytes: bytes  # its text in UTF-8, perhaps a part of a character
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the most likely first
    offset: int = field(default=0, compare=False)  # characters of the text before it


@dataclass(frozen=True)
class Round:
    """The result of one pass of the target: at least one token.

    Its kind says what the pass was. "plain": one token, and the one after it is queued. "drained": one token,
    and none is queued: a draft is wanted, sequences are about to share a pass, or the answer ends. "draft": a
    draft was verified.
    """

    tokens: list[int]
    drafted: int  # draft tokens that were verified; of a tree, the tokens of its longest path
    accepted: int  # draft tokens among `tokens`
    kind: Literal["plain", "drained", "draft"]
    source: str | None = None  # a name for users of where the draft of a "draft" round is from
    nodes: int = 0  # draft tokens of a tree; 0 for a chain
    ranks: tuple[int, ...] = ()  # for each accepted token of a tree: likelier guesses at its position
    ahead: bool | None = None  # `Draft.ahead` of its draft
    seconds: float = 0.0  # from the start of the draft until all is committed
    reason: Reason = Reason.NO_DRAFTER
    finish_reason: FinishReason | None = None
    plain_seconds: float | None = None  # time of one plain token here; None if not known
    cost: Cost | None = None  # None if not known
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, if requested
    batch_size: int = 1  # sequences that shared the pass, this one included
    drafter_index: int | None = None  # of the drafter of a "draft" round, for the policy
    doubt: str | None = None  # why the bits may not be plain decoding's; None if they are


class Sampler(Protocol):
    """Turns logits into a distribution, draws from it, and verifies drafts so that it is kept.

    In every method row j of T rows is conditioned on `history + drafted[: len(drafted) - T + 1 + j]`: the
    last row on all of `drafted`, earlier ones on shorter prefixes.
    """

    @property
    def is_argmax(self) -> bool:
        """Return True if it takes the argmax of unchanged logits and records nothing."""

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens of the model. A draft token beyond them is never accepted."""

    @property
    def fits(self) -> Sequence[mx.array]:
        """Return whether the shortlist of the last draw or verdict held the whole nucleus, bool [1].

        If False, the target must draw again with `exact`; a drafter's token may stand. Empty if it always
        does.
        """

    @property
    def drafting(self) -> DraftingSampler:
        """Return the sampler for drafters. It lacks a grammar and a record of log-probabilities."""

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, *, exact: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        """Draw one token a row. Returns tokens [T] int32 and the distribution [T, V] they were drawn from.

        The distribution is None for greedy draws, and for draws with noise shared with the target.
        """

    def verify(
        self, logits: mx.array, history: Sequence[int], draft: Draft, *, exact: bool = False
    ) -> mx.array:
        """Verify a draft by logits [K + 1, V]. Returns int32 [2]: row of the last token accepted, next token.

        In a chain, that row is the number of accepted tokens.
        """

    def logprobs(self, first_position: int, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of tokens just emitted, once; empty if none are recorded."""


class DraftingSampler(Sampler, Protocol):
    """The sampler of drafters."""

    def fresh(self) -> DraftingSampler:
        """Return a sampler for another history, which has counted no tokens. No noise is used twice."""

    def rank(self, logits: mx.array, history: Sequence[int], drafted: mx.array, count: int) -> mx.array:
        """Return the `count` tokens [T, count] that each row draws most probably, the likeliest first.

        Noise that is shared with the target is known before a draw, so it is added first.
        """


class EarlierTexts(Protocol):
    """Texts outside the conversation that a drafter may copy from."""

    def find(self, last: Sequence[int]) -> tuple[int, int]:
        """Return the place after the longest match of the end of `last`, and its length; zeros if none."""

    def copy(self, place: int, count: int) -> list[int]:
        """Return at most `count` tokens from a place on."""


Copy = Callable[[], mx.array]  # makes a copy: it returns an array to evaluate


class Observer(Protocol):
    """Reads the features of new tokens: a drafter, or a sequence for all its drafters."""

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Process new tokens: `history[-T:]` follow the T rows of `features`."""


class Drafter(Observer, Protocol):
    """Guesses the tokens after the pending one. Holds the state of one sequence.

    The defaults are for a drafter that has no caches and reads nothing of the target.
    """

    needs: FeatureSpec

    @property
    def nbytes(self) -> int:
        """Return the bytes of its caches."""
        return 0

    def missing(self, size: int) -> int:
        """Return how many of the first `size` positions it lacks and cannot process without features."""
        return 0

    def state(self) -> CacheState:
        """Return the state of its caches between two answers. Raises InvalidValue if it cannot be saved."""
        if self.nbytes:
            raise InvalidValue(f"the drafter {type(self).__name__} cannot save its caches")
        return CacheState()

    def restore(self, state: CacheState) -> None:
        """Take over the state of a drafter of the same kind. This one must be new."""
        return

    def follow(self, origin: Drafter) -> list[Copy]:
        """Refer no more to arrays of an origin that is in use, whose state this one has restored.

        Returns what copies the rest later; nothing if computing the state ends the copies, as in
        small caches.
        """
        return []

    def proposals(self) -> tuple[Drafter, ...]:
        """Return the drafters among which a policy chooses, each with its own belief: by default itself."""
        return (self,)

    def copy_from(self, earlier: EarlierTexts | None) -> None:
        """Let a drafter that copies text copy these, too, in the next answer. Called before its prefill."""
        return

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return at most `limit` tokens that may follow `history`."""

    def draft_batch(self, calls: Sequence[DraftCall]) -> list[Draft]:
        """Return the drafts of several sequences, whose drafters are of this kind and share its weights."""
        return [call.drafter.draft(call.history, call.limit, call.sampler) for call in calls]

    def prepare(self, history: Sequence[int], draft: Draft, sampler: DraftingSampler) -> None:
        """Begin to draft for the likely outcomes of a draft that is about to be verified. Do not wait."""
        return


@dataclass(frozen=True)
class DraftCall:
    """The arguments of `Drafter.draft` for one sequence."""

    drafter: Drafter
    history: Sequence[int]
    limit: int
    sampler: Sampler


@dataclass(frozen=True)
class RequestDrafter:
    """A drafter that one request brings, such as predicted output. Drafting with it takes no time."""

    name: str
    drafter: Drafter
    available: Callable[[Sequence[int]], int]  # how many tokens it can draft after a history
    prior: float  # probability of acceptance that is assumed before a token was verified


class DraftLengthPolicy(Protocol):
    """Decides how many tokens to draft, and with which drafter."""

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None:
        """Begin an answer. The drafters of its request follow the others by index."""

    def decide(self, history: Sequence[int]) -> Decision:
        """Return the decision for the round after `history`. Called first in every round."""

    def observe(self, round: Round) -> None:
        """Learn from a finished round what the next decision needs. The device may wait for it."""

    def settle(self) -> None:
        """Learn the rest. Called while the device computes the next round, if there is one."""
