"""The `mlx-spec` command: its programs, their help in the README, completion made from the same parsers."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path
from pkgutil import resolve_name

import pytest

from mlx_spec import __version__
from mlx_spec.apps import cli, manual
from mlx_spec.apps.cli import main
from mlx_spec.apps.completion import SHELLS, script
from mlx_spec.apps.programs import PROGRAMS, options, parser_of
from mlx_spec.errors import InvalidValue

README = f"# Title\n\n{manual.BEGIN}\nOLD HELP\n{manual.END}\n\nmore\n"


def test_every_program_and_its_parser_are_there():
    for name, program in PROGRAMS.items():
        assert callable(resolve_name(program.main))
        parser = parser_of(name)
        assert isinstance(parser, argparse.ArgumentParser) and parser.prog == f"mlx-spec {name}"
        assert parser.description and all(option.help for option in options(parser))


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], [], ["chat", "--version"]])
def test_version_and_help_leave_with_0(capsys, arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0
    said = f"mlx-spec {__version__}" if "--version" in arguments else "  doctor      Check this machine"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["chatt"], ["--frob"]])
def test_what_is_no_program_is_one_line(capsys, arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("mlx-spec: ") and "mlx-spec --help" in err


def test_interrupt_while_a_program_is_imported(capsys, monkeypatch):
    def interrupted(name: str, arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "mlx-spec: interrupted\n")


# --- help


def test_help_lists_all_programs(capsys):
    assert main(["help"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_explains_every_option(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "40")  # argparse would follow it
    assert main(["help", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NAME" and max(map(len, lines)) <= manual.WIDTH
    for option in options(parser_of(name)):
        head = " ".join(word for word in (", ".join(option.names), option.value) if word)
        at = lines.index(f"       {head}")
        assert lines[at + 1].startswith(" " * 14) and lines[at + 1].strip()
        assert "%(" not in lines[at + 1]


def test_help_of_what_is_no_program(capsys):
    with pytest.raises(SystemExit) as left:
        main(["help", "nothing"])
    assert left.value.code == 2


def test_the_readme_is_written_and_checked(tmp_path, capsys):
    file = tmp_path / "README.md"
    file.write_text(README)
    assert manual.main(["--check", str(file)]) == 1
    assert "--write" in capsys.readouterr().err and file.read_text() == README
    assert manual.main(["--write", str(file)]) == 0
    text = file.read_text()
    assert text.startswith(f"# Title\n\n{manual.BEGIN}\n<details>") and text.endswith(
        f"{manual.END}\n\nmore\n"
    )
    assert text.count("<details>") == text.count("</details>") == len(PROGRAMS) and "OLD HELP" not in text
    assert manual.main(["--check", str(file)]) == 0
    assert manual.main(["--write", str(file)]) == 0 and file.read_text() == text
    file.write_text(text.replace("--temperature", "--heat", 1))
    assert manual.main(["--check", str(file)]) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize("text", ["", manual.BEGIN, f"{manual.END}{manual.BEGIN}", README + manual.END])
def test_markers_must_be_there_once(text):
    with pytest.raises(InvalidValue, match="once each"):
        manual.written(text)


def test_a_readme_that_is_not_there(tmp_path, capsys):
    assert manual.main(["--check", str(tmp_path / "nothing.md")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


# --- completion


def completed(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {folder}/script; cd {folder}/files; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        '_mlx_spec; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def bash(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bash")
    (folder / "script").write_text(script("bash"))
    (folder / "files").mkdir()
    for name in ("a pair", "another"):
        (folder / "files" / name).mkdir()
    return folder


def test_bash_completes_programs(bash):
    assert completed(bash, "mlx-spec", "") == [*PROGRAMS, "--help", "--version"]
    assert completed(bash, "mlx-spec", "c") == ["chat", "convert", "completion"]
    assert completed(bash, "mlx-spec", "x") == [""]


def test_bash_completes_options(bash):
    for name in PROGRAMS:
        names = [each for option in options(parser_of(name)) for each in option.names if each != "-"]
        assert completed(bash, "mlx-spec", name, "-") == names
    assert completed(bash, "mlx-spec", "chat", "--num") == ["--num-draft-tokens"]


def test_bash_completes_values(bash):
    assert completed(bash, "mlx-spec", "chat", "--kv-bits", "") == ["4", "8"]
    assert completed(bash, "mlx-spec", "chat", "--kv-bits", "=", "8") == ["8"]
    assert completed(bash, "mlx-spec", "chat", "--kv-bits", "=") == ["4", "8"]
    assert completed(bash, "mlx-spec", "completion", "") == sorted(SHELLS)
    assert completed(bash, "mlx-spec", "help", "do") == ["doctor"]
    assert sorted(completed(bash, "mlx-spec", "chat", "--target", "a")) == ["a pair", "another"]
    assert completed(bash, "mlx-spec", "chat", "--seed", "a") == [""]
    assert completed(bash, "mlx-spec", "inspect", "an") == ["another"]


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_scripts_name_every_option(capsys, shell):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for name in PROGRAMS:
        for option in options(parser_of(name)):
            long = [each.lstrip("-") for each in option.names if each.startswith("--")]
            assert name in text and all(each in text for each in long)


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_scripts_are_valid(tmp_path, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    (tmp_path / "script").write_text(script(shell))
    option = "--no-execute" if shell == "fish" else "-n"
    done = subprocess.run(
        [shell, option, str(tmp_path / "script")], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and done.stderr == ""
