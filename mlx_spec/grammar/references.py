"""References of a JSON schema: by pointer, `$id`, `$anchor` and the dynamic ones, all within the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from mlx_spec.grammar.schema import escaped

DYNAMIC = ("$dynamicRef", "$recursiveRef")
# Keywords whose values are not schemas: a key `$id` in them is data.
_VALUES = frozenset(("enum", "const", "default", "examples", "example"))


class References:
    """Finds what references in a schema name. Returns JSON pointers such as "#/$defs/Point"."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._pointers: dict[str, str] = {}  # absolute URI of a resource or an anchor -> its pointer
        # Pointer -> the URI that its references are relative to.
        self._bases = dict(self._walk(root, "#", ""))

    def target(self, reference: str, pointer: str) -> str | None:
        """Return the pointer to what a reference at `pointer` names; None if it is not within the schema."""
        target = urljoin(self._base(pointer), reference) if not reference.startswith("#") else None
        base, fragment = urldefrag(self._base(pointer) + reference if target is None else target)
        fragment = unquote(fragment)
        start = "#" if not base else self._pointers.get(base)
        if start is None:
            return None
        if not fragment or fragment == "/":
            return start
        if not fragment.startswith("/"):
            return self._pointers.get(f"{base}#{fragment}")
        named = start + fragment
        return named if self._has(named) else None

    def at(self, pointer: str) -> Any:
        """Return the value that a pointer names. Raises KeyError."""
        value = self.root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, Mapping):
                value = value[key]
            else:
                raise KeyError(pointer)
        return value

    def _has(self, pointer: str) -> bool:
        try:
            self.at(pointer)
        except KeyError:
            return False
        return True

    def _base(self, pointer: str) -> str:
        while pointer not in self._bases:
            pointer = pointer.rpartition("/")[0] or "#"
        return self._bases[pointer]

    def _walk(self, value: Any, pointer: str, base: str) -> Iterator[tuple[str, str]]:
        """Yield the pointers to values that change the base URI, and note all pointers with a name."""
        if isinstance(value, Mapping):
            named = value.get("$id", value.get("id") if pointer == "#" or "properties" in value else None)
            if isinstance(named, str) and not named.startswith("#"):
                base = urldefrag(urljoin(base, named))[0]
                self._pointers.setdefault(base, pointer)
                yield pointer, base
            elif isinstance(named, str):
                self._pointers.setdefault(base + named, pointer)
            anchors = ("$anchor", "$dynamicAnchor")
            for keyword in anchors:
                if isinstance(value.get(keyword), str):
                    self._pointers.setdefault(f"{base}#{value[keyword]}", pointer)
            if pointer == "#":
                yield pointer, base
        children = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, child in children:
            if isinstance(child, Mapping | list) and (key not in _VALUES or pointer.endswith("/properties")):
                yield from self._walk(child, f"{pointer}/{escaped(str(key))}", base)
