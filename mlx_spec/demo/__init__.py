"""The bundled demo pair: a small Gemma 4 target that explains the Python standard library, and its drafter.

Both were trained by `python -m mlx_spec.demo.recipe`; MODEL.md says with what seed, time and result.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent
TARGET = _FOLDER / "target"
DRAFTER = _FOLDER / "drafter"
FACTS = _FOLDER / "facts.json"
