"""A target that several tests of the chat program use."""

from __future__ import annotations

import json
import shutil

import pytest
from screen import GOLDEN


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> list[str]:
    """Options for a target that never ends by itself, reads long prompts, and thinks at once if asked."""
    folder = shutil.copytree(GOLDEN / "target", tmp_path_factory.mktemp("endless") / "target")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = None
    config["text_config"]["max_position_embeddings"] = 1_000_000
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("{% if enable_thinking %}<|channel>thought\n{% endif %}")
    return [f"--target={folder}", "--drafter=lookup"]
