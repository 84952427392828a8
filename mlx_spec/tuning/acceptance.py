"""What is accepted: by position, by the drafter's confidence, in this text and over all texts of a pair.

Four speeds. What a pair has learned (`Experience`) is the prior of every new answer. Its first tokens say of
which kind it is (`Opening`). What it shows over some hundred rounds is weighed against that. And the last few
rounds move all positions together, as far as following them has foretold what was accepted (`Drift`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlx_spec.tuning.drift import Drift
from mlx_spec.tuning.opening import Kinds, Opening
from mlx_spec.tuning.tally import Tally, log_loss, logit
from mlx_spec.types import MAX_DRAFT_TOKENS, Round

BINS = 10  # of confidence
FIRST_HAD = 0.9  # share of rounds in which a drafter has a draft, of which nothing is known
FIRST_RATE = 0.75  # acceptance of a first token of which nothing is known
DECLINE = 0.99  # ... and of a later one, relative to the one before
PAIR_MEMORY, TEXT_MEMORY, RECENT = 2000, 150, 32  # rounds
PAIR_STRENGTH, TEXT_STRENGTH, BIN_STRENGTH = 4.0, 16.0, 8.0  # observations that a prior is worth
RECENT_STRENGTH, FLAT_STRENGTH = 20.0, 5.0


class Experience:
    """What a pair has learned of one drafter. Outlives sequences and is shared by them."""

    def __init__(self) -> None:
        self.positions = Tally(MAX_DRAFT_TOKENS, PAIR_MEMORY)
        self.had = Tally(1, PAIR_MEMORY)  # rounds in which it was asked and had a draft
        self.bins = Tally(BINS, PAIR_MEMORY)
        self.expected = Tally(BINS, PAIR_MEMORY)  # the same tokens, as their positions alone would have it
        self.confidences = (Tally(BINS, PAIR_MEMORY), Tally(BINS, PAIR_MEMORY))  # of first tokens, of later
        self.kinds = Kinds()
        self.loss = 0.0  # log loss of the bin's own rate, less that of the position's shifted by the bin

    def tick(self) -> None:
        """Something was observed."""
        for tally in (self.positions, self.bins, self.expected, *self.confidences):
            tally.tick()

    def rates(self) -> list[float]:
        """The rate of every position, given that those before were accepted."""
        rates, prior = [], FIRST_RATE
        for position in range(MAX_DRAFT_TOKENS):
            rate = self.positions.mean(position, prior, PAIR_STRENGTH)
            rates.append(rate)
            prior = DECLINE * rate
        return rates


class Acceptance:
    """One drafter in one sequence."""

    def __init__(self, experience: Experience) -> None:
        self._pair = experience
        self._positions = Tally(MAX_DRAFT_TOKENS, TEXT_MEMORY)
        self._offered = Tally(MAX_DRAFT_TOKENS + 1, TEXT_MEMORY)  # [0]: had a draft; [i]: one of i or more
        self._recent = [Tally(BINS, RECENT), Tally(BINS, RECENT)]  # confidences of first tokens, of later
        self._drift, self._opening = Drift(), Opening(experience.kinds)
        self.told = False  # confidence has been read at least once
        self._short = False  # a draft has been shorter than asked for
        self._first: float | None = None  # the rate of the first position, where nothing was seen since
        self._now: tuple[float, list[float]] | None = None  # the drift, and all rates at it; likewise
        self.refresh()

    def begin(self) -> None:
        """An answer begins: another text, and maybe of another kind."""
        self._opening.begin()
        self._positions = Tally(MAX_DRAFT_TOKENS, TEXT_MEMORY)
        self._drift.calm()
        self.refresh()

    def begins(self, certainty: float) -> None:
        """The target was so sure of the first token of this answer: its highest probability, 0 to 1."""
        self._opening.begins(certainty)
        self._first = self._now = None

    @property
    def drift(self) -> float:
        """How far the last rounds were easier than this text usually is, in logits."""
        return self._drift.level()

    @property
    def level(self) -> float:
        """What moves all rates together: it changes when they do. In logits."""
        share = self._opening.share
        return self.drift + (share * logit(self._opening.first) if share else 0.0)

    @property
    def opening(self) -> bool:
        """Whether what this answer is expected to be like is mostly its kind."""
        return self._opening.share > 0.5

    @property
    def tries(self) -> float:
        """Rounds of this pair in which a token of this drafter was judged, old ones discounted."""
        return self._pair.positions.count(0)

    def tick(self, rounds: int = 1) -> None:
        """So many rounds went by, in whatever way."""
        self._drift.tick(rounds)

    def _observed(self) -> None:
        self._first = self._now = None
        for tally in (self._positions, self._offered, *self._recent):
            tally.tick()
        self._pair.tick()

    def missed(self, rounds: int = 1) -> None:
        """The drafter was asked so many times and had no draft."""
        self._offered.tick(rounds)
        self._offered.add(0, 0, rounds)
        self._pair.had.add(0, 0, rounds)

    def saw(self, round: Round, limit: int) -> None:
        """A round in which this drafter drafted, with `limit` tokens at most."""
        self._observed()
        self._offer(round.proposed, limit)
        bins = [bin_of(c) for c in round.confidence]
        ended = round.accepted < round.drafted and len(round.tokens) == round.accepted
        judged = min(round.accepted + 1, round.drafted) - ended  # a stop token may hide the rest
        if judged:
            self._opening.saw(min(round.accepted, judged), max(judged - round.accepted, 0))
        for position in range(judged):
            self._learn(position, bins, float(position < round.accepted))
        if round.agreement is not None and not round.drafted:
            self._opening.saw(round.agreement, 1 - round.agreement)
            self._learn(0, bins, round.agreement)
        elif judged == round.accepted == round.drafted and not ended:
            self._impute(round.drafted, bins)

    def saw_shadow(self, agreement: float, confidence: Sequence[float]) -> None:
        """One token was drafted and not verified; `agreement` is the chance that it would have passed."""
        self._offered.add(0, 1)
        self.compared(agreement, confidence)

    def compared(self, agreement: float, confidence: Sequence[float]) -> None:
        """The same of the first token of a draft that will be made again."""
        self._observed()
        self._opening.saw(agreement, 1 - agreement)
        self._learn(0, [bin_of(c) for c in confidence[:1]], agreement)

    def refresh(self) -> None:
        """Take what was seen into the rates. Until then they are what they were."""
        self._base, self._first, self._now = [logit(rate) for rate in self._rates()], None, None
        self.had, self.lengths = self._offers()

    def rates(self) -> list[float]:
        """The rate of every position now, given that those before were accepted."""
        level, share = self.drift, self._opening.share
        if self._now is None or self._now[0] != level:
            rates = [1 / (1 + math.exp(-base - level)) for base in self._base]
            first = self._opening.rates() if share else rates
            mixed = [share * f + (1 - share) * rate for f, rate in zip(first, rates, strict=True)]
            self._now = level, mixed
        return self._now[1]

    def first_rate(self) -> float:
        """The rate of the first position now."""
        if self._first is None:
            share, rate = self._opening.share, 1 / (1 + math.exp(-self._base[0] - self.drift))
            self._first = share * self._opening.first + (1 - share) * rate
        return self._first

    def next(self, round: Round) -> float:
        """The rate of the position behind those that a round verified."""
        if len(round.confidence) > round.drafted:
            return self._bin_rates()[0][bin_of(round.confidence[round.drafted])]
        base = self._base[min(round.drafted, MAX_DRAFT_TOKENS - 1)]
        return 1 / (1 + math.exp(-base - self.drift))

    def by_confidence(self) -> list[list[float]]:
        """The rate by position and bin of confidence."""
        own, shifts = self._bin_rates()
        weight = 1 / (1 + math.exp(min(max(self._pair.loss, -30), 30)))
        return [
            [weight * o + (1 - weight) / (1 + math.exp(-base - s)) for o, s in zip(own, shifts, strict=True)]
            for base in self._base
        ]

    def histograms(self) -> tuple[list[float], list[float]]:
        """The share of every bin among recent confidences: of first tokens, and of later ones."""
        shares = []
        for recent, ever in zip(self._recent, self._pair.confidences, strict=True):
            prior = _shares(ever, [1 / BINS] * BINS, FLAT_STRENGTH)
            shares.append(_shares(recent, prior, RECENT_STRENGTH))
        return shares[0], shares[1]

    def _offers(self) -> tuple[float, list[float]]:
        """How often it has a draft, and how often a draft that may have i + 1 tokens has them, by i."""
        longer, prior = [], 1.0
        for length in range(1, MAX_DRAFT_TOKENS + 1):
            prior = min(prior, self._offered.mean(length, prior, 2.0))
            longer.append(prior)
        return self._offered.mean(0, self._pair.had.mean(0, FIRST_HAD, 1.0), 1.0), longer

    def _rates(self) -> list[float]:
        """This text's rates; a position that it has not shown is off the pair's rate as the one before is."""
        rates, offset = [], 0.0
        for position, prior in enumerate(self._pair.rates()):
            shifted = 1 / (1 + math.exp(-logit(prior) - offset))
            rate = self._positions.mean(position, shifted, TEXT_STRENGTH)
            offset = logit(rate) - logit(prior)
            rates.append(rate)
        return rates

    def _bin_rates(self) -> tuple[list[float], list[float]]:
        pair = self._pair
        own, shifts = [], []
        for b in range(BINS):
            expected = pair.expected.mean(b, FIRST_RATE, 0.1)
            rate = pair.bins.mean(b, expected, BIN_STRENGTH)
            own.append(rate)
            shifts.append(logit(rate) - logit(expected))
        return own, shifts

    def _learn(self, position: int, bins: Sequence[int], good: float) -> None:
        """One token, judged."""
        if position < len(bins):
            self._learn_bin(position, bins[position], good)
        self._count(position, good, 1.0)

    def _learn_bin(self, position: int, b: int, good: float) -> None:
        self.told = True
        pair = self._pair
        rate = 1 / (1 + math.exp(-self._base[position]))
        expected = pair.expected.mean(b, rate, 0.1)
        own = pair.bins.mean(b, expected, BIN_STRENGTH)
        shifted = 1 / (1 + math.exp(-self._base[position] - logit(own) + logit(expected)))
        pair.loss = 0.99 * pair.loss + log_loss(own, good) - log_loss(shifted, good)
        pair.bins.add(b, good)
        pair.expected.add(b, rate)
        self._confident(position, b, 1.0)

    def _impute(self, position: int, bins: Sequence[int]) -> None:
        """Tokens that were cut off: what their confidence says they would have brought.

        Without them the rates by position would be those of confident tokens only.
        """
        own, _ = self._bin_rates()
        share = 1.0
        for place in range(position, len(bins)):
            self._confident(place, bins[place], share)
            rate = own[bins[place]]
            self._count(place, rate, share)
            share *= rate

    def _count(self, position: int, good: float, share: float) -> None:
        self._positions.add(position, good, share)
        self._pair.positions.add(position, good, share)
        self._drift.add(self._base[position], good, share)

    def _confident(self, position: int, b: int, share: float) -> None:
        self._recent[position > 0].add(b, 1.0, share)
        self._pair.confidences[position > 0].add(b, 1.0, share)

    def _offer(self, proposed: int, limit: int) -> None:
        self._offered.add(0, 1)
        self._pair.had.add(0, 1)
        self._short = self._short or proposed < limit
        for length in range(1, limit + 1) if self._short else ():
            self._offered.add(length, float(length <= proposed))


def _shares(tally: Tally, prior: Sequence[float], strength: float) -> list[float]:
    """The share of each bin, where the prior counts as `strength` tries."""
    counts = [tally.count(b) + strength * share for b, share in enumerate(prior)]
    total = sum(counts)
    return [count / total for count in counts]


def bin_of(confidence: float) -> int:
    """The bin of a confidence in 0..1."""
    return min(int(BINS * confidence), BINS - 1)
