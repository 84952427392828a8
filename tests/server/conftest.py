"""The route of a module, which it names `PATH`, with a stub for an engine; a hub with a pair that loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from support.endpoint import Place, Stub, place_of
from support.hub_stand_in import ASSISTANT, E2B, ROOT, Hub, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a target and its drafter, an empty cache, and no other models on the disk."""
    home, golden = tmp_path / "home", ROOT / "tests" / "golden" / "e2b"
    with serving({E2B: golden / "target", ASSISTANT: golden / "assistant"}) as found:
        variables = found.variables(home) | {"XDG_DATA_HOME": str(home / "data")}
        for name, value in variables.items() - {("PATH", "")}:
            monkeypatch.setenv(name, value)
        found.take_place(monkeypatch, home / "hub")
        monkeypatch.setattr(platformdirs, "user_data_path", lambda *_, **__: home / "data")
        yield found


@pytest.fixture(scope="session")
def openai() -> Any:
    """OpenAI's client, imported by the first test that uses it: that takes a second of CPU."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="session")
def anthropic() -> Any:
    return pytest.importorskip("anthropic")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request.module.PATH)


@pytest.fixture
def stub(place: Place) -> Stub:
    return place.stub
