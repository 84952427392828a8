"""What tools ask of an answer: what each grammar lets through is read back, and fits the schema."""

from __future__ import annotations

import itertools
import random
import re

import call_texts
import pytest
from tokenizers import AddedToken, Tokenizer

import mlx_spec
from mlx_spec import demo, grammar
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.request import Chat, OutputFormat, Tool, ToolUse
from mlx_spec.apps.server.tools import banned, dialect_of, lark, prompt_of
from mlx_spec.apps.server.tools.dialect import FORMATS, Dialect
from mlx_spec.apps.server.tools.lark import regex
from mlx_spec.apps.server.tools.patterns import terminal
from mlx_spec.sampling import Sampling
from mlx_spec.template import ChatTemplate
from mlx_spec.text import Text

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

Q = '<|"|>'
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
        "code": {"type": "string", "pattern": r"^[A-Z]{2}-\d+$"},
        "on": {"type": "string", "format": "date"},
        "place": {"$ref": "#/$defs/Place"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "exact": {"type": "boolean"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "odd, key": {"const": {"b": [1, "x"], "a": True}},
    },
    "required": ["city", "place"],
    "additionalProperties": False,
    "$defs": {"Place": PLACE},
}
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
CLOSERS = (
    '"',
    Q,
    "}",
    "]",
    "\n",
    "</",
    "</parameter>",
    "<tool_call|>",
    "</tool_call>",
    ">",
    ",",
    "1",
    '"}',
    "]}",
)


@pytest.fixture(scope="module")
def pair():
    return mlx_spec.load("demo")


@pytest.fixture(scope="module")
def text():
    """The demo's tokenizer, with the tokens of Qwen as well."""
    tokenizer = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    return Text(tokenizer, ChatTemplate("", {}), {1, 15})


def dialect(text, format=FORMATS[0]):
    ids = [text.token_id(mark) for mark in (format.marks.open, format.marks.close)]
    return Dialect(format, *ids, text.eos, folds=False)


def matcher(source, text):
    size = len(text.vocabulary())
    return grammar.compile("lark", source, text, size, seconds=10).start.deep_copy()


def accepts(source, text, written):
    """Whether `written` is a whole answer, that an end-of-text token may follow."""
    found, tokens = matcher(source, text), text.encode(written)
    if found.validate_tokens(tokens) < len(tokens):
        return False
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


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
        assert step < 1000, text.decode_raw(tokens)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("tool", [WEATHER, GROW, PING], ids=lambda tool: tool.name)
def test_what_is_let_through_is_read_back_and_fits(text, format, tool):
    rng, seen = random.Random(5), set()
    source = lark(dialect(text, format), ToolUse((tool,), "required", parallel=False))
    start = matcher(source, text)
    for _ in range(25):
        written = walk(start.deep_copy(), text, rng)
        assert written.startswith(format.marks.open) and written.endswith(format.marks.close)
        body = written.removeprefix(format.marks.open).removesuffix(format.marks.close)
        parser = format.parser([tool])
        ((name, arguments),) = call_texts.complete(call_texts.read(parser, [body]))
        assert name == tool.name and parser.rest == ""
        jsonschema.validate(arguments, tool.parameters)
        seen.add(written)
    assert len(seen) > (0 if tool is PING else 5)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_the_usual_way_to_write_it_is_let_through(text, format):
    arguments = {"city": "Rome", "days": 3, "place": {"name": "x", "at": [1.5]}, "unit": "celsius"}
    order = (
        sorted(arguments) if format.name == "gemma4" else [k for k in SCHEMA["properties"] if k in arguments]
    )
    writer = {"gemma4": call_texts.gemma, "hermes": call_texts.hermes, "qwen3-coder": call_texts.coder}[
        format.name
    ]
    nested = {"at": [1.5], "name": "x"} if format.name == "gemma4" else arguments["place"]
    written = writer("get_weather", {k: nested if k == "place" else arguments[k] for k in order})
    source = lark(dialect(text, format), ToolUse((WEATHER, PING), "required"))
    one = format.marks.open + written + format.marks.close
    assert accepts(source, text, one)
    assert accepts(source, text, one + format.between + one)
    assert not accepts(source, text, one.replace("Rome", "a name that is too long"))
    assert not accepts(source, text, one.replace("get_weather", "get_wether"))
    assert not accepts(source, text, one.removesuffix(format.marks.close))


