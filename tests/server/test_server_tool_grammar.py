"""Grammars of tool calls: every call that one allows is parsed again and fits its schema."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from dataclasses import replace

import jsonschema
import pytest
from support import call_texts
from support.vocabularies import marked
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from mlx_spec import demo
from mlx_spec.apps.server.engine.answers import TextDelta, ToolCall
from mlx_spec.apps.server.engine.tool_calls import ToolCallReader
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.requests import parameters
from mlx_spec.apps.server.requests.request import OutputFormat, Tool, ToolUse
from mlx_spec.apps.server.tools.answer_grammar import answer_grammar, answer_schema, compile_format
from mlx_spec.apps.server.tools.formats import ToolFormat, all_syntaxes
from mlx_spec.apps.server.tools.json_calls import form
from mlx_spec.apps.server.tools.syntax import Syntax
from mlx_spec.errors import InvalidValue
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate
from mlx_spec.tokenizer.stream import AnswerStream
from mlx_spec.tokenizer.thinking import Markers
from mlx_spec.types import Round

Q = '<|"|>'
SYNTAXES = tuple(call_texts.SYNTAX.values())
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "at": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "fahrenheit", None]},
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "place": {"$ref": "#/$defs/Place"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "exact": {"type": "boolean"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "odd, key": {"const": {"b": [1, "x\x7f"], "a": True}},
    },
    "required": ["city", "place"],
    "additionalProperties": False,
    "$defs": {"Place": PLACE},
}
WHOLE, SHORT = {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}
TREE = {
    "type": "object",
    "properties": {
        "leaf": {"type": "boolean"},
        "sub": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["leaf"],
    "additionalProperties": False,
}
WEATHER, GROW = Tool("get_weather", None, SCHEMA, strict=True), Tool("grow", None, TREE, strict=True)
PING = Tool("ping")
SIMPLE = Tool(
    "f", None, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, True
)
ONE, TWO = "<|tool_call>call:f{a:1}<tool_call|>", "<|tool_call>call:f{a:1}<tool_call|>" * 2
CLOSERS = ("\n", *f'" {Q} }} ] </ </parameter> <tool_call|> </tool_call> > , ; 1 "}} ]}}'.split())


@pytest.fixture(scope="module")
def text():
    """The demo's tokenizer, with the tokens of Qwen as well."""
    tokenizer = FastTokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    return Tokenizer(tokenizer, ChatTemplate("", {}), {1, 15})


def format_of(text, syntax=SYNTAXES[0]):
    ids = [text.token_id(mark) for mark in (syntax.markers.open, syntax.markers.close)]
    return ToolFormat(syntax, *ids, results_in_calls=False, token=text.token_id)


def compiled(source, text):
    return compile_grammar("lark", source, text, len(text.vocabulary()), seconds=10)


def accepts(source, text, written, calls=None):
    """Return True if `written` is a whole answer; with `calls`, the text around them is free."""
    found, tokens = compiled(source, text), [*text.encode(written), min(text.eos)]
    found = found if calls is None else found.with_calls(*calls)
    return found.matcher(()).legal((), tokens) == len(tokens)


def walk(found, text, rng):
    """A random answer, that ends soon."""
    closers = {token for word in CLOSERS for token in text.encode(word)}
    tokens: list[int] = []
    for step in itertools.count():
        if found.is_stopped() or (found.is_accepting() and rng.random() < 0.5):
            return text.decode_raw(tokens)
        bias = found.compute_logit_bias()
        legal = [token for token, allowed in enumerate(bias) if allowed and token not in text.eos]
        soon = [token for token in legal if token in closers]
        token = rng.choice(soon if soon and rng.random() < 0.3 + step / 100 else legal)
        assert found.try_consume_tokens([token]) == 1
        tokens.append(token)
        assert step < 4000, text.decode_raw(tokens)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
