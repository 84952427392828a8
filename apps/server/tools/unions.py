"""Schemas that exclude each other: of those, "one of" means no more than "any of", which can be enforced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from mlx_spec.apps.server.tools.schema import MAX_DEPTH, Unresolved, resolve, type_of

KINDS = frozenset({"null", "boolean", "number", "string", "object", "array"})
MOST = 256  # options that are compared, each with each
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "propertyNames"),
    *("additionalProperties", "unevaluatedProperties", "not", "if", "then", "else"),
)


def widened(schema: Any) -> Any:
    """`schema` with "anyOf" for each "oneOf" whose options provably exclude each other: it means the same."""
    return _widened(schema, Exclusion(schema), 0)


def widened_text(text: str) -> str:
    """The same for a schema as JSON; what is no JSON comes back as it is."""
    if '"oneOf"' not in text:
        return text
    try:
        return json.dumps(widened(json.loads(text)))
    except (ValueError, RecursionError):
        return text


def _widened(schema: Any, exclusion: Exclusion, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema
    found = dict(schema)
    for key in found.keys() & set(BY_NAME):
        if isinstance(found[key], Mapping):
            found[key] = {name: _widened(each, exclusion, depth + 1) for name, each in found[key].items()}
    for key in found.keys() & set(LISTED):
        if isinstance(found[key], list):
            found[key] = [_widened(each, exclusion, depth + 1) for each in found[key]]
    for key in found.keys() & set(SINGLE):
        found[key] = _widened(found[key], exclusion, depth + 1)
    options = schema.get("oneOf")
    if isinstance(options, list) and "anyOf" not in schema and exclusion.holds(options):
        found["anyOf"] = found.pop("oneOf")
    return found


class Exclusion:
    """Tells schemas apart that are parts of `root`. What it says of them is never too little: every value
    that a schema allows is of one of its kinds, one of its values and has its tags, if it has any."""

    def __init__(self, root: Any) -> None:
        self._root = root if isinstance(root, Mapping) else {}
        self._kinds: dict[int, frozenset[str]] = {}  # by identity, also of those that are being looked at

    def holds(self, options: list[Any]) -> bool:
        """Whether no value is allowed by two of `options`, as far as that can be proved."""
        return len(options) <= MOST and all(self._apart(a, b) for a, b in combinations(options, 2))

    def _apart(self, a: Any, b: Any) -> bool:
        kinds = self.kinds(a) & self.kinds(b)
        if not kinds:
            return True
        one, other = self._values(self._plain(a)), self._values(self._plain(b))
        if one is not None and other is not None:
            return not one & other
        tags, others = self._tags(a), self._tags(b)
        return kinds == {"object"} and any(not tags[key] & others[key] for key in tags.keys() & others.keys())

    def kinds(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types of the values that `schema` allows, or more; integers are numbers."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return frozenset() if schema is False else KINDS
        if id(schema) not in self._kinds:
            self._kinds[id(schema)] = KINDS  # should it contain itself
            self._kinds[id(schema)] = self._found(schema, depth + 1)
        return self._kinds[id(schema)]

    def _found(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        found, named = KINDS, schema.get("type")
        if named is not None:
            found &= {_kind(each) for each in (named if isinstance(named, list) else [named])}
        if isinstance(schema.get("enum"), list):
            found &= {_kind(type_of(value)) for value in schema["enum"]}
        if "const" in schema:
            found &= {_kind(type_of(schema["const"]))}
        if "$ref" in schema and (target := self._plain({"$ref": schema["$ref"]})) is not None:
            found &= self.kinds(target, depth)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(keyword), list):
                found &= frozenset().union(*(self.kinds(option, depth) for option in options))
        for option in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            found &= self.kinds(option, depth)
        return found | {"null"} if schema.get("nullable") is True else found

    def _plain(self, schema: Any) -> Any:
        """What a reference stands for; anything else as it is. None: it leads nowhere."""
        for _ in range(MAX_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str):
                return schema
            try:
                schema = resolve(reference, self._root)
            except Unresolved:
                return None
        return None

    def _values(self, schema: Any) -> frozenset[str] | None:
        """The few values that a schema allows; None: not known."""
        if not isinstance(schema, Mapping):
            return None
        if "const" in schema:
            return frozenset({_written(schema["const"])})
        return frozenset(map(_written, schema["enum"])) if isinstance(schema.get("enum"), list) else None

    def _tags(self, schema: Any, depth: int = 0) -> dict[str, frozenset[str]]:
        """The properties that an object must have and that have few values."""
        schema = self._plain(schema)
        if not isinstance(schema, Mapping) or depth > 1:
            return {}
        required, properties = schema.get("required"), schema.get("properties")
        found = {}
        if isinstance(required, list) and isinstance(properties, Mapping):
            each = {key: self._values(self._plain(properties.get(key))) for key in required if _is_text(key)}
            found = {key: values for key, values in each.items() if values is not None}
        for keyword in ("anyOf", "oneOf"):  # a union within a union
            if isinstance(options := schema.get(keyword), list) and options:
                inner = [self._tags(option, depth + 1) for option in options[:MOST]]
                if len(inner) == len(options):
                    shared = set(inner[0]).intersection(*inner[1:])
                    found = {key: frozenset().union(*(i[key] for i in inner)) for key in shared} | found
        return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _kind(name: Any) -> str:
    return "number" if name == "integer" else str(name)


def _written(value: Any) -> str:
    """The same text for values that are equal in JSON schemas: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return list(map(_whole, value))
    return {key: _whole(each) for key, each in value.items()} if isinstance(value, dict) else value
