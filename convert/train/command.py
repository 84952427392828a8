"""`mlx-spec train`: a drafter for a target that has none."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Argument

from mlx_spec.apps.command import INTERRUPTED, MODEL, option, program
from mlx_spec.device import require_backend
from mlx_spec.errors import SpecError

LINE_SECONDS = 30.0  # between two lines of progress where there is no terminal


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


class _Bars:
    """Show the stages of a run: a bar on a terminal, a line now and then anywhere else."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task, self._stage, self._said = TaskID(0), "", 0.0

    def advance(self, stage: str, done: int, total: int, figures: str) -> None:
        """Show that `done` of `total` steps of a stage are done."""
        if not sys.stderr.isatty():
            if stage != self._stage or done == total or time.monotonic() - self._said > LINE_SECONDS:
                print(f"{stage}: {done} of {total} {figures}".rstrip(), file=sys.stderr, flush=True)
                self._stage, self._said = stage, time.monotonic()
            return
        if stage != self._stage or self._bar is None:
            self.end()
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}")
            times = TimeElapsedColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, *times, console=Console(stderr=True))
            self._bar.start()
            self._task, self._stage = self._bar.add_task(stage, total=total, figures=""), stage
        self._bar.update(self._task, completed=done, total=total, figures=figures)

    def end(self) -> None:
        """Stop the present bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


def _run(options: Options) -> int:
    require_backend()
    from mlx_spec.convert.train.train import WORK, TrainingRequest, train

    bars = _Bars()
    request = TrainingRequest(**{**vars(options), "prompts": tuple(options.prompts or ())})
    try:
        report = train(request, lambda line: print(line, file=sys.stderr), bars.advance)
    except OSError as error:
        raise SpecError(f"{error.filename or options.out}: {error.strerror or error}") from error
    except KeyboardInterrupt:
        bars.end()
        print(f"mlx-spec: interrupted; the same command goes on from {options.out}{WORK}", file=sys.stderr)
        return INTERRUPTED
    finally:
        bars.end()
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
