"""A sandbox for chat templates whose steps, values and CPU time are bounded.

A template comes with a checkpoint that anybody may have written. jinja2's sandbox keeps it from the process,
but not from a loop without end or a text of gigabytes.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import islice
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SIZE = 2**24  # characters of a text, or 16 for each item of a list; no context holds as much
GROWING = frozenset(  # filters whose arguments say how large the result is
    "batch center format indent int join replace round slice sum tojson wordwrap".split()
)
# Filters whose time and memory are a small multiple of a text. Others are for lists, or search a text again
# and again.
OF_TEXTS = frozenset(
    "capitalize center count d default e escape first float format indent int last length lower replace safe "
    "string title tojson trim truncate upper urlencode wordcount".split()
)


class TemplateLimit(jinja2.TemplateError):
    """A rendering that exceeds a bound."""


class _Budget:
    """The steps and seconds that a rendering may still take, and the sizes of its values.

    A conversation of 1,000 turns takes 20,000 steps.
    """

    def __init__(self, steps: int = 1_000_000, cpu_s: float = 10.0) -> None:
        self._most_steps, self._most_s = steps, cpu_s
        self._steps, self._chars, self._end = 0, 0, time.thread_time() + cpu_s
        self._is_due = False  # a large value was made since the last look at the clock
        self._sizes: dict[int, tuple[Any, int]] = {}  # by id; values of a template never change

    def spend(self) -> None:
        """Count a step. Raises TemplateLimit."""
        self._steps += 1
        if self._steps > self._most_steps:
            raise TemplateLimit(f"it takes more than {self._most_steps} steps")
        if self._is_due or self._steps % 64 == 0:
            self._is_due = False
            if time.thread_time() > self._end:
                raise TemplateLimit(f"it takes more than {self._most_s:g} s")

    def make(self, count: int) -> None:
        """Count the characters of a new text. Raises TemplateLimit."""
        self._chars += count
        self._is_due = self._is_due or count > 2**14
        if count > MAX_SIZE or self._chars > 16 * MAX_SIZE:  # all of them may be in memory
            _check_size(self._chars)

    def knows(self, value: Any) -> bool:
        """Return True if the size of a value is known."""
        return id(value) in self._sizes

    def size(self, value: Any) -> int:
        """Return the size of a value written out: one that is in a list twice counts twice."""
        item = 16  # as many characters as a reference and a number take bytes
        if isinstance(value, (str, bytes)):
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
    _of_dicts = frozenset(dir(dict))
    _of_texts = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)
        del self.globals["lipsum"]  # texts at random, as many as it is asked for
        self.globals["namespace"] = _Namespace
        bounded = {name: bounded_filter(name, made) for name, made in self.filters.items()}
        bounded |= {name: self.filters[name] for name in ("count", "d", "default", "length")}  # make nothing
        own = {"_step": _stepped, "_join": _joined, "_built": _checked}  # which only `_Bounding` writes
        self.filters = {**bounded, **own}

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the pieces of an output: of the template, a macro or a block."""
        pieces, size, rest = list[str](), 0, iter(parts)
        while some := list(islice(rest, 64)):
            pieces += some
            size += sum(map(len, some))
            _check_size(size)
        _budget.get().make(size)
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Bounding().visit(Parser(self, source, name, filename).parse())
        return template

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute, or a key of a dict that is not the name of a method.

        Leaves out checks of the sandbox that change nothing: they took half of the time of a rendering.
        """
        if type(obj) is dict and attribute not in self._of_dicts:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in self._of_texts:
            return getattr(obj, attribute)  # changes nothing, and no format needs to be wrapped
        if type(obj) is _Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, None)
            if type(value) in (str, bool, int):  # no method that the sandbox would have to wrap or refuse
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a function or a method of a value."""
        budget = _budget.get()
        budget.spend()
        budget.make(8 * len(args) + 64 * len(kwargs))  # whatever is called may keep them
        if type(__obj) is Macro:  # it is safe, and its output was counted
            kwargs.pop("_loop_vars", None), kwargs.pop("_block_vars", None)  # for functions with a context
            return __obj(__context.eval_ctx, *args, **kwargs)
        if type(__obj) is not BuiltinMethodType or not isinstance(owner := __obj.__self__, (str, bytes)):
            made = super().call(__context, __obj, *args, **kwargs)
            # A view has no size of its own: those that hold each other twice would double when written out.
            return _checked(list(made) if isinstance(made, (KeysView, ValuesView, ItemsView)) else made)
        kwargs.pop("_loop_vars", None), kwargs.pop("_block_vars", None)
        name = __obj.__name__
        if isinstance(owner, bytes) and name != "decode":
            raise TemplateLimit("a prompt is text, not bytes")
        if name in ("encode", "decode") and {*args, *kwargs.values()} - {"utf-8", "utf8", "strict"}:
            raise TemplateLimit("a prompt is text in UTF-8")  # other codecs take far longer
        if not _are_short(owner, args) or kwargs:
            if name == "join" and len(args) == 1:
                args = (_listed(args[0]),)
            _check_call(name, owner, args, kwargs)
            return _checked(__obj(*args, **kwargs))  # the sandbox lets all of them pass
        made = __obj(*args)
        if not isinstance(made, int):
            budget.make(len(owner) + len(made) * (1 if type(made) is str else 64))
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's own `format` of a text, with a bound."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded_format(*args: Any, **kwargs: Any) -> str:
            held = args[0].values() if args and isinstance(args[0], dict) else ()
            _check_widths(value.__self__, _largest((*args, *kwargs.values(), *held)))
            return wrapped(*args, **kwargs)

        return bounded_format

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation whose result may be larger than its operands."""
        if operator == "+":  # the most frequent one, and never twice as large as both
            return _checked(left + right)
        match operator, left, right:
            case "*", int(), int():
                _check_size(max(left.bit_length(), right.bit_length()) * 2**14)
            case "**", int(), int():
                _check_bits(left.bit_length() * abs(right))
            case "*", int(), _:
                _check_size(left * _budget.get().size(right))
            case "*", _, int():
                _check_size(_budget.get().size(left) * right)
            case "%", str() | bytes(), _:
                _check_widths(left, _largest(right if isinstance(right, (tuple, list)) else (right,)))
        return _checked(super().call_binop(context, operator, left, right))

    def call_filter(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply a filter by its name, as `map` does."""
        _budget.get().spend()
        return super().call_filter(name, value, *args, **kwargs)

    def call_test(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply a test by its name, as `select` does."""
        _budget.get().spend()
        return super().call_test(name, value, *args, **kwargs)


class _Namespace(Namespace):
    """A namespace whose values are counted. It shows none: they may hold each other many times."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a value may be called "self"
        Namespace.__init__(*args, **kwargs)
        _budget.get().make(64 * len(args[0]._Namespace__attrs))

    def __repr__(self) -> str:
        return "<Namespace>"


class _Bounding(NodeTransformer):
    """Adds to a template the checks that its operations do not pass otherwise."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Count each round of a loop, and each item that its condition passes over."""
        self.generic_visit(node)
        if node.test is not None:
            node.test = _filtered(node.test, "_step", node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(0), "_step", node)))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """Join the texts around `~` with a bound."""
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load"), "_join", node)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Expr:
        """Bound what a list holds. Lists that hold each other twice grow without copies."""
        if isinstance(node, (nodes.List, nodes.Tuple)):
            if len(node.items) <= 16 and all(isinstance(item, nodes.Const) for item in node.items):
                return node  # such as the roles that a condition lists
            if isinstance(node, nodes.Tuple) and node.ctx != "load":
                return node  # the names of a loop or an assignment
        self.generic_visit(node)
        return _filtered(node, "_built", node)

    visit_Dict = visit_Tuple = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """Bound what is cut out of a text or a list. It is a copy."""
        self.generic_visit(node)
        return _filtered(node, "_built", node) if isinstance(node.arg, nodes.Slice) else node


