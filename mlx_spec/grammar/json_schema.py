"""Rewrite a JSON schema into what llguidance enforces exactly.

Keywords that llguidance does not know are written with keywords that it knows, or reported as `Unenforced`:
the caller refuses the schema or leaves them out. Schemas that llguidance accepts and handles wrongly are
mended: alternatives that both match, objects whose keys run out, schemas that require themselves endlessly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_spec.checkpoint.files import one_line
from mlx_spec.errors import InvalidValue
from mlx_spec.grammar.patterns import PatternChecker, translated
from mlx_spec.grammar.schema import (
    UNIONS,
    Schema,
    all_subschemas,
    both,
    either,
    escaped,
    map_subschemas,
    name_of,
    type_list,
    values_of,
)
from mlx_spec.grammar.schema_logic import CLOSED, Logic
from mlx_spec.grammar.schema_reader import ReadSchema, Unenforced, read_schema


def enforceable(root: Any, *, closed: bool = False, combine: bool = True) -> tuple[Schema, list[Unenforced]]:
    """Return a schema that llguidance enforces exactly, and the keywords of `root` that it leaves out.

    With `closed`, objects have only the properties that they list, unless they allow others explicitly: a
    grammar does not know which keys were written, and a model may repeat keys endlessly. An object that
    combines several schemas stays open, because each would exclude the properties of the others. Without
    `combine`, keywords that need several schemas for one value are left out. Raises InvalidValue if `root`
    is not a schema, or if no value can match it.
    """
    checker = PatternChecker()
    schema = read_schema(root, checker)
    try:
        rewriter = _Rewriter(schema, combine, checker)
        rewritten = rewriter.rewritten(closed)
    except RecursionError:
        raise InvalidValue("the schema is nested too deeply (recursion limit): make it flatter") from None
    return rewritten, [*schema.unenforced, *rewriter.unenforced]


def enforced(source: str, *, closed: bool = False) -> tuple[str, list[Unenforced]]:
    """Do what `enforceable` does, with schemas as JSON text. Raises InvalidValue, also for invalid JSON."""
    try:
        root = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"the JSON schema cannot be used: {one_line(error)}") from error
    schema, unenforced = enforceable(root, closed=closed)
    # The root of what llguidance reads is an object.
    return json.dumps(schema if isinstance(schema, dict) else {"anyOf": [schema]}), unenforced


class _Rewriter:
    def __init__(self, schema: ReadSchema, combine: bool, checker: PatternChecker) -> None:
        self._checker = checker
        self.unenforced: list[Unenforced] = []
        self._combine = combine
        self._root, self._definitions = schema.root, schema.definitions
        self._logic = Logic(self._definitions)
        self._has_open_keys = False

    def rewritten(self, closed: bool) -> Schema:
        if closed:
            self._close()
        root = self._schema(self._root, "#")
        definitions = {
            name: self._schema(node, f"#/$defs/{name}") for name, node in self._definitions.items()
        }
        finite = _Finite(definitions)
        if (cause := finite.cause(root, "#")) is not None:
            raise InvalidValue(f"the JSON schema cannot be used: nothing matches it, because of {cause}")
        root = finite.without_endless(root)
        definitions = {
            name: finite.without_endless(node) for name, node in definitions.items() if name in finite.names
        }
        if isinstance(root, bool) or not (definitions or self._has_open_keys):
            return root
        # "x-guidance" is the last key: llguidance removes it and moves the last key there, and order matters.
        # No \u escapes: with them a key could be written in another way and appear twice.
        options = {"x-guidance": {"json_allowed_escapes": 'nrbtf\\"'}} if self._has_open_keys else {}
        return {**root, **({"$defs": definitions} if definitions else {}), **options}

    def _leave_out(self, pointer: str, keyword: str, reason: str = Unenforced.reason) -> None:
        self.unenforced.append(Unenforced(pointer, keyword, reason))

    # --- objects without further properties

    def _close(self) -> None:
        nodes = [node for root in (self._root, *self._definitions.values()) for node in all_subschemas(root)]
        open_: set[int] = set()
        for node in nodes:
            inner = [
                *node.get("allOf", ()),
                *(option for union in UNIONS for option in node.get(union, ())),
            ]
            inner += [*node.get("dependentSchemas", {}).values(), *_listed(node, "then", "else")]
            extends = any(map(self._lists_properties, inner)) or "$ref" in node
            if len(node.get("allOf", ())) > 1 or ("properties" in node and extends):
                open_ |= self._in_place(node, set())
        others = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
        for node in nodes:
            if id(node) not in open_ and "properties" in node and others.isdisjoint(node):
                demanded = self._logic.required(node) | set(_required_names(node))
                if demanded <= node["properties"].keys():
                    node[CLOSED] = True

    def _lists_properties(self, schema: Schema) -> bool:
        return isinstance(schema, dict) and any(
            "properties" in part or "$ref" in part for part in all_subschemas(schema)
        )

    def _in_place(self, schema: Schema, seen: set[int]) -> set[int]:
        """Return the ids of all schemas that apply to the same value as `schema`."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return seen
        seen.add(id(schema))
        inner = [subschema for key in ("allOf", *UNIONS) for subschema in schema.get(key, ())]
        inner += [
            *schema.get("dependentSchemas", {}).values(),
            *_listed(schema, "if", "then", "else", "not"),
        ]
        if "$ref" in schema:
            inner.append(self._logic.of(schema["$ref"]))
        for subschema in inner:
            self._in_place(subschema, seen)
        return seen

    # --- keywords that llguidance does not know

    def _schema(self, schema: Schema, pointer: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        node, members = dict(schema), list[Schema]()
        self._unevaluated(node, pointer)
        self._names(node, pointer)
        for name, value in node.pop("dependentSchemas", {}).items():
            self._add(members, either([{"properties": {name: False}}, value]), "dependentSchemas", pointer)
        if "not" in node:
            context = {key: value for key, value in node.items() if key != "not"}
            self._add(members, self._logic.opposite(node.pop("not"), context), "not", pointer)
        self._condition(node, members, pointer)
        if "oneOf" in node:
            options = self._one_of(node, pointer)
            if "anyOf" in node:
                members.append({"anyOf": options})
            node = {("anyOf" if key == "oneOf" else key): value for key, value in node.items()}
            if members and members[-1] == {"anyOf": options}:
                node["anyOf"] = schema["anyOf"]
            else:
                node["anyOf"] = options
        self._patterns(node, pointer)
        self._property_counts(node, pointer)
        if node.pop(CLOSED, False):
            node["additionalProperties"] = False
        opens = node.get("additionalProperties", True) is not False or "patternProperties" in node
        self._has_open_keys |= bool(opens and node.get("properties"))
        if False in members:
            return False
        if members:
            node["allOf"] = [*node.get("allOf", []), *members]
        return map_subschemas(node, self._schema, pointer)

    def _add(self, members: list[Schema], member: Schema | None, keyword: str, pointer: str) -> None:
        """Add a schema that must match, too. If it is None (unknown), report the keyword instead."""
        if member is None or (not isinstance(member, bool) and not self._combine):
            self._leave_out(pointer, keyword)
        elif member is not True:
            members.append(member)

    def _condition(self, node: dict[str, Any], members: list[Schema], pointer: str) -> None:
        condition, then, other = (node.pop(key, True) for key in ("if", "then", "else"))
        if then is True and other is True:
            return
        opposite = self._logic.opposite(condition, node)
        if opposite is None:
            self._leave_out(pointer, "if")
        else:
            branches = either([both([condition, then]), both([opposite, other])])
            self._add(members, branches, "if", pointer)

    def _one_of(self, node: dict[str, Any], pointer: str) -> list[Schema]:
        """Return options for `oneOf` that exclude each other; the same options if that is impossible."""
        options, logic = node["oneOf"], self._logic
        rest: Schema = {key: value for key, value in node.items() if key != "oneOf"}
        exclusive, overlaps = [], False
        for option in options:
            whole, members = both([rest, option]), [option]
            for other in options:
                second = both([rest, other])
                if other is option or logic.excludes(whole, second) or logic.lacks(option, other):
                    continue
                opposite = logic.opposite(other, whole) if self._combine else None
                overlaps |= opposite is None
                members.append(True if opposite is None else opposite)
            exclusive.append(both(members))
        if overlaps:
            self._leave_out(pointer, "oneOf", "a value may match two of its schemas; anyOf allows that")
        return options if overlaps else exclusive

    def _unevaluated(self, node: dict[str, Any], pointer: str) -> None:
        more = node.pop("unevaluatedProperties", True)
        if more is not True and "additionalProperties" not in node:
            names = self._evaluated(node)
            if names is None:
                self._leave_out(pointer, "unevaluatedProperties")
            else:
                node["properties"] = {
                    **node.get("properties", {}),
                    **{name: True for name in names if name not in node.get("properties", {})},
                }
                node["additionalProperties"] = more
        more = node.pop("unevaluatedItems", True)
        if more is not True and "items" not in node:
            if any(key in node for key in ("$ref", "allOf", "if", *UNIONS)):
                self._leave_out(pointer, "unevaluatedItems")
            else:
                node["items"] = more

    def _evaluated(self, node: Schema) -> list[str] | None:
        """Return the properties that a schema and its members list; None if that depends on the value."""
        names: list[str] = []
        for member in self._logic.members(node):
            if any(key in member for key in ("if", "dependentSchemas", "patternProperties", *UNIONS)):
                return None
            if member is not node and "additionalProperties" in member:
                return None
            names += member.get("properties", ())
        return list(dict.fromkeys(names))

    # --- keys of objects

    def _names(self, node: dict[str, Any], pointer: str) -> None:
        """Replace `propertyNames` by `properties` and `patternProperties`."""
        if "propertyNames" not in node:
            return
        names = node.pop("propertyNames")
        values, logic = self._logic.values(names), self._logic
        properties = dict(node.get("properties", {}))
        more: Schema = False if node.get(CLOSED) else node.get("additionalProperties", True)
        patterned = node.get("patternProperties", {})
        if values is not None or "string" not in logic.types(names):
            allowed: dict[str, Schema] = dict.fromkeys(properties, False)
            for name in (value for value in values or () if isinstance(value, str)):
                fitting = [schema for pattern, schema in patterned.items() if self._is_in(pattern, name)]
                listed = [properties[name]] if name in properties else [] if fitting else [more]
                allowed[name] = both([*listed, *fitting])
            node.pop("patternProperties", None)
            node |= {"properties": allowed, "additionalProperties": False}
            return
        members = list(logic.members(names))
        keys = {key for member in members for key in member} - {"type", "$ref", "allOf", "format"}
        if not keys:
            return
        limits = {key: member[key] for member in members for key in keys if key in member}
        count = sum(key in member for member in members for key in keys)
        if keys <= {"minLength", "maxLength"} and count == len(keys):
            pattern = rf"^[\s\S]{{{limits.get('minLength', 0)},{limits.get('maxLength', '')}}}$"
        elif keys == {"pattern"} and count == 1:
            pattern = limits["pattern"]
        else:
            self._leave_out(pointer, "propertyNames")
            return
        if patterned:
            self._leave_out(pointer, "propertyNames", "no grammar enforces it beside patternProperties")
            return
        allowed = {
            name: schema if self._checker.matches(pattern, name) else False
            for name, schema in properties.items()
        }
        node |= {"properties": allowed} if allowed else {}
        node |= {"additionalProperties": False} | (
            {} if more is False else {"patternProperties": {pattern: more}}
        )

    def _is_in(self, pattern: str, name: str) -> bool:
        return all(self._checker.matches(assertion, name) for assertion in translated(pattern))

    def _patterns(self, node: dict[str, Any], pointer: str) -> None:
        """Make patterns of keys exclude each other, each with at least one possible key."""
        if "patternProperties" not in node:
            return
        kept: dict[str, Schema] = {}
        for source, schema in node.pop("patternProperties").items():
            pattern, *others = translated(source)
            reason = "look-ahead is not supported" if others else self._checker.problem({"pattern": pattern})
            if reason is not None:
                self._leave_out(pointer, "patternProperties", f"{source!r}: {reason}")
                continue
            for other in list(kept):
                if self._checker.problem({"allOf": [{"pattern": pattern}, {"pattern": other}]}) is not None:
                    continue  # no text matches both
                if kept[other] == schema:
                    pattern = f"(?:{pattern})|(?:{other})"
                    del kept[other]
                else:
                    self._leave_out(
                        pointer, "patternProperties", f"{source!r} and {other!r} match the same keys"
                    )
                    break
            else:
                kept[pattern] = schema
        properties, required = dict(node.get("properties", {})), node.get("required", ())
        is_closed = node.get("additionalProperties", True) is False
        names = [*properties, *(name for name in required if name not in properties)]
        if is_closed and not any(
            schema is not False and self._checker.has_other(pattern, names)
            for pattern, schema in kept.items()
        ):
            for name in names:
                fitting = [value for pattern, value in kept.items() if self._checker.matches(pattern, name)]
                if fitting:
                    properties[name] = both([properties.get(name, True), *fitting])
            node |= {"properties": properties} if properties else {}
        elif kept:
            node["patternProperties"] = kept

    def _property_counts(self, node: dict[str, Any], pointer: str) -> None:
        """Keep `minProperties` and `maxProperties` only if llguidance counts right."""
        properties = {name for name, schema in node.get("properties", {}).items() if schema is not False}
        required = set(node.get("required", ()))
        optional = properties - required
        closed = node.get(CLOSED) or (
            node.get("additionalProperties") is False and "patternProperties" not in node
        )
        if node.get("minProperties", 0) <= len(required):
            node.pop("minProperties", None)
        if closed and node.get("maxProperties", 0) >= len(properties | required):
            node.pop("maxProperties", None)
        least = node.get("minProperties", len(required)) - len(required)
        most = node["maxProperties"] - len(required) if "maxProperties" in node else None
        if most == 0 and (optional or not closed):
            node["properties"] = {
                name: (schema if name in required else False)
                for name, schema in node.get("properties", {}).items()
            }
            node["additionalProperties"] = False
            for key in ("patternProperties", "maxProperties", CLOSED):
                node.pop(key, None)
        elif most is not None and most < 0:
            return  # nothing matches it, as llguidance says
        elif optional and (least > 0 or most is not None):
            if not (closed and least <= 1 and most in (None, 1)):
                for key in ("minProperties", "maxProperties"):
                    if node.pop(key, None) is not None:
                        self._leave_out(pointer, key, "it needs an object whose properties are all required")
        elif least > 1:
            self._leave_out(pointer, "minProperties", "a grammar does not know which keys were written")
            node["minProperties"] = len(required) + 1


class _Finite:
    """Finds the schemas that some finite value matches."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self.names: set[str] = set()
        while more := {n for n in definitions.keys() - self.names if self.cause(definitions[n], "") is None}:
            self.names |= more

    def cause(self, schema: Schema, pointer: str) -> str | None:
        """Return the part of `schema` that no finite value matches, with its pointer; None if some may."""
        if isinstance(schema, bool):
            return None if schema else f"{pointer}, which allows no value"
        if "$ref" in schema and name_of(schema["$ref"]) not in self.names:
            return f"{pointer}, which demands itself without end, or what allows no value"
        for i, member in enumerate(schema.get("allOf", ())):
            if (cause := self.cause(member, f"{pointer}/allOf/{i}")) is not None:
                return cause
        if "anyOf" in schema:
            causes = [self.cause(member, f"{pointer}/anyOf/{i}") for i, member in enumerate(schema["anyOf"])]
            if None not in causes:
                return causes[0] if causes else pointer
        values = values_of(schema)
        if values is not None:
            return None if values else f"{pointer}, whose list of values is empty"
        types = set(type_list(schema))
        causes = [self._of_object(schema, pointer)] if "object" in types else []
        causes += [self._of_array(schema, pointer)] if "array" in types else []
        return None if types - {"object", "array"} or None in causes else causes[0]

    def _of_object(self, schema: dict[str, Any], pointer: str) -> str | None:
        for name in schema.get("required", ()):
            listed, more = schema.get("properties", {}), schema.get("additionalProperties", True)
            if name in listed:
                cause = self.cause(listed[name], f"{pointer}/properties/{escaped(name)}")
            elif "patternProperties" in schema:
                cause = None
            else:
                cause = (
                    None if more is not False else f"{pointer}/required: {name!r} is not among its properties"
                )
                cause = cause or self.cause(more, f"{pointer}/additionalProperties")
            if cause is not None:
                return cause
        return None

    def _of_array(self, schema: dict[str, Any], pointer: str) -> str | None:
        first = schema.get("prefixItems", [])
        for i in range(min(schema.get("minItems", 0), len(first) + 1)):
            item, where = (
                (first[i], f"prefixItems/{i}") if i < len(first) else (schema.get("items", True), "items")
            )
            if (cause := self.cause(item, f"{pointer}/{where}")) is not None:
                return cause
        return None

    def without_endless(self, schema: Schema) -> Schema:
        """Return the schema without references to schemas that no value matches."""
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and name_of(schema["$ref"]) not in self.names:
            return False
        return map_subschemas(schema, lambda subschema, pointer: self.without_endless(subschema))


def _listed(node: Mapping[str, Any], *keys: str) -> list[Any]:
    return [node[key] for key in keys if key in node]


def _required_names(node: Mapping[str, Any]) -> Iterable[str]:
    """Yield the names that alternatives within a schema may require."""
    for key in (*UNIONS, "allOf"):
        for member in node.get(key, ()):
            if isinstance(member, dict):
                yield from member.get("required", ())
                yield from _required_names(member)
    for member in node.get("dependentSchemas", {}).values():
        if isinstance(member, dict):
            yield from member.get("required", ())
