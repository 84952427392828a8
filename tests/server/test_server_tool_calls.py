"""Calls as events, the format of a model, and conversations with tools as its template wants them."""

from __future__ import annotations

import random

import call_texts
import pytest
from tokenizers import AddedToken, Tokenizer

import mlx_spec
from mlx_spec import demo
from mlx_spec.answer import Answer, Part
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.events import TextDelta, ToolCallDelta, ToolCallDropped, ToolCallStarted
from mlx_spec.apps.server.request import Chat, Tool, ToolUse
from mlx_spec.apps.server.tools import Calls, dialect_of, prompt_of
from mlx_spec.apps.server.tools.conversation import folded
from mlx_spec.apps.server.tools.dialect import FORMATS
from mlx_spec.errors import InvalidValue
from mlx_spec.template import ChatTemplate, read_template
from mlx_spec.text import Text
from mlx_spec.types import Round

GEMMA = FORMATS[0]
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
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
ASKED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "name": "get_weather", "content": "sunny"},
]
QWEN = """{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
BODY
</tool_call>{% endfor %}{% endfor %}{% if tools %}<tool_call></tool_call> {{ tools | tojson }}{% endif %}"""
HERMES = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
CODER = """<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>
{{ v }}
</parameter>
{% endfor %}</function>"""


@pytest.fixture(scope="module")
def text():
    return mlx_spec.load("demo").text


def test_events_of_a_call():
    calls = Calls(2, GEMMA, [WEATHER])
    events = calls.read(Part("call", "call:get_weather{", call=0))
    assert events[1:] == [ToolCallDelta(2, 0, "{")]
    opened = events[0]
    assert isinstance(opened, ToolCallStarted) and (opened.index, opened.call, opened.name) == (
        2,
        0,
        "get_weather",
    )
    assert calls.read(Part("call", 'city:<|"|>Ro', call=0)) == [ToolCallDelta(2, 0, '"city":"Ro')]
    assert calls.complete == 0
    assert calls.read(Part("call", 'me<|"|>}', call=0, closed=True)) == [ToolCallDelta(2, 0, 'me"}')]
    assert calls.complete == 1
    again = calls.read(Part("call", "call:f{}", call=1, closed=True))
    assert isinstance(again[0], ToolCallStarted) and again[0].call == 1 and again[0].id != opened.id
    assert calls.end() == []


def test_a_broken_call_is_dropped_and_comes_back_as_text():
    calls = Calls(0, GEMMA, [])
    events = calls.read(Part("call", "call:f{a:celsius}", call=0, closed=True))
    assert [type(event) for event in events] == [ToolCallStarted, ToolCallDelta, ToolCallDropped, TextDelta]
    assert events[-1].text == "<|tool_call>call:f{a:celsius}<tool_call|>"
    assert calls.complete == 0
    (piece,) = calls.read(Part("call", "nothing of the kind", call=1, closed=True))
    assert piece.text == "<|tool_call>nothing of the kind<tool_call|>" and piece.kind == "answer"
    (empty,) = calls.read(Part("call", "", call=2, closed=True))
    assert empty.text == "<|tool_call><tool_call|>"


def test_text_behind_a_call_is_not_lost():
    calls = Calls(0, GEMMA, [])
    events = calls.read(Part("call", "call:f{}call:g{a:", call=0, closed=True))
    assert calls.complete == 1
    assert events[-2:] == [ToolCallDropped(0, 1), events[-1]]
    assert events[-1].text == "<|tool_call>call:g{a:<tool_call|>"


def test_cut_at_every_token(text):
    """Nothing is lost wherever an answer ends, and a call counts only once it is complete."""
    written = 'Sure. <|tool_call>call:f{a:<|"|>x é<|"|>,b:[1,2]}<tool_call|><|tool_call>call:g{}<tool_call|>'
    tokens = text.encode(written)
    for end in range(len(tokens) + 1):
        answer, calls = Answer(text, [], calls=GEMMA.marks), Calls(0, GEMMA, [])
        pieces, names = "", []
        parts = answer.read(Round(tokens[:end], 0, 0, 0.0)) + answer.end()
        events = [e for p in parts if p.kind == "call" for e in calls.read(p)] + calls.end()
        pieces = "".join(e.text for e in events if isinstance(e, TextDelta))
        names = [e.name for e in events if isinstance(e, ToolCallStarted)]
        dropped = sum(isinstance(e, ToolCallDropped) for e in events)
        assert calls.complete == len(names) - dropped
        begun = text.decode_raw(tokens[:end]).count("<|tool_call>")
        assert begun == calls.complete + pieces.count("<|tool_call>")
        assert pieces == "" or text.decode_raw(tokens[:end]).endswith(pieces)