def test_choices(text):
    found = dialect(text)

    def of(*tools, choice="auto", named=None, parallel=True):
        return lark(found, ToolUse(tools, choice, named, parallel))

    def let(source):
        answers = ("hello", ONE, TWO, "hello " + ONE, ONE + "bye", "<|tool_call>call:ping{}<tool_call|>", "")
        return [accepts(source, text, answer) for answer in answers]

    assert of(PING) is None and of(PING, SIMPLE, choice="none") is None
    assert let(of(SIMPLE, PING, choice="required")) == [False, True, True, False, False, True, False]
    assert let(of(SIMPLE, PING, choice="required", parallel=False)) == [0, 1, 0, 0, 0, 1, 0]
    assert let(of(SIMPLE, PING, choice="required", named="f")) == [0, 1, 1, 0, 0, 0, 0]
    assert let(of(SIMPLE)) == [1, 1, 1, 1, 1, 0, 1]
    assert let(of(SIMPLE, parallel=False)) == [1, 1, 0, 1, 0, 0, 1]
    thoughts = "<|channel>thought\nhm<channel|>"
    assert accepts(of(SIMPLE), text, thoughts + "hello")  # text is free
    assert not accepts(of(SIMPLE), text, "<|tool_call>call:f{a:1.5}<tool_call|>")
    with pytest.raises(Failure, match="tool_choice: 'g' is none of the tools"):
        of(SIMPLE, choice="required", named="g")


def test_none_is_a_ban(text):
    found = dialect(text)
    assert banned(found, ToolUse((PING,), "none")) == {found.open: float("-inf")}
    assert banned(found, ToolUse((PING,))) == {}


def test_an_answer_format_or_calls(text):
    schema = '{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}'
    for format, good, bad in (
        (OutputFormat("json_schema", schema), '{"x": 1}', '{"x": 2}'),
        (OutputFormat("json_object"), "{}", "[]"),
        (OutputFormat("regex", "a+/b"), "aa/b", "b"),
    ):
        source = lark(dialect(text), ToolUse((SIMPLE,)), format)
        assert [accepts(source, text, each) for each in (good, bad, ONE, good + ONE)] == [1, 0, 1, 0]
    with pytest.raises(Failure, match="leave one of them out"):
        lark(dialect(text), ToolUse((SIMPLE,)), OutputFormat("lark", "start: /a/"))


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("not", {"not": {"type": "string"}}),
        ("patternProperties", {"type": "object", "patternProperties": {"a": {}}}),
        ("allOf", {"allOf": [{"type": "string"}, {"minLength": 1}]}),
        ("oneOf", {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 1}]}),
        ('format "ipv7"', {"type": "string", "format": "ipv7"}),
        ("pattern", {"type": "string", "pattern": "a$b"}),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(text, keyword, schema):
    parameters = {"type": "object", "properties": {"x": schema}}
    found = dialect(text)
    with pytest.raises(Failure, match=re.escape(f"tool 'f' is strict, and {keyword}")) as failure:
        lark(found, ToolUse((Tool("f", None, parameters, strict=True),)))
    assert (failure.value.status, failure.value.param) == (400, "tools")
    source = lark(found, ToolUse((Tool("f", None, parameters),), "required"))  # the rest is enforced
    assert accepts(source, text, "<|tool_call>call:f{}<tool_call|>")
    assert not accepts(source, text, "<|tool_call>call:f{y:1}<tool_call|>")


def test_references_that_lead_nowhere_are_refused(text):
    parameters = {"type": "object", "properties": {"x": {"$ref": "https://example.org/schema"}}}
    with pytest.raises(Failure, match="is not within this schema"):
        lark(dialect(text), ToolUse((Tool("f", None, parameters),), "required"))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": 5}, "type must be a name"),
        ({"properties": [1]}, "properties must be an object"),
        ({"required": "x"}, "required must be a list of names"),
        ({"properties": {"a": {"enum": []}}}, "enum must be a list that is not empty"),
        ({"properties": {"a": {"items": {"minLength": "x"}}}}, "minLength must be a whole number"),
        ({"properties": {"a": {"minItems": 5, "maxItems": 2}}}, "minItems must not be more than maxItems"),
        ({"properties": {"a": 3}}, "'3' must be a schema"),
    ],
)
def test_what_is_no_schema_is_refused(text, format, schema, message):
    with pytest.raises(Failure, match=f"the parameters of 'f' are no JSON schema: {message}"):
        lark(dialect(text, format), ToolUse((Tool("f", None, schema),), "required"))


