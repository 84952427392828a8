"""Prompts of conversations: as transformers renders them, else in a form that the template takes."""

from __future__ import annotations

from typing import Any

import pytest
from support.pairs import TEMPLATE, TOKENIZER
from support.vocabularies import byte_level

from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate
from mlx_spec.tokenizer.forms import BREAK
from mlx_spec.tokenizer.history import LostText

Message = dict[str, Any]
RAISE = "{{ raise_exception('%s') }}"
CALLS = (
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}#{{ t.function.name }}{% endfor %}"
SHOWN = "{{ m.content or '' }}"


def template(before: str = "", content: str = SHOWN, calls: str = CALLS, tools: str = TOOLS) -> str:
    return f"{tools}{{% for m in messages %}}{before}[{{{{ m.role }}}}:{content}{calls}]{{% endfor %}}"


def prompt(source: str, *messages: Message, **more: Any) -> str:
    tokenizer = Tokenizer(byte_level(), ChatTemplate(source, {}), ())
    return tokenizer.decode_raw(tokenizer.prompt(messages, **more))


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def system(text: str, role: str = "system") -> Message:
    return {"role": role, "content": text}


def answer(content: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(name: str, id: str = "c", arguments: Any = None) -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or {"x": "1"}}}


def result(text: str, id: str = "c") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


LATE = "{% if m.role == 'system' and not loop.first %}"
TURNS = (
    "{% if loop.previtem and loop.previtem.role == m.role and m.role != 'tool' %}"
    + RAISE % "turns"
    + "{% endif %}"
)
SPLIT = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
PLAIN, NEEDS_TEXT = template(), template(content="{{ '' + m.content }}")
STRICT = template(LATE + RAISE % "a system message is the first" + "{% endif %}")
DROPS = template(LATE + "{% continue %}{% endif %}")
NO_SYSTEM = template("{% if m.role == 'system' %}" + RAISE % "no system" + "{% endif %}")
KNOWN = template("{% if m.role not in ['system', 'user', 'assistant'] %}{% continue %}{% endif %}")
ALTERNATES = template(TURNS)
THINKS = template(content=SPLIT)
ONE_CALL = template(calls=CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"))
CALLS_ALONE = template(content="{% if not m.tool_calls %}{{ m.content }}{% endif %}")
TEXT_ARGUMENTS = template(
    calls="{% for c in m.tool_calls or [] %}{{ '!' + c.function.arguments }}{% endfor %}"
)
PARTS = template(content="{% for p in m.content %}{{ p.text }}{% endfor %}")
AS_DATA = template(content="{{ m.content }}")
S, Q, A = system("Be brief."), user("Hi?"), answer("Yes.")
LATIN, MORE = system("Speak Latin."), user("And?")


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        # System messages stay where they are if the template allows that.
        (PLAIN, [S, Q, LATIN, MORE], "[system:Be brief.][user:Hi?][system:Speak Latin.][user:And?]"),
        *(
            (source, messages, expected)
            for source in (STRICT, DROPS)
            for messages, expected in (
                ([S, Q, LATIN], "[system:Be brief.][user:Hi?\n\nSpeak Latin.]"),
                ([Q, A, LATIN, MORE], "[user:Hi?][assistant:Yes.][user:Speak Latin.\n\nAnd?]"),
                ([S, Q, A, LATIN], "[system:Be brief.][user:Hi?][assistant:Yes.][user:Speak Latin.]"),
                ([S, LATIN, Q], "[system:Be brief.\n\nSpeak Latin.][user:Hi?]"),
                ([system("s"), Q, system("s")], "[system:s][user:Hi?\n\ns]"),
            )
        ),
        (
            NO_SYSTEM,
            [S, Q, A, LATIN, MORE],
            "[user:Be brief.\n\nHi?][assistant:Yes.][user:Speak Latin.\n\nAnd?]",
        ),
        (KNOWN, [system("Be brief.", "developer"), Q], "[system:Be brief.][user:Hi?]"),
        (PLAIN, [system("Be brief.", "developer"), Q], "[developer:Be brief.][user:Hi?]"),
        # Turns that have to alternate.
        (ALTERNATES, [Q, MORE, A], "[user:Hi?\n\nAnd?][assistant:Yes.]"),
        (PLAIN, [Q, MORE, A], "[user:Hi?][user:And?][assistant:Yes.]"),
        # An answer without a text.
        (NEEDS_TEXT, [Q, answer(None, reasoning_content="hm"), MORE], "[user:Hi?][assistant:][user:And?]"),
        (NEEDS_TEXT, [Q, answer(None, tool_calls=[call("f")])], '[user:Hi?][assistant:!f{"x": "1"}]'),
        (
            NEEDS_TEXT,
            [Q, {"role": "assistant", "tool_calls": [call("f")]}],
            '[user:Hi?][assistant:!f{"x": "1"}]',
        ),
        # Tags that are text; reasoning in the text is the template's.
        (
            THINKS,
            [Q, answer("a</think>b <think> c"), MORE],
            "[user:Hi?][assistant:a</think>b <think> c][user:And?]",
        ),
        (THINKS, [Q, answer("a <think> c"), MORE], "[user:Hi?][assistant:a <think> c][user:And?]"),
        (THINKS, [Q, answer("<think>hm</think>Yes."), MORE], "[user:Hi?][assistant:Yes.][user:And?]"),
        (
            template(content=SPLIT.replace("think", "thought")),
            [Q, answer("<thought>hm</thought>Yes."), MORE],
            "[user:Hi?][assistant:Yes.][user:And?]",
        ),
        (
            THINKS,
            [Q, answer("<think>hm</think>a</think>b"), MORE],
            "[user:Hi?][assistant:a</think>b][user:And?]",
        ),
        # Tool calls.
        (
            ONE_CALL,
            [Q, answer("", tool_calls=[call("f", "c"), call("g", "d")]), result("2", "d"), result("1", "c")],
            '[user:Hi?][assistant:!f{"x": "1"}][tool:1][assistant:!g{"x": "1"}][tool:2]',
        ),
        (
            CALLS_ALONE,
            [Q, answer("Hm.", tool_calls=[call("f")])],
            '[user:Hi?][assistant:Hm.][assistant:!f{"x": "1"}]',
        ),
        (
            TEXT_ARGUMENTS,
            [Q, answer("", tool_calls=[call("", arguments={"x": 1})])],
            '[user:Hi?][assistant:!{"x": 1}]',
        ),
        # Parts of a content.
        (PARTS, [user([{"text": "a"}, {"text": "b"}])], "[user:ab]"),
        (PARTS, [S, Q], "[system:Be brief.][user:Hi?]"),
        (NEEDS_TEXT, [user([{"text": "a"}, {"text": "b"}])], "[user:a\n\nb]"),
        (AS_DATA, [user([{"text": "a"}, {"text": "b"}])], "[user:a\n\nb]"),
        # Several of these at once.
        (
            template(TURNS + LATE + RAISE % "late" + "{% endif %}", SPLIT),
            [S, Q, MORE, answer(None, reasoning_content="hm"), LATIN, MORE, answer("a</think>b"), Q],
            "[system:Be brief.][user:Hi?\n\nAnd?][assistant:][user:Speak Latin.\n\nAnd?]"
            "[assistant:a</think>b][user:Hi?]",
        ),
    ],
)
def test_a_conversation_in_a_form_that_the_template_takes(
    source: str, messages: list[Message], expected: str
) -> None:
    given = [dict(message) for message in messages]
    assert prompt(source, *messages) == expected
    assert messages == given


