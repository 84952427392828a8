"""A checkpoint in lines for people, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_spec.hub.catalog import DEMO, TargetShape
from mlx_spec.hub.files import human_bytes
from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair
from mlx_spec.hub.local import LocalModel


def description(found: CheckpointInfo | ConvertedPair) -> list[str]:
    """What `mlx-spec inspect` prints."""
    if isinstance(found, CheckpointInfo):
        return [found.name, *_rows(_facts(found)), *_problem(found.problem)]
    tested = _tested(found.self_test) if found.name != DEMO else None
    tokens = "differ: what the drafter writes is encoded again" if found.retokenized else None
    lines = [found.name, *_rows({"self-test": tested, "tokens": tokens})]
    for role, part in (("target", found.target), ("drafter", found.drafter)):
        lines += [f"  {role}", *(_rows(_facts(part), indent=4) if part else [f"    no {role}"])]
    return lines + _problem(found.problem)


def as_json(found: CheckpointInfo | ConvertedPair | None) -> dict[str, Any] | None:
    """All that is known, under the names of the library."""
    if found is None:
        return None
    if isinstance(found, ConvertedPair):
        parts = {"target": as_json(found.target), "drafter": as_json(found.drafter)}
        rest = {"retokenized": found.retokenized, "problem": found.problem}
        return {"name": found.name, **parts, "self_test": dict(found.self_test), **rest}
    values = dataclasses.asdict(found)
    del values["offers"]
    if values["needs"]:
        values["needs"] = {key: value for key, value in values["needs"].items() if value is not None}
    return values | {"speculative_heads": None if found.kind else found.speculative_heads}


def summary(model: LocalModel, partners: list[str]) -> str:
    """What a model of the list is, in one line."""
    found = model.found
    if found is None:
        return model.problem or "cannot be read"
    if isinstance(found, ConvertedPair):
        parts = [_short(part) for part in (found.target, found.drafter) if part]
        parts += [f"self-test: {_tested(found.self_test)}"] if model.origin == "converted" else []
    else:
        parts = [_short(found)]
        if partners:
            parts.append(("for " if found.kind else "goes with ") + ", ".join(partners))
        elif not found.kind and found.goes_with:
            parts.append(f"goes with {found.goes_with[0]}, which is not here")
    return " · ".join([*parts, *([model.problem] if model.problem else [])])


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns that line up; the last may be as long as it likes."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def shown_number(value: int) -> str:
    """A count as people say it: 4.2 M, 1.5 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return str(value)


def _facts(found: CheckpointInfo) -> dict[str, str | None]:
    facts: dict[str, str | None] = {
        "family": f"{found.kind} ({found.family})" if found.kind else found.family,
        "parameters": shown_number(found.parameters),
        "weights": f"{human_bytes(found.size)}, {found.precision}",
        "layers": _layers(found),
        "hidden size": _text(found.hidden_size),
        "heads": _heads(found),
        "vocabulary": _text(found.vocab_size),
        "window": _text(found.window),
        "context": _text(found.context),
        "tokenizer": "yes" if found.has_tokenizer else "no",
        "chat template": "yes" if found.has_template else "no",
    }
    if found.kind:
        needs = _needs(found.needs) if found.needs else None
        return facts | {"needs a target of": needs, "made for": ", ".join(found.goes_with)}
    return facts | {"own draft heads": _own_heads(found), "drafters": ", ".join(found.goes_with)}


def _own_heads(found: CheckpointInfo) -> str:
    if found.speculative_heads == "present":
        layers = found.prediction_layers
        return f"present ({layers} layer{'s' if layers > 1 else ''})" if layers else "present"
    if found.speculative_heads == "stripped":
        return "stripped: config.json promises them, no tensor of theirs is here"
    return "none"


def _heads(found: CheckpointInfo) -> str | None:
    if found.heads is None:
        return None
    parts = [f"{found.heads} of {found.head_dim}, {found.kv_heads} for K/V"]
    if found.global_head_dim or found.global_kv_heads:
        dim, heads = found.global_head_dim or found.head_dim, found.global_kv_heads or found.kv_heads
        parts.append(f"of {dim} and {heads} for K/V in full attention")
    return "; ".join(parts)


def _layers(found: CheckpointInfo) -> str | None:
    if found.layers is None:
        return None
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.layer_types.items())
    return f"{found.layers} ({kinds})" if kinds else str(found.layers)


def _needs(shape: TargetShape) -> str:
    parts = [("hidden size", shape.hidden_size), ("vocabulary", shape.vocab_size), ("layers", shape.layers)]
    lines = [f"{name} {value}" for name, value in parts if value is not None]
    if shape.window is not None:
        lines.append(f"window {shape.window}")
    if shape.kv_heads is not None:
        kv = f"K/V {shape.kv_heads} × {shape.head_dim}"
        lines.append(f"{kv} and, in full attention, {shape.global_kv_heads} × {shape.global_head_dim}")
    return ", ".join(lines)


def _tested(result: Mapping[str, Any]) -> str:
    """The self-test of a pair.json in a few words: its plain values, whatever they are called."""
    if not result:
        return "not recorded"
    plain = {key: value for key, value in result.items() if isinstance(value, str | int | float)}
    verdict, why = plain.pop("result", None), plain.pop("why", None)
    shown = [f"{key.replace('_', ' ')} {_figure(value)}" for key, value in plain.items()]
    said = f"{verdict} ({why})" if why else str(verdict)
    return ", ".join([*([said] if verdict is not None else []), *shown]) or "recorded"


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _short(found: CheckpointInfo) -> str:
    size = f" {shown_number(found.parameters)}" if found.parameters else ""
    return f"{found.kind or found.family}{size}, {found.precision}"


def _rows(facts: Mapping[str, str | None], indent: int = 2) -> list[str]:
    return [f"{'':{indent}}{name:<19}{value}" for name, value in facts.items() if value]


def _problem(problem: str | None) -> list[str]:
    return _rows({"problem": problem})


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)
