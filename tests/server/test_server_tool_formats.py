"""Tool calls: parsed in each syntax, as events, the format of a model, and prompts with tools."""

from __future__ import annotations

import json
import random
import re
from copy import copy

import pytest
from support import call_texts, served
from support.call_texts import SYNTAX, WRITERS, described, parse
from support.endpoint import CHAT, MESSAGES, OLLAMA, RESPONSES, fresh, parsed
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from mlx_spec import demo
from mlx_spec.apps.server.engine.answers import ChoiceEnded, TextDelta, ToolCall
from mlx_spec.apps.server.engine.preparation import find_prompts, prepare
from mlx_spec.apps.server.engine.tool_calls import ToolCallReader, without_markup
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.requests.request import Chat, Tool, ToolUse
from mlx_spec.apps.server.settings import ServedModel
from mlx_spec.apps.server.tools import formats
from mlx_spec.apps.server.tools.formats import find_tool_format
from mlx_spec.apps.server.tools.json_calls import FORMS, form
from mlx_spec.apps.server.tools.prompts import chat_prompt, results_in_calls
from mlx_spec.apps.server.tools.syntax import WrittenCall
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer import Tokenizer, read_tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate
from mlx_spec.tokenizer.stream import AnswerStream, TextPart
from mlx_spec.tokenizer.thinking import Markers
from mlx_spec.types import Round

Q = '<|"|>'
GEMMA_CASES = {
    "nested": (f"call:f{{o:{{p:{{q:[1,{Q}x{Q},[]]}}}}}}", {"o": {"p": {"q": [1, "x", []]}}}),
    "space after a comma": ("call:f{a:1, b:2}", {"a": 1, "b": 2}),
    "structure in a string": (f"call:f{{a:{Q}}},b:[{{{Q},c:1}}", {"a": "},b:[{", "c": 1}),
    "a quoted key": (f"call:f{{{Q}odd, key{Q}:1}}", {"odd, key": 1}),
    "JSON's strings": ('call:f{"a":"x"}', {"a": "x"}),
    "None": ("call:f{a:None}", {"a": None}),  # as the model's own template writes it
}
HERMES_CASES = {
    "arguments first": ('{"arguments": {"a": "x\\ny"}, "name": "f"}', {"a": "x\ny"}),
    "JSON in JSON": ('{"name": "f", "arguments": "{\\"a\\": \\"x\\\\ny\\"}"}', {"a": "x\ny"}),
    "a raw line break": ('{"name": "f", "arguments": {"a": "x\ny"}}', {"a": "x\ny"}),
    "other keys": ('{"type": "function", "id": [1, {}], "name": "f"}', {}),
    "null": ('{"name": "f", "arguments": null}', {}),
}


@pytest.mark.parametrize(
    ("syntax", "body", "arguments"),
    [("gemma4", *case) for case in GEMMA_CASES.values()]
    + [("hermes", *case) for case in HERMES_CASES.values()],
)
def test_cases(syntax, body, arguments):
    assert parse(syntax, body) == ([("f", arguments)], "")


@pytest.mark.parametrize("name", WRITERS)
def test_random_arguments(name):
    rng = random.Random(7)
    for _ in range(400):
        expected = [(f"ns.f-{i}", call_texts.random_arguments(rng)) for i in range(rng.randrange(1, 4))]
        tools = [described(*each) for each in expected]
        body = "".join(WRITERS[name](*each) for each in expected)
        assert parse(name, body, tools) == (expected, "")


@pytest.mark.parametrize("name", WRITERS)
def test_text_after_a_call_stays_and_the_call_counts(name):
    calls, rest = parse(name, WRITERS[name]("f", {}) + " and more")
    assert calls == [("f", {})] and rest.strip() == "and more"


PIECES = (
    *("call:", "f", "{", "}", "[", "]", ",", ":", '"', "\\", "\\ud800", "1", "-", "e9", "null", "NaN"),
    *(" ", "\n", Q, "<|", "<", '{"name":', '"name":', '"arguments":', "<function=", "f>", "<parameter="),
    *("a>", "</parameter>", "</function>", "é", "9" * 5000),
)


