"""FlowKit's own reads and writes survive a failover of MongoDB, whatever the address of the client says."""

from __future__ import annotations

import ast
import logging
from typing import TYPE_CHECKING, Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import ReadPreference, WriteConcern
from pymongo.monitoring import CommandListener
from tests.contract.builders import AT, TASK, attempt, opened
from tests.contract.drivers import DRIVERS, connected
from tests.contract.unconfirmed import Unconfirmed
from tests.servers import with_options
from tests.sources import sources

from flowkit.adapters import mongo, worker_events
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.claims import Claims
from flowkit.adapters.map_items import MapItems
from flowkit.adapters.mongo import durable, durable_concern, weaknesses
from flowkit.adapters.remote_database import RemoteDatabase
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.worker_events import WorkerEvents
from flowkit.cli.doctor.servers import _check_durability
from flowkit.errors import ConfigError, StoreUnavailable
from flowkit.graph.expressions import divide
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

WRITES = frozenset({"insert", "update", "delete", "findAndModify", "createIndexes"})
READS = frozenset({"find", "aggregate", "count"})
MAJORITY = {"w": "majority", "j": True}
NO_COLLECTIONS = {"name", "command", "client", "write_concern", "read_preference", "with_options"}
WEAK = "w=1&journal=false&readPreference=secondaryPreferred&retryWrites=false"
STALE = f"{WEAK}&readConcernLevel=available"


class Commands(CommandListener):
    """Keeps the commands that a client sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def started(self, event: Any) -> None:
        """Keep the command."""
        self.sent.append((event.command_name, dict(event.command)))

    def succeeded(self, event: Any) -> None:
        """Ignore the result."""

    def failed(self, event: Any) -> None:
        """Ignore the error."""


@pytest.mark.server
@pytest.mark.parametrize("driver", DRIVERS)
async def test_commands_wait_for_a_majority_and_read_from_the_primary(
    driver: str, contract_mongo_url: str
) -> None:
    commands = Commands()
    async with connected(
        driver, with_options(contract_mongo_url, STALE), event_listeners=[commands]
    ) as client:
        db = client["contract_durability"]
        tasks = TaskStore(db)
        await tasks.prepare()
        await ArtifactStore(db).prepare()
        await opened(tasks, "a", "b")
        [page async for page in OpenTasks(db).pages(namespace_id="")]
        await client.drop_database("contract_durability")
    writes = [command for name, command in commands.sent if name in WRITES]
    assert len(writes) > 5
    assert [command for command in writes if command.get("writeConcern") != MAJORITY] == []
    reads = [command for name, command in commands.sent if name in READS]
    assert reads
    assert [command for command in reads if command.get("readConcern") != {"level": "local"}] == []
    assert [
        command for command in reads if command.get("$readPreference", {}).get("mode", "primary") != "primary"
    ] == []


def test_no_adapter_takes_a_collection_from_the_handle_that_it_is_given() -> None:
    adapters = {name: path for name, path in sources().items() if is_adapter(name)}
    assert {"flowkit.adapters.slots", "flowkit.server.token_store"} <= adapters.keys()
    assert [use for path in adapters.values() for use in uses(path)] == []


def is_adapter(module: str) -> bool:
    """Return whether a module is for reading and writing MongoDB: in the core, or the store of a product."""
    return module.startswith("flowkit.adapters.") or module.endswith((".store", ".token_store"))


def uses(path: Path) -> Iterator[str]:
    """Yield where a module reads a collection of its parameter `db`, as an attribute or by its name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.value, ast.Name):
            own = isinstance(node, ast.Attribute) and node.attr in NO_COLLECTIONS
            if node.value.id == "db" and not own:
                yield f"{path.name}:{node.lineno}"


def weak_database(options: str = WEAK) -> Any:
    """Return a handle that never connects."""
    client: Any = AsyncIOMotorClient(f"mongodb://127.0.0.1:1/?{options}")
    return client["flowkit"]


