"""How far the last rounds were easier or harder than a text usually is."""

from __future__ import annotations

import math

from mlx_spec.tuning.tally import log_loss


class Drift:
    """How far the text of the last rounds is easier or harder, in logits.

    Several followers, one of which stands still, each as fast as its gain. Their weights are how well they
    foretold what was accepted, so that noise is not followed.
    """

    GAINS = (0.0, 0.2, 0.7)
    KEEP = (1.0, 0.97, 0.9)  # a round
    MEMORY = 0.97  # of the losses, an observation

    def __init__(self) -> None:
        self._levels = [0.0] * len(self.GAINS)
        self._losses = [0.0] * len(self.GAINS)
        self._mixed: float | None = 0.0
        self._rounds = 0  # that went by since the levels were worked out

    def tick(self, rounds: int) -> None:
        """So many rounds went by."""
        self._rounds += rounds

    def calm(self) -> None:
        """Another text: nothing is known of its last rounds."""
        self._levels, self._mixed = [0.0] * len(self.GAINS), None

    def add(self, base: float, good: float, share: float = 1.0) -> None:
        """A token was accepted or not; `base` is the logit it had without any drift."""
        self._settle()
        self._mixed = None
        keep = 1 - (1 - self.MEMORY) * share
        for i, gain in enumerate(self.GAINS):
            p = 1 / (1 + math.exp(-base - self._levels[i]))
            self._losses[i] = self._losses[i] * keep + share * log_loss(p, good)
            self._levels[i] += share * gain * (good - p)

    def level(self) -> float:
        """The mixture's level."""
        self._settle()
        if self._mixed is None:
            least = min(self._losses)
            weights = [math.exp(least - loss) for loss in self._losses]
            weighted = sum(w * level for w, level in zip(weights, self._levels, strict=True))
            self._mixed = weighted / sum(weights)
        return self._mixed

    def _settle(self) -> None:
        if self._rounds:
            kept = [keep**self._rounds for keep in self.KEEP]
            self._levels = [level * keep for level, keep in zip(self._levels, kept, strict=True)]
            self._rounds, self._mixed = 0, None
