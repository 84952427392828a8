"""Coding agents on a server: what they are told, and what is refused before they start."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from support.checkpoints import edit_config, float32_copy
from support.endpoint import DEMO, Stub, listening
from support.forked import start_servers_as_forks

from mlx_spec import demo
from mlx_spec.apps import launch
from mlx_spec.apps.menubar import server_process
from mlx_spec.apps.server.engine.models import ModelCard
from mlx_spec.apps.server.settings import Settings

KEY = "secret"
PROGRAM = f"""#!{sys.executable}
import json, os, sys, urllib.request
base = os.environ.get("ANTHROPIC_BASE_URL")
health = json.load(urllib.request.urlopen(base + "/health"))["status"] if base else None
record = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "health": health}}
json.dump(record, open(os.environ["RECORD"], "w"))
sys.exit(7)
"""


class LongStub(Stub):
    """Has a model with a long context, one with a short one, and one without tools."""

    def models(self) -> tuple[ModelCard, ...]:
        return (
            ModelCard("long", (), 0, True, 65_536, thinks=False, tools=True),
            ModelCard("short", (), 0, True, 4096, thinks=False, tools=True),
            ModelCard("plain", (), 0, True, 65_536, thinks=False, tools=False),
        )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(LongStub(), Settings(DEMO, api_key=KEY)) as found:
        yield found


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with a program for each agent. Returns the file where they record how they ran."""
    for name in launch.AGENTS:
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def test_an_agent_takes_the_place_of_the_command(url, agents):
    words = ["codex", "--url", url, "--api-key", KEY, "--", "exec", "--json", "What does zip do?"]
    command = [sys.executable, "-m", "mlx_spec", "launch", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")
    record = json.loads(agents.read_text())
    assert record["arguments"][-3:] == ["exec", "--json", "What does zip do?"]
    assert record["environment"]["MLX_SPEC_API_KEY"] == KEY
    settings = dict(word.split("=", 1) for word in record["arguments"][1:-3:2])
    assert settings["model"] == '"long"' and settings["model_context_window"] == "65536"
    provider = json.loads(settings["model_provider"])
    assert json.loads(settings[f"model_providers.{provider}.base_url"]) == f"{url}/v1"
    assert json.loads(settings[f"model_providers.{provider}.env_key"]) == "MLX_SPEC_API_KEY"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, str], list[str]]:
    assert launch.main([*words, "--print"]) == 0
    head, *rest = shlex.split(capsys.readouterr().out)
    assert head == "env"
    count = next(i for i, word in enumerate(rest) if word in launch.AGENTS)
    return dict(word.split("=", 1) for word in rest[:count]), rest[count:]


def test_claude(url, capsys):
    variables, words = printed(capsys, "claude", "--url", url, "--api-key", KEY)
    assert words == ["claude"] and variables["ANTHROPIC_BASE_URL"] == url
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "YOUR-KEY" and variables["ANTHROPIC_API_KEY"] == ""
    assert variables["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == str(launch.PATIENCE_MS)
    models = {value for name, value in variables.items() if name.endswith("_MODEL")}
    assert models == {"long"} and variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "65536"


def test_opencode(url, capsys):
    variables, words = printed(capsys, "opencode", "--url", url, "--api-key", KEY, "run", "hi")
    config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    provider, model = config["model"].split("/")
    found = config["provider"][provider]
    assert words == ["opencode", "run", "hi"] and config["small_model"] == config["model"]
    options = {"baseURL": f"{url}/v1", "apiKey": "YOUR-KEY", "timeout": launch.PATIENCE_MS}
    assert found["options"] == options
    assert found["models"][model]["limit"]["context"] == 65_536


def test_qwen(url, capsys):
    variables, words = printed(capsys, "qwen", "--url", f"{url}/v1", "--api-key", KEY)
    assert variables == {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "YOUR-KEY", "OPENAI_MODEL": "long"}
    assert words == ["qwen", "--auth-type", "openai", "--model", "long"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "127.0.0.1"), ({"no_proxy": "a.b"}, "a.b,127.0.0.1"), ({"NO_PROXY": "*"}, None)],
)
def test_a_server_here_is_not_asked_through_a_proxy(given, expected, url, capsys, monkeypatch):
    for name, value in ({"http_proxy": "http://proxy:3128"} | given).items():
        monkeypatch.setenv(name, value)
    variables, _ = printed(capsys, "claude", "--url", url, "--api-key", KEY)
    assert variables.get("NO_PROXY") == variables.get("no_proxy") == expected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--model=short"], "context of 4096 tokens, and claude needs 40000"),
        (["--model=plain"], "has no tool calls"),
        (["--model=other"], "has long, short, plain"),
        (["--api-key=wrong"], "give it with --api-key"),
        (["--url=http://127.0.0.1:1"], "no mlx-spec server at http://127.0.0.1:1"),
        (["--url=http://[::1"], "write http://HOST:PORT"),
        (["--url=http://127.0.0.1:99999"], "no mlx-spec server at http://127.0.0.1:99999"),
        (["--url=http://two words:80"], "no mlx-spec server at http://two words:80"),
        (
            ["--print", "--url=http://127.0.0.1:1", "--target=demo"],
            "--print starts none: start it with `mlx-spec serve demo`",
        ),
    ],
)
@pytest.mark.usefixtures("agents")
def test_refusals(words, problem, url, capsys):
    assert launch.main(["claude", f"--url={url}", f"--api-key={KEY}", *words]) == 1
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_a_program_that_is_not_there(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.main(["qwen"]) == 1
    assert "npm install -g @qwen-code/qwen-code" in capsys.readouterr().err


@pytest.fixture
def signals() -> Iterator[None]:
    """Undo how this process handles the signals that `launch` handles."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Start servers as forks. Return the ports they are told."""
    return start_servers_as_forks(server_process, monkeypatch)


@pytest.mark.usefixtures("signals")
def test_a_server_lives_as_long_as_the_agent(agents, tmp_path, ports):
    """Its port is its own choice: one that was found free may be taken before the server listens."""
    target = float32_copy(demo.TARGET, tmp_path / "big")
    edit_config(target, lambda config: config["text_config"].update(max_position_embeddings=65_536))
    words = ("--url", "http://127.0.0.1:1", "--target", str(target), "--drafter", "none")
    assert launch.main(["claude", *words, "--", "-p", "hi"]) == 7
    record = json.loads(agents.read_text())
    assert (record["arguments"], record["health"], ports) == (["-p", "hi"], "ok", [0])
    with pytest.raises(URLError):
        urlopen(f"{record['environment']['ANTHROPIC_BASE_URL']}/health")


@pytest.mark.usefixtures("agents", "ports", "signals")
def test_the_last_words_of_a_server_that_does_not_start(tmp_path, capsys):
    (tmp_path / "log").write_text("mlx-spec: loading it\nmlx-spec: it holds no weights\nand more\n")
    assert server_process.last_words(tmp_path / "log") == "it holds no weights"
    assert launch.main(["claude", "--url", "http://127.0.0.1:1", "--target", "/no/model"]) == 1
    assert "there is no folder /no/model" in capsys.readouterr().err.splitlines()[-1]