async def test_the_handle_of_the_user_stays_as_it_is() -> None:
    db = weak_database()
    assert durable(db).write_concern.document == MAJORITY
    assert durable(db).read_preference == ReadPreference.PRIMARY
    assert durable(db).read_concern.level == "local"
    assert db.write_concern == WriteConcern(w=1, j=False)
    assert db.read_preference == ReadPreference.SECONDARY_PREFERRED


async def test_an_engine_that_hosts_handlers_in_its_own_thread_has_the_same_guarantees() -> None:
    remote = RemoteDatabase(weak_database())
    assert remote.tasks._collection.write_concern.document == MAJORITY


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (WriteConcern(), MAJORITY),
        (WriteConcern(w=1), MAJORITY),
        (WriteConcern(w=2, j=False), MAJORITY),
        (WriteConcern(w="majority", wtimeout=5_000), {**MAJORITY, "wtimeout": 5_000}),
        (WriteConcern(w=4), {"w": 4, "j": True}),
        (WriteConcern(w="everywhere"), {"w": "everywhere", "j": True}),
        (WriteConcern(w=1, fsync=True), {"w": "majority", "fsync": True}),
    ],
)
def test_weaker_write_concerns_are_replaced_and_stronger_ones_kept(
    given: WriteConcern, kept: dict[str, Any]
) -> None:
    assert durable_concern(given).document == kept


@pytest.mark.parametrize(
    ("options", "weak"),
    [
        ("", []),
        ("w=majority&journal=true&readPreference=primary&retryWrites=true", []),
        ("w=4", []),
        ("w=everywhere", []),
        ("w=1", ["w=1"]),
        ("journal=false", ["journal=false"]),
        ("readPreference=nearest", ["readPreference=nearest"]),
        ("retryWrites=false", ["retryWrites=false"]),
        (WEAK, ["w=1", "journal=false", "readPreference=secondaryPreferred", "retryWrites=false"]),
    ],
)
async def test_the_settings_that_a_failover_could_use_are_named(options: str, weak: list[str]) -> None:
    assert weaknesses(weak_database(options)) == weak


async def test_weak_settings_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    mongo._warn_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="flowkit.store")
    for _ in range(3):
        durable(weak_database("w=1&readPreference=nearest"))
    assert [message.partition(", so")[0] for message in caplog.messages] == [
        "the MongoDB client has w=1, readPreference=nearest"
    ]


async def test_a_client_that_confirms_no_write_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"w=0.*remove w=0 from MONGO_URL"):
        TaskStore(weak_database("w=0"))


INSERTS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "claims": lambda db: Claims(db).make(attempt("a"), "b", ["0", "1"], AT),
    "claims of shards": lambda db: Claims(db).make_new(attempt("a"), "b", ["0", "1"], AT),
    "items": lambda db: MapItems(db).put((TASK, "a", 0), "t", divide([1, 2], 1), 1, AT),
    "events": lambda db: WorkerEvents(db).append([worker_events.done(attempt("a"), "w", AT)] * 2, AT),
}


@pytest.mark.parametrize("insert", INSERTS.values(), ids=INSERTS)
async def test_rows_beside_a_duplicate_count_only_when_a_majority_has_them(
    insert: Callable[[Any], Awaitable[Any]],
) -> None:
    """A failover could lose them. The caller repeats the call, as after every outage."""
    with pytest.raises(StoreUnavailable):
        await insert(Unconfirmed())


def test_a_database_without_such_options_is_used_as_it_is() -> None:
    db = memory_database()
    assert durable(db) is db


@pytest.mark.parametrize(
    ("options", "state", "named"),
    [("", "ok", "a majority has journaled"), (WEAK, "note", "w=1, journal=false")],
)
async def test_doctor_names_weak_settings(options: str, state: str, named: str) -> None:
    found = _check_durability(weak_database(options))
    assert found.state == state
    assert named in found.found
