"""The registry lists the workers that run, and expires the others."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import pytest
from pymongo.errors import AutoReconnect
from tests.contract.builders import AT, WORKER, attempt, documents_of, seconds
from tests.contract.drivers import DRIVERS, connected
from tests.contract.recording_database import RecordingDatabase, conflicts
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually

from flowkit.adapters.mongo import moment
from flowkit.adapters.worker_events import WorkerEvents, done
from flowkit.adapters.worker_registry import HostedHandler, WorkerRegistry, find_mixed_versions
from flowkit.errors import StoreRefused, StoreUnavailable
from flowkit.local.ports import HOST, free_port
from flowkit.testing import memory_database
from flowkit.worker.registration import WorkerRegistration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.contract.conftest import Steady

LEASE = {"worker_id": WORKER, "lease_id": "lease-1", "deadline_ts_ms": 5_000}
KEY = [("task_id", 1), ("node_id", 1), ("event_hash", 1)]


@pytest.fixture
async def registry(db: Any) -> WorkerRegistry:
    """The registry of `db`, with its index."""
    found = WorkerRegistry(db)
    await found.prepare()
    return found


async def shown(db: Any) -> tuple[str, float]:
    """Return status and time of the only worker."""
    [row] = await documents_of(db.worker_registry)
    return row["status"], seconds(row["last_seen"])


# --- indexes ------------------------------------------------------------------------------------------------


async def test_indexes_have_the_documented_names(db: Any) -> None:
    for _ in range(2):
        await WorkerRegistry(db).prepare()
        await WorkerEvents(db).prepare()
    workers = (await db.worker_registry.index_information())["uniq_worker"]
    log = (await db.worker_events.index_information())["uniq_worker_event"]
    assert (workers["key"], workers["unique"]) == ([("worker_id", 1)], True)
    assert (log["key"], log["unique"]) == (KEY, True)


@pytest.mark.parametrize("store", [WorkerRegistry, WorkerEvents, lambda db: registration(db)])
async def test_duplicates_prevent_the_start(db: Any, store: Callable[[Any], Any]) -> None:
    await db.worker_registry.insert_many([{"worker_id": WORKER} for _ in range(2)])
    await db.worker_events.insert_many([{name: "twice" for name, _ in KEY} for _ in range(2)])
    with pytest.raises(StoreRefused):
        await store(db).prepare()


# --- registry -----------------------------------------------------------------------------------------------


async def test_online_worker_is_registered_like_an_announced_external_worker(
    db: Any, registry: WorkerRegistry
) -> None:
    await registry.register(WORKER, ["crawler", "indexer"], "2.0.0", 8, AT, announce_interval_sec=30)
    [row] = await documents_of(db.worker_registry)
    assert seconds(row.pop("last_seen")) == AT
    del row["_id"], row["session"]
    assert row == {
        "worker_id": WORKER,
        "type": "crawler,indexer",
        "capabilities": {"roles": ["crawler", "indexer"]},
        "version": "2.0.0",
        "capacity": {"tasks": 8},
        "announce_interval_sec": 30,
        "status": "online",
    }


async def test_new_process_with_the_same_id_replaces_the_row(db: Any, registry: WorkerRegistry) -> None:
    await registry.register(WORKER, ["crawler"], "1.0.0", 1, AT, session="old")
    await registry.register(WORKER, ["indexer"], "2.0.0", 2, AT + 1, session="new")
    [row] = await documents_of(db.worker_registry)
    assert (row["type"], row["version"], row["capacity"]) == ("indexer", "2.0.0", {"tasks": 2})


@pytest.mark.parametrize("session", ["", "one"])
async def test_heartbeat_and_going_offline_are_recorded(
    db: Any, registry: WorkerRegistry, session: str
) -> None:
    await registry.register(WORKER, ["crawler"], "2.0.0", 1, AT, session=session)
    assert await registry.refresh(WORKER, AT + 5, session=session)
    assert await shown(db) == ("online", AT + 5)
    assert await registry.mark_offline(WORKER, AT + 9, session=session)
    assert await shown(db) == ("offline", AT + 9)


async def test_end_of_an_old_process_does_not_hide_the_new_one(db: Any, registry: WorkerRegistry) -> None:
    await registry.register(WORKER, ["crawler"], "2.0.0", 1, AT, session="old")
    await registry.register(WORKER, ["crawler"], "2.0.0", 1, AT + 1, session="new")
    assert await registry.refresh(WORKER, AT + 2, session="old")
    assert not await registry.mark_offline(WORKER, AT + 3, session="old")
    assert await shown(db) == ("online", AT + 1)


async def test_old_process_that_outlives_the_new_one_is_shown_again(
    db: Any, registry: WorkerRegistry
) -> None:
    await registry.register(WORKER, ["crawler"], "2.0.0", 1, AT, session="old")
    await registry.register(WORKER, ["crawler"], "2.0.0", 1, AT + 1, session="new")
    await registry.mark_offline(WORKER, AT + 2, session="new")
    assert await registry.refresh(WORKER, AT + 3, session="old")
    assert await shown(db) == ("online", AT + 3)
    assert await registry.mark_offline(WORKER, AT + 4, session="old")


async def test_unregistered_worker_must_come_online_again(db: Any, registry: WorkerRegistry) -> None:
    assert not await registry.refresh(WORKER, AT)
    assert not await registry.mark_offline(WORKER, AT)
    assert await documents_of(db.worker_registry) == []


async def test_workers_without_heartbeats_expire_and_return_with_the_next_one(
    db: Any, registry: WorkerRegistry, steady: Steady
) -> None:
    """Their clocks differ from that of the process that looks, and from each other."""
    await registry.register("dead", ["crawler"], "2.0.0", 1, AT + 600, session="a")
    await registry.register("alive", ["crawler"], "2.0.0", 1, AT - 600, session="b")
    assert await registry.expire_silent() == 0
    steady.forward(170)
    await registry.refresh("alive", AT - 430, session="b")
    assert await registry.expire_silent() == 0
    steady.forward(30)
    assert await registry.expire_silent() == 1
    assert await registry.expire_silent() == 0
    assert await statuses(db) == {"dead": "offline", "alive": "online"}
    assert await registry.refresh("dead", AT + 800, session="a")
    assert await registry.expire_silent() == 0


async def test_worker_expires_after_three_of_its_own_intervals(
    db: Any, registry: WorkerRegistry, steady: Steady
) -> None:
    for interval in (1, 600):
        await registry.register(
            f"every {interval} s", ["crawler"], "2.0.0", 1, AT, announce_interval_sec=interval
        )
    assert await registry.expire_silent() == 0
    steady.forward(2.9)
    assert await registry.expire_silent() == 0
    steady.forward(0.2)
    assert await registry.expire_silent() == 1
    steady.forward(1_796)
    assert await registry.expire_silent() == 0
    assert await statuses(db) == {"every 1 s": "offline", "every 600 s": "online"}
    steady.forward(2)
    assert await registry.expire_silent() == 1


async def test_row_of_an_external_worker_expires_after_three_minutes(
    db: Any, registry: WorkerRegistry, steady: Steady
) -> None:
    for interval in ({}, {"announce_interval_sec": "often"}):
        row = {"worker_id": str(interval), "status": "online", "last_seen": moment(AT), **interval}
        await db.worker_registry.insert_one(row)
    for later_sec, expired in ((0, 0), (179, 0), (2, 2)):
        steady.forward(later_sec)
        assert await registry.expire_silent() == expired


async def test_role_is_served_while_one_of_its_workers_is_online(registry: WorkerRegistry) -> None:
    await registry.register(WORKER, ["crawler", "a.b"], "2.0.0", 1, AT)
    assert [await registry.is_served(role) for role in ("crawler", "a.b", "crawl", "axb")] == [
        *(True, True),
        *(False, False),
    ]
    assert await registry.find_stopped({WORKER, "other"}) == set()
    await registry.mark_offline(WORKER, AT)
    assert not await registry.is_served("crawler")
    assert await registry.find_stopped({WORKER, "other"}) == {WORKER}


async def statuses(db: Any) -> dict[str, str]:
    """Return the status of each worker."""
    return {row["worker_id"]: row["status"] for row in await documents_of(db.worker_registry)}


async def test_no_update_of_the_registry_names_a_path_twice() -> None:
    db = RecordingDatabase(memory_database())
    found = WorkerRegistry(db)
    await found.register(WORKER, ["crawler"], "2.0.0", 1, AT)
    await found.refresh(WORKER, AT)
    await found.mark_offline(WORKER, AT)
    assert len(db.updates) == 3
    assert [update for update in db.updates if conflicts(update)] == []


async def test_roles_with_different_versions_are_those_of_one_queue_and_of_online_workers(db: Any) -> None:
    registry = WorkerRegistry(db)
    running = [
        ("w-1", "q", "crawler", "1"),
        ("w-2", "q", "crawler", "2"),
        ("w-3", "q", "crawler", "2"),
        ("w-4", "other", "crawler", "3"),
        ("w-5", "q", "crawler", "4"),
        ("w-6", "q", "indexer", "1"),
    ]
    for worker_id, queue, role, version in running:
        hosts = [HostedHandler(role=role, version=version, engine=False)]
        await registry.register(worker_id, [role], "", 1, AT, session="s", queue=queue, handlers=hosts)
    await registry.mark_offline("w-5", AT, session="s")
    for number, version in enumerate(["1.4\x1b", "1.5"]):
        announced = {"type": "mail", "version": version, "handlers": [{"role": "crawler", "version": "9"}]}
        await registry.record_announcement(f"x-{number}", announced, AT)
    assert [str(each) for each in find_mixed_versions(await registry.list_workers())] == [
        "workers of role mail run different versions: 1.4\\u001b (x-0), 1.5 (x-1)",
        "workers of role crawler run different versions: 1 (w-1), 2 (w-2 and w-3)",
    ]


# --- without a server ---------------------------------------------------------------------------------------


REGISTRY_CALLS: dict[str, Callable[[WorkerRegistry], Awaitable[object]]] = {
    "prepare": lambda found: found.prepare(),
    "register": lambda found: found.register(WORKER, ["crawler"], "2.0.0", 1, AT),
    "refresh": lambda found: found.refresh(WORKER, AT),
    "record_announcement": lambda found: found.record_announcement(WORKER, {}, AT),
    "mark_offline": lambda found: found.mark_offline(WORKER, AT),
    "expire_silent": lambda found: found.expire_silent(),
    "is_served": lambda found: found.is_served("crawler"),
    "find_stopped": lambda found: found.find_stopped([WORKER]),
    "list_workers": lambda found: found.list_workers(),
    "count_online": lambda found: found.count_online("q"),
    "find_online": lambda found: found.find_online("q", ["crawler"]),
    "read_contracts": lambda found: found.read_contracts([WORKER]),
    "find_roles": lambda found: found.find_roles(),
}
EVENT_CALLS: dict[str, Callable[[WorkerEvents], Awaitable[object]]] = {
    "prepare": lambda found: found.prepare(),
    "expire_after": lambda found: found.expire_after(60),
    "append": lambda found: found.append([done(attempt(), WORKER, AT)], AT),
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("store", "calls"),
    [(WorkerRegistry, REGISTRY_CALLS), (WorkerEvents, EVENT_CALLS)],
    ids=["registry", "events"],
)
async def test_every_call_reports_an_unreachable_server_in_a_short_message(
    driver: str, store: Any, calls: dict[str, Callable[[Any], Awaitable[object]]]
) -> None:
    assert set(calls) == {name for name, member in vars(store).items() if callable(member) and name[0] != "_"}
    url = f"mongodb://{HOST}:{free_port()}"
    async with connected(driver, url, serverSelectionTimeoutMS=20) as client:
        found = await asyncio.gather(
            *(call(store(client.flowkit)) for call in calls.values()), return_exceptions=True
        )
    assert [type(error) for error in found] == [StoreUnavailable] * len(calls)
    assert max(len(str(error)) for error in found) < 400


# --- registration of a process ------------------------------------------------------------------------------


def registration(db: Any, every_sec: float = 60.0) -> WorkerRegistration:
    return WorkerRegistration(
        db,
        worker_id=WORKER,
        roles=["crawler"],
        version="2.0.0",
        capacity=1,
        announce_interval_sec=every_sec,
    )


async def test_process_is_online_between_start_and_stop_and_its_events_remain(db: Any) -> None:
    shows = registration(db)
    await shows.prepare()
    await shows.start()
    assert (await shown(db))[0] == "online"
    with shows.events.attempt(attempt(), LEASE, lambda: False):
        pass
    await shows.stop()
    assert (await shown(db))[0] == "offline"
    rows = await documents_of(db.worker_events)
    assert [row["payload"]["kind"] for row in rows] == ["TASK_DONE"]


async def test_two_processes_with_one_id_do_not_hide_each_other(db: Any) -> None:
    old, new = registration(db), registration(db)
    await old.start()
    await new.start()
    await old.stop()
    assert (await shown(db))[0] == "online"
    await new.stop()
    assert (await shown(db))[0] == "offline"


async def test_process_that_starts_without_mongodb_is_registered_later(
    db: Any, caplog: pytest.LogCaptureFixture
) -> None:
    unavailable = UnavailableUntilOpened(db)
    shows = registration(unavailable, every_sec=0.001)
    await shows.prepare()
    await shows.start()
    await asyncio.wait_for(unavailable.called.wait(), EVENT_TIMEOUT_SEC)
    assert await documents_of(db.worker_registry) == []
    unavailable.opens()
    await asyncio.wait_for(unavailable.passed.wait(), EVENT_TIMEOUT_SEC)
    await shows.stop()
    assert (await shown(db))[0] == "offline"
    assert "uniq_worker" in await db.worker_registry.index_information()
    assert (
        sum("cannot update worker" in r.getMessage() for r in caplog.records if r.levelname == "WARNING") == 1
    )


class UnavailableUntilOpened:
    """A database that is unavailable until it opens."""

    def __init__(self, db: Any, error: Exception | None = None) -> None:
        self._db = db
        self._error = error or AutoReconnect("closed")
        self._open = False
        self._tries = 0
        self.called = asyncio.Event()
        """Set when three calls have failed."""
        self.passed = asyncio.Event()
        """Set after a write."""

    def opens(self) -> None:
        """Make the database available."""
        self._open = True

    def closes(self) -> None:
        """Make the database unavailable."""
        self._open = False

    def __getattr__(self, name: str) -> _UnavailableCollection:
        return _UnavailableCollection(self._db[name], self)

    async def through(self, work: Awaitable[Any]) -> Any:
        """Make the call, or fail while the database is unavailable."""
        if not self._open:
            self._tries += 1
            if self._tries > 3 or not isinstance(self._error, AutoReconnect):
                self.called.set()
            if inspect.iscoroutine(work):
                work.close()
            raise self._error
        return await work


class _UnavailableCollection:
    def __init__(self, collection: Any, unavailable: UnavailableUntilOpened) -> None:
        self._collection = collection
        self._unavailable = unavailable

    async def create_index(self, *args: Any, **options: Any) -> Any:
        return await self._unavailable.through(self._collection.create_index(*args, **options))

    async def find_one(self, *args: Any) -> Any:
        return await self._unavailable.through(self._collection.find_one(*args))

    async def update_one(self, *args: Any, **options: Any) -> Any:
        response = await self._unavailable.through(self._collection.update_one(*args, **options))
        self._unavailable.passed.set()
        return response


async def test_unexpected_error_does_not_prevent_later_registration(db: Any) -> None:
    unavailable = UnavailableUntilOpened(db, error=RuntimeError("odd"))
    shows = registration(unavailable, every_sec=0.001)
    unavailable.opens()
    await shows.start()
    unavailable.closes()
    await asyncio.wait_for(unavailable.called.wait(), EVENT_TIMEOUT_SEC)
    assert shows.loop.health.last_error == "odd"
    unavailable.opens()
    await db.worker_registry.delete_many({})
    await eventually(lambda: documents_of(db.worker_registry))
    assert shows.loop.health.running
    await shows.stop()
    assert not shows.loop.health.running


class HeldWrites:
    """A database in which the registry's writes, like those in a driver's thread, continue after a cancel."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self._running: set[asyncio.Task[Any]] = set()
        self.released = asyncio.Event()
        self.released.set()
        self.held = asyncio.Event()
        """Set when a write waits."""

    def __getattr__(self, name: str) -> Any:
        return _HeldCollection(self) if name == "worker_registry" else self._db[name]

    async def update(self, *args: Any, **options: Any) -> Any:
        """Write in the background when released. The end of a worker is never held."""
        ends = args[1]["$set"].get("status") == "offline"
        writing = asyncio.create_task(self._write(args, options, held=not ends))
        self._running.add(writing)
        return await asyncio.shield(writing)

    async def _write(self, args: Any, options: Any, *, held: bool) -> Any:
        if held and not self.released.is_set():
            self.held.set()
            await self.released.wait()
        return await self._db.worker_registry.update_one(*args, **options)

    async def finish(self) -> None:
        """Let all writes finish."""
        self.released.set()
        await asyncio.gather(*self._running)


class _HeldCollection:
    def __init__(self, writes: HeldWrites) -> None:
        self.update_one = writes.update

    async def create_index(self, *args: Any, **options: Any) -> None:
        """Create no index."""


async def test_write_in_flight_does_not_overwrite_the_end_of_a_worker(db: Any) -> None:
    writes = HeldWrites(db)
    shows = registration(writes, every_sec=0.001)
    await shows.start()
    writes.released.clear()
    await asyncio.wait_for(writes.held.wait(), EVENT_TIMEOUT_SEC)
    stopping = asyncio.create_task(shows.stop())
    await asyncio.wait([stopping], timeout=0.2)
    await writes.finish()
    await asyncio.wait_for(stopping, EVENT_TIMEOUT_SEC)
    await writes.finish()
    assert (await shown(db))[0] == "offline"


async def test_removed_row_is_restored(db: Any) -> None:
    shows = registration(db, every_sec=0.001)
    await shows.start()
    await db.worker_registry.delete_many({})
    await eventually(lambda: documents_of(db.worker_registry))
    await shows.stop()
    assert (await shown(db))[0] == "offline"
