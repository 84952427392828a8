"""Does drafting ahead pay? Gains on a virtual clock are SIMULATED; hit rates are measured on a real pair.

clock: `mlx_spec.policy` decides the rounds of scripted texts on published cost curves, with and without
drafting ahead. A draft token costs `cost` passes. While the target verifies K tokens, the second drafter
makes K + 1 passes, whose time does not grow with the branches (dense weights, few rows). A late draft is a
miss, and a miss is drafted by the target's device as usual.

  own machine   the second drafter has the same speed; each stored draft takes two times `link`
  CPU           a third of the speed, and one memory bus: a pass takes at least the time of all bytes read

hits: the drafter is the target without some middle layers, on bundled questions. Accepted tokens are the
target's, so one pass of each model over an answer shows all drafts and guesses. `noise`: guesses by log q and
the noise that target and drafter share; `top q`: by log q alone. `simulated` is a drafter with the target's
logits plus Gaussian noise, with the same acceptance. `--target ""` leaves this part out.

The exit status is 1 if a floor is broken.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.virtual_clock import CURVES, PLAIN_SECONDS, Answer, Curve, Device, ModelDrafter, make_text

from mlx_spec import load
from mlx_spec.ahead.drafter import fan_out
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.policy.ahead_costs import AheadCosts
from mlx_spec.sampling import Sampling
from mlx_spec.types import DraftLengthPolicy, Round

COSTS = (0.05, 0.1, 0.2, 0.3, 0.4)  # of a draft token, in passes
PLACES = {"own machine, 0.1 ms": 0.1e-3, "own machine, 2 ms": 2e-3, "CPU": None}  # seconds of a link
CPU_SPEED = 1 / 3  # of a CPU core complex over the GPU, in bytes per second
HIT = 0.8  # share of outcomes guessed: `hits` with three guesses, where 77 % of the tokens are accepted
TEXT, CURVE, NOISE = "ind80", "M3 Max", 0.03
K = 4
PROMPTS = Path(__file__).parent / "prompts" / "chat.txt"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # of SmolLM2
DROPPED = (2, 4)  # layers in the middle that a drafter lacks
FAN_OUTS = range(1, 9)  # next tokens guessed, on average
RANKED = 48  # guesses that are looked at: more than any number of accepted tokens gets
FLOORS = {"own machine, cost 0.2, K = 4": 1.25, "worst with the gate": 0.99}


@dataclass
class Beside:
    """What a drafter does beside the target, in seconds."""

    cost: float  # passes of a draft token
    link: float | None  # None for a CPU beside the GPU
    random: np.random.Generator

    def ready(self, tokens: int) -> float:
        """Return how long it drafts ahead."""
        speed = CPU_SPEED if self.link is None else 1.0
        return (tokens + 1) * self.cost / speed * PLAIN_SECONDS

    def passes(self, tokens: int, steps: float) -> float:
        """Return the steps of a pass while it drafts."""
        return steps if self.link is not None else max(steps, 1 + (tokens + 1) * self.cost)

    def hit(self) -> bool:
        """Return whether the outcome was guessed."""
        return bool(self.random.random() < HIT)


def decode(
    policy: DraftLengthPolicy, device: Device, drafter: ModelDrafter, beside: Beside, tokens: int
) -> Answer:
    """Decode one answer in rounds of the engine, as `virtual_clock.decode`, but with drafts made ahead."""
    place, queued, stored, answer, start = 1, None, None, Answer(), device.now
    policy.begin()
    while place <= tokens:
        decision, began, most = policy.decide(range(place)), device.now, tokens - place
        choice = decision.choices[0] if decision.choices and most else None
        if choice is not None and queued is None:
            free = replace(device.curve, drafted=0.0)
            idle = Device(free)  # what is stored takes no time of the device
            right = drafter.draft(place, min(choice.limit, most), idle if stored else device)
            device.now += 2 * (beside.link or 0.0) if stored else 0.0
            steps = device.passes[len(right) + 1]
            begun = device.now
            device.read(device.submit(beside.passes(len(right), steps) if choice.ahead else steps))
            accepted = next((i for i, good in enumerate(right) if not good), len(right))
            round = Round(
                [0] * (accepted + 1), len(right), accepted, "draft", "draft", ahead=stored, drafter_index=0
            )
            in_time = device.now - begun >= beside.ready(len(right))
            stored = (in_time and beside.hit()) if choice.ahead else None
        else:
            done = device.submit(1.0) if queued is None else queued
            queued = device.submit(1.0) if choice is None and most else None
            device.read(done)
            round, stored = Round([0], 0, 0, "plain" if queued is not None else "drained"), None
        place += len(round.tokens)
        round = replace(
            round,
            seconds=device.now - began,
            reason=decision.reason,
            finish_reason="length" if place > tokens else None,
            plain_seconds=decision.plain_seconds,
            cost=decision.cost_of(round),
        )
        policy.observe(round)
        policy.settle()
        answer.rounds.append(round)
    answer.seconds = device.now - start
    return answer


def seconds(
    cost: float, link: float | None, fixed: bool, ahead: bool, answers: int, tokens: int, seed: int
) -> float:
    """Return the seconds of a session after a first answer that warms up."""
    curve: Curve = replace(CURVES[CURVE], drafted=cost)
    device = Device(curve, NOISE, [seed, 99])
    policies = AdaptivePolicies(["draft"], ahead_costs={"draft": AheadCosts()} if ahead else {})
    policies.use(curve.table())
    policy = FixedPolicy(K, ahead=ahead) if fixed else policies.policy(device.clock)
    beside = Beside(cost, link, np.random.default_rng([seed, 5]))
    total = 0.0
    for index in range(answers + 1):
        (drafter,) = make_text(TEXT, tokens, [seed, index])
        assert isinstance(drafter, ModelDrafter)
        took = decode(policy, device, drafter, beside, tokens).seconds
        total += took if index else 0.0
    return total


def simulate(answers: int, tokens: int, seeds: range) -> dict[str, dict[str, float]]:
    """Print and return the gains over the same drafter without drafting ahead."""
    gains: dict[str, dict[str, float]] = {}
    for kind in ("K = 4", "with the gate"):
        for place, link in PLACES.items():
            row = gains[f"{place}, {kind}"] = {}
            for cost in COSTS:
                pairs = [
                    [
                        seconds(cost, link, kind == "K = 4", ahead, answers, tokens, seed)
                        for ahead in (False, True)
                    ]
                    for seed in seeds
                ]
                row[str(cost)] = math.exp(np.mean([math.log(without / with_) for without, with_ in pairs]))
    print(f"\nSIMULATED ({CURVE}, 80 % accepted): gain of drafting ahead, by cost of a draft token\n")
    table(["", *COSTS], [[name, *(f"{x:.2f}" for x in row.values())] for name, row in gains.items()])
    return gains


@dataclass
class Text:
    """An answer of the target, and what the models say at each of its tokens."""

    prompt: list[int]
    tokens: list[int]
    sampling: Sampling
    p: mx.array  # [T, V] logits of the target

    def rank(self, logits: mx.array, sampling: Sampling) -> list[list[int]]:
        """Return the tokens [T, RANKED] that are most probably drawn."""
        sampler = sampling.sampler(len(self.prompt), logits.shape[1]).drafting
        ranked = sampler.rank(logits, self.prompt, mx.array(self.tokens[:-1], dtype=mx.int32), RANKED)
        found: list[list[int]] = ranked.tolist()
        return found


Guesses = tuple[list[int], list[int], list[list[int]]]  # tokens of the text, drafted tokens, ranked guesses


def walk(guesses: Sequence[Guesses], mean: float) -> tuple[float, float]:
    """Return the acceptance of a draft token, and the share of drafts whose outcome was guessed."""
    same = [t == d for text, drafted, _ in guesses for t, d in zip(text, drafted, strict=True)]
    counts, hits = fan_out(K, sum(same) / len(same), mean), list[bool]()
    for text, drafted, ranked in guesses:
        place = 0
        while place + K < len(text):
            k = next((k for k in range(K) if text[place + k] != drafted[place + k]), K)
            others = [t for t in ranked[place + k] if k == K or t != drafted[place + k]]
            hits.append(text[place + k] in others[: counts[k]])
            place += k + 1
    return sum(same) / len(same), sum(hits) / len(hits)


def guess(texts: Sequence[Text], logits: Sequence[mx.array], noise: bool) -> list[Guesses]:
    """Return the drafts of a drafter with these logits, and its guesses."""
    found = []
    for text, q in zip(texts, logits, strict=True):
        ranked = text.rank(q, text.sampling)
        guesses = ranked if noise else text.rank(q, replace(text.sampling, seed=None))
        found.append((text.tokens, [row[0] for row in ranked], guesses))
    return found


def simulated(texts: Sequence[Text], acceptance: float) -> list[Guesses]:
    """Return what a drafter guesses whose logits are the target's with Gaussian noise, as often accepted."""
    low, high = 0.0, 8.0  # deviation of the noise
    for _ in range(8):
        mx.random.seed(1)
        middle = (low + high) / 2
        found = guess(texts, [t.p + middle * mx.random.normal(t.p.shape) for t in texts], True)
        low, high = (middle, high) if walk(found, 1)[0] > acceptance else (low, middle)
    return found


