"""The answers of one run: which prompts, how they are sampled, which of them are held out, where they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling

from .answers import AnswerRequest, RecordedAnswer, read_answer, record, recording
from .prompts import QUOTED_SHARE, TrainingPrompt, bundled_prompts, encode, quoting_prompts

HELD_OUT = 25  # every so many answers one is held out: a few dozen of a run tell 2 % of acceptance apart
TEMPERATURES = 0.0, 1.0  # in turns: greedy answers and the whole distribution are both drafted for later
SAME = 4  # answers in a row with one temperature, so that it is not tied to the kinds, which take turns


@dataclass(frozen=True)
class AnswerPlan:
    """The prompts to answer. The same plan gives the same answers, so that a run can be cut into pieces."""

    folder: Path  # of the answers' files
    count: int
    max_tokens: int  # of one answer
    seed: int
    own: tuple[TrainingPrompt, ...] = ()  # of the user; they replace the bundled ones

    def record(self, pair: Pair, max_running: int) -> Iterator[int]:
        """Record what has no file yet. Yields the number of tokens in each new answer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        recorder = recording(pair)
        for prompts in (self._first(), self._second(pair)):
            questions = (
                AnswerRequest(self._file(i), prompt.kind, encode(pair.text, prompt), self._sampling(i))
                for i, prompt in prompts
                if not self._file(i).exists()
            )
            for _, tokens in record(recorder, questions, self.max_tokens, max_running):
                yield tokens

    def answers(self, *, held_out: bool) -> list[Path]:
        """Return the files of the answers to train with, or of those to test with."""
        files = [self._file(i) for i in range(self.count) if self._is_held_out(i) == held_out]
        return [file for file in files if file.exists()]

    def tests(self, pair: Pair) -> Iterator[tuple[str, list[int]]]:
        """Yield kind and tokens of the prompts whose answers are held out."""
        for prompts in (self._first(), self._second(pair)):
            for i, prompt in prompts:
                if self._is_held_out(i):
                    yield prompt.kind, encode(pair.text, prompt)

    @property
    def _split(self) -> int:
        """Return how many prompts quote nothing. It makes a quotation held out where its answer is."""
        return self.count if self.own else int(self.count * (1 - QUOTED_SHARE)) // HELD_OUT * HELD_OUT

    def _first(self) -> Iterator[tuple[int, TrainingPrompt]]:
        own = self.own
        prompts = (
            [own[i % len(own)] for i in range(self.count)] if own else bundled_prompts(self._split, self.seed)
        )
        yield from enumerate(prompts)

    def _second(self, pair: Pair) -> Iterator[tuple[int, TrainingPrompt]]:
        """Yield the prompts that quote the first answers."""
        quoted = [i for i in range(self.count - self._split) if self._file(i).exists()]
        answers = (_text(pair, read_answer(self._file(i))) for i in quoted)
        for i, prompt in zip(quoted, quoting_prompts(answers, self.seed), strict=True):
            yield self._split + i, prompt

    def _file(self, index: int) -> Path:
        return self.folder / f"{index:06d}.safetensors"

    def _is_held_out(self, index: int) -> bool:
        """Return True for an answer that no weight is fitted to; its prompt is in no other answer."""
        own = len(self.own) or self.count
        return index % own % HELD_OUT == min(HELD_OUT, own) - 1

    def _sampling(self, index: int) -> Sampling:
        temperature = TEMPERATURES[index // SAME % len(TEMPERATURES)]
        return Sampling(temperature=temperature, seed=self.seed + index if temperature else None)


def _text(pair: Pair, answer: RecordedAnswer) -> tuple[str, str]:
    return answer.kind, pair.text.decode(cast(list[int], answer.tokens.tolist()))
