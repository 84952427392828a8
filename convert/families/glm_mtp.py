"""GLM-4.5 to GLM-5: the head is the layer behind the last, its attention grouped or latent (4.7-Flash, 5)."""

from __future__ import annotations

from functools import partial

from mlx_spec.convert.families import nextn
from mlx_spec.convert.families.family import Family

LAYOUT = nextn.Layout(
    name="glm_mtp",
    title="the GLM MTP head",
    origin="zai-org/...",
    model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm4v_moe", "glm4v_moe_text"),
)
GLM_MTP = Family(
    LAYOUT.name,
    runnable=True,
    recognises=partial(nextn.recognises, LAYOUT),
    convert=partial(nextn.convert, LAYOUT),
)
