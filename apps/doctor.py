"""`mlx-spec doctor`: check the machine, test a pair, and print a certificate to paste into an issue.

No line has a path or the name of a host or user. So users can show all of it to others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mlx_spec import __version__, hub, load
from mlx_spec.checkpoint.files import human_bytes
from mlx_spec.cli.command import ERROR, Json, PairOptions, flag, program, show, show_folded, tell
from mlx_spec.device import NoBackend, device_name, require_backend
from mlx_spec.device.blas import blas_hint, gflops, use_blas
from mlx_spec.errors import SpecError
from mlx_spec.hub.catalog import LOOKUP
from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair, inspect
from mlx_spec.hub.local import local_models
from mlx_spec.hub.names import cache_folder

from .models import shown_number

if TYPE_CHECKING:
    from mlx_spec.cli.lossless import Gap
    from mlx_spec.pair import Pair

    from .selftest import Comparison, Effort, SelfTest

WIDTH = 76  # columns of the certificate
LINE = "-" * WIDTH


@dataclass(frozen=True)
class Options(PairOptions):
    """Check this machine and test a pair.

    Looks at what is installed and on the disk, then tests for at most a minute whether the text with
    speculation is the text without. Ends with a certificate to paste into an issue; `mlx-spec bench` measures
    the gain. The exit status is 1 when something is wrong.
    """

    def check_name(self) -> None:
        """Accept any name: the report says what is wrong with it."""

    quick: Annotated[bool, flag("--quick", "test for at most 15 seconds")] = False
    json: Json = False


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: Literal["ok", "note", "wrong"]
    text: str


@dataclass(frozen=True)
class Examination:
    """The findings about a machine and a pair."""

    checks: list[Check]
    words: dict[str, str] = field(default_factory=dict)  # of target, drafter and row class
    result: SelfTest | None = None  # None if nothing could be tested
    problem: str | None = None  # why nothing could be tested

    @property
    def is_fine(self) -> bool:
        """Return True if the self-test passed and no check is wrong."""
        passed = self.result is not None and self.result.passed
        return passed and all(check.state != "wrong" for check in self.checks)

    @property
    def lines(self) -> list[str]:
        """Return the lines of the certificate of now; none if nothing could be tested."""
        return certificate(self.words, self.result, self.checks, datetime.now(UTC)) if self.result else []

    def to_json(self) -> str:
        """Return everything as JSON, for programs."""
        report = {
            "ok": self.is_fine,
            "problem": self.problem,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "exact": self.words.get("exact"),
            "self_test": None if self.result is None else dataclasses.asdict(self.result),
            "certificate": "\n".join(self.lines) or None,
        }
        return json.dumps(json.loads(json.dumps(report), parse_constant=lambda _: None))  # NaN is not JSON


def _run(options: Options) -> int:
    checks: list[Check] = []
    for check in all_checks():
        checks.append(check)
        if not options.json:
            show_folded(f"{check.state:<6} {check.name:<10}  {check.text}")
    examination = _examined(options, checks)
    if options.json:
        show(examination.to_json())
    elif lines := examination.lines:
        show("", *lines)
    if examination.problem is not None:
        tell(examination.problem)
    return 0 if examination.is_fine else ERROR


def _examined(options: Options, checks: list[Check]) -> Examination:
    if any(check.name == "backend" and check.state == "wrong" for check in checks):
        return Examination(checks, problem="without MLX nothing can be tested")
    from .selftest import LONG, QUICK

    try:
        words, result = tested(load(**vars(options.spec)), QUICK if options.quick else LONG)
    except SpecError as error:
        return Examination(checks, problem=str(error))
    return Examination(checks, words, result)


def tested(pair: Pair, effort: Effort) -> tuple[dict[str, str], SelfTest]:
    """Run the self-test. Return target, drafter and the row class in words, and the result."""
    from mlx_spec.cli.progress import StageProgress

    from . import selftest

    target, drafter = _inspected(pair.info.target, "target"), _inspected(pair.info.drafter, "drafter")
    window = None if target is None else target.window
    result = selftest.self_test(pair, window, effort, StageProgress(sys.stderr))
    words = part_in_words(pair.info.target, target), part_in_words(pair.info.drafter, drafter)
    return {"target": words[0], "drafter": words[1], "exact": pair.rows.words}, result


def _inspected(name: str | None, role: Literal["target", "drafter"]) -> CheckpointInfo | None:
    """Return the description of a checkpoint, or of one half of a pair; None if it cannot be inspected."""
    try:
        info = None if name is None or name == LOOKUP else inspect(name)
    except SpecError:
        return None
    if isinstance(info, ConvertedPair):
        return info.target if role == "target" else info.drafter
    return info


def part_in_words(name: str | None, info: CheckpointInfo | None) -> str:
    """Describe a checkpoint in words, without its path."""
    path = Path(name or "none").expanduser()
    shown = path.name if path.exists() else name or "none"
    if info is None:
        return shown
    size = f"{shown_number(info.parameters)} parameters, {human_bytes(info.size)}"
    return f"{shown}, {info.kind or info.family}, {size}, {info.precision}"


# --- checks without a model


def all_checks() -> Iterator[Check]:
    """Run the checks in the order of the report."""
    mac = platform.mac_ver()[0]
    name = f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"
    yield Check("machine", "ok", _machine())
    yield Check("system", "ok", f"{name}, {platform.machine()}, Python {platform.python_version()}")
    yield _backend()
    yield from _blas()
    names = ("mlx", "mlx-lm", "numpy", "sentencepiece", "huggingface_hub", "transformers")
    packages = [f"mlx-spec {__version__}", *(f"{name} {version(name)}" for name in names)]
    yield Check("packages", "ok", ", ".join(packages))
    yield _disk()
    yield _models()


def version(name: str) -> str:
    """Return the installed version of a package, or "none"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        require_backend()
        chip = device_name()
    except NoBackend:
        chip = platform.processor() or platform.machine()
    return f"{chip}, {os.cpu_count()} cores, {memory / 1e9:.0f} GB"


