"""JSON schemas of parameters: references, and the types of value that a schema allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MAX_STEPS = 32  # of references to references, and of alternatives in each other
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}


CHOICES = ("anyOf", "oneOf", "allOf")
MAX_DEPTH = 100


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


SHAPES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "type",
        lambda value: _is_text(value) or (_is_filled(value) and _is_names(value)),
        "a name or a list of names",
    ),
    ("required", _is_names, "a list of names"),
    *((keyword, _is_object, "an object") for keyword in ("properties", "$defs", "definitions")),
    *((keyword, _is_filled, "a list that is not empty") for keyword in ("enum", *CHOICES)),
    *((keyword, _is_text, "a string") for keyword in ("pattern", "format", "$ref")),
    *(
        (keyword, _is_count, "a whole number")
        for keyword in ("minItems", "maxItems", "minLength", "maxLength")
    ),
)


class Unresolved(Exception):
    """A reference that leads nowhere."""


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within `root`, such as "#/$defs/Point", stands for. Raises Unresolved."""
    if reference != "#" and not reference.startswith("#/"):
        raise Unresolved(f"$ref {reference!r} is not within this schema")
    found: Any = root
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            raise Unresolved(f"$ref {reference!r} leads nowhere")
        found = found[key]
    return found


def misshapen(schema: Any, steps: int = 0) -> str | None:
    """What in `schema` cannot be: a keyword and what it must be. None: nothing that is looked at here."""
    if not isinstance(schema, Mapping) or steps > MAX_DEPTH:
        return None if isinstance(schema, Mapping | bool) else f"{str(schema)[:32]!r} must be a schema"
    for keyword, fits, what in SHAPES:
        if keyword in schema and not fits(schema[keyword]):
            return f"{keyword} must be {what}"
    for least, most in (("minItems", "maxItems"), ("minLength", "maxLength")):
        if schema.get(least, 0) > schema.get(most, schema.get(least, 0)):
            return f"{least} must not be more than {most}"
    inner = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
    inner += [each for keyword in CHOICES for each in schema.get(keyword, ())]
    inner += [schema[keyword] for keyword in ("items", "additionalProperties") if keyword in schema]
    inner = [each for each in inner if not isinstance(each, list)]
    return next((found for each in inner if (found := misshapen(each, steps + 1))), None)


def types(
    schema: Any, root: Mapping[str, Any], steps: int = 0, seen: set[str] | None = None
) -> frozenset[str]:
    """The types that `schema` names, by itself, its values or its alternatives; empty: it names none.

    `seen` are references that were followed: once is enough.
    """
    if not isinstance(schema, Mapping) or steps > MAX_STEPS:
        return frozenset()
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    found = {each for each in listed if isinstance(each, str)}
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        found |= set() if found else {type_of(value) for value in values}
    seen = set() if seen is None else seen
    if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        try:
            found |= types(resolve(reference, root), root, steps + 1, seen)
        except Unresolved:
            return frozenset()
    for keyword in CHOICES:
        options = schema.get(keyword)
        for option in options if isinstance(options, list) else ():
            found |= types(option, root, steps + 1, seen)
    return frozenset(found | ({"null"} if schema.get("nullable") is True else set()))


def type_of(value: Any) -> str:
    """The JSON type of `value`."""
    return "null" if value is None else NAMES.get(type(value), "string")
