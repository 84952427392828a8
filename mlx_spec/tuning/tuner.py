"""What all sequences of a pair share: measured costs, what drafters were seen to be worth, the saved profile.

Costs are measured on a live sequence, in the first rounds of an answer, once for every range of context
lengths; the next process finds them in its cache folder.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from mlx_spec.tuning import profile
from mlx_spec.tuning.acceptance import Experience
from mlx_spec.tuning.calibrate import Points, drafts, measure
from mlx_spec.tuning.costs import BadTable, Costs, Table, bucket
from mlx_spec.tuning.policy import Adaptive
from mlx_spec.types import (
    Choice,
    Decision,
    Drafter,
    DraftLengthPolicy,
    FeatureSpec,
    Reason,
    Round,
    Target,
)

BUDGET = 1.0  # seconds of measuring, at each of few contexts, once
YOUNG = 2  # rounds of an answer in which to measure: a pause is for its beginning
LEAST = 1e-7  # seconds; what cannot be seen to take time

_log = logging.getLogger("mlx_spec")


class Tuner:
    """Makes the adaptive policies of a pair. `names` are its drafters, in their order.

    Those in `copying` copy text, as lookup does: no time worth a mention, and a draft only now and then.
    """

    def __init__(
        self, names: Sequence[str], key: profile.Key, folder: Path, copying: Collection[str] = ()
    ) -> None:
        self.names = tuple(names)
        self.copying = frozenset(copying)
        self.key = key
        self._folder = folder
        self._experience = [Experience() for _ in names]
        self._measured: set[int] = set()  # buckets of context
        self.costs = self._saved()

    @property
    def file(self) -> Path:
        """Where costs are kept."""
        return self._folder / profile.file_name(self.key)

    def make(self, target: Target, drafters: Sequence[Drafter]) -> DraftLengthPolicy:
        """The policy of a new sequence."""
        return _Measuring(self, target, drafters)

    def adaptive(self, clock: Callable[[], float] = time.perf_counter) -> Adaptive:
        """A policy that learns with the others and does not measure."""
        free = {i for i, name in enumerate(self.names) if name in self.copying}
        return Adaptive(self.costs, len(self.names), clock, self._experience, free)

    def knows(self, context: int) -> bool:
        """Whether costs were measured about this context length, or cannot be."""
        return bucket(context) in self._measured

    def give_up(self, context: int) -> None:
        """Rely on what rounds take, where drafting could not be measured."""
        self._measured.add(bucket(context))

    def forget(self) -> None:
        """Measure anew."""
        self._measured.clear()

    def measure(self, target: Target, drafters: Sequence[Drafter], history: Sequence[int]) -> None:
        """Measure at this context length, and keep that for the processes that follow."""
        points = measure(target, drafters, history, BUDGET)
        self.costs.measured(len(history), _table(points, len(drafters)))
        self._measured.add(bucket(len(history)))
        profile.save(self.key, self.costs.table(), self._folder)

    def adopt(self, table: profile.Profile) -> None:
        """Use costs from elsewhere, and keep them. Raises BadTable."""
        self.costs = Costs.from_table(table.table, self.names)
        self._know(table.table)
        profile.save(self.key, self.costs.table(), self._folder, measured=table.measured)

    def _saved(self) -> Costs:
        found = profile.load(self.key, self._folder)
        if found is None:
            return Costs(self.names)
        try:
            costs = Costs.from_table(found, self.names)
        except BadTable as error:
            _log.warning("saved costs are not used and will be replaced: %s", error)
            return Costs(self.names)
        self._know(found)
        return costs

    def _know(self, table: dict[str, object]) -> None:
        self._measured = {bucket(int(context)) for context in table}


class _Measuring:
    """An adaptive policy that has costs measured first, where nobody did."""

    def __init__(self, tuner: Tuner, target: Target, drafters: Sequence[Drafter]) -> None:
        self._tuner, self._target, self._drafters = tuner, target, drafters
        self._policy = tuner.adaptive()
        self._age = 0  # rounds of this answer
        self._waits = False

    def begin(self) -> None:
        """A new answer begins."""
        self._age = 0
        self._policy.begin()

    def decide(self, history: Sequence[int]) -> Decision:
        """What the adaptive policy says; before that, one token at a time until drafting can be measured."""
        self._age += 1
        self._waits = self._missing(history) and not self._measure(history)
        if self._waits:
            return Decision((Choice(0, 1),), Reason.LEARNING)
        return self._policy.decide(history)

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        """As the adaptive policy has it."""
        return self._policy.cut(drafter, confidence)

    def observe(self, round: Round) -> None:
        """Let the adaptive policy learn from rounds that it decided on."""
        if not self._waits:
            self._policy.observe(round)

    def _missing(self, history: Sequence[int]) -> bool:
        return self._age <= YOUNG and not self._tuner.knows(len(history)) and not self._target.uncommitted

    def _measure(self, history: Sequence[int]) -> bool:
        """Says whether that is done with: False while a drafter waits for its first activations."""
        if all(self._ready(drafter, history) for drafter in self._drafters):
            self._tuner.measure(self._target, self._drafters, history)
            return True
        if self._age == YOUNG:
            self._tuner.give_up(len(history))
        return self._age == YOUNG

    def _ready(self, drafter: Drafter, history: Sequence[int]) -> bool:
        """One that reads nothing of the target, such as lookup, may have no draft for other reasons."""
        return drafter.needs == FeatureSpec() or drafts(drafter, history)


def _table(points: Points, drafters: int) -> Table:
    verify = {rows: max(seconds, LEAST) for rows, seconds in points.verify.items()}
    draft = [{K: max(s, LEAST) for K, s in points.draft[i].items()} for i in range(drafters)]
    return Table(max(points.plain, LEAST), verify, tuple(draft), points.host)
