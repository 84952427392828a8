"""Files of measured costs: whole or ignored, and never those of something else."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace

import pytest
from support.virtual_clock import CURVES

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.errors import Mismatch, NotFound
from mlx_spec.policy import AdaptivePolicies, BadCosts, Key, saved_costs

KEY = Key("Some Chip", "0123456789abcdef", ("mtp", "lookup"), "4-bit, groups of 64", None, "1.2.3")
TABLE = CURVES["M5 Max"].table()
DATE = "2026-01-02T03:04:05+00:00"


def test_round_trip(tmp_path):
    key = replace(KEY, drafters=("mtp",))
    file = tmp_path / "new" / saved_costs.file_name(key)
    saved_costs.write(file, key, DATE, TABLE)
    assert saved_costs.read(file, key) == (replace(TABLE, draft=list(TABLE.draft)), DATE)
    assert list(file.parent.iterdir()) == [file]


DAMAGED = [b"", b"{", b"[]", b'{"key": 1}', b"\xff\xfe", b"[" * 100_000]


@pytest.mark.parametrize("content", [*DAMAGED, b'{"key": {}, "measured": 1, "table": {}}'])
def test_damaged_files_are_ignored_with_one_line(tmp_path, caplog, content):
    file = tmp_path / saved_costs.file_name(KEY)
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert AdaptivePolicies(KEY.drafters, key=KEY, folder=tmp_path).costs is None
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    with pytest.raises((BadCosts, Mismatch)):
        saved_costs.read(file, KEY)


def test_other_versions_and_formats_are_named(tmp_path, caplog):
    saved_costs.write(tmp_path / saved_costs.file_name(KEY), replace(KEY, mlx="0.9"), DATE, TABLE)
    assert AdaptivePolicies(KEY.drafters, key=KEY, folder=tmp_path).costs is None
    assert "mlx 0.9, here it is 1.2.3" in caplog.text
    file = tmp_path / "old.json"
    file.write_text(json.dumps({"key": {"format": 1}, "measured": DATE, "table": {}}))
    with pytest.raises(BadCosts, match="format 1, this version reads 2"):
        saved_costs.read(file, KEY)


def test_reading_names_both_sides(tmp_path):
    saved_costs.write(tmp_path / "mine.json", KEY, DATE, TABLE)
    here = replace(KEY, device="Other Chip", drafters=("mtp",))
    with pytest.raises(Mismatch, match="device Some Chip, here it is Other Chip; drafters mtp, lookup, here"):
        saved_costs.read(tmp_path / "mine.json", here)
    with pytest.raises(NotFound):
        saved_costs.read(tmp_path / "none.json", KEY)


def test_a_folder_that_cannot_be_written(tmp_path, caplog, monkeypatch):
    def refuse(source, target):
        raise PermissionError(13, "Permission denied")

    key = replace(KEY, drafters=("mtp",))
    (tmp_path / "file").write_text("")
    AdaptivePolicies(["mtp"], key=key, folder=tmp_path / "file").use(TABLE)
    assert "cannot be written (File exists)" in caplog.text
    (tmp_path / "file").unlink()
    monkeypatch.setattr(os, "replace", refuse)
    AdaptivePolicies(["mtp"], key=key, folder=tmp_path).use(TABLE)
    assert "Permission denied" in caplog.text
    assert list(tmp_path.iterdir()) == []  # no temporary file is left


def test_policies_load_what_others_saved(tmp_path):
    key = replace(KEY, drafters=("mtp",))
    policies = AdaptivePolicies(["mtp"], key=key, folder=tmp_path)
    assert policies.costs is None
    policies.use(CURVES["M5 Max"].table())
    for _ in range(20):
        policies.costs.at(1).observe_round(0, 3, 0.1)
    policies.policy().begin()  # saves what was learned
    again = AdaptivePolicies(["mtp"], key=key, folder=tmp_path)
    assert again.measured == policies.measured
    assert again.costs.at(1).seconds(0, 3) == pytest.approx(0.1, rel=0.1)


def test_fingerprints_change_with_the_checkpoint(tmp_path):
    header = b'{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}'
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    first = Checkpoint(tmp_path).fingerprint
    assert len(first) == 16
    weights.write_bytes(len(header).to_bytes(8, "little") + header.replace(b"a", b"b", 1) + b"\0\0")
    second = Checkpoint(tmp_path).fingerprint
    (tmp_path / "config.json").write_text("{}")
    assert len({first, second, Checkpoint(tmp_path).fingerprint}) == 3


def test_each_pair_and_setting_has_its_own_file() -> None:
    """A newer MLX replaces the file."""
    other = {"device": "b", "target": "b", "drafters": (), "quantization": "b", "kv_bits": 8}
    names = [saved_costs.file_name(replace(KEY, **{name: value})) for name, value in other.items()]
    assert len({saved_costs.file_name(KEY), *names}) == len(other) + 1
    assert saved_costs.file_name(replace(KEY, mlx="2", format=3)) == saved_costs.file_name(KEY)
