"""Options of a union that exclude each other: what is proved holds, and what may overlap is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from mlx_spec.apps.server.tools.schema import types
from mlx_spec.apps.server.tools.unions import Exclusion, widened, widened_text


def tagged(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": {"const": value}}, "required": ["k"]} | more


DEFS = {
    "cat": tagged("cat"),
    "dog": tagged("dog"),
    "pet": {"anyOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
    "bird": tagged("bird"),
}
CAT, DOG, PET, LOOP, BIRD = ({"$ref": f"#/$defs/{name}"} for name in DEFS)


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "string"}, {"type": "integer"}, {"type": ["null", "boolean"]}],
        [{"const": "a"}, {"enum": ["b", 1]}, {"const": 2.5}],
        [{"type": "string"}, {"enum": [1, None]}],
        [tagged(1), tagged(2), tagged("1"), tagged(True)],
        [CAT, DOG],
        [PET, BIRD],
        [PET, {"type": "array"}],
        [tagged("a"), tagged("b", type=["object"])],
        [{"allOf": [{"type": ["string", "null"]}, {"type": ["number", "null"]}]}, {"type": "string"}],
        [False, {}],
    ],
)
def test_what_excludes_each_other(options: list[Any]) -> None:
    root = {"oneOf": options, "$defs": DEFS}
    assert Exclusion(root).holds(options)
    assert widened(root) == {"anyOf": options, "$defs": DEFS}


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"const": 1}, {"const": 1.0}],
        [{}, {"type": "string"}],
        [{"anyOf": [{"type": "string"}, {}]}, {"type": "integer"}],  # {} is anything
        [tagged("a", type=["object", "null"]), tagged("b", type=["object", "null"])],  # null is both
        [{key: value for key, value in tagged(k).items() if key != "type"} for k in "ab"],  # 5 is both
        [tagged("a"), tagged("b", required=[])],
        [PET, DOG],
        [LOOP, {"type": "integer"}],
        [{"type": "string", "nullable": True}, {"type": "integer", "nullable": True}],
        [{"$ref": "#/nowhere"}, {"type": "string"}],
        [{"type": "string"}, {"type": "string", "minLength": 1}],
    ],
)
def test_what_may_overlap(options: list[Any]) -> None:
    root = {"oneOf": options, "$defs": DEFS}
    assert not Exclusion(root).holds(options)
    assert widened(root) == root


def test_schemas_are_widened_wherever_they_stand_and_nothing_else_is() -> None:
    union = {"oneOf": [CAT, DOG]}
    wide = {"anyOf": [CAT, DOG]}

    def root(each: Any) -> dict[str, Any]:
        return {
            "properties": {"oneOf": each, "list": {"items": each}},
            "allOf": [each],
            "additionalProperties": each,
            "const": union,
            "enum": [union],
            "$defs": DEFS,
        }

    assert widened(root(union)) == root(wide)
    assert json.loads(widened_text(json.dumps(root(union)))) == root(wide)
    both = {**union, **wide, "$defs": DEFS}
    assert widened(both) == both
    assert widened_text('{"oneOf"') == '{"oneOf"'


def test_schemas_that_refer_to_themselves_cost_nothing() -> None:
    many = {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(40)]}
    chain = {f"c{i}": {"allOf": [{"$ref": f"#/$defs/c{i + 1}"}]} for i in range(3000)}
    root = {"$defs": {**{f"d{i}": many for i in range(40)}, **chain}}
    options = [{"$ref": "#/$defs/d1"}, {"$ref": "#/$defs/c0"}]
    began = time.monotonic()
    assert not Exclusion(root).holds(options)
    assert types(many, root) == frozenset()
    assert not Exclusion({}).holds([{"const": i} for i in range(5000)])
    assert time.monotonic() - began < 2
