"""Prompts are those of transformers; earlier thinking is left out; templates that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vocabularies import DEMO, GOLDEN, SAMPLES, TEXTS, byte_level, random_text

from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.text import Text, read_text
from mlx_spec.text.chat_template import ChatTemplate, read_template

MESSAGES = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": " What is  π?\n"}],
    [
        {"role": "user", "content": "Add 1 and 2 in Python"},
        {"role": "assistant", "content": "`1 + 2`"},
        {"role": "user", "content": "And <b>3</b>? é 👍"},
    ],
]


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("thinking", [False, True])
def test_the_environment_is_that_of_transformers(messages: list[dict[str, str]], thinking: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = """{{ bos_token }}
{% for m in messages if m.role != 'skip' %}
    {% if loop.first %}{% continue %}{% endif %}
    {%- generation -%}{{ m.content | tojson }}{%- endgeneration -%}
    {% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}
{% endfor %}
{{ {'a': '<é>', 'b': [1, 2]} | tojson(indent=2) }}{{ strftime_now('%Y') }}
{{ tools is none }} {{ documents is none }} {{ enable_thinking }} {{ dict(a=1) }}
{% if add_generation_prompt %}model:{% endif %}
"""
    theirs, _ = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=True,
        enable_thinking=thinking,
        bos_token="<s>",
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages, thinking=thinking) == theirs[0]


@pytest.mark.parametrize("folder", [*GOLDEN, DEMO], ids=lambda folder: folder.parent.name)
def test_tokens_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = read_text(folder, json.loads((folder / "config.json").read_text()))
    for sample in [*SAMPLES, *(random_text(seed) for seed in range(20))]:
        tokens = theirs.encode(sample, add_special_tokens=False)
        assert ours.encode(sample) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    for messages in MESSAGES:
        for thinking in (False, True):
            prompt = theirs.apply_chat_template(
                messages, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
            )
            assert ours.prompt(messages, thinking=thinking) == prompt
    assert ours.vocabulary() == theirs.get_vocab()
    assert ours.prompt_tokens("Hi") == theirs.encode("Hi", add_special_tokens=True)


BARE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}]{% endfor %}"


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ("<think>\nhm</think>\n\nYes", "Yes"),
        ("hm</think>Yes", "Yes"),
        ("<think>a</think>b<think>c</think>d", "bd"),
    ],
)
def test_thinking_of_earlier_turns_is_left_out(content: str, kept: str) -> None:
    text = Text(byte_level(), ChatTemplate(BARE, {}), ())
    question = {"role": "user", "content": "<think>mine</think>"}
    answer = {"role": "assistant", "content": content, "reasoning_content": "hm"}
    tokens = text.prompt([question, answer, question])
    user = f"[user:{question['content']}]"
    assert tokens == text.encode(f"{user}[assistant:{kept}]{user}")
    # the template decides about the last turn
    assert text.prompt([question, answer]) == text.encode(f"{user}[assistant:{content}hm]")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only\nusers') }}", "refuses these messages: only users"),
        ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "refuses these messages"),  # sandboxed
    ],
)
def test_refusals_are_one_line(source: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as caught:
        ChatTemplate(source, {}).render(MESSAGES[0], thinking=False)
    assert "\n" not in str(caught.value)


def test_a_malformed_or_missing_template_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="does not compile"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(InvalidValue, match="no chat template"):
        TEXTS["byte_level"].prompt(MESSAGES[0])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "A{{ bos_token }}", "bos_token": "<s>"}}, "A<s>"),
        ({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "B"}, "B"),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "D"}]}}, "D"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": "{{ eos_token }}",
                    "eos_token": {"content": "<e>"},
                },
                "special_tokens_map.json": {"eos_token": "<old>"},
            },
            "<e>",
        ),
        ({}, None),
    ],
)
def test_where_templates_are(tmp_path: Path, files: dict, expected: str | None) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = read_template(tmp_path)
    assert (template and template.render([], thinking=False)) == expected
