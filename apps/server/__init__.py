"""The local server: OpenAI's, Anthropic's and Ollama's APIs in front of a pair."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.apps.command import guarded
from mlx_spec.apps.server.settings import parse
from mlx_spec.device import require_backend
from mlx_spec.errors import NotFound

from .settings import Settings

NEEDED = ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn")  # only servers need these


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `mlx-spec serve` and return its exit status: 0, or 1 on an error of ours.

    Raises SystemExit with status 2 if the command line makes no sense.
    """
    settings = parse(arguments)
    return guarded(lambda: _serve(settings))


def _serve(settings: Settings) -> int:
    require_backend()
    try:
        from .app import run  # imports MLX and what only servers need
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in NEEDED:
            raise
        raise NotFound(f"{error.name} is missing: pip install 'mlx-spec[server]'") from error
    return run(settings)
