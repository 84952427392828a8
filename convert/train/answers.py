"""Prompts, and a target's own answers to them with what a drafter reads and predicts.

The target decodes many prompts in one batch. A drafter that drafts nothing sees the rows of each answer and
writes them to a file when the answer ends, so that an interrupted run loses the unfinished answers only.

Bundled prompts join an instruction with a topic. Those about a text quote the beginning of an answer that the
target gave before, so they are made after the others were answered. The plan says how each answer is sampled,
which are held out, and where they are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlx_spec.checkpoint.files import one_line, typed_path
from mlx_spec.checkpoint.writer import write_safetensors
from mlx_spec.drafters.drawing import DrafterSource, SequenceDrafter
from mlx_spec.drafters.gemma4 import SLIDING
from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.normal import log_total
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.types import Draft, Features, FeatureSpec, KVRows, Sampler, TargetParts, no_draft

KEPT = mx.float16  # type of recorded rows: half the space of float32, and no rounding that training notices
NEEDS = FeatureSpec(final_hidden=True, shared_kv=True, prompt=False)
MIN_TOKENS = 8  # of an answer worth keeping; shorter ones have no place for a chain of drafts
KEYS, VALUES = "keys.", "values."

BUNDLED: dict[str, Any] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
OWN = "own"  # kind of the prompts in a user's files
HELD_OUT = 25  # one answer in 25 is held out: a few dozen of a run tell 2 % of acceptance apart
TEMPERATURES = 0.0, 1.0  # in turns: greedy answers and the whole distribution are both drafted for later


# --- recorded answers


@dataclass(frozen=True)
class RecordedAnswer:
    """A recorded answer of A tokens after a prompt of P."""

    kind: str  # of text, as its prompt asks for
    greedy: bool  # False if it was sampled
    tokens: mx.array  # [A] int32
    hidden: mx.array  # [A, D]: the rows whose logits the tokens were drawn from
    shared: dict[str, KVRows]  # by attention type, [1, H, P + A - 1, Dk]; of a window the last of these rows
    logsumexp: mx.array  # [A] float32: of the target's logits in these rows

    @property
    def prompt_tokens(self) -> int:
        """Return P."""
        return max(rows.keys.shape[2] for rows in self.shared.values()) + 1 - self.tokens.size


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
        self._window: list[KVRows] = []  # copies of rows of sliding attention, in order
        self._copied = 0  # the position after the last of them

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
        """Return what was recorded; None for an answer that is too short to learn from."""
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
        """Return a copy of the rows that were not copied before."""
        start = rows.keys.shape[2] - (len(self._history) - 1 - self._copied)
        return KVRows(*(mx.contiguous(a[:, :, start:]) for a in (rows.keys, rows.values)))


def recording(pair: Pair) -> Pair:
    """Return a pair with the same target whose only drafter records."""
    return pair.with_drafters([DrafterSource("recorder", NEEDS, Recorder)], FixedPolicy(0))


def record(
    pair: Pair, questions: Iterable[AnswerRequest], max_tokens: int, max_running: int
) -> Iterator[int]:
    """Record the answers to the questions and write the files. Yields the number of tokens in each.

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
            for _ in sequence.prefill():  # in whole chunks: no client waits for tokens meanwhile
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
                yield 0 if answer is None else answer.tokens.size


def write_answer(file: Path, answer: RecordedAnswer) -> None:
    """Write what `read_answer` reads."""
    arrays = {"tokens": answer.tokens, "hidden": answer.hidden, "logsumexp": answer.logsumexp}
    for kind, rows in answer.shared.items():
        arrays |= {KEYS + kind: rows.keys, VALUES + kind: rows.values}
    write_arrays(file, arrays, {"kind": answer.kind, "greedy": str(answer.greedy)})


def read_answer(file: Path) -> RecordedAnswer:
    """Read a recorded answer. Raises BadCheckpoint for a damaged file."""
    found, metadata = read_arrays(file)
    kinds = [name.removeprefix(KEYS) for name in found if name.startswith(KEYS)]
    shared = {kind: KVRows(found[KEYS + kind], found[VALUES + kind]) for kind in kinds}
    greedy = metadata["greedy"] == str(True)
    return RecordedAnswer(
        metadata["kind"], greedy, found["tokens"], found["hidden"], shared, found["logsumexp"]
    )


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
    except RuntimeError as error:
        raise BadCheckpoint(
            f"{file} cannot be read ({one_line(error)}): remove it and train again"
        ) from error
    return cast(tuple[dict[str, mx.array], dict[str, str]], loaded)


