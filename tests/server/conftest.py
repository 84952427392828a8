"""The route of a module, which it names `PATH`, with a stub for an engine."""

from __future__ import annotations

import pytest
from support.endpoint import Place, Stub, place_of


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request.module.PATH)


@pytest.fixture
def stub(place: Place) -> Stub:
    return place.stub
