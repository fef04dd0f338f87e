"""Fixtures: every contract test runs on a database in memory, and on a server with each of the two drivers."""

from __future__ import annotations

import os
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import opened
from tests.contract.drivers import DRIVERS, connected

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.task_store import TaskStore
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.local.mongo import MongoServer
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SERVER_DATABASES = [pytest.param(driver, marks=pytest.mark.server) for driver in DRIVERS]


@pytest.fixture(scope="session")
def contract_mongo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the server in MONGO_URL, or start one."""
    if url := os.environ.get("MONGO_URL"):
        yield url
        return
    with MongoServer(tmp_path_factory.mktemp("contract-mongo")) as server:
        yield server.url


@pytest.fixture(params=["memory", *SERVER_DATABASES])
async def db(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """An empty database."""
    if request.param == "memory":
        yield memory_database()
        return
    async with _server_database(request.param, request.getfixturevalue("contract_mongo_url")) as database:
        yield database


@pytest.fixture(params=SERVER_DATABASES)
async def server_db(request: pytest.FixtureRequest, contract_mongo_url: str) -> AsyncIterator[Any]:
    """An empty database on a server."""
    async with _server_database(request.param, contract_mongo_url) as database:
        yield database


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
            await client.drop_database(name)
