"""Drafters that one request brings: predicted output, and text that its grammar forces.

They are proposals of the sequence's own policy. Drafting with them takes no time, so the policy weighs only
the rows that their tokens add to a pass of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.drafters.model_free import Forced, GrammarFilter, Prediction
from mlx_spec.grammar import Grammar
from mlx_spec.types import Drafter, RequestDrafter


def for_request(
    drafters: Sequence[Drafter],
    prompt: Sequence[int],
    *,
    grammar: Grammar | None = None,
    prediction: Sequence[int] = (),
) -> tuple[tuple[Drafter, ...], tuple[RequestDrafter, ...]]:
    """Return the drafters of a sequence under the grammar of a request, and those that the request brings."""
    matcher = None if grammar is None else grammar.matcher(prompt)
    extras: list[RequestDrafter] = []
    if matcher is not None:
        drafters = [GrammarFilter(drafter, matcher, len(prompt)) for drafter in drafters]
        forced = Forced(matcher, len(prompt))
        extras.append(RequestDrafter("grammar", forced, forced.available, forced.prior))
    if prediction:
        predicted = Prediction(prediction, prompt)
        checked: Drafter = predicted
        if matcher is not None:
            checked = GrammarFilter(predicted, matcher, len(prompt))
        extras.append(RequestDrafter("prediction", checked, predicted.available, predicted.prior))
    return tuple(drafters), tuple(extras)
