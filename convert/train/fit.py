"""Fit the weights of a drafter to recorded answers, in a run that can be interrupted at any time.

A chain of drafts is unrolled as in drafting: every step reads the output of the step before. A row is one
position of an answer at which a round could begin. Its first step reads the target's hidden state there and
the token after it. All steps attend to the K/V up to that position, and run at the position of the pending
token, as in `drafters/gemma4.py`. So all rows of a batch take a step in one pass.

In the experiments of FastMTP (arXiv:2509.18362) and others, unrolling raised the accepted length by a fifth.
Distributions taught more than drawn tokens. The loss is in `loss.py`.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlx_spec.drafters.gemma4 import AssistantNetwork
from mlx_spec.types import SLIDING, KVRows, TargetParts

from .answers import RecordedAnswer, damaged, read_answer, read_arrays, write_arrays
from .loss import Step, TokenSample, loss_of, round_tokens, sample_tokens

DEPTH = 4  # draft tokens in a chain: few later ones are accepted
# Rows of a training step, padding included. Larger steps need fewer products in Muon; smaller ones learn
# faster.
STEP_ROWS = 512
STATE = "state.safetensors"

Embed = Callable[[mx.array], mx.array]


# --- the chain


@dataclass(frozen=True)
class TrainingRows:
    """A batch of B answers, padded to A rows and S positions of K/V."""

    tokens: mx.array  # [B, A] int32: the pending token of each row
    hidden: mx.array  # [B, A, D]
    logsumexp: mx.array  # [B, A]
    shared: Mapping[str, KVRows]  # [B, H, S, Dk]; the mask [B, 1, A, S] is True for K/V that a row sees
    positions: mx.array  # [B * A]: of the pending tokens
    real: mx.array  # bool [B, A]: not padding


def batch_of(answers: Sequence[RecordedAnswer], window: int, dtype: mx.Dtype) -> TrainingRows:
    """Return the rows of several answers. In sliding layers a row sees the last `window` positions."""
    sizes = [answer.tokens.size for answer in answers]
    starts = [answer.prompt_tokens for answer in answers]
    ends = [start + size - 1 for start, size in zip(starts, sizes, strict=True)]
    A, S = max(sizes), max(ends)

    def pad(array: mx.array) -> mx.array:
        return mx.pad(array, [(0, A - len(array)), *[(0, 0)] * (array.ndim - 1)])

    def place(rows: mx.array, end: int) -> mx.array:
        """Pad rows [1, H, n, D] to S positions, so that the last row is just before position `end`."""
        return mx.pad(rows, [(0, 0), (0, 0), (end - rows.shape[2], S - end), (0, 0)])

    places = mx.array(starts)[:, None] + mx.arange(A)  # of the pending token of each row, [B, A]
    distance = places[..., None] - mx.arange(S)  # to each row of K/V
    masks = {SLIDING: (distance > 0) & (distance < window)}
    shared = {}
    for kind in answers[0].shared:
        mask = masks.get(kind, distance > 0)[:, None]
        both = [(answer.shared[kind], end) for answer, end in zip(answers, ends, strict=True)]
        keys = mx.concatenate([place(rows.keys, end) for rows, end in both])
        values = mx.concatenate([place(rows.values, end) for rows, end in both])
        shared[kind] = KVRows(keys.astype(dtype), values.astype(dtype), mask)
    return TrainingRows(
        mx.stack([pad(answer.tokens) for answer in answers]),
        mx.stack([pad(answer.hidden) for answer in answers]).astype(dtype),
        mx.stack([pad(answer.logsumexp) for answer in answers]),
        shared,
        places.reshape(-1),
        mx.arange(A) < mx.array(sizes)[:, None],
    )


def take_step(
    network: AssistantNetwork, embedded: mx.array, hidden: mx.array, rows: TrainingRows
) -> tuple[mx.array, mx.array]:
    """Return the next hidden states [N, D] and the drafter's normed output [N, h], for N = B * A rows.

    `embedded` and `hidden` are [N, D].
    """
    x = network.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
    B, A = rows.real.shape
    for layer in network.model.layers:
        queries = layer.queries(x, rows.positions)
        shared = rows.shared[layer.attention_type]
        attended = mx.fast.scaled_dot_product_attention(
            queries.reshape(B, A, *queries.shape[1::2]).swapaxes(1, 2),
            shared.keys,
            shared.values,
            scale=1.0,
            mask=shared.mask,
        )
        x = layer.finish(x, attended.swapaxes(1, 2).reshape(B * A, -1))
    normed = network.model.norm(x)
    return network.post_projection(normed), normed


class Heads:
    """Scores the tokens that a drafter is trained on: by the target's head, or by the drafter's own table."""

    def __init__(self, network: AssistantNetwork, parts: TargetParts, ids: mx.array) -> None:
        self.ids = ids  # [W] int32
        self._parts, self._target = parts, parts.select(ids)
        self._own = None if "draft_ids" in network else network.table_rows(ids)  # rows of the drafter's table

    def target(self, rows: TrainingRows) -> mx.array:
        """Return the target's probabilities [B, A, W] of these tokens."""
        return weights_of(self._target(rows.hidden), rows.logsumexp)

    def drafter(
        self, sample: TokenSample | None
    ) -> Callable[[AssistantNetwork, mx.array, mx.array], mx.array]:
        """Return a function: network, hidden states and normed output -> logits of all or sampled tokens."""
        if self._own is None:
            score = self._target if sample is None else self._parts.select(self.ids[sample.places])
            return lambda network, hidden, normed: score(hidden)
        rows = self._own if sample is None else self._own[sample.places]
        return lambda network, hidden, normed: normed @ network.model.embed_tokens.weight[rows].T


