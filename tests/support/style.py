"""The rules of the code base as functions of source text; `test_style.py` applies them.

A rule takes a `Source` and yields (line, message). To raise a budget or to allow a synchronisation, edit the
tables here and give the reason.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

MAX_LINES, MAX_FUNCTION, MAX_PARAMETERS, MAX_NESTING = 300, 40, 7, 3

# "path" or "path::function" -> (budget, limit, reason)
RAISED: dict[str, tuple[str, int, str]] = {
    "mlx_spec/demo/recipe/fixes.py": ("lines", 400, "data: texts to train on"),
}

# Where the device may be waited for. A path ending in "/" stands for all files below it.
SYNCS = {
    "mlx_spec/engine.py": "the one copy to the host that decides a round",
    "mlx_spec/target.py": "ends a chunk of the prompt, so that its activations can be freed",
    "mlx_spec/constraint.py": "a grammar reads a draft before it is judged",
    "apps/turns.py": "measures seconds",
    "apps/doctor/ties.py": "a self-test: nothing waits behind it",
    "mlx_spec/logprobs.py": "the one copy that reads the log-probabilities of a round",
    "mlx_spec/load.py": "weights are read before the first question, not during it",
    "mlx_spec/tuning/": "measures seconds",
    "mlx_spec/demo/recipe/": "trains",
    "convert/": "reads and writes checkpoints; nothing waits behind it",
}

ENVIRONMENT = {"NO_COLOR": "apps/"}  # variable -> where it may be read

# Where the name of a model family may appear in code.
FAMILIES = re.compile(r"gemma|llama|qwen|deepseek", re.IGNORECASE)
FAMILIES_ALLOWED = ("mlx_spec/known.py", "mlx_spec/drafters/", "mlx_spec/demo/", "convert/", "apps/")

# A module imports from its own layer or from those above it in this list.
LAYERS = (
    ("types",),
    ("errors", "tree"),
    ("backend", "checkpoint", "transfer"),
    ("anatomy", "cache", "taps", "rope", "noise", "filters", "constraint"),
    ("verify", "verify_tree", "sampling", "tuning", "demo"),
    ("target", "drafters"),
    ("engine", "reuse"),
    ("text", "template", "reading", "written", "stops"),
    ("logprobs", "answer", "grammar", "compiling", "rehearsal"),
    ("recorder", "scoring", "offers", "branches", "session"),
    ("pair", "policies", "load", "hub", "known"),
    ("", "convert", "demo.recipe"),  # "" is mlx_spec/__init__.py, the public face
    ("apps",),
    ("__main__", "chat", "serve", "menubar"),
)
# ... but for these. (A drafter may well use a small model as a target of its own.)
STRANGERS = (("target", "drafters"),)

VAGUE_NAMES = ("base", "common", "helper", "helpers", "misc", "util", "utils")

Findings = Iterator[tuple[int, str]]
NESTING = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """One file. `path` is relative to the repository; apps/ and convert/ go by their own place there."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        """Dotted name under mlx_spec; "" for the package itself."""
        parts = self.path.removesuffix(".py").split("/")
        parts = parts[1:] if parts[0] == "mlx_spec" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def probed_attributes(source: Source) -> Findings:
    """getattr and its kin with a literal name: a missing attribute is an error, not a case."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr" as probe),
                args=[_, ast.Constant(value=name), *_],
            ):
                yield node.lineno, f"{probe} with the literal {name!r}"


def budgets(source: Source) -> Findings:
    """Size of files and functions, number of parameters, depth of nesting."""
    lines = source.text.count("\n")
    if lines > _limit(source.path, "lines", MAX_LINES):
        yield 1, f"{lines} lines"
    for node in ast.walk(source.tree):
        if not isinstance(node, FUNCTIONS):
            continue
        where = f"{source.path}::{node.name}"
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > _limit(where, "function", MAX_FUNCTION):
            yield node.lineno, f"{node.name}: {length} lines"
        if _parameters(node) > _limit(where, "parameters", MAX_PARAMETERS):
            yield node.lineno, f"{node.name}: {_parameters(node)} parameters"
        depth = max(map(_depth, node.body))
        if depth > _limit(where, "nesting", MAX_NESTING):
            yield node.lineno, f"{node.name}: nested {depth} deep"


def _limit(where: str, budget: str, default: int) -> int:
    raised = RAISED.get(where)
    return raised[1] if raised and raised[0] == budget else default


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = node.args
    named = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if a]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def _depth(node: ast.AST) -> int:
    """Nested blocks below and including `node`; an elif adds none, a function inside starts anew."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return 0
    inner = [_depth(child) for child in ast.iter_child_nodes(node)]
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        chain = _depth(node.orelse[0])
        return max([chain, *(1 + _depth(child) for child in node.body)])
    return max(inner, default=0) + isinstance(node, NESTING)


def vague_names(source: Source) -> Findings:
    """Files and classes named after nothing."""
    name = source.path.rsplit("/", 1)[-1].removesuffix(".py")
    if name in VAGUE_NAMES:
        yield 1, f"{name}.py says nothing about what is in it"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Helper|Utils?)$", node.name):
            yield node.lineno, f"{node.name} says nothing about what it is"


def unfinished(source: Source) -> Findings:
    """Notes to self."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if mark := re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield number, mark[0]


