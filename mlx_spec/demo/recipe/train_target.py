"""Trains the demo target on conversations about the taught facts."""

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from mlx_spec.demo.recipe.conversation import Material, conversation, load_material
from mlx_spec.demo.recipe.evaluate import exact_share
from mlx_spec.demo.recipe.model import Shape, Target
from mlx_spec.demo.recipe.run import Run

BATCH_TOKENS = 3072
POOL = 384  # conversations that are sorted by length together
LONGEST = 640  # tokens
SECOND_STAGE = 63  # pools with the first phrasings only: 1,000 steps
EVERY = 250  # steps between two checkpoints

Batch = tuple[
    Tensor, Tensor
]  # tokens [B, T] int64; whether the token at t + 1 is the model's own, [B, T - 1] bool


def encoded(pieces: list[tuple[str, bool]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a conversation and which of them the model answers."""
    tokens: list[int] = []
    own: list[bool] = []
    for text, answered in pieces:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens += ids
        own += [answered] * len(ids)
    return tokens[:LONGEST], own[:LONGEST]


def padded(rows: list[tuple[list[int], list[bool]]]) -> Batch:
    """Returns rows as one batch, padded on the right."""
    length = max(len(t) for t, _ in rows)
    tokens = torch.tensor([t + [0] * (length - len(t)) for t, _ in rows])
    own = torch.tensor([o + [False] * (length - len(o)) for _, o in rows])
    return tokens, own[:, 1:]


def batches(material: Material, tokenizer: Tokenizer, seed: int, second_stage: int) -> Iterator[Batch]:
    """Yields batches of about BATCH_TOKENS tokens for ever; pool i depends on (seed, i) only.

    From pool `second_stage` on, half of the questions are asked in more phrasings.
    """
    pool = 0
    while True:
        rng = random.Random(seed * 1_000_003 + pool)
        stage = replace(material, more=pool >= second_stage)
        rows = sorted(
            (encoded(conversation(stage, rng), tokenizer) for _ in range(POOL)), key=lambda r: len(r[0])
        )
        made: list[Batch] = []
        while rows:
            count = max(1, BATCH_TOKENS // len(rows[-1][0]))
            made.append(padded(rows[-count:]))
            rows = rows[:-count]
        rng.shuffle(made)
        yield from made
        pool += 1


def loss_of(model: Target, batch: Batch) -> Tensor:
    """Returns the mean cross entropy over the model's own tokens."""
    tokens, own = batch
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model(tokens)
        logits = model.logits(hidden[:, :-1][own])
    return F.cross_entropy(logits, tokens[:, 1:][own])


def train_target(work: Path, steps: int, seed: int, peak: float = 2e-3) -> Target:
    """Trains for `steps` steps in all, going on from `work`/target.pt, and returns the model."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    material = load_material(work)
    model = Target(Shape(vocab_size=tokenizer.get_vocab_size()))
    run = Run(model, work / "target.pt", steps, peak)
    losses: list[float] = []
    for batch in islice(batches(material, tokenizer, seed, SECOND_STAGE), run.done, steps):
        losses.append(run.step(loss_of(model, batch)))
        if run.done % EVERY == 0 or run.done == steps:
            share = exact_share(model, tokenizer, material.facts, 160, run.done)
            run.note({"loss": round(sum(losses) / len(losses), 4), "held_out_exact": share})
            run.save()
            losses = []
    run.write_log(work / "target_log.json", {"seed": seed, "shape": asdict(model.shape)})
    return model.eval()
