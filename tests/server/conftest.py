"""A server with a stub for an engine, on a port of its own, for the modules that name a `PATH`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from endpoint import DEMO, Place, Stub, listening, said

from mlx_spec.apps.server.settings import Limits, Settings


@pytest.fixture(scope="module")
def running_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    stub = Stub()
    with listening(stub, Settings(DEMO, keepalive_seconds=0.05, limits=Limits(schema_bytes=2000))) as url:
        yield Place(stub, url, request.module.PATH)


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
