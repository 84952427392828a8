"""Measure what the passes and drafts of a pair cost, on a scratch sequence, one pass at a time."""

from __future__ import annotations

from collections.abc import Collection, Generator

from mlx_spec.decode.loop import generate
from mlx_spec.decode.running import prefill
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.policy import FixedPolicy
from mlx_spec.policy.calibrate import Slice, Stopwatch, measure
from mlx_spec.policy.costs import Table
from mlx_spec.prompt import Prompt, text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer import Tokenizer


def scratch_text(tokenizer: Tokenizer, wanted: int, context_length: int | None) -> Prompt:
    """Return a text of `wanted` tokens, or of fewer if the context must hold the measured passes, too."""
    line = "The quick brown fox jumps over the lazy dog, and then it explains in a few words why it did. "
    tokens, room = tokenizer.encode(line) or [0], 64
    size = wanted if context_length is None else max(min(wanted, context_length - room), 2)
    return text_prompt((tokens * (size // len(tokens) + 1))[:size])


def measure_costs(
    sequence: CachedSequence,
    text: Prompt,
    vocab_size: int,
    copying: Collection[int],
    watch: Stopwatch,
    *,
    whole: bool,
) -> Generator[Slice, None, Table]:
    """Return the costs after `text`. Unless `whole`, only as much of it is read as the time allows.

    `sequence` is a new one. Yields before each pass: the caller may do other work then, or stop.
    """
    yield from _read(sequence, text, watch, whole=whole)
    prompt = text_prompt(text[: sequence.target.size + 1])
    history = list(prompt)
    sampler = Sampling().sampler(len(prompt), vocab_size)
    # Some drafters wait for the hidden state of a generated token.
    rounds = generate(sequence.target, sequence.drafters, FixedPolicy(0), sampler, prompt, max_tokens=2)
    for _ in range(2):
        yield watch.before("plain")
        watch.go_on()
        history += next(rounds).tokens
    rounds.close()
    return (yield from measure(sequence.target, sequence.drafters, history, vocab_size, copying, watch))


def _read(
    sequence: CachedSequence, text: Prompt, watch: Stopwatch, *, whole: bool
) -> Generator[Slice, None, None]:
    """Read a text in chunks that double while they are quick. Stop after a quarter of the time."""
    chunk = 1
    chunks = prefill(sequence.target, sequence.drafters, text, lambda: chunk)
    while whole or watch.share < 1 / 4:
        yield watch.before(chunk)
        watch.go_on()
        start = watch.spent_s
        if next(chunks, None) is None:
            return
        watch.stop()
        seconds = watch.spent_s - start
        watch.learn(chunk, seconds)
        chunk *= 2 if seconds < min(watch.limit_s / 16, watch.most_s / 2) else 1
