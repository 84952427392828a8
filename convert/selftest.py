"""Prove that a converted pair is right, before it gets its name.

Every check reads the files that were written: tensors, logits, perplexity, acceptance of the drafter, and
that it changes no text. A failed check raises SelfTestFailed, and nothing is kept.

Drafters are asked at every position of the target's own greedy continuations of built-in prompts, so that one
pass measures several. The engine takes no part in that.
"""

from __future__ import annotations

import gc
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.drafters.checkpoint import read_tensors
from mlx_spec.errors import BadCheckpoint
from mlx_spec.grammar import read_tokens
from mlx_spec.hub.catalog import repair_config
from mlx_spec.hub.checkpoint import read_config, text_config
from mlx_spec.hub.files import human_bytes, shortened
from mlx_spec.hub.progress import StageProgress
from mlx_spec.load import load
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Greedy, LogitsProcessor, Sampling
from mlx_spec.text import read_text

from .measure import (
    SelfTestFailed,
    TestedConversion,
    check_logits,
    difference,
    load_lazily,
    measure,
    prompts,
    texts,
)
from .parts import convert_drafter, convert_model
from .write import DRAFTER, TARGET

MAX_PERPLEXITY_RATIO = 2.0  # of the converted target to the original
MAX_ERROR = 0.5  # of a quantized tensor; a wrong one has 1.4, 4 bits have 0.1
BLOCK = 1 << 24  # elements compared at a time

K = 3  # draft tokens
GENERATED = 32  # tokens after each prompt
GREEDY = Sampling()
# The share of first draft tokens that must be accepted: the larger of MIN_ACCEPTANCE and CHANCE_FACTOR times
# chance, but at most MAX_FLOOR, for targets that repeat themselves.
MIN_ACCEPTANCE, CHANCE_FACTOR, MAX_FLOOR = 0.1, 1.5, 0.3
MEMORY_SHARE = 0.6  # of the machine's memory that an unquantized target may fill
LIKELY_CAUSES = "likely the drafter of another target or version of it, or weights damaged by a conversion"
# Two steps of a logit of the type, relative. A block of rows and a single row may be summed in another order,
# and in a tie within the last bits both tokens are the most likely one.
TIE_TOLERANCE = {mx.bfloat16: 2.0**-6, mx.float16: 2.0**-9, mx.float32: 1e-4}


def self_test(subject: TestedConversion, progress: StageProgress) -> dict[str, Any]:
    """Run all checks that apply. Return the figures for pair.json. Raises SelfTestFailed."""
    found: dict[str, Any] = {"result": "passed", "tensors": _check_tensors(subject, progress)}
    found |= _check_target(subject, progress)
    if subject.drafter is not None:
        found |= check_drafter(subject, progress)
    return found


def _check_tensors(subject: TestedConversion, progress: StageProgress) -> dict[str, Any]:
    """Compare the files with the source, tensor by tensor."""
    model = convert_model(subject.target, None, subject.target_conversion.dtype)
    result = {TARGET: compare(subject.folder / TARGET, model.tensors, progress)}
    if subject.drafter is not None:
        dtype = subject.drafter_conversion.dtype
        drafter = convert_drafter(subject.drafter, subject.family, subject.target.config, None, dtype)
        result[DRAFTER] = compare(subject.folder / DRAFTER, drafter.tensors, progress)
    return result


def _check_target(subject: TestedConversion, progress: StageProgress) -> dict[str, Any]:
    """Compare logits and perplexity with the original's."""
    conversion = subject.target_conversion
    dtype = conversion.reference_dtype(subject.target)
    tokens = texts(subject.target.folder, subject.target.config)
    progress.stage("computing the original on built-in texts")
    original = measure(subject.target.folder, dtype, tokens)
    progress.stage("computing the converted target on the same texts")
    converted = measure(subject.folder / TARGET, None, tokens)
    distance = difference(converted.logits, original.logits)
    tolerance = check_logits(distance, subject.target, conversion)
    ratio = converted.perplexity / original.perplexity
    if not (math.isfinite(ratio) and ratio <= MAX_PERPLEXITY_RATIO):
        raise SelfTestFailed(
            f"the perplexity of the converted target is {converted.perplexity:.4g}, the original's is "
            f"{original.perplexity:.4g}: use more bits, smaller groups or another --dtype, or "
            "--no-self-test to have it nevertheless"
        )
    return {
        "logits": {"difference": distance, "tolerance": tolerance},
        "perplexity": {"original": original.perplexity, "converted": converted.perplexity, "ratio": ratio},
    }


