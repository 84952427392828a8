"""Calls in each format: read in any pieces, cut anywhere, and as the peers' parsers read them."""

from __future__ import annotations

import json
import random

import call_texts
import pytest
from call_texts import calls, complete, cut, described, read

from mlx_spec.apps.server.request import Tool
from mlx_spec.apps.server.tools import coder, gemma, hermes
from mlx_spec.apps.server.tools.source import Arguments, Completed, Named

WRITERS = {"gemma": call_texts.gemma, "hermes": call_texts.hermes, "coder": call_texts.coder}
PARSERS = {"gemma": gemma.parser, "hermes": hermes.parser, "coder": coder.parser}
Q = '<|"|>'
CASES = {  # what Gemma 4 writes, what it means
    "one string": (f"call:f{{city:{Q}Paris{Q}}}", [("f", {"city": "Paris"})]),
    "types": (
        "call:f{a:1,b:-2.5e3,c:true,d:false,e:null}",
        [("f", {"a": 1, "b": -2500.0, "c": True, "d": False, "e": None})],
    ),
    "no arguments": ("call:f{}", [("f", {})]),
    "nested": (f"call:f{{o:{{p:{{q:[1,{Q}x{Q},[]]}}}}}}", [("f", {"o": {"p": {"q": [1, "x", []]}}})]),
    "dash in a key": (f"call:f{{my-key:{Q}v{Q}}}", [("f", {"my-key": "v"})]),
    "space after a comma": ("call:f{a:1, b:2}", [("f", {"a": 1, "b": 2})]),
    "dotted name": ("call:ns.f{a:1}", [("ns.f", {"a": 1})]),
    "structure in a string": (f"call:f{{a:{Q}}},b:[{{{Q},c:1}}", [("f", {"a": "},b:[{", "c": 1})]),
    "quotes in a string": (f'call:f{{a:{Q}say "hi" \\n{Q}}}', [("f", {"a": 'say "hi" \\n'})]),
    "unicode": (f"call:f{{a:{Q}日本 🙂 é{Q}}}", [("f", {"a": "日本 🙂 é"})]),
    "two calls": ("call:f{a:1}call:g{b:2}", [("f", {"a": 1}), ("g", {"b": 2})]),
    "cut in a string": (f"call:f{{a:{Q}hello", []),
}  # fmt: skip
KNOWN_FAULTS = (
    "dash in a key",
    "space after a comma",
    "dotted name",
    "two calls",
    "structure in a string",
    "cut in a string",
)


@pytest.mark.parametrize("name", CASES)
def test_gemma_cases(name):
    text, expected = CASES[name]
    parser = gemma.parser()
    deltas = read(parser, text)
    assert complete(deltas) == expected
    assert parser.rest == ("" if expected else text)


@pytest.mark.parametrize("name", CASES)
def test_peers_agree_where_they_agree_with_each_other(name):
    one = pytest.importorskip("mlx_lm.tool_parsers.gemma4")
    other = pytest.importorskip("mlx_vlm.tools.parsers.gemma4")
    text, expected = CASES[name]
    found = []
    for peer in (one, other):
        try:
            result = peer.parse_tool_call(text)
        except ValueError:
            result = []
        parsed = result if isinstance(result, list) else [result]
        found.append([(c["name"], _object(c["arguments"])) for c in parsed])
    if found[0] == found[1]:
        assert expected == found[0]
    else:  # each of the known faults: none of them is ours
        assert name in KNOWN_FAULTS
        assert expected in found or not expected


@pytest.mark.parametrize("format", WRITERS)
def test_random_arguments_in_random_pieces(format):
    rng = random.Random(7)
    for _ in range(400):
        names = [f"f{i}" for i in range(rng.randrange(1, 4))]
        expected = [(name, call_texts.random_arguments(rng)) for name in names]
        tools = [described(name, arguments) for name, arguments in expected]
        text = "".join(WRITERS[format](*each) for each in expected)
        parser = PARSERS[format](tools)
        assert complete(read(parser, cut(text, rng))) == expected
        assert parser.rest == ""


