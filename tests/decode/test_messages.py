"""What a pair, a session and a batch refuse: one line, before the first round, which names the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.pairs import make_pair
from support.spans import file, golden, pair_of

from mlx_spec.errors import InvalidValue, NoVision, PromptTooLong, SpecError
from mlx_spec.pair import Pair
from mlx_spec.prompt import Prompt
from mlx_spec.sampling import Sampling

Call = Callable[[Pair], object]
TOO_LONG = "the prompt is too long: 64 tokens > 64 maximum"
NO_IDS = "the prompt is not a list of token ids"
NOT_TEXT = "a message is .*, it must be a text or a list of parts"
PICTURE = {"type": "image", "image": file("a")}
MESSAGES: list[tuple[type[SpecError], str, Call]] = [
    (InvalidValue, "the prompt is empty", lambda pair: pair.generate([], max_tokens=5)),
    (InvalidValue, NO_IDS, lambda pair: pair.generate("one", max_tokens=5)),
    (InvalidValue, NO_IDS, lambda pair: pair.generate([1.5], max_tokens=5)),
    (
        InvalidValue,
        "holds token 256, this target has tokens 0 to 255",
        lambda p: p.generate([256], max_tokens=5),
    ),
    (PromptTooLong, TOO_LONG, lambda pair: pair.generate([1] * 64, max_tokens=5)),
    (InvalidValue, "max_tokens is 0, it must be 1 or more", lambda pair: pair.generate([1], max_tokens=0)),
    # It never ended.
    (InvalidValue, "is 2.5, it must be 1 or more, and an integer", lambda p: p.generate([1], max_tokens=2.5)),
    # Stop strings were ignored.
    (InvalidValue, "stop is not a list of token ids", lambda p: p.generate([1], max_tokens=5, stop=["\n"])),
    (InvalidValue, "stop is not a list of token ids", lambda p: p.generate([1], max_tokens=5, stop="end")),
    (InvalidValue, "key is 5, it must be a text", lambda pair: pair.generate([1], max_tokens=5, key=5)),
    (InvalidValue, "prompt is empty", lambda pair: pair.generate_batch([[2], []], max_tokens=4)),
    (PromptTooLong, TOO_LONG, lambda pair: pair.generate_batch([[2] * 64], max_tokens=4)),
    (InvalidValue, "must be a list of prompts", lambda pair: pair.generate_batch(5, max_tokens=4)),
    (
        InvalidValue,
        "it must be one Sampling",
        lambda pair: pair.generate_batch([[2]] * 3, sampling=[Sampling()] * 3, max_tokens=4),
    ),
    (
        InvalidValue,
        "max_running is two, it must be 1 or more, and an integer",
        lambda pair: pair.generate_batch([[2]], max_tokens=4, max_running="two"),
    ),
    (InvalidValue, "max_running is 0, it must be 1 or more", lambda pair: pair.batch(0)),
    (InvalidValue, "the system prompt is .*, it must be a text", lambda pair: pair.session(5)),
    (InvalidValue, "the system prompt is .*, it must be a text", lambda pair: pair.session(["Be brief."])),
    (InvalidValue, "the system prompt is .*, it must be a text", lambda pair: pair.session(b"Be brief.")),
    (InvalidValue, NOT_TEXT, lambda pair: pair.session().stream(None, max_tokens=5)),
    (InvalidValue, NOT_TEXT, lambda pair: pair.session().stream(5, max_tokens=5)),
    (
        InvalidValue,
        NOT_TEXT,
        lambda pair: pair.session().stream({"type": "text", "text": "Hi"}, max_tokens=5),
    ),
]
OF_PICTURES: list[tuple[type[SpecError], str, Call]] = [
    (
        InvalidValue,
        "ends with a picture: let text follow it",
        lambda pair: pair.generate(ends_with_a_picture(golden("31b", "one.0").prompt), max_tokens=3),
    ),
    (
        InvalidValue,
        "a part of a message must be",
        lambda pair: pair.session().stream([{"type": "image", "image": "a.png"}], max_tokens=3),
    ),
]
WITHOUT_A_TOWER: list[Call] = [
    lambda pair: pair.generate(golden("31b", "one.0").prompt, max_tokens=3),
    lambda pair: pair.session().stream([PICTURE], max_tokens=3),
    lambda pair: pair.vision,
]


def ends_with_a_picture(prompt: Prompt) -> Prompt:
    return Prompt(prompt[: prompt.spans[0].end], prompt.spans)


def check(pair: Pair, error: type[SpecError], words: str, call: Call) -> None:
    with pytest.raises(error, match=words) as caught:
        call(pair)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("error", "words", "call"), MESSAGES)
def test_refusals_come_before_the_first_round(error: type[SpecError], words: str, call: Call) -> None:
    check(make_pair("full", context=64), error, words, call)


@pytest.mark.parametrize(("error", "words", "call"), OF_PICTURES)
def test_refusals_of_pictures(error: type[SpecError], words: str, call: Call) -> None:
    check(pair_of("31b"), error, words, call)


@pytest.mark.parametrize("call", WITHOUT_A_TOWER)
def test_a_target_without_a_tower_says_why(call: Call) -> None:
    pair = pair_of("31b", vision=NoVision("it is a text model"))
    check(pair, NoVision, "this target reads no pictures: it is a text model", call)
    assert pair.session().stream([{"type": "text", "text": "one"}], max_tokens=3)
