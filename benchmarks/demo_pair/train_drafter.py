"""Trains the demo drafter on the target: the chain of drafts is unrolled as it is used."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_pair.conversation import load_material
from demo_pair.drafter import Drafter, context_of
from demo_pair.model import Target
from demo_pair.run import Run
from demo_pair.train_target import Batch, batches

DEPTH = 4  # drafts per round
STEP_WEIGHT = 0.8  # of each draft against the one before it
EVERY = 100  # steps between two checkpoints
HARD = 0.2  # weight of the cross entropy to the target's greedy token beside the KL to its law


@dataclass(frozen=True)
class Lesson:
    """The anchors of one batch and what is to be drafted behind each."""

    anchors: Tensor  # [B, N] int64: t; tokens 0..t are in the K/V, token t + 1 is pending
    tokens: Tensor  # [B, N, DEPTH + 1] int64: tokens t + 1, t + 2, ...
    laws: Tensor  # [B, N, DEPTH, V] float32: the target's logits behind tokens t + 1, t + 2, ...
    valid: Tensor  # [B, N, DEPTH] bool: the draft is one that the target would have been asked about


def anchors_of(own: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows t whose next token the target wrote, [B, N], and a mask without padding, [B, N]."""
    count = own.sum(1)
    order = torch.argsort(own.int(), dim=1, descending=True, stable=True)[:, : int(count.max())]
    return order, torch.arange(order.shape[1]) < count[:, None]


@torch.no_grad()
def lesson_of(target: Target, batch: Batch) -> tuple[Lesson, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Returns the lesson of a batch, the target's hidden rows at the anchors, [B, N, H], and its shared K/V.

    The texts are the target's own: a token that is not the target's greedy choice ends what counts as valid.
    """
    tokens, own = batch
    hidden, shared = target(tokens)
    anchors, real = anchors_of(own)
    rows = torch.arange(len(tokens))[:, None, None]
    ahead = (anchors[..., None] + 1 + torch.arange(DEPTH + 1)).clamp(max=tokens.shape[1] - 1)
    laws = target.logits(hidden[rows, ahead[..., :DEPTH]])
    pending = tokens[rows, ahead]
    inside = own[rows, (ahead[..., 1:] - 1)] & (
        anchors[..., None] + 1 + torch.arange(1, DEPTH + 1) < tokens.shape[1]
    )
    chosen = laws.argmax(-1) == pending[..., 1:]
    valid = (inside & chosen).int().cumprod(-1).bool() & real[..., None]
    return Lesson(anchors, pending, laws, valid), hidden[rows[..., 0], anchors], shared


def draft_loss(drafter: Drafter, target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the loss of the unrolled chain, and the share of right drafts of each step, [DEPTH]."""
    with torch.autocast("cpu", torch.bfloat16):
        lesson, hidden, shared = lesson_of(target, batch)
        context = context_of(lesson.anchors, shared, target.shape)
        loss, right = torch.zeros(()), []
        for step in range(DEPTH):
            embedded = target.embed(lesson.tokens[..., step]).detach()
            hidden, normed = drafter(embedded, hidden, context)
            valid = lesson.valid[..., step]
            if not valid.any():  # every answer of the batch is shorter than the chain
                right.append(torch.ones(()))
                continue
            logits = drafter.logits(normed[valid])
            goal, law = lesson.tokens[..., step + 1][valid], lesson.laws[..., step, :][valid]
            divergence = F.kl_div(
                logits.log_softmax(-1), law.log_softmax(-1), reduction="batchmean", log_target=True
            )
            loss = loss + STEP_WEIGHT**step * (divergence + HARD * F.cross_entropy(logits, goal))
            right.append((logits.argmax(-1) == goal).float().mean())
    return loss, torch.stack(right)


def train_drafter(work: Path, target: Target, steps: int, seed: int, peak: float = 2e-3) -> Drafter:
    """Trains for `steps` steps in all, going on from `work`/drafter.pt, and returns the drafter."""
    torch.manual_seed(seed + 1)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    target.eval().requires_grad_(False)
    drafter = Drafter(target.shape)
    run = Run(drafter, work / "drafter.pt", steps, peak)
    losses: list[float] = []
    hits = torch.zeros(DEPTH)
    for batch in islice(batches(load_material(work), tokenizer, seed + 1, (0, 0)), run.done, steps):
        loss, right = draft_loss(drafter, target, batch)
        losses.append(run.step(loss))
        hits += right
        if run.done % EVERY == 0 or run.done == steps:
            shares = [round(x, 3) for x in (hits / len(losses)).tolist()]
            run.note({"loss": round(sum(losses) / len(losses), 4), "right": shares})
            run.save()
            losses, hits = [], torch.zeros(DEPTH)
    run.write_log(work / "drafter_log.json", {"seed": seed + 1, "depth": DEPTH})
    return drafter.eval()
