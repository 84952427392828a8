"""How many tokens of agents' prompts are read again, over the least that is possible?

A session is a list of requests: the tokens of each prompt and answer, and how many tokens of it the earlier
prompts and answers have. `--log` replays recorded ones, a JSON line a request; without it, sessions are made
here: a coding agent with a title, tools, sub-agents and further questions, whose template leaves earlier
thinking out. Texts are random numbers: only what they share counts. Prefix cache, targets and caches are the
product's. The model computes nothing: its caches have the shapes of real models, `SCALE` times smaller, so a
place of windows or states costs as many tokens of K and V as in that model.

A server may keep the bytes of 8, or 2, conversations as long as the longest of the session, without places.
"Restart" drops all that is in memory before each further question. Nothing is timed.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.pairs import TOKENIZER
from support.tiny import VOCAB

from mlx_spec.apps.server.engine.prefix_cache import PrefixCache
from mlx_spec.apps.server.engine.prefix_files import CacheFolder, PrefixFiles
from mlx_spec.decode.running import prefill
from mlx_spec.pair import Pair, PairInfo
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.tokenizer import Tokenizer

FULL_BYTES = 32  # of a token in full attention


@dataclass(frozen=True)
class Shape:
    """The caches of a model that go beside full attention."""

    window: int | None  # tokens; None without windows
    place_tokens: int  # whose K and V in full attention take as many bytes as the windows or states
    kv_bytes: int  # K and V of a token in the layers with full attention


# From the configurations of the models, K and V in 16 bits, states in 32 bits: see RESULTS.md.
SHAPES = {
    "full attention": Shape(None, 0, 131072),
    "Gemma 4 E4B": Shape(512, 1280, 16384),
    "Gemma 4 26B-A4B": Shape(1024, 10240, 20480),
    "Gemma 4 12B": Shape(1024, 20480, 16384),
    "gpt-oss 20B": Shape(128, 128, 24576),
    "Qwen3.5 9B": Shape(None, 1572, 32768),
}


class Layer(nn.Module):
    """Writes rows or a state, and computes nothing."""

    def __init__(self, state: int, head_dim: int) -> None:
        super().__init__()
        self.numbers, self.head_dim = state, head_dim

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        """Return [1, T, 1], and write T rows, or a state that counts them."""
        if self.numbers:
            last = mx.zeros((1, self.numbers)) if cache[0] is None else cache[0]
            cache[0] = last + x.shape[1]
            return x + cache[0][:, :1, None]
        rows = mx.broadcast_to(x[:, None], (1, 1, x.shape[1], self.head_dim))
        keys, _ = cache.update_and_fetch(rows, rows)
        return x + 0 * keys[:, 0, -x.shape[1] :, :1]


class Model(nn.Module):
    """A model with the caches of a shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        own = FULL_BYTES * shape.place_tokens // 4  # floats of a window or a state
        head_dim = own // shape.window // 2 if shape.window else 0
        self._shape = shape
        self.embed_tokens, self.norm = nn.Embedding(VOCAB, 1), nn.Identity()
        self.layers = [Layer(0, FULL_BYTES // 8)]
        if own:
            self.layers.insert(0, Layer(0 if shape.window else own, head_dim))
        self.lm_head = nn.Linear(1, VOCAB)

    def make_cache(self) -> list[Any]:
        """Return mlx-lm's caches."""
        window = [RotatingKVCache(self._shape.window)] if self._shape.window else [ArraysCache(1)]
        return [*window[: len(self.layers) - 1], KVCache()]

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return logits [1, T, V]."""
        x = tokens[..., None].astype(mx.float32)
        for layer, its_cache in zip(self.layers, cache, strict=True):
            x = layer(x, its_cache)
        return mx.broadcast_to(x, (*tokens.shape, VOCAB))


def pair_of(shape: Shape) -> Pair:
    """Return a target of this shape, and nothing that drafts."""
    info = PairInfo("shape", None, VOCAB, None, 0, 0)
    return Pair(info, Tokenizer(TOKENIZER, None, ()), Model(shape), [], FixedPolicy(0))


# --- sessions


@dataclass(frozen=True)
class Request:
    """The numbers of a request, as logs have them."""

    prompt: int
    answer: int
    ideal: int  # tokens of the prompt that an earlier prompt with its answer has
    best: int  # the number of that request; -1 for none
    turns: tuple[int, ...] = ()


def recorded(path: Path) -> list[Request]:
    """Return the requests of a log, with the places of turns that these numbers tell.

    A prompt that does not go on where an earlier answer ended asks a question. Its last turn ends 6 tokens of
    the template before its end. If the next prompt is as long and parts from it, both are sub-agents whose
    system prompts end there. Logs count at most all but 2 tokens of a prompt as shared: one that is as long
    as the best prompt before is that prompt again.
    """
    found, lines = list[Request](), [json.loads(line) for line in path.read_text().splitlines()]
    for r, following in zip(lines, [*lines[1:], {"best": -1}], strict=True):
        best = r["best"] if r["ideal"] else -1
        before = found[best] if best >= 0 else None
        repeats = before is not None and r["ideal"] + 2 == r["prompt"] == before.prompt
        goes_on = before and r["ideal"] >= before.prompt - 1 and r["prompt"] > before.prompt + 8
        if before and (repeats or goes_on):
            turns = before.turns
        else:
            inherited = [t for t in (before.turns if before else ()) if t < r["ideal"]]
            is_twin = following["best"] == len(found) and abs(following["prompt"] - r["prompt"]) < 64
            turns = (*inherited, *([following["ideal"] - 1] if is_twin else []), r["prompt"] - 6)
        ideal = r["ideal"] + 2 * repeats
        found.append(Request(r["prompt"], max(r["answer"], 1), ideal, best, turns))
    return found


def made(seed: int) -> list[Request]:
    """Return the requests of a coding agent: a title, steps with tools, two sub-agents twice, 3 questions.

    The sub-agents' prompt parts from the agent's inside the system prompt. A further question parts from the
    prompts before at the first answer after the last question, where thinking is left out.
    """
    draw, found = random.Random(seed), list[Request]()
    system, parting, template = draw.randrange(6000, 12000), draw.randrange(2500, 5000), 6

    def ask(prompt: int, ideal: int, best: int, turns: tuple[int, ...]) -> int:
        found.append(Request(prompt, draw.randrange(40, 400), ideal, best, turns))
        return len(found) - 1

    def step(before: int) -> int:  # the result of a tool follows
        last = found[before]
        held = last.prompt + last.answer - 1
        return ask(held + draw.randrange(60, 1800), held, before, last.turns)

    ask(draw.randrange(400, 700), 0, -1, ())  # the title
    end = system + draw.randrange(30, 300)
    main = ask(end + template, 3, 0, (system, end))
    for question in range(3):
        for _ in range(draw.randrange(2, 5)):
            main = step(main)
        if question < 2:
            low, subs = parting + draw.randrange(3000, 5000), list[int]()
            for i in range(2):  # in turns
                size = low + draw.randrange(60, 300)
                best = subs[0] if subs else next((j for j, r in enumerate(found) if low in r.turns), 1)
                subs.append(ask(size + template, low if i or best > 1 else parting, best, (low, size)))
            for _ in range(3):
                subs = [step(sub) for sub in subs]
            main = step(main)
        start = max(t for t in found[main].turns if t > system)  # all after it is thinking and answers
        end = start + draw.randrange(400, 2500)
        if question < 2:
            main = ask(end + template, start + 4, main, (system, start, end))
    return found


# --- the replay


def texts(requests: Sequence[Request], seed: int) -> list[tuple[list[int], list[int]]]:
    """Return a prompt and an answer for each request, which share what the request says and no more."""
    rng, found = np.random.default_rng(seed), list[tuple[list[int], list[int]]]()
    for request in requests:
        head = (found[request.best][0] + found[request.best][1])[: request.ideal] if request.best >= 0 else []
        rest = rng.integers(0, 2**31, request.prompt - len(head) + request.answer).tolist()
        tokens = [*head, *rest]
        found.append((tokens[: request.prompt], tokens[request.prompt :]))
    return found


def answer(
    cache: PrefixCache, prompt: list[int], turns: tuple[int, ...], said: list[int]
) -> tuple[int, int, int]:
    """Answer a prompt. Return how many tokens were read, and how many again, by reason."""
    given = text_prompt(prompt, turns)
    sequence = cache.take(given)
    kept, target = sequence.rewind_to_prefix(given), sequence.target
    for _ in prefill(target, (), given):
        pass
    feed = [prompt[-1], *said[:-1]]
    for low in range(0, len(feed), 32):
        mx.eval(target.verify(mx.array(feed[low : low + 32], dtype=mx.int32)))
        target.commit(len(feed[low : low + 32]))
    sequence.append(said)
    cache.give_back(sequence)
    if cache.files is not None:
        cache.files.close([])  # wait: between two requests of an agent a file is written
    return len(prompt) - kept, *sequence.reread_counts()


def bytes_of_one(pair: Pair, requests: Sequence[Request]) -> int:
    """Return the bytes of the longest conversation of a session, without places."""
    longest = max(request.prompt + request.answer for request in requests)
    sequence = pair.open()
    prompt = text_prompt(range(longest + 1))
    for _ in prefill(sequence.target, (), prompt):
        pass
    target = sequence.target
    return target.nbytes - sum(target.pinned.values())


def replay(
    pair: Pair,
    requests: Sequence[Request],
    conversations: int,
    folder: Path | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Return what was read, and the least possible."""
    most, said = conversations * bytes_of_one(pair, requests), texts(requests, seed=1)
    files = None

    def begin() -> PrefixCache:
        nonlocal files
        if folder is not None:
            files = PrefixFiles(CacheFolder(folder, 10**11), {"shape": 1}, pair)
        return PrefixCache(pair.open, 64, lambda: most, files)

    cache, read, least, peak, evicted, no_place = begin(), 0, 0, 0, 0, 0
    forks = 0
    for i, (request, (prompt, output)) in enumerate(zip(requests, said, strict=True)):
        new = request.best < 0 or request.ideal < requests[request.best].prompt
        if restart and i and new:
            cache.close()
            forks += cache.counters.forks
            cache = begin()
        counts = answer(cache, prompt, request.turns, output)
        read, evicted, no_place = read + counts[0], evicted + counts[1], no_place + counts[2]
        least += request.prompt - min(request.ideal, request.prompt - 2)
        peak = max(peak, cache.nbytes)
    over = 100 * (read - least) / least
    return {
        "read": read,
        "least": least,
        "over %": round(over, 1),
        "forks": forks + cache.counters.forks,
        "evicted": evicted,
        "no place": no_place,
        "peak of limit %": round(100 * peak / most),
    }


def places(shape: Shape, tokens: int) -> dict[str, float]:
    """Return what the places of one long prompt take in the model of a shape, in MB."""
    sequence, prompt = pair_of(shape).open(), text_prompt(range(tokens), (6000, tokens - 6))
    sequence.rewind_to_prefix(prompt)
    target = sequence.target
    for _ in prefill(target, (), prompt):
        pass
    scale, pinned = shape.kv_bytes / FULL_BYTES / 1e6, sum(target.pinned.values())
    count = len(list(target.rewind_points))
    return {
        "K and V": round(tokens * shape.kv_bytes / 1e6),
        "places": count,
        "one": round(pinned / max(count, 1) * scale),
        "all": round(pinned * scale),
        "window buffers, trimmed": round((target.nbytes - pinned - target.slack()) * scale)
        - round(-(-tokens // 256) * 256 * shape.kv_bytes / 1e6),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--log", type=Path, nargs="*", default=[], help="recorded sessions")
    options.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    settings = options.parse_args()
    started = time.time()
    sessions = {path.stem: recorded(path) for path in settings.log}
    if not sessions:
        sessions = {f"made {seed}": made(seed) for seed in range(settings.seed, settings.seed + 3)}
    if settings.quick:
        settings.shapes, sessions = [*settings.shapes[:1], "Qwen3.5 9B"], dict(list(sessions.items())[:1])
    results: dict[str, Any] = {"places": {}}
    rows = []
    for name in settings.shapes:
        for tokens in (2**12,) if settings.quick else (2**15, 2**17):
            found = results["places"].setdefault(name, {})[tokens] = places(SHAPES[name], tokens)
            rows.append([name, tokens, *found.values()])
    table(["MB of a prompt", "tokens", *found], rows)
    for name, requests in sessions.items():
        rows = []
        for shape in settings.shapes:
            pair = pair_of(SHAPES[shape])
            arms = {"8": replay(pair, requests, 8), "2": replay(pair, requests, 2)}
            with tempfile.TemporaryDirectory() as parent:
                arms["2, files"] = replay(pair, requests, 2, Path(parent) / "a")
                arms["restarts"] = replay(pair, requests, 8, Path(parent) / "b", restart=True)
            results.setdefault(name, {})[shape] = arms
            rows += [[shape, arm, *found.values()] for arm, found in arms.items()]
        print(f"{name}: {len(requests)} requests")
        table(["model", "memory", *next(iter(arms.values()))], rows)
    settings.log = [path.name for path in settings.log]
    finish("reread", results, settings, started)


if __name__ == "__main__":
    main()
