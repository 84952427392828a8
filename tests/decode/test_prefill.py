"""A prompt is read in passes of few sizes, and freed buffers go back after each of its chunks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from support import tiny

from mlx_spec.decode.running import prefill
from mlx_spec.model.target import LMTarget
from mlx_spec.prompt import text_prompt


class RecordedTarget(LMTarget):
    """A target that keeps the rows of its passes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rows = list[int]()

    def _write(self, tokens: mx.array, *given: Any, **options: Any) -> mx.array:
        self.rows.append(tokens.size)
        return super()._write(tokens, *given, **options)


@pytest.mark.parametrize(("kind", "rows"), [("full", [100, 100, 100]), ("recurrent", [100, 100, 68, 32])])
def test_only_the_last_chunk_of_a_recurrent_target_takes_two_passes(kind: str, rows: list[int]) -> None:
    """A second pass reads all weights again, and large kernels begin at the size of a whole chunk."""
    target = RecordedTarget(getattr(tiny, kind)())
    steps = list(prefill(target, (), text_prompt(tiny.prompt(301)), lambda: 100))
    assert (target.rows, len(steps)) == (rows, 3)
    assert target.rewind(285) == (285 if kind == "full" else 268)  # the checkpoint 32 tokens before the end


def test_freed_buffers_go_back_after_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of attention grow with each chunk, and no buffer of an earlier chunk is large enough."""
    chunks, cleared = list[int](), list[int]()
    target = LMTarget(tiny.full())
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(target.size))
    for _ in prefill(target, (), text_prompt(tiny.prompt(301)), lambda: 100):
        chunks.append(target.size)
    assert cleared == chunks == [100, 200, 300]
