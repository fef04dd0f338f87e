"""What workers announce about their roles is stored once, read seldom, and compared with the edges of a submission."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from tests.contract.builders import AT, documents_of
from tests.contract.recording_database import RecordingDatabase

from flowkit.adapters.role_contracts import RoleContracts
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.worker_registry import AnnouncedContract, HostedHandler, WorkerRegistry
from flowkit.client import TaskClient
from flowkit.connection import Namespace
from flowkit.errors import StoreUnavailable
from flowkit.graph.contracts import DataEdge
from flowkit.testing import memory_database
from flowkit.worker import RoleHandler, Worker

URL = {"title": "Page", "type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
WORDS = {
    "title": "Words",
    "type": "object",
    "properties": {"words": {"type": "integer"}},
    "required": ["words"],
}
EDGE = DataEdge(source="crawl", node="count", source_role="crawler", role="counter")
PULL = {"input_inline": {"input_adapter": "pull.from_artifacts"}}
GRAPH: dict[str, Any] = {
    "nodes": [
        {"node_id": "crawl", "type": "crawler"},
        {"node_id": "count", "type": "counter", "depends_on": ["crawl"], "io": PULL},
    ]
}


def announced(given: Any = None, returned: Any = None) -> AnnouncedContract:
    """Return a contract with these schemas."""
    texts = ["" if each is None else json.dumps(each) for each in (given, returned)]
    return AnnouncedContract(input=texts[0], output=texts[1], digest=f"{hash(tuple(texts)):x}")


async def register(
    db: Any, worker_id: str, role: str, contract: AnnouncedContract | None = None, *, queue: str = "q"
) -> None:
    """Register a worker of one role."""
    hosts = [HostedHandler(role=role, version="1", engine=False, contract=contract)]
    await WorkerRegistry(db).register(worker_id, [role], "1", 1, AT, session="s", queue=queue, handlers=hosts)


async def register_unfit(db: Any) -> None:
    """Register a worker of each role, whose types do not fit."""
    await register(db, "w-1", "crawler", announced(returned=URL))
    await register(db, "w-2", "counter", announced(given=WORDS))


class Finds:
    """A database that notes the filters and projections of the reads of its registry."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self.projections: list[dict[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return self if name == "worker_registry" else self._db[name]

    def find(self, query: Any, projection: dict[str, int]) -> Any:
        """Note the projection, and read."""
        self.projections.append(projection)
        return self._db.worker_registry.find(query, projection)


async def test_schemas_are_stored_once_and_not_with_each_heartbeat(db: Any) -> None:
    recorded = RecordingDatabase(db)
    contract = announced(WORDS, URL)
    hosts = [
        HostedHandler(role=role, version="1", engine=False, contract=each)
        for role, each in (("a", contract), ("b", contract), ("c", None))
    ]
    registry = WorkerRegistry(recorded)
    await registry.register("w", ["a", "b", "c"], "1", 1, AT, session="s", handlers=hosts)
    await registry.refresh("w", AT + 1, session="s")
    [row] = await documents_of(db.worker_registry)
    assert row["contracts"] == [
        {
            "input": json.dumps(WORDS),
            "output": json.dumps(URL),
            "digest": contract.digest,
            "is_source": False,
        }
    ]
    assert [each.get("contract") for each in row["handlers"]] == [contract.digest, contract.digest, None]
    assert "contracts" not in str(recorded.updates[-1])


async def test_worker_announces_its_typed_handlers() -> None:
    db = memory_database()
    worker = Worker(db=db, handlers={"counter": Counter(), "plain": RoleHandler()})
    await worker.open()
    await worker.stop()
    [row] = await documents_of(db.worker_registry)
    assert [json.loads(each["input"]) for each in row["contracts"]] == [WORDS]
    assert [each.get("contract") for each in row["handlers"]] == [row["contracts"][0]["digest"], None]


@pytest.mark.parametrize(
    "fields",
    [
        {"handlers": [{"role": "counter", "contract": 5}, {"version": "1"}, "counter", {"role": []}]},
        {"handlers": {"role": "counter"}},
        {"contracts": 5},
        {"contracts": [5, {"input": 5}]},
    ],
    ids=["handlers", "no handlers", "contracts", "schemas"],
)
async def test_row_that_no_worker_has_written_fails_neither_a_submission_nor_a_list(
    db: Any, fields: dict[str, Any]
) -> None:
    await register_unfit(db)
    await db.worker_registry.update_one({"worker_id": "w-2"}, {"$set": fields})
    assert await RoleContracts(db, "q").warnings((EDGE,)) == []
    assert len(await WorkerRegistry(db).list_workers()) == 2


class Counter(RoleHandler):
    """A typed handler."""

    def input_schema(self) -> dict[str, Any]:
        """Return the schema of the input."""
        return WORDS


async def test_lists_of_workers_have_the_digests_without_the_schemas() -> None:
    db = Finds(memory_database())
    await register_unfit(db._db)
    [_, worker] = await WorkerRegistry(db).list_workers()
    assert worker.contracts == {"counter": announced(given=WORDS).digest}
    assert [each.get("contracts") for each in db.projections] == [None]


async def test_submission_compares_what_online_workers_of_its_queue_announce(db: Any) -> None:
    await register_unfit(db)
    [warning] = await RoleContracts(db, "q").warnings((EDGE,))
    assert warning == (
        "node 'count' pulls from 'crawl', but the output of role 'crawler', Page, does not fit the input of role "
        "'counter', Words: 'words' (integer) is missing; add it to the output, or make it optional in the input"
    )
    assert await RoleContracts(db, "other").warnings((EDGE,)) == []
    await WorkerRegistry(db).mark_offline("w-1", AT, session="s")
    assert await RoleContracts(db, "q").warnings((EDGE,)) == []