def _filtered(value: nodes.Node, name: str, at: nodes.Node) -> nodes.Filter:
    filtered = nodes.Filter(value, name, [], [], None, None)
    return filtered.set_lineno(at.lineno)  # type: ignore[return-value]


def _stepped(value: Any) -> Any:
    _budget.get().spend()
    return value


def _shown(value: Any) -> Any:
    """Return a value as it is written into an output."""
    budget = _budget.get(None)  # None while jinja2 compiles constants
    if type(value) is str or budget is None:
        return value
    text = str(value)
    budget.make(len(text))
    return text


def _are_short(owner: str | bytes, args: tuple[Any, ...], most: int = 2**10) -> bool:
    """Return True if a method of a text makes at most `most` squared characters of these texts."""
    return len(owner) <= most and all(type(arg) is str and len(arg) <= most for arg in args)


def _listed(items: Any) -> Any:
    """Return the items of an iterator in a list, whose size is known."""
    return items if isinstance(items, (str, list, tuple, dict)) else list(items)


def _joined(parts: tuple[Any, ...]) -> str:
    pieces = [part if type(part) is str else str(_checked(part)) for part in parts]
    _budget.get().make(sum(map(len, pieces)))
    return "".join(pieces)


def bounded_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses large numbers and results."""
    grows = name in GROWING
    is_checked = grows or name not in OF_TEXTS
    contexts = Context | EvalContext | jinja2.Environment

    @wraps(made)
    def checked_filter(*args: Any, **kwargs: Any) -> Any:
        if is_checked:
            place = next((i for i, arg in enumerate(args) if not isinstance(arg, contexts)), len(args))
            if place < len(args):
                if name in ("join", "sum"):
                    args = (*args[:place], _listed(args[place]), *args[place + 1 :])
                if name not in OF_TEXTS and isinstance(args[place], (str, bytes)):
                    _check_size(len(args[place]) << 7)
                if grows:
                    _check_call(name, args[place], args[place + 1 :], kwargs)
        result = made(*args, **kwargs)
        return map(_checked, result) if name in ("batch", "slice") else _checked(result)

    return checked_filter


def _check_call(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateLimit for a call whose result may be much larger than its arguments."""
    # Of an argument: a width, a count of repetitions, places of a number, or spaces for each level.
    most = {"round": 400, "tojson": 64, "int": math.inf, "sum": math.inf}.get(name, 10**6)
    given = (*args, *kwargs.values())
    numbers = _largest(given)
    if numbers > most:
        raise TemplateLimit(f"an argument is more than {most}")
    if name in ("format", "format_map"):
        _check_widths(value, numbers)
    texts = [len(each) for each in given if isinstance(each, str)]
    match name, value, args:
        case "replace", str(), (str(old), str(new), *_):
            _check_size(len(value) + value.count(old) * len(new))
        case "join", str() | list() | tuple() | dict(), _:  # the method of a text, or the filter of a list
            others = [each for each in given if isinstance(each, (str, list, tuple, dict))]
            _check_size(len(value) * max(map(len, others), default=0))
            _check_size(sum(map(_budget.get().size, (value, *others))))
        case "expandtabs", str(), _:
            _check_size(len(value) + value.count("\t") * (numbers or 8))
        case "translate", str(), (dict() as table, *_):
            longest = max((len(new) for new in table.values() if isinstance(new, str)), default=1)
            _check_size(len(value) * longest)
        case "split" | "rsplit", str(), (str(mark), *_) if mark:
            _check_size(16 * value.count(mark))
        case "split" | "rsplit" | "splitlines", str(), _:
            _check_size(4 * len(value))
        case "indent", str(), _:
            _check_size(len(value) + (value.count("\n") + 1) * max([numbers or 4, *texts]))
        case "wordwrap", str(), _:
            _check_size(len(value) * max([1, *texts]))
        case "sum", list() | tuple(), _ if not isinstance(
            kwargs.get("start", [*args, 0, 0][1]), (int, float)
        ):
            _check_size(len(value) << 14)  # a list is copied for each of them
        case "int", str(), _:
            _check_size(len(value) << 10)


