"""The local server: OpenAI's, Anthropic's and Ollama's APIs in front of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mlx_spec.cli.command import guarded
from mlx_spec.device import install_command, require_backend
from mlx_spec.errors import InvalidValue, NotFound
from mlx_spec.load import draft_for, follow

from .settings import Settings, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `mlx-spec serve` and return its exit status: 0, or 1 if it fails.

    Raises SystemExit with status 2 if the command line makes no sense.
    """
    settings = parse(arguments)
    return guarded(lambda: _serve(settings))


def _serve(settings: Settings) -> int:
    require_backend()
    from mlx_spec.distributed.ranks import join

    try:
        from .app import run  # imports MLX and the packages that only servers need
        from .engine.models import load_served
    except ModuleNotFoundError as error:
        needed = ("prometheus_client", "pydantic", "starlette", "uvicorn")  # the extra `server`
        if (error.name or "").split(".")[0] not in needed:
            raise
        raise NotFound(f"{error.name} is missing: {install_command('server')}") from error
    ranks = join()
    if settings.draft_rank is not None and (ranks is None or ranks.size != 2):
        raise InvalidValue(
            "--draft-rank needs two processes: mlx.launch -n 2 -- python -m mlx_spec.serve --draft-rank 1"
        )
    if ranks is None:
        return run(settings)
    if len(settings.models) > 1 or settings.cache_folder is not None:
        raise InvalidValue("over several machines there is one --target, without --model and --cache-folder")
    model = replace(settings.models[0], pinned=True)
    if settings.draft_rank is None:
        model = replace(model, ranks=ranks.size)
        load, help = partial(load_served, ranks=ranks), partial(follow, model.spec.target, ranks)
    else:
        load = partial(load_served, draft_ranks=ranks)
        help = partial(draft_for, model.spec, ranks)
    return ranks.run(help if ranks.rank else lambda: run(replace(settings, models=(model,)), load))
