"""Compile grammars as they come on standard input: the process that `rehearsal` talks to.

Run as a script; it imports nothing of mlx_spec. A line is a JSON object with the grammar as llguidance has it
or what to make it from, and a small tokenizer. The answer is a line, whatever became of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

STACK = 2**22  # bytes: half of what the threads of a server have


@functools.lru_cache(maxsize=8)
def tokenizer(serialized: str, size: int) -> LLTokenizer:
    """The tokenizer of one model, or what stands for it."""
    return LLTokenizer(serialized, n_vocab=size, eos_token=0)


def parser(kind: str, source: str, tokenizer: LLTokenizer, options: Mapping[str, Any]) -> LLMatcher:
    """A parser that has read nothing and knows its first mask, or one in its error state.

    Raises ValueError where a JSON schema is none.
    """
    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source)
    elif kind == "lark":
        grammar = LLMatcher.grammar_from_lark(source)
    else:
        overrides = cast("JsonCompileOptions", dict(options))
        grammar = LLMatcher.grammar_from_json_schema(source, overrides=overrides)
    made = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not made.is_error():
        made.compute_bitmask()
    return made


def serve() -> None:
    """Say that it begins, then answer line by line until there are no more."""
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        tokens = tokenizer(*asked["tokenizer"])
        with contextlib.suppress(ValueError):  # the one who asks will see it, too
            parser(asked["kind"], asked["source"], tokens, asked["options"])
        print("done", flush=True)


if __name__ == "__main__":
    threading.stack_size(STACK)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
