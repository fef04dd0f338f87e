"""Indexes have the documented names and options; a conflict with a unique index prevents the start."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo.errors import DuplicateKeyError, OperationFailure
from tests.contract.builders import TASK

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.worker_events import WorkerEvents
from flowkit.errors import StoreRefused
from flowkit.testing import memory_database

NODE_BATCH = [("task_id", 1), ("node_id", 1), ("batch_uid", 1)]
EXPECTED: dict[str, dict[str, dict[str, Any]]] = {
    "tasks": {
        "uniq_task_id": {"key": [("id", 1)], "unique": True},
        "ix_task_status_updated": {"key": [("status", 1), ("updated_at", 1)]},
        "ix_task_started": {"key": [("started_at", -1)]},
        "ix_task_open": {
            "key": [("finished_at", 1), ("namespace_id", 1), ("_id", 1)],
            "partialFilterExpression": {"finished_at": None},
        },
    },
    "artifacts": {
        "ix_artifacts_task_node": {"key": NODE_BATCH[:2]},
        "uniq_artifact_batch_uid": {"key": NODE_BATCH, "unique": True, "sparse": True},
    },
    "metrics_raw": {
        "uniq_metrics_batch": {"key": NODE_BATCH, "unique": True},
    },
    "stream_progress": {
        "uniq_stream_claim_batch": {
            "key": [("task_id", 1), ("consumer_node", 1), ("from_node", 1), ("batch_uid", 1)],
            "unique": True,
        }
    },
    "stored_graphs": {"ix_stored_graphs_task": {"key": [("task_id", 1)]}},
    "input_values": {"ix_input_values_task": {"key": [("task_id", 1)]}},
    "map_items": {"ix_map_items_task": {"key": [("task_id", 1)]}},
    "batch_tries": {"ix_batch_tries_node": {"key": [("task_id", 1), ("node_id", 1)]}},
}
UNIQUE = [
    (collection, name)
    for collection, indexes in EXPECTED.items()
    for name, options in indexes.items()
    if options.get("unique")
]


async def prepare(db: Any) -> None:
    await TaskStore(db).prepare()
    await ArtifactStore(db).prepare()


@pytest.mark.parametrize("collection", EXPECTED)
async def test_indexes_have_the_documented_names_and_options(db: Any, collection: str) -> None:
    await prepare(db)
    found = await db[collection].index_information()
    del found["_id_"]
    options = {"key", "unique", "sparse", "expireAfterSeconds", "partialFilterExpression"}
    assert {
        name: {option: value for option, value in index.items() if option in options}
        for name, index in found.items()
    } == EXPECTED[collection]


async def test_creating_indexes_twice_changes_nothing(db: Any) -> None:
    await prepare(db)
    first = {name: await db[name].index_information() for name in EXPECTED}
    await prepare(db)
    assert {name: await db[name].index_information() for name in EXPECTED} == first


@pytest.mark.parametrize(("collection", "name"), UNIQUE)
async def test_duplicates_prevent_the_start(db: Any, collection: str, name: str) -> None:
    fields = [field for field, _ in EXPECTED[collection][name]["key"]]
    await db[collection].insert_many([dict.fromkeys(fields, "twice") for _ in range(2)])
    with pytest.raises(StoreRefused):
        await prepare(db)


@pytest.mark.parametrize(("collection", "name"), UNIQUE)
async def test_error_names_the_index_that_duplicates_prevent(
    server_db: Any, collection: str, name: str
) -> None:
    fields = [field for field, _ in EXPECTED[collection][name]["key"]]
    await server_db[collection].insert_many([dict.fromkeys(fields, "twice") for _ in range(2)])
    with pytest.raises(StoreRefused, match=f"{name}|{collection}.id"):
        await prepare(server_db)


def refusal_of_mongodb(collection: str, name: str) -> DuplicateKeyError:
    """Return the error of a real MongoDB server, whose text is longer than that of its stand-ins."""
    uuid, namespace = "0fe6b8a1-77aa-4a1c-9d3b-5a2cf2f1b0de", f"flowkit_production.{collection}"
    fields = [field for field, _ in EXPECTED[collection][name]["key"]]
    keys = ", ".join(f'{field}: "twice"' for field in fields)
    text = (
        f"Index build failed: {uuid}: Collection {namespace} ( {uuid} ) :: caused by :: E11000 duplicate key error "
        f"collection: {namespace} index: {name} dup key: {{ {keys} }}"
    )
    details = {
        "ok": 0.0,
        "errmsg": text,
        "code": 11000,
        "codeName": "DuplicateKey",
        "keyPattern": dict.fromkeys(fields, 1),
        "keyValue": dict.fromkeys(fields, "twice"),
    }
    return DuplicateKeyError(text, 11000, details)


@pytest.mark.parametrize(("collection", "name"), UNIQUE)
async def test_error_is_short_and_names_index_and_key_for_every_mongodb_message(
    collection: str, name: str
) -> None:
    db = Failing(memory_database(), name, refusal_of_mongodb(collection, name))
    with pytest.raises(StoreRefused, match=f"{name}|{collection}.id") as caught:
        await prepare(db)
    assert "twice" in str(caught.value)
    assert len(str(caught.value)) < 400


async def test_index_that_exists_under_another_name_does_not_prevent_the_start() -> None:
    """The documented coordinator named the workers' index `uniq_artifact_batch` (protocol: engine duties)."""
    db = memory_database()
    await db.artifacts.create_index(NODE_BATCH, name="uniq_artifact_batch", unique=True)
    await prepare(Failing(db, "uniq_artifact_batch_uid", conflict("uniq_artifact_batch")))
    assert "uniq_metrics_batch" in await db.metrics_raw.index_information()


