"""Markdown of a finished answer as terminal text, by rich.

Two things differ from rich's own output: single line breaks stay, as models mean them, and code has no
margin, so that it can be copied from the terminal.
"""

from __future__ import annotations

import io
import re
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.theme import Theme

CODE_THEME = "ansi_dark"  # the terminal's own colours, so that its background may be dark or light
THEME = Theme({"markdown.code": "cyan"})
PLAIN_BLOCKS = {"paragraph_open", "paragraph_close", "inline"}
PLAIN_SPANS = {"text", "softbreak", "hardbreak"}
TRAILING_SPACES = re.compile(r" +((?:\x1b\[[\d;]*m)*)$", re.MULTILINE)


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, JustifyMethod]] = {}


class _BareCode(CodeBlock):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        syntax = Syntax("", self.lexer_name, theme=CODE_THEME, background_color="default")
        text = syntax.highlight(str(self.text).rstrip())
        text.rstrip()
        text.no_wrap, text.overflow = True, "ignore"
        yield text


class _AnswerMarkdown(Markdown):
    elements: ClassVar = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _BareCode,
        "code_block": _BareCode,
    }


def rendered(text: str, columns: int) -> str | None:
    """Return the text with escape codes, `columns` wide; None if there is no Markdown in it."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    blocks = parser.parse(text)
    spans = [span for block in blocks for span in block.children or ()]
    if {block.type for block in blocks} <= PLAIN_BLOCKS and {span.type for span in spans} <= PLAIN_SPANS:
        return None
    for span in spans:
        if span.type == "softbreak":
            span.type = "hardbreak"
    markdown = _AnswerMarkdown("", hyperlinks=False)
    markdown.parsed = blocks
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", theme=THEME, width=columns
    )
    with console.capture() as capture:
        console.print(markdown, crop=False)
    return TRAILING_SPACES.sub(r"\1", capture.get()).strip("\n") + "\n"
