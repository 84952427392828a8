"""Saved costs: found again, refused where they do not belong, never half written, never in the way."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_spec import demo
from mlx_spec.errors import BadCheckpoint, Mismatch, NotFound
from mlx_spec.tuning import profile
from mlx_spec.tuning.profile import BadProfile, Key, export, file_name, fingerprint, import_, load, save

KEY = Key(
    device="Apple M4 Pro",
    target="0123456789abcdef",
    drafters=("fedcba9876543210", "lookup"),
    quantization="4-bit, groups of 64",
    kv_bits=None,
    mlx="0.32.4",
)
TABLE = {"verify": {"512": [0.01, 0.011, 0.012]}, "draft": [0.001], "note": "é", "host": None}
OTHERS = {
    "device": "Apple M4 Max",
    "target": "ffff",
    "drafters": ("lookup",),
    "quantization": "8-bit, groups of 64",
    "kv_bits": 8,
}


@pytest.fixture(autouse=True)
def warnings_of_the_package(caplog):
    caplog.set_level(logging.DEBUG, logger="mlx_spec")


def only_warning(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.name == "mlx_spec"
    assert "\n" not in record.getMessage()
    return record.getMessage()


def saved(folder: Path, key: Key = KEY) -> Path:
    assert save(key, TABLE, folder) is None
    return folder / file_name(key)


def edited(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    content["key"].update(changes)
    file.write_text(json.dumps(content))


def test_saved_and_found_again(tmp_path, caplog):
    folder = tmp_path / "not" / "there yet"
    assert load(KEY, folder) is None
    saved(folder)
    assert load(KEY, folder) == TABLE
    assert not caplog.records


def test_a_person_can_read_it(tmp_path):
    file = saved(tmp_path)
    assert file.name.startswith("apple-m4-pro-4-bit-groups-of-64-")
    lines = file.read_text().splitlines()
    assert lines[1].strip() == '"key": {'
    assert '    "device": "Apple M4 Pro",' in lines
    assert any(line.startswith('  "measured": "20') for line in lines)
    assert oct(file.stat().st_mode & 0o777) == oct(0o666 & ~umask())
    assert os.listdir(tmp_path) == [file.name]


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("field", OTHERS)
def test_another_key_is_another_file(field, tmp_path, caplog):
    saved(tmp_path)
    other = replace(KEY, **{field: OTHERS[field]})
    assert load(other, tmp_path) is None
    save(other, {}, tmp_path)
    assert load(KEY, tmp_path) == TABLE
    assert load(other, tmp_path) == {}
    assert not caplog.records


def test_another_mlx_replaces_it(tmp_path, caplog):
    saved(tmp_path)
    newer = replace(KEY, mlx="0.33.0")
    assert load(newer, tmp_path) is None
    warning = only_warning(caplog)
    assert "mlx 0.32.4, here it is 0.33.0" in warning and str(tmp_path) in warning
    save(newer, {"new": 1}, tmp_path)
    assert load(newer, tmp_path) == {"new": 1}
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("field", OTHERS)
def test_a_file_of_another_key_is_ignored(field, tmp_path, caplog):
    """Copied by hand under the name of this one."""
    other = OTHERS[field]
    edited(saved(tmp_path), **{field: other})
    assert load(KEY, tmp_path) is None
    assert f"was measured with {field} " in only_warning(caplog)
    save(KEY, TABLE, tmp_path)
    assert load(KEY, tmp_path) == TABLE


DAMAGE = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not an object": lambda text: "[1, 2]",
    "no table": lambda text: text.replace('"table"', '"chair"'),
    "a table that is a list": lambda text: json.dumps({**json.loads(text), "table": []}),
    "no key": lambda text: text.replace('"key"', '"lock"'),
    "half a key": lambda text: text.replace('"target"', '"tarmac"'),
    "a key of wrong types": lambda text: text.replace('"0.32.4"', "0.32"),
    "not a number": lambda text: text.replace("0.011", "NaN"),
    "nested deeply": lambda text: "[" * 200_000,
    "another format": lambda text: text.replace('"format": 1', '"format": 99'),
    "huge": lambda text: text + " " * profile.MAX_SIZE,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_and_replaced(damage, tmp_path, caplog):
    file = saved(tmp_path)
    whole = file.read_text()
    damaged = DAMAGE[damage](whole)
    assert damaged != whole
    file.write_text(damaged)
    assert load(KEY, tmp_path) is None
    assert str(file) in only_warning(caplog)
    saved(tmp_path)
    assert load(KEY, tmp_path) == TABLE


def test_bytes_that_are_no_text(tmp_path, caplog):
    saved(tmp_path).write_bytes(b"\xff\xfe\x00")
    assert load(KEY, tmp_path) is None
    only_warning(caplog)


def test_a_folder_in_its_place(tmp_path, caplog):
    (tmp_path / file_name(KEY)).mkdir()
    assert load(KEY, tmp_path) is None
    only_warning(caplog)
    caplog.clear()
    assert "cannot be kept" in save(KEY, TABLE, tmp_path)
    assert os.listdir(tmp_path) == [file_name(KEY)]  # nothing half written is left


def test_no_place_to_save(tmp_path, caplog):
    """As with a folder that is read-only: a file stands where a folder is needed."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "profiles"
    assert load(KEY, folder) is None
    assert not caplog.records
    reason = save(KEY, TABLE, folder)
    assert "\n" not in reason and str(folder) in reason
    assert reason in only_warning(caplog)


