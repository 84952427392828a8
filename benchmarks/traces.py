"""Does the draft length fit real text, and would it pay to read the drafter's confidence?

Records: the target answers the prompts of prompts/traces greedily, and at every position every drafter drafts
`--depth` tokens. A line of the record is one answer. For each position and drafter it says which draft tokens
the target would accept, and the drafter's probability of each ("confidence"; drafters such as lookup have
none). It also has the target's probability of its token. `--record FILE` keeps the record; `--replay FILE`
reads it and needs no model.

Replays: the rounds of the recorded answers on the published cost curves of tests/support/virtual_clock.py.
All times there are SIMULATED. The arms are the adaptive policy with all drafters, every fixed K of the first
drafter, and the adaptive policy with drafts that are cut where their confidences say that further rows do not
pay. Confidences are calibrated on the other half of the answers. In "for nothing" the host knows the
confidences at no cost; with "a wait" it reads them before the pass. Each of the two also drafts up to two
tokens more than decided; the better variant counts. The policy should read confidences if the arm with a wait
gains `PAYS` or more on two Mac curves. Where the policy does not draft, no confidence is read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import mlx.core as mx
import numpy as np
from arms import PROMPTS, Prompt, read_prompts
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.virtual_clock import CURVES, PLAIN_SECONDS, Device, VirtualDrafter, decode

from mlx_spec import load
from mlx_spec.decode.running import prefill
from mlx_spec.drafters.lookup import RANGES
from mlx_spec.hub import find
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.hub.names import locate
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.softmax import log_total
from mlx_spec.types import Sampler

MACS = ("M1 Ultra", "M3 Max", "M4 Pro", "M5 Max")
PAYS = 0.02  # the least gain for which the policy should read confidences
NOISE = 0.03  # deviation of the log of the time of one piece of work
BINS = np.linspace(0, 1, 11)  # of confidences that are calibrated together
LONGER = (0, 2)  # draft tokens beyond the decided ones that may be drafted and cut
PRIOR = 4.0  # tokens with the mean acceptance in each bin


@dataclass
class Drafts:
    """What one drafter drafted at every position of an answer."""

    right: list[list[bool]] = field(default_factory=list)
    confidence: list[list[float]] = field(default_factory=list)


@dataclass
class Trace:
    """One recorded answer."""

    kind: str
    drafts: dict[str, Drafts]  # by drafter, in the order of the pair
    top: list[float]  # the target's probability of its tokens

    def to_json(self) -> dict[str, Any]:
        drafts = {name: vars(found) for name, found in self.drafts.items()}
        return {"kind": self.kind, "drafts": drafts, "top": self.top}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Trace:
        return cls(row["kind"], {name: Drafts(**found) for name, found in row["drafts"].items()}, row["top"])


def main() -> None:
    settings = arguments()
    started = time.time()
    if settings.replay:
        traces = [Trace.from_json(json.loads(line)) for line in settings.replay.read_text().splitlines()]
    else:
        traces = record(settings)
    if settings.record:
        settings.record.write_text("".join(json.dumps(trace.to_json()) + "\n" for trace in traces))
    results = {"acceptance": acceptance(traces, settings.depth), **replay(traces, settings)}
    finish("traces", results, settings, started)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--target", default="smollm2")
    options.add_argument("--drafter", help="left out: the target's own")
    options.add_argument("--prompts", type=Path, default=PROMPTS / "traces")
    options.add_argument("--per-kind", type=int, default=4)
    options.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    options.add_argument("--depth", type=int, default=8, help="draft tokens at every position")
    options.add_argument("--drafted", type=float, help="cost of a draft token in plain tokens", default=0.06)
    options.add_argument("--seeds", type=int, default=8, help="of the noise of the clock")
    options.add_argument("--record", type=Path, help="file to write, one JSON line an answer")
    options.add_argument("--replay", type=Path, help="file to read in place of running a model")
    settings = options.parse_args()
    if settings.quick:
        settings.per_kind, settings.tokens, settings.seeds, settings.depth = 1, 16, 1, 4
    settings.kinds, settings.least = ["chat", "edit"] if settings.quick else None, 1
    return settings


# --- recording


class Watching:
    """A greedy sampler that keeps how probable each drawn token was."""

    def __init__(self, vocab_size: int) -> None:
        self._sampler: Sampler = Sampling().sampler(0, vocab_size)
        self.seen: list[mx.array] = []

    @property
    def drafting(self) -> Watching:
        return self

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        wide = logits.astype(mx.float32)
        self.seen.append(mx.exp(wide.max(axis=-1) - log_total(wide)[..., 0]))
        return self._sampler.draw(logits, history, drafted)

    def take(self) -> list[float]:
        """Return the probabilities since the last call."""
        found = [round(float(value), 4) for array in self.seen for value in array.tolist()]
        self.seen.clear()
        return found


def record(settings: argparse.Namespace) -> list[Trace]:
    """Return the traces of all prompts, the kinds in turn."""
    pair = load(settings.target, settings.drafter)
    prompts = read_prompts(settings, pair, find(locate(PairSpec(settings.target)).target).folder)
    order = sorted(range(len(prompts)), key=lambda i: [p.kind for p in prompts[:i]].count(prompts[i].kind))
    traces = []
    for index in order:
        traces.append(record_answer(pair, prompts[index], settings.depth))
        print(f"{len(traces)} of {len(prompts)}: {prompts[index].kind}", file=sys.stderr, flush=True)
    return traces


def record_answer(pair: Pair, prompt: Prompt, depth: int) -> Trace:
    """Decode plainly, and draft at every position."""
    parts, watching, history = pair.open(), Watching(pair.info.vocab_size), list(prompt.tokens)
    for _ in prefill(parts.target, parts.drafters, text_prompt(history)):
        pass
    drafted: list[list[list[int]]] = [[] for _ in parts.drafters]
    found = [Drafts() for _ in parts.drafters]
    top: list[float] = []
    for _ in range(prompt.count):
        for drafter, tokens, kept in zip(parts.drafters, drafted, found, strict=True):
            draft = drafter.draft(history, depth, watching)
            tokens.append(draft.tokens.tolist() if draft.parents is None else [])
            kept.confidence.append(watching.take())
        logits = parts.target.verify(mx.array(history[-1:], dtype=mx.int32))
        token = watching.draw(logits, history, mx.array([], dtype=mx.int32))[0]
        history += token.tolist()
        top += watching.take()
        features = parts.target.commit(1)
        for drafter in parts.drafters:
            drafter.observe(history, features)
    answer = history[len(prompt.tokens) :]
    for tokens, kept in zip(drafted, found, strict=True):
        kept.right = [
            [token == truth for token, truth in zip(draft, answer[place:], strict=False)]
            for place, draft in enumerate(tokens)
        ]
    names = dict(zip(pair.policies.names, found, strict=True))
    return Trace(prompt.kind, {name: kept for name, kept in names.items() if any(kept.right)}, top)


# --- acceptance


def acceptance(traces: list[Trace], depth: int) -> dict[str, Any]:
    """Print and return tokens a round at K = 4 and acceptance by position, for each kind and drafter."""
    rows, found = [], {}
    for name in dict.fromkeys(name for trace in traces for name in trace.drafts):
        for kind in dict.fromkeys(trace.kind for trace in traces):
            drafts = [t.drafts[name] for t in traces if t.kind == kind and name in t.drafts]
            whole = [right for d in drafts for right in d.right[: len(d.right) - depth] if right]
            runs = [_run(right) for right in whole]  # of drafts that the answer does not cut
            if not runs:
                continue
            by_position = [mean(run > k for run in runs) for k in range(depth)]
            a_round = 1 + mean(min(run, 4) for run in runs)
            found[f"{name}, {kind}"] = {"K=4": round(a_round, 3), "reach": [round(x, 3) for x in by_position]}
            rows.append([name, kind, f"{a_round:.2f}", *(f"{x:.2f}" for x in by_position)])
    table(["drafter", "kind", "tokens at K=4", *(f"{k + 1} accepted" for k in range(depth))], rows)
    return found


def _run(right: Sequence[bool]) -> int:
    return next((i for i, good in enumerate(right) if not good), len(right))


# --- replays


@dataclass
class Replayed:
    """A drafter of a recorded answer."""

    drafts: Drafts
    free: bool  # drafting takes no time
    cut: Cut | None = None

    def draft(self, place: int, limit: int, device: Device) -> Sequence[bool]:
        """Return whether each token is right, and take the device's time for it."""
        known = place - 1 < len(self.drafts.right)
        right = self.drafts.right[place - 1] if known else []
        if self.free or self.cut is None:
            right = right[:limit]
            if not self.free and right:
                device.submit(device.curve.drafted * len(right))
            return right
        right = right[: limit + self.cut.longer]
        if not right:
            return ()
        done = device.submit(device.curve.drafted * len(right))
        if self.cut.waits:
            device.read(done)
        return right[: self.cut.rows(self.drafts.confidence[place - 1][: len(right)], device)]


