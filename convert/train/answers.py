"""Record a target's answers to prompts, with the hidden states and K/V that a drafter learns from.

The target decodes many prompts in one batch. A drafter that drafts nothing observes the rows of each answer,
and writes them to a file when the answer ends. So an interrupted run only loses unfinished answers.

`AnswerPlan` says how each answer is sampled, which ones are held out, and where their files are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import mlx.core as mx

from mlx_spec.checkpoint.files import one_line
from mlx_spec.checkpoint.writer import write_safetensors
from mlx_spec.drafters.drafter import DrafterSource
from mlx_spec.errors import BadCheckpoint
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.softmax import log_total
from mlx_spec.types import (
    SLIDING,
    Draft,
    Drafter,
    Features,
    FeatureSpec,
    KVRows,
    Sampler,
    TargetParts,
    no_draft,
)

from .prompts import TrainingPrompt, bundled_prompt, encode

KEPT = mx.float16  # type of recorded rows: half the space of float32, and precise enough for training
NEEDS = FeatureSpec(final_hidden=True, shared_kv=True, prompt_hidden=False)
MIN_TOKENS = 8  # of an answer to learn from; a shorter one has no room for a chain of drafts
KEYS, VALUES = "keys.", "values."

HELD_OUT = 25  # one answer in 25 is held out: a few dozen measure acceptance to 2 %
TEMPERATURES = 0.0, 1.0  # in turns: the drafter is used for greedy and for sampled answers


# --- recorded answers


@dataclass(frozen=True)
class RecordedAnswer:
    """A recorded answer of A tokens after a prompt of P."""

    kind: str  # of text
    greedy: bool  # False if it was sampled
    tokens: mx.array  # [A] int32
    hidden: mx.array  # [A, D]: the rows whose logits the tokens were drawn from
    shared: dict[str, KVRows]  # by attention type, [1, H, P + A - 1, Dk]; with a window only the last rows
    logsumexp: mx.array  # [A] float32: of the target's logits in the rows of `hidden`

    @property
    def prompt_tokens(self) -> int:
        """Return P."""
        return max(rows.keys.shape[2] for rows in self.shared.values()) + 1 - self.tokens.size


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt to answer, and the file for its answer."""

    file: Path
    kind: str
    tokens: list[int]
    sampling: Sampling


class Recorder(Drafter):
    """A drafter that drafts nothing and keeps the target's rows of one answer."""

    needs = NEEDS

    def __init__(self, parts: TargetParts) -> None:
        self._parts = parts
        self._hidden: list[mx.array] = []
        self._features: Features | None = None
        self._history: Sequence[int] = ()
        self._window: list[KVRows] = []  # copies of the rows of sliding attention, in order
        self._copied = 0  # the position after the last copied row

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Keep the rows of generated tokens; rows of the prompt have no hidden states."""
        self._history, self._features = history, features
        if features.final_hidden is not None:
            self._hidden.append(features.final_hidden)
        assert features.shared_kv is not None
        rows = features.shared_kv().get(SLIDING)
        if rows is not None:
            if features.final_hidden is None:  # a prompt: the answer sees its last window
                self._window, self._copied = [], len(history) - 1 - rows.keys.shape[2]
            if 2 * (len(history) - 1 - self._copied) > rows.keys.shape[2]:  # before they leave the window
                self._window.append(self._new_rows(rows))
                self._copied = len(history) - 1
                mx.eval(self._window[-1].keys, self._window[-1].values)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return no_draft()

    def answer(self, question: AnswerRequest) -> RecordedAnswer | None:
        """Return the recorded answer; None if it is too short to learn from."""
        hidden = mx.concatenate(self._hidden)
        if len(hidden) < MIN_TOKENS:
            return None
        assert self._features is not None and self._features.shared_kv is not None
        shared = {kind: [rows] for kind, rows in self._features.shared_kv().items()}
        if SLIDING in shared:
            shared[SLIDING] = [*self._window, self._new_rows(*shared[SLIDING])]
        logits = self._parts.unembed(hidden).astype(mx.float32)
        return RecordedAnswer(
            question.kind,
            not question.sampling.temperature,
            mx.array(list(self._history[-len(hidden) :]), dtype=mx.int32),
            hidden.astype(KEPT),
            {
                kind: KVRows(
                    mx.concatenate([rows.keys for rows in parts], axis=2).astype(KEPT),
                    mx.concatenate([rows.values for rows in parts], axis=2).astype(KEPT),
                )
                for kind, parts in shared.items()
            },
            log_total(logits)[..., 0],
        )

    def _new_rows(self, rows: KVRows) -> KVRows:
        """Return a copy of the rows that are not in `_window` yet."""
        start = rows.keys.shape[2] - (len(self._history) - 1 - self._copied)
        return KVRows(*(mx.contiguous(a[:, :, start:]) for a in (rows.keys, rows.values)))


def recording(pair: Pair) -> Pair:
    """Return a pair with the same target whose only drafter records."""
    return pair.with_drafters([DrafterSource("recorder", NEEDS, Recorder)], FixedPolicy(0))


def record(
    pair: Pair, questions: Iterable[AnswerRequest], max_tokens: int, max_running: int
) -> Iterator[int]:
    """Record the answers to the questions and write their files. Yield the number of tokens of each.

    `pair` comes from `recording`. The number is 0 for an answer that is too short to learn from.
    """
    batch, todo = pair.batch(max_running), iter(questions)
    running: dict[int, tuple[AnswerRequest, Recorder]] = {}
    while True:
        for question in islice(todo, max_running - len(batch)):
            sequence = pair.open()
            recorder = sequence.drafters[0]
            assert isinstance(recorder, Recorder)
            added = pair.prepare(sequence, question.tokens, sampling=question.sampling, max_tokens=max_tokens)
            for _ in added.prefill():  # in large chunks: no client waits for tokens meanwhile
                pass
            running[batch.add(added, park=True)] = question, recorder
        if not running:
            return
        for id, result in batch.step():
            if isinstance(result, Exception):
                raise result
            if result.finish_reason is not None:
                question, recorder = running.pop(id)
                answer = recorder.answer(question)
                if answer is not None:
                    write_answer(question.file, answer)
                yield 0 if answer is None else answer.tokens.size


def write_answer(file: Path, answer: RecordedAnswer) -> None:
    """Write an answer to a file for `read_answer`."""
    arrays = {"tokens": answer.tokens, "hidden": answer.hidden, "logsumexp": answer.logsumexp}
    for kind, rows in answer.shared.items():
        arrays |= {KEYS + kind: rows.keys, VALUES + kind: rows.values}
    write_arrays(file, arrays, {"kind": answer.kind, "greedy": str(answer.greedy)})


def read_answer(file: Path) -> RecordedAnswer:
    """Read a recorded answer. Raises BadCheckpoint for a damaged file."""
    arrays, metadata = read_arrays(file)
    kinds = [name.removeprefix(KEYS) for name in arrays if name.startswith(KEYS)]
    if not kinds:
        raise damaged(file, ValueError("it holds no K/V"))
    try:
        shared = {kind: KVRows(arrays[KEYS + kind], arrays[VALUES + kind]) for kind in kinds}
        greedy = metadata["greedy"] == str(True)
        return RecordedAnswer(
            metadata["kind"], greedy, arrays["tokens"], arrays["hidden"], shared, arrays["logsumexp"]
        )
    except KeyError as error:
        raise damaged(file, error) from error


def write_arrays(file: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """Write a file under a temporary name first. Raises OSError."""
    temporary = file.with_suffix(".tmp.safetensors")
    temporary.unlink(missing_ok=True)
    write_safetensors(temporary, arrays, metadata)
    temporary.replace(file)


def read_arrays(file: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return the arrays and the metadata in a file. Raises BadCheckpoint for a damaged one."""
    try:
        loaded = mx.load(str(file), return_metadata=True)
    except (RuntimeError, ValueError) as error:  # metadata may not be UTF-8
        raise damaged(file, error) from error
    return cast(tuple[dict[str, mx.array], dict[str, str]], loaded)


