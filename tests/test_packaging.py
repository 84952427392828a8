"""Contents of a wheel, an sdist and an editable install; the error of a missing MLX backend."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.waiting import LIMIT

import mlx_spec
from mlx_spec.device import install_command

ROOT = Path(__file__).parents[1]
TREE = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "mlx_spec", "apps", "convert")
FOR_DEVELOPERS = ("README.md", "DESIGN.md", "API.md")  # read in the repository, not in a wheel
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", ".DS_Store")


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that the caller's own PYTHONPATH and the like do not reach."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=LIMIT
    )


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build as an installer does, in a process of its own and without a network."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    out.mkdir()
    done = run(sys.executable, "-c", code, str(out), cwd=tree)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the repository's packages, since a build leaves files beside its sources."""
    copy = tmp_path_factory.mktemp("tree")
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=IGNORED)
        else:
            shutil.copy2(source, copy / name)
    for weights in copy.rglob("*.safetensors"):  # 20 MB that nobody reads here take seconds to compress
        weights.write_bytes(b"weights")
    return copy


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel") / "out")


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist") / "out")


def test_wheel_holds_the_tree_and_nothing_else(tree, wheel):
    names = contents(wheel).keys()
    info = f"mlx_spec-{mlx_spec.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"mlx_spec", info}
    assert {"mlx_spec/convert/__init__.py", "mlx_spec/apps/cli.py", "mlx_spec/py.typed"} <= names
    assert f"{info}/licenses/LICENSE" in names
    packages = shutil.copytree(tree / "mlx_spec", wheel.parent.parent / "followed")  # follows the symlinks
    found = [path for path in packages.rglob("*") if path.is_file() and path.name not in FOR_DEVELOPERS]
    files = {f"mlx_spec/{path.relative_to(packages)}" for path in found}
    packed = {name for name in names if name.startswith("mlx_spec/")}
    assert (files - packed, packed - files) == (set(), set())  # a new kind of file: package-data in pyproject


def test_wheel_can_be_imported(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import mlx_spec.apps.cli as a, mlx_spec.convert as c; print(a.__file__, c.__file__, sep='\\n')"
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(tmp_path / "site" / "mlx_spec")) for line in done.stdout.splitlines())


def test_sdist_builds_the_same_wheel(wheel, sdist, tmp_path):
    assert run("tar", "-xzf", str(sdist), cwd=tmp_path).returncode == 0  # Python 3.11.2 has no filter
    (unpacked,) = tmp_path.iterdir()
    assert not [path for path in unpacked.rglob("*") if path.is_symlink()]
    assert contents(build("wheel", unpacked, tmp_path / "out")) == contents(wheel)


def test_a_checkout_without_links_is_not_built(tree, tmp_path):
    """It built a wheel without the programs."""
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy2(tree / name, tmp_path / name)
    (tmp_path / "mlx_spec").mkdir()
    (tmp_path / "mlx_spec" / "apps").write_text("../apps")
    code = "from setuptools import build_meta; build_meta.build_wheel('out')"
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode and "`git config core.symlinks true`" in done.stderr, done.stderr


def test_links_of_the_long_description_are_absolute(wheel):
    (metadata,) = (text.decode() for name, text in contents(wheel).items() if name.endswith("/METADATA"))
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", metadata)
    assert len(links) > 10 and all(link.startswith(("https://", "http://", "#")) for _, link in links)
    assert all("/raw/v" in link for picture, link in links if picture)
    assert "Project-URL: Repository, https://" in metadata


def test_the_way_to_an_extra_is_that_of_the_installer(monkeypatch):
    for prefix, command in {
        "/home/me/.local/share/uv/tools/mlx-spec": "uv tool install --managed-python 'mlx-spec[server]",
        "/home/me/.local/share/pipx/venvs/mlx-spec": "pipx install --force 'mlx-spec[server]",
        "/home/me/.venv": "pip install 'mlx-spec[server]",
    }.items():
        monkeypatch.setattr(sys, "prefix", prefix)
        assert install_command("server").startswith(command)


