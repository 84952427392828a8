"""How many draft tokens does each acceptance rule keep, on the same drafts of the same pair?

At every `--stride`-th position of texts sampled from the target itself, `--chains` chains of 7 tokens are
drawn from the drafter and one is its greedy chain; the target's law is taken along each. Given a chain and
both laws every rule's expectation is exact, so no rule is run and no luck of acceptance enters:

  block          block verification (arXiv:2403.10444), mlx_spec without a seed
  token          token rejection (arXiv:2211.17192)
  coupled        target and drafter draw with the same Gumbel noise (arXiv:2408.07978): mlx_spec with a seed;
                 mlx-vlm without one, whose two random streams start each round from the same state
  independent    target and drafter draw each for itself and must agree: mlx-lm
  argmax walk    greedy draft, the target draws: mlx-vlm with a seed, and any drafter without a law

All of these are exact for the output; they differ in tokens a round = accepted + 1. Filters and temperature
apply to both laws. Standard errors take a text as the unit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from arms import Folders, prompts, size
from numpy.typing import NDArray
from timing import finish, parser, table

from mlx_spec import load
from mlx_spec.model.sequence import SequenceParts
from mlx_spec.pair import Pair
from mlx_spec.sampling import LogitsProcessor, Sampling, Unseeded

K = 7
Floats = NDArray[np.float64]
SETTINGS = {
    "T=1": Sampling(temperature=1.0),
    "T=0.7": Sampling(temperature=0.7),
    "T=1, top_p=0.95, top_k=64": Sampling(temperature=1.0, top_p=0.95, top_k=64),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", default="demo", help="demo, or a folder")
    options.add_argument("--drafter", help="a folder")
    options.add_argument("--prompts", type=Path, help="a file with one prompt a line")
    options.add_argument("--texts", type=int, default=4, help="sampled for each prompt")
    options.add_argument("--tokens", type=int, default=64, help="of a text; it ends sooner at an end of text")
    options.add_argument("--stride", type=int, default=2)
    options.add_argument("--chains", type=int, default=4)
    options.add_argument("--dtype", help="cast all weights, as to float32")
    settings = options.parse_args()
    if settings.quick:
        settings.texts, settings.tokens, settings.chains = 2, 6, 2
    started = time.time()
    folders = Folders.find(settings.target, settings.drafter)
    if settings.dtype:
        folders = folders.cast(settings.dtype)
    if folders.drafter is None:
        sys.exit("acceptance needs a drafter: give --drafter")
    pair = load(folders.target, folders.drafter)
    results = {}
    for name, sampling in list(SETTINGS.items())[: 1 if settings.quick else None]:
        texts = [t for p in prompts(settings, pair) for t in measure(pair, p, sampling, settings)]
        results[name] = summary([t for t in texts if t.positions])
        report(name, results[name])
    finish("acceptance", {**results, "parameters": size(folders)}, settings, started)


@dataclass
class Measured:
    """Return sums over the positions of one text, by rule: expected accepted tokens for K = 1 .. 7."""

    positions: int
    accepted: dict[str, Floats]


def measure(
    pair: Pair, prompt: list[int], sampling: Sampling, settings: argparse.Namespace
) -> Iterator[Measured]:
    for text in range(settings.texts):
        law = LogitsProcessor(sampling, len(prompt), pair.info.vocab_size)
        sampler = Unseeded(law, key=settings.seed * 1000 + text)
        decoding = pair.open()
        history = list(prompt)
        drafter = decoding.drafters[0]
        drafter.observe(history, decoding.target.prefill(history[:-1]))
        found: list[dict[str, Floats]] = []
        for step in range(settings.tokens):
            if step and (step - 1) % settings.stride == 0:  # nothing is drafted behind a prompt
                chains = [sampled(decoding, law, sampler, history) for _ in range(settings.chains)]
                average = {rule: np.mean([c[rule] for c in chains], axis=0) for rule in chains[0]}
                found.append({**average, "argmax walk": walked(pair, decoding, law, history)})
            logits = decoding.target.verify(mx.array(history[-1:]))
            token, _ = sampler.draw(logits, history, mx.array([], dtype=mx.int32))
            history += token.tolist()
            drafter.observe(history, decoding.target.commit(1))
            if history[-1] in pair.text.eos:
                break
        yield Measured(len(found), {rule: np.sum([f[rule] for f in found], axis=0) for rule in found[0]})


def sampled(
    decoding: SequenceParts, law: LogitsProcessor, sampler: Unseeded, history: list[int]
) -> dict[str, Floats]:
    """Return every rule's expectation on a chain drawn from the drafter."""
    draft = decoding.drafters[0].draft(history, K, sampler)
    if draft.probs is None:
        sys.exit("acceptance needs a drafter with a law: lookup has none")
    p = target_law(decoding, law, history, draft.tokens)
    q = np.array(draft.probs, dtype=np.float64)
    q /= q.sum(axis=-1, keepdims=True)
    at = (np.arange(K), np.array(draft.tokens))
    px, qx = p[at], q[at]
    return {
        "block": block(p, q, px / qx),
        "token": runs(np.minimum(px / qx, 1)),
        "coupled": runs(coupled(p[:K], q, px, qx)),
        "independent": runs(px),
    }


