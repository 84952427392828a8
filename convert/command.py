"""`mlx-spec convert` and `mlx-spec train`: run them, and print the results."""

from __future__ import annotations

import errno
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.files import human_bytes
from mlx_spec.checkpoint.quantizers import precision
from mlx_spec.cli.command import program
from mlx_spec.cli.progress import StageProgress
from mlx_spec.device import require_backend
from mlx_spec.errors import SpecError

from .options import ConversionOptions, TrainingOptions

if TYPE_CHECKING:
    from .selftest import SelfTestEffort


@contextmanager
def long_run(out: Path, interrupted: str) -> Iterator[StageProgress]:
    """Yield the progress of a run that writes `out`. Report Ctrl-C and system errors in one line."""
    progress = StageProgress(sys.stderr)
    try:
        yield progress
    except OSError as error:
        what = f"{error.filename or out}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what = f"the disk of {out.expanduser().absolute().parent} is full ({error.strerror})"
        raise SpecError(f"{what}: make room there, or give another place with -o") from error
    except KeyboardInterrupt:
        progress.end()
        print(f"\nmlx-spec: {interrupted}", file=sys.stderr)
        raise
    finally:
        progress.end()


def run_conversion(options: ConversionOptions, effort: SelfTestEffort | None = None) -> int:
    """Convert a pair, and print the figures of the self-test. Return the exit status."""
    require_backend()
    from .convert import convert

    with long_run(options.out, "interrupted, nothing was written") as progress:
        manifest = convert(options, progress, effort)
    print(
        "\n".join(
            [
                *_report(manifest, options.out),
                f"use it with: {shlex.join(['mlx-spec', 'chat', str(options.out)])}",
            ]
        )
    )
    return 0


def _report(manifest: Mapping[str, Any], out: Path) -> list[str]:
    """Return lines about the parts that were written and the figures of the self-test."""
    lines = [f"{out}: {_describe_part('target', manifest, out)}"]
    if manifest["drafter"]:
        lines.append(f"{out}: {_describe_part('drafter', manifest, out)}")
        notes = manifest["parts"]["drafter"].get("notes") or ()
        lines += [f"drafter: {note}" for note in notes if note.startswith("rotary embedding")]
    test = manifest["self_test"]
    if test["result"] != "passed":
        return [*lines, "self-test: not run (--no-self-test)"]
    ratio = test["perplexity"]["ratio"]
    lines.append(f"self-test: passed; perplexity {ratio:.4f} times the original's")
    acceptance = test.get("acceptance")
    if acceptance:
        lines.append(_describe_acceptance(acceptance))
        lines.append(f"text with the drafter is the target's own on {test['lossless']['prompts']} prompts")
    return lines


def _describe_part(name: str, manifest: Mapping[str, Any], out: Path) -> str:
    part, written = manifest["parts"][name], read_checkpoint(out / name)
    size = sum(file["bytes"] for file in part["files"].values())
    quantized = part.get("quantization")
    if quantized:
        weights = f"{quantized.get('mode', 'affine')} {quantized['bits']} bits"
    else:
        weights = f"not quantized ({precision(written.headers.tensors, written.config)})"
    return f"{name} {part['name']}, {part['family']}, {weights}, {human_bytes(size)}"


def _describe_acceptance(acceptance: Mapping[str, Any]) -> str:
    first, length = acceptance["first"], acceptance["length"]
    now = f"acceptance of the first draft token: {first:.1%}, {length:.2f} tokens a round"
    if "first_with_rope_of_target" in acceptance:
        other = f"{acceptance['first_with_rope_of_target']:.1%}"
        now += f'; {other} with the target\'s rotary embedding, "rope": "target" in its config.json'
    if "first_before" not in acceptance:
        return now
    before = f"before: {acceptance['first_before']:.1%}, {acceptance['length_before']:.2f}"
    loss = f", loss {acceptance['loss_percent']:.1f} %" if "loss_percent" in acceptance else ""
    return f"{now} ({before}{loss})"


# --- training


def run_training(options: TrainingOptions) -> int:
    """Train a drafter, and print its acceptance. Return the exit status."""
    require_backend()
    from .train.train import WORK, train

    interrupted = f"interrupted; the same command goes on from {options.out}{WORK}"
    with long_run(options.out, interrupted) as progress:
        report = train(options, progress)
    print("\n".join(_describe_training(report, options)))
    return 0


def _describe_training(report: Mapping[str, Any], options: TrainingOptions) -> list[str]:
    """Return lines about the drafter and its acceptance on held-out prompts."""
    lines = [f"{options.out}: trained on {report['rows']} tokens in {report['steps']} steps"]
    for temperature, kinds in report["tokens_a_round"].items():
        others = ", ".join(f"{kind} {n:.2f}" for kind, n in kinds.items() if kind != "all")
        lines.append(f"temperature {temperature}: {kinds['all']:.2f} tokens a round ({others})")
    lines.append(f"use it with: mlx-spec chat --target {options.target} --drafter {options.out}")
    return lines


convert_main = program("convert", ConversionOptions, run_conversion)
train_main = program("train", TrainingOptions, run_training)
