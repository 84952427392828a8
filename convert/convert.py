"""Convert a target and a drafter to a folder with a pair: the steps of a conversion, in order."""

from __future__ import annotations

from typing import Any

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.files import new_folder
from mlx_spec.cli.progress import StageProgress
from mlx_spec.drafters import open_drafter

from .converted import convert_pair
from .options import ConversionOptions
from .plan import DRAFTER, make_plan
from .selftest import self_test
from .write import write_manifest, write_pair


def convert(options: ConversionOptions, progress: StageProgress) -> dict[str, Any]:
    """Convert a pair into the new folder `options.out`. Return the content of its pair.json.

    Raises SpecError, in one line, for a problem of the input, and OSError for a problem of the disk.
    """
    with new_folder(options.out) as folder:
        plan = make_plan(options, folder, progress)
        pair = convert_pair(plan, allow_unknown=options.skip_test)
        parts = write_pair(plan, pair, progress)
        if DRAFTER in pair:
            drafter = read_checkpoint(folder / DRAFTER)
            open_drafter(drafter, pair[DRAFTER].config, plan.target.checkpoint.config)
        skipped = {"result": "not run", "why": "--no-self-test"}
        test = skipped if options.skip_test else self_test(plan, progress)
        progress.end()
        return write_manifest(folder, parts, options.dtype, test)
