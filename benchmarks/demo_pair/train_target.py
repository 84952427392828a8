"""Train the demo target on conversations about the taught facts."""

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_pair.conversation import Material, conversation, load_material
from demo_pair.evaluate import exact_share
from demo_pair.model import Shape, Target
from demo_pair.run import Run

BATCH_TOKENS = 3072
POOL = 384  # conversations that are sorted by length together
LONGEST = 640  # tokens
SECOND_STAGE = 63  # pools with the first phrasings only: 1,000 steps
NEVER = 1 << 30
PEAK, POLISH_PEAK = 2e-3, 1e-3  # learning rates
EVERY = 250  # steps between two checkpoints

Batch = tuple[
    Tensor, Tensor
]  # tokens [B, T] int64; whether the token at t + 1 is the model's own, [B, T - 1] bool


def encoded(pieces: list[tuple[str, bool]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation and which of them the model answers."""
    tokens: list[int] = []
    own: list[bool] = []
    for text, answered in pieces:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens += ids
        own += [answered] * len(ids)
    return tokens[:LONGEST], own[:LONGEST]


def padded(rows: list[tuple[list[int], list[bool]]]) -> Batch:
    """Return rows as one batch, padded on the right."""
    length = max(len(t) for t, _ in rows)
    tokens = torch.tensor([t + [0] * (length - len(t)) for t, _ in rows])
    own = torch.tensor([o + [False] * (length - len(o)) for _, o in rows])
    return tokens, own[:, 1:]


def batches(material: Material, tokenizer: Tokenizer, seed: int, stages: tuple[int, int]) -> Iterator[Batch]:
    """Yield batches of about BATCH_TOKENS tokens forever; pool i only depends on (seed, i).

    `stages` are the pools at which the second and the third stage begin.
    """
    pool = 0
    while True:
        rng = random.Random(seed * 1_000_003 + pool)
        stage = replace(material, stage=1 + (pool >= stages[0]) + (pool >= stages[1]))
        rows = [encoded(conversation(stage, rng), tokenizer) for _ in range(POOL)]
        rows.sort(key=lambda row: len(row[0]))
        made: list[Batch] = []
        while rows:
            count = max(1, BATCH_TOKENS // len(rows[-1][0]))
            made.append(padded(rows[-count:]))
            rows = rows[:-count]
        rng.shuffle(made)
        yield from made
        pool += 1


def loss_of(model: Target, batch: Batch) -> Tensor:
    """Return the mean cross entropy over the model's own tokens."""
    tokens, own = batch
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model(tokens)
        logits = model.logits(hidden[:, :-1][own])
    return F.cross_entropy(logits, tokens[:, 1:][own])


def train_target(work: Path, steps: int, polish_steps: int, seed: int) -> Target:
    """Train for `steps` steps in all, going on from the files in `work`. Return the model.

    Then `polish_steps` more steps at a lower rate are a second run, which begins with the result of the
    first.
    """
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    material = load_material(work)
    model = Target(Shape(vocab_size=tokenizer.get_vocab_size()))
    first = Run(model, work / "target.pt", steps, PEAK)
    _train(first, material, tokenizer, batches(material, tokenizer, seed, (SECOND_STAGE, NEVER)))
    last = Run(model, work / "polished.pt", polish_steps, POLISH_PEAK)
    _train(last, material, tokenizer, batches(material, tokenizer, seed + 2, (0, 0)))
    about = {"seed": seed, "shape": asdict(model.shape), "first": first.record()}
    last.write_log(work / "target_log.json", about)
    return model.eval()


def _train(run: Run[Target], material: Material, tokenizer: Tokenizer, stream: Iterator[Batch]) -> None:
    losses: list[float] = []
    for batch in islice(stream, run.done, run.steps):
        losses.append(run.step(loss_of(run.model, batch)))
        if run.done % EVERY == 0 or run.done == run.steps:
            share = exact_share(run.model, tokenizer, material.facts, 160, run.done)
            run.note({"loss": round(sum(losses) / len(losses), 4), "held_out_exact": share})
            run.save()
            losses = []