@pytest.mark.parametrize("name", WRITERS)
def test_rubbish_is_never_lost_and_never_an_error(name):
    rng = random.Random(11)
    properties = {"a": {"type": ["object", "array", "number", "null"]}}
    tool = Tool("f", None, {"type": "object", "properties": properties})
    start = WRITERS[name]("f", {"a": []}).split("[")[0]
    for _ in range(1500):
        body = start * rng.randrange(2) + "".join(rng.choices(PIECES, k=rng.randrange(12)))
        calls, rest = SYNTAX[name].parse(body, [tool])
        assert body.endswith(rest)
        for call in calls:
            call.name.encode(), call.arguments.encode()
            assert isinstance(json.loads(call.arguments, parse_constant=int), dict)
        if not calls:
            assert rest == (body if body.strip() else "")


def test_schemas_tell_what_a_parameter_is():
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

    def of(**parameters):
        ((_, found),), _ = parse("qwen3-coder", call_texts.coder("f", parameters), [Tool("f", None, schema)])
        return found

    assert of(s="12", i="12", b="True") == {"s": "12", "i": 12, "b": True}
    assert of(s="null", u="null") == {"s": "null", "u": None}
    assert of(u="12", o='{"x": [1]}') == {"u": "12", "o": {"x": [1]}}
    assert of(e="1", any="[1]", other="[1]") == {"e": 1, "any": [1], "other": "[1]"}
    assert of(any="12", i="twelve", o="{") == {"any": "12", "i": "twelve", "o": "{"}  # as it was written
    assert of(s="\n two\n lines\n", any='"x"') == {"s": "\n two\n lines\n", "any": '"x"'}


# --- events

WEATHER = Tool(
    "get_weather",
    "The weather.",
    {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["c", "f"]},
            "city": {"type": "string", "description": "A city."},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
    },
)


@pytest.fixture(scope="module")
def text():
    return read_tokenizer(read_checkpoint(demo.TARGET))


@pytest.fixture(scope="module")
def format(text):
    return find_tool_format(text)


def test_where_no_call_is_wanted_none_can_begin(text, format):
    tool = {"type": "function", "function": {"name": "f"}}
    prepared = prepare(parsed(CHAT, tools=[tool], tool_choice="none"), text, _no_grammar)
    assert prepared.sampling.logit_bias == {format.open: float("-inf")} and prepared.tool_format is None


def _no_grammar(*_):
    pytest.fail("the answer is free")


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("call:f{a:celsius}", "call:f{a:celsius}"),
        (f"call:f{{a:{Q}x{Q},b", 'call:f{a:"x",b'),
        ("<|tool_call>call<|channel>f{a<turn|>", "callf{a"),
        ("a < b |> <b>c</b>", "a < b |> <b>c</b>"),
    ],
)
def test_a_broken_call_is_text_without_markup(format, body, shown):
    reader = ToolCallReader(0, format, [])
    (piece,) = reader.read(TextPart("call", body, call=0, closed=True))
    assert piece.text == shown and piece.kind == "answer"
    assert reader.complete == 0 and reader.read(TextPart("call", "", call=1, closed=True)) == []


def test_cut_at_every_token(text, format):
    """No text is lost wherever an answer ends, and a call counts only once it is complete."""
    written = 'Sure. <|tool_call>call:f{a:<|"|>x é<|"|>,b:[1,2]}<tool_call|><|tool_call>call:g{}<tool_call|>'
    tokens = text.encode(written)
    for end in range(len(tokens) + 1):
        answer, reader = AnswerStream(text, [], calls=format.syntax.markers), ToolCallReader(0, format, [])
        parts = answer.read(Round(tokens[:end], 0, 0, 0.0)) + answer.end()
        events = [e for p in parts if p.kind == "call" for e in reader.read(p)] + reader.end()
        shown = "".join(e.text for e in events if isinstance(e, TextDelta))
        assert reader.complete == sum(isinstance(e, ToolCall) for e in events)
        begun = text.decode_raw(tokens[:end]).split("<|tool_call>")[1:]
        assert len(begun) - reader.complete in (0, 1)
        assert shown == ("" if len(begun) == reader.complete else begun[-1].replace(Q, '"'))


