"""A smaller language model with the target's vocabulary (arXiv:2211.17192, arXiv:2302.01318), and PARD."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.config import Checkpoint, vocab_size
from mlx_spec.checkpoint.files import AGAIN
from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import CONFIG, Conventions, mask_token, required
from mlx_spec.drafters.drafter import DraftBuilder, DrafterSource, draw_rows
from mlx_spec.errors import BadCheckpoint
from mlx_spec.grammar import read_tokens
from mlx_spec.model.read import read_model
from mlx_spec.model.target import LMTarget
from mlx_spec.tokenizer import common_prefix
from mlx_spec.types import (
    CacheState,
    Copy,
    Draft,
    Drafter,
    DraftingSampler,
    Features,
    FeatureSpec,
    Sampler,
    no_draft,
)

MAX_UNWRITTEN = 128  # tokens; `observe` writes more than these at once, so that no draft waits for them


@dataclass(frozen=True)
class VocabularySizes:
    """The sizes of two vocabularies that differ by padding rows."""

    drafter: int
    target: int

    @classmethod
    def of(cls, config: Config, target_config: Config) -> VocabularySizes:
        """Read both sizes. Raises BadCheckpoint if a config does not say it."""
        return cls(vocab_size_of(config, "drafter"), vocab_size_of(target_config, "target"))

    def known(self, tokens: Sequence[int]) -> list[int]:
        """Return `tokens` with those beyond the drafter's table replaced by its last one."""
        return list(tokens) if self.drafter >= self.target else [min(t, self.drafter - 1) for t in tokens]

    def fit(self, logits: mx.array) -> mx.array:
        """Cut or pad logits [T, drafter] to [T, target]; padding is -inf."""
        if self.drafter >= self.target:
            return logits[:, : self.target]
        unknown = mx.full((logits.shape[0], self.target - self.drafter), -mx.inf, dtype=logits.dtype)
        return mx.concatenate([logits, unknown], axis=-1)


# The tokens that a verification adds to a history: accepted draft tokens, and the one after them.
Outcome = tuple[int, ...]
Branches = Mapping[Outcome, Draft]  # the draft that follows each outcome


@dataclass(eq=False)
class BranchCall:
    """Drafts that are wanted after the likely outcomes of a draft that is being verified."""

    history: list[int]
    draft: Draft  # the draft that is verified after `history`
    limit: int  # of each draft
    guesses: Sequence[int]  # [K + 1] how many next tokens to guess, by the number of accepted tokens
    sampler: DraftingSampler  # has counted no tokens
    branches: Future[Branches] = field(default_factory=Future)  # cancelled once no draft waits for it

    @property
    def is_cancelled(self) -> bool:
        """Return True if no draft waits for these drafts."""
        return self.branches.cancelled()

    @cached_property
    def drafted(self) -> list[int]:
        """Return the tokens of the draft. Waits for the drafter."""
        return read_tokens(self.draft.tokens)

    def outcomes(self, logits: mx.array) -> list[Outcome]:
        """Return the likely outcomes by the drafter's logits [K + 1, V] after each prefix of its draft.

        Only the logits choose them, never tokens that are drawn for them. So the distribution of a draft does
        not depend on the choice of outcomes. Waits for the logits.
        """
        count = min(max(self.guesses) + 1, logits.shape[1])
        ranked = self.sampler.rank(logits, self.history, self.draft.tokens, count)
        tokens, outcomes = iter(read_tokens(ranked.flatten())), list[Outcome]()
        for k, guesses in enumerate(self.guesses):
            # Without the next draft token, which would count as accepted.
            others = [t for t in islice(tokens, count) if [t] != self.drafted[k : k + 1]]
            outcomes += [(*self.drafted[:k], token) for token in others[:guesses]]
        return outcomes

    def outcome(self, history: Sequence[int]) -> Outcome | None:
        """Return the outcome that led to `history`, after verification; None if it is another text."""
        start = len(self.history)
        outcome = tuple(history[start:])
        accepted = list(outcome[:-1])
        follows = outcome and accepted == self.drafted[: len(accepted)]
        return outcome if follows and history[:start] == self.history else None