@pytest.mark.parametrize("tool", [WEATHER, GROW, PING], ids=lambda tool: tool.name)
def test_what_is_allowed_is_read_back_and_fits(text, syntax, tool):
    rng, seen = random.Random(5), set()
    source = answer_grammar(format_of(text, syntax), ToolUse((tool,), "required", parallel=False))
    start = compiled(source, text).start
    for _ in range(25):
        written = walk(start.deep_copy(), text, rng)
        assert written.startswith(syntax.markers.open) and written.endswith(syntax.markers.close)
        body = written.removeprefix(syntax.markers.open).removesuffix(syntax.markers.close)
        ((name, arguments),), rest = call_texts.parse(syntax.name, body, [tool])
        assert name == tool.name and rest == ""
        jsonschema.validate(arguments, tool.parameters)
        seen.add(written)
    assert len(seen) > (0 if tool is PING else 5)


def toy(name, **more):
    """A syntax whose calls are separated by more than space."""
    way = '{"name": "{name}", "parameters": {arguments}}'
    head = r'\{"name": "(?P<name>[^"]+)", "parameters": '
    return form(name, MARKS, (way,), head, r"\}", "; ", **more)


def read_answer(format, tools, text, written):
    """Return the text and the calls of an answer. MARKS stand for the markers of its syntax."""
    markers = Markers(MARKS.open, "" if format.close is None else MARKS.close)
    answer = AnswerStream(text, [], calls=markers, separator=format.syntax.separator)
    reader = ToolCallReader(0, format, tools)
    parts = [*answer.read(Round(text.encode(written), 0, 0, "plain")), *answer.end()]
    events = [event for part in parts if part.kind == "call" for event in reader.read(part)] + reader.end()
    said = "".join(part.text for part in parts if part.kind != "call")
    said += "".join(event.text for event in events if isinstance(event, TextDelta))
    return said, [event for event in events if isinstance(event, ToolCall)]


MARKS = SYNTAXES[1].markers
WRITERS = [syntax for syntax in all_syntaxes() if syntax.write is not None]
WRITERS += [toy("apart"), toy("together", together=True)]


@pytest.mark.parametrize("syntax", WRITERS, ids=lambda syntax: syntax.name)
def test_all_calls_of_an_answer_are_read_back(syntax):
    rng, counts, text = random.Random(3), set(), marked(added=[MARKS.open, MARKS.close, Q])
    schema = {"type": "object", "properties": {"n": WHOLE, "s": SHORT}, "required": ["n", "s"]}
    tools = [Tool(name, None, schema, strict=True) for name in ("first_tool", "second_tool")]
    close = text.token_id(MARKS.close) if syntax.markers.close else None
    format = ToolFormat(syntax, text.token_id(MARKS.open), close, False, text.token_id)
    start = compiled(answer_grammar(format, ToolUse(tuple(tools), "required")), text).start
    for _ in range(12):
        written = walk(start.deep_copy(), text, rng)
        said, calls = read_answer(format, tools, text, written)
        assert [call.name for call in calls] == re.findall("first_tool|second_tool", written)
        assert said == ""
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), schema)
        counts.add(len(calls) if not syntax.together or written.count(MARKS.open) == 1 else 1)
    assert max(counts) > 1, "no answer had two calls"


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
def test_the_usual_way_to_write_it_is_allowed(text, syntax):
    arguments = {"city": "Rome", "days": 3, "place": {"name": "x", "at": [1.5]}, "unit": "celsius"}
    order = [k for k in SCHEMA["properties"] if k in arguments]
    if syntax.name == "gemma4":
        order, arguments["place"] = sorted(arguments), {"at": [1.5], "name": "x"}
    written = call_texts.WRITERS[syntax.name]("get_weather", {k: arguments[k] for k in order})
    source = answer_grammar(format_of(text, syntax), ToolUse((WEATHER, PING), "required"))
    one = syntax.markers.open + written + syntax.markers.close
    assert accepts(source, text, one)
    assert accepts(source, text, one + syntax.separator + one)
    assert not accepts(source, text, one.replace("Rome", "a name that is too long"))
    assert not accepts(source, text, one.replace("get_weather", "get_wether"))
    assert not accepts(source, text, one.removesuffix(syntax.markers.close))


