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
from flowkit.adapters.tasks.task_store import TaskStore
from flowkit.core.loop_portal import LoopPortal
from flowkit.engine.worker import function_activities
from flowkit.local import MongoServer
from flowkit.models import AttemptResult, FailureKind, NodeIO, OpenTask
from flowkit.worker import Batch, BatchResult, Worker
from tests.contract.builders import RUN, TASK, attempt, graph
from tests.integration.handlers import Quick
from tests.integration.harness import wait_seconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from flowkit.models import AttemptInput

    Activity = Callable[[AttemptInput], Awaitable[AttemptResult]]

pytestmark = pytest.mark.server

LIMIT_SEC = 3.0
OUTAGE_SEC = 4.0


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

    async def run_without_mongodb(self, activity: Activity, given: AttemptInput) -> AttemptResult:
        """Run an attempt whose database is unavailable for longer than its time limit."""
        await self.stop()
        running = asyncio.create_task(self.run(activity, given))
        await wait_seconds(OUTAGE_SEC)
        assert not running.done()
        await self.start()
        return await running

    def function(self, name: str, function: Any) -> Activity:
        """Return the activity of a coordinator function."""
        calls = function_activities(
            config=CoordinatorConfig(),
            tasks=TaskStore(self.db),
            artifacts=ArtifactStore(self.db),
            portal=LoopPortal(),
            functions={**default_adapters(db=self.db), name: function}
            if function
            else default_adapters(db=self.db),
            identity="engine",
        )
        return calls.activity_for(name)


@pytest.fixture(scope="module")
def frail_mongo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoServer]:
    """A server that a test may stop and restart. A test leaves it running."""
    with MongoServer(tmp_path_factory.mktemp("frail-mongo")) as mongo:
        yield mongo


@pytest.fixture
async def database(frail_mongo: MongoServer) -> AsyncIterator[StoppableDatabase]:
    client: Any = AsyncIOMotorClient(frail_mongo.url, tz_aware=True, serverSelectionTimeoutMS=1_000)
    db = client[f"limits_{uuid.uuid4().hex[:10]}"]
    tasks = TaskStore(db)
    await tasks.prepare()
    opening = OpenTask(task_id=TASK, first_run_id=RUN, run_id=RUN, at=1.0, graph=graph("a"), params={})
    await tasks.open_task(opening)
    yield StoppableDatabase(frail_mongo, db)
    client.close()


def given(**io: Any) -> AttemptInput:
    """Return an attempt with a time limit."""
    return replace(attempt(), timeout_sec=LIMIT_SEC, io=NodeIO(**io))


async def status(database: StoppableDatabase) -> str:
    """Return the status of the node."""
    document: Any = await database.db.tasks.find_one({"id": TASK})
    return str(document["graph"]["nodes"][0]["status"])


async def test_role_attempt_can_wait_for_mongodb_longer_than_its_time_limit(
    database: StoppableDatabase,
) -> None:
    working = asyncio.Event()

    class Working(Quick):
        async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
            working.set()
            await wait_seconds(0.2)
            assert await ctx.vars() == {}
            await ctx.artifacts.upsert_partial("own", {"n": 1})
            assert [partial["batch_uid"] async for partial in ctx.artifacts.partials()].count("own") == 1
            return await super().process_batch(batch, ctx)

    worker = Worker(db=database.db, handlers={"crawler": Working()})
    activity = (await worker.open()).activity_for("crawler")
    running = asyncio.create_task(database.run(activity, given(input_inline={"batches": 3})))
    await working.wait()
    await database.stop()
    await wait_seconds(OUTAGE_SEC)
    await database.start()
    assert (await running).batches == 3
    assert await status(database) == "finished"
    await worker.stop()


async def test_function_can_wait_for_mongodb_longer_than_its_time_limit(database: StoppableDatabase) -> None:
    calls: list[str] = []

    def plain(task_id: str) -> None:
        calls.append(task_id)

    await database.run_without_mongodb(database.function("plain", plain), given(fn="plain"))
    assert calls == [TASK]
    assert await status(database) == "finished"


async def test_built_in_function_can_wait_for_mongodb_longer_than_its_time_limit(
    database: StoppableDatabase,
) -> None:
    io = {"fn": "vars.set", "fn_args": {"kv": {"n": 1}}}
    await database.run_without_mongodb(database.function("vars.set", None), given(**io))
    assert await TaskStore(database.db).variables(TASK) == {"n": 1}


async def failed(database: StoppableDatabase, activity: Activity, given: AttemptInput) -> dict[str, Any]:
    """Return the failure that the workflow receives."""
    with pytest.raises(ApplicationError) as caught:
        await database.run(activity, given)
    found: dict[str, Any] = caught.value.details[0]
    return found


@pytest.mark.parametrize("plain", [True, False])
async def test_function_that_exceeds_its_time_limit_fails(database: StoppableDatabase, plain: bool) -> None:
    released = asyncio.Event()

    async def endless(task_id: str) -> None:
        await released.wait()

    def blocking(task_id: str) -> None:
        asyncio.run(wait_seconds(2 * LIMIT_SEC))

    function = blocking if plain else endless
    reported = await failed(database, database.function("slow", function), given(fn="slow"))
    assert (reported["kind"], reported["code"]) == (FailureKind.FAILURE, "timeout")


async def test_mongodb_outage_in_a_user_function_uses_no_retry(database: StoppableDatabase) -> None:
    async def report(task_id: str) -> None:
        await database.stop()
        await CoordinatorAdapters(db=database.db).vars_set(task_id, n=1)

    reported = await failed(database, database.function("report", report), given(fn="report"))
    assert (reported["kind"], reported["code"]) == (FailureKind.YIELDED, "mongo_unavailable")
    await database.start()
