"""The house rules: imports point down, folders and files of readable size, one name for one thing.

Each rule is a function of the sources that yields "place: problem".
"""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("mlx_spec", "apps", "convert")

MAX_LINES, MAX_FUNCTION_LINES = 500, 80
MIN_LINES = 60  # of a module with one user; a shorter one belongs to that user
MAX_ROOT_MODULES, MAX_FOLDER_MODULES = 12, 25

# Upper-case names at the top of modules: a reader must look each of them up.
MAX_CONSTANTS = 400

# A package imports from its own entry or from entries above it in this list. Modules of the root stand last.
LAYERS = (
    ("errors", "types", "prompt", "device", "demo"),
    ("checkpoint",),
    ("tokenizer",),
    ("hub",),
    ("grammar",),
    ("policy", "model", "sampling"),
    ("drafters",),
    ("distributed",),
    ("ahead",),
    ("decode",),
    ("vision",),
    ("session", "pair", "load"),
    ("",),  # mlx_spec/__init__.py, the public face
    ("cli",),
    ("apps", "convert"),
    ("__main__", "chat", "serve", "menubar"),
)

# Where the host may wait for the device. A path ending in "/" stands for all files below it.
SYNCS = {
    "mlx_spec/decode/round.py": "the one copy to the host that decides a round",
    "mlx_spec/decode/running.py": "ends each step of the rows of a span that is not text, or of a copy",
    "mlx_spec/decode/sequence.py": "ends the copy of caches before their sequence decodes on",
    "mlx_spec/model/fork_rows.py": "ends the copies of windows and states of a sequence in use",
    "mlx_spec/model/target.py": "ends a chunk of the prompt, so that its activations can be freed",
    "mlx_spec/model/rewind_points.py": "ends the copies of windows before the next pass writes into them",
    "mlx_spec/model/row_bits.py": "compares bits once on a device",
    "mlx_spec/model/layers_alone.py": "compares bits once on a device",
    "mlx_spec/model/probe.py": "asks a model once whether it reads rows together as one by one",
    "mlx_spec/distributed/ranks.py": "tells rank 0's address, ends the last pass",
    "mlx_spec/distributed/shard.py": "loads a part of a target",
    "mlx_spec/model/target_batch.py": "asks a model once whether it can share a pass; ends prompts",
    "mlx_spec/grammar/": "a grammar reads a draft before it is verified",
    "mlx_spec/ahead/drafter.py": "waits in a thread of its own",
    "mlx_spec/drafters/earlier.py": "reads text in memory, nothing of the device",
    "mlx_spec/drafters/draft_model.py": "waits in that thread, when it drafts ahead",
    "mlx_spec/drafters/medusa.py": "reads a draft that was verified already",
    "mlx_spec/sampling/logprobs.py": "the one copy that reads the log-probabilities of a round",
    "mlx_spec/load.py": "weights are read before the first question",
    "mlx_spec/policy/calibrate.py": "measures seconds",
    "mlx_spec/device/blas.py": "measures seconds",
    "mlx_spec/device/memory.py": "the wired limit changes while the device computes nothing",
    "apps/bench.py": "measures seconds",
    "apps/server/engine/prefix_cache.py": "takes the caches of a sequence that is between two answers",
    "apps/server/engine/prefix_files.py": "writes and reads the caches of such a sequence",
    "apps/roofline.py": "measures seconds",
    "apps/selftest.py": "a self-test: nothing waits for it",
    "convert/": "reads and writes checkpoints",
}

# Where a model family may be named in code.
FAMILIES = re.compile(r"gemma|llama|qwen|deepseek", re.IGNORECASE)
FAMILIES_ALLOWED = (
    "mlx_spec/checkpoint/",
    "mlx_spec/hub/",
    "mlx_spec/drafters/",
    "mlx_spec/vision/",
    "mlx_spec/load.py",
    "convert/",
    "apps/",
)

