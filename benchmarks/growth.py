"""How does the host's work grow with the conversation? CPU time of one thread.

Each row does one piece of work at several sizes. Its exponent is the slope of log time over log size: 1 is
linear, and 0 is the same at each size. "a turn" is the prompt of a conversation whose earlier turns were
prompts before: render, check, tokenize. "a request" is the same from the body of a request on: JSON, its
fields, prompt, identity, and the choice among 8 conversations. "choosing" is that choice alone. "reading"
hands a prompt to two drafters in chunks of 8 tokens, as beside running answers. "grammar" makes the calls of
a drafted round after an answer of that length. The exit status is 1 if an exponent is above 1.2, because
sizes are small and times noisy.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from timing import finish, parser, table

from mlx_spec import demo, load
from mlx_spec.apps.server.engine.prefix_cache import PrefixCache
from mlx_spec.apps.server.protocols import openai_chat
from mlx_spec.apps.server.requests.request import Chat
from mlx_spec.apps.server.tools.prompts import chat_prompt
from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.decode import running
from mlx_spec.drafters.lookup import Lookup
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.hub import catalog
from mlx_spec.hub.inspect import inspect_stored
from mlx_spec.hub.local import LocalModel, partners
from mlx_spec.prompt import Prompt, text_prompt
from mlx_spec.tokenizer import Tokenizer, common_prefix
from mlx_spec.types import Features
from mlx_spec.vision.conversation import NO_VISION, conversation_prompt

Work = Callable[[], object]
LIMIT = 1.2  # the largest exponent that passes
VOCAB = 50_000


def main() -> None:
    options = parser(__doc__)
    settings, started = options.parse_args(), time.time()
    draw, pair = random.Random(settings.seed), load("demo")
    most = 2 if settings.quick else 4
    rows: dict[str, tuple[Sequence[int], Callable[[int], Work]]] = {
        "a turn, by turns": ((10, 100, 1000, 2000), lambda n: a_turn(pair.tokenizer, n)),
        "a request, by turns": ((10, 100, 1000, 2000), lambda n: a_request(pair, n)),
        "choosing among 8, by tokens": ((1024, 4096, 16384, 32768), lambda n: choosing(pair, n)),
        "reading, by tokens": ((1024, 4096, 16384, 32768), lambda n: reading(draw, n)),
        "lookup's tables, by tokens": ((1024, 4096, 16384, 65536), lambda n: lookup(draw, n)),
        "grammar, by tokens": ((100, 1000, 10000, 32000), lambda n: grammar(pair, n)),
        "common prefix, by tokens": ((1024, 8192, 65536, 524288), lambda n: prefix(draw, n)),
        "partners of a model, by models": ((25, 50, 100, 200), models),
    }
    results = {name: grown(sizes[:most], make) for name, (sizes, make) in rows.items()}
    head = ["work", "sizes", "ms of CPU", "exponent"]
    cells = [
        [
            name,
            " / ".join(map(str, row["sizes"])),
            " / ".join(f"{ms:.3g}" for ms in row["ms"]),
            row["exponent"],
        ]
        for name, row in results.items()
    ]
    table(head, cells)
    finish("growth", results, settings, started)
    sys.exit(not settings.quick and any(row["exponent"] > LIMIT for row in results.values()))


def grown(sizes: Sequence[int], make: Callable[[int], Work]) -> dict[str, Any]:
    """Return the least milliseconds of five runs at each size, and the exponent of the last three sizes."""
    times = []
    for size in sizes:
        work, found = make(size), []
        for _ in range(5):
            start = time.thread_time()
            work()
            found.append(1e3 * (time.thread_time() - start))
        times.append(max(min(found), 1e-4))
    slope = np.polyfit(np.log(sizes[-3:]), np.log(times[-3:]), 1)[0]
    return {
        "sizes": list(sizes),
        "ms": [float(f"{ms:.4g}") for ms in times],
        "exponent": round(float(slope), 2),
    }


def a_turn(tokenizer: Tokenizer, turns: int) -> Work:
    """Return work that adds a turn to a conversation and makes its prompt."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} some words"} for i in range(2 * turns)
    ]

    def turn() -> None:
        messages.append({"role": "user", "content": "And now?"})
        conversation_prompt(messages, tokenizer, NO_VISION, thinking=False)
        messages.append({"role": "assistant", "content": "Well."})

    turn()
    return turn


