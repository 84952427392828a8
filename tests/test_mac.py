"""The process of a Mac, imitated: its facts, and the tests that matter most there."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest
from support import mac, pairs, tiny
from support.waiting import LIMIT, wait_until

import mlx_spec
from mlx_spec import demo
from mlx_spec.ahead import drafting_ahead
from mlx_spec.apps.chat import saved
from mlx_spec.device import NoBackend, device_name, memory_for_models, require_backend
from mlx_spec.device.awake import Awake
from mlx_spec.distributed.ranks import Ranks
from mlx_spec.drafters.lookup import lookup_source
from mlx_spec.hub.names import resolve

ROOT = Path(__file__).parents[1]
# The tests that matter most on a Mac, in one process: each would import all again. `make test-mac` runs more.
PARTS = [
    "tests/decode/test_load.py",
    "--deselect=tests/decode/test_load.py::test_import_is_light",
    "--deselect=tests/decode/test_load.py::test_each_file_is_opened_once",
    "tests/decode/test_round.py",
    "tests/server/test_server_stream.py",
    *(f"tests/menubar/test_menubar{name}.py" for name in ("", "_cocoa", "_state")),
    "tests/apps/test_doctor.py::test_the_demo_pair_passes",
    "-k=not test_round or plain_decoding_is_that or (scripted and None)",
]


def test_in_the_process_of_a_mac():
    command = [sys.executable, "-m", "pytest", "-q", "--mac", "-p", "no:cacheprovider", *PARTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=8 * LIMIT)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.skipif(mac.IS_REAL, reason="Metal gives buffers back some time after their arrays are gone")
def test_freed_buffers_follow_the_rules_of_mlx():
    """The CPU backend has the same cache of buffers, with smaller pages."""
    rng, page = random.Random(0), 4096
    imitated = mac.Allocator(mac.MACS[16], page)
    limit, small = mx.set_cache_limit(2**30), 16 * page
    mx.clear_cache()
    arrays, buffers = dict[int, mx.array](), dict[int, int]()
    used = mx.get_active_memory()
    for step in range(300):
        if arrays and rng.random() < 0.5:
            key = rng.choice([*arrays])
            del arrays[key]
            imitated.free(buffers.pop(key))
        else:
            size = rng.randrange(16, 64) * page
            arrays[step] = mx.zeros((size,), mx.uint8)
            mx.eval(arrays[step])
            buffers[step] = imitated.malloc(size)
        found = mx.get_active_memory() - used, mx.get_cache_memory()
        assert all(abs(a - b) < small for a, b in zip(found, (imitated.active, imitated.cached), strict=True))
    mx.set_cache_limit(100 * page)
    imitated._release(imitated.cached - 100 * page)
    assert 0 < imitated.cached <= 100 * page and abs(mx.get_cache_memory() - imitated.cached) < small
    mx.set_cache_limit(limit)


def test_freed_buffers_stay_wired_until_the_limit_of_collection():
    metal = mac.Allocator(mac.MACS[16])
    metal.set_wired_limit(metal.mac.working_set)
    for size in range(1, 40):  # scores of attention grow with each chunk, so none is used again
        metal.free(metal.malloc(size * mac.GIB // 40))
    assert metal.active == 0 and 9 * mac.GIB < metal.peak_wired < 0.95 * metal.mac.working_set
    metal.set_wired_limit(0)
    assert metal.wired == 0 < metal.cached
    metal.clear_cache()
    assert metal.held == 0
    with pytest.raises(ValueError, match="larger than the maximum"):
        metal.set_wired_limit(metal.mac.working_set + 1)


def test_the_default_device_is_one_for_all_threads(monkeypatch):
    """In this MLX as in the imitation."""
    before, other = mx.default_device(), mx.Device(mx.cpu, 1)
    for imitates in (False, True):
        if imitates:
            mac.imitate_metal(monkeypatch, mac.MACS[16], mx)
            assert mx.default_device() == mx.gpu and mx.device_info()["device_name"] == "Apple M4"
        thread = threading.Thread(target=lambda: mx.set_default_device(other))
        thread.start()
        thread.join()
        assert mx.default_device() == other
        mx.set_default_device(before)
    with mx.stream(mx.new_stream(mx.gpu)):
        assert mx.default_device() == mx.gpu
    assert mx.default_device() == before


def test_a_program_that_a_mac_starts_runs_on_a_mac():
    code = "import sys, resource as r, mlx.core as mx, mlx_spec.device\n"
    code += "limit = r.getrlimit(r.RLIMIT_NOFILE)[0]; mlx_spec.device.require_backend()\n"
    code += "print(sys.platform, mx.default_device(), limit, r.getrlimit(r.RLIMIT_NOFILE)[0])"
    environment = {"PYTHONPATH": str(mac.START)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert (found.stdout, found.stderr) == ("darwin Device(gpu, 0) 256 2048\n", "")


def test_a_model_is_loaded_whatever_the_default_device_is(monkeypatch, tmp_path):
    """MLX describes the default device, and a CPU has no working set."""
    folder = pairs.save(tiny.smallest(), tmp_path)
    metal = mac.imitate(monkeypatch)
    for device in (mx.gpu, mx.cpu):
        mx.set_default_device(device)
        assert memory_for_models() <= metal.mac.working_set
        assert mlx_spec.load(folder, "none")
        assert mx.default_device() == device


def test_the_cpu_of_a_mac_does_not_take_the_costs_of_its_gpu(monkeypatch):
    """MLX gives both the name of the chip, and saved costs and caches are found by name."""
    mac.imitate(monkeypatch)
    names = []
    for device in (mx.gpu, mx.cpu):
        mx.set_default_device(device)
        names.append(device_name())
    assert mx.device_info(mx.cpu)["device_name"] == mx.device_info(mx.gpu)["device_name"]
    assert names == ["Apple M4", "Apple M4 (CPU)"]


def test_a_thread_does_not_draft_ahead_beside_a_gpu(monkeypatch):
    mac.imitate(monkeypatch)
    mx.set_default_device(mx.cpu)
    assert drafting_ahead(lookup_source(), None).ahead_costs is not None
    mx.set_default_device(mx.gpu)
    with pytest.raises(mlx_spec.InvalidValue, match="drafting ahead needs a processor beside the target's"):
        drafting_ahead(lookup_source(), None)


def test_a_mac_is_kept_awake_by_a_program_that_ends_with_this_one(tmp_path, monkeypatch):
    calls = mac.caffeinate(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "platform", "darwin")
    awake = Awake()
    for _ in range(2):
        with awake:
            awake.hold()  # it is held already
            wait_until(calls.exists)
            process = awake._process
            assert process is not None and process.poll() is None
        assert process.returncode is not None and calls.read_text() == f"-i -w {os.getpid()}\n"
        calls.unlink()
    monkeypatch.setattr(sys, "platform", "linux")
    with (elsewhere := Awake()):
        assert elsewhere._process is None


def test_no_mac_of_several_sleeps_while_the_others_wait_for_it(tmp_path, monkeypatch):
    calls = mac.caffeinate(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "platform", "darwin")
    ranks = object.__new__(Ranks)  # without others
    ranks.rank, ranks._peers, ranks._sending, ranks.last_pass = 0, {}, threading.Lock(), mx.array([])
    assert ranks.run(lambda: 3) == 3 and calls.read_text() == f"-i -w {os.getpid()}\n"


def test_below_macos_14_one_line_names_the_system(monkeypatch):
    """MLX has no wheel for it, so nothing can be installed that would work."""
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    for version, says in (
        ("13.6.1", "MLX needs macOS 14 or later, and this is macOS 13.6.1"),
        ("14.5", "pip install mlx"),
    ):
        mac.imitate_system(monkeypatch, mac.Mac(system=version))
        with pytest.raises(NoBackend, match=says):
            require_backend()


def test_names_that_differ_in_case_only_are_one_file(tmp_path, monkeypatch):
    """What would be replaced or loaded is asked of the file system, not of names."""
    mac.ignore_case(monkeypatch, tmp_path)
    file, models = tmp_path / "Talk.json", tmp_path / "models"
    saved.write(file, {"messages": []})
    assert saved.replaced(tmp_path / "talk.json") is not None
    saved.write(tmp_path / "talk.json", {"messages": []})
    assert os.listdir(tmp_path) == ["Talk.json"]
    shutil.copytree(demo.TARGET, models / "Small")
    assert resolve(str(models / "small")).target == str(models / "small")


def test_no_two_files_of_the_repository_differ_in_case_only():
    for package in ("mlx_spec", "apps", "convert", "tests", "benchmarks"):
        names = [str(path).lower() for path in (ROOT / package).rglob("*") if "__pycache__" not in path.parts]
        assert len(names) == len(set(names))


def test_no_program_names_a_socket_by_a_path():
    """A path of a socket has at most 103 bytes on macOS, and temporary folders there take half of them."""
    for package in ("mlx_spec", "apps", "convert"):
        for path in (ROOT / package).rglob("*.py"):
            assert not re.search(r"AF_UNIX|_unix_|multiprocessing", path.read_text()), path
