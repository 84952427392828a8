"""The roofline program: what speculation should bring on Apple chips, and what this device gives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_spec.apps.command import guarded
from mlx_spec.apps.roofline import report
from mlx_spec.apps.roofline.arguments import Options, parse
from mlx_spec.apps.roofline.models import Named, models_of
from mlx_spec.backend import NoBackend, require_backend
from mlx_spec.tuning.devices import CHIPS
from mlx_spec.tuning.roofline import predict

if TYPE_CHECKING:
    from mlx_spec.apps.roofline.present import Present


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns its exit status; an error of ours is one line on stderr and status 1.

    A command line that makes no sense raises SystemExit with status 2.
    """
    options = parse(arguments)
    return guarded(lambda: _run(options))


def _run(options: Options) -> int:
    models = models_of(options)
    drafter = None if models.drafter is None else models.drafter.model
    chips = options.chips or CHIPS
    predictions = [predict(chip, models.target.model, drafter, options.acceptance) for chip in chips]
    if not options.json:
        print("\n".join(report.table(options, models, predictions)), flush=True)
    present = _present(options, models.target)
    if options.json:
        print(report.as_json(options, models, predictions, present), flush=True)
    elif present is not None:
        print("\n".join(report.measurements(present)), flush=True)
    return 0


def _present(options: Options, target: Named) -> Present | None:
    """Measurements, unless other chips were asked for or there is nothing to measure with."""
    try:
        require_backend()
    except NoBackend as error:
        if not options.chips:
            print(f"mlx-spec: nothing was measured: {error}", file=sys.stderr)
        return None
    from mlx_spec.apps.roofline.present import measured, present_chip

    if options.chips and present_chip() not in options.chips:
        return None
    return measured(target)