@dataclass
class Cut:
    """Cuts drafts where further rows do not pay by their confidences."""

    calibrated: np.ndarray  # acceptance by bin of confidence
    waits: bool
    longer: int

    def rows(self, confidence: Sequence[float], device: Device) -> int:
        """Return the draft tokens to verify: those that give the most tokens a second."""
        chances = self.calibrated[np.clip(np.digitize(confidence, BINS) - 1, 0, len(BINS) - 2)]
        tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(chances))])
        spent = device.curve.drafted * len(confidence)
        seconds = [device.passes[rows + 1] + device.curve.host + spent for rows in range(len(tokens))]
        return int(np.argmax(tokens / np.array(seconds)))


def calibration(traces: Sequence[Trace], name: str) -> np.ndarray:
    """Return the acceptance of tokens after accepted ones, by bin of confidence."""
    good, all_ = np.zeros(len(BINS) - 1), np.zeros(len(BINS) - 1)
    for trace in traces:
        if name not in trace.drafts:
            continue
        drafts = trace.drafts[name]
        for right, confidence in zip(drafts.right, drafts.confidence, strict=True):
            for value, hit in zip(confidence, right[: _run(right) + 1], strict=False):
                place = min(int(np.digitize(value, BINS)) - 1, len(BINS) - 2)
                good[place] += hit
                all_[place] += 1
    average = good.sum() / max(all_.sum(), 1)
    return np.asarray((good + PRIOR * average) / (all_ + PRIOR))


