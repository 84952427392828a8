"""Read image files from strangers: five formats, the size checked before decoding, upright, on white.

A picture comes as bytes or in base64; nothing is fetched. Pillow decodes it, one picture at a time, and is
imported for the first one. Errors never quote the data.

Decoding a picture of MAX_PIXELS takes at most 550 MB of memory: in WebP with transparency, or as a
progressive JPEG. Other WebP and PNG take 450, others with transparency 400, and without 270. The pixels of a
picture take 75.
"""

from __future__ import annotations

import base64
import io
import re
import threading
import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np

from mlx_spec.device import install_command
from mlx_spec.errors import InvalidValue

MAX_PICTURES = 20  # of one prompt
MAX_FILE_BYTES = 20_000_000  # of one picture
MAX_PIXELS = 25_000_000  # of one picture; as pixels they take 75 MB
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# The first bytes of files: of FORMATS in their order, and of others, which are named to help.
READ = re.compile(rb"(\xff\xd8\xff)|(\x89PNG)|(RIFF.{4}WEBP)|(GIF8)|(BM)", re.DOTALL)
OTHERS = (
    (re.compile(rb".{4}ftyp(hei|hev|mif1|msf1)", re.DOTALL), "HEIC"),
    (re.compile(rb".{4}ftypavi", re.DOTALL), "AVIF"),
    (re.compile(rb"II\*\0|MM\0\*"), "TIFF"),
    (re.compile(rb"\s*%PDF"), "PDF"),
    (re.compile(rb"%!PS|\xc5\xd0\xd3\xc6"), "PostScript"),
    (re.compile(rb"\0\0[\1\2]\0"), "ICO"),
    (re.compile(rb"\s*<(svg|\?xml|!DOCTYPE svg)"), "SVG"),
    (re.compile(rb".{4}ftyp", re.DOTALL), "video"),
)
_decoding = threading.Lock()


def missing_package() -> str | None:
    """Return why no picture can be read on this machine, None if Pillow is there."""
    if find_spec("PIL") is not None:
        return None
    return f"pictures need Pillow, which is not installed: {install_command('vision')}"


def from_data_url(url: str) -> bytes:
    """Return the file in a data URL. Others are refused by their scheme: nothing is fetched or opened.

    Raises InvalidValue.
    """
    if url[:5].lower() != "data:":
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]{0,15}):", url)
        named = f"a {scheme[1].lower()}: URL" if scheme else "text that is not a URL"
        raise InvalidValue(f"{named} is not fetched: send the picture itself, as data:image/png;base64,...")
    head, comma, data = url.partition(",")
    if not comma or not head.replace(" ", "").lower().endswith(";base64"):
        raise InvalidValue("a data URL is not in base64: send data:image/png;base64,... or another type")
    return _decoded(data)


def from_base64(text: str) -> bytes:
    """Return the file in a base64 text, which may be a data URL. Raises InvalidValue."""
    return from_data_url(text) if text[:5].lower() == "data:" else _decoded(text)


def _decoded(text: str) -> bytes:
    if len(text) > MAX_FILE_BYTES * 3 // 2:  # base64 has four characters for three bytes, and line breaks
        raise InvalidValue(_too_many_bytes(len(text) * 3 // 4))
    packed = "".join(text.split()).rstrip("=").translate({ord("-"): "+", ord("_"): "/"})  # base64url, too
    try:
        return base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except ValueError as error:  # binascii.Error is one
        raise InvalidValue("a picture is not valid base64: encode its file again") from error


def read_picture(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the pixels of an image file, [H, W, 3] uint8. Raises InvalidValue.

    An animation shows its first frame, EXIF turns a photo, and white is behind what is transparent. A JPEG
    of more than MAX_PIXELS is read at half its size or less.
    """
    if (problem := missing_package()) is not None:
        raise InvalidValue(problem)
    if len(data) > MAX_FILE_BYTES:
        raise InvalidValue(_too_many_bytes(len(data)))
    max_scans = 100  # of a progressive JPEG; each is decoded over all pixels, and cameras write about 10
    if data.startswith(b"\xff\xd8\xff") and data.count(b"\xff\xda") > max_scans:
        raise InvalidValue(f"a JPEG has more than {max_scans} scans: save it again")
    with _decoding, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of large pictures and of odd metadata
        return _read(data)


def _read(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InvalidValue(
            f"a picture has too many pixels: {MAX_PIXELS:,} are allowed; scale it down"
        ) from error
    except Exception as error:  # whatever the readers of headers raise
        raise InvalidValue(_unreadable(data)) from error
    with picture:
        width, height = picture.size
        # A JPEG may have more pixels, because the decoder can halve it as it reads it.
        limit = 64_000_000 if picture.format in ("JPEG", "MPO") else MAX_PIXELS  # MPO is JPEGs in a row
        if not 0 < width * height <= limit:
            raise InvalidValue(
                f"a picture has {width} x {height} pixels: {limit:,} of a {picture.format} are allowed; "
                "scale it down"
            )
        if width * height > MAX_PIXELS:
            picture.draft(None, (width // 2, height // 2))
        try:
            return _pixels(picture)
        except Exception as error:  # whatever the decoders raise
            raise InvalidValue(_damaged(str(picture.format))) from error


def _pixels(picture: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode a picture. The colours are those that a page would show on white."""
    from PIL import Image, ImageOps

    picture.load()
    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith("I"):  # grey in 16 bits, which conversion would clip
        grey = np.asarray(picture)
        clear = grey == picture.info.get("transparency", -1)
        return np.repeat(np.where(clear, 255, grey >> 8).astype(np.uint8)[..., None], 3, axis=-1)
    if picture.has_transparency_data:
        picture = _converted(picture, "RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = _converted(picture, "RGB")  # the one before goes now
    return np.asarray(picture)


def _converted(picture: Any, mode: str) -> Any:
    """Return a picture in another mode, without a copy of one that is in it: each takes 100 MB."""
    return picture if picture.mode == mode else picture.convert(mode)


def is_heic(data: bytes) -> bool:
    """Return True for a photo as iPhones keep it, which Pillow does not read."""
    (start, _), *_ = OTHERS
    return start.match(data) is not None


def _unreadable(data: bytes) -> str:
    """Return the error for a file without a header of a picture."""
    if (header := READ.match(data)) is not None and header.lastindex is not None:
        return _damaged(FORMATS[header.lastindex - 1])
    name = next((name for start, name in OTHERS if start.match(data)), None)
    named = "a file is not a picture" if name is None else f"a picture is {name}, which is not read"
    return f"{named}: JPEG, PNG, WebP, GIF and BMP are read; send JPEG or PNG"


def _damaged(format_name: str) -> str:
    return (
        f"a {format_name} file cannot be decoded: it is damaged or cut off, or holds too much besides its "
        "pixels; save it again"
    )


def _too_many_bytes(size: int) -> str:
    return f"a picture has {size:,} bytes: {MAX_FILE_BYTES:,} are allowed; scale it down or save it as JPEG"