def _checked(result: Any) -> Any:
    """Return a value. Raises TemplateLimit if it is too large."""
    if type(result) is str:  # most values
        _budget.get().make(len(result))
    elif isinstance(result, (str, bytes, list, tuple, dict)):
        budget = _budget.get()
        if not budget.knows(result):
            budget.make((64 if isinstance(result, dict) else 8) * len(result))  # it is kept with its size
        _check_size(budget.size(result))
    elif type(result) is int:
        _check_bits(result.bit_length())
    return result


def _largest(values: Iterable[Any]) -> float:
    return max((abs(each) for each in values if isinstance(each, (int, float))), default=0)


def _check_widths(text: Any, largest: float) -> None:
    """Raise TemplateLimit if the widths in a format, as in %999999d or {:999999}, make a text too large.

    `largest` is the largest number that a width may be read from, as in %*d.
    """
    form = str(text)
    fields = " ".join(re.findall(r"%[-#0 +.*\d]*|\{[^{}]*\{?", form))
    widths = sum(int(each[:9]) for each in re.findall(r"\d+", fields))
    read = len(re.findall(r"\*|\S\{", fields))
    _check_size(widths + int(read * min(largest, 2 * MAX_SIZE)))


def _check_bits(bits: int) -> None:
    """Raise TemplateLimit for a number that takes long to divide."""
    if bits > 2**16:
        raise TemplateLimit("it makes a number of more than 2**16 bits")


def _check_size(size: float) -> None:
    if size > MAX_SIZE:
        raise TemplateLimit(f"it makes a value of more than {MAX_SIZE} characters")