class DraftModel(Drafter):
    """Drafts one sequence with its own model and caches."""

    needs = FeatureSpec()

    def __init__(self, model: nn.Module, vocabulary: VocabularySizes) -> None:
        self._model = LMTarget(model)
        self._vocabulary = vocabulary
        self._written: list[int] = []  # tokens whose rows are in the caches, committed or not
        self._uncommitted = 0  # how many of them are not committed
        self._num_guesses = 0  # uncommitted rows of draft tokens after `_written`

    @property
    def nbytes(self) -> int:
        return self._model.nbytes

    def state(self) -> CacheState:
        """Return the committed rows; drop the others."""
        self._settle(self._written, len(self._written) - self._uncommitted)
        written = CacheState(numbers={"tokens": self._written})
        return CacheState.join({"model": self._model.state(), "written": written})

    def restore(self, state: CacheState) -> None:
        self._model.restore(state.part("model"))
        self._written = list(state.part("written").numbers["tokens"])

    def follow(self, origin: Drafter) -> list[Copy]:
        assert isinstance(origin, DraftModel)
        return self._model.follow(origin._model)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Keep the rows of accepted draft tokens, if `history` grew by those and one more token."""
        grown = len(history) - len(self._written)
        if self._uncommitted and 1 <= grown <= self._num_guesses + 2:
            self._settle(history, len(self._written) + min(grown - 1, self._num_guesses))
        elif grown > MAX_UNWRITTEN or grown < 0:
            self.write(history)

    def write(self, history: Sequence[int]) -> None:
        """Write all of `history` but its last, pending token."""
        self._prefill(history, len(history) - 1 - self._align(history))

    def keep_draft(self, tokens: Sequence[int]) -> None:
        """Note the tokens of the last draft. The next draft keeps their rows as far as its history has them.

        Without this call, `observe` assumes that the next history accepted them.
        """
        self._written += tokens[: self._num_guesses]
        self._uncommitted += self._num_guesses
        self._num_guesses = 0

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        if limit < 1:
            return no_draft()
        rows = self._unwritten(history)
        logits = self._model.verify(rows)[-1:]
        builder = DraftBuilder(history, sampler)
        for step in range(limit):
            token = builder.draw(self._vocabulary.fit(logits))
            if step + 1 < limit:
                logits = self._model.verify(token)
        self._written += history[len(self._written) :]
        self._uncommitted, self._num_guesses = rows.size, limit - 1
        return builder.draft()

    @property
    def can_branch(self) -> bool:
        return self._model.tree_obstacle is None

    def draft_branches(self, call: BranchCall) -> Branches:
        """Return drafts after several outcomes of a draft, as branches of a tree; none if cancelled."""
        self.write(call.history)
        chain = [call.history[-1], *call.drafted]
        outcomes = call.outcomes(self._write_tree(self._rows(chain), range(len(call.drafted))))
        branches = {} if call.is_cancelled else self._branches(call, outcomes)
        self._model.commit(len(chain))
        self._written = [*call.history, *call.drafted]
        return branches

    def _branches(self, call: BranchCall, outcomes: Sequence[Outcome]) -> Branches:
        """Draft after each outcome, one token of all of them in a pass. None if cancelled."""
        builders = [DraftBuilder(call.history, call.sampler, outcome) for outcome in outcomes]
        parents = [*range(len(call.drafted)), *(len(outcome) - 1 for outcome in outcomes)]
        tokens = self._rows([outcome[-1] for outcome in outcomes])
        for _ in range(call.limit):
            logits = self._write_tree(tokens, parents)
            drawn = [b.draw(logits[i : i + 1], begin=False) for i, b in enumerate(builders)]
            tokens = mx.concatenate(drawn)
            mx.eval(tokens)  # of all branches at once
            if call.is_cancelled:
                return {}
            parents += range(len(parents) + 1 - len(outcomes), len(parents) + 1)
        return {outcome: builder.draft() for outcome, builder in zip(outcomes, builders, strict=True)}

    def _write_tree(self, rows: mx.array, parents: Sequence[int]) -> mx.array:
        """Write the next rows of a tree with all these parents. Return their logits."""
        return self._vocabulary.fit(self._model.verify_tree(rows, tuple(parents)))

    def _rows(self, tokens: Sequence[int]) -> mx.array:
        return mx.array(self._vocabulary.known(tokens), dtype=mx.int32)

    def _unwritten(self, history: Sequence[int]) -> mx.array:
        """Return the tokens [T] that the next pass writes: at most a few, the pending one last."""
        # A draft writes at most 8 tokens of the history uncommitted, the pending one included.
        if (missing := len(history) - self._align(history)) > 8:
            self._prefill(history, missing - 1)
        return self._rows(history[len(self._written) :])

    def _align(self, history: Sequence[int]) -> int:
        """Keep the rows of the longest common prefix, without the pending token. Return their number."""
        keep = min(common_prefix(self._written, history), len(history) - 1)
        self._settle(history, keep)
        return len(self._written)

    def _settle(self, history: Sequence[int], keep: int) -> None:
        """Commit or drop the uncommitted rows, and keep at most the rows of `history[:keep]`."""
        committed = len(self._written) - self._uncommitted
        del self._written[committed:]  # first, because an interrupted draft leaves useless rows
        self._uncommitted = self._num_guesses = 0
        self._model.commit(max(keep - committed, 0))
        kept = self._model.rewind(keep)
        del self._written[kept:]
        self._written += history[len(self._written) : kept]

    def _prefill(self, history: Sequence[int], count: int) -> None:
        end = len(self._written) + count
        step = 512  # tokens of a prompt in one pass, which bounds the memory of its activations
        while len(self._written) < end:
            chunk = history[len(self._written) : min(len(self._written) + step, end)]
            self._model.prefill(self._vocabulary.known(chunk))
            self._written += chunk

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: Config, target_config: Config) -> DrafterSource:
        """Load a model that mlx-lm knows. Raises BadCheckpoint, NotRewindable for unknown caches."""
        vocabulary = VocabularySizes.of(config, target_config)
        return draft_model_source(config["model_type"], load_language_model(checkpoint), vocabulary)


class Pard(DraftModel):
    """A model that drafts K tokens in one pass over mask tokens (PARD, arXiv:2504.18583).

    Its caches hold tokens of the history and never a mask.
    """

    def __init__(self, model: nn.Module, vocabulary: VocabularySizes, mask_token: int) -> None:
        super().__init__(model, vocabulary)
        self._mask = mx.array([mask_token], dtype=mx.int32)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return `limit` tokens. The masks' rows are dropped: drafted tokens are written when accepted."""
        if limit < 1:
            return no_draft()
        rows = self._unwritten(history)
        logits = self._model.verify(mx.concatenate([rows, *[self._mask] * (limit - 1)]))[-limit:]
        self._model.commit(rows.size)
        self._written += history[len(self._written) :]
        return draw_rows(self._vocabulary.fit(logits), history, sampler)

    def _branches(self, call: BranchCall, outcomes: Sequence[Outcome]) -> Branches:
        """Draft after each outcome, all of them in one pass."""
        rows, parents = list[mx.array](), list(range(len(call.drafted)))
        for outcome in outcomes:
            rows += [self._rows(outcome[-1:]), *[self._mask] * (call.limit - 1)]
            parents += [len(outcome) - 1, *range(len(parents) + 1, len(parents) + call.limit)]
        logits = mx.split(self._write_tree(mx.concatenate(rows), parents), len(outcomes))
        return {
            outcome: draw_rows(its_logits, call.history, call.sampler, outcome)
            for outcome, its_logits in zip(outcomes, logits, strict=True)
        }

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: Config, target_config: Config) -> DrafterSource:
        Conventions.from_config(config)  # refuses a drafter that was not converted
        layers = required(config, "layer_config", dict, CONFIG)
        vocabulary = VocabularySizes.of(layers, target_config)
        model, mask = load_language_model(checkpoint, layers), mask_token(config, vocabulary.drafter)
        return draft_model_source("pard", model, vocabulary, partial(cls, mask_token=mask))


def draft_model_source(
    name: str,
    model: nn.Module,
    vocabulary: VocabularySizes,
    make: Callable[[nn.Module, VocabularySizes], DraftModel] = DraftModel,
) -> DrafterSource:
    """Return the source of drafters with `model`, each made by `make`."""
    remake = partial(draft_model_source, name, vocabulary=vocabulary, make=make)
    return DrafterSource(name, DraftModel.needs, lambda _: make(model, vocabulary), model, remake=remake)


def load_language_model(checkpoint: Checkpoint, config: dict[str, Any] | None = None) -> nn.Module:
    """Load a model; `config` overrides its config.json, which is repaired if it is None.

    Raises BadCheckpoint and NotRewindable.
    """
    checkpoint.check_weights()
    if config is None:
        checkpoint.check_model_type()
    model, _ = read_model(checkpoint, config=config)
    LMTarget(model)  # refuses unknown caches now and not in the middle of a sequence
    return model


def vocab_size_of(config: Config, role: str) -> int:
    """Return the size of a model's vocabulary. Raises BadCheckpoint if its config does not say it."""
    size = vocab_size(config)
    if size is None:
        raise BadCheckpoint(f"config.json of the {role} has no 'vocab_size': {AGAIN}")
    return size
