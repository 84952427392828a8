"""The pairs that several tests of the chat program use."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache

import pytest
from support.checkpoints import edit_config
from support.screen import GOLDEN

from mlx_spec.apps.chat import models


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
