"""Bounds of chat templates: what never ends or grows is refused quickly, and real templates are not."""

from __future__ import annotations

import time

import pytest

from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]
RANGE = "{% for a in range(99999) %}"
# Takes most of the characters that a rendering may make, cheaply: what follows is soon refused.
SPENT = "{% set spent = 'a' * 16000000 %}" + "{% set x = spent[1:] %}" * 14


def grown(value: str, step: str) -> str:
    """A template in which `x` becomes `step` again and again."""
    return f"{{% set n = namespace(x={value}) %}}{RANGE}{{% set n.x = {step} %}}{{% endfor %}}"


def kept(value: str, before: str = "") -> str:
    """A template that holds each of many values: `before` comes before each of them."""
    step = f"{before}{{% set n.x = namespace(p=n.x, v={value}) %}}"
    return f"{{% set n = namespace(x=0) %}}{RANGE * 2}{step}{{% endfor %}}{{% endfor %}}"


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
    "texts at random": "{{ lipsum(999999) }}",
    "tabs": "{{ ('\t' * 900000).expandtabs(99999) }}",
    "join of a text": "{{ ('x' * 900000).join('y' * 900000) }}",
    "join of an iterator": "{{ range(99999) | map('string') | join('y' * 900000) }}",
    "bytes": "{{ ('a'.encode() * 900000) * 999999 }}",
    "indent": "{{ ('\n' * 99999) | indent(99999) }}",
    "indent by a text": "{{ ('\n' * 99999) | indent('a' * 99999, true, true) }}",
    "indent of JSON": "{{ ([1] * 99999) | tojson(indent=999999) }}",
    "wrap": "{{ ('a ' * 60000) | wordwrap(1, wrapstring='a' * 999999) }}",
    "many widths": "{{ ('%999999s' * 9999) % ((1,) * 9999) }}",
    "many widths of a filter": "{{ ('%999999s' * 9999) | format(*([1] * 9999)) }}",
    "a width that is read": "{{ '%*d' % (9999999999, 1) }}",
    "nested widths": "{{ ('{:{w}}' * 9999).format(*([1] * 9999), w=999999) }}",
    "widths of a map": "{{ ('{a:{w}}' * 9999).format_map({'a': 1, 'w': 999999}) }}",
    "a sum of lists": "{{ ([[1]] * 300000) | sum(start=[]) }}",
    "tags": "{{ ('<!-- -->' * 99999) | striptags }}",
    "a quotient": "{{ (3 ** 800000) // (3 ** 400000) }}",
    "a number of many digits": "{{ ('f' * 900000) | int(base=16) }}",
    "places": "{{ 1 | round(-9900000) }}",
    "a text in lists": "{{ ('a' * 900000) | batch(1) | list }}",
    "translate": "{{ ('a' * 900000).translate({97: 'b' * 999999}) }}",
    "parts": "{% set b = 'a' * 900000 %}" + RANGE + "{{ b[1:] }}{% endfor %}",
    "lists in an output": "{% set b = [['a' * 99]] * 9000 %}" + RANGE + "{{ b }}{% endfor %}",
    "copies of a list": "{% set b = [1] * 900000 %}" + RANGE + "{% set x = b | list %}{% endfor %}",
    "tuples in tuples": grown("(1,)", "(n.x, n.x)"),
    "tuples in an output": "{% set n = namespace(x=1) %}{% for a in range(60) %}{% set n.x = (n.x, n.x) %}"
    "{% endfor %}{{ n.x }}",
    "namespaces in namespaces": "{% set n = namespace(x=1) %}{% for a in range(60) %}"
    "{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}" + RANGE * 2 + "{% endfor %}" * 2,
    "views in dicts": grown("{}", "{'a': n.x.items(), 'b': n.x.items()}"),
    "values in dicts": grown("{}", "{'a': n.x.values(), 'b': n.x.values()}"),
    "namespaces of pairs": SPENT
    + "{% set d = dict.fromkeys(range(99999)).items() | list %}"
    + kept("namespace(d)"),
    "namespaces of names": SPENT + kept("namespace(" + ", ".join(f"a{i}=1" for i in range(200)) + ")"),
    "a slow codec": "{{ ('é' * 9000).encode('punycode') }}",
    "lists of texts": SPENT + RANGE + "{% set x = ('aé' * 900) | list %}{% endfor %}",
    "widths of a time": "{{ strftime_now('%999d' * 3000000) }}",
    "namespaces of a dict": "{% set d = dict.fromkeys(range(99999)) %}" + kept("namespace(d)"),
    "outputs of blocks": "{% set b = 'a' * 900000 %}" + kept("t", "{% set t %}{{ b }}x{% endset %}"),
    "outputs of macros": "{% macro m() %}{{ 'a' * 900000 }}x{% endmacro %}" + kept("m()"),
    "output without a loop": "{% set b = 'a' * 9000000 %}" + "{{ b }}" * 3000,
    "parts of short texts": "{% set b = 'a ' * 500 %}" + kept("b.split(' ')"),
    "changes of short texts": "{% set b = 'a' * 1000 %}" + kept("b.replace('a', b)"),
    "arguments": SPENT + "{% set b = 'a' * 900000 %}" + kept("cycler(*b)"),
    "a loop with a condition": RANGE + "{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_without_bounds_is_refused(name: str) -> None:
    template, began = ChatTemplate(HOSTILE[name] + "{{ messages[0].content }}", {}), time.thread_time()
    for _ in range(2 if name == "numbers that square" else 1):  # nothing is left over from the first time
        with pytest.raises(InvalidValue, match="the chat template refuses these messages"):
            template.render(HI, thinking=False)
    assert time.thread_time() - began < 15


