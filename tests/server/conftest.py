"""The route of a module, which it names `PATH`, with a stub for an engine; a hub with a pair that loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from support import chromium
from support.chromium import Browser, Tab
from support.endpoint import DEMO, Place, Stub, listening, place_of
from support.hub_stand_in import ASSISTANT, E2B, ROOT, Hub, serving
from support.page import BROWSER, Stage

from mlx_spec.apps.server.settings import Settings


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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("needs Chromium: install Debian's package chromium")
    with chromium.browser(BROWSER) as started:
        yield started


@pytest.fixture(scope="session")
def opened(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as opened:
        yield opened


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    """A tab that has seen no page. A process of its own would take more than all that a test does in it."""
    yield opened
    opened.leave()


@pytest.fixture(scope="module")
def played() -> Iterator[tuple[Stub, str]]:
    stub = Stub(pause=0.001)
    with listening(stub, Settings(DEMO)) as url:
        yield stub, url


@pytest.fixture
def stage(played: tuple[Stub, str], tab: Tab) -> Stage:
    return Stage(*played, tab)
