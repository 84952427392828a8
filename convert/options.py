"""The options of `mlx-spec convert` and `mlx-spec train`. Imports nothing heavy: `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument

from mlx_spec.cli.command import MODEL, flag, option


@dataclass(frozen=True)
class ConversionOptions:
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
    q6k_bits: Annotated[
        Literal[8, 16] | None,
        option(help="bits of the tensors of a GGUF file of type Q6_K", default="8, and 16 on a CPU"),
    ] = None


@dataclass(frozen=True)
class TrainingOptions:
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
    parallel: Annotated[
        int | None,
        option(value="N", min=1, help="answers that are made at a time", default="as many as memory holds"),
    ] = None
    seed: Annotated[int, option(value="N", help="the same seed, the same drafter")] = 0
