"""Regular expressions of JSON schemas (ECMA 262, found anywhere in a string) as terminals."""

from __future__ import annotations

from mlx_spec.apps.server.tools.lark import regex

ANY = "(?s:.*)"
DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {  # RFC 3339, 4122 and 2673
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": f"({BYTE}\\.){{3}}{BYTE}",
    "email": "[a-zA-Z0-9_+-]+(\\.[a-zA-Z0-9_+-]+)*@[a-zA-Z0-9-]+(\\.[a-zA-Z0-9-]+)+",
}
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]"}  # ASCII in ECMA 262
INSIDE = {"d": "0-9", "w": "A-Za-z0-9_"}


class Unanchored(ValueError):
    """An anchor inside the pattern, or something that no terminal can say."""


def terminal(pattern: str) -> str:
    """`pattern` as a terminal. Raises Unanchored for anchors other than at its ends."""
    opens, closes = pattern.startswith("^"), pattern.endswith("$") and not _escaped(pattern, len(pattern) - 1)
    inner = pattern[1:] if opens else pattern
    inner = inner[:-1] if closes else inner
    found = _translated(inner)
    if (opens or closes) and _divides(inner):
        raise Unanchored(pattern)  # an anchor of one alternative only
    return regex(("" if opens else ANY) + f"({found})" + ("" if closes else ANY))


def _escaped(pattern: str, at: int) -> bool:
    return (at - len(pattern[:at].rstrip("\\"))) % 2 == 1


def _translated(pattern: str) -> str:
    """With ASCII classes. Raises Unanchored for an anchor."""
    found, inside, at = "", False, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            found += _escape(pattern[at + 1 : at + 2], inside=inside)
            at += 2
            continue
        if not inside and character in "^$":
            raise Unanchored(pattern)
        inside = character == "[" or (inside and character != "]")
        found += character
        at += 1
    return found


def _escape(kind: str, *, inside: bool) -> str:
    if not kind or kind in "bB" or (inside and kind in "DW"):
        raise Unanchored(kind)
    return (INSIDE if inside else CLASSES).get(kind, "\\" + kind)


def _divides(pattern: str) -> bool:
    """Whether there is an alternative outside of all groups."""
    depth, inside, at = 0, False, 0
    while at < len(pattern):
        character = pattern[at]
        at += 2 if character == "\\" else 1
        if inside or character == "[":
            inside = character != "]"
            continue
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False