# Short files with one user, and why they stand apart. A path ending in "/" stands for all files below it.
SHORT = {
    "convert/families/": "each family of drafters has a file, which the table of families names",
    "mlx_spec/drafters/": "the same",
}

# What few need -> the files outside that know it. They import it in a function, when it is asked for.
RARE = {
    "apps.menubar": ("apps/launch.py",),
    "convert.train": ("convert/command.py",),
    "distributed": ("mlx_spec/load.py", "mlx_spec/pair.py", "apps/chat/", "apps/server/"),
    "ahead": ("mlx_spec/load.py",),
    "checkpoint.gguf": ("mlx_spec/hub/download.py", "mlx_spec/tokenizer/added_tokens.py"),
    **{
        f"drafters.{family}": ("convert/families/",)
        for family in ("dflash", "dspark", "eagle3", "gemma4", "medusa", "mlp_speculator", "mtp")
    },
}
AT_ONCE = (
    "apps/launch.py",  # starts the server process of the menu bar
    "convert/families/",  # each converts the family that it imports
)

# Class names used twice on purpose.
SAME_NAME = {
    "Options": "the options of a program, in its own file",
    "ToolField": "a tool as one protocol writes it",
    "ToolChoiceField": "the choice of tools as one protocol writes it",
}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Problems = Iterator[str]


@dataclass(frozen=True)
class Source:
    """One file; `path` is relative to the repository."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return all nodes of the tree, of which a walk takes longer than to parse it."""
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """Return the dotted name under mlx_spec; "" for the package itself."""
        parts = self.path.removesuffix(".py").split("/")
        parts = parts[1:] if parts[0] == "mlx_spec" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_face(self) -> bool:
        return self.path.endswith(("__init__.py", "__main__.py"))

    def imports(self, modules: frozenset[str], *, at_once: bool = False) -> set[str]:
        """Return the modules under mlx_spec that this file imports, or that it does when it is imported."""
        found: set[str] = set()
        parts = self.module.split(".") if self.module else []
        package = parts if self.path.endswith("__init__.py") else parts[:-1]
        for node in self.tree.body if at_once else self.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                up = ["mlx_spec", *package[: len(package) - node.level + 1]] if node.level else []
                origin = ".".join(part for part in (*up, node.module) if part)
                for alias in node.names:
                    inner = f"{origin}.{alias.name}"
                    found.add(inner if inner.removeprefix("mlx_spec.") in modules else origin)
        ours = {name for name in found if name == "mlx_spec" or name.startswith("mlx_spec.")}
        return {name.removeprefix("mlx_spec").removeprefix(".") for name in ours} - {self.module}


