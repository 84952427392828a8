"""Does the target follow the drafter, before and after the conversion, and is the text still the target's?"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_spec.checkpoint import read_config
from mlx_spec.convert.lossless import check_lossless
from mlx_spec.convert.measure import NARROWED, SAME_TYPE, load_lazily, prompts
from mlx_spec.convert.probes import variants
from mlx_spec.convert.progress import Progress, shown_size
from mlx_spec.convert.subject import SelfTestFailed, Subject
from mlx_spec.convert.walk import K, Makes, Walk, walk
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.known import mended
from mlx_spec.text import Text, read_text

FLOOR, BY_CHANCE = 0.1, 1.5  # of the share of first draft tokens that are right: the larger of both, but
CEILING = 0.3  # no more than this where the target repeats itself, so that chance is high
REPAIRED = 2.0  # times as many first draft tokens right, and above the floor: that was the mistake
MEMORY_SHARE = 0.6  # of the machine's, that an unquantized target may fill
CAUSES = "the drafter of another target or version of it, or weights that an earlier conversion damaged"

Follow = Callable[[nn.Module, Sequence[Makes], int], Walk]  # a model, drafters, draft tokens


def judge(subject: Subject, progress: Progress) -> dict[str, Any]:
    """Acceptance before and after, logits of the drafter, and losslessness. Raises SelfTestFailed."""
    text = read_text(subject.target_folder, subject.target.config)
    asked = prompts(subject.target_folder, text)
    follow = _follower(subject, text, asked)
    before, why = _before(subject, follow, progress)
    after, floor = _after(subject, follow, before, progress)
    gc.collect()
    shown = {"chance": after.chance, "floor": floor, "draft_tokens": K}
    return {
        "acceptance": {**_shown(before, after), **({"not_before": why} if why else {}), **shown},
        "drafter_logits": after.differences[1],
        "lossless": check_lossless(subject, asked, after.continuations, progress),
    }


def _follower(subject: Subject, text: Text, asked: Sequence[list[int]]) -> Follow:
    config = subject.target.config
    vocab_size = (config.get("text_config") or config)["vocab_size"]

    def follow(model: nn.Module, makes: Sequence[Makes], limit: int) -> Walk:
        return walk(model, makes, asked, text.eos, vocab_size=vocab_size, limit=limit)

    return follow


def _before(subject: Subject, follow: Follow, progress: Progress) -> tuple[Walk | None, str | None]:
    """The original pair, or why it is not measured."""
    if not (subject.target_conversion.changes or subject.drafter_conversion.changes):
        return None, "nothing was changed"
    room = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if subject.target.size > room:
        return None, f"the original target needs {shown_size(subject.target.size)} of memory"
    progress.stage("drafting with the original pair")
    model = load_lazily(subject.target.folder, subject.target_conversion.reference_dtype(subject.target))
    found = follow(model, [_open(subject, subject.original_drafter)], K)
    del model
    gc.collect()
    return found, None


def _after(subject: Subject, follow: Follow, before: Walk | None, progress: Progress) -> tuple[Walk, float]:
    """The converted pair, its target also with the original drafter, and the floor it is above."""
    progress.stage("drafting with the converted pair")
    model = load_lazily(subject.target_folder, None)
    folders = subject.original_drafter, subject.drafter_folder
    after = follow(model, [_open(subject, folder) for folder in folders], K)
    _check_logits(subject, after.differences[1])
    floor = min(CEILING, max(FLOOR, BY_CHANCE * after.chance))
    if after.acceptances[1].first < floor:
        progress.stage("looking for the cause of the low acceptance")
        _refuse(subject, before, after, floor, lambda makes: follow(model, makes, 1))
    return after, floor


def _open(subject: Subject, folder: Path) -> DrafterSource:
    return open_drafter(folder, mended(read_config(folder)), subject.target.config)


def _check_logits(subject: Subject, distance: float) -> None:
    """The logits of the converted drafter are the original's, unless it is quantized."""
    assert subject.drafter is not None
    conversion = subject.drafter_conversion
    tolerance = NARROWED if conversion.narrows(subject.drafter) else SAME_TYPE
    if conversion.quantization is None and not distance <= tolerance:
        raise SelfTestFailed(
            f"the logits of the converted drafter differ from the original's by {distance:.2g} standard "
            f"deviations, {tolerance:g} are tolerated: nothing was written; please report this"
        )


def _shown(before: Walk | None, after: Walk) -> dict[str, Any]:
    """The figures for the manifest."""
    ours = after.acceptances[1]
    result: dict[str, Any] = {"positions": ours.positions, "first": ours.first, "length": ours.length}
    if before is not None:
        original = before.acceptances[0]
        result |= {"first_before": original.first, "length_before": original.length}
        if original.first:
            result["loss_percent"] = 100 * (1 - ours.first / original.first)
    return result


def _refuse(
    subject: Subject,
    before: Walk | None,
    after: Walk,
    floor: float,
    follow: Callable[[Sequence[Makes]], Walk],
) -> None:
    """Raise SelfTestFailed with the likely cause of a low acceptance."""
    original, ours = after.acceptances
    problem = f"the target takes {ours.first:.0%} of the drafter's first tokens, {floor:.0%} are expected"
    if original.first >= floor:
        cause = f"quantizing the drafter cost it, {original.first:.0%} without: use --drafter-bits 8 or none"
    elif before is not None and before.acceptances[0].first >= floor:
        taken = before.acceptances[0].first
        cause = f"quantizing the target cost it, {taken:.0%} without: use -q with more bits"
    else:
        cause = _probed(subject, ours.first, floor, follow)
    raise SelfTestFailed(f"{problem}: {cause} (--no-self-test converts it nevertheless)")


def _probed(subject: Subject, found: float, floor: float, follow: Callable[[Sequence[Makes]], Walk]) -> str:
    """Which known mistake, undone, repairs the drafter."""
    name = subject.family.name if subject.family else ""
    tried = variants(name, subject.unquantized_folder, subject.target.config)
    if not tried:
        return f"likely {CAUSES}"
    shares: dict[str, float] = {}
    for needs in {variant.needs for variant in tried}:
        group = [variant for variant in tried if variant.needs == needs]
        found_of = follow(group).acceptances
        shares |= {variant.meaning: a.first for variant, a in zip(group, found_of, strict=True)}
    best = max(shares, key=lambda meaning: shares[meaning])
    if shares[best] < max(floor, REPAIRED * found):
        return f"none of {len(tried)} known mistakes explains it, so likely {CAUSES}"
    return f"it would be {shares[best]:.0%} if {best}: have the checkpoint repaired"
