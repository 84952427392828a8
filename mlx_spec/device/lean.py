"""Import mlx-lm's model code without transformers: half of a start, and only mlx-lm itself uses it.

mlx-lm's `__init__` and `mlx_lm.utils` import its programs and tokenizers. Until something asks for a name
that they define, the package is known without having run. `utils` has stand-ins for two names of tokenizers.
Then all of it is imported, so other users of mlx-lm in this process notice nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """The package before its `__init__` ran."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        complete()
        return getattr(self, name)


class _Wrapped(Loader):
    """Loads the package without running it, and `utils` with stand-ins."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _Package(spec.name) if spec.name == "mlx_lm" else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "mlx_lm":
            return
        name, stand_in = "mlx_lm.tokenizer_utils", ModuleType("tokenizer_utils")
        stand_in.__dict__.update(TokenizerWrapper=object, load=_load)
        sys.modules[name] = stand_in
        try:
            self.loader.exec_module(module)
        finally:
            del sys.modules[name]


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != "mlx_lm" or (rest and not isinstance(sys.modules.get("mlx_lm"), _Package)):
            return None
        used_here = ("models", "utils", "tool_parsers")
        if rest and rest.partition(".")[0] not in used_here:
            complete()
        elif rest in ("", "utils"):
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Wrapped(spec.loader)
            return spec
        return None


def complete() -> None:
    """Run what was left out."""
    package = sys.modules["mlx_lm"]
    if not isinstance(package, _Package):
        return
    package.__class__ = ModuleType  # type: ignore[assignment]  # its class has one method more
    spec = package.__spec__
    assert spec is not None and isinstance(spec.loader, _Wrapped)
    spec.loader = spec.loader.loader
    spec.loader.exec_module(package)
    utils, tokenizers = (import_module(f"mlx_lm.{name}") for name in ("utils", "tokenizer_utils"))
    vars(utils).update(TokenizerWrapper=tokenizers.TokenizerWrapper, _load_tokenizer=tokenizers.load)


def _load(*arguments: Any, **options: Any) -> Any:
    complete()
    return import_module("mlx_lm.tokenizer_utils").load(*arguments, **options)


def install() -> None:
    """Import mlx-lm in this way from now on, unless it was imported already."""
    if "mlx_lm" not in sys.modules:
        sys.meta_path.insert(0, _Finder())
