"""Medusa (arXiv:2401.10774): K heads on the hidden state that the target's LM head reads.

Head k looks at the position before the pending token and guesses the k-th token after it. The heads do not
see each other's guesses, so a second guess for a place is nearly free to draft. `Medusa` drafts a chain, the
likeliest token of each head. `MedusaTrees` beside it drafts trees; the policy weighs both by measured costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import (
    CONFIG,
    POST_NORM,
    PRE_NORM,
    Conventions,
    Count,
    check_target,
    load_weights,
    required,
)
from mlx_spec.drafters.drafter import DrafterSource
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.tree import Tree, TreeTemplate, tree_of, tree_template
from mlx_spec.sampling import likeliest
from mlx_spec.types import (
    MAX_DRAFT_TOKENS,
    Draft,
    Drafter,
    Features,
    FeatureSpec,
    Sampler,
    TargetParts,
    no_draft,
)


class MedusaNetwork(nn.Module):
    """All heads. Their residual blocks have biases if `biased`."""

    def __init__(self, heads: int, blocks: int, hidden_size: int, vocab_size: int, *, biased: bool) -> None:
        super().__init__()
        self.heads = [_Head(blocks, hidden_size, vocab_size, biased) for _ in range(heads)]

    def __call__(self, hidden: mx.array, limit: int) -> mx.array:
        """Return logits [K, V] of the first `limit` heads for a hidden state [1, D]."""
        return mx.concatenate([head(hidden) for head in self.heads[:limit]])

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: Config, target_config: Config) -> DrafterSource:
        conventions = Conventions.from_config(config)
        # Without the hidden states of a prompt, which take memory, only the first token has no draft.
        known = {
            POST_NORM: FeatureSpec(final_hidden=True, prompt_hidden=False),
            PRE_NORM: FeatureSpec(hidden_layers=(-1,), prompt_hidden=False),
        }
        if conventions.hidden not in known:
            raise BadCheckpoint(
                f"{CONFIG} records hidden {conventions.hidden!r}, Medusa heads read {', '.join(known)}"
            )
        check_target(config, target_config)
        heads, blocks = (required(config, key, Count, CONFIG) for key in ("num_heads", "num_layers"))
        target, biased = config["target"], "heads.0.layers.0.bias" in checkpoint.headers.tensors
        network = cls(heads, blocks, target["hidden_size"], target["vocab_size"], biased=biased)
        load_weights(network, checkpoint)
        needs, rates = known[conventions.hidden], GuessRates(heads)

        def made(drafter_class: type[Medusa]) -> Callable[[TargetParts], Medusa]:
            return lambda parts: drafter_class(network, needs, rates)

        chains, trees = made(Medusa), made(MedusaTrees)
        other = DrafterSource("medusa trees", needs, trees, network, rates.tree_reach, drafts_trees=True)
        return DrafterSource("medusa", needs, chains, network, rates.chain_reach, trees=other)


class _Head(nn.Module):
    """Residual blocks and an LM head."""

    def __init__(self, blocks: int, size: int, vocab_size: int, biased: bool) -> None:
        super().__init__()
        self.layers = [nn.Linear(size, size, bias=biased) for _ in range(blocks)]
        self.lm_head = nn.Linear(size, vocab_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        for layer in self.layers:
            hidden = hidden + nn.silu(layer(hidden))
        return self.lm_head(hidden)


class GuessRates:
    """The measured acceptance of guesses: first guesses by depth, others by rank.

    Shared by all sequences of a pair. A guess of rank r counts only if all likelier guesses were rejected.
    """

    def __init__(self, heads: int) -> None:
        # Accepted and judged guesses. The prior is an acceptance of 0.6 for the first guess, and of 0.35 for
        # a further one if the guesses before it fail. It weighs as much as 6 drafts.
        self._first = [[6 * 0.6, 6.0] for _ in range(heads)]
        # A row gets 3 further guesses. Less likely ones are accepted too rarely to be worth a row.
        self._other = [[6 * 0.35, 6.0] for _ in range(3)]
        self._judged = 0  # drafts
        self._template: TreeTemplate | None = None

    def observe(self, tree: Tree, drafted: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn from a draft and the tokens that were emitted after its history."""
        row = 0
        for depth, token in enumerate(tokens):
            if not (guesses := [j for j, parent in enumerate(tree.parents) if parent == row]):
                break
            accepted_rank = next((r for r, j in enumerate(guesses) if drafted[j] == token), None)
            for rank in range(len(guesses) if accepted_rank is None else accepted_rank + 1):
                counts = self._first[depth] if rank == 0 else self._other[rank - 1]
                memory = 0.995  # The last 200 drafts count.
                counts[0] = memory * counts[0] + (rank == accepted_rank)
                counts[1] = memory * counts[1] + 1
            if accepted_rank is None:
                break
            row = guesses[accepted_rank] + 1
        self._judged += 1
        # The shape of the tree changes every 16 drafts: building one takes as long as a decision.
        if self._judged % 16 == 0:
            self._template = None

    def template(self) -> TreeTemplate:
        """Return the nodes that are likeliest to be accepted, MAX_DRAFT_TOKENS of them."""
        if self._template is None:
            others = [accepted / judged for accepted, judged in self._other]
            rates = []
            for accepted, judged in self._first:
                row = [accepted / judged]
                for other in others:
                    row.append(other * (1 - sum(row)))
                rates.append(row)
            self._template = tree_template(MAX_DRAFT_TOKENS, rates)
        return self._template

    def tree_reach(self) -> Sequence[float]:
        """Return the expected accepted tokens that each further draft token of a tree adds."""
        return self.template().reach

    def chain_reach(self) -> Sequence[float]:
        """Return the expected accepted tokens that each further draft token of a chain adds."""
        return [*accumulate((accepted / judged for accepted, judged in self._first), mul)]