@pytest.fixture(scope="module")
def sources() -> Iterator[list[Source]]:
    """Every Python file of the packages once; symlinks are not followed."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    gc.disable()  # trees are a million objects, and a collection walks all that were made so far
    yield [Source(p.relative_to(ROOT).as_posix(), p.read_text()) for p in paths if p.resolve() == p]
    gc.enable()


# --- rules of one file


def no_probing(source: Source) -> Problems:
    """A missing attribute is an error, not a case."""
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" as probe), args=[_, ast.Constant(), *_]):
                yield f"{source.path}:{node.lineno}: {probe} with a literal name"


def readable_sizes(source: Source) -> Problems:
    if (lines := source.text.count("\n")) > MAX_LINES:
        yield f"{source.path}: {lines} lines"
    for node in source.nodes:
        if isinstance(node, FUNCTIONS):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{source.path}:{node.lineno}: {node.name} has {length} lines"


def finished(source: Source) -> Problems:
    for number, line in enumerate(source.text.splitlines(), 1):
        if mark := re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield f"{source.path}:{number}: {mark[0]}"


def few_waits(source: Source) -> Problems:
    """Waits for the device outside the places where that is meant."""
    if source.path.startswith(tuple(SYNCS)):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            waits = node.func.attr in ("item", "tolist") and not owner.startswith("np.")
            if waits or (owner in ("mx", "mlx.core") and node.func.attr in ("eval", "synchronize")):
                yield f"{source.path}:{node.lineno}: .{node.func.attr}() waits for the device"


def one_device(source: Source) -> Problems:
    """MLX has one default device for all threads, which only the start of a process sets."""
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="mx"), attr=name)):
                sets = name in ("set_default_device", "set_default_stream", "stream", "new_stream")
                if sets and source.path != "mlx_spec/device/__init__.py":
                    yield f"{source.path}:{node.lineno}: mx.{name} sets the device of all threads"
                if name == "device_info" and not source.path.startswith("mlx_spec/device/"):
                    yield f"{source.path}:{node.lineno}: ask mlx_spec.device, which names the device"


def no_families(source: Source) -> Problems:
    """Names of model families in code; docstrings and comments may cite them."""
    if source.path.startswith(FAMILIES_ALLOWED):
        return
    documents = {
        node.body[0].value
        for node in source.nodes
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None
    }
    for node in source.nodes:
        for word in () if node in documents else _words(node):
            if found := FAMILIES.search(word):
                yield f"{source.path}:{node.lineno}: names {found[0].lower()}"


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


def sentences(source: Source) -> Problems:
    """A docstring is a sentence, not a clause."""
    for node in source.nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            text = ast.get_docstring(node) or ""
            if re.match(r"(What|Whether|Of|As|That|Who|How many|So many) ", text):
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield f"{source.path}:{line}: begins with {text.split()[0]!r}"


FILE_RULES: tuple[Callable[[Source], Problems], ...] = (
    no_probing,
    readable_sizes,
    finished,
    few_waits,
    one_device,
    no_families,
    sentences,
)


@pytest.mark.parametrize("rule", FILE_RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Callable[[Source], Problems], sources: list[Source]) -> None:
    problems = [problem for source in sources for problem in rule(source)]
    assert not problems, "\n".join(["", *problems])


# --- rules of the whole


def imports_point_down(sources: Sequence[Source]) -> Problems:
    modules = frozenset(source.module for source in sources)
    for source in sources:
        own = _layer(source.module)
        if own is None:
            yield f"{source.path} has no place in LAYERS"
            continue
        for name in sorted(source.imports(modules)):
            other = _layer(name)
            if other is None or other > own:
                yield f"{source.path} must not import {name or 'mlx_spec'}"


def _layer(module: str) -> int | None:
    entries = {entry: rank for rank, layer in enumerate(LAYERS) for entry in layer}
    if not module:
        return entries[""]
    fitting = [entry for entry in entries if entry and (module == entry or module.startswith(entry + "."))]
    return entries[max(fitting, key=len)] if fitting else None


def few_know_what_few_need(sources: Sequence[Source]) -> Problems:
    modules = frozenset(source.module for source in sources)
    for source in sources:
        if _rare(source.module) is None:
            at_once = source.imports(modules, at_once=True)
            for name in sorted(source.imports(modules)):
                room = _rare(name)
                if room is not None and not source.path.startswith(RARE[room]):
                    yield f"{source.path} must not import {name}"
                elif room is not None and name in at_once and not source.path.startswith(AT_ONCE):
                    yield f"{source.path} imports {name} before it is asked for"


def _rare(module: str) -> str | None:
    """Return the entry of `RARE` that a module belongs to; None for others."""
    return next((room for room in RARE if re.match(rf"{re.escape(room)}[\w.]*$", module)), None)


def folders_are_small(sources: Sequence[Source]) -> Problems:
    count = Counter(source.path.rpartition("/")[0] for source in sources)
    for folder, modules in sorted(count.items()):
        most = MAX_ROOT_MODULES if folder in PACKAGES else MAX_FOLDER_MODULES
        if modules > most:
            yield f"{folder} has {modules} modules, at most {most} are allowed"


def short_files_have_two_users(sources: Sequence[Source]) -> Problems:
    modules = frozenset(source.module for source in sources)
    users = Counter(name for source in sources for name in source.imports(modules))
    for source in sources:
        lines = source.text.count("\n")
        is_entry = source.path.count("/") == 1 and users[source.module] == 0  # `python -m mlx_spec.chat`
        excused = source.path.startswith(tuple(SHORT)) or source.is_face or is_entry
        if lines < MIN_LINES and users[source.module] < 2 and not excused:
            yield f"{source.path}: {lines} lines for {users[source.module]} user"


def one_class_a_name(sources: Sequence[Source]) -> Problems:
    places = defaultdict(list)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{source.path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1 and name not in SAME_NAME:
            yield f"class {name}: {', '.join(found)}"


def few_constants(sources: Sequence[Source]) -> Problems:
    constants = [name for source in sources for node in source.tree.body for name in _constants(node)]
    if len(constants) > MAX_CONSTANTS:
        yield (
            f"{len(constants)} module constants, at most {MAX_CONSTANTS} are allowed: write a number of one "
            "function there, as a default argument or beside its reason"
        )


def _constants(node: ast.stmt) -> list[str]:
    """Return the upper-case names that a statement of a module assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [name.id for name in names if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name.id)]


