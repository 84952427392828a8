"""Render Markdown of an answer as terminal text with rich.

Two things differ from rich's default output. Single line breaks stay, because models mean them. Code has no
margin, so that it can be copied from the terminal.
"""

from __future__ import annotations

import io
import re
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.theme import Theme


def _keep_math(state: StateInline, silent: bool) -> bool:
    """Leave a formula in \\(...\\), \\[...\\], $$...$$ or $...$ unchanged: it would lose its backslashes."""
    in_dollars = r"\$\$.+?\$\$|\$(?![\s$])[^$\n]*?(?<!\s)\$(?!\d)"  # $5 or $6 are prices
    formula = re.compile(rf"\\\(.*?\\\)|\\\[.*?\\\]|{in_dollars}", re.DOTALL)
    match = formula.match(state.src, state.pos)
    if match is not None and not silent:
        state.pending += match[0]
    state.pos = state.pos if match is None else match.end()
    return match is not None


PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
PARSER.inline.ruler.before("escape", "math", _keep_math)


def finished(text: str, *, splits_lists: bool) -> tuple[str, str, bool]:
    """Return the complete blocks of a text, the rest, and True if a blank line belongs between the two.

    With `splits_lists` each item of a list is a block, so that a list may be longer than the screen.
    """
    blocks = [block for block in PARSER.parse(text) if block.map]
    starts = [block.map[0] for block in blocks if block.map and block.level == 0]
    items = [b.map[0] for b in blocks if b.map and (b.level, b.type) == (1, "list_item_open")]
    cut = max([*starts, *(items if splits_lists else ())], default=0)
    lines = text.splitlines(keepends=True)
    return "".join(lines[:cut]), "".join(lines[cut:]), cut in starts


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, JustifyMethod]] = {}


class _BareCode(CodeBlock):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The terminal's own colours: its background may be dark or light.
        syntax = Syntax("", self.lexer_name, theme="ansi_dark", background_color="default")
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
    blocks = PARSER.parse(text)
    spans = [span for block in blocks for span in block.children or ()]
    has_blocks = {block.type for block in blocks} - {"paragraph_open", "paragraph_close", "inline"}
    if not has_blocks and {span.type for span in spans} <= {"text", "softbreak", "hardbreak"}:
        return None
    for span in spans:
        if span.type == "softbreak":
            span.type = "hardbreak"
        if span.type == "image":  # rich shows it before the text of its paragraph
            span.type, span.content, span.children = "text", f"[image: {span.content}]", None
    markdown = _AnswerMarkdown("", hyperlinks=False)
    markdown.parsed = blocks
    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        theme=Theme({"markdown.code": "cyan"}),
        width=columns,
    )
    with console.capture() as capture:
        console.print(markdown, crop=False)
    trailing_spaces = r" +((?:\x1b\[[\d;]*m)*)$"
    return re.sub(trailing_spaces, r"\1", capture.get(), flags=re.MULTILINE).strip("\n") + "\n"