def test_choices(text):
    found = format_of(text)

    def of(*tools, choice="auto", named=None, parallel=True):
        return answer_grammar(found, ToolUse(tools, choice, named, parallel))

    def let(source, calls=None):
        answers = ("hello", ONE, TWO, "hello " + ONE, ONE + "bye", "<|tool_call>call:ping{}<tool_call|>", "")
        return [accepts(source, text, answer, calls) for answer in answers]

    marks = found.open, found.close
    assert let(of(PING), marks) == [1, 0, 0, 0, 0, 1, 1] and of(PING, SIMPLE, choice="none") is None
    assert let(of(SIMPLE, PING, choice="required")) == [False, True, True, False, False, True, False]
    assert let(of(SIMPLE, PING, choice="required", parallel=False)) == [0, 1, 0, 0, 0, 1, 0]
    assert let(of(SIMPLE, PING, choice="required", named="f")) == [0, 1, 1, 0, 0, 0, 0]
    assert let(of(SIMPLE), marks) == [1, 1, 1, 1, 1, 0, 1]
    assert let(of(SIMPLE, parallel=False), marks) == [1, 1, 0, 1, 0, 0, 1]
    thoughts = "<|channel>thought\nhm<channel|>"
    assert accepts(of(SIMPLE), text, thoughts + "hello", marks)  # text is free
    assert not accepts(of(SIMPLE), text, "<|tool_call>call:f{a:1.5}<tool_call|>", marks)


def test_an_answer_format_or_calls(text):
    schema = '{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}'
    for format, good, bad in (
        (OutputFormat("json_schema", schema), '{"x": 1}', '{"x": 2}'),
        (OutputFormat("json_object"), "{}", "[]"),
        (OutputFormat("regex", "a+/b"), "aa/b", "b"),
        (OutputFormat("regex", r"a\/b"), "a/b", "b"),
    ):
        source = answer_grammar(format_of(text), ToolUse((SIMPLE,)), format)
        assert [accepts(source, text, each) for each in (good, bad, ONE, good + ONE)] == [1, 0, 1, 0]
    with pytest.raises(Failure, match="leave one of them out"):
        answer_grammar(format_of(text), ToolUse((SIMPLE,)), OutputFormat("lark", "start: /a/"))


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("not", {"not": {"pattern": "a"}}),
        ("pattern", {"type": "string", "pattern": "^a$"}),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(text, keyword, schema):
    parameters = {"type": "object", "properties": {"x": schema}}
    found = format_of(text)
    with pytest.raises(Failure, match=re.escape(f"tool 'f' is strict, and {keyword}")) as failure:
        answer_grammar(found, ToolUse((Tool("f", None, parameters, strict=True),)))
    assert (failure.value.status, failure.value.param) == (400, "tools")
    source = answer_grammar(found, ToolUse((Tool("f", None, parameters),), "required"))  # the rest counts
    assert accepts(source, text, "<|tool_call>call:f{}<tool_call|>")
    assert not accepts(source, text, "<|tool_call>call:f{y:1}<tool_call|>")


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": 5}, "type at #: give the name of a type"),
        ({"properties": {"a": {"items": {"minLength": "x"}}}}, "minLength at #/properties/a/items: give"),
        ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "nothing matches it, .* #/properties/a"),
    ],
)
def test_what_is_no_schema_is_refused(text, syntax, schema, message):
    with pytest.raises(Failure, match=f"the parameters of 'f' cannot be enforced: .*{message}"):
        answer_grammar(format_of(text, syntax), ToolUse((Tool("f", None, schema),), "required"))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda one: one.name)