def test_arguments_are_always_an_object(text):
    for parameters in ({"$ref": "#"}, {"description": "any"}, {"anyOf": [{}]}):
        source = lark(dialect(text), ToolUse((Tool("f", None, parameters),), "required"))
        assert accepts(source, text, "<|tool_call>call:f{a:1}<tool_call|>")
        assert not accepts(source, text, "<|tool_call>call:f1<tool_call|>")


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_arguments_of_the_models_choice(text, format):
    tool = Tool("f", None, {"type": "object"}, strict=True)
    source = lark(dialect(text, format), ToolUse((tool,), "required"))
    writer = {"gemma4": call_texts.gemma, "hermes": call_texts.hermes, "qwen3-coder": call_texts.coder}[
        format.name
    ]
    for arguments in ({}, {"a": "x"}, {"a": "x", "b": "y z"}):
        assert accepts(source, text, format.marks.open + writer("f", arguments) + format.marks.close)


def test_unions_that_can_be_told_apart_are_supported(text):
    kinds = [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in ("a", "b")]
    for options in (kinds, [{"type": "string"}, {"type": "integer"}]):
        parameters = {"type": "object", "properties": {"x": {"oneOf": options}}, "required": ["x"]}
        source = lark(dialect(text), ToolUse((Tool("f", None, parameters, strict=True),), "required"))
        values = [f"{{k:{Q}b{Q}}}", "7"]
        let = [accepts(source, text, f"<|tool_call>call:f{{x:{value}}}<tool_call|>") for value in values]
        assert let == [options is kinds, options is not kinds]


def test_any_value_where_the_schema_says_nothing(text):
    parameters = {"type": "object", "properties": {"x": {}, "m": {"type": "object"}}, "required": ["x"]}
    source = lark(dialect(text), ToolUse((Tool("f", None, parameters, strict=True),), "required"))
    for value in ("1", "null", f"{Q}a{Q}", f"[1,{{a:{Q}b{Q},c-d:[]}}]"):
        assert accepts(source, text, f"<|tool_call>call:f{{x:{value}}}<tool_call|>")
        assert accepts(source, text, f"<|tool_call>call:f{{m:{{k:{value}}},x:1}}<tool_call|>")
    assert not accepts(source, text, "<|tool_call>call:f{x:bare}<tool_call|>")


@pytest.mark.parametrize(
    "pattern", ["^a+$", "b", "^a|b", "(^a)", r"^\d{2}", r"[\w]+\.$", "a|b$", r"a\$", "/", "^(a|b)$"]
)
def test_patterns_mean_what_they_mean_elsewhere(text, pattern):
    try:
        source = f"start: {terminal(pattern)}"
    except ValueError:
        assert re.search(r"\||\(\^", pattern)
        return
    for written in ("a", "aa", "b", "ab", "ba", "cab.", "12", "123x", "1", "a$", "x/y", "a.", "é"):
        assert accepts(source, text, written) == bool(re.search(pattern, written, re.ASCII)), written


def test_regex_may_hold_slashes(text):
    assert accepts(f"start: {regex('a/b')}", text, "a/b")
    assert accepts(f"start: {regex('a' + chr(92) + '/b')}", text, "a/b")


def test_the_demo_calls_what_it_must(pair):
    """A model that never saw a call makes one that fits, and the same with and without speculation."""
    properties = {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    tool = Tool("get_weather", "The weather.", schema)
    use = ToolUse((tool, GROW), "required", "get_weather", parallel=False)
    found = dialect_of(pair.text)
    source = lark(found, use)
    compiled = grammar.compile("lark", source, pair.text, pair.facts.vocab_size, seconds=10)
    chat = Chat(({"role": "user", "content": "What is the weather in Rome?"},), use)
    prompt = prompt_of(chat, pair.text, "demo")
    answers = []
    for each in (pair, mlx_spec.load("demo", drafter="none")):
        rounds = each.generate(prompt, sampling=Sampling(grammar=compiled), max_tokens=80)
        answers.append([token for round in rounds for token in round.tokens])
    assert answers[0] == answers[1]
    *call, end = answers[0]
    assert end in pair.text.eos
    body = pair.text.decode_raw(call).removeprefix("<|tool_call>").removesuffix("<tool_call|>")
    ((name, arguments),) = call_texts.complete(call_texts.read(found.format.parser([]), [body]))
    assert name == "get_weather"
    jsonschema.validate(arguments, schema)
