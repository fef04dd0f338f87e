"""Fixtures: each test gets its own harness on the shared servers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from flowkit.activities import attempt_log
from flowkit.workflows import local_attempts
from tests.integration.harness import Harness
from tests.servers import SHORT_RUNS, SHORT_RUNS_NAMESPACE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.local import Stack
    from tests.servers import Start


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no inline attempt take too long on a busy machine, since an ordinary one would follow it."""
    monkeypatch.setattr(local_attempts, "MAX_END_SEC", 60.0)


@pytest.fixture
def quick_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every success count as a quick one in the log of attempts, however long a busy machine takes for it."""
    monkeypatch.setattr(attempt_log, "YOUNG_SEC", 600.0)


@pytest.fixture(scope="session")
def short_runs_address(start_servers: Start) -> str:
    """The address of the run's Temporal server that soon suggests continue-as-new."""
    return start_servers("short-runs")[SHORT_RUNS]


@pytest.fixture
async def short_runs(
    stack: Stack, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Harness]:
    """A harness whose tasks soon continue as a new run."""
    if namespace := os.environ.get(SHORT_RUNS_NAMESPACE):
        address = stack.temporal_address
        monkeypatch.setenv("TEMPORAL_NAMESPACE", namespace)
    else:
        address = request.getfixturevalue("short_runs_address")
    made = Harness(temporal=address, mongo=stack.mongo_url)
    monkeypatch.setenv("MONGO_DATABASE", made.database)
    monkeypatch.setenv("TEMPORAL_ADDRESS", address)
    yield made
    await made.close()


@pytest.fixture
async def harness(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    """A harness with a queue and a database that no other test uses."""
    made = Harness(temporal=stack.temporal_address, mongo=stack.mongo_url)
    monkeypatch.setenv("MONGO_DATABASE", made.database)
    monkeypatch.setenv("MONGO_URL", stack.mongo_url)
    monkeypatch.setenv("TEMPORAL_ADDRESS", stack.temporal_address)
    yield made
    await made.close()


@pytest.fixture
async def other_harness(stack: Stack) -> AsyncIterator[Harness]:
    """Another deployment in the namespace of `harness`, with a queue and a database of its own."""
    made = Harness(temporal=stack.temporal_address, mongo=stack.mongo_url)
    yield made
    await made.close()
