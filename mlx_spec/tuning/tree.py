"""A tree of draft tokens or a chain: a tree where its side branches bring more than its rows take.

Both are judged by the same measured costs and by how often each guess for a place was right. A tree is chosen
where the policy below wants a chain and its pass takes little longer: where width is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mlx_spec.tree import Tree, grown
from mlx_spec.tuning.costs import Costs
from mlx_spec.types import MAX_DRAFT_TOKENS, Choice, Decision, DraftLengthPolicy, Reason, Round, Target

KEEP = 0.995  # of what was seen, a round
RANKS = 4  # guesses for one place
FIRST, SIDE = 0.6, 0.35  # a first guess is right; another one, where those before it are wrong: until seen
STRENGTH = 6.0  # rounds that these are worth; what is not seen for long is hoped for again
GAIN = 1.03  # of a chain's tokens a second: what a tree must promise
LOOK = 16  # rounds after which the tree is chosen anew


class Guesses:
    """How often guesses are right. Shared by all sequences of a pair."""

    def __init__(self) -> None:
        self._right = [[0.0] * MAX_DRAFT_TOKENS, [0.0] * RANKS]  # first guesses by depth; all by rank
        self._judged = [[0.0] * MAX_DRAFT_TOKENS, [0.0] * RANKS]

    def saw(self, ranks: Sequence[int], widths: Sequence[int], *, ended: bool) -> None:
        """A draft was judged, of which guesses with these ranks were accepted.

        `widths` are the guesses for the places of the accepted tokens and for the one behind, 0 at a leaf:
        those were all wrong, unless the text ended before it.
        """
        for counts in (*self._right, *self._judged):
            counts[:] = [KEEP * count for count in counts]
        for depth, rank in enumerate(ranks):
            for guess in range(rank + 1):
                self._count(depth, guess, right=guess == rank)
        if not ended:
            for guess in range(widths[len(ranks)]):
                self._count(len(ranks), guess, right=False)

    def rates(self, height: int) -> list[list[float]]:
        """By depth and rank: how often the guess is right behind a path that is."""
        sides = [self._rate(1, rank, SIDE) for rank in range(1, RANKS)]
        rates = []
        for depth in range(height):
            row = [self._rate(0, depth, FIRST)]
            for side in sides:
                row.append(side * (1 - sum(row)))
            rates.append(row)
        return rates

    def _count(self, depth: int, rank: int, *, right: bool) -> None:
        table, place = (1, rank) if rank else (0, depth)
        self._right[table][place] += right
        self._judged[table][place] += 1

    def _rate(self, table: int, place: int, prior: float) -> float:
        right, judged = self._right[table][place], self._judged[table][place]
        return (right + STRENGTH * prior) / (judged + STRENGTH)


class Branching:
    """A policy that has a tree drafted where another one wants a chain and the tree is worth more.

    The other policy hears of a tree as of the chain that is its first branch, but for the rows that it took.
    `drafter` is the index of the one that drafts both, and `height` the longest path that it can draft.
    """

    def __init__(
        self,
        policy: DraftLengthPolicy,
        target: Target,
        costs: Callable[[], Costs],
        guesses: Guesses,
        drafter: int,
        height: int,
    ) -> None:
        self._policy, self._target, self._costs, self._guesses = policy, target, costs, guesses
        self._drafter, self._height = drafter, height
        self._tree: Tree | None = None  # asked for in the round decided on last
        self._best: tuple[Choice, Tree | None] = (Choice(drafter, 0), None)  # a chain, and what is better
        self._age = LOOK

    def begin(self) -> None:
        """As the other policy has it."""
        self._age = LOOK
        self._policy.begin()

    def decide(self, history: Sequence[int]) -> Decision:
        """What the other policy says, or a tree in place of the chain that comes first there."""
        decision, self._tree = self._policy.decide(history), None
        pays = decision.reason is Reason.PAYS and not self._target.uncommitted
        first = decision.choices[0] if pays and decision.choices else None
        if first is None or first.drafter != self._drafter:
            return decision
        if self._age >= LOOK or self._best[0] != first:
            self._best, self._age = (first, self.better(first, len(history))), 0
        self._tree = self._best[1]
        if self._tree is None:
            return decision
        return replace(decision, choices=(Choice(self._drafter, len(self._tree.parents)),))

    def tree(self) -> Tree | None:
        """The tree that is to be drafted in the round decided on last; None: a chain."""
        return self._tree

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        """As the other policy has it: trees are not cut."""
        return self._policy.cut(drafter, confidence)

    def observe(self, round: Round) -> None:
        """Learn how good the guesses are, and let the other policy learn."""
        self._age += 1
        tree, ended = self._tree, len(round.tokens) == round.accepted
        if round.drafter != self._drafter or not round.drafted:
            self._policy.observe(round)
        elif tree is None or not round.nodes:
            self._guesses.saw([0] * round.accepted, [1] * round.drafted + [0], ended=ended)
            # Where there was no room for the tree: its confidence was not read, whatever was decided.
            self._policy.observe(round if tree is None else replace(round, nodes=round.drafted))
        else:
            self._guesses.saw(round.ranks, tree.widths(round.ranks), ended=ended)
            self._policy.observe(self._as_chain(round, len(tree.segments[0]) - 1))

    def better(self, chain: Choice, context: int) -> Tree | None:
        """The tree that brings the most tokens a second, if those are clearly more than a chain brings.

        A chain that confidence is to cut is taken for one that is always cut just behind its last right
        token: it cannot be better than that.
        """
        costs, rates = self._costs(), self._guesses.rates(self._height)
        if costs.guessed(context):
            return None
        firsts = tree_template(min(chain.limit, self._height), [row[:1] for row in rates])
        cut = self._cut if chain.selective else self._rate
        wide = tree_template(MAX_DRAFT_TOKENS, rates)
        best, most = None, GAIN * cut(firsts.tree(chain.limit), firsts.reach, context)
        for nodes in range(2, len(wide.paths) + 1):
            tree = wide.tree(nodes)
            rate = self._rate(tree, wide.reach[:nodes], context)
            if rate > most and max(tree.ranks):
                best, most = tree, rate
        return best

    def _rate(self, tree: Tree, reach: Sequence[float], context: int) -> float:
        """Tokens a second; 0 where that is not known."""
        seconds = self._costs().round(self._drafter, tree.height, len(tree.parents), context)
        return (1 + sum(reach)) / seconds if seconds else 0.0

    def _cut(self, tree: Tree, reach: Sequence[float], context: int) -> float:
        """Tokens a second of a chain of which no token is verified that is rejected; 0: not known."""
        at_least, rounds = [1.0, *reach, 0.0], range(tree.height + 1)
        seconds = [self._costs().round(self._drafter, tree.height, right, context) for right in rounds]
        expected = sum((at_least[i] - at_least[i + 1]) * (s or 0.0) for i, s in enumerate(seconds))
        return (1 + sum(reach)) / expected if expected else 0.0

    def _as_chain(self, round: Round, length: int) -> Round:
        """What a chain of `length` tokens would have shown, in the time of the tree."""
        firsts = next((i for i, rank in enumerate(round.ranks) if rank), len(round.ranks))
        return replace(round, proposed=self._best[0].limit, drafted=length, accepted=min(firsts, length))
