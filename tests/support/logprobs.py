"""Generate tokens with their log-probabilities."""

from __future__ import annotations

import mlx.nn as nn

from mlx_spec.decode.loop import generate
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.sampling.logprobs import LogprobRecorder
from mlx_spec.types import Drafter, DraftLengthPolicy, Round, TokenLogprob
from support.grammars import byte_text

TOP = 4
TEXT = byte_text({})


def recorder_of(sampling: Sampling, prompt_length: int, top: int = TOP) -> LogprobRecorder:
    return LogprobRecorder(sampling.sampler(prompt_length, 256), TEXT, top)


def recorded(
    model: nn.Module, drafter: Drafter, policy: DraftLengthPolicy, sampling: Sampling, prompt: list[int]
) -> tuple[list[Round], list[TokenLogprob]]:
    """Generate 24 tokens with their log-probabilities."""
    recorder = recorder_of(sampling, len(prompt))
    done = list(generate(LMTarget(model), [drafter], policy, recorder, prompt, max_tokens=24))
    assert not recorder._rows, "rows that were read are dropped"
    return done, [each for round in done for each in round.logprobs]
