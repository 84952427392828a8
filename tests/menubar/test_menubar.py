"""The parts of the menu around its state: figures, files, ports, options, login."""

from __future__ import annotations

import os
import plistlib
import sys
import sysconfig
from pathlib import Path
from unittest.mock import patch

import pytest
from support import mac

from mlx_spec.apps import menubar
from mlx_spec.apps.menubar import macos, parse
from mlx_spec.apps.menubar.app import Folder
from mlx_spec.apps.menubar.server_process import Address, ServerOptions
from mlx_spec.checkpoint.files import locked
from mlx_spec.errors import InvalidValue
from mlx_spec.hub.catalog import PairSpec


@pytest.mark.skipif(sys.platform == "darwin", reason="there it would be shown")
def test_elsewhere_it_says_where_it_works(capsys):
    assert menubar.main(["--install-login-item"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mlx-spec: the menu bar is for macOS") and err.count("\n") == 1


def test_a_second_menu_leaves_at_once(tmp_path, capsys):
    folder = Folder(tmp_path)
    with locked(folder.path):
        assert menubar._run(parse([]), folder) == 0
    assert capsys.readouterr().err == "mlx-spec: the menu runs already\n"


# --- options


def test_options_of_the_server_are_passed_on():
    given = ["--target", "owner/a", "--kv-bits", "4", "--drafter=lookup", "--port", "9000", "--idle", "60"]
    plan = parse(given)
    assert plan.selection == PairSpec("owner/a", "lookup")
    assert plan.server == ServerOptions(Address("127.0.0.1", 9000), None, ("--kv-bits", "4", "--idle", "60"))
    assert parse(list(plan.passed)) == plan


# --- login and the hazards of macOS


def launchctl(folder: Path, refuses: str = "") -> str:
    """A program that writes down how it is called, and refuses one command as launchctl does."""
    program = folder / "launchctl"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\n'
        f'if [ "$1" = "{refuses}" ]; then echo "Bootstrap failed: 5" >&2; exit 5; fi\n'
    )
    program.chmod(0o700)
    return str(program)


def calls(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "calls").read_text().splitlines()]


def test_install_and_remove(tmp_path):
    program, file, log = launchctl(tmp_path, "bootout"), tmp_path / macos.AGENT, tmp_path / "menubar.log"
    macos.install_agent(file, ["--target=a"], log, program)  # that nothing is loaded yet is not an error
    assert [call[0] for call in calls(tmp_path)] == ["bootout", "bootstrap"]
    domain, path = calls(tmp_path)[1][1:]
    assert domain.startswith("gui/") and path == str(file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    content = plistlib.loads(file.read_bytes())
    assert content["Label"] == macos.LABEL == file.stem
    assert content["ProgramArguments"] == [sys.executable, "-P", "-m", "mlx_spec.menubar", "--target=a"]
    assert content["RunAtLoad"] is True and content["KeepAlive"] == {"SuccessfulExit": False}
    assert content["ThrottleInterval"] == 10 and content["LimitLoadToSessionType"] == "Aqua"
    assert content["StandardOutPath"] == content["StandardErrorPath"] == str(log)
    assert Path(content["WorkingDirectory"]).is_absolute()
    assert macos.remove_agent(file, program) and not file.exists()
    assert calls(tmp_path)[-1] == ["bootout", f"{domain}/{macos.LABEL}"]
    assert not macos.remove_agent(file, program)


def test_what_launchd_refuses_is_said(tmp_path):
    program = launchctl(tmp_path, "bootstrap")
    with pytest.raises(InvalidValue, match="Bootstrap failed: 5"):
        macos.install_agent(tmp_path / macos.AGENT, (), tmp_path / "log", program)
    with pytest.raises(InvalidValue, match="No such file"):
        macos.install_agent(tmp_path / macos.AGENT, (), tmp_path / "log", str(tmp_path / "nothing"))


@pytest.mark.parametrize("given", [("--api-key", "secret"), ("--api-key=secret",)])
def test_no_key_is_written_to_the_agent(tmp_path, given):
    with pytest.raises(InvalidValue, match="use --api-key-file"):
        macos.write_agent(tmp_path / macos.AGENT, given, tmp_path / "log")
    assert list(tmp_path.iterdir()) == []
    macos.write_agent(tmp_path / macos.AGENT, ("--api-key-file", "key"), tmp_path / "log")


def test_the_agent_finds_the_models_of_the_shell_and_no_secret(tmp_path):
    kept = {
        "HF_HOME": "/Volumes/models",
        "XDG_STATE_HOME": "/state",
        "MLX_SPEC_DEVICE": "cpu",
        "https_proxy": "http://a:1",
    }
    others = {
        "HF_TOKEN": "hf_secret",
        "HTTP_PROXY": "http://me:secret@a:1",
        "OPENAI_API_KEY": "secret",
        "PS1": "$",
    }
    with patch.dict(os.environ, kept | others, clear=True):
        macos.write_agent(tmp_path / macos.AGENT, (), tmp_path / "log")
    text = (tmp_path / macos.AGENT).read_bytes()
    assert plistlib.loads(text)["EnvironmentVariables"] == kept and b"secret" not in text


@pytest.mark.parametrize("system", ["14.5", "26.1"])
@pytest.mark.parametrize("framework", ["Python", ""])
def test_a_python_whose_item_is_never_drawn_is_named(system, framework, monkeypatch):
    mac.imitate_system(monkeypatch, mac.Mac(system=system))
    monkeypatch.setitem(sysconfig.get_config_vars(), "PYTHONFRAMEWORK", framework)
    problem = macos.framework_problem()
    assert (problem is not None) == (system == "26.1" and framework != "")
    assert problem is None or "uv tool install --managed-python" in problem
