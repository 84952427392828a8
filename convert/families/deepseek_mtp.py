"""DeepSeek-V3, R1, V3.1, V3.2: the head is layer 61, latent attention and experts, as a rule in 8 bits."""

from __future__ import annotations

from functools import partial

from mlx_spec.convert.families import nextn
from mlx_spec.convert.families.family import Family

LAYOUT = nextn.Layout(
    name="deepseek_mtp",
    title="the DeepSeek MTP head",
    origin="deepseek-ai/...",
    model_types=("deepseek_v3", "deepseek_v32"),
)
DEEPSEEK_MTP = Family(
    LAYOUT.name,
    runnable=True,
    recognises=partial(nextn.recognises, LAYOUT),
    convert=partial(nextn.convert, LAYOUT),
)
