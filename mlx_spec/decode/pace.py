"""Choose how much of a prompt is read between two rounds, so that decoding sequences pause only briefly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import nlargest

from mlx_spec.decode.running import PREFILL_STEP, PrefillStep

MAX_PAUSE_S = 0.1  # between the tokens of sequences that decode while a prompt is read
# Tokens of a chunk while others decode, read layer by layer. The first is the chunk of a prompt that is read
# alone: then a pass rounds in the same way under any load. The others are for devices on which one layer
# takes too long. They are few, so that few kernels are used.
CHUNKS = (PREFILL_STEP, 256, 64, 16)
# Seconds that the first round of sequences is deferred for other prompts, at most. A second is the longest
# wait that does not interrupt a user's thought (Nielsen, Usability Engineering, 1993).
MAX_DEFERRAL_S = 1.0

Clock = Callable[[], float]


class PromptPace:
    """Chooses how much of a prompt to read between two rounds.

    A pause is the time between the ends of two rounds. Steps of prompts take a part of it. The round, joining
    sequences and the caller take the rest. The last pauses predict the next ones. The errors of these
    predictions say how much shorter than the bound to plan (conformal prediction).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._planned = 0.8  # share of MAX_PAUSE_S that rounds and steps may take, because times vary
        # Seconds of the last steps, by the size of the chunk. Layers differ: in 12 steps are two of full
        # attention if each sixth layer has it.
        self._steps: dict[int, deque[float]] = {size: deque(maxlen=12) for size in CHUNKS}
        self._last_pass: tuple[int, float] | None = None  # rows and seconds
        self._rests: deque[float] = deque(maxlen=4)  # seconds of pauses without steps; not all rounds draft
        self._errors: deque[float] = deque(maxlen=300)  # seconds of a pause over the expected ones
        self.reading = 0.0  # seconds of steps since the last round
        self._expected = 0.0  # expected seconds of these steps; infinite if they cannot be predicted
        self._last_round: float | None = None  # time of its end; None if no sequence decodes
        self._deferred_since: float | None = None  # None unless sequences could decode and are deferred

    def chunk(self) -> int:
        """Return how many tokens the next chunk has: the most of which a step takes half of MAX_PAUSE_S.

        It depends on the device and not on the load. A size that is not known is tried.
        """
        fitting = (size for size in CHUNKS if self.step_seconds(size) <= MAX_PAUSE_S / 2)
        return next(fitting, CHUNKS[-1])

    def step_seconds(self, rows: int) -> float:
        """Return how long a step of a pass of that many rows takes; 0 if no such step is known.

        Of the last steps the second longest counts, because one may have been delayed. The time of a pass
        grows at most as its rows do, so smaller chunks give a bound, too. If only larger ones are known, the
        time is guessed by their rows.
        """
        size = _size_of(rows)
        known = {other: sorted(steps)[-2] for other, steps in self._steps.items() if len(steps) > 1}
        chosen = [other for other in known if (other <= size) == (size in known)]
        return min((known[other] * rows / other for other in chosen), default=0.0)

    def shared_rows(self) -> int:
        """Return how many rows a pass may have that is not read in steps.

        It takes as long as the fastest round, and the time of its rows in the last pass.
        """
        if self._last_pass is None:
            return 0
        rows, seconds = self._last_pass
        left_s = self.seconds() - min(self._rests, default=math.inf)
        return int(max(left_s, 0.0) * rows / seconds)

    def seconds(self) -> float:
        """Return how long to read next: the time left of a pause, which may be negative.

        If the fastest round takes all of it, all pauses are too long. Then steps may take as long as that
        round: less would keep one client waiting and gain the others little. A slow round alone does not
        allow that.
        """
        if (fastest_round_s := min(self._rests, default=0.0)) >= MAX_PAUSE_S * self._planned:
            return fastest_round_s
        late = 3  # Of the 300 pauses that are remembered, 1 % may be longer than planned.
        worst = nlargest(late, self._errors)
        p99_error = worst[-1] if len(worst) == late else 1.0
        return MAX_PAUSE_S * min(self._planned, 1 / p99_error) - max(self._rests, default=MAX_PAUSE_S)

    def defers_decoding(self, unread: int) -> bool:
        """Return True if sequences that could decode should be deferred until `unread` tokens are read.

        Shared passes cost less, and prompts are read faster while no sequence decodes.
        """
        if self._last_round is not None or self._last_pass is None:  # one decodes, or no speed is known
            return False
        now = self._clock()
        if self._deferred_since is None:
            self._deferred_since = now
        rows, seconds = self._last_pass
        return now - self._deferred_since + unread * seconds / rows <= MAX_DEFERRAL_S

    def read(self, step: PrefillStep, seconds: float, steps: int) -> None:
        """Learn from a step of a prefill, whose passes have `steps` steps; one step may be a whole pass."""
        self.reading += seconds
        if not step.rows:
            self._expected = math.inf
            return
        pass_s = max(seconds, 1e-6) / step.share
        expected_s = self.step_seconds(step.rows) * steps * step.share
        self._expected += expected_s or math.inf
        size = _size_of(step.rows)
        self._steps[size].append(pass_s / steps * min(1.0, size / step.rows))
        self._last_pass = step.rows, pass_s

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


def _size_of(rows: int) -> int:
    """Return the largest chunk of at most that many rows, or the smallest chunk."""
    return next((size for size in CHUNKS if size <= rows), CHUNKS[-1])
