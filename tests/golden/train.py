"""Fit a tiny target on the corpus and distil its drafter: some drafts are accepted, some partly, some not."""

import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from tokenizer import BOS, CORPUS, EOS
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from variants import VOCAB

LEARNING_RATE = 3e-3
LENGTH = 48  # three windows, so that training wraps the sliding layers too


def fit_target(model: nn.Module, tok: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    model.train()
    fit, data = Fit(model, steps), batches(tok, 16, seed)
    for step in range(steps):
        x = next(data)
        logits = model(input_ids=x, mm_token_type_ids=torch.zeros_like(x)).logits
        fit.step(step, F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()))
    model.eval()


def distil_drafter(
    model: nn.Module, target: nn.Module, tok: PreTrainedTokenizerFast, steps: int, seed: int, depth: int = 4
) -> None:
    """From the prefix 0..t and the token at t + 1, predict t + 2, t + 3, ... all at the position t + 1."""
    model.train()
    fit, data, rng = Fit(model, steps), batches(tok, 24, seed), random.Random(seed)
    embed = target.get_input_embeddings()
    for step in range(steps):
        x = next(data)
        t = rng.randrange(4, x.shape[1] - depth - 2)
        with torch.no_grad():
            prefix = x[:, : t + 1]
            out = target(
                input_ids=prefix,
                mm_token_type_ids=torch.zeros_like(prefix),
                output_hidden_states=True,
                return_shared_kv_states=True,
            )
        hidden, kv = out.hidden_states[-1][:, -1:], dict(out.shared_kv_states)
        token, position = x[:, t + 1 : t + 2], torch.full((1, 1), t + 1)
        loss = torch.zeros(())
        for k in range(depth):
            goal = x[:, t + 2 + k]
            normed = drafter_hidden(model, torch.cat([embed(token), hidden], -1), kv, position)
            loss = loss + F.cross_entropy(model.lm_head(normed)[:, 0], goal) * 0.8**k
            loss = loss + 0.3 * centroid_loss(model.masked_embedding, normed, goal)
            hidden, token = model.post_projection(normed), goal[:, None]
        fit.step(step, loss)
    model.eval()


def drafter_hidden(model: nn.Module, x: Tensor, kv: dict, position: Tensor) -> Tensor:
    """One drafter step up to its final norm; the model's own forward would go through the centroid head."""
    h = model.pre_projection(x)
    masks = model.create_attention_masks(h, None, kv)
    return model.model(
        inputs_embeds=h, attention_mask=masks, position_ids=position, shared_kv_states=kv, use_cache=False
    ).last_hidden_state


def centroid_loss(head: nn.Module | None, normed: Tensor, goal: Tensor) -> Tensor:
    """Teaches the router: the goal's cluster must be among the chosen ones."""
    if head is None:
        return torch.zeros(())
    cluster = torch.empty(VOCAB, dtype=torch.long)
    cluster[head.token_ordering] = torch.arange(VOCAB) // head.vocab_size_per_centroid
    return F.cross_entropy(head.centroids(normed)[:, 0], cluster[goal])


class Fit:
    def __init__(self, model: nn.Module, steps: int):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.steps = steps
        self.optimizer = torch.optim.AdamW(self.params, lr=LEARNING_RATE, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, LEARNING_RATE, total_steps=steps)

    def step(self, step: int, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.schedule.step()
        if step % 50 == 0 or step == self.steps - 1:
            print(f"  step {step:4d} loss {loss.item():.3f}", flush=True)


def batches(tok: PreTrainedTokenizerFast, batch: int, seed: int) -> Iterator[Tensor]:
    rng, ids = random.Random(seed), []
    while len(ids) < 20_000:
        for line in rng.sample(CORPUS, len(CORPUS)):
            ids += [BOS, *tok.encode(line, add_special_tokens=False), EOS]
    while True:
        starts = [rng.randrange(len(ids) - LENGTH) for _ in range(batch)]
        yield torch.tensor([ids[s : s + LENGTH] for s in starts])
