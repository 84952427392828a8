"""`mlx-spec launch`: run a coding agent on a local server, for this run only.

The agent is configured by environment variables and its options. No file of the user is changed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument

from mlx_spec.checkpoint.files import typed_path
from mlx_spec.cli.command import MODEL, BadOptions, flag, option, program, show, tell
from mlx_spec.errors import InvalidValue, NotFound
from mlx_spec.hub.catalog import PairSpec

from .menubar import server_process
from .menubar.server_process import Address, get_json, health, last_words
from .server.settings import Settings

PROVIDER = "mlx_spec"  # the name of the server in the configuration of an agent
ANSWER_S = 30.0  # until a server that may be busy answers /health or /v1/models
PATIENCE_MS = 3_600_000  # until an agent gives up an answer; reading a long prompt may take minutes

Name = Literal["codex", "claude", "opencode", "qwen"]


@dataclass(frozen=True)
class Options:
    """Run a coding agent on a server that runs, or on one that is started for it."""

    agent: Annotated[Name, Argument(metavar="AGENT", help="codex, claude, opencode or qwen")]
    arguments: Annotated[list[str] | None, Argument(metavar="[-- ARGS]", help="its own arguments")] = None
    url: Annotated[str, option(value="URL", help="the server, if it runs")] = (
        f"http://{Settings.host}:{Settings.port}"
    )
    model: Annotated[
        str | None, option(value="NAME", help="one of the models of the server", default="the first")
    ] = None
    target: Annotated[
        str | None,
        option(value=MODEL, help="start a server with this model, unless one has it", default="start none"),
    ] = None
    drafter: Annotated[
        str | None, option(value=MODEL, help="its drafter", default="the one made for the target")
    ] = None
    api_key: Annotated[str | None, option(value="KEY", help="of the server, if it has one")] = None
    print: Annotated[bool, flag("--print", "show the command and its variables, run nothing")] = False

    def __post_init__(self) -> None:
        if self.drafter is not None and self.target is None:
            raise BadOptions("--drafter goes with --target")

    @property
    def address(self) -> Address:
        """Return the address in --url. Raises InvalidValue."""
        # IPv6 addresses are in brackets.
        url = r"http://(?:\[([^/\]]+)\]|([^/:@\[\]]+)):(\d{1,5})(?:/|/v1)?"
        if (match := re.fullmatch(url, self.url)) is None:
            raise InvalidValue(f"--url {self.url}: write http://HOST:PORT")
        return Address(match[1] or match[2], int(match[3]))


@dataclass(frozen=True)
class Endpoint:
    """A model of a server, for the settings of an agent."""

    url: str
    key: str
    model: str
    context: int  # tokens


# --- agents: variables and arguments


def _codex(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    provider = f"model_providers.{PROVIDER}"
    values: dict[str, Any] = {
        "model": endpoint.model,
        "model_provider": PROVIDER,
        "model_context_window": endpoint.context,
        f"{provider}.name": PROVIDER,
        f"{provider}.base_url": f"{endpoint.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.stream_idle_timeout_ms": PATIENCE_MS,
        f"{provider}.env_key": "MLX_SPEC_API_KEY",
    }
    arguments = [
        word
        for key, value in values.items()
        for word in ("-c", f"{key}={json.dumps(value, ensure_ascii=False)}")
    ]
    return {"MLX_SPEC_API_KEY": endpoint.key}, arguments


def _claude(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    roles = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    tiers = [f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("HAIKU", "SONNET", "OPUS")]
    return {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "ANTHROPIC_API_KEY": "",  # else Claude Code asks which of the two keys to use
        **dict.fromkeys([*roles, *tiers], endpoint.model),
        **dict.fromkeys(["API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS"], str(PATIENCE_MS)),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.context),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it differs in each request, so no prefix could be reused
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }, []


def _opencode(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    limit = {"context": endpoint.context, "output": endpoint.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.key, "timeout": PATIENCE_MS},
        "models": {endpoint.model: {"name": endpoint.model, "limit": limit, "tool_call": True}},
    }
    model = f"{PROVIDER}/{endpoint.model}"
    config = {"provider": {PROVIDER: provider}, "model": model, "small_model": model}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, []


def _qwen(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    variables = {
        "OPENAI_BASE_URL": f"{endpoint.url}/v1",
        "OPENAI_API_KEY": endpoint.key,
        "OPENAI_MODEL": endpoint.model,
    }
    return variables, ["--auth-type", "openai", "--model", endpoint.model]


@dataclass(frozen=True)
class Agent:
    """A coding agent: how to install it, what it needs, and how to point it at a server."""

    install: str  # a shell command
    context: int  # tokens that its first prompt and a short task take together
    settings: Callable[[Endpoint], tuple[dict[str, str], list[str]]]  # -> variables, arguments


AGENTS: dict[str, Agent] = {
    "codex": Agent("npm install -g @openai/codex", 24_000, _codex),
    "claude": Agent("npm install -g @anthropic-ai/claude-code", 40_000, _claude),
    "opencode": Agent("npm install -g opencode-ai", 24_000, _opencode),
    "qwen": Agent("npm install -g @qwen-code/qwen-code", 32_000, _qwen),
}


# --- the program


def _run(options: Options) -> int:
    agent = AGENTS[options.agent]
    program = shutil.which(options.agent)
    if program is None and not options.print:
        raise NotFound(f"{options.agent} is not on PATH: install it with `{agent.install}`")
    with _server(options) as (address, is_ours):
        variables, words = agent.settings(_endpoint(address, options, agent))
        variables |= _bypass_proxy(address.connect_host)
        words += options.arguments or []
        if program is None or options.print:
            pairs = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
            show(" ".join(["env", *pairs, options.agent, shlex.join(words)]).rstrip())
            return 0
        environment = os.environ | variables
        if not is_ours:
            os.execve(program, [program, *words], environment)
        # Ctrl-C is for the agent, which may go on. The agent would inherit SIG_IGN, but not a handler.
        signal.signal(signal.SIGINT, lambda _number, _frame: None)
        status = subprocess.Popen([program, *words], env=environment).wait()
        return status if status >= 0 else 128 - status


def _bypass_proxy(host: str) -> dict[str, str]:
    """Return the variables that let an agent reach the server without the user's HTTP proxy."""
    variables = {name.lower(): value for name, value in os.environ.items() if value}
    without = variables.get("no_proxy", "")
    if without == "*" or not variables.keys() & {"http_proxy", "all_proxy"}:
        return {}
    return dict.fromkeys(("NO_PROXY", "no_proxy"), f"{without},{host}".removeprefix(","))


