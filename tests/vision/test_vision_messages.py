"""What a picture, a URL, a prompt or a checkpoint is refused with: one line, and none of the data."""

from __future__ import annotations

import io
import json
import struct
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.spans import changed, picture, tokenizer_of, vision_of

from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.errors import InvalidValue, NoVision
from mlx_spec.vision.pictures import MAX_FILE_BYTES, MAX_PICTURES, from_base64, from_data_url, read_picture
from mlx_spec.vision.vision import read_vision

SQUARE = (8, 8)


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_header(width: int, height: int) -> bytes:
    """A PNG that states a size and holds next to nothing."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size)
        + chunk(b"IDAT", zlib.compress(b"\0" * 99))
        + chunk(b"IEND", b"")
    )


def scanned(scans: int) -> bytes:
    """A JPEG that is decoded over all its pixels so many times more: 500 scans of 200 bytes took 10 s."""
    data = saved(Image.new("RGB", (64, 64), "red"), "JPEG", progressive=True)
    start = data.index(b"\xff\xda")
    return data[:start] + data[start : data.index(b"\xff", start + 2)] * scans + data[start:]


def unpacking(count: int) -> bytes:
    """A PNG with compressed metadata."""
    info = PngInfo()
    info.add_text("x", "a" * count, zip=True)
    return saved(Image.new("RGB", SQUARE, "red"), "PNG", pnginfo=info)


FILES = {
    "empty": (b"", "not a picture"),
    "text": (b"hello", "JPEG, PNG, WebP, GIF and BMP are read"),
    "TIFF": (saved(Image.new("RGB", SQUARE), "TIFF"), "TIFF, which is not read"),
    "ICO": (saved(Image.new("RGB", SQUARE), "ICO"), "ICO, which is not read"),
    "PDF": (saved(Image.new("RGB", SQUARE), "PDF"), "PDF, which is not read"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "PostScript, which is not read"),
    "SVG": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG, which is not read"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC, which is not read"),
    "AVIF": (b"\0\0\0\x18ftypavif\0\0\0\0", "AVIF, which is not read"),
    "video": (b"\0\0\0\x18ftypmp42\0\0\0\0", "video, which is not read"),
    "large PNG": (png_header(7000, 7000), "7000 x 7000 pixels: 25,000,000 of a PNG are allowed"),
    "bomb": (png_header(30_000, 30_000), "too many pixels"),
    "no width": (png_header(0, 9), "a PNG file cannot"),
    "wide bomb": (png_header(1_000_000, 1000), "too many pixels"),
    "large JPEG": (saved(Image.new("L", (8200, 8000)), "JPEG", quality=1), "64,000,000 of a JPEG"),
    "too little data": (png_header(100, 100), "damaged or cut off"),
    "cut JPEG": (saved(Image.new("RGB", (200, 200), "red"), "JPEG")[:-200], "a JPEG file cannot be decoded"),
    "cut PNG": (saved(Image.effect_noise((64, 64), 50), "PNG")[:400], "a PNG file cannot be decoded"),
    "cut WebP": (saved(Image.new("RGB", SQUARE, "red"), "WEBP")[:-9], "a WEBP file cannot"),
    "large file": (b"\0" * (MAX_FILE_BYTES + 1), "20,000,001 bytes: 20,000,000 are allowed"),
    "many scans": (scanned(101), "more than 100 scans"),
    "metadata": (unpacking(30_000_000), "holds too much besides its pixels"),
}  # fmt: skip
URLS = {
    "http://169.254.169.254/latest": "a http: URL is not fetched",
    "HTTPS://example.com/cat.png": "a https: URL is not fetched",
    "file:///etc/passwd": "a file: URL is not fetched",
    "/etc/passwd": "text that is not a URL is not fetched",
    "": "text that is not a URL",
    "aGVsbG8=": "text that is not a URL",
    "data:image/png,%89PNG": "not in base64",
    "data:image/png;base64": "not in base64",
    "data:image/png;base64,?!": "not valid base64",
    "data:image/png;base64,é": "not valid base64",
    "data:;base64," * 5000 + "AAAA": "not valid base64",
}
PREPROCESSOR = "preprocessor_config.json"
Call = Callable[[Path], object]  # in an empty folder


def prompt(text: str, variant: str = "e2b", count: int = 1) -> list[int]:
    """The tokens of a message with pictures and a text."""
    message = {"role": "user", "content": [{"type": "image"}] * count + [{"type": "text", "text": text}]}
    shown = [picture(variant, "a")] * count
    return tokenizer_of(variant).prompt([message], expand=lambda text: vision_of(variant).expand(text, shown))


def opened(variant: str, folder: Path, **processor: Any) -> None:
    """Read a checkpoint, with other settings of its processor if given."""
    if processor:
        (folder / "processor_config.json").unlink()
        (folder / PREPROCESSOR).write_text(json.dumps(processor))
    read_vision(read_checkpoint(folder), tokenizer_of(variant)).load()


def with_config(**config: Any) -> Call:
    return lambda folder: opened("e2b", changed("e2b", folder, **config))


def with_processor(variant: str, **processor: Any) -> Call:
    return lambda folder: opened(variant, changed(variant, folder), **processor)


def without_tower(folder: Path) -> None:
    (changed("e2b", folder) / "model-vision.safetensors").unlink()
    opened("e2b", folder / "copy")


def cut(name: str, array: mx.array) -> tuple[str, mx.array]:
    return name, array[:5] if "q_norm" in name else array


def placed(word: str, variant: str, folder: Path) -> None:
    prompt(f"see {word}", variant)


def stripe(folder: Path) -> None:
    assert vision_of("qwen").prepare(np.zeros((2, 400, 3), np.uint8)).grid == (1, 57)
    vision_of("qwen").prepare(np.zeros((2, 401, 3), np.uint8))


INVALID: dict[str, tuple[Call, str]] = {
    **{name: (lambda _, data=data: read_picture(data), words) for name, (data, words) in FILES.items()},
    **{url[:40]: (lambda _, url=url: from_data_url(url), words) for url, words in URLS.items()},
    "much base64": (lambda _: from_base64("A" * 2 * MAX_FILE_BYTES), "bytes: 20,000,000 are allowed"),
    "a URL as base64": (lambda _: from_base64("http://example.com/cat.png"), "not valid base64"),
    **{
        f"{word} in a text of {variant}": (partial(placed, word, variant), f"holds {word}")
        for variant, word in zip(
            ("e2b", "qwen", "gemma3", "gemma3"), ("<|image|>",) * 3 + ("<|image>",), strict=True
        )
    },
    "many pictures": (lambda _: prompt("x", count=MAX_PICTURES + 1), "21 pictures: 20 are allowed"),
    "no placeholder": (lambda _: vision_of("e2b").expand("", [picture("e2b", "a")]), "shows 0 of 1 pictures"),
    "a stripe": (stripe, "401 x 2 pixels: this model reads none longer than 200 : 1"),
}
NO_VISION: dict[str, tuple[Call, str]] = {
    "a text model": (with_config(vision_config=None), "it is a text model"),
    "no tower": (without_tower, "names a vision tower, but the checkpoint holds none"),
    "another tower": (
        with_config(model_type="qwen3_vl"),
        "tower of qwen3_vl is not read here; those of gemma3, gemma4, gemma4_unified, qwen3_5",
    ),
    "no tokens": (with_config(image_token_id=258_880), "its tokenizer lacks the tokens of pictures"),
    "GGUF": (with_config(gguf="x.gguf"), "mmproj"),
    "crops": (with_processor("gemma3", do_pan_and_scan=True), "do_pan_and_scan"),
    "another mean": (with_processor("gemma3", image_mean=[0.4, 0.5, 0.6]), "image_mean"),
    "another mean of Qwen": (with_processor("qwen", image_mean=[0.0] * 3), "image_mean"),
    "merges of three": (with_processor("qwen", merge_size=3), "merge_size 3, where 2"),
    "another form": (lambda folder: opened("e2b", changed("e2b", folder, cut)), "another vision tower than"),
}


@pytest.mark.parametrize("name", [*INVALID, *NO_VISION])
def test_messages(name: str, tmp_path: Path) -> None:
    call, words = (INVALID | NO_VISION)[name]
    with pytest.raises(InvalidValue if name in INVALID else NoVision) as caught:
        call(tmp_path)
    text = str(caught.value)
    assert words in text and "\n" not in text and len(text) < 400
    assert not any(secret in text for secret in ("BytesIO", "0x", "passwd", "example.com"))


def test_what_is_just_allowed() -> None:
    assert read_picture(scanned(80)).shape == (64, 64, 3)
    assert prompt("see <|image|>", count=0)  # without pictures it is a text


def test_without_pillow_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidValue, match=r"install '?mlx-spec\[vision\]'?"):
        read_picture(b"")