def a_request(pair: Any, turns: int) -> Work:
    """Return work that reads the body of a request that adds a turn, and chooses a sequence for it."""
    said = [{"role": ("user", "assistant")[i % 2], "content": f"{i} some words"} for i in range(2 * turns)]
    messages, cache = [*said, {"role": "user", "content": "And now?"}], None

    def request() -> Prompt:
        body = json.dumps({"messages": messages, "model": "demo", "stream": True})
        parsed = openai_chat.parse(openai_chat.ChatBody.model_validate(json.loads(body)), "demo")
        assert isinstance(parsed.prompt, Chat)
        prompt = chat_prompt(parsed.prompt, pair.tokenizer, "demo")
        assert prompt.identity.size and (cache is None or cache.matches(prompt)[-1].shared > 0)
        messages.extend([{"role": "assistant", "content": "Well."}, {"role": "user", "content": "And now?"}])
        return prompt

    cache = held(pair, request().tokens)
    return request


def held(pair: Any, tokens: Sequence[int]) -> PrefixCache:
    """Return a cache with 8 conversations that begin alike. Their rows were never written."""
    cache = PrefixCache(pair.open, 8, lambda: 10**12)
    for i in range(8):
        sequence = cache.take(text_prompt([i]))
        size = len(tokens) * (i + 1) // 8
        sequence.rewind_to_prefix(text_prompt([*tokens[:size], *(t + 1 for t in tokens[size:])]))
        sequence.target.count(len(tokens))
        cache.give_back(sequence)
    return cache


def choosing(pair: Any, tokens: int) -> Work:
    """Return work that finds what 8 conversations of so many tokens have of a prompt."""
    prompt = text_prompt(random.Random(1).choices(range(VOCAB), k=tokens))
    cache = held(pair, prompt.tokens)
    assert prompt.identity.size == tokens  # the preparing thread makes it
    return lambda: cache.matches(prompt)


class CountedTarget:
    """A target that takes no time, as far as reading a prompt needs one."""

    size, reads_spans_whole, prefill_parts = 0, False, 1

    def copies(self) -> Iterator[Any]:
        return iter(())

    def prefill(self, tokens: Sequence[int], *_: Any, **__: Any) -> Features:
        self.size += len(tokens)
        return Features()


def reading(draw: random.Random, tokens: int) -> Work:
    """Return work that reads a prompt in chunks of 8, for two drafters that do nothing."""
    prompt = text_prompt(draw.choices(range(VOCAB), k=tokens))
    drafter: Any = SimpleNamespace(observe=lambda history, features: None)

    def read() -> None:
        target: Any = CountedTarget()
        for _ in running.prefill(target, [drafter, drafter], prompt, lambda: 8):
            pass

    return read


def lookup(draw: random.Random, tokens: int) -> Work:
    """Return work that makes the tables of lookup for a prompt."""
    prompt = draw.choices(range(VOCAB), k=tokens)
    return lambda: Lookup(min_match=1).observe(prompt, Features())


def grammar(pair: Any, tokens: int) -> Work:
    """Return work that follows an answer of so many tokens for one drafted round."""
    tokenizer, size = pair.tokenizer, pair.info.vocab_size
    matcher = compile_grammar("regex", "[a-z ]*", tokenizer, size, seconds=60).matcher([])
    (letter,) = tokenizer.encode("a")[-1:]
    history, drafted = [letter] * tokens, [letter] * 4
    matcher.allowed(history, [], 1)

    def round() -> None:
        history.append(letter)
        matcher.forced(history)
        matcher.legal(history, drafted)
        matcher.allowed(history, drafted, 5)

    return round


def prefix(draw: random.Random, tokens: int) -> Work:
    """Return work that compares two texts that differ at the end."""
    text = draw.choices(range(VOCAB), k=tokens)
    other = [*text[:-1], -1]
    return lambda: common_prefix(text, other)


def models(count: int) -> Work:
    """Return work that finds the drafters of one of so many models."""
    found = inspect_stored(Checkpoint(demo.TARGET, "org/target"))
    listed = [LocalModel(f"org/model-{i}", "cached", demo.TARGET, 1, 0.0, found, None) for i in range(count)]  # type: ignore[arg-type]

    def partner() -> None:
        catalog.suggested_drafter.cache_clear()
        partners(listed[0], listed)

    return partner


if __name__ == "__main__":
    main()
