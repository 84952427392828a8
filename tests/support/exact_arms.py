"""One answer in many ways that must agree bit by bit: drafts, batches, a second turn, a rewind, saved caches.

All ways use the parts of a pair as programs do. Where the bits of a row depend on the rows beside it, a way
differs from plain decoding unless its passes stay in one row class. Texts differ at near ties only, which
small models hardly have. So the K and V that an answer leaves behind are compared, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_spec.apps.selftest import ScriptedDrafter
from mlx_spec.decode.loop import decode
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import CacheState, Drafter


@dataclass(frozen=True)
class Comparison:
    """What a way to decode differs in from plain decoding."""

    way: str
    tokens: int  # that were compared
    differs_at: int | None  # the first token that differs
    layers: int | None = None  # whose K or V differ, up to there; None if they were not compared

    @property
    def is_equal(self) -> bool:
        return self.differs_at is None and not self.layers


class Ways:
    """The ways to decode one prompt. `lengths` are the draft lengths to try with the known answer."""

    def __init__(
        self, pair: Pair, prompt: Sequence[int], sampling: Sampling, count: int, lengths: Sequence[int]
    ) -> None:
        self.pair, self.prompt, self.sampling, self.count = pair, list(prompt), sampling, count
        self.lengths = lengths
        reader = pair.open()
        running = pair.prepare(reader, text_prompt(prompt), max_tokens=1)
        for _ in running.prefill():
            pass
        self._read = reader.target.state()  # the prompt, read once for all ways
        sequence = self.sequence()
        self.plain = self.answer(sequence, self.prompt)
        self.target = sequence.target
        self.truth = [*self.prompt, *self.plain]

    def sequence(self, K: int = 0, drafters: Sequence[Drafter] = ()) -> CachedSequence:
        """A sequence that has read the prompt, with a fixed draft length."""
        target = self.pair.open().target
        target.restore(self._read)
        return CachedSequence(target, tuple(drafters), FixedPolicy(K))

    def scripted(self, K: int, *, spoiled: bool = False) -> CachedSequence:
        """A sequence that drafts the plain answer, with a wrong token in each draft if `spoiled`."""
        return self.sequence(K, [ScriptedDrafter(self.truth, self.pair.info.vocab_size if spoiled else None)])

    def answer(self, sequence: CachedSequence, prompt: Sequence[int], count: int | None = None) -> list[int]:
        running = self.pair.prepare(
            sequence, text_prompt(prompt), sampling=self.sampling, max_tokens=count or self.count
        )
        return [token for done in decode(running) for token in done.tokens]

    def compare(self, others: Sequence[Sequence[int]] = ()) -> Iterator[Comparison]:
        """Compare all ways. In a batch the prompts `others` are answered beside this one."""
        most = max(self.lengths)
        for K in self.lengths:  # the last way goes on in a second turn
            drafted = self.scripted(K)
            yield self._drafted(f"K = {K}", drafted)
        yield self._drafted(f"K = {most}, spoiled", self.scripted(most, spoiled=True))
        own = self.pair.open()
        own.target.restore(self._read)
        yield self._drafted("own drafters", own)
        own.target.rewind(len(self.prompt) - 1)
        yield self._drafted("rewound", CachedSequence(own.target, (), FixedPolicy(0)))
        if others:
            answers = dict[int, list[int]]()
            for index, done in self.pair.generate_batch(
                [self.prompt, *others], sampling=self.sampling, max_tokens=self.count
            ):
                answers.setdefault(index, []).extend(done.tokens)
            yield compared("batch", self.plain, answers[0])
        yield from self._later_turns(CachedSequence(self.target, (), FixedPolicy(0)), drafted)

    def _drafted(self, way: str, sequence: CachedSequence) -> Comparison:
        text = self.answer(sequence, self.prompt)
        return compared(way, self.plain, text, self.target, sequence.target)

    def _later_turns(self, plain: CachedSequence, drafted: CachedSequence) -> Iterator[Comparison]:
        """Continue after the answer, whose K and V come from plain decoding, or from drafts."""
        follow, count = [*self.truth, *self.prompt[:8]], max(self.count // 3, 8)
        restored = self.pair.open().target
        restored.restore(saved_and_read(drafted.target.state()))
        expected = self.answer(plain, follow, count)
        for way, sequence in (
            ("second turn", drafted),
            ("second turn from a file", CachedSequence(restored, (), FixedPolicy(0))),
        ):
            text = self.answer(sequence, follow, count)
            yield compared(way, expected, text, plain.target, sequence.target)


def saved_and_read(state: CacheState) -> CacheState:
    """A state as a file gives it back."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "state.safetensors"))
        mx.save_safetensors(file, dict(state.arrays))
        arrays = dict(mx.load(file).items())
        mx.eval(list(arrays.values()))
    return CacheState(arrays, state.numbers)


def compared(
    way: str,
    plain: Sequence[int],
    text: Sequence[int],
    target: LMTarget | None = None,
    other: LMTarget | None = None,
) -> Comparison:
    """Compare two texts and the K and V of two targets, up to the first token that differs."""
    pairs = enumerate(zip(plain, text, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None and len(plain) != len(text):
        at = min(len(plain), len(text))
    layers = None
    if target is not None and other is not None:
        end = min(target.size, other.size) - (0 if at is None else len(plain) - at)
        layers = differing_layers(target, other, end)
    return Comparison(way, len(plain), at, layers)


def differing_layers(target: LMTarget, other: LMTarget, end: int) -> int:
    """The number of layers whose K or V differ at a position before `end` that both hold."""
    differs = []
    for ours, theirs in zip(target.caches.attention, other.caches.attention, strict=True):
        start = max(ours.columns.oldest[0], theirs.columns.oldest[0])
        low, high = ([place - cache.columns.first[0] for cache in (ours, theirs)] for place in (start, end))
        pairs = zip(ours.buffers, theirs.buffers, strict=True)
        same = [mx.array_equal(a[:1, :, low[0] : high[0]], b[:1, :, low[1] : high[1]]) for a, b in pairs]
        differs.append(~mx.all(mx.stack(same)))
    return int(mx.stack(differs).sum())