@pytest.mark.parametrize("format", WRITERS)
def test_pieces_do_not_matter(format):
    rng = random.Random(8)
    for _ in range(50):
        arguments = call_texts.random_arguments(rng)
        tools = [described("f", arguments)]
        text = WRITERS[format]("f", arguments) + rng.choice(["", " ", "x", "call:"])
        whole, parts = PARSERS[format](tools), PARSERS[format](tools)
        assert calls(read(whole, [text])) == calls(read(parts, text))
        assert whole.rest == parts.rest


@pytest.mark.parametrize("format", WRITERS)
def test_cut_anywhere(format):
    arguments = {"a": 'x "y"\n🙂', "b": {"c": [1, "z", None]}, "n": -12.5, "t": True}
    tools = [described("f", arguments)]
    text = WRITERS[format]("f", arguments)
    whole = calls(read(PARSERS[format](tools), [text]))[0][1]
    for end in range(len(text)):
        parser = PARSERS[format](tools)
        deltas = read(parser, [text[:end]])
        done = complete(deltas)
        if done:  # all that is missing is white space
            assert done == [("f", arguments)] and text[end:].strip() == ""
        else:
            assert parser.rest == (text[:end] if text[:end].strip() else "")
        for _, given, _ in calls(deltas):
            assert whole.startswith(given)


@pytest.mark.parametrize("format", WRITERS)
def test_arguments_come_as_they_are_written(format):
    arguments = {"text": "a long text that goes on and on", "n": 1}
    text = WRITERS[format]("f", arguments)
    parser = PARSERS[format]([described("f", arguments)])
    half = text.index("goes on")
    deltas = parser.feed(text[:half])
    assert deltas[0] == Named("f")
    assert calls(deltas)[0][1].endswith("a long text that ")
    assert isinstance(deltas[-1], Arguments)
    assert parser.feed(text[half:])[-1] == Completed()


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("gemma", "f{a:1}"),
        ("gemma", "call:{a:1}"),
        ("gemma", "call:f{a:01}"),
        ("gemma", "call:f{a:1,}"),
        ("gemma", "call:f{a:celsius}"),
        ("gemma", "call:f{a}"),
        ("gemma", "call:f{:1}"),
        ("gemma", "call:f{a:[1}"),
        ("gemma", "call:f" + "{a:" * 100 + "1" + "}" * 100),
        ("hermes", '{"name": "f", "arguments": [1]}'),
        ("hermes", '{"arguments": {}}'),
        ("hermes", '{"name": 1, "arguments": {}}'),
        ("hermes", '{"name": "f", "name": "g"}'),
        ("hermes", '{"name": "f", "arguments": "x"}'),
        ("hermes", '{"name": "f", "arguments": {"a": "\\x"}}'),
        ("hermes", "no JSON"),
        ("coder", "<function=f><parameter=a>1</function>"),
        ("coder", "<function=><parameter=a>1</parameter></function>"),
        ("coder", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
        ("coder", "<function=f>text</function>"),
    ],
)
def test_malformed_calls_come_back_whole(format, text):
    parser = PARSERS[format]([])
    assert complete(read(parser, text)) == []
    assert parser.rest == text


@pytest.mark.parametrize("format", WRITERS)
def test_text_behind_a_call_comes_back_and_the_call_counts(format):
    parser = PARSERS[format]([Tool("f")])
    deltas = read(parser, [WRITERS[format]("f", {}), " and more"])
    assert complete(deltas) == [("f", {})]
    assert parser.rest.strip() == "and more"


PIECES = (
    *(
        "call:",
        "f",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        "\\",
        "\\ud800",
        "1",
        "-",
        "e9",
        "null",
        "NaN",
        " ",
        "\n",
    ),
    *(
        Q,
        "<|",
        "<",
        '{"name":',
        '"name":',
        '"arguments":',
        "<function=",
        "f>",
        "<parameter=",
        "a>",
        "</parameter>",
    ),
    *("</function>", "é", "9" * 5000),
)


