"""The number of MongoDB calls of a node, and how many of them wait for each other."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pymongo.monitoring import CommandListener
from tests.contract.attempt_executors import Returning, function_executor, role_executor
from tests.contract.builders import attempt, opened
from tests.contract.drivers import DRIVERS, connected
from tests.contract.pulling_node import ended_source
from tests.unit.event_loop import let_other_tasks_run

from flowkit.activities.handlers import BatchResult, FinalizeResult
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.models import NodeIO
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from flowkit.models import AttemptInput

COUNTED = BatchResult(success=True, metrics={"n": 1})
FINAL = FinalizeResult(metrics={"total": 1})
PULL = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["b"]}}


def own(name: str = "noop", **args: Any) -> AttemptInput:
    """Return an attempt of the function node `a`."""
    return replace(attempt(), role="coordinator_fn", io=NodeIO(fn=name, fn_args=args))


async def nothing(task_id: str) -> None:
    """A function of the user."""


async def one_batch(db: Any) -> None:
    await role_executor(db, attempt(), Returning(COUNTED, "b1")).run()


async def one_batch_and_an_end(db: Any) -> None:
    await role_executor(db, attempt(), Returning(COUNTED, "b1", final=FINAL)).run()


async def increments(db: Any) -> None:
    final = FinalizeResult(vars={"incr": {"n": 1, "counts.done": 2}})
    await role_executor(db, attempt(), Returning(COUNTED, "b1", final=final)).run()


async def no_metrics(db: Any) -> None:
    await role_executor(db, attempt(), Returning(BatchResult(success=True), "b1")).run()


async def inline(db: Any) -> None:
    await role_executor(db, attempt(), Returning(COUNTED, "b1"), may_repeat=True).run()


async def pulled(db: Any) -> None:
    pulling = replace(attempt(sources={"b": 1}), io=NodeIO(input_inline=PULL))
    await role_executor(db, pulling, Returning(COUNTED)).run()


async def function(db: Any) -> None:
    await function_executor(db, own(), nothing).run()


async def built_in(db: Any) -> None:
    await function_executor(db, own("vars.set", kv={"x": 1}), CoordinatorAdapters(db=db).vars_set).run()


BEGIN, END = "findAndModify tasks", "update tasks"
"""The begin of a role's attempt also reads the params of the task."""
BATCH = ["insert artifacts", "insert metrics_raw"]
MARKER = "insert artifacts"

COSTS: list[tuple[Callable[[Any], Awaitable[None]], list[str], int]] = [
    (one_batch, [BEGIN, *BATCH, MARKER, END], 3),
    (one_batch_and_an_end, [BEGIN, *BATCH, MARKER, "insert metrics_raw", END], 3),
    (increments, [BEGIN, *BATCH, MARKER, END], 4),
    (no_metrics, [BEGIN, "insert artifacts", "delete metrics_raw", MARKER, END], 3),
    (inline, [BEGIN, *BATCH, MARKER, END], 3),
    (function, ["update tasks", MARKER, END], 2),
    (built_in, ["update tasks", MARKER], 2),
]
PULLING = [
    *("find artifacts", "find metrics_raw", "find artifacts", "find artifacts", "insert stream_progress"),
    *("find artifacts", "find tasks"),
]
NODES = pytest.mark.parametrize(("node", "calls", "trips"), COSTS, ids=[cost[0].__name__ for cost in COSTS])


async def prepared(db: Any) -> Any:
    """`db` with an open task of the nodes `a` and `b`, of which `b` has ended with one batch."""
    tasks, artifacts = TaskStore(db), ArtifactStore(db)
    await tasks.prepare()
    await artifacts.prepare()
    await opened(tasks, "a", "b")
    await ended_source(artifacts, "b1", node="b")
    return db


class Commands(CommandListener):
    """Records the commands that a driver sends."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def started(self, event: Any) -> None:
        """Record command and collection."""
        self.sent.append(f"{event.command_name} {event.command[event.command_name]}")

    def succeeded(self, event: Any) -> None:
        """Ignore the event."""

    failed = succeeded


@pytest.fixture(params=[pytest.param(driver, marks=pytest.mark.server) for driver in DRIVERS])
async def monitored(
    request: pytest.FixtureRequest, contract_mongo_url: str
) -> AsyncIterator[tuple[Any, list[str]]]:
    """A prepared database on a server, and the commands that it receives from then on."""
    listener = Commands()
    async with connected(request.param, contract_mongo_url, event_listeners=[listener]) as client:
        name = f"contract_{uuid.uuid4().hex[:12]}"
        db = await prepared(client[name])
        listener.sent.clear()
        yield db, listener.sent
        await client.drop_database(name)


@NODES
async def test_node_makes_only_these_calls(
    monitored: tuple[Any, list[str]], node: Any, calls: list[str], trips: int
) -> None:
    db, sent = monitored
    await node(db)
    assert sorted(sent) == sorted(calls)


async def test_pulled_batch_adds_only_these_calls(monitored: tuple[Any, list[str]]) -> None:
    db, sent = monitored
    await pulled(db)
    assert sorted(sent) == sorted([BEGIN, *BATCH, MARKER, END, *PULLING])


# --- calls that wait for each other ---------------------------------------------------------------------------------


class RoundTrips:
    """A database that responds in rounds: it completes all calls of a round together."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self._round: asyncio.Task[None] | None = None
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return _Collection(self._db[name], self)

    async def answered(self) -> None:
        """Return at the end of the round."""
        if self._round is None or self._round.done():
            self.count += 1
            self._round = asyncio.create_task(self._take())
        await asyncio.shield(self._round)

    async def _take(self) -> None:
        for _ in range(20):
            await let_other_tasks_run()


class _Collection:
    def __init__(self, collection: Any, trips: RoundTrips) -> None:
        self._collection = collection
        self._trips = trips

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._collection, name)
        if name == "find":
            return lambda *args, **options: self._found(method(*args, **options))

        async def call(*args: Any, **options: Any) -> Any:
            await self._trips.answered()
            return await method(*args, **options)

        return call

    async def _found(self, cursor: Any) -> AsyncIterator[Any]:
        await self._trips.answered()
        async for document in cursor:
            yield document


@NODES
async def test_independent_calls_of_a_node_are_made_concurrently(
    node: Any, calls: list[str], trips: int
) -> None:
    db = RoundTrips(await prepared(memory_database()))
    await node(db)
    assert db.count == trips
