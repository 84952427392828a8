"""Calls whose arguments are JSON: found by the template, read behind thinking, and forced by grammars."""

from __future__ import annotations

import json
import random
import re

import pytest
from support.vocabularies import HARMONY, marked

from mlx_spec.apps.server.engine.answers import TextDelta, ToolCall
from mlx_spec.apps.server.engine.tool_calls import ToolCallReader
from mlx_spec.apps.server.requests.request import Chat, OutputFormat, Tool, ToolUse
from mlx_spec.apps.server.tools.answer_grammar import answer_grammar
from mlx_spec.apps.server.tools.formats import find_tool_format
from mlx_spec.apps.server.tools.json_calls import FORMS
from mlx_spec.apps.server.tools.prompts import chat_prompt, numbered
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.tokenizer.stream import AnswerStream
from mlx_spec.types import Round

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL, PING = Tool("f", None, SCHEMA, strict=True), Tool("g", None, {"type": "object", "properties": {}})
START, NAME, ARGUMENTS = "<|start|>assistant", "c.function.name", "c.function.arguments | tojson"
THINK = ("<think>", "</think>")
SECTION = [
    f"<|tool_call{name}|>"
    for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
]
DEEPSEEK = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")]
FENCE = "'\n```json\n'"
# Special tokens, what begins and ends calls, one call, what is between two, what ends the thinking "hm".
KINDS = {
    "harmony": (
        HARMONY,
        ("", ""),
        f"'{START} to=functions.' ~ {NAME} ~ '<|channel|>commentary json<|message|>' ~ {ARGUMENTS}"
        " ~ '<|call|>'",
        "",
        f"<|channel|>analysis<|message|>hm<|end|>{START}",
    ),
    "kimi-k2": (
        SECTION,
        SECTION[:2],
        f"'<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' ~ {ARGUMENTS} ~ '<|tool_call_end|>'",
        "",
        "<think>hm</think>",
    ),
    "deepseek-v3.1": (
        DEEPSEEK,
        DEEPSEEK[:2],
        f"'{DEEPSEEK[2]}' ~ {NAME} ~ '{DEEPSEEK[3]}' ~ {ARGUMENTS} ~ '{DEEPSEEK[4]}'",
        "",
        "<think>hm</think>",
    ),
    "deepseek-r1": (
        DEEPSEEK,
        DEEPSEEK[:2],
        f"'{DEEPSEEK[2]}function{DEEPSEEK[3]}' ~ {NAME} ~ {FENCE} ~ {ARGUMENTS} ~ '\n```{DEEPSEEK[4]}'",
        "\n",
        "<think>hm</think>",
    ),
    "mistral": (
        ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
        ("", ""),
        f"'[TOOL_CALLS]' ~ {NAME} ~ '[ARGS]' ~ {ARGUMENTS}",
        "",
        "<think>hm</think>",
    ),
    "mistral-list": (
        ["[TOOL_CALLS]"],
        ("[TOOL_CALLS][", "]"),
        f"""'{{"name": "' ~ {NAME} ~ '", "arguments": ' ~ {ARGUMENTS} ~ '}}'""",
        ", ",
        "<think>hm</think>",
    ),
    "nemotron": (
        ["<TOOLCALL>", "</TOOLCALL>"],
        ("<TOOLCALL>[", "]</TOOLCALL>"),
        f"""'{{"name": "' ~ {NAME} ~ '", "arguments": ' ~ {ARGUMENTS} ~ '}}'""",
        ", ",
        "<think>hm</think>",
    ),
    "cohere": (
        ["<|START_ACTION|>", "<|END_ACTION|>"],
        ("<|START_ACTION|>[", "]<|END_ACTION|>"),
        f"""'{{"tool_call_id": "0", "tool_name": "' ~ {NAME} ~ '", "parameters": ' ~ {ARGUMENTS} ~ '}}'""",
        ", ",
        "<think>hm</think>",
    ),
    "apertus": (
        ["<|tools_prefix|>", "<|tools_suffix|>"],
        ("<|tools_prefix|>[", "]<|tools_suffix|>"),
        f"""'{{"' ~ {NAME} ~ '": ' ~ {ARGUMENTS} ~ '}}'""",
        ", ",
        "<think>hm</think>",
    ),
}


