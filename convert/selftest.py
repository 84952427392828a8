"""Test a converted pair before it gets its name.

Every check reads the written files. They check tensors, logits, perplexity and the drafter's acceptance, and
the doctor's self-test checks that drafts change no text. A failed check raises SelfTestFailed, and nothing is
kept.
"""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_spec.apps.selftest import QUICK, Effort
from mlx_spec.apps.selftest import self_test as lossless_test
from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.checkpoint.files import LOADING_ERRORS, human_bytes, one_line, shortened
from mlx_spec.checkpoint.layouts import DTYPES
from mlx_spec.checkpoint.weights import is_dequantized, target_shape
from mlx_spec.cli.progress import StageProgress
from mlx_spec.cli.texts import PROMPTS, QUESTIONS, TEXTS
from mlx_spec.device import memory_for_models
from mlx_spec.drafters import open_drafter
from mlx_spec.drafters.checkpoint import KEY
from mlx_spec.errors import BadCheckpoint, InvalidValue, SpecError
from mlx_spec.load import load
from mlx_spec.model.dense import dequantized
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling.softmax import log_total
from mlx_spec.tokenizer import Tokenizer, read_tokenizer

from .converted import convert_drafter, convert_target, load_unread
from .plan import DRAFTER, TARGET, Conversion, ConversionPlan
from .write import write_folder

Floats = NDArray[np.float32]
K = 3  # draft tokens
UNQUANTIZED = ".unquantized"  # folder of the drafter in our form without quantization, during the test


class SelfTestFailed(SpecError):
    """A converted pair that differs from its source."""


@dataclass(frozen=True)
class SelfTestEffort:
    """How much a self-test reads and writes, and what it tolerates."""

    text_length: int = 64  # tokens of each text
    prompts: Sequence[str] = tuple(PROMPTS)
    questions: Sequence[str] = tuple(QUESTIONS)  # for a tokenizer with a chat template
    generated: int = 48  # tokens after each prompt
    comparison: Effort = QUICK  # of texts with drafts to plain ones
    max_perplexity_ratio: float = 2.0  # of the converted target to the original


def self_test(
    plan: ConversionPlan, progress: StageProgress, effort: SelfTestEffort | None = None
) -> dict[str, Any]:
    """Run all checks that apply. Return the figures for pair.json. Raises SelfTestFailed."""
    effort = effort or SelfTestEffort()
    written = {role: read_checkpoint(plan.folder / role) for role in plan.conversions}
    original = None if plan.drafter is None else _original_drafter(plan, written[DRAFTER], progress)
    figures: dict[str, Any] = {"result": "passed", "tensors": _check_tensors(plan, written, progress)}
    figures |= _check_target(plan, written[TARGET], progress, effort)
    if original is not None:
        figures |= _check_drafter(plan, written[DRAFTER], original, progress, effort)
    shutil.rmtree(plan.folder / UNQUANTIZED, ignore_errors=True)
    return figures


def _original_drafter(plan: ConversionPlan, written: Checkpoint, progress: StageProgress) -> Checkpoint:
    """Return the drafter to compare with: as published for a language model, else in our form, not quantized.

    In our form it is written once more if `written` is quantized.
    """
    assert plan.drafter is not None
    if plan.drafter.family is None:
        return plan.drafter.checkpoint
    if not plan.compares_copy or "quantization" not in written.config:
        return written
    folder = plan.folder / UNQUANTIZED
    drafter = convert_drafter(plan.drafter.unquantized, plan.target.checkpoint.config)
    write_folder(folder, drafter, None, progress)
    return read_checkpoint(folder)


def _check_tensors(
    plan: ConversionPlan, written: Mapping[str, Checkpoint], progress: StageProgress
) -> dict[str, Any]:
    target = convert_target(plan.target.unquantized)
    figures = {TARGET: compare(written[TARGET], target.tensors, progress)}
    if plan.drafter is not None:
        drafter = convert_drafter(plan.drafter.unquantized, plan.target.checkpoint.config)
        figures[DRAFTER] = compare(written[DRAFTER], drafter.tensors, progress)
    return figures