KEEPS = "{% if m.reasoning_content is defined and keep %}<think>{{ m.reasoning_content }}</think>{% endif %}"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("keep", [False, True])
def test_the_template_decides_about_reasoning(name: str, keep: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source, messages = template(KEEPS), [Q, answer("Yes.", **{name: "hm"}), MORE]
    theirs, _ = render_jinja_template([messages], chat_template=source, enable_thinking=True, keep=keep)
    found = prompt(source, *messages, thinking=True, variables={"keep": keep})
    assert found == theirs[0] and ("hm" in found) == keep


@pytest.mark.parametrize(
    ("source", "messages", "tools", "index"),
    [
        (KNOWN, [Q, result("dry")], [], 1),
        (KNOWN, [Q, result("a")], [], 1),  # "a" stands elsewhere in the prompt
        (template(calls=""), [Q, answer("", tool_calls=[call("f")]), result("1")], [], 1),
        (
            template(calls="{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}"),
            [Q, answer("", tool_calls=[call("f", arguments={"x": "long", "y": ["two"]})])],
            [],
            1,
        ),
        (template(content="{{ m.content[:9] }}"), [Q, user("much too long\nfor it")], [], 1),
        (template("{% if loop.first %}{% continue %}{% endif %}"), [Q, A, Q], [], 0),
        (template("{% if loop.first %}{% continue %}{% endif %}"), [Q, A, user("\U00020000")], [], 0),
        (template(tools=""), [Q], [call("f")], None),
        (template(tools=""), [user("call f")], [call("f")], None),
        # The mark that breaks tags could not be taken out again: it is in the text, or it would be escaped.
        (template(content=SPLIT), [Q, answer(f"a</think>b{BREAK}")], [], 1),
        (
            template(content=SPLIT.replace("if m", "| tojson(ensure_ascii=true) if m")),
            [Q, answer("a</think>b")],
            [],
            1,
        ),
    ],
)
def test_what_no_form_can_show_is_refused_by_name(
    source: str, messages: list[Message], tools: list[Message], index: int | None
) -> None:
    with pytest.raises(LostText, match=r"the chat template leaves out \"") as caught:
        prompt(source, *messages, tools=tools)
    assert caught.value.index == index and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("{{ m.content | trim }}", " Hi? \n"),
        ("{{ m.content | tojson }}", 'say "é"\n\n\tyes'),
        ("{{ {'a': m.content | tojson} | tojson }}", 'say "é"\n\n\tyes'),
        ("{{ m.content | tojson(ensure_ascii=true) }}", "日本 👍"),
        ("{{ m.content.replace('/no_think', '') }}", "/no_think\nHi /no_think you"),
        ("{{ m.content | replace('\n', ' ') }}{{ m.content | length }}", "a\nb"),
        ("{{ m.content }}{{ m.content[:2] }}", "\U00020000 a rare character"),
        ("{{ {'a': m.content} }}", 'it\'s "so"\n<b>'),
        ("{{ {'a': m.content} }}", "it's so\n<b>"),
        ("{{ m.content }}", "<b>\n[INST] </think>"),
    ],
)
def test_templates_may_write_a_text_in_their_way(content: str, shown: str) -> None:
    assert prompt(template(content=content), user(shown))