def measure_hits(target: str, prompts: int, tokens: int) -> dict[str, list[float]]:
    """Print and return hit rates by fan-out."""
    pair = load(target, "none")
    model, rates = pair._model, dict[str, list[float]]()
    layers, questions = list(model.model.layers), PROMPTS.read_text().splitlines()[:prompts]
    for temperature in (0.0, 0.8):
        texts, logits = list[Text](), {dropped: list[mx.array]() for dropped in DROPPED}
        for question in questions:
            prompt, sampling = pair.tokenizer.encode(CHAT.format(question)), Sampling(temperature, seed=1)
            text = [t for r in pair.generate(prompt, sampling=sampling, max_tokens=tokens) for t in r.tokens]
            for dropped in (0, *DROPPED):
                middle = (len(layers) - dropped) // 2
                model.model.layers = layers[:middle] + layers[middle + dropped :]
                rows = model(mx.array([prompt + text]))[0, len(prompt) - 1 : -1].astype(mx.float32)
                mx.eval(rows)
                if dropped:
                    logits[dropped].append(rows)
                else:
                    texts.append(Text(prompt, text, sampling, rows))
            model.model.layers = layers
        for dropped, rows_of in logits.items():
            ours = guess(texts, rows_of, True)
            acceptance = walk(ours, 1)[0]
            arms = {"noise": ours, "simulated": simulated(texts, acceptance)}
            if temperature:
                arms["top q"] = guess(texts, rows_of, False)
            for arm, found in arms.items():
                name = f"T = {temperature}, {len(layers) - dropped} of {len(layers)} layers, {arm}"
                rates[name] = [walk(found, 1)[0], *(walk(found, mean)[1] for mean in FAN_OUTS)]
    print("Measured hit rates by fan-out\n")
    shown = [[name, *(f"{x:.2f}" for x in row)] for name, row in rates.items()]
    table(["", "accepted", *FAN_OUTS], shown)
    return rates


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3, help="sessions, from --seed on")
    options.add_argument("--answers", type=int, default=4, help="of a session on the virtual clock")
    options.add_argument("--target", default="smollm2", help="for hit rates; empty: none")
    options.add_argument("--prompts", type=int, default=6)
    options.add_argument("--tokens", type=int, default=64, help="of an answer")
    settings = options.parse_args()
    started = time.time()
    quick = settings.quick
    seeds = range(settings.seed, settings.seed + (1 if quick else settings.seeds))
    gains = simulate(*((1, 100) if quick else (settings.answers, 400)), seeds)
    gated = [x for name, row in gains.items() if name.endswith("gate") for x in row.values()]
    found = {
        "own machine, cost 0.2, K = 4": gains["own machine, 2 ms, K = 4"]["0.2"],
        "worst with the gate": min(gated),
    }
    broken = [name for name, floor in FLOORS.items() if found[name] < floor and not quick]
    for name in broken:
        print(f"broken floor: {name} is {found[name]:.4f}, it must be {FLOORS[name]} or more")
    sizes = (1, 16) if quick else (settings.prompts, settings.tokens)
    hits = measure_hits(settings.target, *sizes) if settings.target else {}
    finish("ahead", {"gains": gains, "floors": found, "hits": hits}, settings, started)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
