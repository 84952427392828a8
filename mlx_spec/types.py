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
    LOST = "speculation gained nothing"  # of a whole answer

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
            Reason.LOST: "they gained nothing in this answer",
        }[self]


@dataclass(frozen=True)
class FeatureSpec:
    """The features that a drafter reads from its target."""

    hidden_layers: tuple[int, ...] = ()  # decoder-layer outputs (residual stream), 0-based; -1 is the last
    final_hidden: bool = False  # output of the final norm: what the LM head reads
    shared_kv: bool = False  # K/V of the last cache-owning layer of each attention type
    prompt: bool = True  # False: hidden states are wanted of generated tokens, not of a prompt's


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
    follows it. A prompt has no hidden states where `FeatureSpec.prompt` is False. `shared_kv` is a
    function: a drafter calls it while drafting and drops what it returned, because a view that outlives the
    draft would force the next write to copy the whole buffer.
    """

    hidden: tuple[mx.array, ...] = ()  # each [T, D], in the order of FeatureSpec.hidden_layers
    final_hidden: mx.array | None = None  # [T, D]
    shared_kv: Callable[[], Mapping[str, KVRows]] | None = None  # by attention type, committed rows only


@dataclass(frozen=True)
class CacheState:
    """The content of caches in a form that a file can hold: arrays and numbers by name."""

    arrays: dict[str, mx.array] = field(default_factory=dict)
    numbers: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Mapping[str, CacheState]) -> CacheState:
        """Return one state of several, with the name of its part before each name."""
        return cls(
            {f"{part}.{name}": array for part, s in parts.items() for name, array in s.arrays.items()},
            {f"{part}.{name}": given for part, s in parts.items() for name, given in s.numbers.items()},
        )

    def part(self, name: str) -> CacheState:
        """Return a part of a joined state; an empty one if there is none of that name."""
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
    ahead: bool | None = None  # drafted while the last pass ran; False: for other outcomes only
    source: str | None = None  # a name for users; the engine adds the drafter's if it is None
    drafter_index: int | None = None  # among the policy's drafters, which the engine adds

    def of(self, choice: Choice) -> Draft:
        """Return it as the draft of a choice."""
        return replace(self, source=self.source or choice.source, drafter_index=choice.drafter_index)


@cache
def no_draft() -> Draft:
    """A draft of no tokens: the next pass is plain decoding."""
    return Draft(mx.array([], dtype=mx.int32))


@dataclass(frozen=True)
class Choice:
    """A drafter, by its index, and the most tokens to draft with it."""

    drafter_index: int
    limit: int
    source: str = field(compare=False)  # the drafter's name, unless its drafts say another one
    ahead: bool = False  # draft for likely outcomes while the target verifies this draft


@dataclass(frozen=True)
class Cost:
    """The cost of a round, whatever else the machine does."""

    shape: Hashable  # rounds of one shape cost the same
    plain_tokens: float  # of plain decoding in the same time
    error: float = 0.0  # of that, relative: one standard deviation


@dataclass(frozen=True)
class Decision:
    """The drafters to try in the next round, and the reason."""

    choices: tuple[Choice, ...]  # tried in this order until one drafts a token; empty for plain decoding
    reason: Reason
    plain_seconds: float | None = None  # time of one plain token here; None if not known
    cost: Callable[[int, int], Cost | None] | None = None  # of a round, by its drafter and draft tokens

    def cost_of(self, longest: Round) -> Cost | None:
        """Return what a pass with this longest draft takes: one plain token if nothing was drafted."""
        if longest.drafter_index is None:
            return Cost("plain", 1.0)
        return (
            None if self.cost is None else self.cost(longest.drafter_index, longest.nodes or longest.drafted)
        )


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability; of an emitted one, also the most likely tokens in its place."""

    token: int
    written: bytes  # its text; half a character is those bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the most likely first
    offset: int = field(default=0, compare=False)  # characters of the text before it


@dataclass(frozen=True)
class Round:
    """The result of one pass of the target: at least one token.

    Its kind says what the pass was. "plain": one token, and the one after it is queued. "drained": one token,
    and none is queued, because a draft is wanted or the answer ends. "draft": a draft was verified.
    """

    tokens: list[int]
    drafted: int  # draft tokens that were verified; of a tree, the tokens of its longest path
    accepted: int  # draft tokens among `tokens`
    kind: Literal["plain", "drained", "draft"]
    source: str | None = None  # a name for users of where the draft of a "draft" round is from
    nodes: int = 0  # draft tokens of a tree; 0 for a chain
    ranks: tuple[int, ...] = ()  # of accepted tokens of a tree: how many guesses for that place come before
    ahead: bool | None = None  # as of its draft
    seconds: float = 0.0  # from the start of the draft until all is committed
    reason: Reason = Reason.NO_DRAFTER
    finish_reason: Literal["stop", "length"] | None = None
    plain_seconds: float | None = None  # time of one plain token here; None if not known
    cost: Cost | None = None  # None if not known
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, if requested
    batch_size: int = 1  # sequences that shared the pass, this one included
    drafter_index: int | None = None  # of the drafter of a "draft" round, for the policy


