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
    """The places in a schema that references can name. A place is a JSON pointer such as "#/$defs/Point"."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._places: dict[str, str] = {}  # absolute URI of a resource or an anchor -> its place
        self._bases = dict(self._walk(root, "#", ""))  # place -> the URI that its references are relative to

    def place(self, reference: str, place: str) -> str | None:
        """Return the place that a reference at `place` points to; None if it is not within the schema."""
        target = urljoin(self._base(place), reference) if not reference.startswith("#") else None
        base, fragment = urldefrag(self._base(place) + reference if target is None else target)
        fragment = unquote(fragment)
        start = "#" if not base else self._places.get(base)
        if start is None:
            return None
        if not fragment or fragment == "/":
            return start
        if not fragment.startswith("/"):
            return self._places.get(f"{base}#{fragment}")
        found = start + fragment
        return found if self._has(found) else None

    def at(self, place: str) -> Any:
        """Return the value at a place. Raises KeyError."""
        found = self.root
        for part in place.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping):
                found = found[key]
            else:
                raise KeyError(place)
        return found

    def _has(self, place: str) -> bool:
        try:
            self.at(place)
        except KeyError:
            return False
        return True

    def _base(self, place: str) -> str:
        while place not in self._bases:
            place = place.rpartition("/")[0] or "#"
        return self._bases[place]

    def _walk(self, given: Any, place: str, base: str) -> Iterator[tuple[str, str]]:
        """Yield the places at which the base URI changes, and note all named places."""
        if isinstance(given, Mapping):
            named = given.get("$id", given.get("id") if place == "#" or "properties" in given else None)
            if isinstance(named, str) and not named.startswith("#"):
                base = urldefrag(urljoin(base, named))[0]
                self._places.setdefault(base, place)
                yield place, base
            elif isinstance(named, str):
                self._places.setdefault(base + named, place)
            anchors = ("$anchor", "$dynamicAnchor")
            for keyword in anchors:
                if isinstance(given.get(keyword), str):
                    self._places.setdefault(f"{base}#{given[keyword]}", place)
            if place == "#":
                yield place, base
        children = given.items() if isinstance(given, Mapping) else enumerate(given)
        for key, each in children:
            if isinstance(each, Mapping | list) and (key not in _VALUES or place.endswith("/properties")):
                yield from self._walk(each, f"{place}/{escaped(str(key))}", base)