@pytest.mark.parametrize(
    ("other", "count"), [(announced(returned=URL), 1), (announced(returned=WORDS), 0), (None, 0)]
)
async def test_version_that_fits_or_has_no_types_prevents_the_warning(
    db: Any, other: AnnouncedContract | None, count: int
) -> None:
    await register_unfit(db)
    await register(db, "w-3", "crawler", other)
    assert len(await RoleContracts(db, "q").warnings((EDGE,))) == count


async def test_external_worker_announces_no_types(db: Any) -> None:
    await register_unfit(db)
    forged = {"queue": "q", "handlers": [{"role": "crawler"}], "contracts": [{"digest": "x"}]}
    await WorkerRegistry(db).record_announcement("w-1", forged, AT)
    await WorkerRegistry(db).record_announcement("w-9", {**forged, "type": "crawler"}, AT)
    assert await RoleContracts(db, "q").warnings((EDGE,)) == []


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", "3"])
async def test_unreadable_schema_counts_as_none(db: Any, text: str) -> None:
    await register_unfit(db)
    await register(db, "w-1", "crawler", AnnouncedContract(input="", output=text, digest="x"))
    assert await RoleContracts(db, "q").warnings((EDGE,)) == []


@pytest.mark.parametrize("stored", [3, {}, {"digest": "x"}, {"digest": "x", "input": 3, "output": ""}])
async def test_unreadable_contract_counts_as_none(db: Any, stored: Any) -> None:
    await register_unfit(db)
    await db.worker_registry.update_one({"worker_id": "w-1"}, {"$set": {"contracts": [stored]}})
    assert await RoleContracts(db, "q").warnings((EDGE,)) == []


async def test_result_is_read_again_after_five_seconds_and_the_schemas_only_if_they_are_new() -> None:
    db, times = Finds(memory_database()), iter([0.0, 0.0, 4.9, 5.1, 5.1])
    await register_unfit(db._db)
    contracts = RoleContracts(db, "q", lambda: next(times))
    found = [await contracts.warnings((EDGE,)) for _ in range(3)]
    assert [len(each) for each in found] == [1, 1, 1]
    assert [each.get("contracts") for each in db.projections] == [None, 1, None]
    assert await contracts.warnings(()) == []


# --- submission ---------------------------------------------------------------------------------------------


class Temporal:
    """Temporal's client, as far as the start of a task needs it."""

    async def start_workflow(self, *_: object, **__: object) -> None:
        """Start the workflow."""


@pytest.fixture(autouse=True)
def _namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    async def namespace_id(_: Namespace) -> str:
        return "n"

    monkeypatch.setattr(Namespace, "id", namespace_id)


def client_of(db: Any) -> TaskClient:
    """Return a client of the queue `q`."""
    temporal: Any = Temporal()
    return TaskClient(temporal, TaskStore(db), queue="q")


async def test_submission_warns_once_of_an_edge_that_does_not_fit(
    db: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "flowkit.client")
    await register_unfit(db)
    client = client_of(db)
    for task_id in ("t-1", "t-2"):
        await client.create_task(params={}, graph=GRAPH, task_id=task_id)
    [text] = caplog.messages
    assert text.startswith("task t-1: node 'count' pulls from 'crawl', but ")


class NoRegistry:
    """A database whose registry responds with an error, or not at all."""

    def __init__(self, db: Any, error: Exception | None) -> None:
        self._db, self._error = db, error
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return self if name == "worker_registry" else self._db[name]

    def find(self, *_: object) -> Any:
        """Note the read."""
        self.reads += 1
        return self

    def limit(self, _: int) -> Any:
        """Return the cursor."""
        return self

    async def __aiter__(self) -> Any:
        if self._error is None:
            await asyncio.Event().wait()
        raise self._error or AssertionError
        yield


@pytest.mark.parametrize("error", [StoreUnavailable("down"), None])
async def test_submission_starts_without_the_registry(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkit.client.inputs._CONTRACTS_SEC", 0.05)
    db = NoRegistry(memory_database(), error)
    client = client_of(db)
    for task_id in ("t-1", "t-2"):
        assert await client.create_task(params={}, graph=GRAPH, task_id=task_id) == task_id
    assert db.reads == 1


async def test_submission_does_not_ask_a_database_that_has_refused_the_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unavailable(*_: object) -> None:
        raise StoreUnavailable("the primary stepped down")

    monkeypatch.setattr(TaskStore, "insert_task", unavailable)
    db = NoRegistry(memory_database(), None)
    assert await client_of(db).create_task(params={}, graph=GRAPH) != ""
    assert db.reads == 0


async def test_graph_without_pulls_reads_nothing() -> None:
    db = NoRegistry(memory_database(), None)
    await client_of(db).create_task(params={}, graph={"nodes": GRAPH["nodes"][:1]})
    assert db.reads == 0


async def test_a_field_is_unknown_if_no_version_of_its_role_has_it(db: Any) -> None:
    wide = {"type": "object", "title": "Page", "properties": {"url": {}, "name": {}}}
    await register(db, "w-1", "crawler", announced(returned=URL))
    stored = {"url": "a", "name": "b", "title": "c"}
    assert await RoleContracts(db, "q").unknown_fields("crawler", stored) == ["name", "title"]
    await register(db, "w-2", "crawler", announced(returned=wide))
    assert await RoleContracts(db, "q").unknown_fields("crawler", stored) == ["title"]
    await register(db, "w-3", "crawler")
    assert await RoleContracts(db, "q").unknown_fields("crawler", stored) == []
    assert await RoleContracts(db, "q").unknown_fields("counter", stored) == []