def _check_target(
    plan: ConversionPlan, written: Checkpoint, progress: StageProgress, effort: SelfTestEffort
) -> dict[str, Any]:
    source, dtype, reference = plan.target.checkpoint, plan.target.dtype, _reference_dtype(plan.target)
    tokens = texts(source, effort.text_length)
    progress.stage("computing the original on built-in texts")
    original, expected = measure(source, reference, tokens)
    progress.stage("computing the converted target on the same texts")
    converted, logits = measure(written, None, tokens)
    # In standard deviations of the original logits.
    difference = float(np.abs(logits - expected).max()) / (float(expected.std()) or 1.0)
    narrows = dtype is not None and DTYPES[dtype] != reference
    # Quantization changes logits anyway.
    tolerance = None if plan.target.quantization else 0.5 if narrows else 1e-4
    if tolerance is not None and not difference <= tolerance:
        raise SelfTestFailed(
            f"the logits of the converted target differ from the original's by {difference:.2g} standard "
            f"deviations, {tolerance:g} are tolerated: nothing was written; please report this"
        )
    ratio = converted / original
    if not (math.isfinite(ratio) and ratio <= effort.max_perplexity_ratio):
        raise SelfTestFailed(
            f"the perplexity of the converted target is {converted:.4g}, the original's is {original:.4g}: "
            "use more bits, smaller groups or another --dtype, or --no-self-test to have it nevertheless"
        )
    return {
        "logits": {"difference": difference, "tolerance": tolerance},
        "perplexity": {"original": original, "converted": converted, "ratio": ratio},
    }


def _reference_dtype(conversion: Conversion) -> mx.Dtype | None:
    """Return the wider type of the stored one and the one asked for; None if none was asked for."""
    if conversion.dtype is None:
        return None
    sizes: Counter[mx.Dtype] = Counter()
    for array in conversion.checkpoint.tensors().values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] += array.size
    stored = sizes.most_common(1)[0][0]
    return (mx.zeros(1, dtype=stored) + mx.zeros(1, dtype=DTYPES[conversion.dtype])).dtype


def compare(checkpoint: Checkpoint, expected: dict[str, mx.array], progress: StageProgress) -> dict[str, Any]:
    """Compare a written checkpoint with unquantized tensors. Empties `expected`. Raises BadCheckpoint.

    Returns the number of tensors that are equal bit by bit, the number of quantized ones, and their largest
    error.
    """
    written, config, role = checkpoint.tensors(), checkpoint.config, checkpoint.folder.name
    progress.stage(f"comparing {role} with its source", tensors=len(expected))
    errors: dict[str, float] = {}
    count, wrong, infinite = len(expected), [], []
    for name in sorted(expected):
        source, stem = expected.pop(name), name.removesuffix("weight")
        scaling = {end: written.pop(stem + end, None) for end in ("scales", "biases") if name != stem}
        weight = written.pop(name, None)
        if weight is None:
            wrong.append(name)
        elif scaling.get("scales") is None:
            floats = bool(mx.issubdtype(source.dtype, mx.floating))
            same = weight.dtype == source.dtype and bool(mx.array_equal(weight, source, equal_nan=floats))
            wrong += [] if same else [name]
            infinite += [name] if floats and not mx.isfinite(weight).all() else []
        else:
            stated = config["quantization"].get(stem.removesuffix("."))
            settings = config["quantization"] | (stated if isinstance(stated, dict) else {})
            errors[name] = _error(source, weight, scaling, settings)
            # A wrong tensor has an error of 1.4, a tensor with 4 bits has 0.1.
            wrong += [] if errors[name] < 0.5 else [name]  # also for nan
        progress.advance()
        mx.clear_cache()
    if wrong or written:
        raise BadCheckpoint(
            f"the files written to {role} are not what the source holds, in "
            f"{shortened([*wrong, *sorted(written)])}: the disk or the source is damaged"
        )
    if infinite:
        raise BadCheckpoint(
            f"{shortened(infinite)} in {role} is not finite: the source is damaged, or --dtype holds "
            "less than its values need"
        )
    equal, error = count - len(errors), max(errors.values(), default=0.0)
    return {"equal": equal, "quantized": len(errors), "error": error}


