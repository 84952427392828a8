"""Decode one sequence, not in a batch."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence

from mlx_spec.decode.round import Group
from mlx_spec.decode.running import RunningSequence
from mlx_spec.device import resident
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import SingleTarget
from mlx_spec.prompt import text_prompt
from mlx_spec.types import Drafter, DraftLengthPolicy, RequestDrafter, Round, Sampler


def generate(
    target: LMTarget,
    drafters: Sequence[Drafter],
    policy: DraftLengthPolicy,
    sampler: Sampler,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    request_drafters: Sequence[RequestDrafter] = (),
) -> Generator[Round, None, None]:
    """Yield rounds of tokens after a text, with the distribution of plain decoding.

    Greedy and seeded tokens equal those that plain decoding emits. The policy chooses among the drafters by
    index, the request's drafters last. The target may already hold a prefix of the prompt. A stop token is
    emitted and ends the last round. The generator may be closed at every yield. Raises InvalidValue for an
    empty prompt.
    """
    text = text_prompt(prompt)
    return decode(
        RunningSequence(
            target, drafters, policy, sampler, text, max_tokens, frozenset(stop), request_drafters
        )
    )


def decode(sequence: RunningSequence) -> Generator[Round, None, None]:
    """Yield the rounds of one sequence, as `generate` does."""
    with resident():
        group = Group([sequence], SingleTarget(sequence.target))
        try:
            for _ in sequence.prefill():
                pass
            sequence.begin()
            while sequence.remaining > 0:
                (result,) = group.step()
                if isinstance(result, Exception):
                    raise result
                if sequence.remaining == 0:
                    group.close()
                yield result
        finally:
            group.close()
            sequence.end()
