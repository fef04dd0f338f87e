"""`timeout_sec` while MongoDB is stopped: the attempts and the outage are real; Temporal is not needed."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from flowkit import CoordinatorConfig
from flowkit.activities.builtin_functions import CoordinatorAdapters, default_adapters
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.engine.worker import EngineParts
from flowkit.models import AttemptResult, FailureKind, NodeIO, OpenTask
from flowkit.worker import Batch, BatchResult, Worker
from tests.contract.builders import RUN, TASK, attempt, graph
from tests.integration.handlers import Quick
from tests.integration.harness import wait_seconds
from tests.servers import stoppable_mongo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from flowkit.local import MongoServer
    from flowkit.models import AttemptInput

    Activity = Callable[[AttemptInput], Awaitable[AttemptResult]]

pytestmark = pytest.mark.server

LIMIT_SEC = 3.0
OUTAGE_SEC = 4.0
NODES = ["role", "plain", "set"]


@dataclass
class StoppableDatabase:
    """A database with one open task, which a test can stop."""

    mongo: MongoServer
    db: Any

    async def stop(self) -> None:
        """Stop the database."""
        await asyncio.to_thread(self.mongo.stop)

    async def start(self) -> None:
        """Start it again."""
        await asyncio.to_thread(self.mongo.start)

    async def run(self, activity: Activity, given: AttemptInput) -> AttemptResult:
        """Run an attempt as a Temporal worker would."""
        environment = ActivityEnvironment()
        environment.info = replace(environment.info, workflow_id=TASK, workflow_run_id=RUN)
        result: AttemptResult = await environment.run(activity, given)
        return result

    def function(self, name: str, function: Any) -> Activity:
        """Return the activity of a coordinator function."""
        parts = EngineParts(
            config=CoordinatorConfig(),
            tasks=TaskStore(self.db),
            artifacts=ArtifactStore(self.db),
            functions={**default_adapters(db=self.db), name: function}
            if function
            else default_adapters(db=self.db),
            identity="engine",
        )
        return parts.calls.activity_for(name)


@pytest.fixture(scope="module")
def frail_mongo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoServer]:
    """A server that a test may stop and restart. A test leaves it running."""
    with stoppable_mongo(tmp_path_factory.mktemp("frail-mongo")) as mongo:
        yield mongo


@pytest.fixture
async def database(frail_mongo: MongoServer) -> AsyncIterator[StoppableDatabase]:
    client: Any = AsyncIOMotorClient(frail_mongo.url, tz_aware=True, serverSelectionTimeoutMS=1_000)
    db = client[f"limits_{uuid.uuid4().hex[:10]}"]
    tasks = TaskStore(db)
    await tasks.prepare()
    opening = OpenTask(task_id=TASK, first_run_id=RUN, run_id=RUN, at=1.0, graph=graph(*NODES), params={})
    await tasks.open_task(opening)
    yield StoppableDatabase(frail_mongo, db)
    client.close()


def given(node_id: str, **io: Any) -> AttemptInput:
    """Return an attempt with a time limit."""
    made = attempt(node_id, index=NODES.index(node_id))
    return replace(made, timeout_sec=LIMIT_SEC, io=NodeIO(**io))


async def statuses(database: StoppableDatabase) -> dict[str, str]:
    """Return the status of each node."""
    document: Any = await database.db.tasks.find_one({"id": TASK})
    return {node["node_id"]: node["status"] for node in document["graph"]["nodes"]}


async def test_attempts_can_wait_for_mongodb_longer_than_their_time_limits(
    database: StoppableDatabase,
) -> None:
    working, calls = asyncio.Event(), list[str]()

    class Working(Quick):
        async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
            working.set()
            await wait_seconds(0.2)
            assert await ctx.vars() in ({}, {"n": 1})
            await ctx.artifacts.upsert_partial("own", {"n": 1})
            assert [partial["batch_uid"] async for partial in ctx.artifacts.partials()].count("own") == 1
            return await super().process_batch(batch, ctx)

    def plain(task_id: str) -> None:
        calls.append(task_id)

    worker = Worker(db=database.db, handlers={"crawler": Working()})
    role = (await worker.open()).activity_for("crawler")
    io = {"fn": "vars.set", "fn_args": {"kv": {"n": 1}}}
    running = asyncio.create_task(database.run(role, given("role", input_inline={"batches": 3})))
    await working.wait()
    await database.stop()
    functions = asyncio.gather(
        database.run(database.function("plain", plain), given("plain", fn="plain")),
        database.run(database.function("vars.set", None), given("set", **io)),
    )
    await wait_seconds(OUTAGE_SEC)
    assert not running.done()
    assert not functions.done()
    await database.start()
    assert (await running).batches == 3
    await functions
    assert calls == [TASK]
    assert await TaskStore(database.db).variables(TASK) == {"n": 1}
    assert await statuses(database) == dict.fromkeys(NODES, "finished")
    await worker.stop()


async def failed(database: StoppableDatabase, activity: Activity, given: AttemptInput) -> dict[str, Any]:
    """Return the failure that the workflow receives."""
    with pytest.raises(ApplicationError) as caught:
        await database.run(activity, given)
    found: dict[str, Any] = caught.value.details[0]
    return found


async def test_functions_that_exceed_their_time_limits_fail(database: StoppableDatabase) -> None:
    async def endless(task_id: str) -> None:
        await asyncio.Event().wait()

    def blocking(task_id: str) -> None:
        asyncio.run(wait_seconds(2 * LIMIT_SEC))

    reported = await asyncio.gather(
        failed(database, database.function("slow", endless), given("role", fn="slow")),
        failed(database, database.function("slow", blocking), given("plain", fn="slow")),
    )
    expected = (FailureKind.FAILURE, "timeout")
    assert [(each["kind"], each["code"]) for each in reported] == [expected] * 2


async def test_mongodb_outage_in_a_user_function_uses_no_retry(database: StoppableDatabase) -> None:
    async def report(task_id: str) -> None:
        await database.stop()
        await CoordinatorAdapters(db=database.db).vars_set(task_id, n=1)

    reported = await failed(database, database.function("report", report), given("plain", fn="report"))
    assert (reported["kind"], reported["code"]) == (FailureKind.YIELDED, "mongo_unavailable")
    await database.start()
