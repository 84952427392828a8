'''Messages of several lines, between """ and """.'''

from __future__ import annotations

MARK = '"""'
PROMPT, MORE = "> ", "… "  # before the first line, and the others


def is_open(text: str) -> bool:
    """Whether a block was begun and not ended."""
    begun = text.lstrip()
    return begun.startswith(MARK) and not (
        len(begun.rstrip()) >= 2 * len(MARK) and begun.rstrip().endswith(MARK)
    )


def unquoted(text: str) -> str:
    """The message in a block, or the text without the space around it."""
    text = text.strip()
    if text.startswith(MARK) and not is_open(text):
        return text[len(MARK) : -len(MARK)].strip("\n")
    return text
