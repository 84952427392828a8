"""Train the demo drafter on the target: a chain of drafts is unrolled, as in drafting."""

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

DEPTH = 4  # draft tokens in a round
STEP_WEIGHT = 0.8  # weight of a draft step, relative to the step before it
EVERY = 100  # steps between two checkpoints
HARD = 0.2  # weight of the cross entropy with the target's greedy token; the KL divergence has weight 1


@dataclass(frozen=True)
class AnchorRows:
    """The anchors of one batch, where drafts begin, and the tokens to draft after each."""

    anchors: Tensor  # [B, N] int64: t; tokens 0..t are in the K/V, token t + 1 is pending
    tokens: Tensor  # [B, N, DEPTH + 1] int64: tokens t + 1, t + 2, ...
    target_logits: Tensor  # [B, N, DEPTH, V] float32: after tokens t + 1, t + 2, ...
    valid: Tensor  # [B, N, DEPTH] bool: all earlier draft tokens would have been accepted


def anchors_of(own: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows t whose next token the target wrote, [B, N], and a mask without padding, [B, N]."""
    count = own.sum(1)
    order = torch.argsort(own.int(), dim=1, descending=True, stable=True)[:, : int(count.max())]
    return order, torch.arange(order.shape[1]) < count[:, None]


@torch.no_grad()
def anchor_rows(target: Target, batch: Batch) -> tuple[AnchorRows, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return the anchors of a batch, the target's hidden rows there, [B, N, H], and its shared K/V.

    A token that is not the target's greedy choice, and all tokens after it, are not valid.
    """
    tokens, own = batch
    hidden, shared = target(tokens)
    anchors, real = anchors_of(own)
    rows = torch.arange(len(tokens))[:, None, None]
    ahead = (anchors[..., None] + 1 + torch.arange(DEPTH + 1)).clamp(max=tokens.shape[1] - 1)
    target_logits = target.logits(hidden[rows, ahead[..., :DEPTH]])
    pending = tokens[rows, ahead]
    inside = own[rows, (ahead[..., 1:] - 1)] & (
        anchors[..., None] + 1 + torch.arange(1, DEPTH + 1) < tokens.shape[1]
    )
    chosen = target_logits.argmax(-1) == pending[..., 1:]
    valid = (inside & chosen).int().cumprod(-1).bool() & real[..., None]
    return AnchorRows(anchors, pending, target_logits, valid), hidden[rows[..., 0], anchors], shared


def draft_loss(drafter: Drafter, target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss of the unrolled chain, and the share of accepted draft tokens by step, [DEPTH]."""
    with torch.autocast("cpu", torch.bfloat16):
        rows, hidden, shared = anchor_rows(target, batch)
        context = context_of(rows.anchors, shared, target.shape)
        loss, right = torch.zeros(()), []
        for step in range(DEPTH):
            embedded = target.embed(rows.tokens[..., step]).detach()
            hidden, normed = drafter(embedded, hidden, context)
            valid = rows.valid[..., step]
            if not valid.any():  # every answer of the batch is shorter than the chain
                right.append(torch.ones(()))
                continue
            logits = drafter.logits(normed[valid])
            goal, expected = rows.tokens[..., step + 1][valid], rows.target_logits[..., step, :][valid]
            divergence = F.kl_div(
                logits.log_softmax(-1), expected.log_softmax(-1), reduction="batchmean", log_target=True
            )
            loss = loss + STEP_WEIGHT**step * (divergence + HARD * F.cross_entropy(logits, goal))
            right.append((logits.argmax(-1) == goal).float().mean())
    return loss, torch.stack(right)


def train_drafter(work: Path, target: Target, steps: int, seed: int, peak: float = 2e-3) -> Drafter:
    """Train for `steps` steps in all, going on from `work`/drafter.pt. Return the drafter."""
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
