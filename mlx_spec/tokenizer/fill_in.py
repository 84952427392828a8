"""Filling in the middle: the tokens that code models were trained to see around a prefix and a suffix.

The pieces are tokenized apart, as in training, so that no token spans two of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_spec.tokenizer import Tokenizer

MARK = "\u263a"  # tokenized before a text and cut off again, so that no space is put before the text


@dataclass(frozen=True)
class FillIn:
    """A gap in a text, which the answer fills."""

    prefix: str
    suffix: str
    extra: tuple[tuple[str, str], ...] = ()  # name and text of other files
    middle: str = ""  # the beginning of the middle, if given
    param: str = "suffix"  # the field of the body that asks for it, for error messages


@dataclass(frozen=True)
class Layout:
    """The tokens before prefix, suffix and middle, and before other files, which come first."""

    prefix: str
    suffix: str
    middle: str = ""  # empty: the prefix comes last and is continued
    suffix_first: bool = False
    project: str = ""
    file: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return all tokens of the layout."""
        named = (self.prefix, self.suffix, self.middle, self.project, self.file)
        return tuple(token for token in named if token)


# The first one whose tokens a vocabulary has is the model's. Each is as its authors published it.
LAYOUTS = (
    Layout(  # Qwen2.5-Coder and Qwen3-Coder
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        project="<|repo_name|>",
        file="<|file_sep|>",
    ),
    Layout("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # CodeGemma, Yi-Coder, Granite 4
    Layout("<fim_prefix>", "<fim_suffix>", "<fim_middle>", file="<file_sep>"),  # StarCoder2
    Layout("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code, Stable Code
    Layout("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Layout("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Layout("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    Layout("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    Layout("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


def fill_in_prompt(gap: FillIn, tokenizer: Tokenizer) -> list[int] | None:
    """Return the prompt that asks for a middle; None if the model has no tokens for that."""
    layout = _find_layout(tokenizer)
    if layout is None:
        return None
    before = gap.prefix
    files = tokenizer.prompt_tokens("")  # the tokens that begin every prompt
    if gap.extra and not layout.file:
        before = "".join(f"{name}\n{content}\n" for name, content in gap.extra) + before
    elif gap.extra:
        # Where a layout has names that no client sends, words stand for them.
        files += _piece(tokenizer, layout.project, "project\n") if layout.project else []
        for name, content in gap.extra:
            files += _piece(tokenizer, layout.file, f"{name}\n{content}\n")
        files += _piece(tokenizer, layout.file, "file\n")
    pieces = [
        _piece(tokenizer, layout.prefix, before),
        _piece(tokenizer, layout.suffix, gap.suffix, joined=True),
    ]
    pieces = pieces[::-1] if layout.suffix_first else pieces
    return [*files, *pieces[0], *pieces[1], *_piece(tokenizer, layout.middle, gap.middle, joined=True)]


def fill_in_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens, besides end-of-text tokens, that end a middle: none of them is code."""
    layout = _find_layout(tokenizer)
    ends = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_separator|>", "▁<EOT>")
    names = (*ends, *layout.tokens) if layout else ()
    return tuple(id for id in map(tokenizer.token_id, names) if id is not None)


def _find_layout(tokenizer: Tokenizer) -> Layout | None:
    return next((one for one in LAYOUTS if None not in map(tokenizer.token_id, one.tokens)), None)


def _piece(tokenizer: Tokenizer, token: str, content: str, *, joined: bool = False) -> list[int]:
    """Return a token and a text; `joined` without the space that some tokenizers put before a text."""
    id = tokenizer.token_id(token) if token else None
    tokens = [] if id is None else [id]
    if not content:
        return tokens
    mark = tokenizer.encode(MARK) if joined else []
    if mark and mark[0] == tokenizer.token_id("▁"):
        return tokens + tokenizer.encode(MARK + content)[len(mark) :]
    return tokens + tokenizer.encode(content)