USUAL = {
    "{{ ['a', 'b'] | join(', ') }}{{ '%05.1f' % 2.5 }}{{ '{:>4}'.format(7) }}{{ '%s' | format('x') }}": (
        "a, b002.5   7x"
    ),
    "{{ ','.join(messages | map(attribute='role')) }}{{ 'a b'.split(' ')[1] }}{{ 'abc'[1:] ~ [1, 2][:1] }}": (
        "userbbc[1]"
    ),
    "{{ [1.5, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}{{ 2.34 | round(1) }}{{ 'ff' | int(base=16) }}": (
        "3.5[1, 2]2.3255"
    ),
    "{{ messages | tojson(indent=2) | length }}{{ 'a\nb' | indent(2) }}{{ none }}{{ true }}{{ 2 ** 10 }}": (
        "51a\n  bNoneTrue1024"
    ),
    "{{ 'order %d of 20241128' % 1234567890 }}{{ 'hé'.encode().decode() }}{{ x }}": (
        "order 1234567890 of 20241128hé"
    ),
    "{% for a, b in [('x', 1), (messages[0].role, 2)] %}{{ a ~ b }}{% endfor %}{{ '%s-%s' % ('a', x) }}": (
        "x1user2a-"
    ),
    "{% macro m(a, b) %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ m('x', 'y', *'z') }}{{ m(b=1, a=2) }}": (
        "xy('z',)21()"
    ),
    "{% for m in messages if m.role == 'user' %}{{ m.content * 2 }}{{ loop.length }}{% endfor %}": "hihi1",
}


@pytest.mark.parametrize("source", USUAL)
def test_usual_operations_are_not_refused(source: str) -> None:
    assert ChatTemplate(source, {}).render(HI, thinking=False) == USUAL[source]


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


ESCAPES = (
    "n.__class__",
    "n._Namespace__attrs",
    "m.__class__",
    "m.clear()",
    "''.__class__",
    "n.f('{0.__class__}')",
)


@pytest.mark.parametrize("text", ESCAPES)
def test_the_sandbox_still_refuses(text: str) -> None:
    source = (
        "{% set n = namespace(a='x', f='{0.__class__}'.format) %}{% for m in messages %}{{ n.a }}{{ m.role }}"
    )
    template = ChatTemplate(source + "{{ m.none }}{{ " + text + " }}{% endfor %}", {})
    try:
        shown = template.render([{"role": "user"}], thinking=None)
    except InvalidValue:
        return
    assert shown == "xuser"
