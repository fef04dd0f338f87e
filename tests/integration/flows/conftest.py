"""A gateway, a job handler and a supervisor for one test, beside the engine of its harness; and two more of their kind:
another tenant of the same deployment, and another deployment in the same namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.flows.world import NEIGHBOR, FlowWorld

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


@pytest.fixture
async def neighbor(world: FlowWorld, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FlowWorld]:
    """Another tenant of the deployment: an actor with a context, a runner and a secret of its own."""
    monkeypatch.setenv("NEIGHBOR_SECRET", "the-secret-of-the-neighbor")
    world.harness.environment["NEIGHBOR_SECRET"] = "the-secret-of-the-neighbor"
    made = FlowWorld(world.harness, caller=NEIGHBOR, secret="NEIGHBOR_SECRET", deployment=world)
    async with made:
        yield made


@pytest.fixture
async def other_world(world: FlowWorld, other_harness: Harness) -> AsyncIterator[FlowWorld]:
    """Another deployment in the namespace, whose flows have the same ids."""
    other_harness.environment["SUPERVISOR_SECRET"] = FlowWorld.SECRET
    async with FlowWorld(other_harness, context=world.context) as made:
        yield made
