"""The doctor program: looks at the machine, tests a pair, and prints a certificate."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mlx_spec.apps.command import ERROR, guarded
from mlx_spec.apps.doctor.arguments import parser
from mlx_spec.apps.doctor.checks import Check, all_checks
from mlx_spec.errors import SpecError
from mlx_spec.hub.catalog import LOOKUP

if TYPE_CHECKING:
    from mlx_spec.apps.doctor.certificate import Subject
    from mlx_spec.apps.doctor.selftest import SelfTest
    from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair
    from mlx_spec.pair import Pair


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns its exit status: 1 if something is wrong, with this machine or with the text.

    A command line that makes no sense raises SystemExit with status 2.
    """
    options = parser().parse_args(arguments)
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    made = []
    for check in all_checks():
        made.append(check)
        if not options.json:
            print(f"{check.state:<6} {check.name:<10} {check.text}", flush=True)
    if any(check.name == "backend" and check.state == "wrong" for check in made):
        return _end(options, made, "without MLX nothing can be tested", None, None)
    try:
        tested, found = _tested(options)
    except SpecError as error:
        return _end(options, made, str(error), None, None)
    return _end(options, made, None, tested, found)


def _tested(options: argparse.Namespace) -> tuple[Subject, SelfTest]:
    from mlx_spec import load
    from mlx_spec.apps.doctor.selftest import LONG, QUICK, self_test
    from mlx_spec.hub.progress import StageProgress

    pair = load(options.target, options.drafter)
    tested = _described(pair)
    window = tested.target_is.window if tested.target_is else None
    return tested, self_test(pair, window, QUICK if options.quick else LONG, StageProgress(sys.stderr))


def _end(
    options: argparse.Namespace,
    made: list[Check],
    problem: str | None,
    tested: Subject | None,
    found: SelfTest | None,
) -> int:
    """Print what is left to say. Returns the exit status."""
    lines: list[str] = []
    if tested is not None and found is not None:
        from mlx_spec.apps.doctor.certificate import certificate

        lines = certificate(tested, found, made, datetime.now(UTC))
    fine = found is not None and found.passed and all(check.state != "wrong" for check in made)
    if options.json:
        report: dict[str, Any] = {
            "ok": fine,
            "problem": problem,
            "checks": [dataclasses.asdict(check) for check in made],
            "self_test": None if found is None else dataclasses.asdict(found),
            "certificate": "\n".join(lines) or None,
        }
        finite = json.loads(json.dumps(report), parse_constant=lambda _: None)  # NaN is not JSON
        print(json.dumps(finite), flush=True)
    elif lines:
        print("", *lines, sep="\n", flush=True)
    if problem is not None:
        print(f"mlx-spec: {problem}", file=sys.stderr)
    return 0 if fine else ERROR


def _described(pair: Pair) -> Subject:
    """What target and drafter are, from their headers."""
    from mlx_spec.apps.doctor.certificate import Subject
    from mlx_spec.hub.inspect import ConvertedPair

    facts = pair.info
    target = _inspected(facts.target)
    drafter = None if facts.drafter in (None, LOOKUP) else _inspected(str(facts.drafter))
    return Subject(
        facts.target,
        pair.drafter_names,
        target.target if isinstance(target, ConvertedPair) else target,
        facts.drafter,
        drafter.drafter if isinstance(drafter, ConvertedPair) else drafter,
    )


def _inspected(name: str) -> CheckpointInfo | ConvertedPair | None:
    from mlx_spec.hub.inspect import inspect

    try:
        return inspect(name)
    except SpecError:
        return None