def test_one_call_at_a_time_without_a_grammar(text, format):
    """The answer ends with its first whole call, whatever rounds its tokens came in."""
    broken, first, second = (f"<|tool_call>{body}<tool_call|>" for body in ("no", "call:f{a:1}", "call:g{}"))
    written = f"Sure. {broken}So {first}And {second}"
    tokens, kept = text.encode(written), len(text.encode(f"Sure. {broken}So {first}"))
    for size in (1, 2, 3, 7, len(tokens)):
        reader = ToolCallReader(0, format, [], one=True)
        answer = AnswerStream(text, [], calls=format.syntax.markers, last_call=reader.is_last)
        events, shown = [], ""
        for start in range(0, len(tokens), size):
            for part in answer.read(Round(tokens[start : start + size], 0, 0, 0.0)):
                events += reader.read(part) if part.kind == "call" else []
                shown += part.text if part.kind == "answer" else ""
        assert answer.end() == reader.end() == [] and answer.ended and answer.finished is None
        assert [e.name for e in events if isinstance(e, ToolCall)] == ["f"]
        assert shown == "Sure. So " and answer.completion_tokens == kept


def test_one_of_several_calls_in_one_body(format):
    reader = ToolCallReader(0, format, [], one=True)
    events = reader.read(TextPart("call", "call:f{}call:g{} rest", call=0, closed=True))
    assert [(type(e), e.name) for e in events] == [(ToolCall, "f")]


# --- formats of models, and prompts

CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "name": "get_weather", "content": "sunny"},
]
TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}
OPEN
BODY
CLOSE{% endfor %}{% endfor %}{% if tools %}OPENCLOSE {{ tools | tojson }}{% endif %}"""
HERMES = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'


def each_argument(around: str, name: str = "{{ c.function.name }}") -> str:
    return name + "{% for k, v in c.function.arguments.items() %}" + around + "{% endfor %}"


CODER = "<function=" + each_argument("<parameter={{ k }}>\n{{ v }}\n</parameter>", "{{ c.function.name }}>")
GLM = each_argument("<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n", "{{ c.function.name }}\n")
LONGCAT = each_argument(
    "<longcat_arg_key>{{ k }}</longcat_arg_key>\n<longcat_arg_value>{{ v }}</longcat_arg_value>"
)
MINIMAX = '<invoke name="{{ c.function.name }}">' + each_argument(
    '<parameter name="{{ k }}">{{ v }}</parameter>', ""
)
FUNCTION_GEMMA = "call:{{ c.function.name }}{{ '{' }}" + each_argument(
    "{{ k }}:<escape>{{ v }}<escape>{{ ',' if not loop.last }}", ""
)
PYTHONIC = "[{{ c.function.name }}(" + each_argument('{{ k }}="{{ v }}"{{ ", " if not loop.last }}', "")
MUSE = '<atem:invoke name="{{ c.function.name }}">' + each_argument(
    '<atem:parameter name="{{ k }}">{{ v }}</atem:parameter>', ""
)
MARKERS = ("<tool_call>", "</tool_call>")
TEMPLATES = {
    "hermes": (HERMES, *MARKERS),
    "qwen3-coder": (CODER + "</function>", *MARKERS),
    "glm47": (GLM, *MARKERS),
    "longcat": (LONGCAT, "<longcat_tool_call>", "</longcat_tool_call>"),
    "minimax_m2": (MINIMAX + "</invoke>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "function_gemma": (FUNCTION_GEMMA + "}", "<start_function_call>", "<end_function_call>"),
    "pythonic": (PYTHONIC + ")]", "<|tool_call_start|>", "<|tool_call_end|>"),
    "muse_spark": (MUSE + "</atem:invoke>", "<atem:function_calls>", "</atem:function_calls>"),
}


def test_the_demo_writes_calls_as_gemma_does(text, format):
    assert format.syntax.name == "gemma4" and not format.results_in_calls
    assert (format.open, format.close) == (text.token_id("<|tool_call>"), text.token_id("<tool_call|>"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells_how_calls_are_written(name):
    """A call that the template writes is read back; half of it, and other text, stay text."""
    body, *markers = TEMPLATES[name]
    found = templated(body, *markers)
    syntax = find_tool_format(found).syntax
    assert syntax.name == name
    written = found.decode_raw(chat_prompt(Chat(tuple(CONVERSATION)), found, "m"))
    call = written.split(markers[0])[-1].split(markers[1])[0]
    assert syntax.parse(call, [WEATHER]) == ([WrittenCall("get_weather", '{"city":"Rome"}')], "")
    other = call.replace("get_weather", "")
    assert syntax.parse(other, [WEATHER]) == ([], other)
    for cut in range(len(call)):
        assert not re.search(r"</?\w{4,}[^>]*>", without_markup(call[:cut], syntax.markers))
    if syntax.needs_close:
        assert syntax.parse(call, [WEATHER], closed=False) == ([], call)
        assert syntax.parse(call, []) == ([], call), "these parsers find a call in nearly any text"


def test_unknown_calls_and_markers_that_are_no_tokens_have_no_format():
    assert find_tool_format(templated("{{ c }}", *MARKERS)) is None
    source = template(HERMES, *MARKERS)
    assert find_tool_format(Tokenizer(tokenizer(), ChatTemplate(source, {}), {1})) is None


def test_prompt(text):
    tokens = chat_prompt(Chat(tuple(CONVERSATION), ToolUse((WEATHER,))), text, "demo")
    assert text.decode_raw(tokens) == (
        '<bos><|turn>system\n<|tool>declaration:get_weather{description:<|"|>The weather.<|"|>,parameters:{'
        'properties:{city:{description:<|"|>A city.<|"|>,type:<|"|>STRING<|"|>},'
        'days:{items:{type:<|"|>INTEGER<|"|>},type:<|"|>ARRAY<|"|>},'
        'unit:{enum:[<|"|>c<|"|>,<|"|>f<|"|>],type:<|"|>STRING<|"|>}},'
        'required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}<tool|><turn|>\n'
        "<|turn>user\nWeather?<turn|>\n<|turn>model\n<|channel>thought\nhm\n<channel|>"
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
        '<|tool_response>response:get_weather{value:<|"|>sunny<|"|>}<tool_response|>'
    )


@pytest.mark.parametrize(
    ("properties", "problem"),
    [
        ([1], "#/properties is not an object of schemas"),
        ({"a": {"type": "object", "properties": 3}}, "#/properties/a/properties is not an object"),
    ],
)
def test_what_is_no_schema_is_not_blamed_on_the_template(text, properties, problem):
    use = ToolUse((WEATHER, Tool("f", None, {"type": "object", "properties": properties})))
    with pytest.raises(Failure, match=f"the parameters of 'f' are not a JSON schema: {problem}"):
        chat_prompt(Chat(tuple(CONVERSATION[:1]), use), text, "demo")


def test_a_template_without_tools_refuses_them():
    plain = Tokenizer(
        tokenizer(), ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}), {1}
    )
    with pytest.raises(Failure, match="tools: the chat template of model 'm' has no tool calls") as failure:
        chat_prompt(Chat(tuple(CONVERSATION[:1]), ToolUse((WEATHER,))), plain, "m")
    assert (failure.value.status, failure.value.param) == (400, "tools")
    assert chat_prompt(Chat(tuple(CONVERSATION[:1])), plain, "m")


def test_a_template_without_tools_shows_calls_as_text():
    """A client goes on with another model, or after a forced call."""
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    plain = Tokenizer(tokenizer(), ChatTemplate(source, {}), {1})
    shown = plain.decode_raw(chat_prompt(Chat(tuple(CONVERSATION)), plain, "m").tokens)
    assert shown.endswith(
        'assistant: {"name": "get_weather", "arguments": {"city": "Rome"}}|'
        "user: Result of get_weather: sunny|"
    )
    forced = ToolUse((WEATHER,), "required", "weather")
    shown = plain.decode_raw(chat_prompt(Chat(tuple(CONVERSATION[:1]), forced), plain, "m").tokens)
    assert shown.startswith("system: You can call these functions")
    assert '"name": "get_weather"' in shown.split("|user: ")[0]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_forced_call_needs_no_tools_in_the_template(parallel: bool):
    """Clients ask for an object in this way."""
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "

    def load(served_model: ServedModel) -> Pair:
        pair = copy(served.load_once(served_model))
        pair.tokenizer = Tokenizer(tokenizer(), ChatTemplate(source, {}), pair.tokenizer.eos)
        return pair

    colours = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    use = ToolUse((WEATHER, Tool("paint", None, colours)), "required", "paint", parallel)
    with served.working(served.PLAIN, load) as engine:
        events = served.answer(engine, served.chat("Name a colour.", tools=use, max_tokens=60))
        refused = served.answer(engine, served.chat("Name a colour.", tools=ToolUse((WEATHER,))))
    (call,) = [event for event in events if isinstance(event, ToolCall)]
    assert call.name == "paint" and json.loads(call.arguments)["colour"] in ("red", "blue")
    assert served.text_of(events) == ""
    assert [event.reason for event in events if isinstance(event, ChoiceEnded)] == ["tool_calls"]
    assert "force a call by tool_choice" in served.failure(refused).message


def test_an_added_syntax_with_a_separator_shows_no_text_of_it(monkeypatch: pytest.MonkeyPatch):
    """As the table of DESIGN says: an entry of FORMS is all that a syntax needs."""
    markers, head = Markers("<|tool_call>", "<tool_call|>"), r"(?P<name>\w+):"
    added = form("added", markers, ("{name}:{arguments}",), head, separator="; ")
    monkeypatch.setattr(formats, "FORMS", (*FORMS, added))
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<|tool_call>{{ c.function.name }}:{{ c.function.arguments | tojson }}<tool_call|>"
        "{{ '; ' if not loop.last }}"
        "{% endfor %}\n{% endfor %}{{ tools | tojson }}assistant: "
    )

    def load(served_model: ServedModel) -> Pair:
        pair = copy(served.load_once(served_model))
        pair.tokenizer = Tokenizer(tokenizer(), ChatTemplate(source, {}), pair.tokenizer.eos)
        return pair

    colours = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    use = ToolUse((Tool("paint", None, colours),), "required")
    with served.working(served.PLAIN, load) as engine:
        asked = served.chat("Paint.", tools=use, max_tokens=60, sampling=Sampling(min_tokens=30))
        events = served.answer(engine, asked)
    calls = [json.loads(event.arguments) for event in events if isinstance(event, ToolCall)]
    assert len(calls) > 1 and all(call["colour"] in ("red", "blue") for call in calls)
    assert served.text_of(events) == ""


ASKED, LATE = {"role": "user", "content": "?"}, {"role": "system", "content": "Be late."}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, {"messages": [ASKED, ASKED, LATE]}, "messages.2"),
        (CHAT, {"messages": [ASKED, LATE | {"role": "developer"}]}, "messages.1"),
        (MESSAGES, {"messages": [ASKED], "system": "Be early."}, "system"),
        (MESSAGES, {"messages": [ASKED, LATE]}, "messages.1"),
        (RESPONSES, {"input": [ASKED], "instructions": "Be early."}, "instructions"),
        (RESPONSES, {"input": [ASKED, LATE]}, "input.1"),
        (OLLAMA, {"messages": [ASKED, LATE]}, "messages.1"),
        (CHAT, {"messages": [{"role": "user", "content": "no"}]}, "messages"),
        (RESPONSES, {"input": "no"}, "input"),
    ],
)
def test_what_a_template_leaves_out_or_refuses_is_named(path, body, place):
    stub, endpoint = fresh()
    assert endpoint.post(path, **body).status_code == 200
    source = """{% for m in messages if m.role == 'user' %}
    {% if 'Be' in m.content or m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}{{ m.content }}
    {% endfor %}"""
    blind = Tokenizer(tokenizer(), ChatTemplate(source, {}), {1})
    with pytest.raises(Failure, match=r"not that|leaves out \"Be ") as failure:
        find_prompts(stub.requests[-1], blind)
    assert (failure.value.status, failure.value.param) == (400, place)


def test_results_go_where_the_template_reads_them():
    loop = "{% for m in messages %}{% for r in m.tool_responses or [] %}[{{ r.name }}: {{ r.response }}]"
    found = templated(HERMES, *MARKERS, rest=loop + "{% endfor %}{% endfor %}")
    assert find_tool_format(found).results_in_calls
    written = found.decode_raw(chat_prompt(Chat(tuple(CONVERSATION)), found, "m"))
    assert "[get_weather: sunny]" in written and "<|tool|>" not in written
    twice = results_in_calls([*CONVERSATION, CONVERSATION[2]])[1]["tool_responses"]
    assert twice == 2 * [{"name": "get_weather", "response": "sunny"}]
    assert results_in_calls(CONVERSATION[2:]) == CONVERSATION[2:]


def template(body, open, close):
    return TEMPLATE.replace("BODY", body).replace("OPEN", open).replace("CLOSE", close)


def templated(body, open, close, rest=""):
    known = tokenizer()
    known.add_tokens([AddedToken(marker, special=False) for marker in (open, close)])
    return Tokenizer(known, ChatTemplate(template(body, open, close) + rest, {}), {1})


def tokenizer():
    return FastTokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
