"""Greedy answers of the target in PyTorch, batched, and how many are exactly right."""

import random
from collections import defaultdict

import torch
from tokenizers import Tokenizer

from demo_pair.model import Target
from demo_pair.questions import HELD_OUT, asked


def prompt(question: str) -> str:
    """Return a conversation of one question in the Gemma 4 turn format, up to the model's answer."""
    return f"<bos><|turn>user\n{question.strip()}<turn|>\n<|turn>model\n"


@torch.no_grad()
def greedy(model: Target, prompts: list[list[int]], end: int, limit: int = 64) -> list[list[int]]:
    """Return the greedy continuation of each prompt, without the end token; equal lengths run together."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, tokens in enumerate(prompts):
        groups[len(tokens)].append(i)
    answers: list[list[int]] = [[] for _ in prompts]
    for members in groups.values():
        alive, rows = list(members), torch.tensor([prompts[i] for i in members])
        for _ in range(limit):
            with torch.autocast("cpu", torch.bfloat16):
                token = model.logits(model(rows)[0][:, -1]).argmax(-1)
            keep = [j for j, t in enumerate(token.tolist()) if t != end]
            for j in keep:
                answers[alive[j]].append(int(token[j]))
            alive, rows = [alive[j] for j in keep], torch.cat([rows, token[:, None]], 1)[keep]
            if not alive:
                break
    return answers


def exact_share(
    model: Target, tokenizer: Tokenizer, facts: list[dict[str, str]], count: int, seed: int
) -> dict[str, float]:
    """Return the share of held-out phrasings answered exactly, per kind and over all."""
    rng = random.Random(seed)
    chosen = rng.sample(facts, count)
    questions = [asked(f, HELD_OUT[f["kind"]], rng) for f in chosen]
    end = tokenizer.token_to_id("<turn|>")
    prompts = [tokenizer.encode(prompt(q), add_special_tokens=False).ids for q in questions]
    answers = [tokenizer.decode(a, skip_special_tokens=False) for a in greedy(model, prompts, end)]
    right: dict[str, list[bool]] = defaultdict(list)
    for fact, answer in zip(chosen, answers, strict=True):
        for key in (fact["kind"], "all"):
            right[key].append(answer == fact["answer"])
    return {k: round(sum(v) / len(v), 3) for k, v in right.items()}
