"""Atomic writes, and words for sizes and errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.hub.files import new_folder, read_object, typed_path, write_atomically


def test_write_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.json"
    write_atomically(file, "old")
    write_atomically(file, "ä new")
    assert file.read_text(encoding="utf-8") == "ä new" and file.stat().st_mode & 0o777 == 0o600

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, "lost")
    assert file.read_text(encoding="utf-8") == "ä new" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"config.json .*: download or convert it again$"):
        read_object(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["", "a\0b", "~nobody-here/x", "x" * 300])
def test_what_is_no_path(name: str) -> None:
    with pytest.raises(InvalidValue, match=": "):
        typed_path(name)
    assert typed_path("~/x") == Path.home() / "x"


def test_a_new_folder_in_the_home_of_nobody() -> None:
    with pytest.raises(InvalidValue, match="nobody"), new_folder(Path("~nobody-here/pair")):
        pass
