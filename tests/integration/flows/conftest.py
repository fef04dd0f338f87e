"""A gateway, a job handler and a supervisor for one test, beside the engine of its harness."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.flows.world import FlowWorld

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.harness import Harness


@pytest.fixture
async def world(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FlowWorld]:
    """A world whose supervisor is the runner 71 of context 3."""
    monkeypatch.setenv("SUPERVISOR_SECRET", FlowWorld.SECRET)
    harness.environment["SUPERVISOR_SECRET"] = FlowWorld.SECRET
    async with FlowWorld(harness) as made:
        yield made