TEMPLATE_OF_NINE = (  # as Mistral's
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{% if c.id|length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    f"{{{{ {KINDS['mistral'][2]} }}}}{{% endfor %}}{{% endfor %}}{{{{ tools | tojson }}}}"
)


def text_of(kind):
    special, (begin, end), call, between, _ = KINDS[kind]
    calls = (
        f"{{% if m.tool_calls %}}{begin}{{% for c in m.tool_calls %}}{{{{ {call} }}}}{{% if not loop.last %}}"
    )
    calls += f"{{{{ {json.dumps(between)} }}}}{{% endif %}}{{% endfor %}}{end}{{% endif %}}"
    whole = f"{{% for m in messages %}}{{{{ m.content or '' }}}}{calls}{{% endfor %}}{{{{ tools | tojson }}}}"
    return marked(
        [*special, "<think>", "</think>"], template=whole + ("" if kind == "harmony" else "<think></think>")
    )


def written_calls(text, *names):
    """Return calls as the template writes them, an argument of each with its number."""
    calls = [
        {"id": f"functions.{name}:{i}", "function": {"name": name, "arguments": {"a": i}}}
        for i, name in enumerate(names)
    ]
    written = text.decode_raw(text.prompt([{"role": "assistant", "content": "", "tool_calls": calls}]))
    return written.removesuffix("<think></think>").removesuffix("null")


def read(text, written, tools=(TOOL, PING), prompt=START, seed=0):
    """Return the kinds and texts, and the calls, of an answer."""
    format, draw = find_tool_format(text), random.Random(seed)
    syntax = format.syntax
    answer = AnswerStream(text, text.encode(prompt), calls=syntax.markers, separator=syntax.separator)
    reader, tokens, parts = ToolCallReader(0, format, tools), text.encode(written), []
    while tokens:
        size = draw.randint(1, 5)
        parts += answer.read(Round(tokens[:size], 0, 0, "plain"))
        tokens = tokens[size:]
    found, calls = {"answer": "", "thinking": ""}, []
    for part in [*parts, *answer.end()]:
        for event in reader.read(part) if part.kind == "call" else ():
            calls += [event] if isinstance(event, ToolCall) else []
            found["answer"] += event.text if isinstance(event, TextDelta) else ""
        if part.kind != "call":
            found[part.kind] += part.text
    for event in reader.end():
        calls += [event] if isinstance(event, ToolCall) else []
        found["answer"] += event.text if isinstance(event, TextDelta) else ""
    return found, [(call.name, call.arguments) for call in calls], [call.id for call in calls]


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_read_as_the_template_writes_them(kind):
    text, thinking = text_of(kind), KINDS[kind][-1]
    format = find_tool_format(text)
    assert format is not None and format.syntax.name == kind
    names = ("f",) if kind == "harmony" else ("f", "g")
    calls = written_calls(text, *names).removeprefix(START)
    assert calls.count('"a"') == len(names)
    expected = [(name, f'{{"a":{i}}}') for i, name in enumerate(names)]
    for seed in range(3):
        said, found, ids = read(text, thinking + calls + "<|ends|>", seed=seed)
        assert (said, found) == ({"thinking": "hm", "answer": ""}, expected)
        assert ids == ["functions.f:0", "functions.g:1"] if kind == "kimi-k2" else len(set(ids)) == len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_call_is_text_without_markup(kind):
    text = text_of(kind)
    calls = written_calls(text, "f").removeprefix(START)
    whole = text.encode(calls)
    for cut in range(1, len(whole)):
        said, found, _ = read(text, text.decode_raw(whole[:cut]))
        assert not re.search(r"<\||[|｜]>|\[[A-Z_]+\]|functions\.f<", said["answer"]) and not said["thinking"]
        assert len(found) <= 1


def test_ids_in_the_history_are_those_that_kimi_gives():
    text, calls = (
        text_of("kimi-k2"),
        [{"id": f"x{i}", "function": {"name": n, "arguments": {}}} for i, n in enumerate("fg")],
    )
    history = [{"role": "user", "content": "q"}]
    for call in calls:
        result = {"role": "tool", "tool_call_id": call["id"], "content": "r"}
        history += [{"role": "assistant", "tool_calls": [call]}, result]
    assert [m.get("tool_call_id") for m in numbered(history)][2::2] == ["functions.f:0", "functions.g:1"]
    written = text.decode_raw(chat_prompt(Chat(tuple(history), ToolUse((TOOL, PING))), text, "m"))
    assert "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}" in written


def test_ids_are_as_long_as_the_template_wants_them():
    source = TEMPLATE_OF_NINE
    text = marked(["[TOOL_CALLS]", "[ARGS]"], template=source)
    format = find_tool_format(text)
    assert format.syntax.name == "mistral" and len(format.new_id()) == 9
    assert len(find_tool_format(text_of("mistral")).new_id()) > 9


FORMED = [syntax.name for syntax in FORMS]


def compiled(text, use, answer=None):
    format = find_tool_format(text)
    source = answer_grammar(format, use, answer)
    found = compile_grammar("lark", source, text, max(text.vocabulary().values()) + 1, seconds=10)
    if format.open is None:
        return found.with_thinking()
    free = use.choice == "auto" and answer is None
    return found.with_calls(format.open, format.close) if free else found.thinking(True)


def accepts(grammar, text, written, prompt=START):
    tokens = text.encode(written)
    tokens += [] if tokens[-1] in text.eos else [text.token_id("<|ends|>")]
    return grammar.matcher(text.encode(prompt)).legal((), tokens) == len(tokens)


@pytest.mark.parametrize("kind", FORMED)
def test_grammars_force_calls_after_the_thinking(kind):
    text, thinking = text_of(kind), KINDS[kind][-1]
    one = written_calls(text, "f").removeprefix(START)
    for use in (ToolUse((TOOL,), "required"), ToolUse((TOOL, PING), "required", "f"), ToolUse((TOOL,))):
        found = compiled(text, use)
        assert accepts(found, text, one) and accepts(found, text, thinking + one)
        assert not accepts(found, text, one.replace('{"a": 0}', '{"a": "x"}'))
        assert not accepts(found, text, one.replace('{"a": 0}', '{"b": 0}'))
        wrong = (
            one.replace("functions.f", "functions.h") if "functions.f" in one else one.replace("f", "h", 1)
        )
        assert wrong == one or not accepts(found, text, wrong)
        assert accepts(found, text, "no call") is (use.choice == "auto" and kind != "harmony")
    if kind != "harmony":
        two = written_calls(text, "f", "f")
        assert accepts(compiled(text, ToolUse((TOOL,), "required")), text, two)
        assert not accepts(compiled(text, ToolUse((TOOL,), "required", parallel=False)), text, two)


def test_the_grammar_of_messages():
    text, thinking = text_of("harmony"), KINDS["harmony"][-1]
    found = compiled(text, ToolUse((TOOL,)))
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    preamble = f"<|channel|>commentary<|message|>Wait.<|end|>{START}"
    for before in ("", thinking, thinking + preamble, thinking * 2):
        assert accepts(found, text, f'{before}{call}{{"a": 1}}')
        assert accepts(found, text, f"{before}<|channel|>final<|message|>Hello")
        assert not accepts(found, text, f'{before}{call}{{"a": 1.5}}')
    assert not accepts(found, text, thinking)
    found = compiled(text, ToolUse((TOOL,), "required"))
    assert not accepts(found, text, "<|channel|>final<|message|>Hello")
    assert not accepts(found, text, f'{preamble}{call}{{"a": 1}}')
    found = compiled(text, ToolUse((TOOL,)), OutputFormat("json_schema", json.dumps(SCHEMA)))
    assert accepts(found, text, thinking + '<|channel|>final <|constrain|>json<|message|>{"a": 1}')
    assert accepts(found, text, f'{call}{{"a": 1}}') and not accepts(
        found, text, preamble + call + '{"a": 1}'
    )
    assert not accepts(found, text, "<|channel|>final<|message|>Hello")
    assert answer_grammar(find_tool_format(text), ToolUse((Tool("f", None, SCHEMA),))) is None
