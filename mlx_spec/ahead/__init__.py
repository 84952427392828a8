"""Drafting ahead: while the target verifies a draft, a copy of the drafter drafts for its likely outcomes.

Other packages know three things. `Drafter.prepare` is called before a draft is verified, if
`DraftChoice.ahead` is True. `Draft.ahead` says whether a draft was ready. `DrafterSource.ahead_costs` decides
when it pays.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_spec.ahead.drafter import ahead_source
from mlx_spec.ahead.ranks import RemoteDrafter
from mlx_spec.ahead.ranks import draft_for_rank_0 as draft_for_rank_0
from mlx_spec.distributed.ranks import Ranks
from mlx_spec.drafters import DrafterSource
from mlx_spec.errors import InvalidValue


def drafting_ahead(source: DrafterSource, ranks: Ranks | None) -> DrafterSource:
    """Return the source of drafters that also draft ahead: on rank 1, or in a thread without ranks.

    Raises InvalidValue if it cannot draft ahead.
    """
    if ranks is None and mx.default_device().type == mx.gpu:
        raise InvalidValue(
            "drafting ahead needs a processor beside the target's, and all threads of this process use its "
            "GPU: do not draft ahead, or let another machine do so (mlx.launch and --draft-rank 1)"
        )
    return ahead_source(source, None if ranks is None else partial(RemoteDrafter, ranks))