def compare(folder: Path, expected: dict[str, mx.array], progress: StageProgress) -> dict[str, Any]:
    """Compare the files in `folder` with unquantized tensors. Empties `expected`. Raises BadCheckpoint.

    Returns the tensors that are equal bit by bit, those that are quantized, and the largest error of one.
    """
    written, config = read_tensors(folder), read_config(folder)
    progress.stage(f"comparing {folder.name} with its source", tensors=len(expected))
    errors: dict[str, float] = {}
    count, wrong, infinite = len(expected), [], []
    for name in sorted(expected):
        source, stem = expected.pop(name), name.removesuffix("weight")
        found = {part: written.pop(stem + part, None) for part in ("scales", "biases") if name != stem}
        weight = written.pop(name, None)
        if weight is None:
            wrong.append(name)
        elif found.get("scales") is None:
            wrong += [] if _is_same(weight, source) else [name]
            infinite += [] if _is_finite(weight) else [name]
        else:
            errors[name] = _error(source, weight, found, _settings(config, stem.removesuffix(".")))
            wrong += [] if errors[name] < MAX_ERROR else [name]  # nan is not
        progress.advance()
        mx.clear_cache()
    if wrong or written:
        raise BadCheckpoint(
            f"the files written to {folder.name} are not what the source holds, in "
            f"{shortened([*wrong, *sorted(written)])}: the disk or the source is damaged"
        )
    if infinite:
        raise BadCheckpoint(
            f"{shortened(infinite)} in {folder.name} is not finite: the source is damaged, or --dtype holds "
            "less than its values need"
        )
    equal, error = count - len(errors), max(errors.values(), default=0.0)
    return {"equal": equal, "quantized": len(errors), "error": error}