def environment(source: Source) -> Findings:
    """Environment variables are no interface."""
    parents = {child: node for node in ast.walk(source.tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            imported = {alias.name for alias in node.names} & {"environ", "getenv"}
            yield from ((node.lineno, f"os.{name}") for name in sorted(imported))
        if not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")):
            continue
        use: ast.AST = node
        while isinstance(parents[use], (ast.Attribute, ast.Call, ast.Compare, ast.Subscript)):
            use = parents[use]
        words = {str(n.value) for n in ast.walk(use) if isinstance(n, ast.Constant)}
        names = {word for word in words if word.isupper()}
        allowed = {name for name, place in ENVIRONMENT.items() if source.path.startswith(place)}
        if not names or not names <= allowed:
            yield node.lineno, f"os.{node.attr}"


def syncs(source: Source) -> Findings:
    """Waiting for the device, outside the places where that is meant."""
    if any(
        source.path == place or (place.endswith("/") and source.path.startswith(place)) for place in SYNCS
    ):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if node.func.attr in ("item", "tolist"):
                yield node.lineno, f".{node.func.attr}() waits for the device"
            if owner in ("mx", "mlx.core") and node.func.attr in ("eval", "synchronize"):
                yield node.lineno, f"mx.{node.func.attr}() waits for the device"


def families(source: Source) -> Findings:
    """Names of model families in code; docstrings and comments may cite them."""
    if source.path.startswith(FAMILIES_ALLOWED):
        return
    documents = {node.body[0].value for node in ast.walk(source.tree) if _has_docstring(node)}
    for node in ast.walk(source.tree):
        for word in () if node in documents else _words(node):
            if found := FAMILIES.search(word):
                yield node.lineno, f"knows of {found[0].lower()}"


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None


def _words(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
            return [word]
        case ast.Constant(value=str(word)):
            return [word]
        case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) | ast.ClassDef(name=word):
            return [word]
        case ast.ImportFrom(module=module):
            return [module or "", *(alias.name for alias in node.names)]
        case ast.Import():
            return [alias.name for alias in node.names]
    return []


def imports(source: Source, modules: frozenset[str]) -> list[tuple[int, str]]:
    """What `source` imports of `modules`, dotted names under mlx_spec, with line numbers."""
    found: list[tuple[int, str]] = []
    package = (
        source.module.split(".") if source.path.endswith("__init__.py") else source.module.split(".")[:-1]
    )
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            up = ["mlx_spec", *package[: len(package) - node.level + 1]] if node.level else []
            origin = ".".join(part for part in (*up, node.module) if part)
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                found.append((node.lineno, inner if inner.removeprefix("mlx_spec.") in modules else origin))
    ours = [(line, name) for line, name in found if name == "mlx_spec" or name.startswith("mlx_spec.")]
    return [(line, name.removeprefix("mlx_spec").removeprefix(".")) for line, name in ours]


def layering(source: Source, modules: frozenset[str]) -> Findings:
    """Imports point down."""
    part = _part(source.module)
    if part is None:
        yield 1, f"mlx_spec.{source.module} has no place in LAYERS"
        return
    for line, name in imports(source, modules):
        other = _part(name)
        if other is None or _rank(other) > _rank(part) or (part, other) in STRANGERS:
            yield line, f"{part or 'mlx_spec'} must not import {name or 'mlx_spec'}"


def _part(module: str) -> str | None:
    """The entry of LAYERS that a module belongs to: the longest that fits."""
    entries = [entry for layer in LAYERS for entry in layer if entry]
    fitting = [entry for entry in entries if module == entry or module.startswith(entry + ".")]
    return max(fitting, key=len, default=None) if module else ""


def _rank(part: str) -> int:
    return next(rank for rank, layer in enumerate(LAYERS) if part in layer)


def types_is_a_leaf(source: Source) -> Findings:
    """`types.py` imports mlx and the standard library."""
    if source.path != "mlx_spec/types.py":
        return
    for node in ast.walk(source.tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] not in {"mlx", *sys.stdlib_module_names}:
                yield node.lineno, f"types imports {name}"


RULES: tuple[Callable[[Source], Iterable[tuple[int, str]]], ...] = (
    probed_attributes,
    budgets,
    vague_names,
    unfinished,
    environment,
    syncs,
    families,
    types_is_a_leaf,
)