def conflict(name: str) -> OperationFailure:
    """Return MongoDB's error for an index whose keys another name already uses."""
    return OperationFailure(f"Index already exists with a different name: {name}", 85)


@pytest.mark.parametrize(
    "options",
    [{}, {"unique": True, "partialFilterExpression": {"status": "partial"}}],
    ids=["plain", "partial"],
)
async def test_non_unique_index_on_the_same_keys_prevents_the_start(options: dict[str, Any]) -> None:
    db = memory_database()
    await db.artifacts.create_index(NODE_BATCH, name="by_batch", **options)
    with pytest.raises(StoreRefused) as caught:
        await prepare(Failing(db, "uniq_artifact_batch_uid", conflict("by_batch")))
    assert str(caught.value) == (
        "collection 'artifacts' needs the index uniq_artifact_batch_uid over (task_id, node_id, batch_uid), unique, "
        "but its index 'by_batch' over (task_id, node_id, batch_uid) is not unique: remove it with "
        "db.artifacts.dropIndex('by_batch'), then restart"
    )


@pytest.mark.parametrize("keys", ["id", "other"])
async def test_index_with_the_name_of_a_unique_one_prevents_the_start(server_db: Any, keys: str) -> None:
    await server_db.tasks.create_index(keys, name="uniq_task_id")
    with pytest.raises(StoreRefused, match=r"needs the index uniq_task_id over \(id\), unique.*dropIndex"):
        await prepare(server_db)


async def test_non_unique_index_can_have_any_name() -> None:
    db = memory_database()
    await db.tasks.create_index("started_at", name="mine")
    await db.tasks.create_index([("started_at", -1)], name="also_mine")
    await prepare(Failing(db, "ix_task_started", conflict("also_mine")))


async def test_a_plain_index_on_the_time_keeps_events_from_expiring_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MongoDB has one index of the same keys, whatever its options for expiry are. The stand-ins have both."""
    db = memory_database()
    await db.worker_events.create_index("created_at", name="mine")
    await WorkerEvents(Failing(db, "ttl_worker_events", conflict("mine"))).expire_after(60)
    assert "documents of worker_events do not expire: the index mine" in caplog.text
    assert "db.worker_events.dropIndex('mine')" in caplog.text


class Failing:
    """A database that rejects one index."""

    def __init__(self, db: Any, index: str, error: Exception) -> None:
        self._db, self._index, self._error = db, index, error

    def __getattr__(self, name: str) -> Any:
        return _FailingCollection(self._db[name], self._index, self._error)


class _FailingCollection:
    def __init__(self, collection: Any, index: str, error: Exception) -> None:
        self._collection, self._index, self._error = collection, index, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collection, name)

    async def create_index(self, keys: Any, *, name: str, **options: Any) -> Any:
        if name == self._index:
            raise self._error
        return await self._collection.create_index(keys, name=name, **options)


# --- effects of the indexes -------------------------------------------------------------------------------------


async def test_node_has_one_marker_although_the_index_is_sparse(db: Any) -> None:
    await prepare(db)
    marker = {"task_id": TASK, "node_id": "a", "status": "complete"}
    await db.artifacts.insert_one({**marker})
    with pytest.raises(DuplicateKeyError):
        await db.artifacts.insert_one({**marker})


async def test_external_workers_can_create_their_indexes_again(db: Any) -> None:
    await prepare(db)
    for collection, indexes in EXPECTED.items():
        for name, options in indexes.items():
            more = {option: value for option, value in options.items() if option != "key"}
            assert await db[collection].create_index(options["key"], name=name, **more) == name