def weights_of(logits: mx.array, logsumexp: mx.array) -> mx.array:
    """Return the probabilities [.., W] of tokens by their logits and the logsumexp [..] of all logits."""
    # For why this is not `mx.exp`, see `sampling.softmax.weights`.
    return mx.power(math.e, logits.astype(mx.float32) - logsumexp[..., None])


def unroll(
    network: AssistantNetwork,
    rows: TrainingRows,
    depth: int,
    heads: Heads,
    embed: Embed,
    key: mx.array | None = None,
) -> list[Step]:
    """Take `depth` steps from every row. With a key, score only a sample of tokens, drawn with the key."""
    B, A = rows.real.shape
    target = mx.stop_gradient(heads.target(rows))
    sample = None if key is None else sample_tokens(target, key)
    if sample is not None:
        target = target[..., sample.places]
    score, hidden, steps = heads.drafter(sample), rows.hidden.reshape(B * A, -1), []
    for k in range(1, depth + 1):
        tokens = mx.pad(rows.tokens[:, k - 1 :], [(0, 0), (0, k - 1)]).reshape(-1)
        hidden, normed = take_step(network, embed(tokens), hidden, rows)
        logits = score(network, hidden, normed).reshape(B, A, -1)[:, : A - k].astype(mx.float32)
        if sample is not None:
            logits = logits + sample.log_weights
        steps.append(Step(logits, target[:, k:], rows.real[:, k:]))
    return steps


# --- the run


