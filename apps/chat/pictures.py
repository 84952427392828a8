"""Pictures of messages: files that are named or dropped on the terminal, and kept as data URLs.

A part with a picture has two fields. `image` is prepared for the vision tower of the present model. `url` is
the file as a data URL; another model prepares it again from that.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mlx_spec.errors import InvalidValue, NotFound, NoVision
from mlx_spec.pair import Pair
from mlx_spec.vision.pictures import FORMATS, MAX_FILE_BYTES, READ, from_data_url, is_heic, read_picture

Part = Mapping[str, Any]
Content = str | Sequence[Part]  # of a message


def dropped(text: str) -> tuple[list[Path], str]:
    """Return the picture files whose paths stand at the beginning of a text, and the rest of the text."""
    if (whole := _picture_file(text.strip())) is not None:
        return [whole], ""
    files = list[Path]()
    # A path as shells and terminals write it: in quotes, or with backslashes before spaces.
    word = r"""\s*(?:'([^']*)'|"((?:\\.|[^"\\])*)"|((?:\\.|[^\s'"\\])+))(?=\s|$)"""
    while match := re.match(word, text):
        single, double, bare = match.groups()
        name = re.sub(r"\\(.)", r"\1", bare if double is None else double) if single is None else single
        if (file := _picture_file(name)) is None:
            break
        files.append(file)
        text = text[match.end() :]
    return files, text.strip()


def read_part(file: Path, pair: Pair) -> tuple[dict[str, Any], str]:
    """Return a picture as a part of a message, and a note about it.

    Raises NotFound, InvalidValue, and NoVision if the target reads no pictures.
    """
    vision = pair.vision
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise NotFound(f"{file} cannot be read ({error.strerror}): give a picture") from error
    try:
        if is_heic(data):
            data = _as_jpeg(file)
        pixels = read_picture(data)
    except InvalidValue as error:
        raise InvalidValue(f"{file}: {error}") from error
    picture, (height, width, _) = vision.prepare(pixels), pixels.shape
    note = f"{file.name}, {width} x {height}, {picture.count} tokens"
    return {"type": "image", "image": picture, "url": _data_url(data)}, note


def _as_jpeg(file: Path) -> bytes:
    """Return a HEIC file as JPEG, by a program of macOS. Raises InvalidValue."""
    if (program := shutil.which("sips")) is None:
        raise InvalidValue("HEIC is read on macOS alone: convert it to JPEG first")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "picture.jpg"
        command = [program, "-s", "format", "jpeg", str(file.absolute()), "--out", str(out)]
        try:
            subprocess.run(command, capture_output=True, check=True, timeout=60)
            return out.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            raise InvalidValue("macOS cannot read this HEIC file: convert it to JPEG first") from error


def ready(content: Content, pair: Pair) -> Content:
    """Return a message whose pictures are prepared for a target. Raises InvalidValue and NoVision."""
    if isinstance(content, str):
        return content
    return [{**part, "image": _picture(part, pair)} if _is_image(part) else part for part in content]


def ready_turns(turns: Sequence[Mapping[str, Any]], pair: Pair) -> list[dict[str, Any]]:
    """Return turns whose pictures are prepared for a target. Raises InvalidValue.

    If it reads no pictures, they keep only their files.
    """
    ready_ones = []
    for turn in turns:
        content = turn["content"]
        try:
            ready_ones.append({**turn, "content": ready(content, pair)})
        except NoVision:
            kept = [{"type": "image", "image": None, "url": _url(p)} if _is_image(p) else p for p in content]
            ready_ones.append({**turn, "content": kept})
    return ready_ones


def stored(content: Content) -> Content:
    """Return a message in the form of files: pictures are data URLs."""
    if isinstance(content, str):
        return content
    return [{"type": "image", "image": _url(part)} if _is_image(part) else dict(part) for part in content]


def is_stored(content: object) -> bool:
    """Return True if this is the content of a message in the form of `stored`."""
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(
        isinstance(part, dict)
        and any(part.get("type") == key and isinstance(part.get(key), str) for key in ("text", "image"))
        for part in content
    )


def words(content: Content) -> str:
    """Return the text of a message."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if not _is_image(part))


def shown(content: Content) -> str:
    """Return a message in one line of text for lists, with [picture] for each picture."""
    if isinstance(content, str):
        return content
    return " ".join("[picture]" if _is_image(part) else part["text"] for part in content)


def with_text(content: Content, text: str) -> Content:
    """Return a message with the same pictures and another text; no text if it is empty."""
    pictures = [] if isinstance(content, str) else [part for part in content if _is_image(part)]
    if not pictures:
        return text
    return [*pictures, {"type": "text", "text": text}] if text else pictures


def _picture(part: Part, pair: Pair) -> object:
    vision = pair.vision
    return vision.prepare(read_picture(from_data_url(_url(part))))


def _url(part: Part) -> str:
    return str(part.get("url") or part["image"])


def _is_image(part: Part) -> bool:
    return bool(part["type"] == "image")


def _picture_file(name: str) -> Path | None:
    if name.startswith("file://"):
        name = unquote(name.removeprefix("file://"))
    # Files that count as pictures. Reading one of a kind that is not supported fails later, with a reason.
    suffixes = ".jpg .jpeg .png .webp .gif .bmp .heic .heif .avif .tif .tiff".split()
    if "\n" in name or Path(name).suffix.lower() not in suffixes:
        return None
    try:
        path = Path(name).expanduser()
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, an unknown user
        return None


def _data_url(data: bytes) -> str:
    header = READ.match(data)
    assert header is not None and header.lastindex is not None, "a picture that was read"
    return f"data:image/{FORMATS[header.lastindex - 1].lower()};base64,{base64.b64encode(data).decode()}"