def test_rounds_do_not_matter(text):
    written = 'A <|tool_call>call:f{a:<|"|>x é<|"|>}<tool_call|>B<|tool_call>call:oops<tool_call|> C'
    tokens, rng, seen = text.encode(written), random.Random(3), set()
    for _ in range(20):
        answer, calls, found = Answer(text, [], calls=GEMMA.marks), Calls(0, GEMMA, []), []
        for piece in call_texts.cut(tokens, rng):
            for part in answer.read(Round(piece, 0, 0, 0.0)):
                found += calls.read(part) if part.kind == "call" else [part]
        found += calls.end()
        arguments = "".join(e.text for e in found if isinstance(e, ToolCallDelta))
        seen.add((arguments, "".join(e.text for e in found if isinstance(e, (Part, TextDelta)))))
    ((arguments, content),) = seen
    assert arguments == '{"a":"x é"}'
    assert content.replace(" ", "") == "AB<|tool_call>call:oops<tool_call|>C"


def test_the_demo_writes_calls_as_gemma_does(text):
    dialect = dialect_of(text)
    assert dialect.format.name == "gemma4" and not dialect.folds
    assert (dialect.open, dialect.close) == (text.token_id("<|tool_call>"), text.token_id("<tool_call|>"))


@pytest.mark.parametrize(("body", "name"), [(HERMES, "hermes"), (CODER, "qwen3-coder"), ("{{ c }}", None)])
def test_the_template_says_how_calls_are_written(body, name):
    found = dialect_of(_text(QWEN.replace("BODY", body)))
    assert (found.format.name if found else None) == name


def test_without_the_tokens_there_are_no_calls():
    source = QWEN.replace("BODY", HERMES)
    assert dialect_of(Text(_tokenizer(), ChatTemplate(source, {}), {1})) is None


def test_prompt(text):
    tokens = prompt_of(Chat(tuple(ASKED), ToolUse((WEATHER,))), text, "demo")
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


@pytest.mark.parametrize("properties", [[1], {"a": {"type": "object", "properties": 3}}])
def test_what_a_template_cannot_write_is_refused(text, properties):
    use = ToolUse((Tool("f", None, {"type": "object", "properties": properties}),))
    with pytest.raises(InvalidValue, match="the chat template refuses"):
        prompt_of(Chat(tuple(ASKED[:1]), use), text, "demo")


def test_with_none_the_model_is_not_told_of_the_tools(text):
    use = ToolUse((WEATHER,), "none")
    assert prompt_of(Chat(tuple(ASKED[:1]), use), text, "demo") == text.prompt(ASKED[:1])


def test_a_template_without_tools_refuses_them():
    plain = _text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(Failure, match="tools: the chat template of model 'm' has no tool calls") as failure:
        prompt_of(Chat(tuple(ASKED[:1]), ToolUse((WEATHER,))), plain, "m")
    assert (failure.value.status, failure.value.param) == (400, "tools")
    with pytest.raises(Failure) as failure:
        prompt_of(Chat(tuple(ASKED)), plain, "m")
    assert failure.value.param == "messages.1.tool_calls"
    assert prompt_of(Chat(tuple(ASKED[:1])), plain, "m")


def test_results_go_where_the_template_reads_them():
    source = QWEN.replace("BODY", HERMES) + "{% for m in messages %}{% for r in m.tool_responses or [] %}"
    found = _text(source + "[{{ r.name }}: {{ r.response }}]{% endfor %}{% endfor %}")
    assert dialect_of(found).folds
    written = found.decode_raw(prompt_of(Chat(tuple(ASKED)), found, "m"))
    assert "[get_weather: sunny]" in written and "<|tool|>" not in written
    assert folded([*ASKED, ASKED[2]])[1]["tool_responses"] == 2 * [
        {"name": "get_weather", "response": "sunny"}
    ]
    assert folded(ASKED[2:]) == ASKED[2:]


def test_what_the_template_writes_is_read_back():
    rng, template = random.Random(4), read_template(demo.TARGET)
    for _ in range(100):
        arguments = call_texts.random_arguments(rng)
        call = replace_arguments(arguments)
        written = template.render([{"role": "assistant", "tool_calls": [call]}], thinking=False)
        body = written.split("<|tool_call>")[1].split("<tool_call|>")[0]
        assert call_texts.complete(call_texts.read(GEMMA.parser([]), [body])) == [("get_weather", arguments)]


def replace_arguments(arguments):
    return {**CALL, "function": {"name": "get_weather", "arguments": arguments}}


def _tokenizer():
    return Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))


def _text(source):
    tokenizer = _tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    return Text(tokenizer, ChatTemplate(source, {}), {1})