class Sampler(Protocol):
    """Turns logits into a distribution, draws from it, and verifies drafts so that it is kept.

    In every method row j of T rows is conditioned on `history + drafted[: len(drafted) - T + 1 + j]`: the
    last row on all of `drafted`, earlier ones on shorter prefixes.
    """

    @property
    def is_argmax(self) -> bool:
        """Return True if it takes the largest of the logits as they are, and nothing else happens."""

    @property
    def fits(self) -> Sequence[mx.array]:
        """Return a bool [1] that is False if the last draw or verdict did not consider all tokens.

        Then it counts for a drafter only, and the target asks again with `exact`. Empty if it always does.
        """

    @property
    def drafting(self) -> DraftingSampler:
        """Return the sampler of drafters: it lacks what only the target's rows need, such as a grammar."""

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
        """Return the log-probabilities of tokens just emitted, once; none if they are not wanted."""


class DraftingSampler(Sampler, Protocol):
    """The sampler of drafters."""

    def fresh(self) -> DraftingSampler:
        """Return a sampler that counts no tokens yet, for another history. No noise is used twice."""

    def rank(self, logits: mx.array, history: Sequence[int], drafted: mx.array, count: int) -> mx.array:
        """Return the `count` tokens [T, count] that each row draws most probably, the likeliest first.

        Shared noise is known and counts.
        """


class EarlierTexts(Protocol):
    """Texts outside the conversation that a drafter may copy from."""

    def find(self, last: Sequence[int]) -> tuple[int, int]:
        """Return the place after the longest known end of `last`, and the length of that end; or zeros."""

    def copy(self, place: int, count: int) -> list[int]:
        """Return at most `count` tokens from a place on."""


class Drafter(Protocol):
    """Guesses the tokens after the pending one. Holds the state of one sequence."""

    needs: FeatureSpec

    @property
    def nbytes(self) -> int:
        """Return the bytes of its caches."""

    def missing(self, size: int) -> int:
        """Return how many of the first `size` positions it has not processed and cannot process by itself."""

    def state(self) -> CacheState:
        """Return what its caches hold between two answers. Raises InvalidValue if that cannot be exact."""

    def restore(self, state: CacheState) -> None:
        """Take over a state of the same drafter; this one is new."""

    def copy_from(self, earlier: EarlierTexts | None) -> None:
        """Copy these texts, too, where it copies text: for one answer, before its prompt is read."""

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Process new tokens: `history[-T:]` follow the T rows of `features`."""

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return at most `limit` tokens that may follow `history`."""

    def draft_batch(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the drafts of several sequences, whose drafters are of this kind and share its weights."""

    def prepare(self, history: Sequence[int], draft: Draft, sampler: DraftingSampler) -> None:
        """Begin to draft for the likely outcomes of a draft that is about to be verified. Do not wait."""


@dataclass(frozen=True)
class DraftRequest:
    """A draft that one sequence of several wants."""

    drafter: Drafter
    history: Sequence[int]
    limit: int
    sampler: Sampler


@dataclass(frozen=True)
class RequestDrafter:
    """A drafter that one request brings, such as predicted output. Drafting with it takes no time."""

    name: str
    drafter: Drafter
    available: Callable[[Sequence[int]], int]  # the number of tokens that it has to follow a history
    prior: float  # probability that one of its tokens is accepted, before any was verified


class DraftLengthPolicy(Protocol):
    """Decides how many tokens to draft, and with which drafter."""

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None:
        """Begin an answer. The drafters of its request follow the others by index."""

    def decide(self, history: Sequence[int]) -> Decision:
        """Return what to draft after `history`. Called first in every round."""

    def observe(self, round: Round) -> None:
        """Learn from a finished round."""


class GroupPolicy(Protocol):
    """Decides how many tokens each of several sequences drafts that share a pass."""

    def decide(
        self, policies: Sequence[DraftLengthPolicy], histories: Sequence[Sequence[int]]
    ) -> list[Decision]:
        """Return what each sequence drafts. Called first in every round."""

    def observe(self, rounds: Sequence[Round | None]) -> None:
        """Learn from the finished round of each sequence; None if it failed."""
