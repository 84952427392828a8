"""The bundled demo pair: a small Gemma 4 target that explains the Python standard library, and its drafter.

Both were trained by the scripts in benchmarks/demo_pair; MODEL.md says with what seed, time and result. The
drafter uses the tokenizer of the target. Beside them is a drafter for SmolLM2, which `mlx-spec train` made.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent
TARGET = _FOLDER / "target"
DRAFTER = _FOLDER / "drafter"
SMOLLM2_DRAFTER = _FOLDER / "smollm2"
