"""Medusa (arXiv 2401.10774): K heads that read the target's last hidden.

Read from the reference's names (in safetensors), as part of a target (v1.0), and from vLLM's. Ours (D hidden,
V vocabulary, head k drafts the k-th token after the next):
    heads.{k}.layers.{l}.weight [D, D], .bias [D]    x + SiLU(W x + b)
    heads.{k}.lm_head.weight [V, D]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.errors import BadCheckpoint
from mlx_spec.hub.catalog import MEDUSA as KIND

from . import table
from .mtp import TRUNK
from .table import Config, Converted, Family, Row, Tensors

NAME, TITLE = "medusa", "the Medusa drafter"
PREFIXES = (("medusa_heads.", ""), ("medusa_head.", ""))
REFERENCE = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(?:\d+\.linear\.(?:weight|bias)|\d+\.weight)")
VLLM = re.compile(
    r"(?:medusa_heads\.)?(?:blocks\.(\d+)\.layers\.\d+\.(?:weight|bias)|lm_heads\.(\d+)\.weight)"
)
INSIDE = re.compile(r"medusa_heads?\.")
COUNT_KEYS = ("medusa_num_heads", "num_heads")
quantizable = table.all_but()


def recognizes(config: Config, names: Collection[str]) -> bool:
    """Return True for numbered heads of residual blocks, alone or inside a target."""
    return any(REFERENCE.fullmatch(name) or VLLM.fullmatch(name) for name in names)


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a Medusa drafter. Raises BadCheckpoint and Mismatch."""
    source = table.spell(TITLE, tensors, config, PREFIXES)
    vllm = any(VLLM.fullmatch(name) for name in source.tensors)
    pattern = VLLM if vllm else REFERENCE
    found = filter(None, map(pattern.fullmatch, source.tensors))
    heads = sorted({int(match[match.lastindex or 1]) for match in found})
    if heads != list(range(len(heads))):
        raise BadCheckpoint(f"{TITLE} has the heads {heads}, some between are missing: download it again")
    depth = _depth(source.tensors, vllm=vllm)
    sizes = {key: table.target_size(target, f"{key}_size") for key in ("hidden", "vocab")}
    said = {f"{key}_size": config[f"{key}_size"] for key in sizes if f"{key}_size" in config}
    table.check_fit(TITLE, said, target)
    rows = [row for head in heads for row in _rows(head, depth, vllm=vllm)]
    taken = table.take(rows, source, sizes)
    inside = any(INSIDE.match(name) for name in tensors)
    trunk = {name: TRUNK for name in tensors if inside and not INSIDE.match(name)}
    conventions = Conventions(hidden="post_norm", rope="none")
    written = table.config_of(NAME, conventions, target, num_heads=len(heads), num_layers=depth)
    notes = _notes(config, len(heads))
    return table.finished(source, Converted(written, taken.tensors, taken.used, trunk, quantizable, notes))


def _rows(head: int, depth: int, *, vllm: bool) -> Iterable[Row]:
    for layer in range(depth):
        theirs = f"blocks.{head}.layers.{layer}" if vllm else f"{head}.{layer}.linear"
        ours = f"heads.{head}.layers.{layer}"
        yield Row(f"{theirs}.weight", f"{ours}.weight", "hidden hidden")
        yield Row(f"{theirs}.bias", f"{ours}.bias", "hidden", optional=vllm)  # medusa_fc_bias is off there
    theirs = f"lm_heads.{head}.weight" if vllm else f"{head}.{depth}.weight"
    yield Row(theirs, f"heads.{head}.lm_head.weight", "vocab hidden")


def _depth(names: Collection[str], *, vllm: bool) -> int:
    """Return the number of residual blocks of a head."""
    pattern = r"blocks\.\d+\.layers\.(\d+)\.weight" if vllm else r"\d+\.(\d+)\.linear\.weight"
    found = filter(None, (re.fullmatch(pattern, name) for name in names))
    return 1 + max((int(match[1]) for match in found), default=0)


def _notes(config: Config, heads: int) -> tuple[str, ...]:
    said = next((config[key] for key in COUNT_KEYS if key in config), heads)
    return () if said == heads else (f"config.json says {said} heads, the tensors are of {heads}",)


MEDUSA = Family(NAME, convert, KIND, recognizes)