def walked(pair: Pair, decoding: SequenceParts, law: LogitsProcessor, history: list[int]) -> Floats:
    """Return the expected agreement of the target's draws with the drafter's greedy chain."""
    draft = decoding.drafters[0].draft(history, K, Sampling().sampler(len(history), pair.info.vocab_size))
    p = target_law(decoding, law, history, draft.tokens)
    return runs(p[np.arange(K), np.array(draft.tokens)])


def target_law(
    decoding: SequenceParts, law: LogitsProcessor, history: list[int], drafted: mx.array
) -> Floats:
    """Return the target's distribution [K + 1, V] along a chain; its cache is left as it was."""
    logits = decoding.target.verify(mx.concatenate([mx.array(history[-1:], dtype=mx.int32), drafted]))
    p = np.array(mx.softmax(law.scores(logits, history, drafted), axis=-1), dtype=np.float64)
    decoding.target.commit(0)
    return p / p.sum(axis=-1, keepdims=True)


def runs(passing: Floats) -> Floats:
    """Return the expected accepted prefix for 1 .. K, if position j passes with passing[j]."""
    return np.cumsum(np.cumprod(passing))


def coupled(p: Floats, q: Floats, px: Floats, qx: Floats) -> Floats:
    """Return the probability that both draw x with the same Gumbel noise, given that the drafter did.

    Both do with probability 1 / sum over y of max(p_y / p_x, q_y / q_x).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        both = 1 / np.maximum(p / px[:, None], q / qx[:, None]).sum(axis=-1)
    return np.where(px > 0, both / qx, 0)


def block(p: Floats, q: Floats, ratio: Floats) -> Floats:
    """Return the expected prefix that passes block verification, for 1 .. K draft tokens."""
    mass, masses = 1.0, []
    for r in ratio:
        mass = min(mass * r, 1.0)
        masses.append(mass)
    expected = []
    for length in range(1, K + 1):
        passing = []
        for i in range(1, length):
            excess = np.maximum(masses[i - 1] * p[i] - q[i], 0).sum()
            rest = 1 - masses[i - 1]
            passing.append(excess / (excess + rest) if rest > 0 else 1.0)
        passing.append(masses[length - 1])
        longest, none_after = 0.0, 1.0
        for i in range(length, 0, -1):
            longest += i * passing[i - 1] * none_after
            none_after *= 1 - passing[i - 1]
        expected.append(longest)
    return np.array(expected)


def summary(texts: list[Measured]) -> dict[str, Any]:
    """Return mean accepted tokens by rule and K, with the standard error of a ratio of sums."""
    counts = np.array([t.positions for t in texts], dtype=np.float64)
    result: dict[str, Any] = {"texts": len(texts), "positions": int(counts.sum())}
    for rule in texts[0].accepted:
        sums = np.array([t.accepted[rule] for t in texts])
        mean = sums.sum(axis=0) / counts.sum()
        scatter = ((sums - mean * counts[:, None]) ** 2).sum(axis=0)
        error = np.sqrt(scatter * len(texts) / max(len(texts) - 1, 1)) / counts.sum()
        result[rule] = {"accepted": mean.round(4).tolist(), "error": error.round(4).tolist()}
    return result


def report(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}: accepted draft tokens a round (tokens a round are one more), +- standard error;")
    print(f"{found['positions']} positions in {found['texts']} texts\n")
    rules = [r for r in found if r not in ("texts", "positions")]
    head = ["rule", *(f"K={k}" for k in range(1, K + 1)), f"tokens a round at K={K}"]
    table(head, [row(rule, found[rule]) for rule in rules])


def row(rule: str, found: dict[str, list[float]]) -> list[str]:
    cells = [f"{a:.2f}+-{e:.2f}" for a, e in zip(found["accepted"], found["error"], strict=True)]
    return [rule, *cells, f"{found['accepted'][-1] + 1:.2f}"]


if __name__ == "__main__":
    main()