def test_objects_have_the_listed_properties_only(text, syntax, strict):
    """Hermes invented keys, and the same ones again, until the answer was cut off."""
    inner = {"type": "object", "properties": {"c": {"type": "integer"}}}
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": inner}, "required": ["a"]}
    use = ToolUse((Tool("f", None, parameters, strict=strict),), "required")
    source = answer_grammar(format_of(text, syntax), use)

    def allows(arguments):
        body = call_texts.WRITERS[syntax.name]("f", arguments)
        return accepts(source, text, syntax.markers.open + body + syntax.markers.close)

    assert allows({"a": 1, "b": {"c": 2}}) and allows({"a": 1})
    assert not allows({"a": 1, "role": "pilot"}) and not allows({"a": 1, "b": {"c": 2, "d": 3}})


INNER = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER = {"properties": {"c": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "allowed", "others"),
    [
        (INNER, ['{"a": 1}', "{}"], ['{"a": 1, "b": 2}', '{"a": 1, "a": 1}']),
        ({**INNER, "additionalProperties": True}, ['{"a": 1, "b": 2}'], []),
        ({"anyOf": [INNER, {"type": "null"}]}, ['{"a": 1}', "null"], ['{"b": 2}']),
        ({"$ref": "#/$defs/A", "$defs": {"A": INNER}}, ['{"a": 1}'], ['{"b": 1}']),
        ({**INNER, "anyOf": [{"required": ["a"]}]}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": INNER}}, ['{"a": 1}'], ['{"b": 1}']),
        # Put together of several: closing one would exclude what the others list.
        ({"allOf": [{"$ref": "#/$defs/A"}, OTHER], "$defs": {"A": INNER}}, ['{"a": 1, "c": 2}'], []),
    ],
)
def test_objects_of_a_response_format(text, schema, allowed, others):
    size = len(text.vocabulary())
    found = compile_grammar("json_schema", answer_schema(json.dumps(schema)), text, size, seconds=10)

    def allows(written):
        parser, tokens = found.start.deep_copy(), text.encode(written)
        return parser.try_consume_tokens(tokens) == len(tokens) and parser.is_accepting()

    assert all(map(allows, allowed)) and not any(map(allows, others))


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda one: one.name)
def test_what_cannot_be_there_is_left_out(text, syntax):
    """Generators write "or undefined" as an alternative that nothing matches."""
    maybe = {"anyOf": [{"not": {}}, {"type": "integer"}]}
    pair = {"type": "array", "items": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2}
    schema = {"type": "object", "properties": {"a": maybe, "b": {"not": {}}, "c": pair}}
    for strict in (False, syntax.name != "gemma4"):  # its grammar has no tuples
        source = answer_grammar(
            format_of(text, syntax), ToolUse((Tool("f", None, schema, strict),), "required")
        )
        for arguments, allowed in ({"a": 1, "c": [1, "x"]}, True), ({"a": 1.5}, False), ({"b": 1}, False):
            body = call_texts.WRITERS[syntax.name]("f", arguments)
            assert accepts(source, text, syntax.markers.open + body + syntax.markers.close) is allowed


UNIQUE = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
WITH_UNIQUE = {"type": "object", "properties": {"x": UNIQUE}, "required": ["x"]}


@pytest.mark.parametrize("syntax", SYNTAXES[:2], ids=lambda one: one.name)
def test_what_is_not_strict_is_enforced_without_it_and_logged(text, syntax, caplog, monkeypatch):
    monkeypatch.setattr(parameters, "_logged", set())
    tool = Tool("f", None, WITH_UNIQUE)
    source = answer_grammar(format_of(text, syntax), ToolUse((tool,), "required"))
    for value, allowed in (["a", "a"], True), (["c"], False):
        body = call_texts.WRITERS[syntax.name]("f", {"x": value})
        assert accepts(source, text, syntax.markers.open + body + syntax.markers.close) is allowed
    compile = functools.partial(
        compile_grammar, tokenizer=text, vocab_size=len(text.vocabulary()), seconds=10
    )
    format = OutputFormat("json_schema", json.dumps(WITH_UNIQUE), strict=False)
    assert compile_format(format, compile).matcher(()).legal((), text.encode('{"x": ["a", "a"]}')) > 5
    place = "not enforced: uniqueItems at #/properties/x"
    assert [f"tool 'f': {place}" in caplog.text, f"response_format: {place}" in caplog.text] == [True, True]
    with pytest.raises(
        InvalidValue, match=r"uniqueItems at #/properties/x: .*: leave it out, or give strict false"
    ):
        compile_format(replace(format, strict=True), compile)


