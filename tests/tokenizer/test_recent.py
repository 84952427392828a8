"""The next turn of a conversation costs what is new in it, and its prompt is the one of a fresh tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.vocabularies import DEMO, byte_level, metaspace, random_text, sentencepiece_like
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.errors import InvalidValue
from mlx_spec.tokenizer import Tokenizer, read_fast_tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate
from mlx_spec.tokenizer.recent import Recent, RecentEncodings, common_prefix

# Tokens that begin alike, take spaces, ask for a boundary, or are sought in the normalized text.
ADDED = [
    AddedToken("<a>", normalized=False),
    AddedToken("<a>b", normalized=False),
    AddedToken("><", normalized=False),
    AddedToken("<l>", normalized=False, lstrip=True),
    AddedToken("<r>", normalized=False, rstrip=True),
    AddedToken("<w>", normalized=False, single_word=True),
    AddedToken("<n>", normalized=True),
]


def odd() -> FastTokenizer:
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens(ADDED[:4])
    tokenizer.add_tokens(ADDED[4:])
    return tokenizer


def demo() -> FastTokenizer:
    return read_fast_tokenizer(Checkpoint(DEMO))


@pytest.mark.parametrize("make", [odd, byte_level, metaspace, sentencepiece_like, demo])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_the_whole_text(make: Callable[[], FastTokenizer], seed: int) -> None:
    draw, tokenizer = random.Random(seed), make()
    read = list[int]()

    def encode(text: str) -> Any:
        read.append(len(text))
        return tokenizer.encode(text, add_special_tokens=False)

    added = tokenizer.get_added_tokens_decoder()
    names = [token.content for token in added.values()]
    recent, texts, whole = RecentEncodings(encode, added.items()), [""], 0
    for _ in range(100):
        old = draw.choice(texts[-3:])
        kept = draw.choice([len(old), draw.randrange(len(old) + 1)])
        pieces = [
            draw.choice([*names, *names, " ", "  ", "ab", "<", random_text(draw.randrange(99))])
            for _ in range(5)
        ]
        texts.append(old[:kept] + "".join(pieces))
        expected = tokenizer.encode(texts[-1], add_special_tokens=False).ids
        assert list(recent.encode(texts[-1], None).tokens) == expected
        whole += len(texts[-1])
    assert sum(read) < 0.5 * whole


def test_a_scope_does_not_see_another() -> None:
    recent = Recent[Any](most=2)
    recent.add("one", entry := Text("abc"))
    assert recent.longest("one", "abd") == (entry, 2) and recent.longest("other", "abd") == (None, 0)
    recent.add("one", Text("b"))
    assert recent.longest("one", "abd") == (entry, 2)  # so it is used later than "b"
    recent.add("one", other := Text("a"))
    assert recent.longest("one", "b") in ((entry, 0), (other, 0))
    small = Recent[Any](characters=4)
    small.add("", Text("abc"))
    small.add("", Text("xyz"))
    assert small.longest("", "abc")[1] == 0  # more than 4 characters


class Text:
    def __init__(self, text: str) -> None:
        self.text = text


def test_common_prefix() -> None:
    draw = random.Random(1)
    for _ in range(300):
        a, b = ("".join(draw.choices("ab", k=draw.randrange(9))) for _ in range(2))
        assert common_prefix(a, b) == next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )


LOOP = "{%% for m in messages %%}%s{%% endfor %%}<a>model:"
SAID = "<a>{{ m.role }}:{{ m.content | trim }}\n"
TEMPLATES = {
    "all": LOOP % SAID,
    "first alone": "{% if messages %}<a>{{ messages[0].content }}{% endif %}<a>model:",
    "five": LOOP % ("{% if loop.index <= 5 %}" + SAID + "{% endif %}"),
    "last five": LOOP % ("{% if loop.revindex <= 5 %}" + SAID + "{% endif %}"),
    "counts": LOOP % ("{% if loop.length < 6 or m.role == 'user' %}" + SAID + "{% endif %}"),
    "cut later": LOOP % "<a>{{ m.role }}:{{ m.content[:3] if loop.length > 6 else m.content }}\n",
    "no thinking": LOOP
    % "<a>{{ m.role }}:{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}\n",
    "data": LOOP % "<a>{{ m.role }}:{{ m.content | tojson }}\n",
    "reads": LOOP % ("{% if 'x' not in m.content %}" + SAID + "{% endif %}"),
    "drops a user": LOOP % ("{% if m.content | length != 2 %}" + SAID + "{% endif %}"),
    "turns": LOOP
    % (
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
        + SAID
    ),
    "both ways": LOOP % SAID
    + "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    "numbers": LOOP % ("<a>{{ loop.index }}" + SAID),
}
TEXTS = ["x y\nz", "", "long text\n\nwith lines", "\U00020005"]
TEXTS += "a user ok /no_think model: <a>user: <think>a</think>b".split()


def outcome(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> Any:
    try:
        return tokenizer.prompt(messages)
    except InvalidValue as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_and_lost_texts_are_those_of_a_fresh_check(name: str) -> None:
    draw, fast = random.Random(name), odd()
    template = ChatTemplate(TEMPLATES[name], {})
    tokenizer, conversation = Tokenizer(fast, template, ()), list[dict[str, Any]]()
    for _ in range(25):
        if draw.random() < 0.1:
            del conversation[draw.randrange(len(conversation) + 1) :]
        if conversation and draw.random() < 0.1:
            conversation[draw.randrange(len(conversation))] = {"role": "user", "content": draw.choice(TEXTS)}
        if len(conversation) % 2:
            conversation.append({"role": "assistant", "content": draw.choice(TEXTS)})
        conversation.append({"role": "user", "content": draw.choice(TEXTS)})
        assert outcome(tokenizer, conversation) == outcome(Tokenizer(fast, template, ()), conversation)


def test_a_turn_costs_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of 1,000 turns was rendered twice and tokenized whole at each turn."""
    rendered, encoded = list[int](), list[int]()

    class Counted(ChatTemplate):
        def render(self, messages: Sequence[Any], **options: Any) -> str:
            rendered.append(len(messages))
            return super().render(messages, **options)

    tokenizer = Tokenizer(odd(), Counted(TEMPLATES["all"], {}), ())
    encode = tokenizer._encodings._encode
    monkeypatch.setattr(
        tokenizer._encodings, "_encode", lambda text: encoded.append(len(text)) or encode(text)
    )
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"text {i}"} for i in range(401)]
    tokenizer.prompt(messages, scope="me")
    assert rendered == [401, 401]
    messages += [{"role": "assistant", "content": "text"}, {"role": "user", "content": "more"}]
    rendered.clear()
    tokenizer.prompt(messages, scope="me")
    assert (rendered, encoded[1] < 60) == ([403, 3, 3], True)
    tokenizer.prompt(messages, scope="another key")
    assert rendered[3:] == [403, 403] and encoded[2] > 400
    rendered.clear()
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidValue):  # the template does not show it
        tokenizer.prompt(messages, scope="me", tools=tools)
