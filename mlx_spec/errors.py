"""Errors a user or a checkpoint can cause. Each message is one line: both sides, and the way out."""

from __future__ import annotations

import re


class SpecError(Exception):
    """Anything mlx_spec refuses to do; its text is meant for the user, on one line whatever it quotes."""

    def __init__(self, message: str = "") -> None:
        super().__init__(re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", message))


class NotFound(SpecError):
    """A path, file or repository that does not exist or cannot be reached."""


class BadCheckpoint(SpecError):
    """A checkpoint that is incomplete, damaged or not of a supported format."""


class Mismatch(SpecError):
    """Two parts that do not belong together: a drafter and a target, or two vocabularies."""


class NotRewindable(SpecError):
    """A model whose cache has no exact rollback rule."""


class InvalidValue(SpecError):
    """An argument outside its range."""


class PromptTooLong(SpecError):
    """A prompt that does not fit the context of the target, or the memory."""

    @classmethod
    def for_context(cls, tokens: str, most: int) -> PromptTooLong:
        """Return the error of a prompt that has more than `most` tokens."""
        return cls(
            # Coding agents look for these words, compact their conversation and go on.
            f"the prompt is too long: {tokens} tokens > {most} maximum, the context of this target: shorten "
            "it, or begin a new conversation"
        )


class NoVision(SpecError):
    """A model that reads no pictures; its text is the reason."""


class NotFinite(SpecError):
    """Numbers of a model that overflowed: no token can be chosen by them."""

    @classmethod
    def after(cls, tokens: int) -> NotFinite:
        """Return the error of logits that are not finite after that many tokens of an answer."""
        return cls(
            f"this model's numbers are not finite after {tokens} tokens of the answer: its files are damaged "
            "or its type is too narrow: download it again, or use --exact float32"
        )


class DraftsGrow(MemoryError):
    """The drafters of an answer keep more memory than their caches."""


def caught(error: BaseException) -> Exception:
    """Return an error that was caught, as an Exception: Rust code that panics raises none.

    Raises those that end the program.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def lacks_memory(error: Exception) -> bool:
    """Return True for errors of Python and of MLX that say that memory ran out."""
    words = ("Unable to allocate", "Insufficient Memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
