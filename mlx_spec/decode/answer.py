"""The answer to one prompt: its sequence, its text and its statistics, round by round."""

from __future__ import annotations

from dataclasses import replace

from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.decode.statistics import Statistics
from mlx_spec.tokenizer.stream import AnswerStream, TextPart
from mlx_spec.types import Round


class Answer:
    """The answer to one prompt, of a conversation or of a server.

    It continues `sequence`, which it rewinds to its common prefix with the prompt. The caller decodes
    `running`, alone or in a batch, and calls `add` with each round. `stream` turns tokens into text. The
    caller may stop after any round: it closes the rounds, then the answer, and can use the sequence again.
    A closed answer has its tokens and figures, and no caches.
    """

    def __init__(self, sequence: CachedSequence, running: RunningSequence, stream: AnswerStream) -> None:
        self.sequence, self.running, self.stream = sequence, running, stream
        self._history, self._prompt_size = running.history, len(running.prompt)
        reused = sequence.rewind_to_prefix(running.prompt)
        counts = len(running.prompt), reused, sequence.drafter_missing, *sequence.reread_counts()
        self.statistics = Statistics(*counts)  # so far

    @property
    def tokens(self) -> list[int]:
        """Return the emitted tokens, including the one that completed a stop string."""
        return self._history[self._prompt_size : self._prompt_size + self.stream.completion_tokens]

    @property
    def is_complete(self) -> bool:
        """Return True after a stop token, a stop string or the limit."""
        return self.stream.ended or self.statistics.finish_reason is not None

    def count_prefill(self, seconds: float) -> None:
        self.statistics = replace(self.statistics, prefill_seconds=self.statistics.prefill_seconds + seconds)

    def add(self, round: Round, seconds: float = 0.0) -> list[TextPart]:
        """Add a round, for which the caller waited `seconds`. Return the text that it completed."""
        self.statistics = self.statistics.plus(round, seconds)
        self.sequence.append(round.tokens)
        return self.stream.read(round, round.logprobs)

    def close(self) -> None:
        """Cut the sequence to the prompt and the tokens of the answer, and let go of it."""
        self.sequence.truncate(self._prompt_size + self.stream.completion_tokens)
        del self.sequence, self.running