@dataclass
class Progress:
    """The figures of a run so far, saved with its state."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # since the last point of the curve
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)  # step, loss, greedy, sampled
    best: float = 0.0


class Fit:
    """The training of a network: its optimizer, its progress, and the file with their state."""

    def __init__(
        self,
        network: AssistantNetwork,
        parts: TargetParts,
        ids: mx.array,
        files: tuple[Sequence[Path], Sequence[Path]],
        folder: Path,
        *,
        window: int,
        epochs: float,
        fine_tunes: bool,
        seed: int,
    ) -> None:
        self.network, self.progress = network, Progress()
        self._embed, self._heads = parts.embed, Heads(network, parts, ids)
        self._train, self._test = files
        self._folder, self._window, self._seed = folder, window, seed
        self._sizes = {file: read_answer(file).tokens.size for file in self._train}
        self.rows = sum(self._sizes.values())
        self.steps = max(math.ceil(epochs * self.rows / STEP_ROWS), 1)
        # Muon's learning rate for matrices. Three times more or less learns slower.
        peak = 0.001 if fine_tunes else 0.003
        # Three iterations of Newton and Schulz: the usual five take a quarter of a step on a CPU.
        matrices = optim.Muon(self._schedule(peak), weight_decay=0.0, ns_steps=3)
        # Norms need a lower rate: they are near 1, and AdamW changes them by about the rate in each step.
        others = optim.AdamW(self._schedule(0.1 * peak), betas=[0.9, 0.98], weight_decay=0.0)
        self._optimizer = optim.MultiOptimizer([matrices, others], [lambda name, weight: weight.ndim == 2])
        self._optimizer.init(network.trainable_parameters())
        self._best = flat(network.parameters())
        self._restore()

    def run(self) -> Iterator[Progress]:
        """Train until all steps are done. Yield the progress after each step; save the state now and then."""
        compute = nn.value_and_grad(self.network, self._loss)
        saved, batches = time.monotonic(), self._batches()
        if not self.progress.step:
            self._note()
        for _ in range(self.progress.step):
            next(batches)
        while self.progress.step < self.steps:
            begun = time.monotonic()
            answers = [read_answer(file) for file in next(batches)]
            key = mx.random.key(self._seed + self.progress.step)
            loss, gradients = compute(self.network, answers, key)
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # largest norm of a gradient
            self._optimizer.update(self.network, gradients)
            mx.eval(self.network.parameters(), self._optimizer.state, loss)
            progress = self.progress
            progress.step += 1
            progress.losses.append(float(loss))
            points = progress.step * 12 // self.steps  # the curve has 12 points
            if points > (progress.step - 1) * 12 // self.steps:
                self._note()
            progress.seconds += time.monotonic() - begun
            # Save every 30 s, the most that kill -9 can lose. A save takes far less time.
            if time.monotonic() - saved > 30.0 or progress.step == self.steps:
                self.save()
                saved = time.monotonic()
            yield progress

    @property
    def best_step(self) -> int:
        """Return the step with the best acceptance, 0 for the weights that training began with."""
        return max(self.progress.curve, key=lambda point: point[2] + point[3])[0]

    def take_best(self) -> None:
        """Restore the weights with the best acceptance."""
        self.network.update(tree_unflatten(list(self._best.items())))

    def acceptance(self) -> tuple[float, float]:
        """Return the mean tokens a round on held-out answers: greedy ones, and sampled ones."""
        # 6000 rows measure acceptance to 1 %.
        greedy, sampled, left = [0.0, 0], [0.0, 0], 6000
        for file in self._test:
            if left <= 0:
                break
            answer = read_answer(file)
            rows = batch_of([answer], self._window, mx.float32)
            steps = unroll(self.network, rows, DEPTH, self._heads, self._embed)
            ours, expected = round_tokens(steps, rows.tokens, self._heads.ids)
            into, scores = (greedy, ours) if answer.greedy else (sampled, expected)
            into[0], into[1] = into[0] + float(scores.sum()), into[1] + scores.size
            left -= scores.size
        return greedy[0] / max(greedy[1], 1), sampled[0] / max(sampled[1], 1)

    def _schedule(self, peak: float) -> Callable[[mx.array], mx.array]:
        """Return the learning rate by step: it rises to `peak`, then falls along a cosine."""
        warm = max(round(0.1 * self.steps), 1)
        rising = optim.linear_schedule(0.0, peak, warm)
        falling = optim.cosine_decay(peak, max(self.steps - warm, 1), 0.02 * peak)
        return optim.join_schedules([rising, falling], [warm])

    def _loss(self, network: AssistantNetwork, answers: Sequence[RecordedAnswer], key: mx.array) -> mx.array:
        rows = batch_of(answers, self._window, mx.float32)
        return loss_of(unroll(network, rows, DEPTH, self._heads, self._embed, key))

    def _batches(self) -> Iterator[list[Path]]:
        """Yield the answers for each step, endlessly. Answers of one step have similar lengths."""
        chance = random.Random(self._seed)
        while True:
            files = sorted(self._train, key=lambda file: self._sizes[file] * chance.uniform(0.9, 1.1))
            batches, batch = [], list[Path]()
            for file in files:
                longest = max(self._sizes[each] for each in [*batch, file])
                if batch and longest * (len(batch) + 1) > STEP_ROWS:
                    batches.append(batch)
                    batch = []
                batch.append(file)
            batches.append(batch)
            chance.shuffle(batches)
            yield from batches

    def _note(self) -> None:
        """Add a point to the curve, and keep the weights if they are the best so far."""
        progress, acceptance = self.progress, self.acceptance()
        loss = sum(progress.losses) / max(len(progress.losses), 1)
        progress.curve.append((progress.step, loss, *acceptance))
        progress.losses.clear()
        if sum(acceptance) / 2 > progress.best:
            progress.best = sum(acceptance) / 2
            self._best = flat(self.network.parameters())

    def save(self) -> None:
        """Write the state that the rest of the run depends on."""
        parts = {"network": self.network.parameters(), "best": self._best, "optimizer": self._optimizer.state}
        arrays = {f"{part}.{name}": a for part, tree in parts.items() for name, a in flat(tree).items()}
        write_arrays(self._folder / STATE, arrays, {"progress": json.dumps(vars(self.progress))})

    def _restore(self) -> None:
        if not (self._folder / STATE).exists():
            return
        arrays, metadata = read_arrays(self._folder / STATE)
        parts: dict[str, list[tuple[str, mx.array]]] = {"network": [], "best": [], "optimizer": []}
        try:
            for name, array in arrays.items():
                part, _, rest = name.partition(".")
                parts[part].append((rest, array))
            self.network.update(tree_unflatten(parts["network"]))
            self._best = dict(parts["best"])
            self._optimizer.state = tree_unflatten(parts["optimizer"])
            self.progress = Progress(**json.loads(metadata["progress"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise damaged(self._folder / STATE, error) from error


def tokens_a_round(greedy: float, sampled: float) -> str:
    """Return what `Fit.acceptance` returns in words; 0 stands for answers that there are none of."""
    both = (f"{mean:.2f} {kind}" for mean, kind in ((greedy, "greedy"), (sampled, "sampled")) if mean)
    return f"tokens a round: {', '.join(both) or 'not measured'}"


def flat(tree: Any) -> dict[str, mx.array]:
    """Return the arrays of a tree by their names."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(tree)))


