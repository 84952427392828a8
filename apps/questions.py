"""What the speed test and the self-test ask: built in, short, and nothing that a model would refuse."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_spec.convert.texts import TEXTS
from mlx_spec.text import Text

QUESTIONS = (
    "What does os.path.join do?",
    "How do I use functools.lru_cache?",
    "Explain in three sentences why the sky is blue.",
    "What is the json module for?",
)


@dataclass(frozen=True)
class Question:
    """A prompt, and what people call it."""

    name: str
    tokens: tuple[int, ...]


def asked(text: Text) -> list[Question]:
    """The questions as chat prompts, or texts to be continued where the target has no chat template."""
    if not text.chats:
        return [Question(f"text {i + 1}", tuple(text.prompt_tokens(t))) for i, t in enumerate(TEXTS)]
    return [Question(q, tuple(text.prompt([{"role": "user", "content": q}]))) for q in QUESTIONS]


def long_text(text: Text, tokens: int) -> Question:
    """So many tokens of text, to be continued."""
    beginning = text.prompt_tokens("")
    once = text.encode("\n\n".join(TEXTS) + "\n\n")
    wanted = max(tokens - len(beginning), 1)
    repeated = once * (wanted // len(once) + 1)
    return Question(f"the built-in texts, {tokens} tokens of them", tuple([*beginning, *repeated[-wanted:]]))
