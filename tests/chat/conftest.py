"""The pairs that several tests of the chat program use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from support.checkpoints import edit_config, float32_copy
from support.screen import GOLDEN, at_home

from mlx_spec.apps.chat import models, repl
from mlx_spec.apps.chat.arguments import Options
from mlx_spec.apps.chat.input import PROMPT
from mlx_spec.apps.chat.interrupts import Interrupts
from mlx_spec.apps.chat.terminal import Terminal
from mlx_spec.cli.command import parse
from mlx_spec.policy import saved_costs


@pytest.fixture(autouse=True, scope="module")
def loaded_once() -> Iterator[None]:
    """Load and measure each pair once for all conversations of a module that run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load", cache(models.load))
        yield


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> list[str]:
    """Options for a target that never ends by itself, reads long prompts, and thinks at once if asked."""
    folder = float32_copy(GOLDEN / "target", tmp_path_factory.mktemp("endless") / "target")
    (folder / "generation_config.json").unlink()
    edit_config(folder, lambda config: config.update(eos_token_id=None))
    endless = {"eos_token_id": None, "max_position_embeddings": 1_000_000}
    edit_config(folder, lambda config: config["text_config"].update(endless))
    edit_config(folder, lambda settings: settings.pop("eos_token"), "tokenizer_config.json")
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("{% if enable_thinking %}<|channel>thought\n{% endif %}")
    return [f"--target={folder}", "--drafter=lookup"]


Line = str | Callable[[], str]  # a function is called when the line is asked for


class Typed(Terminal):
    """A terminal on which lines are typed, and replies to questions."""

    def __init__(self, lines: Sequence[Line], replies: str, heard: Callable[[], str]) -> None:
        super().__init__()
        self._lines, self._replies, self._heard = iter(lines), iter(replies), heard
        self.said: list[str] = []  # before the first line, and after each one

    def ask(self, prompt: str) -> str:
        if prompt != PROMPT:
            print(prompt, flush=True)
            return next(self._replies)
        self.said.append(self._heard())
        for line in self._lines:
            return line() if callable(line) else line
        raise EOFError


# Options and lines of a conversation -> what is said. An answer is the first line of what is said.
Converse = Callable[..., list[str]]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the test, where all that is kept is kept, but for measured costs."""
    costs = saved_costs.folder()
    costs.mkdir(parents=True, exist_ok=True)
    for name, value in at_home(tmp_path).items():
        monkeypatch.setenv(name, value)
    saved_costs.folder().parent.mkdir(parents=True)
    saved_costs.folder().symlink_to(costs)
    return tmp_path


@pytest.fixture
def converse(home: Path, capfd: pytest.CaptureFixture[str]) -> Converse:
    """Converse in this process. `replies` has a letter for each question."""

    def converse(options: list[str], *lines: Line, replies: str = "", has_styles: bool = False) -> list[str]:
        terminal = Typed(lines, replies, lambda: "".join(capfd.readouterr()))
        terminal.has_styles = has_styles
        with Interrupts() as interrupts:
            assert repl.run(parse(Options, "chat", options), None, terminal, interrupts, None) == 0
        return terminal.said

    return converse
