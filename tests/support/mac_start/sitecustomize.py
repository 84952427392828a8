"""Python runs this when it starts, if this folder is in PYTHONPATH: the process becomes one of a Mac."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from support import mac

sys.path.pop(0)
mac.imitate_for_good()
