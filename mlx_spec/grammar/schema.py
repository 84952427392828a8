"""JSON schemas in the keywords of one draft: types, keywords, parts, and what several schemas allow together.

`schema_reader` brings every schema into this form: annotations are gone, and references are "#/$defs/NAME".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Schema = dict[str, Any] | bool
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OF_TYPE: Mapping[str, str] = {  # keyword -> the only type that it restricts
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys((*BOUNDS, "multipleOf"), "number"),
    **dict.fromkeys(
        "items prefixItems minItems maxItems uniqueItems contains unevaluatedItems".split(), "array"
    ),
    **dict.fromkeys(
        """properties patternProperties additionalProperties required minProperties maxProperties
        propertyNames dependentRequired dependentSchemas unevaluatedProperties""".split(),
        "object",
    ),
}
UNIONS = ("anyOf", "oneOf")
# Keywords whose values are lists of schemas, schemas by name, or a schema.
SCHEMA_LISTS = ("allOf", *UNIONS, "prefixItems")
SCHEMA_MAPS = ("properties", "patternProperties", "dependentSchemas")
SCHEMAS = (
    "items additionalProperties propertyNames not if then else unevaluatedProperties unevaluatedItems".split()
)
MAX_DEPTH = 8  # of references and members that are followed


class Definitions:
    """The schemas that references name."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._types: dict[str, frozenset[str]] = {}

    def of(self, reference: str) -> Schema:
        """Return the schema that a reference stands for."""
        return self._definitions[name_of(reference)]

    def resolved(self, schema: Schema) -> Schema:
        """Follow a schema that is only a reference. Return the schema it refers to."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or list(schema) != ["$ref"]:
                break
            schema = self.of(schema["$ref"])
        return schema

    def members(self, schema: Schema, depth: int = 0) -> Iterator[dict[str, Any]]:
        """Yield all schemas that a value of `schema` matches at the same time."""
        if schema is False:
            yield {"enum": []}
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return
        yield schema
        if "$ref" in schema:
            yield from self.members(self.of(schema["$ref"]), depth + 1)
        for member in schema.get("allOf", ()):
            yield from self.members(member, depth + 1)

    def types(self, schema: Schema) -> frozenset[str]:
        """Return the types that values may have; "number" comes with "integer"."""
        if isinstance(schema, bool):
            return frozenset(TYPES if schema else ())
        types = frozenset(type_list(schema))
        types |= {"integer"} if "number" in types else set()
        if (values := values_of(schema)) is not None:
            types = frozenset(kind for kind in types if any(fits(value, [kind]) for value in values))
        if "$ref" in schema:
            types &= self._types_of(schema["$ref"])
        for member in schema.get("allOf", ()):
            types &= self.types(member)
        for union in UNIONS:
            if union in schema:
                types &= frozenset().union(*map(self.types, schema[union]))
        return types

    def _types_of(self, reference: str) -> frozenset[str]:
        if reference not in self._types:
            self._types[reference] = frozenset(TYPES)  # within itself, a schema is not known yet
            self._types[reference] = self.types(self.of(reference))
        return self._types[reference]


def map_subschemas(
    schema: Mapping[str, Any], change: Callable[[Schema, str], Schema], pointer: str = ""
) -> dict[str, Any]:
    """Return a schema with `change(subschema, its pointer)` for each schema in it."""
    changed = dict(schema)
    for keyword, value in schema.items():
        inner = f"{pointer}/{escaped(keyword)}"
        if keyword in SCHEMA_LISTS:
            changed[keyword] = [change(subschema, f"{inner}/{i}") for i, subschema in enumerate(value)]
        elif keyword in SCHEMA_MAPS:
            changed[keyword] = {
                name: change(subschema, f"{inner}/{escaped(name)}") for name, subschema in value.items()
            }
        elif keyword in SCHEMAS:
            changed[keyword] = change(value, inner)
    return changed


def all_subschemas(schema: Schema) -> list[dict[str, Any]]:
    """Return a schema and all schemas within it, except for true and false."""
    subschemas: list[dict[str, Any]] = []

    def note(subschema: Schema, pointer: str) -> Schema:
        if isinstance(subschema, dict):
            subschemas.append(subschema)
            map_subschemas(subschema, note)
        return subschema

    note(schema, "")
    return subschemas


def escaped(key: str) -> str:
    """Return a key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def name_of(reference: str) -> str:
    """Return the name of a reference in `$defs`."""
    return reference.removeprefix("#/$defs/")


def type_list(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that `type` names; all types without it."""
    named = schema.get("type", list(TYPES))
    return named if isinstance(named, list) else [named]


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema itself lists."""
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def fits(value: Any, types: Iterable[str]) -> bool:
    """Return True if a value has one of `types`."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and value == int(value))
    kinds = {str: "string", type(None): "null", list: "array", dict: "object"}
    return kinds[type(value)] in types


def is_among(value: Any, values: Iterable[Any]) -> bool:
    """Return True if `value` is one of `values` by the rules of JSON: true is not 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def either(schemas: list[Schema]) -> Schema:
    """Return a schema of values that match at least one of `schemas`."""
    some = [schema for schema in schemas if schema is not False]
    if True in some or {} in some:
        return True
    return {"anyOf": some} if len(some) > 1 else some[0] if some else False


def both(schemas: Iterable[Schema]) -> Schema:
    """Return a schema of values that match all of `schemas`."""
    some = [schema for schema in schemas if schema is not True and schema != {}]
    if False in some:
        return False
    return {"allOf": some} if len(some) > 1 else some[0] if some else True
