"""The code base keeps its rules, and the rules notice when it does not."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import style
from style import Source

ROOT = Path(__file__).parents[1]
PACKAGES = ("mlx_spec", "apps", "convert")


def sources() -> list[Source]:
    """Every Python file of the three packages, once: symlinks are not followed."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    own = [path for path in paths if path.resolve() == path]
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in own]


SOURCES = sources()
MODULES = frozenset(source.module for source in SOURCES)


def imports_point_down(source: Source) -> style.Findings:
    return style.layering(source, MODULES)


@pytest.mark.parametrize("rule", [*style.RULES, imports_point_down], ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    found = [f"{source.path}:{line}: {message}" for source in SOURCES for line, message in rule(source)]
    assert not found, "\n".join(["", *found])


def test_imports_go_in_no_circle():
    graph = {source.module: {name for _, name in style.imports(source, MODULES)} for source in SOURCES}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_raised_budgets_name_files():
    assert [name for name in style.RAISED if not (ROOT / name.split("::")[0]).is_file()] == []


def test_sources_are_found():
    assert {"types", "errors", "backend", "apps.cli", "convert"} <= MODULES
    assert not any(
        path.startswith(("mlx_spec/apps", "mlx_spec/convert")) for path in (s.path for s in SOURCES)
    )


# --- the rules themselves


def messages(rule, text: str, path: str = "mlx_spec/verify.py") -> list[str]:
    return [message for _, message in rule(Source(path, text))]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (style.probed_attributes, "getattr(x, 'a', None)"),
        (style.probed_attributes, "if hasattr(x, 'a'): pass"),
        (style.budgets, "\n" * 301),
        (style.budgets, "def f():\n" + "    x = 1\n" * 40),
        (style.budgets, "def f(a, b, c, d, e, /, f, *g, h): pass"),
        (style.budgets, "class A:\n def f(self, a, b, c, d, e, f, g, h): pass"),
        (style.budgets, "def f():\n for a in b:\n  if a:\n   with a:\n    while a: pass"),
        (
            style.budgets,
            "def f():\n try:\n  for a in b:\n   pass\n except E:\n  if a:\n   if b:\n    if c: pass",
        ),
        (style.budgets, "def f():\n if a: pass\n else:\n  if b:\n   if c:\n    if d: pass\n  x = 1"),
        (style.vague_names, "class CacheManager: pass"),
        (style.unfinished, "x = 1  # TODO: more"),
        (style.environment, "import os\nx = os.environ['HOME']"),
        (style.environment, "import os\nx = os.getenv('NO_COLOR')"),
        (style.environment, "from os import environ"),
        (style.environment, "import os\nf(os.environ)"),
        (style.syncs, "n = x.item()"),
        (style.syncs, "n = x[0].tolist()"),
        (style.syncs, "mx.eval(x)"),
        (style.families, "name = 'Qwen3'"),
        (style.families, "from mlx_lm.models import gemma3"),
        (style.families, "import mlx_lm.models.llama"),
        (style.families, "def load_deepseek(): pass"),
        (style.families, "class Qwen: pass"),
        (style.families, "x.is_gemma = 1"),
    ],
)
def test_rule_notices(rule, text):
    assert len(messages(rule, text)) == 1


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (style.probed_attributes, "mlx_spec/target.py", "getattr(x, name)"),
        (style.budgets, "mlx_spec/verify.py", "\n" * 300 + "def f(self, a, b, c, d, e, f, g): pass"),
        (style.budgets, "mlx_spec/verify.py", "def f():\n" + "    x = 1\n" * 39),
        (
            style.budgets,
            "mlx_spec/verify.py",
            "def f():\n if a: pass\n elif b: pass\n elif c: pass\n elif d: pass",
        ),
        (
            style.budgets,
            "mlx_spec/verify.py",
            "def f():\n for a in b:\n  for c in d:\n   def g():\n    if a: pass",
        ),
        (style.environment, "apps/chat/main.py", "import os\nx = os.environ.get('NO_COLOR', '')"),
        (style.environment, "apps/chat/main.py", "import os\nx = 'NO_COLOR' in os.environ"),
        (style.syncs, "mlx_spec/engine.py", "n = x.item()"),
        (style.syncs, "mlx_spec/tuning/costs.py", "mx.eval(x)"),
        (style.syncs, "mlx_spec/verify.py", "model.eval()\nmx.async_eval(x)"),
        (style.families, "mlx_spec/verify.py", '"""As in llama.cpp."""\n# and Qwen'),
        (style.families, "mlx_spec/drafters/gemma4.py", "name = 'gemma'"),
        (style.families, "convert/names.py", "name = 'llama'"),
    ],
)
def test_rule_lets_pass(rule, path, text):
    assert messages(rule, text, path) == []


@pytest.mark.parametrize("name", ["utils", "base", "common", "helpers"])
def test_vague_file_names(name):
    assert len(messages(style.vague_names, "", f"mlx_spec/cache/{name}.py")) == 1


TREE = frozenset({"", "types", "verify", "cache", "cache.sliding", "engine", "load", "apps", "apps.cli"})
TREE |= {"target", "drafters", "drafters.lookup", "demo", "demo.recipe", "demo.recipe.train"}


@pytest.mark.parametrize(
    ("path", "text", "allowed"),
    [
        ("mlx_spec/engine.py", "from mlx_spec.types import Draft", True),
        ("mlx_spec/engine.py", "from mlx_spec import types, verify", True),
        ("mlx_spec/sampling.py", "from mlx_spec.verify import greedy", True),
        ("mlx_spec/cache/full.py", "from . import sliding", True),
        ("mlx_spec/load.py", "import mlx_spec.drafters.mtp", True),
        ("mlx_spec/drafters/mtp.py", "import mlx_spec.target", True),
        ("mlx_spec/__init__.py", "from mlx_spec.load import load", True),
        ("apps/chat/__init__.py", "from mlx_spec import load", True),
        ("mlx_spec/demo/recipe/train.py", "from mlx_spec import load", True),
        ("mlx_spec/types.py", "from mlx_spec.errors import SpecError", False),
        ("mlx_spec/verify.py", "from mlx_spec.engine import generate", False),
        ("mlx_spec/verify.py", "def f():\n from .engine import generate", False),
        ("mlx_spec/verify.py", "from . import engine", False),
        ("mlx_spec/cache/full.py", "from ..target import Target", False),
        ("mlx_spec/drafters/mtp.py", "from mlx_spec.engine import generate", False),
        ("mlx_spec/target.py", "from mlx_spec.drafters import lookup", False),
        ("mlx_spec/engine.py", "from mlx_spec import Session", False),
        ("mlx_spec/session.py", "import mlx_spec", False),
        ("mlx_spec/load.py", "from mlx_spec.apps import cli", False),
        ("mlx_spec/load.py", "from mlx_spec.demo.recipe import train", False),
        ("mlx_spec/elsewhere.py", "", False),
    ],
)
def test_layering(path, text, allowed):
    assert (list(style.layering(Source(path, text), TREE)) == []) is allowed


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("import enum\nimport mlx.core as mx", True),
        ("import numpy", False),
        ("from .errors import SpecError", False),
    ],
)
def test_types_is_a_leaf(text, allowed):
    assert (messages(style.types_is_a_leaf, text, "mlx_spec/types.py") == []) is allowed


def test_raised_budget(monkeypatch):
    text = "def f():\n" + "    x = 1\n" * 40
    monkeypatch.setitem(style.RAISED, "mlx_spec/verify.py::f", ("function", 41, "a table"))
    assert messages(style.budgets, text) == []
