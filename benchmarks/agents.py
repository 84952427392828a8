"""How many tokens of a real agent's prompts are read again, over the least that is possible?

opencode, Claude Code and pi, as they are installed, ask a server with `--target`. A model with random
weights does, if it has the architecture and the chat template of a large one: a script speaks for it. Its
logits are raised at the tokens of recorded answers, which read files, run commands and give tasks to two
helpers at once, in the model's syntax of calls. Template, caches, grammars and protocols are the product's.
The user asks three questions; with `--restart` the server starts anew before each, with a cache folder.
"Least" is what no earlier prompt or answer had at its beginning. "Usage" is the sum of what the answers say
was read. Nothing is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from serving import ROOT, Serving, start
from timing import finish, parser, table

sys.path.append(str(ROOT / "tests"))

from support.call_texts import WRITERS

from mlx_spec.apps.server.tools.formats import find_tool_format
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.decode.answer import Answer
from mlx_spec.model.target import LMTarget
from mlx_spec.tokenizer import read_tokenizer

QUESTIONS = (
    "What do the two files do? Give each to a helper.",
    "And what is in a.py exactly?",
    "How long are they?",
)
TASK = "TASK: say what this file does:"  # begins what a helper is told
# Kind and argument of each call; the text before them. Each text is in the prompts that follow.
MAIN = (
    ("I look around first.", [("read", "README.md"), ("run", "ls")]),
    ("Two can look at once.", [("helper", "a.py"), ("helper", "b.py")]),
    ("One adds numbers, the other does the same.", []),
    ("I read it again.", [("read", "a.py")]),
    ("It has forty functions.", []),
    ("A command tells.", [("run", "wc -l a.py b.py")]),
    ("They have 120 lines each.", []),
)
HELPER = (
    ("I read the file.", [("read", "a.py")]),
    ("I count.", [("run", "grep -c def a.py b.py")]),
    ("Short functions that add a number.", []),
)
CALLS: dict[str, dict[str, Any]] = {  # of each agent, with arguments in the order of the tool's schema
    "opencode": {
        "read": ("read", lambda x: {"filePath": x}),
        "run": ("bash", lambda x: {"command": x}),
        "helper": ("task", lambda x: {"description": x, "prompt": f"{TASK} {x}", "subagent_type": "general"}),
    },
    "claude": {
        "read": ("Read", lambda x: {"file_path": x}),
        "run": ("Bash", lambda x: {"command": x, "description": "look"}),
        "helper": (
            "Agent",
            lambda x: {"description": x, "prompt": f"{TASK} {x}", "subagent_type": "general-purpose"},
        ),
    },
    "pi": {
        "read": ("read", lambda x: {"path": x}),
        "run": ("bash", lambda x: {"command": x}),
        "helper": ("bash", lambda x: {"command": f"echo {x}"}),
    },
}


@dataclass
class Log:
    """The requests of a session."""

    known: list[np.ndarray[Any, Any]] = field(default_factory=list)  # prompts with their answers
    requests: int = 0
    prompt: int = 0
    read: int = 0
    least: int = 0

    def add(self, tokens: list[int], reused: int, answer: list[int]) -> None:
        prompt = np.array(tokens)
        shared = max((_shared(prompt, other) for other in self.known), default=0)
        self.known.append(np.array([*tokens, *answer]))
        self.requests += 1
        self.prompt += len(tokens)
        self.read += len(tokens) - reused
        self.least += len(tokens) - min(shared, len(tokens) - 2)


def _shared(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", required=True, help="folder of a model with a template for tools")
    options.add_argument("--agents", default="opencode,claude,pi", help="on the PATH")
    options.add_argument("--restart", action="store_true")
    options.add_argument("--log", help="internal: serve the model and log its requests here")
    options.add_argument("--agent", help="internal")
    settings, rest = options.parse_known_args()
    if settings.log:
        serve_script(settings, rest)
        return
    results, started = {}, time.time()
    for agent in settings.agents.split(","):
        with tempfile.TemporaryDirectory() as folder:
            log, usage = run(agent, settings, Path(folder))
        over = log.read / max(log.least, 1) - 1
        results[agent] = {**vars(log), "over": over, "usage": usage}
        del results[agent]["known"]
    rows = [
        (agent, r["requests"], r["prompt"], r["read"], r["usage"], r["least"], f"{r['over']:.1%}")
        for agent, r in results.items()
    ]
    table(("agent", "requests", "prompt tokens", "read", "usage", "least", "over the least"), rows)
    finish("agents", results, settings, started)


# --- the agent


def run(agent: str, settings: Any, folder: Path) -> tuple[Log, int]:
    """Let an agent answer the questions. Return its requests, and how much was read by usage."""
    log, usage = folder / "log", 0
    home, project = folder / "home", folder / "project"
    home.mkdir(), project.mkdir(), log.touch()
    for name in "ab":
        text = "".join(f"def {name}_{i}(x):\n    return x + {i}\n\n" for i in range(40))
        (project / f"{name}.py").write_text(text)
    (project / "README.md").write_text("# Numbers\n\n" + "".join(f"- part {i} adds {i}\n" for i in range(30)))
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    questions = QUESTIONS[:1] if settings.quick else QUESTIONS
    groups = [[i] for i in range(len(questions))] if settings.restart else [range(len(questions))]
    for numbers in groups:
        with scripted(agent, settings, log, folder) as served:
            name = served.send("/v1/models").json["data"][0]["id"]
            for i in numbers:
                ask(agent, served.url, name, questions[i], i > 0, home, project)
            (counted,) = served.send("/metrics.json").json["models"].values()
            usage += int(counted["prompt_tokens_total"] - counted["cached_tokens_total"])
    found = Log()
    for line in log.read_text().splitlines():
        found.add(**json.loads(line))
    return found, usage


@contextmanager
def scripted(agent: str, settings: Any, log: Path, folder: Path) -> Iterator[Serving]:
    """Run this file as the server."""
    more = ["--cache-folder", str(folder / "cache")] if settings.restart else []
    script = [str(Path(__file__)), "--target", settings.target, "--log", str(log), "--agent", agent]
    served = start("--parallel", "1", *more, program=script)
    try:
        yield served
    except BaseException:
        print("The server's log:", *served.log, sep="\n", file=sys.stderr)
        raise
    finally:
        served.stop()


def ask(agent: str, url: str, name: str, question: str, goes_on: bool, home: Path, project: Path) -> None:
    """Ask an agent a question, in its last conversation if it goes on."""
    environment = {**os.environ, "HOME": str(home), "PWD": str(project), "CI": "1", "IS_SANDBOX": "1"}
    again = ["-c"] if goes_on else []
    launch = [sys.executable, "-m", "mlx_spec", "launch", agent, "--url", url, "--"]
    command = {
        "opencode": [*launch, "run", *again, question],
        "claude": [*launch, *again, "--allowedTools", "Read,Bash,Agent", "-p", question],
        "pi": ["pi", "--provider", "here", "--model", name, *again, "-p", question],
    }[agent]
    if agent == "pi":
        model = {"id": name, "reasoning": True, "contextWindow": 100_000, "maxTokens": 8000}
        given = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
        file = home / ".pi" / "agent" / "models.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"providers": {"here": given}}))
    patience_s = 900
    subprocess.run(
        command,
        cwd=project,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        timeout=patience_s,
        check=True,
    )


# --- the model that follows a script


def serve_script(settings: Any, rest: list[str]) -> None:
    """Serve the target; each answer is the next one of the script that its prompt does not have yet."""
    folder = Path(settings.target)
    tokenizer = read_tokenizer(read_checkpoint(folder))
    form = find_tool_format(tokenizer)
    assert form is not None and form.syntax.name in WRITERS, "this template has no tools that are known here"
    calls, write = CALLS[settings.agent], WRITERS[form.syntax.name]
    opens, closes = form.syntax.markers.open, form.syntax.markers.close
    begun, wrote = Answer.__init__, LMTarget._write

    def answer_to(text: str) -> str:
        if all(text.count(f'"{name}"') + text.count(f":{name}") == 0 for name, _ in calls.values()):
            return "Files and helpers"  # a title
        steps = HELPER if TASK in text and QUESTIONS[0] not in text else MAIN
        said, wanted = next((step for step in steps if step[0] not in text), ("Done.", []))
        made = [(calls[kind][0], calls[kind][1](argument)) for kind, argument in wanted]
        return said + "".join(f"\n{opens}{write(*call)}{closes}" for call in made)

    def begin(self: Any, sequence: Any, running: Any, stream: Any) -> None:
        begun(self, sequence, running, stream)
        prompt = running.prompt
        text = tokenizer.decode_raw(list(prompt.tokens))
        closed = {"<think>": "Short.\n</think>\n\n", "<|channel>thought": "Short.\n<channel|>"}
        thinking = next((end for mark, end in closed.items() if text.rstrip().endswith(mark)), "")
        tokens = [*tokenizer.encode(thinking + answer_to(text)), min(tokenizer.eos)]
        sequence.target.script = dict(enumerate(tokens, len(prompt) - 1))
        line = {"tokens": list(prompt.tokens), "reused": self.statistics.reused_tokens, "answer": tokens}
        with Path(settings.log).open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def raised(self: Any, tokens: mx.array, *given: Any, **more: Any) -> mx.array:
        replay = 0 if self.caches.uncommitted else self._replay.size
        first = self.caches.sizes[0] + self.caches.uncommitted + replay
        logits, script = wrote(self, tokens, *given, **more), getattr(self, "script", {})
        wanted = mx.array([script.get(first + i, -1) for i in range(tokens.size)])
        chosen = mx.arange(logits.shape[-1])[None] == wanted[:, None]
        return mx.where(chosen, mx.array(1e4, logits.dtype), logits)

    Answer.__init__, LMTarget._write = begin, raised
    from mlx_spec.__main__ import main as program

    sys.argv = ["mlx-spec", "serve", "--target", str(folder), *rest]
    sys.exit(program())


if __name__ == "__main__":
    main()