def _endpoint(address: Address, options: Options, agent: Agent) -> Endpoint:
    """Return the chosen model. Raises NotFound if it is not served, InvalidValue if it does not suffice."""
    if not (models := _models(address, options.api_key)):
        raise NotFound(f"{address.url} lists no models: if it has a key, give it with --api-key")
    wanted = options.model or (_served_name(options.target) if options.target else next(iter(models)))
    if wanted not in models:
        raise NotFound(f"--model {wanted}: {address.url} has {', '.join(models)}")
    row = models[wanted]
    context, who = row["context_length"] or agent.context, f"model {wanted!r}"
    if context < agent.context:
        raise InvalidValue(
            f"{who} has a context of {context} tokens, and {options.agent} needs {agent.context}: "
            "serve a model with a longer one"
        )
    if row["tools"] is False:
        raise InvalidValue(f"{who} has no tool calls that the server knows, and {options.agent} needs them")
    no_key = "none"  # agents need some text; a server without a key accepts any
    shown_key = "YOUR-KEY"  # stands for the key in what is printed
    key = shown_key if options.print and options.api_key else options.api_key or no_key
    return Endpoint(address.url, key, wanted, context)


# --- the server


@contextmanager
def _server(options: Options) -> Iterator[tuple[Address, bool]]:
    """Yield the address of a server that is ready, and True if it was started for this run."""
    address, target = options.address, options.target
    runs = health(address, ANSWER_S) is not None
    if runs and (target is None or _served_name(target) in _models(address, options.api_key)):
        _wait_ready(address)
        yield address, False
        return
    if target is not None and options.print:
        raise NotFound(
            f"no mlx-spec server at {address.url} has {target}, and --print starts none: start it with "
            f"`mlx-spec serve {shlex.quote(target)}`"
        )
    if target is None:
        raise NotFound(
            f"no mlx-spec server at {address.url}: start one with `mlx-spec serve --target REPO`, "
            "or let --target REPO start one for this run"
        )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = server_process.launch((), PairSpec(target, options.drafter), 0, log)
        try:
            tell(f"loading {target} ...")
            address = _announced(process, log)
            _wait_ready(address, process, log)
            yield address, True
        finally:
            server_process.end(process)


def _models(address: Address, key: str | None) -> dict[str, dict[str, Any]]:
    """Return the rows of /v1/models by the names of the models."""
    return {
        row["id"]: row for row in get_json(address, "/v1/models", key, patience_s=ANSWER_S).get("data") or []
    }


def _served_name(target: str) -> str:
    """Return the name that `mlx-spec serve --target` gives a model."""
    return typed_path(target).name or target


def _announced(process: subprocess.Popen[bytes], log: Path) -> Address:
    """Wait until a server writes its address into its log; return it. Raises NotFound if the server ends."""
    while True:
        has_ended = process.poll() is not None  # asked before the log is read, so that the log is complete
        if match := re.search(r"  page  http://(.+):(\d+)\n", log.read_text(errors="replace")):
            return Address(match[1], int(match[2]))
        if has_ended:
            raise NotFound(last_words(log) or "the server could not start: its log says nothing")
        time.sleep(0.05)


def _wait_ready(
    address: Address, process: subprocess.Popen[bytes] | None = None, log: Path | None = None
) -> None:
    """Wait until a server has loaded its model. Raises NotFound if it ends, or cannot load it."""
    while (status := health(address, ANSWER_S)) != "ok":
        ended = process.poll() is not None if process is not None else status in (None, "failed", "draining")
        if ended:
            words = last_words(log) if log is not None else None
            raise NotFound(words or f"the server at {address.url} could not load its model: its log says why")
        poll_s = 0.2  # between two looks at a server that loads
        time.sleep(poll_s)


main = program("launch", Options, _run)
