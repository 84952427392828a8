"""The local endpoint: an OpenAI-style server in front of a pair."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.apps.command import guarded
from mlx_spec.apps.server.arguments import parse
from mlx_spec.apps.server.settings import Settings
from mlx_spec.device import require_backend
from mlx_spec.errors import NotFound

NEEDED = ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn")


def main(arguments: Sequence[str] | None = None) -> int:
    """`mlx-spec serve`. Returns its exit status when the server has ended: 0, or 1 on an error of ours.

    A command line that makes no sense raises SystemExit with status 2.
    """
    settings = parse(arguments)
    return guarded(lambda: _serve(settings))


def _serve(settings: Settings) -> int:
    require_backend()
    try:
        from mlx_spec.apps.server.running import run  # needs MLX and what only servers need
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in NEEDED:
            raise
        raise NotFound(f"{error.name} is missing: pip install 'mlx-spec[server]'") from error
    return run(settings)