@pytest.mark.parametrize("format", WRITERS)
def test_rubbish_is_never_lost_and_never_an_error(format):
    rng = random.Random(11)
    properties = {"a": {"type": ["object", "array", "number", "null"]}}
    tool = Tool("f", None, {"type": "object", "properties": properties})
    starts = {
        "gemma": "call:f{a:",
        "hermes": '{"name": "f", "arguments": {"a":',
        "coder": "<function=f><parameter=a>",
    }
    for _ in range(1500):
        text = starts[format] * rng.randrange(2) + "".join(rng.choices(PIECES, k=rng.randrange(12)))
        whole, parts = PARSERS[format]([tool]), PARSERS[format]([tool])
        deltas = read(whole, [text])
        assert calls(deltas) == calls(read(parts, cut(text, rng)))
        assert text.endswith(whole.rest) and whole.rest == parts.rest
        for name, given, done in calls(deltas):
            given.encode(), name.encode()
            assert not done or isinstance(
                json.loads(given.replace("9" * 5000, "9"), parse_constant=int), dict
            )
        if not any(done for *_, done in calls(deltas)):
            assert whole.rest == (text if text.strip() else "")


def test_hermes_variants():
    def of(text):
        return complete(read(hermes.parser(), text))

    expected = [("f", {"a": "x\ny"})]
    assert of('{"arguments": {"a": "x\\ny"}, "name": "f"}') == expected
    assert of('{"name": "f", "arguments": "{\\"a\\": \\"x\\\\ny\\"}"}') == expected
    assert of('{"name": "f", "arguments": {"a": "x\ny"}}') == expected  # a line break as it is
    assert of('{"type": "function", "id": [1, {}], "name": "f"}') == [("f", {})]
    assert of('{"name": "f", "arguments": null}') == [("f", {})]


def test_gemma_variants():
    def of(text):
        return complete(read(gemma.parser(), text))

    assert of(f"call:f{{{Q}odd, key{Q}:1}}") == [("f", {"odd, key": 1})]
    assert of('call:f{"a":"x"}') == [("f", {"a": "x"})]
    assert of("call:f{a:None}") == [("f", {"a": None})]  # as the model's own template writes it
    assert of(f"call:f{{a:{Q}a < b <| c{Q}}}") == [("f", {"a": "a < b <| c"})]


def test_schemas_say_what_a_parameter_is():
    properties = {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "b": {"type": "boolean"},
        "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "o": {"$ref": "#/$defs/P"},
        "e": {"enum": [1, "one"]},
        "any": {},
    }
    schema = {"type": "object", "properties": properties, "$defs": {"P": {"type": "object"}}}
    tool = Tool("f", None, schema)

    def of(**parameters):
        return json.loads(calls(read(coder.parser([tool]), call_texts.coder("f", parameters)))[0][1])

    assert of(s="12", i="12", b="True") == {"s": "12", "i": 12, "b": True}
    assert of(s="null", u="null") == {"s": "null", "u": None}
    assert of(u="12", o='{"x": [1]}') == {"u": "12", "o": {"x": [1]}}
    assert of(e="1", any="[1]", other="[1]") == {"e": 1, "any": [1], "other": "[1]"}
    assert of(any="12", i="twelve", o="{") == {"any": "12", "i": "twelve", "o": "{"}  # as it was written
    assert of(s="\n two\n lines\n") == {"s": "\n two\n lines\n"}


def test_qwen_peers_agree():
    one = pytest.importorskip("mlx_lm.tool_parsers.qwen3_coder")
    other = pytest.importorskip("mlx_vlm.tools.parsers.qwen3_coder")
    rng = random.Random(9)
    agreed = 0
    for _ in range(200):
        arguments = call_texts.random_arguments(rng)
        tool = described("f", arguments)
        tools = [{"type": "function", "function": {"name": "f", "parameters": tool.parameters}}]
        text = call_texts.coder("f", arguments)
        try:
            found = [peer.parse_tool_call(text.strip(), tools)["arguments"] for peer in (one, other)]
        except (ValueError, SyntaxError):
            continue
        if found[0] == found[1] == arguments:
            agreed += 1
            assert complete(read(coder.parser([tool]), text)) == [("f", arguments)]
    assert agreed > 100


def _object(arguments):
    return json.loads(arguments) if isinstance(arguments, str) else arguments