def _error(
    source: mx.array, weight: mx.array, scaling: Mapping[str, mx.array | None], settings: Mapping[str, Any]
) -> float:
    """Return the root mean square error of a quantized tensor, divided by its root mean square."""
    scales = scaling["scales"]
    assert scales is not None
    mx.eval(source)
    # About 2^24 elements are compared at a time.
    step = max(1, (1 << 24) * source.shape[0] // source.size)  # rows
    form = {key: settings[key] for key in ("bits", "group_size", "mode")}
    lost, size = 0.0, 0.0
    for start in range(0, source.shape[0], step):
        rows = slice(start, start + step)
        biases = None if scaling["biases"] is None else scaling["biases"][rows]
        original = source[rows].astype(mx.float32)
        restored = mx.dequantize(weight[rows], scales[rows], biases, **form).astype(mx.float32)
        lost += float(mx.square(restored - original).sum())
        size += float(mx.square(original).sum())
    return math.sqrt(lost / size) if size else math.sqrt(lost)


# --- the measurement


def load_lazily(checkpoint: Checkpoint, dtype: mx.Dtype | None) -> nn.Module:
    """Return the model of a checkpoint with lazy weights, cast to `dtype` if given.

    Like `load`, it makes some models dense and float32 on a CPU.
    """
    seen: dict[str, mx.array] = {}
    model, _ = load_unread(checkpoint, seen)
    seen.clear()
    if dtype is not None:
        model.set_dtype(dtype)
    if is_dequantized(checkpoint.config):
        model.set_dtype(mx.float32)
        model = dequantized(model)
    return model


def texts(checkpoint: Checkpoint, most: int) -> mx.array:
    """Return the built-in texts [B, S], cut to one length of at most `most` tokens."""
    tokenizer = read_tokenizer(checkpoint)
    encoded = [tokenizer.prompt_tokens(string) for string in TEXTS]
    length = min(most, *(len(tokens) for tokens in encoded))
    return mx.array([tokens[:length] for tokens in encoded])


def prompts(tokenizer: Tokenizer, effort: SelfTestEffort) -> list[list[int]]:
    """Return the tokens of the built-in prompts; with a chat template also of the questions."""
    result = [tokenizer.prompt_tokens(string) for string in effort.prompts]
    for question in effort.questions if tokenizer.chats else ():
        with contextlib.suppress(InvalidValue):  # a template may need more than a question
            result.append(tokenizer.prompt([{"role": "user", "content": question}]))
    return result


def measure(checkpoint: Checkpoint, dtype: mx.Dtype | None, tokens: mx.array) -> tuple[float, Floats]:
    """Return the perplexity of all texts [B, S], and the logits [R, V] of a few rows.

    Only the graph references the weights, so MLX reads each one when it needs it and frees it afterwards. So
    a model may be larger than memory. Raises SelfTestFailed for a model that does not run.
    """
    try:
        model = load_lazily(checkpoint, dtype)
        logits = model(tokens).astype(mx.float32)
    except (*LOADING_ERRORS, BadCheckpoint) as error:
        raise SelfTestFailed(
            f"the first pass of {checkpoint.folder.name} fails ({one_line(error)}): mlx-lm does not run it "
            "here, or not as quantized as it is to be; try -q none"
        ) from error
    del model
    scores = logits[:, :-1] - log_total(logits[:, :-1])
    loss = -mx.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()
    # The caller compares the logits of the last 4 rows of each text.
    rows = logits[:, -4:].reshape(-1, logits.shape[-1])
    del logits, scores
    mx.eval(loss, rows)
    return math.exp(min(float(loss), 700)), np.array(rows)


# --- the drafter


@dataclass(frozen=True)
class DraftedTexts:
    """Greedy continuations by a pair, and their acceptance."""

    tokens: list[list[int]]
    positions: int  # rounds with a draft
    first: float  # share of these whose first draft token was accepted
    length: float  # tokens emitted by a round with K draft tokens


def _check_drafter(
    plan: ConversionPlan,
    written: Checkpoint,
    original: Checkpoint,
    progress: StageProgress,
    effort: SelfTestEffort,
) -> dict[str, Any]:
    """Check the acceptance, and that the text does not change. Return figures. Raises SelfTestFailed."""
    progress.stage("drafting with the converted pair")
    target = plan.target.checkpoint
    pair = load(plan.folder / TARGET, written.folder, num_draft_tokens=K)
    info, tokenizer, policies = pair.info, pair.tokenizer, pair.policies
    built_in = prompts(tokenizer, effort)
    ours = draft(pair, built_in, effort.generated)
    other = _with_rope_of_target(pair, written, target.config, built_in, effort.generated)
    lossless = _check_lossless(pair, target_shape(target.config).window, effort.comparison, progress)
    del pair
    gc.collect()
    before, why_not = None, _why_not_before(plan)
    if why_not is None:
        progress.stage("drafting with the original pair")
        model = load_lazily(target, _reference_dtype(plan.target))
        source = open_drafter(original, original.config, target.config)
        before = draft(Pair(info, tokenizer, model, [source], policies), built_in, effort.generated)
        del model, source
        gc.collect()
    tokens = Counter(token for continuation in ours.tokens for token in continuation)
    chance = max(tokens.values()) / tokens.total()  # acceptance of always drafting the most common token
    # The least acceptance of first draft tokens. At most 30 %, because some targets repeat themselves.
    floor = min(0.3, max(0.1, 1.5 * chance))
    if ours.first < floor:
        raise SelfTestFailed(
            f"the target accepts {ours.first:.0%} of the drafter's first tokens, {floor:.0%} are expected: "
            f"{_cause(plan, original, floor, before, built_in, effort.generated)} "
            "(--no-self-test converts it nevertheless)"
        )
    figures: dict[str, Any] = {"positions": ours.positions, "first": ours.first, "length": ours.length}
    if before is not None:
        figures |= {"first_before": before.first, "length_before": before.length}
        figures |= {"loss_percent": 100 * (1 - ours.first / before.first)} if before.first else {}
    figures |= {"not_before": why_not} if why_not else {}
    figures |= {} if other is None else {"first_with_rope_of_target": other.first}
    figures |= {"chance": chance, "floor": floor, "draft_tokens": K}
    return {"acceptance": figures, "lossless": lossless}


def _check_lossless(
    pair: Pair, window: int | None, effort: Effort, progress: StageProgress
) -> dict[str, int]:
    """Compare texts with drafts to plain texts, as the doctor does. Raises SelfTestFailed."""
    test = lossless_test(pair, window, effort, progress)
    if test.comparisons and not test.passed:
        raise SelfTestFailed(f"{test.verdict}: nothing was written; please report this")
    prompts = len({comparison.prompt for comparison in test.comparisons})
    tokens = sum(comparison.tokens for comparison in test.comparisons)
    return {"prompts": prompts, "tokens": tokens, "ended_in_a_tie": len(test.near_ties)}


def _with_rope_of_target(
    pair: Pair,
    drafter: Checkpoint,
    target: Mapping[str, Any],
    prompts: list[list[int]],
    generated: int,
) -> DraftedTexts | None:
    """Return what a drafter with a rotary embedding of its own drafts with the target's; else None.

    The heads of some publishers state another base than they were trained with.
    """
    config = drafter.config
    if config["model_type"] not in ("eagle3", "peagle") or config[KEY]["rope"] == "target":
        return None
    changed = {**config, KEY: {**config[KEY], "rope": "target"}}
    source = open_drafter(drafter, changed, target)
    return draft(pair.with_drafters([source], pair.policies), prompts, generated)


def _why_not_before(plan: ConversionPlan) -> str | None:
    """Return why the original pair is not measured; None if it is."""
    if not any(each.dtype or each.quantization for each in plan.conversions.values()):
        return "nothing was changed"
    limit, size = memory_for_models(), plan.target.checkpoint.headers.size
    return f"the original target needs {human_bytes(size)} of memory" if size > limit else None


def _cause(
    plan: ConversionPlan,
    original: Checkpoint,
    floor: float,
    before: DraftedTexts | None,
    prompts: list[list[int]],
    generated: int,
) -> str:
    """Return the likely cause of an acceptance below `floor`."""
    pair = load(plan.folder / TARGET, original.folder, num_draft_tokens=K)
    precise = draft(pair, prompts, generated)
    if precise.first >= floor:
        return f"quantizing the drafter cost it, {precise.first:.0%} without: use --drafter-bits 8 or none"
    if before is not None and before.first >= floor:
        return f"quantizing the target cost it, {before.first:.0%} without: use -q with more bits"
    return "likely the drafter of another target or version of it, or weights damaged by a conversion"


def draft(pair: Pair, prompts: Sequence[list[int]], generated: int) -> DraftedTexts:
    """Continue prompts greedily by `generated` tokens, with K draft tokens a round."""
    fixed = pair.with_policies(FixedPolicy(K))  # the policy of a loaded pair also decodes plain rounds
    answers = [list(fixed.generate(prompt, max_tokens=generated)) for prompt in prompts]
    rounds = [round for answer in answers for round in answer if round.drafted]
    whole = [round.accepted for round in rounds if round.drafted == K]
    return DraftedTexts(
        [[token for round in answer for token in round.tokens] for answer in answers],
        len(rounds),
        sum(round.accepted > 0 for round in rounds) / max(len(rounds), 1),
        1 + sum(whole) / max(len(whole), 1),
    )
