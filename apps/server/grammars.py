"""The compiled grammars of one model: agents send the same schema with every request."""

from __future__ import annotations

import threading
from collections import OrderedDict

from mlx_spec import grammar
from mlx_spec.grammar import Grammar, GrammarKind
from mlx_spec.text import Text

KEPT = 32


class Grammars:
    """Compiles, and keeps those that were asked for last. For any thread."""

    def __init__(self, text: Text, vocab_size: int, count: int = KEPT) -> None:
        self._text = text
        self._vocab_size = vocab_size
        self._count = count
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[GrammarKind, str], Grammar] = OrderedDict()

    def compiled(self, kind: GrammarKind, source: str, *, seconds: float) -> Grammar:
        """As `grammar.compile` has it. Raises what that raises."""
        key = kind, source
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        found = grammar.compile(kind, source, self._text, self._vocab_size, seconds=seconds)
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > self._count:
                self._kept.popitem(last=False)
        return found
