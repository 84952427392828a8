"""The body of a request to `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mlx_spec.apps.server import fields


class Body(fields.Body):
    """A request."""

    prompt: Any = None  # text, texts, tokens or lists of tokens
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: str | None = None
