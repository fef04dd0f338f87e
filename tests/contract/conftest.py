"""Fixtures: every contract test runs on a database in memory, and on a server with Motor.

Modules that use what differs between the drivers also run with PyMongo's client; with FLOWKIT_ALL_DRIVERS, all do.
"""

from __future__ import annotations

import os
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import opened
from tests.contract.drivers import DRIVERS, connected
from tests.contract.pulling_node import Pull
from tests.servers import drop_database

from flowkit.activities.batches import puller
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.core.time import LeaseObserver
from flowkit.local.ports import HOST, free_port
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.servers import Start

BOTH_DRIVERS = {
    "test_aggregates",
    "test_artifacts",
    "test_cancel_during_wait",
    "test_drivers",
    "test_durability",
    "test_indexes",
    "test_mongodb_unavailable",
    "test_remote_database",
}
"""Modules about errors, cursors, options, indexes and cancellation, in which the drivers differ."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with each database on which it proves something."""
    module = metafunc.module.__name__.rpartition(".")[2]
    every = module in BOTH_DRIVERS or os.environ.get("FLOWKIT_ALL_DRIVERS")
    drivers = DRIVERS if every else DRIVERS[:1]
    servers = [pytest.param(driver, marks=pytest.mark.server) for driver in drivers]
    choices: dict[str, list[Any]] = {"db": ["memory", *servers], "server_db": servers, "nowhere": [*drivers]}
    for name in choices.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, choices[name], indirect=True)


class Steady:
    """The monotonic clock by which this process observes leases."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def forward(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> Steady:
    """The clock of all observers of leases, which the test moves."""
    made = Steady()
    monkeypatch.setattr(LeaseObserver, "now", lambda self: made.now)
    return made


@pytest.fixture(scope="session")
def contract_mongo_url(start_servers: Start) -> str:
    """Return the URL of the run's MongoDB."""
    return start_servers("mongo")["MONGO_URL"]


@pytest.fixture
async def db(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """An empty database."""
    if request.param == "memory":
        yield memory_database()
        return
    async with _server_database(request.param, request.getfixturevalue("contract_mongo_url")) as database:
        yield database


@pytest.fixture
async def server_db(request: pytest.FixtureRequest, contract_mongo_url: str) -> AsyncIterator[Any]:
    """An empty database on a server."""
    async with _server_database(request.param, contract_mongo_url) as database:
        yield database


@pytest.fixture
async def nowhere(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A database on a port without a server."""
    url = f"mongodb://{HOST}:{free_port()}"
    async with connected(request.param, url, serverSelectionTimeoutMS=20) as client:
        yield client.flowkit


@pytest.fixture
async def tasks(db: Any) -> TaskStore:
    """The task store of `db`, with its indexes."""
    store = TaskStore(db)
    await store.prepare()
    return store


@pytest.fixture
async def artifacts(db: Any) -> ArtifactStore:
    """The artifacts of `db`, with their indexes."""
    store = ArtifactStore(db)
    await store.prepare()
    return store


@pytest.fixture
async def open_task(artifacts: ArtifactStore, tasks: TaskStore) -> None:
    """An open task with the nodes `a` and `b`, and the indexes of their rows."""
    await opened(tasks, "a", "b")


@pytest.fixture
def pull(artifacts: ArtifactStore, tasks: TaskStore, monkeypatch: pytest.MonkeyPatch) -> Pull:
    """A pulling node, which reads the artifacts of the fixture of the test's module.

    Its sources may be idle for as long as a test takes on a busy machine.
    """
    monkeypatch.setattr(puller, "_YIELD_AFTER_SEC", 600.0)
    return Pull(artifacts, tasks)


@pytest.fixture
async def adapters(db: Any, tasks: TaskStore) -> CoordinatorAdapters:
    """The coordinator functions, on a database with one open task."""
    await opened(tasks, "a", "b")
    return CoordinatorAdapters(db=db)


@asynccontextmanager
async def _server_database(driver: str, url: str) -> AsyncIterator[Any]:
    async with connected(driver, url) as client:
        name = f"contract_{uuid.uuid4().hex[:12]}"
        try:
            yield client[name]
        finally:
            await drop_database(client, name)
