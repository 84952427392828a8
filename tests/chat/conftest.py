"""The pairs that several tests of the chat program use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from support.checkpoints import edit_config
from support.screen import GOLDEN, at_home

from mlx_spec.apps.chat import models, repl
from mlx_spec.apps.chat.arguments import Options
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
    folder = shutil.copytree(GOLDEN / "target", tmp_path_factory.mktemp("endless") / "target")
    (folder / "generation_config.json").unlink()
    edit_config(folder, lambda config: config.update(eos_token_id=None))
    endless = {"eos_token_id": None, "max_position_embeddings": 1_000_000}
    edit_config(folder, lambda config: config["text_config"].update(endless))
    edit_config(folder, lambda settings: settings.pop("eos_token"), "tokenizer_config.json")
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("{% if enable_thinking %}<|channel>thought\n{% endif %}")
    return [f"--target={folder}", "--drafter=lookup"]


# Lines of a conversation -> what is said before the first and after each one. An answer is its first line.
Converse = Callable[..., list[str]]


@pytest.fixture
def converse(monkeypatch, capfd, tmp_path) -> Converse:
    """Converse in this process; what is kept is kept in the folder of the test, but for measured costs."""
    costs = saved_costs.folder()
    monkeypatch.setattr(saved_costs, "folder", lambda: costs)
    for name, value in at_home(tmp_path).items():
        monkeypatch.setenv(name, value)

    def forget() -> None:
        pass

    def converse(options: list[str], *lines: str) -> list[str]:
        said, typed = [], iter(lines)

        def read() -> str:
            forget()
            said.append("".join(capfd.readouterr()))
            for line in typed:
                return line
            raise EOFError

        monkeypatch.setattr(repl, "open_input", lambda *_, **__: read)
        with Interrupts() as interrupts:
            nonlocal forget
            forget = interrupts.clear
            assert repl.run(parse(Options, "chat", options), None, Terminal(), interrupts, None) == 0
        return said

    return converse
