"""What does lookup gain by earlier answers: in requests to a model, and in recorded conversations?

There are two series of similar requests: for JSON of one schema, and for edits of one file. The arms answer
each request in turns of a few tokens. "One belief" is lookup with one acceptance estimate for all matches of
two tokens and more, "ranges" has an estimate for each range of match lengths, "earlier" also copies from
earlier answers. All are compared to plain decoding of the same request; texts must be equal.

`--recorded FILE` replays conversations from a file of NumPy (npz) with NAME_tokens, NAME_is_answer and
NAME_session, one entry for each token. A draft token counts as accepted if the recorded text has it. Speeds
are SIMULATED with published costs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from timing import finish, interval, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.virtual_clock import CURVES, PLAIN_SECONDS, Device, decode

from mlx_spec import load
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.earlier import MAX_TOKENS, TAIL, TextRing
from mlx_spec.drafters.lookup import RANGES, Lookup, lookup_source
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import Features

BURST = 8  # tokens of a turn
K = 16
CITIES = "Lisbon Osaka Nairobi Quito Tallinn Perth Oslo Cusco Hanoi Accra Porto Kyoto".split()
SCHEMA = {
    "type": "object",
    "properties": {
        "city_name": {"type": "string", "maxLength": 20},
        "country_name": {"type": "string", "maxLength": 20},
        "population_in_thousands": {"type": "integer", "minimum": 0, "maximum": 99999},
        "is_a_capital_city": {"type": "boolean"},
        "recommended_month": {"enum": ["January", "April", "July", "October"]},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])
EDITS = "timeout retries address port name folder limit delay level mode user token".split()
SOURCE = """def connect(address, port=8080, timeout=10, retries=3):
    for attempt in range(retries):
        try:
            return open_connection(address, port, timeout)
        except OSError as error:
            log("attempt %d of %d failed: %s", attempt + 1, retries, error)
    raise ConnectionError(f"{address}:{port} does not answer within {timeout} s")
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", default="smollm2")
    options.add_argument("--requests", type=int, default=8, help="of each series, at most 12")
    options.add_argument("--tokens", type=int, default=100, help="of an answer, at most")
    options.add_argument("--recorded", type=Path, help="replay the conversations of this file instead")
    options.add_argument("--curves", nargs="*", default=["M1 Ultra", "M3 Max", "M5 Max"])
    settings = options.parse_args()
    if settings.quick:
        settings.requests, settings.tokens = 2, 12
    started = time.time()
    results = ask(settings) if settings.recorded is None else replay(settings)
    finish("lookup", results, settings, started)


# --- requests to a model


@dataclass
class Arm:
    pair: Pair
    key: str | None = None


def arms_of(pair: Pair) -> dict[str, Arm]:
    """Return the arms by name: each with its own policy and earlier answers, on one copy of the weights."""
    assert isinstance(pair.policies, AdaptivePolicies) and pair.policies.costs is not None
    costs = pair.policies.costs.table()

    def made(source: DrafterSource) -> Pair:
        policies = AdaptivePolicies(source.names, source.names)
        policies.use(type(costs)(costs.plain, costs.verify, costs.draft[:1] * len(source.names), costs.host))
        return pair.with_drafters([source], policies)

    today = DrafterSource("lookup", Lookup.needs, lambda parts: Lookup())
    return {
        "plain": Arm(pair.with_drafters([], FixedPolicy(0))),
        "one belief": Arm(made(today)),
        "ranges": Arm(made(lookup_source())),
        "earlier": Arm(made(lookup_source()), "series"),
    }


def ask(settings: argparse.Namespace) -> dict[str, Any]:
    """Answer two series of requests. Return the figures of each arm."""
    pair = load(settings.target, "lookup")
    schema = compile_grammar(
        "json_schema", json.dumps(SCHEMA), pair.tokenizer, pair.info.vocab_size, seconds=30.0
    )
    texts = {
        "JSON of one schema": (f"Describe the city {city} as JSON." for city in CITIES),
        "edits of one file": (
            f"Rename {e} to new_{e}. Answer with the file.\n```\n{SOURCE}```" for e in EDITS
        ),
    }
    found: dict[str, Any] = {}
    for name, series in texts.items():
        sampling, arms = Sampling(grammar=schema if name.startswith("JSON") else None), arms_of(pair)
        runs: dict[str, list[list[tuple[list[int], float]]]] = {arm: [] for arm in arms}
        for i, text in zip(range(settings.requests), series, strict=False):
            prompt = pair.tokenizer.prompt([{"role": "user", "content": text}])
            for arm, steps in in_turns(arms, prompt, sampling, settings.tokens, i).items():
                runs[arm].append(steps)
            print(f"{name}: {i + 1} of {settings.requests}", file=sys.stderr, flush=True)
        found[name] = {arm: figures(done, runs["plain"], settings.seed) for arm, done in runs.items()}
        rows = [[arm, *each.values()] for arm, each in found[name].items()]
        table([name, "tokens", "a round", "of the first half", "times plain", "other texts"], rows)
        print()
    return found