def damaged(file: Path, error: Exception) -> BadCheckpoint:
    """Return the error for a file of a run that cannot be read."""
    return BadCheckpoint(f"{file} cannot be read ({one_line(error)}): remove it and train again")


# --- the answers of one run


@dataclass(frozen=True)
class AnswerPlan:
    """The prompts to answer. The same plan gives the same answers, so an interrupted run can go on."""

    folder: Path  # of the answers' files
    count: int
    max_tokens: int  # of one answer
    seed: int
    own: tuple[TrainingPrompt, ...] = ()  # of the user; they replace the bundled ones

    def record(self, pair: Pair, max_running: int) -> Iterator[int]:
        """Record the answers that have no file yet. Yield the number of tokens of each."""
        self.folder.mkdir(parents=True, exist_ok=True)
        questions = (self._request(pair, i) for i in range(self.count) if not self._file(i).exists())
        yield from record(recording(pair), questions, self.max_tokens, max_running)

    def answers(self, *, held_out: bool) -> list[Path]:
        """Return the files of the held-out answers, or of the others, which are for training."""
        files = [self._file(i) for i in range(self.count) if self._is_held_out(i) == held_out]
        return [file for file in files if file.exists()]

    def tests(self, pair: Pair) -> Iterator[tuple[str, list[int]]]:
        """Yield kind and tokens of the prompts whose answers are held out."""
        for i in filter(self._is_held_out, range(self.count)):
            request = self._request(pair, i)
            yield request.kind, request.tokens

    def _request(self, pair: Pair, index: int) -> AnswerRequest:
        if self.own:
            prompt = self.own[index % len(self.own)]
        else:
            prompt = bundled_prompt(index, self.seed, held_out=self._is_held_out(index))
        # Four answers in a row have one temperature, so that each kind of prompt gets both temperatures.
        temperature = TEMPERATURES[index // 4 % len(TEMPERATURES)]
        sampling = Sampling(temperature=temperature, seed=self.seed + index if temperature else None)
        return AnswerRequest(self._file(index), prompt.kind, encode(pair.tokenizer, prompt), sampling)

    def _file(self, index: int) -> Path:
        return self.folder / f"{index:06d}.safetensors"

    def _is_held_out(self, index: int) -> bool:
        """Return True for an answer that is not trained on; no training answer has its prompt."""
        own = len(self.own) or self.count
        return index % own % HELD_OUT == min(HELD_OUT, own) - 1
