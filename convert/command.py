"""`mlx-spec convert`: Hugging Face weights to a pair that has proved itself."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_spec.backend import require_backend
from mlx_spec.errors import SpecError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = 130  # as shells report SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns its exit status: 0, 1 with one line on stderr, or 130 after Ctrl-C.

    A command line that makes no sense raises SystemExit with status 2.
    """
    options = parser().parse_args(arguments)
    try:
        return _run(options)
    except SpecError as error:
        problem = str(error)
    except OSError as error:
        problem = _explained(error, Path(options.out))
    except KeyboardInterrupt:
        print("\nmlx-spec: interrupted, nothing was written", file=sys.stderr)
        return INTERRUPTED
    print(f"mlx-spec: {problem}", file=sys.stderr)
    return 1


def _run(options: argparse.Namespace) -> int:
    require_backend()
    from mlx_spec.convert.convert import Request, convert
    from mlx_spec.hub.progress import StageProgress

    request = Request(
        options.target,
        options.drafter,
        Path(options.out),
        options.quantization,
        options.group_size,
        options.drafter_bits,
        options.dtype,
        options.self_test,
    )
    progress = StageProgress(sys.stderr)
    try:
        manifest = convert(request, progress)
    finally:
        progress.end()
    for line in _report(manifest, options.out):
        print(line)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options. Parsing raises SystemExit with status 2 when they make no sense."""
    parser = argparse.ArgumentParser(
        prog="mlx-spec convert",
        description="Convert a target and its drafter from Hugging Face format to a pair that `mlx-spec chat "
        "OUT` runs. The pair is tested before it gets its name.",
    )
    parser.add_argument("target", metavar="TARGET", help="a folder or a repository on Hugging Face")
    parser.add_argument("-o", "--out", required=True, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "--drafter",
        default="auto",
        metavar="REPO|auto|none",
        help="a folder or a repository; auto: the one published for TARGET, or the draft heads inside it",
    )
    parser.add_argument(
        "-q",
        dest="quantization",
        choices=["4", "5", "6", "8", "mxfp4", "nvfp4", "none"],
        help="bits of the target, or a mode (default: 4, and none where TARGET is quantized already)",
    )
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="weights that share a scale (default: 64)"
    )
    parser.add_argument(
        "--drafter-bits", choices=["4", "8", "none"], default="4", help="of the drafter (default: 4)"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="of what is not quantized (default: as in the sources)",
    )
    parser.add_argument(
        "--no-self-test",
        dest="self_test",
        action="store_false",
        help="write the pair unproved; it is recorded",
    )
    return parser


def _explained(error: OSError, out: Path) -> str:
    if error.errno in FULL:
        place = out.expanduser().absolute().parent
        return f"the disk of {place} is full ({error.strerror}): make room there, or write to another disk"
    return f"{error.filename or out}: {error.strerror or error}"


def _report(manifest: Mapping[str, Any], out: str) -> list[str]:
    """What was made and what the self-test found, for the user."""
    lines = [f"{out}: {_shown_part('target', manifest)}"]
    if manifest["drafter"]:
        lines.append(f"{out}: {_shown_part('drafter', manifest)}")
    found = manifest["self_test"]
    if found["result"] != "passed":
        return [*lines, "self-test: not run (--no-self-test)"]
    ratio = found["perplexity"]["ratio"]
    lines.append(f"self-test: passed; perplexity {ratio:.4f} times the original's")
    acceptance = found.get("acceptance")
    if isinstance(acceptance, str):
        lines.append(f"acceptance: {acceptance}")
    elif acceptance:
        lines.append(_shown_acceptance(acceptance))
        lines.append(
            f"greedy text with the drafter is the target's own on {found['lossless']['prompts']} prompts"
        )
    return lines


def _shown_part(name: str, manifest: Mapping[str, Any]) -> str:
    part = manifest["parts"][name]
    size = sum(file["bytes"] for file in part["files"].values())
    quantized = part.get("quantization")
    kind = f"{quantized.get('mode', 'affine')} {quantized['bits']} bits" if quantized else "not quantized"
    return f"{name} {part['name']}, {part['family']}, {kind}, {size / 1e6:.1f} MB"


def _shown_acceptance(found: Mapping[str, Any]) -> str:
    now = f"acceptance of the first draft token: {found['first']:.1%}, {found['length']:.2f} tokens a round"
    if "first_before" not in found:
        return now
    before = f"before: {found['first_before']:.1%}, {found['length_before']:.2f}"
    loss = f", loss {found['loss_percent']:.1f} %" if "loss_percent" in found else ""
    return f"{now} ({before}{loss})"
