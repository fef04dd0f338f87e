"""Fixtures: each test gets its own World on the shared servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.world import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.local import Stack


@pytest.fixture
async def world(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A World with a queue and a database that no other test uses."""
    made = World(temporal=stack.temporal_address, mongo=stack.mongo_url)
    monkeypatch.setenv("MONGO_DATABASE", made.database)
    monkeypatch.setenv("MONGO_URL", stack.mongo_url)
    monkeypatch.setenv("TEMPORAL_ADDRESS", stack.temporal_address)
    yield made
    await made.close()