def test_a_refusal_in_every_form_is_the_first_one() -> None:
    source = template(
        "{% if loop.first and m.role == 'assistant' %}" + RAISE % "a user begins" + "{% endif %}"
    )
    with pytest.raises(InvalidValue, match="refuses these messages: a user begins"):
        prompt(source, A, Q)
    tagged = template("{% if '<|end|>' in m.content %}" + RAISE % "a tag" + "{% endif %}")
    with pytest.raises(InvalidValue, match="a tag"):
        prompt(tagged, user("<|end|>"))


def test_templates_for_tools() -> None:
    for_tools = ChatTemplate("{% for t in tools %}{% endfor %}" + template(), {})
    default = ChatTemplate(template(calls="", tools=""), {}, for_tools)
    tokenizer = Tokenizer(byte_level(), default, ())
    calling = [Q, answer("", tool_calls=[call("f")])]
    for messages, tools, expected in (
        ([Q], [], "[user:Hi?]"),
        ([Q], [call("f")], "#f[user:Hi?]"),
        (calling, [], '[user:Hi?][assistant:!f{"x": "1"}]'),
    ):
        assert tokenizer.decode_raw(tokenizer.prompt(messages, tools=tools)) == expected
    assert for_tools.render([Q], thinking=False) == "[user:Hi?]"


def test_turns_are_where_messages_end() -> None:
    """Of the system prompt, the last question and the message before, also once their checks are known."""
    tokenizer = Tokenizer(TOKENIZER, ChatTemplate(TEMPLATE, {}), ())
    messages = [system("Be brief."), user("What?"), answer("That."), user("And why?\nSay it.")]
    for _ in range(3):
        tokens, turns = tokenizer.prompt_with_turns(messages, scope="me")
        shown = [tokenizer.decode_raw(tokens[:turn]) for turn in turns]
        ends = [1, *([len(messages) - 1] if len(messages) > 2 else []), len(messages)]
        assert [one.count("<turn|>") for one in shown] == sorted({*ends} - {0})
        assert all(one.endswith("<turn|>") for one in shown)
        messages = [*messages, answer("Because."), user("I see.")]
    tokens, turns = tokenizer.prompt_with_turns([user("One.")])
    assert [tokenizer.decode_raw(tokens[:turn]) for turn in turns] == ["<bos><|turn>user\nOne.<turn|>"]
    assert not Tokenizer(byte_level(), ChatTemplate(template(), {}), ()).prompt_with_turns(messages)[1]


def test_turns_are_the_last_question_while_tools_are_called() -> None:
    tokenizer = Tokenizer(TOKENIZER, ChatTemplate(TEMPLATE, {}), ())
    messages = [system("Be brief."), user("What?"), answer("That."), {"role": "tool", "content": "No."}]
    tokens, turns = tokenizer.prompt_with_turns(messages)
    assert [tokenizer.decode_raw(tokens[:turn]).count("<turn|>") for turn in turns] == [1, 2]
