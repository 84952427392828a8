"""The `mlx-spec` command: help, versions, one-line errors, exit statuses, completion."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pkgutil import resolve_name

import pytest
from support.commands import file_that_takes_nothing
from support.waiting import LIMIT
from typer.main import get_command

from mlx_spec import __version__
from mlx_spec.apps import cli
from mlx_spec.apps.cli import PROGRAMS, main
from mlx_spec.apps.tune import Options as settings_of_tune
from mlx_spec.cli.command import guarded, parse, show, show_folded, table, tell
from mlx_spec.errors import NotFound

run = partial(subprocess.run, capture_output=True, text=True, timeout=LIMIT)
NEVER = {"mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "starlette", "uvicorn", "torch"}


@pytest.fixture
def empty_stdin(monkeypatch):
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_explains_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert callable(resolve_name(f"mlx_spec.{PROGRAMS[name].main}"))
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    command = get_command(cli.app()).commands[name]
    assert command.help and f"mlx-spec {name}" in shown
    for param in command.params:
        if not param.hidden:
            assert param.help
            assert param.metavar in shown if param.param_type_name == "argument" else param.opts[-1] in shown


@pytest.mark.parametrize("name", ["", *PROGRAMS])
def test_help_fits_a_terminal_of_80_columns(name, capsys, monkeypatch):
    """Nothing is cut, no flag looks as if it took a value, and paragraphs fold at the edge only."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"] if name else ["--help"])
    shown = capsys.readouterr().out
    assert "…" not in shown and "<bool>" not in shown
    for line, after in pairwise(shown.partition("╭")[0].splitlines()):
        assert not (line.strip() and after.strip()) or len(line.rstrip()) + len(after.split()[0]) > 77


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_all_programs(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    shown = capsys.readouterr().out
    assert left.value.code == 0 and all(f"│ {name} " in shown for name in PROGRAMS)


@pytest.mark.parametrize("arguments", [["--version"], ["chat", "--version"], ["serve", "--version"]])
def test_version(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0 and capsys.readouterr().out == f"mlx-spec {__version__}\n"


def test_help_imports_nothing_heavy():
    """Nor does a plan for another chip, or the process of the menu."""
    code = """
import runpy, sys
from mlx_spec.apps.menubar import app, macos, server_process
from mlx_spec.apps.menubar.menu import State, menu
assert menu(State()).entries
for words in (" --help", ".chat --help", ".serve --help", ".menubar --help", " roofline --chip=M4"):
    module, *arguments = f"mlx_spec{words}".split()
    sys.argv = ["mlx-spec", *arguments]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as left:
        assert left.code == 0
print(*sys.modules)
"""
    done = run([sys.executable, "-W", "error", "-c", code])
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not NEVER & loaded and "mlx_spec" in loaded


def refused(arguments: list[str], capsys) -> str:
    """What is said of a bad command line: one line, and the status is 2."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1), arguments
    assert err.startswith("mlx-spec: ") and err.endswith(" --help)\n"), arguments
    return err


@pytest.mark.parametrize(
    ("arguments", "words", "help"),
    [
        (["chatt"], ["'chatt'", "Did you mean 'chat'?"], "mlx-spec"),
        (["--frob"], ["--frob"], "mlx-spec"),
        (["chat", "--temp", "1"], ["--temp", "--temperature"], "mlx-spec chat"),
        (["bench", "--kv-bits", "5"], ["'--kv-bits'", "'4', '8'"], "mlx-spec bench"),
        (["inspect"], ["PATH_OR_REPO"], "mlx-spec inspect"),
        (["serve", "--memory", "0"], ["'--memory'", "above 0"], "mlx-spec serve"),
        (["serve", "--api-key", "a", "--api-key-file", "b"], ["give one of them"], "mlx-spec serve"),
        (["launch", "cursor"], ["'AGENT': 'cursor' is not one of 'codex'"], "mlx-spec launch"),
        (["roofline", "--chip=M9"], ["'M9'", "M4 Pro"], "mlx-spec roofline"),
        (["chat", "-p", "x", "--temperature", "nan"], ["temperature=nan"], "mlx-spec chat"),
        (["chat", "demo", "hello\nthere"], ["hello"], "mlx-spec chat"),
    ],
)
def test_a_bad_option_is_one_line_and_status_2(arguments, words, help, capsys, empty_stdin):
    err = refused(arguments, capsys)
    assert err.endswith(f"(see {help} --help)\n") and all(word in err for word in words)


WRONG = {
    "bench": "--tokens 3; --repeats 0",
    "chat": "--kv-bits 3; --temperature warm; demo --target=demo; -p x --json --top-p 7; "
    "-p x --num-draft-tokens 17",
    "menubar": "--port x; --install-login-item --remove-login-item; --host 0.0.0.0",
    "race": "--num-draft-tokens 0; --num-draft-tokens x",
    "roofline": "--acceptance=1.2; --acceptance=nan; --chip=M; --context=-1; --drafter; one more; "
    "demo --target=demo",
    "serve": "one more; demo --target=demo; demo --model demo=x; "
    "--host 0.0.0.0; --host 192.168.1.2; --host example.org; --host 0.0.0.0 --api-key=; --port x; "
    "--port 65536; --cache-folder-gb 3; --model x; --model x=a --model x=b; --model x=a --drafter b; "
    "--alias a=b; --pin b; "
    "--alias demo=demo; --memory 0; --idle nan; --parallel 0; --api-key-file /nonexistent; "
    "--cors-origin http://a/b; --nonsense; "
    "--allow-host http://a; --allow-host a:80; --allow-host *",
    "tune": "demo --target=demo; --context 1; --export a --import b",
}


@pytest.mark.parametrize("program", WRONG)
def test_bad_values_are_one_line_and_status_2(program, capsys, empty_stdin):
    for given in WRONG[program].split("; "):
        refused([program, *given.split()], capsys)


def test_interrupt_while_a_program_is_imported(capsys, monkeypatch):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "resolve_name", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "mlx-spec: interrupted\n")


def test_a_name_cannot_steer_the_terminal(capsys):
    names = "a\x1b[2Jb\udcff", "c\td"
    assert guarded(lambda: show(*names) or 0) == 0
    tell(NotFound("\n".join(names)))
    assert capsys.readouterr() == ("a[2Jb?\nc\td\n", "mlx-spec: a [2Jb? c d\n")


def test_a_message_on_a_terminal_folds_between_words(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("COLUMNS", "20")
    tell("install huggingface_hub first, and again")
    assert stderr.getvalue() == "mlx-spec: install\nhuggingface_hub\nfirst, and again\n"


def test_stdout_of_another_encoding(monkeypatch):
    """It cannot say "×"."""
    with io.TextIOWrapper(io.BytesIO(), "ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["inspect", "demo"]) == 0 and b" ? " in stdout.buffer.getvalue()


@pytest.mark.parametrize("full", [False, True])
def test_stderr_that_takes_nothing(full, monkeypatch, capsys, tmp_path):
    """It is closed, or takes no byte: the status tells, and stdout is for results."""
    with open(file_that_takes_nothing(tmp_path), "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr if full else None)
        assert main(["roofline", "--target=0GB"]) == 1
        sys.stderr.close()
    assert capsys.readouterr().out == ""


def test_a_full_disk_is_one_line(tmp_path):
    """A limit of 0 for the size of files stands for the full disk, for which macOS has no device."""
    program = f"ulimit -f 0; exec {sys.executable} -m mlx_spec --version"
    with open(tmp_path / "full", "w") as full:
        found = subprocess.run(["bash", "-c", program], stdout=full, stderr=-1, text=True, timeout=LIMIT)
    problem = "mlx-spec: stdout: File too large: make room there, or give another place\n"
    assert (found.returncode, found.stderr) == (1, problem)


def test_too_few_open_files_are_named():
    """mlx-lm raises the limit when it is imported; a shell such as bash may have lowered the hard one."""
    program = f"ulimit -n 64; exec {sys.executable} -m mlx_spec chat -p hi --max-tokens 1"
    done = run(["bash", "-c", program], stdin=subprocess.DEVNULL)
    said = "mlx-spec: 64 open files are allowed here, and mlx-lm takes 4096: "
    assert done.returncode == 0 or done.stderr.startswith(said), done.stderr  # some may raise any limit
    assert "Traceback" not in done.stderr


def test_a_working_folder_that_is_gone_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert guarded(lambda: len(os.getcwd())) == 1
    assert capsys.readouterr().err.startswith("mlx-spec: the working folder: No such file or directory: ")


NAMED = "inspect NAME; pull NAME; rm --yes NAME; models NAME; serve --target NAME; chat -p hi NAME"


@pytest.mark.parametrize(
    ("name", "problem"), [("~nobody-here/x", "an unknown user"), ("a" * 300, "too long"), ("", "is empty")]
)
def test_what_is_no_path_is_one_line(name, problem, capsys, tmp_path, monkeypatch, empty_stdin):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.json").write_text("{}")  # the empty name must not mean this folder
    for command in NAMED.split("; "):
        if command != "models NAME" or name:
            status = main([name if word == "NAME" else word for word in command.split()])
            out, err = capsys.readouterr()
            assert (status, out, err.count("\n")) == (1, "", 1) and problem in err, command
    assert [file.name for file in tmp_path.iterdir()] == ["pair.json"]


def test_a_home_that_no_shell_put_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(settings_of_tune, "tune", ["--export=~/costs.json"]).export == tmp_path / "costs.json"


MISTAKEN = (
    "chat -p hi NAME; serve NAME; bench NAME; race NAME; tune NAME; roofline NAME; "
    "inspect NAME; pull NAME; rm NAME"
)


@pytest.mark.parametrize("name", ["smolm2", "Gemma-4-e2", "dem"])
def test_a_mistaken_name_is_answered_alike_everywhere(name, capsys, empty_stdin):
    meant = {"smolm2": "smollm2", "Gemma-4-e2": "gemma-4-e2b", "dem": "demo"}[name]
    for command in MISTAKEN.split("; "):
        status = main([name if word == "NAME" else word for word in command.split()])
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (1, "", 1), command
        assert f"there is no folder {name}, and" in err and f"did you mean {meant}" in err, command


def test_a_mistaken_name_is_refused_before_mlx_is_imported():
    code = "import sys; from mlx_spec.apps.cli import main\n"
    for command in ("chat nosuch -p hi", "bench nosuch", "race nosuch", "tune nosuch"):
        code += f"main({command.split()})\n"
    done = run([sys.executable, "-c", code + "print(*sys.modules)"], stdin=subprocess.DEVNULL)
    assert done.stderr.count("there is no folder nosuch") == 4
    assert not {"mlx", "mlx_lm", "torch", "transformers"} & {n.split(".")[0] for n in done.stdout.split()}


# --- completion


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("mlx-spec", "c"), ["chat", "convert"]),
        (("mlx-spec", "serve", "--p"), ["--port", "--parallel", "--pin"]),
        (("mlx-spec", "chat", "--kv-bits", ""), ["4", "8"]),
        (("mlx-spec", "chat", "dem"), ["demo"]),
        (("mlx-spec", "serve", "--target", "gemma-4-e2b-b"), ["gemma-4-e2b-bf16"]),
    ],
)
def test_completion(words, offered, capsys, monkeypatch):
    """Ask as the script of bash does."""
    monkeypatch.setenv("_MLX_SPEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 0 and capsys.readouterr().out.split() == offered


@pytest.mark.parametrize("program", ["bench", "chat", "doctor", "race", "roofline", "serve", "tune"])
def test_a_model_is_the_first_argument_of_every_program(program):
    options = resolve_name(f"mlx_spec.{PROGRAMS[program].options}")
    as_argument, as_option = (parse(options, program, words) for words in (["a/b"], ["--target", "a/b"]))
    assert as_argument.chosen == as_option.chosen == "a/b" and parse(options, program, []).chosen is None


# --- lines and tables on a terminal


def narrow_terminal(monkeypatch) -> io.StringIO:
    """Let stdout be a terminal of 40 columns. A fixture could not: pytest puts its own back before a test."""
    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("COLUMNS", "40")
    return stdout


def test_a_wide_table_does_not_become_columns_of_letters(monkeypatch):
    narrow_terminal(monkeypatch)
    rows = [
        ("model", "size", "fits here"),
        ("mlx-community/gemma-4-e2b-it-4bit", "3.1 GB", "yes, 4 of 12 GB" * 3),
    ]
    shown = table(rows)
    assert shown[:3] == ["model", "  size · fits here", rows[1][0]]
    assert max(map(len, shown)) <= 40 and " ".join(shown[3:]).split() == [
        "3.1",
        "GB",
        "·",
        *rows[1][2].split(),
    ]
    assert table([("a", "b"), ("1", "2")]) == ["a  b", "1  2"]


def test_long_lines_are_folded_between_words(monkeypatch):
    stdout = narrow_terminal(monkeypatch)
    show_folded("note   packages    mlx 0.32.4, mlx-lm 0.32.2, huggingface_hub 1.33.0", "short")
    assert stdout.getvalue().splitlines() == [
        "note   packages    mlx 0.32.4, mlx-lm",
        "                   0.32.2,",
        "                   huggingface_hub",
        "                   1.33.0",
        "short",
    ]


def test_a_table_of_80_columns_breaks_no_number(monkeypatch, capsys):
    """Columns that may go are left out, and a number is never cut."""
    rows = [["chip (GPU cores)", "GB/s", "ceiling", *"abcdefgh", "best tokens/s"]]
    rows.append(["M1 Ultra (64)", "819", "97783.7", *["1.05"] * 8, "k=1 1141.2"])
    for columns, width in ((66, 66), (80, 80), (200, 200)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = table(rows, range(1, len(rows[0])), optional=(2, *range(7, 11)))
        assert all(len(line) <= width for line in lines)
        counts = {66: (4, 0), 80: (5, 1), 200: (8, 1)}  # of the gains, and of the ceiling
        assert (lines[-1].count("1.05"), lines[-1].count("97783.7")) == counts[columns]
        assert "819" in lines[-1] and "1141.2" in lines[-1]
