"""`mlx-spec train`: a drafter for a target that has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from mlx_spec.apps.command import MODEL, option, program
from mlx_spec.convert.command import long_run
from mlx_spec.device import require_backend


@dataclass(frozen=True)
class Options:
    """Train a drafter on a target's own answers. The same command goes on where an unfinished run ended.

    It takes minutes to hours, and keeps what it needs in OUT.training. The text of the target does not change
    with any drafter; a better one makes it faster.
    """

    target: Annotated[str, Argument(metavar="TARGET", help="a folder, a GGUF file, a repository or smollm2")]
    out: Annotated[Path, option("--out", "-o", value="OUT", help="the folder to create")]
    source: Annotated[
        str | None,
        option("--from", value=MODEL, help="improve this drafter", default="make a new one"),
    ] = None
    prompts: Annotated[
        list[Path] | None,
        option(
            value="FILE",
            help="your prompts: one on each line, or a conversation that /save wrote; may be repeated",
            default="the bundled ones",
        ),
    ] = None
    answers: Annotated[int, option(value="N", min=50, help="answers to learn from")] = 2000
    answer_tokens: Annotated[int, option(value="N", min=16, help="tokens of an answer, at most")] = 256
    epochs: Annotated[float, option(value="N", min=0.01, help="passes over the answers")] = 4.0
    vocabulary: Annotated[int, option(value="N", min=256, help="tokens that a new drafter knows")] = 8192
    width: Annotated[
        int | None, option(value="N", min=32, help="of a new drafter", default="512, or the target's")
    ] = None
    parallel: Annotated[int, option(value="N", min=1, help="answers that are made at a time")] = 64
    seed: Annotated[int, option(value="N", help="the same seed, the same drafter")] = 0


def _run(options: Options) -> int:
    require_backend()
    from mlx_spec.convert.train.train import WORK, TrainingRequest, train

    request = TrainingRequest(**{**vars(options), "prompts": tuple(options.prompts or ())})
    interrupted = f"interrupted; the same command goes on from {options.out}{WORK}"
    with long_run(options.out, interrupted) as progress:
        report = train(request, progress)
    print("\n".join(_lines(report, options)))
    return 0


def _lines(report: Mapping[str, Any], options: Options) -> list[str]:
    """Return what was made, and what it accepts on held-out prompts."""
    lines = [f"{options.out}: trained on {report['rows']} tokens in {report['steps']} steps"]
    for temperature, kinds in report["tokens_a_round"].items():
        others = ", ".join(f"{kind} {n:.2f}" for kind, n in kinds.items() if kind != "all")
        lines.append(f"temperature {temperature}: {kinds['all']:.2f} tokens a round ({others})")
    lines.append(f"use it with: mlx-spec chat --target {options.target} --drafter {options.out}")
    return lines


main = program("train", Options, _run)
