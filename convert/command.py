"""`mlx-spec convert`: Hugging Face weights to a pair that is tested before it gets its name."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument

from mlx_spec.apps.command import flag, option, program
from mlx_spec.device import require_backend
from mlx_spec.errors import SpecError
from mlx_spec.hub.files import human_bytes
from mlx_spec.hub.progress import StageProgress

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Options:
    """Convert a target and its drafter, in Hugging Face format or GGUF, to a pair that `mlx-spec chat` runs.

    The pair is tested before it gets its name.
    """

    target: Annotated[str, Argument(metavar="TARGET", help="a folder, a GGUF file or a repository")]
    out: Annotated[Path, option("--out", "-o", value="OUT", help="the folder to create")]
    drafter: Annotated[
        str,
        option(
            value="REPO|auto|none",
            help="a folder or a repository; auto: the one published for TARGET, or the draft heads inside it",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["4", "5", "6", "8", "mxfp4", "nvfp4", "none"] | None,
        option(
            "-q",
            help="bits of the target, or a mode",
            default="4, and none where TARGET is quantized already",
        ),
    ] = None
    group_size: Annotated[int | None, option(value="N", help="weights that share a scale", default="64")] = (
        None
    )
    drafter_bits: Annotated[Literal["4", "8", "none"], option(help="bits of the drafter")] = "4"
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        option(help="type of the weights that are not quantized", default="as in the sources"),
    ] = None
    skip_test: Annotated[bool, flag("--no-self-test", "write the pair without the test; it is recorded")] = (
        False
    )


@contextmanager
def long_run(out: Path, interrupted: str) -> Iterator[StageProgress]:
    """Yield the progress of a run that writes `out`; Ctrl-C or an error of the system end it in one line."""
    progress = StageProgress(sys.stderr)
    try:
        yield progress
    except OSError as error:
        what = f"{error.filename or out}: {error.strerror or error}"
        if error.errno in FULL:
            what = f"the disk of {out.expanduser().absolute().parent} is full ({error.strerror})"
        raise SpecError(f"{what}: make room there, or give another place with -o") from error
    except KeyboardInterrupt:
        progress.end()
        print(f"\nmlx-spec: {interrupted}", file=sys.stderr)
        raise
    finally:
        progress.end()


def _run(options: Options) -> int:
    require_backend()
    from mlx_spec.convert.convert import Request, convert

    with long_run(options.out, "interrupted, nothing was written") as progress:
        manifest = convert(Request(**vars(options)), progress)
    print("\n".join(_report(manifest, options.out)))
    return 0


def _report(manifest: Mapping[str, Any], out: Path) -> list[str]:
    """Return lines that say what was made and what the self-test measured."""
    lines = [f"{out}: {_describe_part('target', manifest)}"]
    if manifest["drafter"]:
        lines.append(f"{out}: {_describe_part('drafter', manifest)}")
    found = manifest["self_test"]
    if found["result"] != "passed":
        return [*lines, "self-test: not run (--no-self-test)"]
    ratio = found["perplexity"]["ratio"]
    lines.append(f"self-test: passed; perplexity {ratio:.4f} times the original's")
    acceptance = found.get("acceptance")
    if acceptance:
        lines.append(_describe_acceptance(acceptance))
        lines.append(
            f"greedy text with the drafter is the target's own on {found['lossless']['prompts']} prompts"
        )
    return lines


def _describe_part(name: str, manifest: Mapping[str, Any]) -> str:
    part = manifest["parts"][name]
    size = sum(file["bytes"] for file in part["files"].values())
    quantized = part.get("quantization")
    kind = f"{quantized.get('mode', 'affine')} {quantized['bits']} bits" if quantized else "not quantized"
    return f"{name} {part['name']}, {part['family']}, {kind}, {human_bytes(size)}"


def _describe_acceptance(found: Mapping[str, Any]) -> str:
    now = f"acceptance of the first draft token: {found['first']:.1%}, {found['length']:.2f} tokens a round"
    if "first_before" not in found:
        return now
    before = f"before: {found['first_before']:.1%}, {found['length_before']:.2f}"
    loss = f", loss {found['loss_percent']:.1f} %" if "loss_percent" in found else ""
    return f"{now} ({before}{loss})"


main = program("convert", Options, _run)