class Medusa(Drafter):
    """Drafts chains for one sequence. Keeps the newest hidden state of the target and its last draft."""

    def __init__(self, network: MedusaNetwork, needs: FeatureSpec, rates: GuessRates) -> None:
        self.needs = needs
        self._network = network
        self._rates = rates
        self._hidden: mx.array | None = None  # [1, D], of the position before the pending token
        self._length = 0  # of the history that it belongs to
        self._last: tuple[int, Draft] | None = None  # the last draft, and the history it was made for

    def observe(self, history: Sequence[int], features: Features) -> None:
        if self._last is not None:
            length, draft = self._last
            parents = draft.parents or tuple(range(draft.tokens.size))
            drafted: list[int] = draft.tokens.tolist()  # type: ignore[assignment]  # computed already
            self._rates.observe(tree_of(parents), drafted, history[length:])
            self._last = None
        hidden = features.hidden[0] if features.hidden else features.final_hidden
        self._hidden = None if hidden is None else hidden[-1:]
        self._length = len(history)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return the likeliest tokens of the heads; none if the hidden state belongs to another history."""
        if limit < 1 or self._hidden is None or self._length != len(history):
            return no_draft()
        draft = self._guess(self._hidden, limit)
        self._last = len(history), draft
        return draft

    def _guess(self, hidden: mx.array, limit: int) -> Draft:
        return Draft(self._network(hidden, limit).argmax(axis=-1).astype(mx.int32))


class MedusaTrees(Medusa):
    """Drafts the tree of `limit` tokens that is likeliest to be accepted."""

    def _guess(self, hidden: mx.array, limit: int) -> Draft:
        tree = self._rates.template().tree(limit)
        ranked = likeliest(self._network(hidden, tree.height), max(tree.ranks) + 1)
        depths, ranks = mx.array(tree.depths[1:]), mx.array(tree.ranks[1:])
        return Draft(ranked[depths - 1, ranks], parents=tree.parents)