def frequent_tokens(files: Sequence[Path], size: int, vocab_size: int) -> mx.array:
    """Return the `size` most frequent tokens of the answers, in ascending order; the lowest ids fill up."""
    counts: Counter[int] = Counter()
    for file in files:
        counts.update(cast(list[int], read_answer(file).tokens.tolist()))
    chosen = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(vocab_size) if token not in counts)
    chosen += [token for token, _ in zip(rest, range(size - len(chosen)), strict=False)]
    return mx.array(sorted(chosen), dtype=mx.int32)


def start_linear(network: AssistantNetwork, embed: Embed, files: Sequence[Path]) -> None:
    """Set the projections to the best linear prediction of the next hidden state.

    The layers add little to it at first. Random weights would need a few hundred steps to get there.
    """
    width = network.pre_projection.weight.shape[0]
    inputs, outputs = [], []
    for file in files:
        answer = read_answer(file)
        hidden = answer.hidden.astype(mx.float32)
        inputs.append(mx.concatenate([embed(answer.tokens[:-1]).astype(mx.float32), hidden[:-1]], axis=-1))
        outputs.append(hidden[1:])
    x, y = mx.concatenate(inputs), mx.concatenate(outputs)
    gram = x.T @ x
    # A ridge of 0.1 % of the mean square of an input keeps the projections finite.
    ridge = 1e-3 * mx.diag(mx.ones(gram.shape[0])) * mx.diag(gram).mean()
    solution = mx.linalg.solve(gram + ridge, x.T @ y, stream=mx.cpu)  # [2D, D]
    left, scale, right = mx.linalg.svd(solution, stream=mx.cpu)
    rank = min(width, scale.size)
    enter, leave = left[:, :rank] * mx.sqrt(scale[:rank]), mx.sqrt(scale[:rank])[:, None] * right[:rank]
    size = mx.sqrt(mx.mean(mx.square(x @ enter)) * rank / width)  # root mean square of the residual stream
    network.pre_projection.weight = mx.pad((enter / size).T, [(0, width - rank), (0, 0)])
    network.post_projection.weight = mx.pad((leave * size).T, [(0, 0), (0, width - rank)])
    for layer in network.model.layers:
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            # Attention and MLP add a tenth of the residual stream at first.
            norm.weight = mx.full(norm.weight.shape, 0.1)
        query = layer.self_attn.q_norm.weight
        layer.self_attn.q_norm.weight = mx.full(query.shape, query.size**-0.5)
    mx.eval(network.parameters())