def test_a_disk_that_takes_only_a_part(tmp_path, caplog):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        reason = save(KEY, TABLE, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "cannot be kept" in reason and reason in only_warning(caplog)
    assert os.listdir(tmp_path) == []


def test_what_is_no_json_is_our_own_mistake(tmp_path):
    for table in ({"cost": float("nan")}, {"cost": object()}):
        with pytest.raises((ValueError, TypeError)):
            save(KEY, table, tmp_path)
    assert os.listdir(tmp_path) == []


def write_many(folder: Path, number: int, times: int) -> None:
    for _ in range(times):
        assert save(KEY, {"writer": number, "padding": [number] * 5000}, folder) is None


def test_two_writers_leave_one_whole_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(tmp_path, number, 30)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        table = load(KEY, tmp_path)
        if table is not None:
            assert set(table["padding"]) == {table["writer"]}
            seen.add(table["writer"])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen
    assert os.listdir(tmp_path) == [file_name(KEY)]


def test_exported_and_imported(tmp_path):
    file = tmp_path / "mine.json"
    export(KEY, TABLE, file, measured="2026-11-21T10:00:00+00:00")
    found = import_(file, KEY)
    assert (found.key, found.table, found.measured) == (KEY, TABLE, "2026-11-21T10:00:00+00:00")
    assert os.listdir(tmp_path) == ["mine.json"]


@pytest.mark.parametrize("field", [*OTHERS, "mlx"])
def test_import_names_both_sides(field, tmp_path):
    file = tmp_path / "mine.json"
    export(KEY, TABLE, file)
    other = {**OTHERS, "mlx": "0.33.0"}[field]
    with pytest.raises(Mismatch) as refused:
        import_(file, replace(KEY, **{field: other}))
    message = str(refused.value)
    assert "\n" not in message and str(file) in message and "mlx-spec tune" in message
    both = [value if isinstance(value, tuple) else (value,) for value in (vars(KEY)[field], other)]
    assert all(str("none" if part is None else part) in message for value in both for part in value)


def test_import_of_what_is_no_profile(tmp_path):
    with pytest.raises(NotFound, match="no file"):
        import_(tmp_path / "nothing.json", KEY)
    file = tmp_path / "other.json"
    file.write_text('{"a": 1}')
    with pytest.raises(BadProfile, match=r"other\.json is no profile"):
        import_(file, KEY)
    with pytest.raises(BadProfile, match="cannot be read"):
        import_(tmp_path, KEY)


def test_export_to_a_bad_place(tmp_path):
    with pytest.raises(BadProfile, match="cannot be written"):
        export(KEY, TABLE, tmp_path / "no such folder" / "mine.json")


def test_the_cache_folder_of_the_user():
    folder = profile.folder()
    assert folder.name == "profiles" and folder.parent.name == "mlx_spec"


def test_fingerprint(tmp_path):
    copy = Path(shutil.copytree(demo.TARGET, tmp_path / "moved"))
    original = fingerprint(demo.TARGET)
    assert len(original) == 16
    assert fingerprint(copy) == original  # wherever it lies
    assert fingerprint(demo.DRAFTER) != original
    (copy / "tokenizer_config.json").write_text("{}")
    assert fingerprint(copy) == original  # costs do not depend on that
    (copy / "config.json").write_text('{"model_type": "gemma4"}')
    assert fingerprint(copy) != original


def test_fingerprint_sees_the_weights_files(tmp_path):
    copy = Path(shutil.copytree(demo.DRAFTER, tmp_path / "copy"))
    original = fingerprint(copy)
    weights = copy / "model.safetensors"
    with weights.open("ab") as stream:
        stream.write(b"\0")
    longer = fingerprint(copy)
    weights.rename(copy / "model-00001-of-00001.safetensors")
    assert len({original, longer, fingerprint(copy)}) == 3


def test_fingerprint_reads_no_weights(tmp_path):
    """A sparse file of 40 GB."""
    tensor = {"dtype": "BF16", "shape": [20_000_000_000], "data_offsets": [0, 40_000_000_000]}
    content = json.dumps({f"layer.{i}.weight": tensor for i in range(2000)}).encode()
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(content).to_bytes(8, "little") + content)
        stream.truncate(40_000_000_000)
    start = time.process_time()
    fingerprint(tmp_path)
    assert time.process_time() - start < 0.05


def test_fingerprint_of_a_damaged_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        fingerprint(tmp_path)
