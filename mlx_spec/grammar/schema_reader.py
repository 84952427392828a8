"""Read a JSON schema of any draft, generator or client into the keywords of one draft.

Annotations are dropped, references become pointers into `$defs`, and llguidance rounds none of the numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.errors import InvalidValue
from mlx_spec.grammar.patterns import EMPTY, FORMATS, PatternChecker, translated
from mlx_spec.grammar.references import DYNAMIC, References
from mlx_spec.grammar.schema import (
    BOUNDS,
    OF_TYPE,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    SCHEMAS,
    TYPES,
    Schema,
    escaped,
    fits,
    type_list,
)

MAX_EXACT = 2**53  # llguidance reads numbers as floats: integers above are rounded


@dataclass(frozen=True)
class Unenforced:
    """A keyword that restricts values and is left out, because no grammar enforces it."""

    pointer: str  # of the schema that has it, as a JSON pointer
    keyword: str
    reason: str = "no grammar enforces it"

    def __str__(self) -> str:
        return f"{self.keyword} at {self.pointer}: {self.reason}"


@dataclass(frozen=True)
class ReadSchema:
    """A schema in the keywords of one draft."""

    root: Schema
    definitions: dict[str, Schema]  # by the names of references, "#/$defs/NAME"
    unenforced: list[Unenforced]  # the keywords that it leaves out


def read_schema(root: Any, checker: PatternChecker | None = None, pointer: str = "#") -> ReadSchema:
    """Read the schema that a pointer names in `root`. Without a checker patterns are not compiled.

    Raises InvalidValue if it is not a schema.
    """
    if isinstance(root, bool):
        return ReadSchema(root, {}, [])
    if not isinstance(root, Mapping):
        raise InvalidValue("the schema is not one: give an object, true or false")
    try:
        json.dumps(root, ensure_ascii=False, allow_nan=False).encode()
        return _Reader(root, checker).read(pointer)
    except UnicodeEncodeError:
        raise InvalidValue("the schema holds half a character: give whole ones") from None
    except ValueError:
        raise InvalidValue("the schema holds NaN or Infinity: give finite numbers") from None
    except RecursionError:
        raise InvalidValue("the schema is nested too deeply (recursion limit): make it flatter") from None


class _Reader:
    def __init__(self, root: Mapping[str, Any], checker: PatternChecker | None) -> None:
        self._checker = checker
        self._unenforced: list[Unenforced] = []
        self._references = References(root)
        self._names: dict[str, str] = {}  # pointer -> its name in $defs
        self._waiting: list[str] = []
        draft = root.get("$schema")
        # In drafts up to 7 a $ref makes all other keywords beside it void.
        self._is_old = isinstance(draft, str) and re.search("draft-0[3-7]", draft) is not None

    def read(self, pointer: str) -> ReadSchema:
        """Return the schema that a pointer names, with all schemas that it refers to."""
        root, definitions = self.schema(self._references.at(pointer), pointer), {}
        while self._waiting:
            target = self._waiting.pop(0)
            definitions[self._names[target]] = self.schema(self._references.at(target), target)
        return ReadSchema(root, definitions, self._unenforced)

    def leave_out(self, pointer: str, keyword: str, reason: str = Unenforced.reason) -> None:
        self._unenforced.append(Unenforced(pointer, keyword, reason))

    def problem(self, schema: Mapping[str, Any]) -> str | None:
        """Return why llguidance refuses a schema; None if it accepts it, or if patterns are not compiled."""
        return None if self._checker is None else self._checker.problem(schema)

    def schema(self, node: Any, pointer: str) -> Schema:
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise InvalidValue(f"the schema at {pointer} is not one: give an object, true or false")
        if self._is_old and isinstance(node.get("$ref"), str):
            node = {key: node[key] for key in ("$ref", "nullable") if key in node}
        types = self._types(node, pointer)
        keywords: dict[str, Any] = {}
        for key, value in node.items():
            only = OF_TYPE.get(key)
            if only is None or types is None or only in types or (only == "number" and "integer" in types):
                for name, new in self._keyword(key, value, node, pointer, types).items():
                    if name == "allOf":
                        new = [*keywords.get(name, []), *new]
                    if name == "dependentSchemas":
                        new = {**keywords.get(name, {}), **new}
                    keywords[name] = new
        _nudge(keywords)
        whole = self._possible(keywords, pointer)
        return {"anyOf": [whole, {"type": "null"}]} if node.get("nullable") is True else whole

    def _possible(self, schema: dict[str, Any], pointer: str) -> Schema:
        """Return a schema without types that have no allowed value, and without too complex keywords."""
        if "enum" in schema or "const" in schema:
            return schema if schema.get("enum") != [] else False
        formats = {each["format"] for each in (schema, *schema.get("allOf", ())) if _says(each, "format")}
        if len(formats) > 1:  # annotations that contradict each other
            for each in (schema, *schema["allOf"]):
                if isinstance(each, dict):
                    each.pop("format", None)
        types = type_list(schema)
        scalars = {  # if they are too complex together, the first of these keywords is left out
            "string": ("maxLength", "minLength", "pattern", "format"),
            "integer": ("multipleOf", *BOUNDS),
            "number": ("multipleOf", *BOUNDS),
        }
        for kind, keys in scalars.items():
            said = {key: schema[key] for key in keys if key in schema}
            if kind in types and len(said) > 1:
                patterned = [each for each in schema.get("allOf", ()) if _says(each, "pattern")]
                both = {**said, **({"allOf": patterned} if patterned and kind == "string" else {})}
                reason = self.problem({**both, "type": kind})
                if reason == EMPTY:
                    types = [name for name in types if name != kind]
                    schema["type"] = types
                elif reason is not None:
                    key = next(iter(said))
                    self.leave_out(pointer, key, reason)
                    del schema[key]
        return schema if types else False

    def _types(self, node: Mapping[str, Any], pointer: str) -> tuple[str, ...] | None:
        """Return the types that `type` allows; None if it allows all."""
        named = node.get("type")
        if named is None:
            return None
        several = named if isinstance(named, list) else [named]
        known = [name.lower() for name in several if isinstance(name, str) and name.lower() in TYPES]
        if len(known) < len(several) or not known:
            if not all(isinstance(name, str) for name in several):
                raise InvalidValue(f"type at {pointer}: give the name of a type, or a list of names")
            self.leave_out(pointer, "type", f"JSON has the types {', '.join(TYPES)}")
            return None
        if "number" in known:
            known = [name for name in known if name != "integer"]
        return tuple(dict.fromkeys(known))

    def _keyword(
        self, key: str, value: Any, node: Mapping[str, Any], pointer: str, types: tuple[str, ...] | None
    ) -> dict[str, Any]:
        """Return the keywords that replace one keyword; none for an annotation."""
        inner = f"{pointer}/{escaped(key)}"
        if key == "type":
            return {} if types is None else {"type": types[0] if len(types) == 1 else list(types)}
        if key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            return self._count(key, value, pointer)
        if key in BOUNDS:
            return self._bound(key, value, node, pointer, types)
        if key == "$ref" or key in DYNAMIC:
            return self._reference(key, value, pointer)
        special: Callable[[Any, Mapping[str, Any], str], dict[str, Any]] | None = {
            "enum": self._values,
            "const": lambda value, node, pointer: self._values([value], node, pointer, "const"),
            "items": self._items,
            "required": self._required,
            "dependentRequired": self._dependencies,
            "dependencies": self._dependencies,
            "pattern": self._pattern,
            "format": self._format,
            "multipleOf": self._multiple,
            "uniqueItems": self._unique,
            "contains": self._contains,
        }.get(key)
        if special is not None:
            return special(value, node, pointer)
        if key in SCHEMAS:
            return {key: self.schema(value, inner)}
        if key in SCHEMA_LISTS:
            return {key: parts} if (parts := self._each(value, inner)) else {}
        return {key: self._map(value, inner)} if key in SCHEMA_MAPS else {}

    def _each(self, value: Any, pointer: str) -> list[Schema]:
        if not isinstance(value, list):
            raise InvalidValue(f"{pointer} is not a list of schemas")
        return [self.schema(schema, f"{pointer}/{i}") for i, schema in enumerate(value)]

    def _map(self, value: Any, pointer: str) -> dict[str, Schema]:
        if not isinstance(value, Mapping):
            raise InvalidValue(f"{pointer} is not an object of schemas")
        return {key: self.schema(schema, f"{pointer}/{escaped(key)}") for key, schema in value.items()}

    def _reference(self, key: str, value: Any, pointer: str) -> dict[str, Any]:
        if not isinstance(value, str):
            raise InvalidValue(f"{key} at {pointer}: give a text")
        target = self._references.target(value, pointer)
        if target is None:
            if value.startswith("#"):
                raise InvalidValue(f"{key} at {pointer}: {value!r} is not within this schema")
            self.leave_out(pointer, key, f"{value!r} is not within this schema, and nothing is fetched")
            return {}
        if target not in self._names:
            wanted = target.rpartition("/")[2] or "root"
            name = wanted = (
                "".join(c if c.isalnum() or c in "_-." else "_" for c in wanted).strip("#") or "root"
            )
            taken, number = set(self._names.values()), 1
            while name in taken:
                number += 1
                name = f"{wanted}_{number}"
            self._names[target] = name
            self._waiting.append(target)
        return {"$ref": f"#/$defs/{self._names[target]}"}

    def _values(self, value: Any, node: Mapping[str, Any], pointer: str, key: str = "enum") -> dict[str, Any]:
        if not isinstance(value, list):
            raise InvalidValue(f"{key} at {pointer}: give a list of values")
        types = self._types({"type": node.get("type")}, pointer)
        if any(_is_rounded(item) for item in value):
            self.leave_out(pointer, key, f"numbers beyond {MAX_EXACT} would be rounded")
            return {}
        fitting = [item for item in value if types is None or fits(item, types)]
        return {key: fitting[0]} if key == "const" and fitting else {"enum": fitting}

    def _items(self, value: Any, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        if not isinstance(value, list):
            return {"items": self.schema(value, f"{pointer}/items")}
        rest = node.get("additionalItems", True)
        first = {"prefixItems": self._each(value, f"{pointer}/items")}
        return {**first, "items": self.schema(rest, f"{pointer}/additionalItems")}

    def _required(self, value: Any, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        if isinstance(value, bool):  # of a property, in draft 3
            return {}
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise InvalidValue(f"required at {pointer}: give a list of names")
        return {"required": list(dict.fromkeys(value))} if value else {}

    def _dependencies(self, value: Any, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        """Return dependencies of all forms as `dependentSchemas`."""
        if not isinstance(value, Mapping):
            raise InvalidValue(f"the dependencies at {pointer} are not an object")
        schemas = {
            key: self._required(dependency, {}, f"{pointer}/{escaped(key)}")
            if isinstance(dependency, list)
            else self.schema(dependency, f"{pointer}/{escaped(key)}")
            for key, dependency in value.items()
            if dependency != []
        }
        return {"dependentSchemas": schemas} if schemas else {}

    def _count(self, key: str, value: Any, pointer: str) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise InvalidValue(f"{key} at {pointer}: give a whole number from 0 on")
        return {key: int(value)} if value or key.startswith("max") else {}

    def _bound(
        self, key: str, value: Any, node: Mapping[str, Any], pointer: str, types: tuple[str, ...] | None
    ) -> dict[str, Any]:
        other = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}.get(key)
        if isinstance(value, bool):  # of draft 4, beside the bound itself
            return {}
        if not isinstance(value, int | float):
            raise InvalidValue(f"{key} at {pointer}: give a number")
        if other is not None and node.get(other) is True:
            key = other
        is_lower = "inimum" in key
        # The largest float that fits into the integers of its bounds; it refuses other numbers beyond 1e18.
        largest = 2**63 - 1024 if types is not None and "number" not in types else 1e18
        if value > largest if is_lower else value < -largest:
            self.leave_out(pointer, key, f"bounds beyond {largest:g} are not supported")
            return {}
        return {key: _inward(value, 1 if is_lower else -1, largest)}

    def _multiple(self, value: Any, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InvalidValue(f"multipleOf at {pointer}: give a number above 0")
        scaled = float(value)
        for _ in range(9):
            if scaled == int(scaled):
                break
            scaled *= 10
        if scaled != int(scaled) or scaled >= 2**32:  # as llguidance reads it
            self.leave_out(pointer, "multipleOf", f"{value} has too many digits")
            return {}
        return {"multipleOf": value}

    def _unique(self, value: Any, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        most = node.get("maxItems")
        if value is True and not (isinstance(most, int) and most <= 1):
            self.leave_out(pointer, "uniqueItems", "a grammar does not compare items")
        return {}

    def _contains(self, value: Any, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        if node.get("minContains") != 0 or "maxContains" in node:
            self.leave_out(pointer, "contains", "a grammar does not count items of a kind")
        return {}

    def _pattern(self, value: Any, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        if not isinstance(value, str):
            raise InvalidValue(f"pattern at {pointer}: give a text")
        format = node.get("format")
        patterns = translated(value, format if isinstance(format, str) else None)
        for pattern in patterns:
            reason = self.problem({"pattern": pattern})
            if reason is not None:
                self.leave_out(pointer, "pattern", reason)
                return {}
        return {
            "pattern": patterns[-1],
            **({"allOf": [{"pattern": pattern} for pattern in patterns[:-1]]} if patterns[1:] else {}),
        }

    def _format(self, value: Any, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        """Return a known format, unless it contradicts the other keywords."""
        if not isinstance(value, str) or value not in FORMATS:
            return {}
        binding = {key: node[key] for key in ("minLength", "maxLength") if key in node}
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            members = [{"pattern": text} for text in translated(pattern, value)]
            binding["allOf"] = [member for member in members if self.problem(member) is None]
        if binding and self.problem({**binding, "format": value}) is not None:
            return {}
        return {"format": value}


def _says(schema: Schema, keyword: str) -> bool:
    return isinstance(schema, dict) and keyword in schema


def _is_rounded(value: Any) -> bool:
    if isinstance(value, Mapping | list):
        return any(map(_is_rounded, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > MAX_EXACT


def _inward(bound: float, direction: int, largest: float) -> float:
    """Return a bound that llguidance does not round, and that allows no more values."""
    if abs(bound) > largest:
        return int(largest) if bound > 0 else -int(largest)
    if isinstance(bound, int) and abs(bound) > MAX_EXACT:
        rounded = float(bound)
        if (int(rounded) - bound) * direction < 0:
            rounded = math.nextafter(rounded, math.inf * direction)
        return int(rounded)
    return bound


def _nudge(schema: dict[str, Any]) -> None:
    """Replace an exclusive bound that llguidance would include.

    It does so with a whole number, if the other bound is less than 1 away.
    """
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    for bound, key, opposite in (
        (low, "exclusiveMinimum", schema.get("maximum", high)),
        (high, "exclusiveMaximum", schema.get("minimum", low)),
    ):
        if bound is None or opposite is None or schema.get("type") == "integer":
            continue
        distance = opposite - bound
        if (distance > 0) is not (key == "exclusiveMinimum"):
            continue  # no number is within them
        if bound == int(bound) and 0 < abs(distance) < 1:
            digits = 3 - math.floor(math.log10(abs(distance)))
            del schema[key]
            nearer = "minimum" if distance > 0 else "maximum"
            nudged = round(bound + math.copysign(10.0**-digits, distance), digits)
            schema[nearer] = max(nudged, schema.get(nearer, nudged), key=lambda limit: limit * distance)
