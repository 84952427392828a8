"""Record a target's own answers with what a drafter reads and has to predict: hidden states and K/V.

The target decodes many prompts in one batch. A drafter that drafts nothing sees the rows of each answer and
writes them to a file when the answer ends, so that an interrupted run loses the unfinished answers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import mlx.core as mx

from mlx_spec.drafters.drawing import DrafterSource, SequenceDrafter
from mlx_spec.engine import PREFILL_STEP
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.files import one_line
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler, TargetParts, no_draft

KEPT = mx.float16  # type of recorded rows: half the space of float32, and no rounding that training notices
NEEDS = FeatureSpec(final_hidden=True, shared_kv=True, prompt=False)
MIN_TOKENS = 8  # of an answer worth keeping; shorter ones have no place for a chain of drafts
KEYS, VALUES = "keys.", "values."


@dataclass(frozen=True)
class RecordedAnswer:
    """A recorded answer of A tokens after a prompt of P."""

    kind: str  # of text, as its prompt asks for
    greedy: bool  # False if it was sampled
    tokens: mx.array  # [A] int32
    hidden: mx.array  # [A, D]: the rows whose logits the tokens were drawn from
    keys: dict[str, mx.array]  # by attention type, [H, P + A - 1, Dk]
    values: dict[str, mx.array]  # by attention type, [H, P + A - 1, Dv]
    logsumexp: mx.array  # [A] float32: of the target's logits in these rows

    @property
    def prompt_tokens(self) -> int:
        """Return P."""
        return next(iter(self.keys.values())).shape[1] + 1 - self.tokens.size


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt to answer, and where its answer is kept."""

    file: Path
    kind: str
    tokens: list[int]
    sampling: Sampling


class Recorder(SequenceDrafter):
    """Keeps the target's rows of one answer."""

    needs = NEEDS

    def __init__(self, parts: TargetParts) -> None:
        self._parts = parts
        self._hidden: list[mx.array] = []
        self._features: Features | None = None
        self._history: Sequence[int] = ()

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Keep the rows of generated tokens; those of the prompt have no hidden states."""
        self._history, self._features = history, features
        if features.final_hidden is not None:
            self._hidden.append(features.final_hidden)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Return no tokens."""
        return no_draft()

    def answer(self, question: AnswerRequest) -> RecordedAnswer | None:
        """Return what was recorded; None for an answer that is too short to learn from."""
        hidden = mx.concatenate(self._hidden)
        if len(hidden) < MIN_TOKENS:
            return None
        assert self._features is not None and self._features.shared_kv is not None
        rows, size = self._features.shared_kv(), len(self._history) - 1
        logits = self._parts.unembed(hidden).astype(mx.float32)
        return RecordedAnswer(
            question.kind,
            not question.sampling.temperature,
            mx.array(list(self._history[-len(hidden) :]), dtype=mx.int32),
            hidden.astype(KEPT),
            {kind: each.keys[0, :, -size:].astype(KEPT) for kind, each in rows.items()},
            {kind: each.values[0, :, -size:].astype(KEPT) for kind, each in rows.items()},
            mx.logsumexp(logits, axis=-1),
        )


def recording(pair: Pair) -> Pair:
    """Return a pair with the same target whose only drafter records."""
    return pair.with_drafters([DrafterSource("recorder", NEEDS, Recorder)], FixedPolicy(0))


def record(
    pair: Pair, questions: Iterable[AnswerRequest], max_tokens: int, max_running: int
) -> Iterator[tuple[AnswerRequest, int]]:
    """Record the answers to the questions and write the files. Yields each with the number of its tokens.

    `pair` is one of `recording`. The number is 0 for an answer that is too short to learn from.
    """
    batch, todo = pair.batch(max_running), iter(questions)
    running: dict[int, tuple[AnswerRequest, Recorder]] = {}
    while True:
        for question in islice(todo, max_running - len(batch)):
            parts = pair.open()
            recorder = parts.drafters[0]
            assert isinstance(recorder, Recorder)
            sequence = pair.prepare(parts, question.tokens, sampling=question.sampling, max_tokens=max_tokens)
            for _ in sequence.prefill(lambda: PREFILL_STEP):
                pass
            running[batch.add(sequence, park=True)] = question, recorder
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
                yield question, 0 if answer is None else answer.tokens.size


def write_answer(file: Path, answer: RecordedAnswer) -> None:
    """Write what `read_answer` reads."""
    arrays = {"tokens": answer.tokens, "hidden": answer.hidden, "logsumexp": answer.logsumexp}
    arrays |= {KEYS + kind: rows for kind, rows in answer.keys.items()}
    arrays |= {VALUES + kind: rows for kind, rows in answer.values.items()}
    write_arrays(file, arrays, {"kind": answer.kind, "greedy": str(answer.greedy)})


def read_answer(file: Path) -> RecordedAnswer:
    """Read a recorded answer. Raises BadCheckpoint for a damaged file."""
    found, metadata = read_arrays(file)
    keys = {name.removeprefix(KEYS): a for name, a in found.items() if name.startswith(KEYS)}
    values = {name.removeprefix(VALUES): a for name, a in found.items() if name.startswith(VALUES)}
    greedy = metadata["greedy"] == str(True)
    return RecordedAnswer(
        metadata["kind"], greedy, found["tokens"], found["hidden"], keys, values, found["logsumexp"]
    )


def write_arrays(file: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """Write a file under a temporary name first."""
    temporary = file.with_suffix(".tmp.safetensors")
    mx.save_safetensors(str(temporary), arrays, metadata)
    temporary.replace(file)


def read_arrays(file: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return the arrays and the metadata in a file. Raises BadCheckpoint for a damaged one."""
    try:
        loaded = mx.load(str(file), return_metadata=True)
    except RuntimeError as error:
        raise BadCheckpoint(
            f"{file} cannot be read ({one_line(error)}): remove it and train again"
        ) from error
    return cast(tuple[dict[str, mx.array], dict[str, str]], loaded)
