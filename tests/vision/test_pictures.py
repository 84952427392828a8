"""Image files from strangers: every one is read as a person would see it."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from mlx_spec.vision.pictures import from_base64, from_data_url, read_picture

RED, WHITE, BLUE = [255, 0, 0], [255, 255, 255], [0, 0, 255]
SQUARE = (8, 8)


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def palette() -> Image.Image:
    picture = Image.new("P", SQUARE, 0)
    picture.putpalette([0, 255, 0] * 256)
    return picture


def grey16(value: int) -> Image.Image:
    return Image.fromarray(np.full(SQUARE, value, np.uint16))


def blue_then_red() -> tuple[Image.Image, dict[str, Any]]:
    return Image.new("RGB", SQUARE, "blue"), {
        "save_all": True,
        "append_images": [Image.new("RGB", SQUARE, "red")],
    }


def two_photos() -> tuple[Image.Image, str, dict[str, Any]]:
    """A JPEG with another one behind it, as phones write them."""
    red, blue = Image.new("RGB", SQUARE, "red"), Image.new("RGB", SQUARE, "blue")
    return red, "MPO", {"save_all": True, "append_images": [blue]}


@pytest.mark.parametrize(
    ("picture", "kind", "options", "colour"),
    [
        (Image.new("RGB", SQUARE, "red"), "PNG", {}, RED),
        (Image.new("RGB", SQUARE, "red"), "BMP", {}, RED),
        (Image.new("RGB", SQUARE, "red"), "GIF", {}, RED),
        (Image.new("RGB", SQUARE, "red"), "WEBP", {"lossless": True}, RED),
        (Image.new("RGB", SQUARE, "red"), "JPEG", {}, RED),
        (Image.new("CMYK", SQUARE, (0, 255, 255, 0)), "JPEG", {}, RED),
        (*two_photos(), RED),
        (Image.new("1", SQUARE, 1), "PNG", {}, WHITE),
        (Image.new("L", SQUARE, 7), "PNG", {}, [7, 7, 7]),
        (Image.new("RGBA", SQUARE, (255, 0, 0, 0)), "PNG", {}, WHITE),
        (Image.new("RGBA", SQUARE, (255, 0, 0, 128)), "PNG", {}, [255, 127, 127]),
        (Image.new("RGBA", SQUARE, (255, 0, 0, 0)), "WEBP", {"lossless": True}, WHITE),
        (Image.new("LA", SQUARE, (0, 0)), "PNG", {}, WHITE),
        (palette(), "PNG", {}, [0, 255, 0]),
        (palette(), "PNG", {"transparency": 0}, WHITE),
        (palette(), "GIF", {"transparency": 0}, WHITE),
        (Image.new("RGB", SQUARE, "red"), "PNG", {"transparency": (255, 0, 0)}, WHITE),
        (grey16(65535), "PNG", {}, WHITE),
        (grey16(256), "PNG", {}, [1, 1, 1]),
        (grey16(256), "PNG", {"transparency": 256}, WHITE),
        (blue_then_red()[0], "GIF", blue_then_red()[1], BLUE),
        (blue_then_red()[0], "WEBP", {**blue_then_red()[1], "lossless": True}, BLUE),
        (Image.new("RGB", (1, 1), "red"), "PNG", {}, RED),
        (Image.new("RGB", (1, 20_000), "red"), "PNG", {}, RED),
    ],
)  # fmt: skip
def test_a_picture_is_read_as_it_looks_on_white(
    picture: Image.Image, kind: str, options: dict[str, Any], colour: list[int]
) -> None:
    pixels = read_picture(saved(picture, kind, **options))
    assert pixels.dtype == np.uint8
    assert pixels.shape == (*picture.size[::-1], 3)
    assert (np.abs(pixels - np.array(colour)) <= 1).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_turns_a_photo(kind: str, orientation: int) -> None:
    """The corner that is red in the photo is red in the pixels, wherever the camera was held."""
    upright = Image.new("RGB", (48, 16), "white")
    upright.paste("red", (0, 0, 16, 16))
    turns = Image.Transpose
    stored = {  # what a camera writes for each orientation
        1: [], 2: [turns.FLIP_LEFT_RIGHT], 3: [turns.ROTATE_180], 4: [turns.FLIP_TOP_BOTTOM],
        5: [turns.TRANSPOSE], 6: [turns.ROTATE_90], 7: [turns.TRANSVERSE], 8: [turns.ROTATE_270],
    }[orientation]  # fmt: skip
    picture = upright
    for turn in stored:
        picture = picture.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = read_picture(saved(picture, kind, exif=exif))
    assert pixels.shape == (16, 48, 3)
    assert pixels[4, 4, 1] < 40 and pixels[4, -4, 1] > 215


def test_broken_exif_leaves_a_photo_as_it_is() -> None:
    data = saved(Image.new("RGB", (16, 8), "red"), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert read_picture(data).shape == (8, 16, 3)


def test_a_large_jpeg_is_read_smaller() -> None:
    data = saved(Image.new("RGB", (5200, 5000), "red"), "JPEG", quality=10)
    assert read_picture(data).shape == (2500, 2600, 3)


def test_base64_is_read_in_all_its_forms() -> None:
    data = bytes(range(256))
    text = base64.b64encode(data).decode()
    for head in (
        "data:image/png;base64,",
        "data:image/png; base64,",
        "DATA:image/jpeg;name=x;BASE64,",
        "data:;base64,",
    ):
        assert from_data_url(head + text) == from_base64(head + text) == data
    for each in (text, text.rstrip("="), "\n".join(text), base64.urlsafe_b64encode(data).decode()):
        assert from_base64(each) == data


def test_one_picture_is_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, load = 0, 0, ImageFile.ImageFile.load

    def counted(picture: ImageFile.ImageFile) -> object:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.005)
        loaded = load(picture)
        running -= 1
        return loaded

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    data = saved(Image.new("RGB", SQUARE, "red"), "PNG")
    threads = [threading.Thread(target=read_picture, args=(data,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


MEASURE = """
import re, resource, sys
from pathlib import Path
from mlx_spec.vision.pictures import read_picture

def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e3

small, large = (Path(name).read_bytes() for name in sys.argv[1:])
read_picture(small)
before = peak()
read_picture(large)
print(peak() - before)
"""


@pytest.mark.parametrize(("kind", "mode", "most"), [("WEBP", "RGBA", 600), ("JPEG", "RGB", 300)])
def test_the_memory_of_decoding_is_bounded(kind: str, mode: str, most: int, tmp_path: Path) -> None:
    """The largest picture that is read takes as many megabytes as the head of the module says."""
    files = [tmp_path / "small", tmp_path / "large"]
    for file, side in zip(files, (8, 5000), strict=True):
        Image.new(mode, (side, side), (255, 0, 0, 128)[: len(mode)]).save(file, kind, method=0)
    run = [sys.executable, "-c", MEASURE, *map(str, files)]
    assert 75 < float(subprocess.run(run, capture_output=True, check=True, text=True).stdout) < most