def test_loading_code_does_without_transformers_and_mlx_lm_stays_whole(tmp_path):
    """It was half of every start, and only mlx-lm's own tokenizers use it."""
    code = """
import sys
import mlx_spec.pair, mlx_spec.drafters, mlx_spec.model.read
assert "transformers" not in sys.modules
import mlx_lm, mlx_lm.utils
assert "transformers" not in sys.modules
from mlx_lm import generate, load
from mlx_lm.tokenizer_utils import TokenizerWrapper, load as tokenizer
assert callable(generate) and load is mlx_lm.utils.load and mlx_lm.utils.TokenizerWrapper is TokenizerWrapper
assert mlx_lm.utils._load_tokenizer is tokenizer and "transformers" in sys.modules
"""
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_versions_agree(tmp_path):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert mlx_spec.__version__ == version("mlx-spec") == declared
    said = run(sys.executable, "-m", "mlx_spec", "--version", cwd=tmp_path)
    assert (said.stdout, said.stderr, said.returncode) == (f"mlx-spec {declared}\n", "", 0)


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("mlx_spec chat", "No module named 'mlx'"),
        ("mlx_spec.chat", "libmlx.so: cannot open shared object file:\nNo such file"),
    ],
)
def test_no_backend_is_one_line(command, cause, tmp_path):
    """An mlx without a backend, as pip leaves it on Linux when no extra was asked for."""
    fake = tmp_path / "site" / "mlx"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "core.py").write_text(f"raise ImportError({cause!r})")
    words = [*command.split(), "--prompt=hi"]
    done = run(sys.executable, "-m", *words, cwd=tmp_path, PYTHONPATH=str(fake.parent))
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith(
        f"mlx-spec: no MLX backend ({' '.join(cause.split())}): pip install 'mlx-spec[cpu]"
    )


@pytest.mark.parametrize(
    ("machine", "system", "said"),
    [
        ("arm64", "13.6.1", "MLX needs macOS 14 or later, and this is macOS 13.6.1: update it"),
        (
            "x86_64",
            "14.5",
            "MLX needs Apple silicon, and this is x86_64: use a native Python and shell on such a Mac",
        ),
    ],
)
def test_a_mac_without_mlx_is_named_before_anything_is_installed(machine, system, said, tmp_path):
    for name, answer in (("uname", machine), ("sw_vers", system)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {answer}\n")
        (tmp_path / name).chmod(0o700)
    words = [str(ROOT / ".ci" / "set-up"), "venv", "metal", "venv/.ready-metal"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = run(*words, cwd=tmp_path, PATH=path, SET_UP_PYTHON=sys.executable)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{said}\n")
    assert not (tmp_path / "venv").exists()


def test_packages_for_tests_do_not_hold_back_those_of_users():
    """What `[test]` adds must take the huggingface_hub that an install without it gets."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in (*extras["clients"], *extras["test"]):
        pin = Requirement(line)
        for need in map(Requirement, () if pin.name == "mlx-spec" else requires(pin.name) or ()):
            is_meant = need.name.replace("_", "-") == "huggingface-hub" and not need.marker
            assert not is_meant or version(pin.name) not in pin.specifier or "2.4.0" in need.specifier, pin


def test_the_formula_installs_what_works_with_the_python_of_homebrew():
    """That Python cannot show the menu bar, and wheels have no room for longer names than theirs."""
    text = (ROOT / ".github" / "homebrew" / "mlx-spec.rb").read_text()
    assert re.findall(r"#{buildpath}\[(.*?)\]", text) == ["server"]
    assert re.search(r"^  preserve_rpath$", text, re.MULTILINE)
    assert "uv tool install --managed-python 'mlx-spec[server,menubar]'" in text
