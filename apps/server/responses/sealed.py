"""Thoughts in the field that clients keep for encrypted ones.

A client that keeps no state on a server, and none of the thoughts themselves, sends this field back. Nothing
is secret here, and nothing is encrypted: it is the text in base64, with a mark that tells whose it is.
"""

from __future__ import annotations

import base64
import binascii

MARK = "mlx-spec."


def sealed(thoughts: str) -> str:
    """The field of `thoughts`."""
    return MARK + base64.urlsafe_b64encode(thoughts.encode()).decode()


def opened(field: str | None) -> str:
    """The thoughts of a field; none of one that another server wrote."""
    if field is None or not field.startswith(MARK):
        return ""
    try:
        return base64.urlsafe_b64decode(field.removeprefix(MARK)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
