"""Bounds of chat templates: what never ends or grows is refused quickly, and real templates are not."""

from __future__ import annotations

import time

import pytest

from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]
RANGE = "{% for a in range(99999) %}"


def grown(value: str, step: str) -> str:
    """A template in which `x` becomes `step` again and again."""
    return f"{{% set n = namespace(x={value}) %}}{RANGE}{{% set n.x = {step} %}}{{% endfor %}}"


HOSTILE = {
    "loops": RANGE * 2 + "{% endfor %}" * 2,
    "loops in macros": "{% macro m(n) %}{{ m(n) ~ m(n) }}{% endmacro %}{{ m(1) }}",
    "recursive loops": "{% for a in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "a text that doubles": grown("'aa'", "n.x ~ n.x"),
    "a sum that doubles": grown("'aa'", "n.x + n.x"),
    "a list that doubles": grown("[1]", "n.x + n.x"),
    "lists in lists": grown("[1]", "[n.x, n.x]"),
    "a block that grows": "{% set x %}" + RANGE + "{{ 'a' * 99999 }}{% endfor %}{% endset %}",
    "output": RANGE + "{{ 'a' * 99999 }}{% endfor %}",
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "numbers that square": grown("9", "n.x * n.x"),
    "center": "{{ 'a'.center(10 ** 10) }}",
    "a filter": "{{ 'a' | center(10 ** 9) }}",
    "a filter by name": "{{ ['a'] | map('center', 10 ** 9) | list }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "replace": "{{ ('a' * 9999999).replace('a', 'b' * 9999) }}",
    "join": "{{ ('a' * 9999999).join(['b'] * 9999) }}",
    "zero": "{{ 1 // 0 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_without_bounds_is_refused(name: str) -> None:
    template, began = ChatTemplate(HOSTILE[name] + "{{ messages[0].content }}", {}), time.thread_time()
    with pytest.raises(InvalidValue, match="the chat template refuses these messages"):
        template.render(HI, thinking=False)
    assert time.thread_time() - began < 15
    began = time.thread_time()
    with pytest.raises(InvalidValue):
        template.render(HI, thinking=False)
    assert time.thread_time() - began < 15


def test_a_long_conversation_spoils_no_template() -> None:
    """The bound was reached because of its many messages."""
    source = "{% for m in messages %}{% for a in range(700) %}{% endfor %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidValue, match="more than"):
        template.render([{"role": "user", "content": "a"}] * 1500, thinking=False)
    assert template.render(HI, thinking=False) == "hi"


def test_texts_of_users_are_no_formats() -> None:
    text = "%99999999d {:>99999999} 123456789"
    source = (
        "{{ messages[0].content | trim }}{{ messages[0].content.replace('x', 'y') }}{{ [text] | join(text) }}"
    )
    rendered = ChatTemplate(source, {}).render([{"role": "user", "content": text}], thinking=False)
    assert rendered == text * 2
