"""How much of a prompt is read between two rounds, so that sequences that decode pause shortly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import nlargest

from mlx_spec.decode.running import PREFILL_STEP

MAX_PAUSE_S = 0.1  # between the tokens of sequences that decode while a prompt is read
MIN_CHUNK = 8  # prompt tokens in one pass, at least: the prompt goes on
# Seconds that the first round of sequences is deferred for other prompts, at most. A second is the longest
# wait that does not interrupt a user's thought (Nielsen, Usability Engineering, 1993).
MAX_DEFERRAL_S = 1.0

Clock = Callable[[], float]


class PromptPace:
    """Chooses how many tokens of a prompt to read between two rounds.

    A pause is the time between the ends of two rounds. A chunk takes a part of it; the rest is the round,
    sequences that join, and the caller. The last pauses predict the next ones, and the errors of such
    predictions say how much shorter than the bound to plan (conformal prediction).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._planned = 0.8  # of MAX_PAUSE_S: what rounds and chunks are to take at most, as times vary
        # Prompts may be read by turns, so two chunks are remembered. Not all rounds draft, so four of them
        # are.
        self._chunks: deque[tuple[int, float]] = deque(maxlen=2)  # tokens and seconds
        self._rests: deque[float] = deque(maxlen=4)  # seconds of pauses without their chunks
        self._smallest: deque[float] = deque(maxlen=4)  # seconds of chunks of at most MIN_CHUNK tokens
        self._errors: deque[float] = deque(maxlen=300)  # seconds of a pause by those that were expected
        self.reading = 0.0  # seconds of chunks since the last round
        self._expected = 0.0  # seconds expected of them; infinite if no chunk of such a size is known
        self._last_round: float | None = None  # time of its end; None if no sequence decodes
        self._deferred_since: float | None = None  # None unless sequences could decode and are deferred

    def tokens(self) -> int:
        """Return how many tokens to read next: the time left of a pause by the time of a token.

        Unknown times begin with small chunks. Where even those do not fit beside the fastest round, pauses
        are too long whatever is read: then a chunk may take longer than a round. Small ones would keep one
        client waiting and gain the others little. Varying times do not justify that.
        """
        budget_s, fastest_round_s = self.seconds(), min(self._rests, default=0.0)
        if min(self._smallest, default=0.0) > MAX_PAUSE_S * self._planned - fastest_round_s:
            # Rounds that a chunk may take where MIN_CHUNK tokens do not fit the pause. A pass has a fixed
            # cost, nearly as large as a round's, so a chunk as long as a round would hold few tokens.
            budget_s = 2.0 * fastest_round_s
        # A pass has a cost of its own, so a much larger one says too little of a small one.
        if not self._chunks or any(seconds > 2 * budget_s for _, seconds in self._chunks):
            return MIN_CHUNK
        tokens = min(math.ceil(tokens * budget_s / seconds) for tokens, seconds in self._chunks)
        return min(max(tokens, MIN_CHUNK), PREFILL_STEP)

    def seconds(self) -> float:
        """Return how long to read next: the time left of a pause, which may be less than none."""
        late = 3  # Of the 300 pauses that are remembered, 1 % may be longer than planned.
        worst = nlargest(late, self._errors)
        p99_error = worst[-1] if len(worst) == late else 1.0
        return MAX_PAUSE_S * min(self._planned, 1 / p99_error) - max(self._rests, default=MAX_PAUSE_S)

    def defers_decoding(self, unread: int) -> bool:
        """Return True if sequences that could decode should be deferred until `unread` tokens are read.

        Together their passes cost less, and prompts are read faster while no sequence decodes.
        """
        if self._last_round is not None or not self._chunks:  # one decodes, or no speed is known
            return False
        now = self._clock()
        if self._deferred_since is None:
            self._deferred_since = now
        tokens, seconds = self._chunks[-1]
        return now - self._deferred_since + unread * seconds / tokens <= MAX_DEFERRAL_S

    def read(self, rows: int, seconds: float) -> None:
        """Learn from a pass that read these rows of prompts; it has none if it computed rows of a span.

        Only chunks of a similar size say how long it was expected to take.
        """
        self.reading += seconds
        if not rows:
            self._expected = math.inf
            return
        seconds = max(seconds, 1e-6)
        alike = self._chunks and all(rows <= 2 * other <= 4 * rows for other, _ in self._chunks)
        self._expected += rows * max(s / n for n, s in self._chunks) if alike else math.inf
        self._chunks.append((rows, seconds))
        if rows <= MIN_CHUNK:
            self._smallest.append(seconds)

    def end_round(self, goes_on: bool) -> None:
        """Learn from the time since the last round. `goes_on` says if a sequence decodes in the next one."""
        now = self._clock()
        if self._last_round is not None:
            expected = max(self._rests, default=math.inf) + self._expected
            if 0 < expected < math.inf:
                self._errors.append((now - self._last_round) / expected)
            self._rests.append(now - self._last_round - self.reading)
        self._last_round, self._deferred_since = now if goes_on else None, None
        self.reading = self._expected = 0.0