def replay(traces: list[Trace], settings: argparse.Namespace) -> dict[str, Any]:
    """Print and return the speeds of all arms over plain decoding, by curve and kind."""
    names = list(dict.fromkeys(name for trace in traces for name in trace.drafts))
    kinds = list(dict.fromkeys(trace.kind for trace in traces))
    halves = [calibration(traces[side::2], names[0]) for side in (0, 1)]
    results: dict[str, Any] = {}
    for curve in CURVES:
        arms = {"adaptive": speeds(traces, names, curve, settings)}
        for k in range(1, settings.depth + 1):
            arms[f"K={k}"] = speeds(traces, names[:1], curve, settings, fixed=k)
        for waits, label in ((False, "for nothing"), (True, "a wait")):
            found = [
                speeds(traces, names, curve, settings, cut=[Cut(half, waits, n) for half in halves[::-1]])
                for n in LONGER
            ]
            arms[f"cut, {label}"] = max(found, key=lambda speed: _mean(speed.values()))
        results[curve] = {arm: {**speed, "all": _mean(speed.values())} for arm, speed in arms.items()}
    rows = []
    for curve, arms in results.items():
        for kind in [*kinds, "all"]:
            best = max(range(1, settings.depth + 1), key=lambda k: arms[f"K={k}"][kind])
            gains = [
                arms[f"cut, {label}"][kind] / arms["adaptive"][kind] for label in ("for nothing", "a wait")
            ]
            cells = [arms["adaptive"][kind], arms[f"K={best}"][kind], *gains]
            rows.append([curve, kind, *(f"{x:.3f}" for x in cells[:1]), f"{cells[1]:.3f} (K={best})"])
            rows[-1] += [f"{gain:.3f}" for gain in gains]
    print("\nSIMULATED: speed over plain decoding, and with confidence over adaptive\n")
    table(["curve", "kind", "adaptive", "best fixed", "confidence, for nothing", "confidence, a wait"], rows)
    paying = [
        c for c in MACS if results[c]["cut, a wait"]["all"] >= (1 + PAYS) * results[c]["adaptive"]["all"]
    ]
    print(f"reading confidence pays on {len(paying)} of {len(MACS)} Macs: {', '.join(paying) or 'none'}\n")
    return {"simulated": True, "curves": results, "confidence pays on": paying}


def speeds(
    traces: list[Trace],
    names: list[str],
    curve: str,
    settings: argparse.Namespace,
    *,
    fixed: int | None = None,
    cut: list[Cut] | None = None,
) -> dict[str, float]:
    """Return the speed over plain decoding by kind, over all seeds."""
    steps: dict[str, float] = {}
    plain: dict[str, float] = {}
    costs = type(CURVES[curve])(CURVES[curve].passes, settings.drafted, CURVES[curve].host)
    for seed in range(settings.seeds):
        device = Device(costs, NOISE, [seed, 7])
        policy: Any
        if fixed is None:
            policies = AdaptivePolicies(names, copying=[name for name in names if name in RANGES])
            policies.use(costs.table([0.0 if name in RANGES else 1.0 for name in names]))
            policy = policies.policy(device.clock)
        else:
            policy = FixedPolicy(fixed)
        for index, trace in enumerate(traces):
            own = cut[index % 2] if cut else None
            drafters: list[VirtualDrafter] = [
                Replayed(trace.drafts.get(name, Drafts()), name in RANGES, own if name == names[0] else None)
                for name in names
            ]
            answer = decode(policy, device, drafters, len(trace.top))
            steps[trace.kind] = steps.get(trace.kind, 0.0) + answer.seconds / PLAIN_SECONDS
            plain[trace.kind] = plain.get(trace.kind, 0.0) + len(trace.top) + costs.host
    return {kind: plain[kind] / steps[kind] for kind in steps}


def _mean(values: Any) -> float:
    return math.exp(mean(math.log(value) for value in values))


if __name__ == "__main__":
    main()