HOUSE_RULES: tuple[Callable[[Sequence[Source]], Problems], ...] = (
    imports_point_down,
    few_know_what_few_need,
    folders_are_small,
    short_files_have_two_users,
    one_class_a_name,
    few_constants,
)


@pytest.mark.parametrize("rule", HOUSE_RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(
    rule: Callable[[Sequence[Source]], Problems], sources: list[Source]
) -> None:
    problems = list(rule(sources))
    assert not problems, "\n".join(["", *problems])


def test_imports_go_in_no_circle(sources: list[Source]) -> None:
    modules = frozenset(source.module for source in sources)
    graph = {source.module: source.imports(modules) for source in sources}
    TopologicalSorter(graph).prepare()  # raises CycleError
    folders = defaultdict(set)
    for module, imported in graph.items():
        folders[_folder(module)] |= {_folder(name) for name in imported} - {_folder(module)}
    TopologicalSorter(folders).prepare()


def _folder(module: str) -> str:
    """Return the package of a module; a module of the root stands for itself."""
    return module.split(".")[0]


def test_tests_need_no_file_that_only_linux_has() -> None:
    """macOS has no /dev/full and no /proc, so a test that names one says what it does there."""
    missing = re.compile(r"/dev/full|/proc/")
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in ("test_house.py", "mac.py") and missing.search(text := path.read_text()):
            for node in ast.parse(text).body:
                statement = ast.unparse(node)
                is_guarded = "exists()" in statement or "sys.platform" in statement
                assert is_guarded or not missing.search(statement), f"{path}:{node.lineno}"


def test_no_test_imports_a_test_or_a_benchmark() -> None:
    """Helpers that several files use lie in tests/support."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    programs = {path.stem for path in tests if path.stem.startswith("test_")}
    programs |= {path.stem for path in (ROOT / "benchmarks").iterdir()}
    statement = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)|import[ \t]+([\w., \t]+))", re.MULTILINE)
    problems = []
    for path in tests:  # by lines: to parse all tests takes a second
        for origin, imported in statement.findall(path.read_text()):
            names = [name.split()[0] for name in (origin or imported).split(",")]
            problems += [
                f"{path.relative_to(ROOT)} imports {name}" for name in names if name.split(".")[0] in programs
            ]
    assert not problems, "\n".join(["", *problems])


def test_the_tests_that_the_security_page_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / ".github" / "SECURITY.md").read_text())
    assert len(named) > 20
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
    assert not missing, "\n".join(["", *missing])


def test_sources_are_found(sources: list[Source]) -> None:
    assert {"types", "errors", "decode.round", "apps.cli", "convert"} <= {source.module for source in sources}
    assert not any(s.path.startswith(("mlx_spec/apps", "mlx_spec/convert")) for s in sources)
