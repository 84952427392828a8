"""Convert a target and a drafter to a folder with a pair: the steps of a conversion, in order."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec import demo
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.drafter_families import DrafterFamily
from mlx_spec.checkpoint.files import check_space, new_folder, sha256, write_json
from mlx_spec.cli.progress import StageProgress
from mlx_spec.drafters import open_drafter
from mlx_spec.errors import BadCheckpoint, InvalidValue, Mismatch
from mlx_spec.hub.catalog import LOOKUP, NONE, SMOLLM2, made_for
from mlx_spec.tokenizer import Tokenizer, differing_token, read_tokenizer

from .families import family_of
from .families.common import Converted
from .options import ConversionOptions
from .parts import convert_drafter, convert_target, explain_left_out, family_or_model
from .plan import UNQUANTIZED, ConversionPlan
from .selftest import self_test
from .source import FIXED_MODES, Source, check_hashes, open_source, parse_quantization
from .write import DRAFTER, TARGET, PartEntry, write_manifest, write_tensors


def convert(options: ConversionOptions, progress: StageProgress) -> dict[str, Any]:
    """Convert a pair into the new folder `options.out`. Return the content of its pair.json.

    Raises SpecError, in one line, for a problem of the input, and OSError for a problem of the disk.
    """
    with new_folder(options.out) as folder:
        plan = _make_plan(options, folder, progress)
        target, drafter = _write(plan, progress, allow_unknown=options.skip_test)
        skipped = {"result": "not run", "why": "--no-self-test"}
        test = skipped if options.skip_test else _self_test(plan, progress)
        progress.end()
        return write_manifest(folder, target, drafter, options.dtype, test)


def _make_plan(options: ConversionOptions, folder: Path, progress: StageProgress) -> ConversionPlan:
    choice: str | None = options.quantization
    if choice is not None:
        parse_quantization(choice, options.group_size)  # refuse before anything is downloaded
    target = open_source(options.target, options.q6k_bits)
    if "model_type" not in target.config:
        raise BadCheckpoint(f"config.json of {target.name} has no model_type: so it is not a target model")
    tokenizer = read_tokenizer(target.checkpoint)  # a pair without a tokenizer cannot be loaded
    if choice is None:
        is_quantized = bool({"quantization", "quantization_config"} & target.config.keys())
        choice = NONE if is_quantized else "4"
    quantization = parse_quantization(choice, options.group_size)
    drafter, family = _find_drafter(options.drafter, target, tokenizer)
    size = None if choice in FIXED_MODES else options.group_size
    drafter_quantization = parse_quantization(options.drafter_bits, size)
    hashes = {TARGET: check_hashes(target, progress)}
    if drafter is not None and drafter is not target:
        hashes[DRAFTER] = check_hashes(drafter, progress)
    return ConversionPlan(
        folder, target, drafter, family, options.dtype, quantization, drafter_quantization, hashes
    )


def _find_drafter(
    name: str, target: Source, tokenizer: Tokenizer
) -> tuple[Source | None, DrafterFamily | None]:
    """Return the source of the drafter and its family: None for a language model, (None, None) for none.

    Raises InvalidValue, and Mismatch for a language model of another vocabulary.
    """
    if name == NONE:
        return None, None
    if name == LOOKUP:
        raise InvalidValue("lookup has nothing to convert: every pair has it; give --drafter none")
    published = str(demo.SMOLLM2_DRAFTER) if target.name == SMOLLM2 else made_for(target.name)
    chosen = published if name == "auto" else name
    if chosen is None:
        try:
            return target, family_of(target.config, target.checkpoint.headers.tensors)
        except BadCheckpoint as error:
            raise InvalidValue(
                f"no drafter is known for {target.name} and it has no draft heads of its own: give --drafter "
                "with a repository or a folder, or --drafter none"
            ) from error
    drafter = open_source(chosen)
    family = family_or_model(drafter)
    if family is None:
        difference = differing_token(drafter.checkpoint, target.checkpoint, tokenizer)
        if difference is not None:
            raise Mismatch(
                f"{difference}: such a draft model is not converted, it drafts by way of its text; convert "
                f"the target with --drafter none, then give {drafter.name} beside it as the drafter"
            )
    return drafter, family


def _write(
    plan: ConversionPlan, progress: StageProgress, *, allow_unknown: bool
) -> tuple[PartEntry, PartEntry | None]:
    """Write both parts and check that the drafter can be opened."""
    target = convert_target(plan.target, plan.quantization, plan.dtype)
    drafter, needed = None, _size(target.tensors)
    unused = target.unused
    if plan.drafter is not None:
        drafter = convert_drafter(
            plan.drafter, plan.family, plan.target.config, plan.drafter_quantization, plan.dtype
        )
        needed += 2 * _size(drafter.tensors)  # the self-test writes it once more
        if plan.is_embedded:
            unused -= drafter.used
            drafter = replace(drafter, dropped={})  # these tensors belong to the target
    check_space(plan.target.name, needed, plan.folder.parent, "write to another disk")
    left = explain_left_out(unused, plan.target.config, allow_unknown=allow_unknown)
    written = _write_part(plan, TARGET, plan.target, replace(target, dropped=left), progress)
    if drafter is None or plan.drafter is None:
        return written, None
    written_drafter = _write_part(plan, DRAFTER, plan.drafter, drafter, progress)
    open_drafter(read_checkpoint(plan.folder / DRAFTER), drafter.config, plan.target.config)
    return written, written_drafter


def _write_part(
    plan: ConversionPlan, role: str, source: Source, part: Converted, progress: StageProgress
) -> PartEntry:
    """Write the target or the drafter. Return its entry in pair.json."""
    count, folder = len(part.tensors), plan.folder / role
    tokenizer = None if role == DRAFTER and plan.is_embedded else source
    _write_folder(folder, tokenizer, part.config, part.tensors, progress)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    facts = {file: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}
    entry = {
        "name": source.name,
        "revision": source.revision,
        "source_sha256": plan.hashes.get(role),
        "family": "draft model" if role == DRAFTER and plan.family is None else part.config["model_type"],
        "quantization": part.config.get("quantization"),
        "tensors": count,
        "left_out": dict(Counter(part.dropped.values())),
        "unquantized": part.unquantized,
        "notes": part.notes,
        "files": {file.relative_to(folder).as_posix(): facts[file] for file in files},
    }
    return {key: value for key, value in entry.items() if value not in (None, {}, ())}


def _write_folder(
    folder: Path,
    source: Source | None,
    config: Mapping[str, Any],
    tensors: dict[str, mx.array],
    progress: StageProgress,
) -> None:
    """Write one checkpoint, with the tokenizer of `source`. Empties `tensors`."""
    folder.mkdir()
    progress.stage(f"writing the {folder.name.strip('.')}", tensors=len(tensors), size=_size(tensors))
    limit = mx.set_cache_limit(0)  # MLX returns freed memory to the system at once
    try:
        write_tensors(folder, tensors, progress)
    finally:
        mx.set_cache_limit(limit)
    write_json(folder / "config.json", config)
    if source is None:
        return
    for file in source.side_files():
        place = folder / file.relative_to(source.folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)


def _self_test(plan: ConversionPlan, progress: StageProgress) -> dict[str, Any]:
    """Test the pair. For the test, the drafter is also written without quantization."""
    if plan.drafter is not None and plan.family is not None and plan.drafter_quantization is not None:
        drafter = convert_drafter(plan.drafter, plan.family, plan.target.config, None, plan.dtype)
        _write_folder(plan.unquantized_folder, None, drafter.config, drafter.tensors, progress)
    figures = self_test(plan, progress)
    shutil.rmtree(plan.folder / UNQUANTIZED, ignore_errors=True)
    return figures


def _size(tensors: Mapping[str, mx.array]) -> int:
    return sum(array.nbytes for array in tensors.values())
