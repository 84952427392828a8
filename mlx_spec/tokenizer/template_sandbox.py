"""A sandbox for chat templates whose steps, values and CPU time are bounded.

A template comes with a checkpoint that anybody may have written. jinja2's sandbox keeps it from the process,
but not from a loop without end or a text of gigabytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SIZE = 2**24  # characters of a text, or 16 for each item of a list; no context holds as much


class TemplateLimit(jinja2.TemplateError):
    """A rendering that exceeds a bound."""


class _Budget:
    """The steps and seconds that a rendering may still take, and the sizes of its values.

    A conversation of 1,000 turns takes 20,000 steps.
    """

    def __init__(self, steps: int = 1_000_000, cpu_s: float = 10.0) -> None:
        self._most_steps, self._most_s = steps, cpu_s
        self._steps, self._chars, self._end = 0, 0, time.thread_time() + cpu_s
        self._sizes: dict[int, tuple[Any, int]] = {}  # by id; values of a template never change

    def spend(self) -> None:
        """Count a step. Raises TemplateLimit."""
        self._steps += 1
        if self._steps > self._most_steps:
            raise TemplateLimit(f"it takes more than {self._most_steps} steps")
        if self._steps % 64 == 0 and time.thread_time() > self._end:
            raise TemplateLimit(f"it takes more than {self._most_s:g} s")

    def make(self, count: int) -> None:
        """Count the characters of a new text. Raises TemplateLimit."""
        self._chars += count
        if count > MAX_SIZE or self._chars > 16 * MAX_SIZE:  # all of them may be in memory
            _check_size(self._chars)

    def size(self, value: Any) -> int:
        """Return the size of a value written out: one that is in a list twice counts twice."""
        item = 16  # as many characters as a reference and a number take bytes
        if isinstance(value, str):
            return item + len(value)
        if not isinstance(value, (list, tuple, dict)):
            return item
        if id(value) not in self._sizes:
            total = item
            for held in value.values() if isinstance(value, dict) else value:
                total += item + len(held) if type(held) is str else self.size(held)
            self._sizes[id(value)] = value, total
        return self._sizes[id(value)][1]


_budget: ContextVar[_Budget] = ContextVar("budget of a rendering")


@contextmanager
def bounded() -> Iterator[_Budget]:
    """Bound the rendering within this block, on this thread."""
    budget = _Budget()
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


class BoundedSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with bounds. Its templates are rendered within `bounded`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        own = {"_step": _stepped, "_join": _joined, "_built": _checked}  # which only `_Bounding` writes
        self.filters = {**{name: bounded_filter(name, made) for name, made in self.filters.items()}, **own}

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the pieces of an output: of the template, a macro or a block."""
        pieces = list(parts)
        _check_size(sum(map(len, pieces)))
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Bounding().visit(Parser(self, source, name, filename).parse())
        return template

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute, or a key of a dict that is not the name of a method.

        Leaves out checks of the sandbox that change nothing: they took half of the time of a rendering.
        """
        if type(obj) is dict and not hasattr(dict, attribute):
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and not attribute.startswith(("_", "format")) and hasattr(str, attribute):
            return getattr(obj, attribute)  # changes nothing, and no format needs to be wrapped
        if type(obj) is Namespace and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if type(value) in (str, bool, int):  # no method that the sandbox would have to wrap or refuse
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a function or a method of a value."""
        _budget.get().spend()
        if type(__obj) is BuiltinMethodType and isinstance(__obj.__self__, str):
            kwargs.pop("_loop_vars", None), kwargs.pop("_block_vars", None)  # for functions with a context
            _check_call(__obj.__name__, __obj.__self__, args, kwargs)
            return _checked(__obj(*args, **kwargs))  # the sandbox lets all of them pass
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's own `format` of a text."""
        is_method = isinstance(value, BuiltinMethodType) and isinstance(value.__self__, str)
        if is_method and value.__name__ in ("format", "format_map"):
            _check_call(value.__name__, value.__self__, (), {})
        return super().wrap_str_format(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation whose result may be larger than its operands."""
        if operator == "+":  # the most frequent one, and never twice as large as both
            return _checked(left + right)
        match operator, left, right:
            case "*", int(), int():
                _check_size(max(left.bit_length(), right.bit_length()) * 2**14)
            case "**", int(), int():
                _check_size(left.bit_length() * abs(right))
            case "*", int(), _:
                _check_size(left * _budget.get().size(right))
            case "*", _, int():
                _check_size(_budget.get().size(left) * right)
            case "%", str(), _:
                _check_call("format", left, (), {})
        return _checked(super().call_binop(context, operator, left, right))

    def call_filter(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply a filter by its name, as `map` does."""
        _budget.get().spend()
        return super().call_filter(name, value, *args, **kwargs)


class _Bounding(NodeTransformer):
    """Adds to a template the checks that its operations do not pass otherwise."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Count each round of a loop."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(0), "_step", node)))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """Join the texts around `~` with a bound."""
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load"), "_join", node)

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Filter:
        """Bound what a list holds. Lists that hold each other twice grow without copies."""
        self.generic_visit(node)
        return _filtered(node, "_built", node)

    visit_Dict = visit_List


def _filtered(value: nodes.Expr, name: str, at: nodes.Node) -> nodes.Filter:
    filtered = nodes.Filter(value, name, [], [], None, None)
    return filtered.set_lineno(at.lineno)  # type: ignore[return-value]


def _stepped(value: Any) -> Any:
    _budget.get().spend()
    return value


def _joined(parts: tuple[Any, ...]) -> str:
    pieces = [part if type(part) is str else str(_checked(part)) for part in parts]
    size = sum(map(len, pieces))
    _check_size(size)
    _budget.get().make(size)
    return "".join(pieces)


def bounded_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses large numbers and results."""
    grows = name in ("batch", "center", "format", "indent", "join", "replace", "slice", "tojson", "wordwrap")

    @wraps(made)
    def checked_filter(*args: Any, **kwargs: Any) -> Any:
        if grows:
            contexts = Context | EvalContext | jinja2.Environment
            value, *others = (arg for arg in args if not isinstance(arg, contexts))
            _check_call(name, value, tuple(others), kwargs)
        return _checked(made(*args, **kwargs))

    return checked_filter


def _check_call(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateLimit for a call whose result may be much larger than its arguments."""
    most = 10**6  # of an argument, such as a width or a count of repetitions
    # A width in a format, as in %9999999d.
    if any(isinstance(each, (int, float)) and abs(each) > most for each in (*args, *kwargs.values())) or (
        name in ("format", "format_map") and re.search(r"\d{7}", str(value))
    ):
        raise TemplateLimit(f"an argument is more than {most}")
    match name, value, args:
        case "replace", str(), (str(old), str(new), *_):
            _check_size(len(value) + value.count(old) * len(new))
        case "join", str(), (list() | tuple() | dict() as items, *_):
            _check_size(len(value) * len(items) + _budget.get().size(items))
        case "join", list() | tuple(), (str(glue), *_):
            _check_size(len(glue) * len(value))


def _checked(result: Any) -> Any:
    """Return a value. Raises TemplateLimit if it is too large."""
    if type(result) is str:  # most values
        _budget.get().make(len(result))
    elif isinstance(result, (str, list, tuple, dict)):
        _check_size(_budget.get().size(result))
    return result


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimit(f"it makes a value of more than {MAX_SIZE} characters")
