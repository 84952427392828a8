"""Medusa (arXiv 2401.10774): K heads that read the target's last hidden state.

Reads the names of the reference (in safetensors), also inside a target (v1.0), and vLLM's. Ours (D hidden,
V vocabulary, head k drafts the k-th token after the next one):
    heads.{k}.layers.{l}.weight [D, D], .bias [D]    x + SiLU(W x + b)
    heads.{k}.lm_head.weight [V, D]
"""

from __future__ import annotations

import re
from collections.abc import Collection

from mlx_spec.checkpoint.targets import Config
from mlx_spec.drafters.checkpoint import Conventions
from mlx_spec.drafters.medusa import MedusaNetwork
from mlx_spec.errors import BadCheckpoint

from . import common
from .common import Converted, Tensors

TITLE = "the Medusa drafter"
# The groups are the number of the head and, for a residual block, the number of the block.
REFERENCE = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(?:(\d+)\.linear\.(?:weight|bias)|\d+\.weight)")
VLLM = re.compile(r"(?:medusa_heads\.)?(?:blocks|lm_heads)\.(\d+)\.(?:layers\.(\d+)\.(?:weight|bias)|weight)")


def recognizes(config: Config, names: Collection[str]) -> bool:
    """Return True for numbered heads of residual blocks, alone or inside a target."""
    return any(REFERENCE.fullmatch(name) or VLLM.fullmatch(name) for name in names)


def convert(tensors: Tensors, config: Config, target: Config) -> Converted:
    """Convert a Medusa drafter. Raises BadCheckpoint and Mismatch."""
    vllm = any(VLLM.fullmatch(name) for name in tensors)
    matches = [match for match in map((VLLM if vllm else REFERENCE).fullmatch, tensors) if match]
    heads = sorted({int(match[1]) for match in matches})
    if heads != list(range(len(heads))):
        raise BadCheckpoint(f"{TITLE} has the heads {heads}, some between are missing: download it again")
    depth = 1 + max((int(match[2]) for match in matches if match[2]), default=0)
    sizes = {f"{key}_size": common.target_size(target, f"{key}_size") for key in ("hidden", "vocab")}
    common.check_fit(TITLE, {key: config[key] for key in sizes if key in config}, target)
    renames: list[tuple[str, str]] = []
    for head in heads:
        ours = f"heads.{head}."
        if vllm:
            renames += [(f"lm_heads.{head}.", f"{ours}lm_head."), (f"blocks.{head}.", ours)]
        else:
            renames += [(f"{head}.{layer}.linear.", f"{ours}layers.{layer}.") for layer in range(depth)]
            renames += [(f"{head}.{depth}.", f"{ours}lm_head."), (f"{head}.", ours)]
    prefixes, count_keys = ("medusa_heads.", "medusa_head."), ("medusa_num_heads", "num_heads")
    in_target = any(name.startswith(prefixes) for name in tensors)
    if not in_target:
        keys = "medusa_num_layers num_hidden_layers hidden_size vocab_size base_model_name_or_path".split()
        common.refuse_switches(TITLE, config, {*count_keys, *keys})
    below = [(prefix, "") for prefix in prefixes]
    source = common.read(TITLE, tensors, config, below, renames, in_target=in_target)
    biased = any(name.endswith(".bias") for name in source.tensors)
    network = MedusaNetwork(len(heads), depth, **sizes, biased=biased)
    conventions = Conventions(hidden="post_norm", rope="none")
    written = common.config_of("medusa", conventions, target, num_heads=len(heads), num_layers=depth)
    said = next((config[key] for key in count_keys if key in config), len(heads))
    differs = f"config.json says {said} heads, the tensors are of {len(heads)}"
    notes = () if said == len(heads) else (differs,)
    return common.finish(source, network, written, notes=notes)