def _is_same(a: mx.array, b: mx.array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    floating = mx.issubdtype(a.dtype, mx.floating)
    return bool(mx.array_equal(a, b, equal_nan=floating))


def _is_finite(a: mx.array) -> bool:
    return not mx.issubdtype(a.dtype, mx.floating) or bool(mx.isfinite(a).all())


def _error(
    source: mx.array, weight: mx.array, found: Mapping[str, mx.array | None], settings: Mapping[str, Any]
) -> float:
    """Return the root mean square of the error of a quantized tensor by that of its weights."""
    scales = found["scales"]
    assert scales is not None
    mx.eval(source)
    step = max(1, BLOCK * source.shape[0] // source.size)  # rows
    lost, size = 0.0, 0.0
    for start in range(0, source.shape[0], step):
        rows = slice(start, start + step)
        biases = None if found["biases"] is None else found["biases"][rows]
        original = source[rows].astype(mx.float32)
        restored = mx.dequantize(weight[rows], scales[rows], biases, **settings).astype(mx.float32)
        lost += float(mx.square(restored - original).sum())
        size += float(mx.square(original).sum())
    return math.sqrt(lost / size) if size else math.sqrt(lost)


def _settings(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return bits, group size and mode of one layer."""
    quantization = config["quantization"]
    own = quantization.get(path)
    chosen = own if isinstance(own, dict) else quantization
    defaults = {"bits": 4, "group_size": 64, "mode": "affine"}
    return {key: chosen.get(key, default) for key, default in defaults.items()}


# --- the drafter


@dataclass(frozen=True)
class Acceptance:
    """How often the target accepts the tokens of a drafter."""

    positions: int  # with a draft
    first: float  # share of positions whose first draft token is accepted
    length: float  # tokens of a round with K draft tokens, the target's own token included


@dataclass(frozen=True)
class Walk:
    """The target's greedy continuations, and the drafters along them."""

    continuations: list[list[int]]
    acceptances: list[Acceptance]  # by drafter

    @property
    def chance(self) -> float:
        """Return the acceptance of a drafter that always guesses the most common token."""
        tokens = Counter(token for continuation in self.continuations for token in continuation)
        return max(tokens.values()) / tokens.total()


def check_drafter(subject: TestedConversion, progress: StageProgress) -> dict[str, Any]:
    """Check acceptance and losslessness; return figures. Raises SelfTestFailed."""
    config = subject.target.config
    text = read_text(subject.folder / TARGET, config)
    built_in = prompts(subject.folder / TARGET, text)
    vocab_size = text_config(config)["vocab_size"]

    def walk_with(model: nn.Module, folders: Sequence[Path]) -> Walk:
        drafters = [open_drafter(f, repair_config(read_config(f)), config) for f in folders]
        return walk(model, drafters, built_in, text.eos, vocab_size=vocab_size)

    before, why_not = None, _why_not_before(subject)
    if why_not is None:
        progress.stage("drafting with the original pair")
        dtype = subject.target_conversion.reference_dtype(subject.target)
        before = walk_with(load_lazily(subject.target.folder, dtype), [subject.original_drafter])
        gc.collect()
    progress.stage("drafting with the converted pair")
    after = walk_with(
        load_lazily(subject.folder / TARGET, None), [subject.original_drafter, subject.folder / DRAFTER]
    )
    gc.collect()
    floor = min(MAX_FLOOR, max(MIN_ACCEPTANCE, CHANCE_FACTOR * after.chance))
    _check_acceptance(before, after, floor)
    figures = _figures(before, after)
    figures |= {"not_before": why_not} if why_not else {}
    return {
        "acceptance": {**figures, "chance": after.chance, "floor": floor, "draft_tokens": K},
        "lossless": check_lossless(subject, built_in, after.continuations, progress),
    }


def _why_not_before(subject: TestedConversion) -> str | None:
    """Return why the original pair is not measured, None if it is."""
    if not (subject.target_conversion.changes or subject.drafter_conversion.changes):
        return "nothing was changed"
    limit = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    size = subject.target.size
    return f"the original target needs {human_bytes(size)} of memory" if size > limit else None


def _check_acceptance(before: Walk | None, after: Walk, floor: float) -> None:
    """Raise SelfTestFailed with the likely cause if the acceptance is below `floor`."""
    original, ours = after.acceptances
    if ours.first >= floor:
        return
    if original.first >= floor:
        cause = f"quantizing the drafter cost it, {original.first:.0%} without: use --drafter-bits 8 or none"
    elif before is not None and before.acceptances[0].first >= floor:
        accepted = before.acceptances[0].first
        cause = f"quantizing the target cost it, {accepted:.0%} without: use -q with more bits"
    else:
        cause = LIKELY_CAUSES
    raise SelfTestFailed(
        f"the target accepts {ours.first:.0%} of the drafter's first tokens, {floor:.0%} are expected: "
        f"{cause} (--no-self-test converts it nevertheless)"
    )


def _figures(before: Walk | None, after: Walk) -> dict[str, Any]:
    ours = after.acceptances[1]
    result: dict[str, Any] = {"positions": ours.positions, "first": ours.first, "length": ours.length}
    if before is not None:
        original = before.acceptances[0]
        result |= {"first_before": original.first, "length_before": original.length}
        if original.first:
            result["loss_percent"] = 100 * (1 - ours.first / original.first)
    return result


# --- drafters along the target's text


def walk(
    model: nn.Module,
    drafters: Sequence[DrafterSource],
    prompts: Sequence[list[int]],
    eos: Collection[int],
    *,
    vocab_size: int,
) -> Walk:
    """Continue `prompts` greedily and ask each drafter for K tokens at every position.

    The drafters must need the same features.
    """
    paths = [_walk_one(model, drafters, prompt, frozenset(eos), vocab_size) for prompt in prompts]
    return Walk(
        [tokens for tokens, _ in paths],
        [count_accepted([(tokens, drafts[i]) for tokens, drafts in paths]) for i in range(len(drafters))],
    )


def _walk_one(
    model: nn.Module, sources: Sequence[DrafterSource], prompt: list[int], eos: frozenset[int], vocab: int
) -> tuple[list[int], list[list[list[int]]]]:
    """Return a continuation and, by drafter and position, up to K draft tokens."""
    target = LMTarget(model, sources[0].needs)
    drafters = [source.make(target.parts) for source in sources]
    sampler = Greedy(LogitsProcessor(GREEDY, len(prompt), vocab))
    tokens, drafts = list[int](), [list[list[int]]() for _ in sources]
    history = list(prompt)
    if len(history) > 1:
        features = target.prefill(history[:-1])
        for drafter in drafters:
            drafter.observe(history, features)
    while len(tokens) < GENERATED and not eos.intersection(tokens[-1:]):
        for own, drafter in zip(drafts, drafters, strict=True):
            own.append(read_tokens(drafter.draft(history, K, sampler).tokens))
        token = read_tokens(target.verify(mx.array(history[-1:])).argmax(axis=-1))
        features = target.commit(1)
        history += token
        tokens += token
        for drafter in drafters:
            drafter.observe(history, features)
    return tokens, drafts


def count_accepted(paths: Sequence[tuple[list[int], list[list[int]]]]) -> Acceptance:
    """Return the acceptance of drafts at each position of continuations."""
    runs = [
        (_accepted(draft, tokens[i : i + K]), len(tokens) - i)
        for tokens, drafts in paths
        for i, draft in enumerate(drafts)
        if draft
    ]
    if not runs:
        return Acceptance(0, 0.0, 1.0)
    whole = [run for run, left in runs if left >= K] or [run for run, _ in runs]
    first = sum(run > 0 for run, _ in runs) / len(runs)
    return Acceptance(len(runs), first, 1 + sum(whole) / len(whole))


def _accepted(draft: Sequence[int], truth: Sequence[int]) -> int:
    """Return the number of draft tokens before the first that differs from `truth`."""
    wrong = (i for i, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b)
    return next(wrong, min(len(draft), len(truth)))


# --- losslessness


def check_lossless(
    subject: TestedConversion,
    prompts: Sequence[list[int]],
    plain: Sequence[list[int]],
    progress: StageProgress,
) -> dict[str, Any]:
    """Compare the text of the loaded pair with the target's `plain` continuations.

    Raises SelfTestFailed.
    """
    progress.stage("comparing speculative with plain decoding")
    pair = load(subject.folder / TARGET, subject.folder / DRAFTER, num_draft_tokens=K)
    drafted = [
        [token for round in pair.generate(prompt, max_tokens=len(expected)) for token in round.tokens]
        for prompt, expected in zip(prompts, plain, strict=True)
    ]
    del pair
    gc.collect()
    ties = 0
    for prompt, expected, found in zip(prompts, plain, drafted, strict=True):
        if found == expected:
            continue
        at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        if not _is_tie(subject, [*prompt, *expected[:at]], (found[at], expected[at])):
            raise SelfTestFailed(
                f"the pair says token {found[at]} where the target alone says {expected[at]}, so speculation "
                "is not lossless here: nothing was written; please report this"
            )
        ties += 1
    return {"prompts": len(prompts), "tokens": sum(map(len, plain)), "ended_in_a_tie": ties}


def _is_tie(subject: TestedConversion, history: list[int], tokens: tuple[int, int]) -> bool:
    """Return True if two tokens are equally likely within the logits' type."""
    logits = load_lazily(subject.folder / TARGET, None)(mx.array([history]))[0, -1]
    a, b = (float(value) for value in np.array(logits[mx.array(tokens)].astype(mx.float32)))
    return abs(a - b) <= TIE_TOLERANCE[logits.dtype] * max(abs(a), abs(b))
