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

    place: str  # of the schema that has it, as a JSON pointer
    keyword: str
    reason: str = "no grammar enforces it"

    def __str__(self) -> str:
        return f"{self.keyword} at {self.place}: {self.reason}"


@dataclass(frozen=True)
class ReadSchema:
    """A schema in the keywords of one draft."""

    root: Schema
    definitions: dict[str, Schema]  # by the names of references, "#/$defs/NAME"
    unenforced: list[Unenforced]  # the keywords that it leaves out


def read_schema(root: Any, checker: PatternChecker | None = None, place: str = "#") -> ReadSchema:
    """Read the schema at a place in `root`. Without a checker patterns are not compiled.

    Raises InvalidValue if it is not a schema.
    """
    if isinstance(root, bool):
        return ReadSchema(root, {}, [])
    if not isinstance(root, Mapping):
        raise InvalidValue("the schema is not one: give an object, true or false")
    try:
        json.dumps(root, ensure_ascii=False, allow_nan=False).encode()
        return _Reader(root, checker).read(place)
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
        self._names: dict[str, str] = {}  # place -> its name in $defs
        self._waiting: list[str] = []
        draft = root.get("$schema")
        # In drafts up to 7 a $ref makes all other keywords beside it void.
        self._is_old = isinstance(draft, str) and re.search("draft-0[3-7]", draft) is not None

    def read(self, place: str) -> ReadSchema:
        """Return the schema at a place, with all schemas that it refers to."""
        found, definitions = self.schema(self._references.at(place), place), {}
        while self._waiting:
            target = self._waiting.pop(0)
            definitions[self._names[target]] = self.schema(self._references.at(target), target)
        return ReadSchema(found, definitions, self._unenforced)

    def leave_out(self, place: str, keyword: str, reason: str = Unenforced.reason) -> None:
        self._unenforced.append(Unenforced(place, keyword, reason))

    def problem(self, schema: Mapping[str, Any]) -> str | None:
        """Return why llguidance refuses a schema; None if it accepts it, or if patterns are not compiled."""
        return None if self._checker is None else self._checker.problem(schema)

    def schema(self, given: Any, place: str) -> Schema:
        if isinstance(given, bool):
            return given
        if not isinstance(given, Mapping):
            raise InvalidValue(f"the schema at {place} is not one: give an object, true or false")
        if self._is_old and isinstance(given.get("$ref"), str):
            given = {key: given[key] for key in ("$ref", "nullable") if key in given}
        types = self._types(given, place)
        found: dict[str, Any] = {}
        for key, value in given.items():
            only = OF_TYPE.get(key)
            if only is None or types is None or only in types or (only == "number" and "integer" in types):
                for name, new in self._keyword(key, value, given, place, types).items():
                    if name == "allOf":
                        new = [*found.get(name, []), *new]
                    if name == "dependentSchemas":
                        new = {**found.get(name, {}), **new}
                    found[name] = new
        _nudge(found)
        whole = self._possible(found, place)
        return {"anyOf": [whole, {"type": "null"}]} if given.get("nullable") is True else whole

    def _possible(self, found: dict[str, Any], place: str) -> Schema:
        """Return a schema without types that have no allowed value, and without too complex keywords."""
        if "enum" in found or "const" in found:
            return found if found.get("enum") != [] else False
        formats = {each["format"] for each in (found, *found.get("allOf", ())) if _says(each, "format")}
        if len(formats) > 1:  # annotations that contradict each other
            for each in (found, *found["allOf"]):
                if isinstance(each, dict):
                    each.pop("format", None)
        types = type_list(found)
        scalars = {  # if they are too complex together, the first of these keywords is left out
            "string": ("maxLength", "minLength", "pattern", "format"),
            "integer": ("multipleOf", *BOUNDS),
            "number": ("multipleOf", *BOUNDS),
        }
        for kind, keys in scalars.items():
            said = {key: found[key] for key in keys if key in found}
            if kind in types and len(said) > 1:
                patterned = [each for each in found.get("allOf", ()) if _says(each, "pattern")]
                both = {**said, **({"allOf": patterned} if patterned and kind == "string" else {})}
                reason = self.problem({**both, "type": kind})
                if reason == EMPTY:
                    types = [each for each in types if each != kind]
                    found["type"] = types
                elif reason is not None:
                    key = next(iter(said))
                    self.leave_out(place, key, reason)
                    del found[key]
        return found if types else False

    def _types(self, given: Mapping[str, Any], place: str) -> tuple[str, ...] | None:
        """Return the types that `type` allows; None if it allows all."""
        named = given.get("type")
        if named is None:
            return None
        several = named if isinstance(named, list) else [named]
        known = [each.lower() for each in several if isinstance(each, str) and each.lower() in TYPES]
        if len(known) < len(several) or not known:
            if not all(isinstance(each, str) for each in several):
                raise InvalidValue(f"type at {place}: give the name of a type, or a list of names")
            self.leave_out(place, "type", f"JSON has the types {', '.join(TYPES)}")
            return None
        if "number" in known:
            known = [each for each in known if each != "integer"]
        return tuple(dict.fromkeys(known))

    def _keyword(
        self, key: str, value: Any, given: Mapping[str, Any], place: str, types: tuple[str, ...] | None
    ) -> dict[str, Any]:
        """Return the keywords that replace one keyword; none for an annotation."""
        inner = f"{place}/{escaped(key)}"
        if key == "type":
            return {} if types is None else {"type": types[0] if len(types) == 1 else list(types)}
        if key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            return self._count(key, value, place)
        if key in BOUNDS:
            return self._bound(key, value, given, place, types)
        if key == "$ref" or key in DYNAMIC:
            return self._reference(key, value, place)
        special: Callable[[Any, Mapping[str, Any], str], dict[str, Any]] | None = {
            "enum": self._values,
            "const": lambda value, given, place: self._values([value], given, place, "const"),
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
            return special(value, given, place)
        if key in SCHEMAS:
            return {key: self.schema(value, inner)}
        if key in SCHEMA_LISTS:
            return {key: parts} if (parts := self._each(value, inner)) else {}
        return {key: self._map(value, inner)} if key in SCHEMA_MAPS else {}

    def _each(self, value: Any, place: str) -> list[Schema]:
        if not isinstance(value, list):
            raise InvalidValue(f"{place} is not a list of schemas")
        return [self.schema(each, f"{place}/{i}") for i, each in enumerate(value)]

    def _map(self, value: Any, place: str) -> dict[str, Schema]:
        if not isinstance(value, Mapping):
            raise InvalidValue(f"{place} is not an object of schemas")
        return {key: self.schema(each, f"{place}/{escaped(key)}") for key, each in value.items()}

    def _reference(self, key: str, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, str):
            raise InvalidValue(f"{key} at {place}: give a text")
        target = self._references.place(value, place)
        if target is None:
            if value.startswith("#"):
                raise InvalidValue(f"{key} at {place}: {value!r} is not within this schema")
            self.leave_out(place, key, f"{value!r} is not within this schema, and nothing is fetched")
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

    def _values(self, value: Any, given: Mapping[str, Any], place: str, key: str = "enum") -> dict[str, Any]:
        if not isinstance(value, list):
            raise InvalidValue(f"{key} at {place}: give a list of values")
        types = self._types({"type": given.get("type")}, place)
        if any(_is_rounded(each) for each in value):
            self.leave_out(place, key, f"numbers beyond {MAX_EXACT} would be rounded")
            return {}
        fitting = [each for each in value if types is None or fits(each, types)]
        return {key: fitting[0]} if key == "const" and fitting else {"enum": fitting}

    def _items(self, value: Any, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        if not isinstance(value, list):
            return {"items": self.schema(value, f"{place}/items")}
        rest = given.get("additionalItems", True)
        found = {"prefixItems": self._each(value, f"{place}/items")}
        return {**found, "items": self.schema(rest, f"{place}/additionalItems")}

    def _required(self, value: Any, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        if isinstance(value, bool):  # of a property, in draft 3
            return {}
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InvalidValue(f"required at {place}: give a list of names")
        return {"required": list(dict.fromkeys(value))} if value else {}

    def _dependencies(self, value: Any, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return dependencies of all forms as `dependentSchemas`."""
        if not isinstance(value, Mapping):
            raise InvalidValue(f"the dependencies at {place} are not an object")
        found = {
            key: self._required(each, {}, f"{place}/{escaped(key)}")
            if isinstance(each, list)
            else self.schema(each, f"{place}/{escaped(key)}")
            for key, each in value.items()
            if each != []
        }
        return {"dependentSchemas": found} if found else {}

    def _count(self, key: str, value: Any, place: str) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise InvalidValue(f"{key} at {place}: give a whole number from 0 on")
        return {key: int(value)} if value or key.startswith("max") else {}

    def _bound(
        self, key: str, value: Any, given: Mapping[str, Any], place: str, types: tuple[str, ...] | None
    ) -> dict[str, Any]:
        other = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}.get(key)
        if isinstance(value, bool):  # of draft 4, beside the bound itself
            return {}
        if not isinstance(value, int | float):
            raise InvalidValue(f"{key} at {place}: give a number")
        if other is not None and given.get(other) is True:
            key = other
        is_lower = "inimum" in key
        # The largest float that fits into the integers of its bounds; it refuses other numbers beyond 1e18.
        largest = 2**63 - 1024 if types is not None and "number" not in types else 1e18
        if value > largest if is_lower else value < -largest:
            self.leave_out(place, key, f"bounds beyond {largest:g} are not supported")
            return {}
        return {key: _inward(value, 1 if is_lower else -1, largest)}

    def _multiple(self, value: Any, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InvalidValue(f"multipleOf at {place}: give a number above 0")
        scaled = float(value)
        for _ in range(9):
            if scaled == int(scaled):
                break
            scaled *= 10
        if scaled != int(scaled) or scaled >= 2**32:  # as llguidance reads it
            self.leave_out(place, "multipleOf", f"{value} has too many digits")
            return {}
        return {"multipleOf": value}

    def _unique(self, value: Any, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        most = given.get("maxItems")
        if value is True and not (isinstance(most, int) and most <= 1):
            self.leave_out(place, "uniqueItems", "a grammar does not compare items")
        return {}

    def _contains(self, value: Any, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        if given.get("minContains") != 0 or "maxContains" in given:
            self.leave_out(place, "contains", "a grammar does not count items of a kind")
        return {}

    def _pattern(self, value: Any, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        if not isinstance(value, str):
            raise InvalidValue(f"pattern at {place}: give a text")
        format = given.get("format")
        found = translated(value, format if isinstance(format, str) else None)
        for each in found:
            reason = self.problem({"pattern": each})
            if reason is not None:
                self.leave_out(place, "pattern", reason)
                return {}
        return {
            "pattern": found[-1],
            **({"allOf": [{"pattern": each} for each in found[:-1]]} if found[1:] else {}),
        }

    def _format(self, value: Any, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return a known format, unless it contradicts the other keywords."""
        if not isinstance(value, str) or value not in FORMATS:
            return {}
        binding = {key: given[key] for key in ("minLength", "maxLength") if key in given}
        pattern = given.get("pattern")
        if isinstance(pattern, str):
            found = [{"pattern": each} for each in translated(pattern, value)]
            binding["allOf"] = [each for each in found if self.problem(each) is None]
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


def _nudge(found: dict[str, Any]) -> None:
    """Replace an exclusive bound that llguidance would include.

    It does so with a whole number, if the other bound is less than 1 away.
    """
    low, high = found.get("exclusiveMinimum"), found.get("exclusiveMaximum")
    for bound, key, opposite in (
        (low, "exclusiveMinimum", found.get("maximum", high)),
        (high, "exclusiveMaximum", found.get("minimum", low)),
    ):
        if bound is None or opposite is None or found.get("type") == "integer":
            continue
        distance = opposite - bound
        if (distance > 0) is not (key == "exclusiveMinimum"):
            continue  # no number is within them
        if bound == int(bound) and 0 < abs(distance) < 1:
            digits = 3 - math.floor(math.log10(abs(distance)))
            del found[key]
            nearer = "minimum" if distance > 0 else "maximum"
            nudged = round(bound + math.copysign(10.0**-digits, distance), digits)
            found[nearer] = max(nudged, found.get(nearer, nudged), key=lambda each: each * distance)
