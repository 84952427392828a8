"""Answer questions about JSON schemas: whether two exclude each other, and what the opposite of one is.

Every answer is on the safe side: "not known" if it takes more than the common keywords. The schemas come from
`schema_reader`.
"""

from __future__ import annotations

from typing import Any

from mlx_spec.grammar.schema import (
    BOUNDS,
    MAX_DEPTH,
    TYPES,
    UNIONS,
    Definitions,
    Schema,
    both,
    either,
    is_among,
    type_list,
    values_of,
)

CLOSED = "x-closed"  # marks an object that will have only the properties that it lists
LENGTHS = {"minLength": "string", "minItems": "array", "minProperties": "object"}


class Logic(Definitions):
    """Questions about schemas whose references are into `definitions`."""

    def values(self, schema: Schema) -> list[Any] | None:
        """Return a list that contains all allowed values; None if the schema does not list them."""
        lists = [values for member in self.members(schema) if (values := values_of(member)) is not None]
        if not lists:
            return [True, False] if self.types(schema) == {"boolean"} else None
        return [value for value in lists[0] if all(is_among(value, other) for other in lists[1:])]

    def required(self, schema: Schema) -> set[str]:
        return {name for member in self.members(schema) for name in member.get("required", ())}

    def of_property(self, schema: Schema, name: str) -> list[Schema]:
        """Return all schemas that the property `name` has to match."""
        schemas = []
        for member in self.members(schema):
            if name in member.get("properties", {}):
                schemas.append(member["properties"][name])
            elif "additionalProperties" in member and "patternProperties" not in member:
                schemas.append(member["additionalProperties"])
        return schemas

    def excludes(self, first: Schema, second: Schema, depth: int = 0) -> bool:
        """Return True if it is known that no value matches both."""
        if depth > MAX_DEPTH:
            return False
        common = self.types(first) & self.types(second)
        if not common:
            return True
        values, others = self.values(first), self.values(second)
        listed = values is not None and others is not None
        if listed and not any(is_among(value, others or ()) for value in values or ()):
            return True
        for one, other in ((first, second), (second, first)):
            for member in self.members(one):
                for union in UNIONS:
                    options = member.get(union)
                    if options and all(self.excludes(option, other, depth + 1) for option in options):
                        return True
        if common != {"object"}:
            return False
        return any(
            self.excludes(one, other, depth + 1)
            for name in self.required(first) | self.required(second)
            for one in self.of_property(first, name) or [True]
            for other in self.of_property(second, name) or [True]
        )

    def lacks(self, first: Schema, second: Schema) -> bool:
        """Return True if objects of `first`, once closed, lack a required property of `second`."""
        if self.types(first) != {"object"}:
            return False
        members = list(self.members(first))
        listed = {name for each in members for name in each.get("properties", ())}
        is_closed = any(each.get(CLOSED) or each.get("additionalProperties") is False for each in members)
        return is_closed and not self.required(second) <= listed

    def opposite(self, schema: Schema, context: Schema = True, depth: int = 0) -> Schema | None:
        """Return a schema of values that match `context` but not `schema`; None if it is not known.

        It does not repeat `context`, which has to match as well. If the opposite of a keyword is not known,
        values that only this keyword excludes from `schema` are missing.
        """
        schema = self.resolved(schema)
        if isinstance(schema, bool):
            return not schema
        if depth > MAX_DEPTH:
            return None
        opposites: list[Schema] = []
        is_known = True
        for keyword, value in schema.items():
            alternatives = self._opposites(keyword, value, schema, context, depth + 1)
            is_known &= alternatives is not None
            opposites += alternatives or ()
        return either(opposites) if is_known or any(opposite is not False for opposite in opposites) else None

    def _opposites(
        self, keyword: str, value: Any, schema: dict[str, Any], context: Schema, depth: int
    ) -> list[Schema] | None:
        """Return alternatives for a value that does not match one keyword; None if they are not known."""
        if keyword == CLOSED:
            return []
        if keyword == "type":
            return self._other_types(frozenset(type_list(schema)), context)
        if keyword in ("enum", "const"):
            return self._other_values(values_of({keyword: value}) or [], context)
        if keyword == "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        if keyword in BOUNDS:
            opposite = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")[BOUNDS.index(keyword)]
            return [{"type": "number", opposite: value}]
        if keyword in LENGTHS:
            return [{"type": LENGTHS[keyword], "max" + keyword[3:]: value - 1}]
        if keyword in ("maxLength", "maxItems"):
            shorter = "min" + keyword[3:]
            return [{"type": LENGTHS[shorter], shorter: value + 1}]
        if keyword == "not":
            return [value]
        if keyword == "properties":
            others = {
                name: self.opposite(subschema, both(self.of_property(context, name)), depth)
                for name, subschema in value.items()
            }
            alternatives: list[Schema] = [
                {"type": "object", "required": [name], "properties": {name: other}}
                for name, other in others.items()
                if other is not None and other is not False
            ]
            return alternatives if alternatives or None not in others.values() else None
        if keyword in ("anyOf", "allOf"):
            members = [self.opposite(subschema, context, depth) for subschema in value]
            known = [subschema for subschema in members if subschema is not None]
            if not known or (keyword == "anyOf" and len(known) < len(members)):
                return None
            return known if keyword == "allOf" else [both(known)]
        if keyword == "$ref":
            other = self.opposite({"$ref": value}, context, depth)
            return None if other is None else [other]
        return None

    def _other_types(self, types: frozenset[str], context: Schema) -> list[Schema] | None:
        possible = self.types(context)
        if "integer" in types and "number" not in types and "number" in possible:
            return None  # no keyword means "a number that is not an integer"
        covered = types | ({"integer"} if "number" in types | possible else set())
        others = [kind for kind in TYPES if kind in possible - covered]
        return [{"type": others}] if others else []

    def _other_values(self, values: list[Any], context: Schema) -> list[Schema] | None:
        possible = self.values(context)
        if possible is None:
            return self._other_types(frozenset({"null"}), context) if values == [None] else None
        others = [value for value in possible if not is_among(value, values)]
        return [{"enum": others}] if others else []
