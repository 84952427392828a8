"""`mlx-spec tune`: measure the costs of passes and drafts on this device; save, export or import them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mlx_spec.cli.command import BadOptions, Json, KvBits, PairOptions, expanded, option, program, table
from mlx_spec.errors import InvalidValue, Mismatch
from mlx_spec.hub.catalog import PairSpec

if TYPE_CHECKING:
    from mlx_spec.policy.costs import CostModel


@dataclass(frozen=True)
class Options(PairOptions):
    """Measure what passes and drafts cost on this device, and save it for later."""

    kv_bits: KvBits = None
    context: Annotated[int, option(value="N", help="tokens of context to measure at", min=2)] = 256
    export: Annotated[
        Path | None, option(value="FILE", help="write the costs to FILE, too", callback=expanded)
    ] = None
    import_: Annotated[
        Path | None,
        option("--import", value="FILE", help="use costs measured on the same device", callback=expanded),
    ] = None
    json: Json = False

    @property
    def spec(self) -> PairSpec:
        return replace(super().spec, kv_bits=self.kv_bits)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.export is not None and self.import_ is not None:
            raise BadOptions("--export and --import: give one of them")


def _run(options: Options) -> int:
    from mlx_spec import load
    from mlx_spec.policy import AdaptivePolicies, BadCosts, saved_costs

    pair = load(**vars(options.spec))
    policies = pair.policies
    if not isinstance(policies, AdaptivePolicies) or policies.key is None:
        raise InvalidValue(
            f"there is nothing to tune: {pair.info.target} has no drafter here, and plain decoding needs "
            "none; name one with --drafter"
        )
    if options.import_ is not None:
        try:
            policies.use(*saved_costs.read(options.import_, policies.key))
        except (BadCosts, Mismatch) as error:
            raise type(error)(f"{error}: measure here with `mlx-spec tune`") from error
    else:
        for _ in pair.calibrate(options.context, again=True):
            pass
    costs = policies.costs
    assert costs is not None and policies.measured is not None
    measured = costs.table()
    if options.export is not None:
        saved_costs.write(options.export, policies.key, policies.measured, measured)
    file, device = saved_costs.folder() / saved_costs.file_name(policies.key), policies.key.device
    if not options.json:
        print("\n".join([f"measured on {device}", "", *_report(policies.names, costs.at(measured.context))]))
    saved_costs.write(file, policies.key, policies.measured, measured)  # raises; policies would only warn
    saved = {"device": device, "file": str(file), "seconds": asdict(measured)}
    print(json.dumps(saved) if options.json else f"\nsaved in {file}")
    return 0


def _report(names: Sequence[str], costs: CostModel) -> list[str]:
    """Return the table for people, in milliseconds."""
    sizes = (1, 2, 3, 4, 5, 6, 8, 11, 17)  # rows of a pass: MLX changes kernels between some of these
    rows = [["rows of a pass", *map(str, sizes)]]
    verify = [float(costs.passes[size - 1]) for size in sizes]
    rows.append(["verify, ms", *(f"{1e3 * seconds:.2f}" for seconds in verify)])
    rows.append(["in plain tokens", *(f"{seconds / costs.plain:.2f}" for seconds in verify)])
    for index, name in enumerate(names):
        drafting = [costs.drafting(index, size - 1) for size in sizes]
        rows.append([f"draft with {name}, ms", *(f"{1e3 * seconds:.2f}" for seconds in drafting)])
    plain = f"plain decoding at {costs.table.context} tokens of context: {1e3 * costs.plain:.2f} ms a token"
    return [plain, "", *table(rows, right=range(1, len(sizes) + 1))]


main = program("tune", Options, _run)