# --- prompts


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt, and what kind of text it wants."""

    kind: str
    messages: tuple[Mapping[str, str], ...]


def bundled_prompts(count: int, seed: int) -> list[TrainingPrompt]:
    """Return that many prompts without quotations; the kinds take turns."""
    chance, prompts = random.Random(seed), list[TrainingPrompt]()
    kinds: dict[str, list[str]] = BUNDLED["kinds"]
    for i in range(count):
        kind = list(kinds)[i % len(kinds)]
        topic, other = chance.sample(BUNDLED["topics"], 2)
        language, task = chance.choice(BUNDLED["languages"]), chance.choice(BUNDLED["tasks"])
        text = chance.choice(kinds[kind]).format(topic=topic, other=other, language=language, task=task)
        prompts.append(_question(kind, text))
    return prompts


def quoting_prompts(answers: Iterator[tuple[str, str]], seed: int) -> Iterator[TrainingPrompt]:
    """Return a prompt about each answer, given as its kind and its text."""
    chance = random.Random(seed + 1)
    for answered, text in answers:
        kind = "edit code" if answered == "code" else chance.choice(["summary", "edit"])
        # of a quoted answer, about 130 tokens: a longer one leaves less time for answers
        quoted = text[:600].rsplit(" ", 1)[0]
        yield _question(kind.split()[0], chance.choice(BUNDLED["texts"][kind]).replace("{text}", quoted))


def own_prompts(files: Sequence[Path]) -> list[TrainingPrompt]:
    """Read prompts of the user: one on each line, or a conversation that the chat saved.

    A line may be a JSON string. Each message of the user in a conversation is a prompt, with all before it.
    Raises BadCheckpoint for a file that cannot be read, InvalidValue if there is no prompt.
    """
    prompts = []
    for file in files:
        try:
            text = typed_path(file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise BadCheckpoint(
                f"{file} cannot be read ({error}): give a text file with a prompt on each line"
            ) from error
        prompts += _conversation(text) or [
            _question(OWN, line) for line in map(_unquoted, text.splitlines()) if line
        ]
    if files and not prompts:
        raise InvalidValue(f"{', '.join(map(str, files))}: there is no prompt in it: write one on each line")
    return prompts


def encode(tokenizer: Tokenizer, prompt: TrainingPrompt) -> list[int]:
    """Return the tokens of a prompt; without a chat template the tokens of its last message."""
    if tokenizer.chats:
        return tokenizer.prompt([dict(message) for message in prompt.messages])
    return tokenizer.prompt_tokens(prompt.messages[-1]["content"])


def _question(kind: str, text: str) -> TrainingPrompt:
    return TrainingPrompt(kind, ({"role": "user", "content": text},))


def _unquoted(line: str) -> str:
    if line.startswith('"'):
        try:
            return str(json.loads(line))
        except ValueError:
            pass
    return line.strip()


def _conversation(text: str) -> list[TrainingPrompt]:
    """Return the prompts in a saved conversation; none if the text is not a conversation."""
    try:
        messages = json.loads(text)["messages"]
        turns = [{"role": str(each["role"]), "content": str(each["content"])} for each in messages]
    except (ValueError, KeyError, TypeError):
        return []
    ends = [i + 1 for i, turn in enumerate(turns) if turn["role"] == "user"]
    return [TrainingPrompt(OWN, tuple(turns[:end])) for end in ends]


# --- the answers of one run


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
                AnswerRequest(self._file(i), prompt.kind, encode(pair.tokenizer, prompt), self._sampling(i))
                for i, prompt in prompts
                if not self._file(i).exists()
            )
            yield from record(recorder, questions, self.max_tokens, max_running)

    def answers(self, *, held_out: bool) -> list[Path]:
        """Return the files of the answers to train with, or of those to test with."""
        files = [self._file(i) for i in range(self.count) if self._is_held_out(i) == held_out]
        return [file for file in files if file.exists()]

    def tests(self, pair: Pair) -> Iterator[tuple[str, list[int]]]:
        """Yield kind and tokens of the prompts whose answers are held out."""
        for prompts in (self._first(), self._second(pair)):
            for i, prompt in prompts:
                if self._is_held_out(i):
                    yield prompt.kind, encode(pair.tokenizer, prompt)

    @property
    def _split(self) -> int:
        """Return the number of prompts without quotations; a quotation of a held-out answer is held out."""
        # a quarter of the prompts quote an answer: as often as people ask about a text of theirs
        return self.count if self.own else int(self.count * 0.75) // HELD_OUT * HELD_OUT

    def _first(self) -> Iterator[tuple[int, TrainingPrompt]]:
        if self.own:
            return enumerate(islice(cycle(self.own), self.count))
        return enumerate(bundled_prompts(self._split, self.seed))

    def _second(self, pair: Pair) -> Iterator[tuple[int, TrainingPrompt]]:
        """Yield the prompts that quote the first answers."""
        split = self._split  # a few answers are quoted twice if there are fewer than quotations
        quoted = [i for i in range(self.count - split) if self._file(i % split).exists()]
        found = (read_answer(self._file(i % split)) for i in quoted)
        answers = (
            (each.kind, pair.tokenizer.decode(cast(list[int], each.tokens.tolist()))) for each in found
        )
        for i, prompt in zip(quoted, quoting_prompts(answers, self.seed), strict=True):
            yield split + i, prompt

    def _file(self, index: int) -> Path:
        return self.folder / f"{index:06d}.safetensors"

    def _is_held_out(self, index: int) -> bool:
        """Return True for an answer that no weight is fitted to; its prompt is in no other answer."""
        own = len(self.own) or self.count
        return index % own % HELD_OUT == min(HELD_OUT, own) - 1

    def _sampling(self, index: int) -> Sampling:
        # answers in a row with one temperature, so that it is not tied to the kinds, which take turns
        temperature = TEMPERATURES[index // 4 % len(TEMPERATURES)]
        return Sampling(temperature=temperature, seed=self.seed + index if temperature else None)