def test_a_schema_that_is_too_much_leaves_the_type(text, caplog):
    compile = functools.partial(
        compile_grammar, tokenizer=text, vocab_size=len(text.vocabulary()), seconds=10
    )
    clash = {"patternProperties": {"^a": {"type": "integer"}}}
    source = {"type": "object", "allOf": [clash, {"patternProperties": {"b": {"type": "string"}}}]}
    format = OutputFormat("json_schema", json.dumps(source), strict=False)
    matcher = compile_format(format, compile).matcher(())
    assert matcher.legal((), text.encode('{"ab": 1}')) and not matcher.legal((), text.encode("[1]"))
    assert "only the type of the answer is enforced" in caplog.text
    with pytest.raises(InvalidValue):
        compile_format(replace(format, strict=True), compile)


def test_a_broken_schema_frees_its_own_tool_only(text):
    use = ToolUse((Tool("f", None, {"type": 5}), Tool("g", None, SIMPLE.parameters)))
    source, marks = answer_grammar(format_of(text), use), (format_of(text).open, format_of(text).close)
    for call, allowed in ("call:f{b:1}", True), ("call:g{a:1}", True), ("call:g{a:true}", False):
        assert accepts(source, text, f"<|tool_call>{call}<tool_call|>", marks) is allowed


def test_a_schema_that_is_too_deep_is_refused(text):
    deep = '{"items": ' * 800 + "true" + "}" * 800
    with pytest.raises(InvalidValue, match="recursion limit"):
        compile_grammar("json_schema", answer_schema(deep), text, len(text.vocabulary()), seconds=10)
    answer = OutputFormat("json_schema", deep)
    with pytest.raises(Failure, match="recursion limit"):
        answer_grammar(format_of(text), ToolUse((PING,)), answer)


def test_descriptions_do_not_count_for_the_size_of_a_grammar(text):
    """The tools of an agent have long ones; they were not enforced, or refused."""
    inner = {"type": "object", "properties": {"description": {"enum": ["x"]}}, "description": "y" * 150_000}
    use = ToolUse((Tool("f", None, {"properties": {"a": inner}}, strict=True),), "required")
    source = answer_grammar(format_of(text, SYNTAXES[1]), use)
    call = call_texts.hermes("f", {"a": {"description": "x"}})
    assert accepts(source, text, f"<tool_call>{call}</tool_call>")
    assert not accepts(source, text, f"<tool_call>{call.replace('x', 'z')}</tool_call>")


def test_syntaxes_that_cannot_be_forced_are_refused_in_one_line(text):
    other = format_of(text, Syntax("glm47", SYNTAXES[1].markers, SYNTAXES[1].read))
    free = [
        ToolUse((PING,), "none"),
        *(ToolUse((PING,), "auto", parallel=several) for several in (True, False)),
    ]
    assert [answer_grammar(other, use) for use in free] == [None] * 3
    answer = OutputFormat("json_object")
    for use in (ToolUse((PING,), "required", parallel=False), ToolUse((SIMPLE,))):
        with pytest.raises(Failure, match=r"the calls of this model \(glm47\) cannot be enforced") as failure:
            answer_grammar(other, use)
        assert failure.value.status == 400 and "\n" not in str(failure.value)
    with pytest.raises(Failure, match="response format"):
        answer_grammar(other, ToolUse((PING,)), answer)
