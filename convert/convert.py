"""Convert a target and a drafter to a folder with a pair: the steps of a conversion, in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_spec import demo
from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.checkpoint.files import new_folder
from mlx_spec.cli.progress import StageProgress
from mlx_spec.drafters import open_drafter
from mlx_spec.errors import BadCheckpoint, InvalidValue, Mismatch
from mlx_spec.hub.catalog import LOOKUP, NONE, SMOLLM2, made_for
from mlx_spec.tokenizer import Tokenizer, differing_token, read_tokenizer

from .converted import convert_pair
from .families import family_of
from .options import ConversionOptions
from .plan import (
    DRAFTER,
    FIXED_MODES,
    Conversion,
    ConversionPlan,
    check_hashes,
    family_or_model,
    open_source,
    parse_quantization,
)
from .selftest import SelfTestEffort, self_test
from .write import write_manifest, write_pair


def convert(
    options: ConversionOptions, progress: StageProgress, effort: SelfTestEffort | None = None
) -> dict[str, Any]:
    """Convert a pair into the new folder `options.out`. Return the content of its pair.json.

    Raises SpecError, in one line, for a problem of the input, and OSError for a problem of the disk.
    """
    with new_folder(options.out) as folder:
        plan = _make_plan(options, folder, progress)
        pair = convert_pair(plan, allow_unknown=options.skip_test)
        parts = write_pair(plan, pair, progress, is_tested=not options.skip_test)
        if DRAFTER in pair:
            drafter = read_checkpoint(folder / DRAFTER)
            open_drafter(drafter, pair[DRAFTER].config, plan.target.checkpoint.config)
        skipped = {"result": "not run", "why": "--no-self-test"}
        test = skipped if options.skip_test else self_test(plan, progress, effort)
        progress.end()
        return write_manifest(folder, parts, options.dtype, test)


def _make_plan(options: ConversionOptions, folder: Path, progress: StageProgress) -> ConversionPlan:
    """Open both checkpoints and check them. Raises SpecError for what cannot be converted."""
    choice: str | None = options.quantization
    if choice is not None:
        parse_quantization(choice, options.group_size)  # refuse before anything is downloaded
    target = open_source(options.target, options.q6k_bits)
    if "model_type" not in target.config:
        raise BadCheckpoint(f"config.json of {target.name} has no model_type: so it is not a target model")
    tokenizer = read_tokenizer(target)  # a pair without a tokenizer cannot be loaded
    if choice is None:
        is_quantized = bool({"quantization", "quantization_config"} & target.config.keys())
        choice = NONE if is_quantized else "4"
    quantization = parse_quantization(choice, options.group_size)
    drafter = _find_drafter(options.drafter, target, tokenizer)
    size = None if choice in FIXED_MODES else options.group_size
    drafter_quantization = parse_quantization(options.drafter_bits, size)
    hashes = check_hashes(target, progress)
    plan = ConversionPlan(folder, Conversion(target, None, quantization, options.dtype, hashes))
    if drafter is None:
        return plan
    hashes = {} if drafter.checkpoint is target else check_hashes(drafter.checkpoint, progress)
    drafter = replace(drafter, quantization=drafter_quantization, dtype=options.dtype, hashes=hashes)
    return replace(plan, drafter=drafter)


def _find_drafter(name: str, target: Checkpoint, tokenizer: Tokenizer) -> Conversion | None:
    """Return the drafter and its family; None if there is to be none.

    Raises InvalidValue, and Mismatch for a language model of another vocabulary.
    """
    if name == NONE:
        return None
    if name == LOOKUP:
        raise InvalidValue("lookup has nothing to convert: every pair has it; give --drafter none")
    published = str(demo.SMOLLM2_DRAFTER) if target.name == SMOLLM2 else made_for(target.name)
    chosen = published if name == "auto" else name
    if chosen is None:
        try:
            return Conversion(target, family_of(target.config, target.headers.tensors))
        except BadCheckpoint as error:
            raise InvalidValue(
                f"no drafter is known for {target.name} and it has no draft heads of its own: give --drafter "
                "with a repository or a folder, or --drafter none"
            ) from error
    drafter = open_source(chosen)
    family = family_or_model(drafter)
    if family is None:
        difference = differing_token(drafter, target, tokenizer)
        if difference is not None:
            raise Mismatch(
                f"{difference}: such a draft model is not converted, it drafts by way of its text; convert "
                f"the target with --drafter none, then give {drafter.name} beside it as the drafter"
            )
    return Conversion(drafter, family)
