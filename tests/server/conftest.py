"""A server with a stub for an engine, on a port of its own, for the modules that name a `PATH`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from endpoint import DEMO, Place, Stub, listening, said, stubbed

from mlx_spec.apps.server.settings import Limits, Settings


@pytest.fixture(scope="module")
def running_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    stub, settings = Stub(), Settings(DEMO, keepalive_seconds=0.05, limits=Limits(schema_bytes=2000))
    with listening(stub, settings) as url:
        yield Place(stub, stubbed(stub, settings), request.module.PATH, url)


@pytest.fixture
def place(running_place: Place) -> Place:
    stub = running_place.stub
    stub.events, stub.refusal = said("Hi"), None
    stub.requests.clear()
    stub.jobs.clear()
    return running_place


@pytest.fixture
def stub(place: Place) -> Stub:
    return place.stub
