"""Choose how much of a prompt is read between two rounds, so that decoding sequences pause only briefly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import nlargest

from mlx_spec.decode.running import PREFILL_STEP

MAX_PAUSE_S = 0.1  # between the tokens of sequences that decode while a prompt is read
MIN_CHUNK = 8  # prompt tokens in one pass, at least, so that no prompt starves
# Seconds that the first round of sequences is deferred for other prompts, at most. A second is the longest
# wait that does not interrupt a user's thought (Nielsen, Usability Engineering, 1993).
MAX_DEFERRAL_S = 1.0

Clock = Callable[[], float]


class PromptPace:
    """Chooses how many tokens of a prompt to read between two rounds.

    A pause is the time between the ends of two rounds. A chunk takes a part of it. The round, joining
    sequences and the caller take the rest. The last pauses predict the next ones, and the errors of these
    predictions say how much shorter than the bound to plan (conformal prediction).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._planned = 0.8  # share of MAX_PAUSE_S that rounds and chunks may take, because times vary
        # Two prompts may be read in turns, so two chunks are remembered. Not all rounds draft, so four rests
        # are remembered.
        self._chunks: deque[tuple[int, float]] = deque(maxlen=2)  # tokens and seconds
        self._rests: deque[float] = deque(maxlen=4)  # seconds of pauses without their chunks
        self._smallest: deque[float] = deque(maxlen=4)  # seconds of chunks of at most MIN_CHUNK tokens
        self._errors: deque[float] = deque(maxlen=300)  # seconds of a pause over the expected ones
        self.reading = 0.0  # seconds of chunks since the last round
        self._expected = 0.0  # expected seconds of these chunks; infinite if no similar size is known
        self._last_round: float | None = None  # time of its end; None if no sequence decodes
        self._deferred_since: float | None = None  # None unless sequences could decode and are deferred

    def tokens(self) -> int:
        """Return how many tokens to read next: the time left of a pause over the time of one token.

        While times are unknown, chunks are small. If even those do not fit beside the fastest round, all
        pauses are too long, and a chunk may take longer than a round: small ones would keep one client
        waiting and gain the others little. A slow round alone does not allow that.
        """
        budget_s, fastest_round_s = self.seconds(), min(self._rests, default=0.0)
        if min(self._smallest, default=0.0) > MAX_PAUSE_S * self._planned - fastest_round_s:
            # A pass has a fixed cost, nearly as large as a round's, so a chunk as long as one round would
            # hold few tokens.
            budget_s = 2.0 * fastest_round_s
        # A pass has a fixed cost, so the time of a much larger chunk says little about a small one.
        if not self._chunks or any(seconds > 2 * budget_s for _, seconds in self._chunks):
            return MIN_CHUNK
        tokens = min(math.ceil(tokens * budget_s / seconds) for tokens, seconds in self._chunks)
        return min(max(tokens, MIN_CHUNK), PREFILL_STEP)

    def seconds(self) -> float:
        """Return how long to read next: the time left of a pause, which may be negative."""
        late = 3  # Of the 300 pauses that are remembered, 1 % may be longer than planned.
        worst = nlargest(late, self._errors)
        p99_error = worst[-1] if len(worst) == late else 1.0
        return MAX_PAUSE_S * min(self._planned, 1 / p99_error) - max(self._rests, default=MAX_PAUSE_S)

    def defers_decoding(self, unread: int) -> bool:
        """Return True if sequences that could decode should be deferred until `unread` tokens are read.

        Shared passes cost less, and prompts are read faster while no sequence decodes.
        """
        if self._last_round is not None or not self._chunks:  # a sequence decodes, or no speed is known
            return False
        now = self._clock()
        if self._deferred_since is None:
            self._deferred_since = now
        tokens, seconds = self._chunks[-1]
        return now - self._deferred_since + unread * seconds / tokens <= MAX_DEFERRAL_S

    def read(self, rows: int, seconds: float) -> None:
        """Learn from a pass that read `rows` prompt tokens; 0 if it computed rows of a span.

        Chunks of a similar size predict its time; others do not.
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
