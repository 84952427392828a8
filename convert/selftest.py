"""The proof that a converted pair is right, before it gets its name.

Every check runs on what was written, not on what was meant to be written. One that fails raises
SelfTestFailed, and nothing is kept.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from mlx_spec.convert.acceptance import judge
from mlx_spec.convert.drafter import prepare
from mlx_spec.convert.manifest import DRAFTER, TARGET
from mlx_spec.convert.measure import NARROWED, SAME_TYPE, difference, measure, texts
from mlx_spec.convert.progress import Progress
from mlx_spec.convert.roundtrip import compare
from mlx_spec.convert.subject import SelfTestFailed, Subject
from mlx_spec.convert.target import open_model

MAX_RATIO = 2.0  # of the perplexities after and before


def self_test(subject: Subject, progress: Progress) -> dict[str, Any]:
    """Run all checks that apply. Returns the figures for the manifest. Raises SelfTestFailed."""
    found: dict[str, Any] = {"result": "passed", "tensors": _tensors(subject, progress)}
    found |= _target(subject, progress)
    if subject.drafter is not None:
        found |= _drafter(subject, progress)
    return found


def _tensors(subject: Subject, progress: Progress) -> dict[str, Any]:
    """The files hold the tensors of the source."""
    model = open_model(subject.target, None, subject.target_conversion.dtype)
    result = {TARGET: asdict(compare(subject.target_folder, model.tensors, progress))}
    if subject.drafter is not None:
        dtype = subject.drafter_conversion.dtype
        drafter = prepare(subject.drafter, subject.family, subject.target.config, None, dtype)
        result[DRAFTER] = asdict(compare(subject.drafter_folder, drafter.tensors, progress))
    return result


def _target(subject: Subject, progress: Progress) -> dict[str, Any]:
    """Logits and perplexity against the original."""
    conversion = subject.target_conversion
    dtype = conversion.reference_dtype(subject.target)
    tokens = texts(subject.target.folder, subject.target.config)
    progress.stage("computing the original on built-in texts")
    original = measure(subject.target.folder, dtype, tokens)
    progress.stage("computing the converted target on the same texts")
    converted = measure(subject.target_folder, None, tokens)
    distance = difference(converted.logits, original.logits)
    tolerance = NARROWED if conversion.narrows(subject.target) else SAME_TYPE
    ratio = converted.perplexity / original.perplexity
    if conversion.quantization is None and not distance <= tolerance:
        raise SelfTestFailed(
            f"the logits of the converted target differ from the original's by {distance:.2g} standard "
            f"deviations, {tolerance:g} are tolerated: nothing was written; please report this"
        )
    if not (math.isfinite(ratio) and ratio <= MAX_RATIO):
        raise SelfTestFailed(
            f"the perplexity of the converted target is {converted.perplexity:.4g}, the original's is "
            f"{original.perplexity:.4g}: use more bits, smaller groups or another --dtype, or "
            "--no-self-test to have it nevertheless"
        )
    return {
        "logits": {"difference": distance, "tolerance": None if conversion.quantization else tolerance},
        "perplexity": {"original": original.perplexity, "converted": converted.perplexity, "ratio": ratio},
    }


def _drafter(subject: Subject, progress: Progress) -> dict[str, Any]:
    if subject.family is not None and not subject.family.runnable:
        return {"acceptance": f"not run: mlx_spec has no runtime for {subject.family.name} yet"}
    return judge(subject, progress)