def _backend() -> Check:
    """Check that exactly one build of MLX is installed, and that it can multiply."""
    try:
        require_backend()
    except NoBackend as error:
        return Check("backend", "wrong", str(error))
    import mlx.core as mx

    # Each of these packages contains all of MLX.
    several = [name for name in ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13") if version(name) != "none"]
    if len(several) > 1:
        wrong = f"{' and '.join(several)} overwrite each other's files: uninstall all, then install one"
        return Check("backend", "wrong", wrong)
    rows = mx.arange(64).reshape(8, 8).astype(mx.float32)
    if not bool(mx.array_equal(rows @ mx.eye(8), rows)):
        return Check("backend", "wrong", "MLX multiplies a matrix by one and gets another: install it again")
    gpu = "the GPU, by Metal" if mx.metal.is_available() else "the GPU, by CUDA"
    device = "the CPU" if mx.default_device().type == mx.cpu else gpu
    text = f"MLX {version('mlx')} on {device}"
    if device != "the CPU" and os.environ.get("MLX_ENABLE_TF32") != "0":
        rounded = "MLX_ENABLE_TF32 is set, so float32 may be rounded to 10 bits: unset it for an exact text"
        return Check("backend", "note", f"{text}; {rounded}")
    return Check("backend", "ok", text)


def _blas() -> Iterator[Check]:
    """Name the BLAS and its speed on one large product, if MLX's CPU backend uses a BLAS."""
    try:
        require_backend()
    except NoBackend:
        return
    if (blas := use_blas()) is not None:
        text, hint = f"{blas.name}, {gflops():.0f} GFLOP/s in float32", blas_hint()
        yield Check("BLAS", "note" if hint else "ok", f"{text}; {hint}" if hint else text)


def _disk() -> Check:
    free = hub.free_bytes(cache_folder())
    text = f"{free / 1e9:.1f} GB free where models are kept"
    # A small target and its drafter take about 5 GB.
    return Check("disk", "ok" if free >= 5e9 else "note", text)


def _models() -> Check:
    whole, broken = list[str](), list[str]()
    for model in local_models():
        name = Path(model.name).name if model.origin == "converted" else model.name
        (broken if model.problem else whole).append(f"{name} ({model.origin})")
    text = ", ".join(whole) or "none"
    if broken:
        text += f"; not to be loaded: {', '.join(broken)}, see `mlx-spec models`"
    return Check("models", "note" if broken else "ok", text)


# --- the certificate


def certificate(words: dict[str, str], result: SelfTest, checks: list[Check], now: datetime) -> list[str]:
    """Return the lines of the certificate, each of at most 76 columns. `words` describe the pair."""
    title, date = "mlx-spec doctor", now.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [LINE, f"{title}{date:>{WIDTH - len(title)}}", LINE]
    for label, text in _rows(words, result, checks):
        lines += textwrap.wrap(
            " ".join(text.split()), WIDTH, initial_indent=f"{label:<13}", subsequent_indent=" " * 13
        )
    return [*lines, LINE]


def _rows(words: dict[str, str], result: SelfTest, checks: list[Check]) -> Iterator[tuple[str, str]]:
    from .selftest import BATCHED, OWN

    yield "verdict", result.verdict
    # At most three differences are shown in full.
    for comparison in (*result.wrong, *result.near_ties)[:3]:
        yield from _finding(comparison, result.allowed)
    yield from words.items()
    for check in checks:
        if check.state == "wrong":
            yield "wrong", f"{check.name}: {check.text}"
        elif check.name in ("machine", "system", "backend", "BLAS", "packages"):
            yield check.name, check.text
    for label, seeded in (("greedy", False), ("seeded", True)):
        if cases := [case for case in result.comparisons if case.seeded == seeded]:
            tokens, rejected = sum(c.tokens for c in cases), sum(c.drafted - c.accepted for c in cases)
            prompts = len({case.prompt for case in cases})
            text = f"{len(cases)} answers to {prompts} prompts, {tokens} tokens"
            yield label, f"{text}, {rejected} draft tokens rejected"
    if batched := [case for case in result.comparisons if case.decoder == BATCHED]:
        equal = sum(case.divergence is None and case.error is None for case in batched)
        text = f"{len(batched)} of these answers in one batch with others, {equal} of them the same"
        yield "in a batch", text
    if result.noise is not None:
        most = f"{result.noise.roundings:.3g} roundings between correct caches"
        yield "noise", f"{most}; near-tie: logits at most {result.allowed:.3g} roundings apart"
    if result.picture:
        yield "picture", f"a drawing of {result.picture} rows was read by the vision tower"
    if result.window is not None:
        yield "window", f"{result.window} tokens, {'crossed' if result.past_window else 'NOT reached'}"
    if result.left_out:
        yield "left out", f"{result.left_out} of the tests: the time was too short"
    own_cases = [case for case in result.comparisons if case.decoder == OWN]
    if drafted := sum(case.drafted for case in own_cases):
        yield "acceptance", f"{sum(c.accepted for c in own_cases) / drafted:.0%} of {drafted} draft tokens"
    yield "test took", f"{result.seconds:.0f} s"


def _finding(comparison: Comparison, allowed: float) -> Iterator[tuple[str, str]]:
    label = "difference" if comparison.is_wrong(allowed) else "near-tie"
    how = f"{comparison.decoder}, {'seeded' if comparison.seeded else 'greedy'}, prompt {comparison.prompt!r}"
    if comparison.error is not None:
        yield "broke off", f"{how}: after {comparison.tokens} tokens, {comparison.error}"
    if comparison.divergence is not None:
        at = comparison.divergence
        tokens = f"token {at.position} is {at.found!r} where plain decoding says {at.expected!r}"
        yield label, f"{how}: {tokens}; {_distance(at.gap)}"
    if comparison.drift is not None and not comparison.drift.within(allowed):
        yield label, f"{how}: {comparison.tokens} equal tokens, but after them {_distance(comparison.drift)}"


def _distance(gap: Gap) -> str:
    return f"logits {gap.logits:.3g} apart, {gap.roundings:.3g} roundings of {gap.dtype}"


main = program("doctor", Options, _run)