def in_turns(
    arms: dict[str, Arm], prompt: list[int], sampling: Sampling, count: int, start: int
) -> dict[str, list[tuple[list[int], float]]]:
    """Return the rounds of each arm, with their seconds. The prompt is read before the first turn."""
    names = list(arms)
    running: dict[str, Iterator[Any]] = {}
    for name, arm in arms.items():
        sequence = arm.pair.prepare(arm.pair.open(), prompt, sampling=sampling, max_tokens=count, key=arm.key)
        for _ in sequence.prefill():
            pass
        running[name] = rounds_of(sequence)
    done: dict[str, list[tuple[list[int], float]]] = {name: [] for name in names}
    turn = start
    while running:
        for name in (names[turn % len(names) :] + names[: turn % len(names)])[:: 1 - 2 * (turn % 2)]:
            written = 0
            while name in running and written < BURST:
                begun = time.perf_counter()
                if (tokens := next(running[name], None)) is None:
                    del running[name]
                    break
                done[name].append((tokens, time.perf_counter() - begun))
                written += len(tokens)
        turn += 1
    return done


def rounds_of(sequence: Any) -> Iterator[list[int]]:
    from mlx_spec.decode.loop import decode as decoded

    for round in decoded(sequence):
        yield round.tokens


def figures(
    runs: Sequence[list[tuple[list[int], float]]], plain: Sequence[list[tuple[list[int], float]]], seed: int
) -> dict[str, Any]:
    """Return tokens, tokens a round, the gain over plain decoding, and how many texts differ from it."""

    def texts(runs: Sequence[list[tuple[list[int], float]]]) -> list[list[int]]:
        return [[token for tokens, _ in steps for token in tokens] for steps in runs]

    def a_round(runs: Sequence[list[tuple[list[int], float]]]) -> float:
        return round(sum(map(len, texts(runs))) / max(sum(map(len, runs)), 1), 3)

    seconds = [[sum(s for _, s in steps) for steps in each] for each in (plain, runs)]
    gain = interval([[a / b] for a, b in zip(*seconds, strict=True)], seed)
    return {
        "tokens": sum(map(len, texts(runs))),
        "a round": a_round(runs),
        "first half": a_round(runs[: (len(runs) + 1) // 2]),
        "gain": [round(value, 2) for value in gain],
        "other texts": sum(a != b for a, b in zip(texts(runs), texts(plain), strict=True)),
    }


# --- recorded conversations


@dataclass
class Recorded:
    """What an arm drafted at every position: the tokens, how many of the first were right, the match."""

    drafted: list[int]
    right: list[int]
    match: list[int]
    microseconds: list[float]
    added: list[tuple[list[int], float]]  # a text that was entered, and the seconds of that
    ring: TextRing | None


@dataclass
class Replayed:
    """The drafts of one answer whose matches are in a range."""

    recorded: Recorded
    start: int
    count: int
    low: int
    high: int

    def draft(self, place: int, limit: int, device: Device) -> Sequence[bool]:
        at = self.start + place - 1
        if place > self.count or not self.low <= self.recorded.match[at] <= self.high:
            return ()
        size = min(self.recorded.drafted[at], limit)
        right = min(self.recorded.right[at], size)
        return [True] * right + [False] * (size - right)


def replay(settings: argparse.Namespace) -> dict[str, Any]:
    """Draft at every position of recorded answers. Return tokens a round, speeds and costs."""
    file, found = np.load(settings.recorded), dict[str, Any]()
    names = [name.removesuffix("_tokens") for name in file if name.endswith("_tokens")]
    for name in names:
        sessions = read(*(file[f"{name}_{part}"] for part in ("tokens", "is_answer", "session")))
        sessions = sessions[:3] if settings.quick else sessions
        lengths = [len(text) for session in sessions for is_answer, text in session if is_answer]
        arms = {
            "one belief": (record(sessions, 2, None), {"": (2, 32)}),
            "ranges": (record(sessions, 1, None), RANGES),
            "earlier": (record(sessions, 1, TextRing(MAX_TOKENS)), RANGES),
        }
        found[name] = {arm: described(*each, lengths, settings.curves) for arm, each in arms.items()}
        rows = [[arm, *each.values()] for arm, each in found[name].items()]
        table([f"{name}, {sum(lengths)} tokens", *next(iter(found[name].values()))], rows)
        print()
    return found


def read(tokens: Any, is_answer: Any, session: Any) -> list[list[tuple[bool, list[int]]]]:
    """Return for each session its texts in order, and whether each is an answer."""
    found = []
    for number in range(int(session.max()) + 1):
        places = np.flatnonzero(session == number)
        parts = np.split(places, np.flatnonzero(np.diff(is_answer[places].astype(int))) + 1)
        found.append([(bool(is_answer[part[0]]), tokens[part].tolist()) for part in parts])
    return found


def record(sessions: Sequence[Any], min_match: int, ring: TextRing | None) -> Recorded:
    found = Recorded([], [], [], [], [], ring)
    sampler = Sampling().sampler(1, 1)
    for session in sessions:
        lookup, history = Lookup(min_match), list[int]()
        lookup.copy_from(ring)
        for is_answer, text in session:
            tail = history[-TAIL:]
            for i, token in enumerate(text if is_answer else ()):
                begun = time.thread_time()
                match = lookup.available(history)
                found.microseconds.append(1e6 * (time.thread_time() - begun))
                draft = lookup.draft(history, K, sampler).tokens.tolist()
                pairs = enumerate(zip(draft, text[i:], strict=False))
                right = next((j for j, (a, b) in pairs if a != b), min(len(draft), len(text) - i))
                found.drafted.append(len(draft))
                found.right.append(right)
                found.match.append(match if draft else 0)
                history.append(token)
            if not is_answer:
                history += text
                lookup.observe(history, Features())
            elif ring is not None:
                begun = time.thread_time()
                ring.add([*tail, *text])
                found.added.append(([*tail, *text], time.thread_time() - begun))
    return found


def described(
    recorded: Recorded, ranges: dict[str, tuple[int, int]], lengths: Sequence[int], curves: Sequence[str]
) -> dict[str, Any]:
    rounds, start = 0, 0
    for length in lengths:
        place, end = start, start + length
        while place < end:
            place += min(recorded.right[place], max(min(recorded.drafted[place], end - place - 1), 0)) + 1
            rounds += 1
        start = end
    result: dict[str, Any] = {f"a round, K = {K}": round(start / rounds, 3)}
    result |= {curve: round(speed(recorded, ranges, lengths, curve), 3) for curve in curves}
    low, high = np.percentile(recorded.microseconds, (50, 99))
    seconds = [each for _, each in recorded.added]
    return result | {
        "us a draft, median and 99 %": f"{low:.0f}, {high:.0f}",
        "us a token entered": round(entering([text for text, _ in recorded.added]), 2) if seconds else "",
        "longest, ms": round(1e3 * max(seconds), 1) if seconds else "",
        "MB": round(recorded.ring.nbytes / 1e6, 1) if recorded.ring else "",
    }


def entering(texts: Sequence[list[int]]) -> float:
    """Return the microseconds of the thread for a token of texts that enter a ring that is full."""
    ring, other = TextRing(MAX_TOKENS), np.random.default_rng(0)
    for _ in range(MAX_TOKENS // 1000):
        ring.add(other.integers(0, 50_000, 1000, dtype=np.int32))
    begun = time.thread_time()
    for text in texts:
        ring.add(text)
    return 1e6 * (time.thread_time() - begun) / sum(map(len, texts))


def speed(
    recorded: Recorded, ranges: dict[str, tuple[int, int]], lengths: Sequence[int], curve: str
) -> float:
    """Return the speed over plain decoding with the adaptive policy."""
    device = Device(CURVES[curve], 0.03, [0, 7])
    policies = AdaptivePolicies(list(ranges), list(ranges))
    policies.use(CURVES[curve].table([0.0] * len(ranges)))
    policy, start = policies.policy(device.clock), 0
    plain = taken = 0.0
    for length in lengths:
        drafters = [Replayed(recorded, start, length, *each) for each in ranges.values()]
        taken += decode(policy, device, drafters, length).seconds / PLAIN_SECONDS
        plain += length + CURVES[curve].host
        start += length
    return plain / taken


if __name__ == "__main__":
    main()
