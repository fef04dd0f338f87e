"""An in-memory database, for tests without a MongoDB server."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pymongo.errors import BulkWriteError, DuplicateKeyError
from pymongo.results import BulkWriteResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pymongo import UpdateOne

    from flowkit.adapters.mongo import Database


def memory_database(name: str = "flowkit") -> Database:
    """Return a new, empty in-memory database with Motor's interface. Each call returns an independent database.

    Use it to test handlers, functions and whole tasks in one process. FlowKit's contract tests verify that documents,
    unique indexes and fences behave as on a MongoDB server. These differences remain:

    * It accepts updates that MongoDB rejects: one path, or a path and its parent, in two operators.
    * It treats 1 as true in filters, and duplicate-key errors do not name the index.
    * It has no transactions and no change streams.
    * Operations never run concurrently, so tests cannot find race conditions.
    * No other process can see the database, and it is never unavailable.

    Requires the extra `flowkit-temporal[testing]`; raise ImportError without it.
    """
    try:
        import mongomock
        import mongomock_motor
    except ImportError as error:
        raise ImportError(
            "memory_database() needs mongomock-motor: pip install 'flowkit-temporal[testing]'"
        ) from error
    from flowkit.testing.memory_collections import IndexedDatabase

    _replace_clock(mongomock)
    inner: Any = mongomock.MongoClient()
    inner._database_accesses[name] = IndexedDatabase(inner, name)
    client: Any = mongomock_motor.AsyncMongoMockClient(mock_mongo_client=inner)
    return _with_fixes(client[name])


def _replace_clock(mongomock: Any) -> None:
    """Replace mongomock's clock for TTL indexes, which causes a DeprecationWarning from Python 3.12 on."""
    if mongomock.utcnow is mongomock.helpers.utcnow:
        mongomock.utcnow = _utcnow


def _utcnow() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


def _with_fixes(database: Any) -> Any:
    """Return `database` with collections whose `find_one_and_update` and `bulk_write` work as in MongoDB."""
    plain = database.get_collection

    def get_collection(*args: Any, **kwargs: Any) -> Any:
        collection = plain(*args, **kwargs)
        collection.find_one_and_update = partial(_find_one_and_update, collection.find_one_and_update)
        collection.bulk_write = partial(_bulk_write, collection)
        return collection

    database.get_collection = get_collection
    return database


async def _find_one_and_update(
    plain: Any, condition: Any, update: Any, projection: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Update one document, and always project its `_id`: with an empty projection, mongomock updates nothing."""
    hidden = bool(projection) and not (projection or {}).get("_id", True)
    shown = {field: value for field, value in (projection or {}).items() if field != "_id" or value}
    found = await plain(condition, update, projection=shown or None, **options)
    if found and hidden:
        found.pop("_id", None)
    return found


_parts_of_update = attrgetter("_filter", "_doc", "_upsert")


async def _bulk_write(
    collection: Any, requests: Sequence[UpdateOne], *, ordered: bool = True
) -> BulkWriteResult:
    """Apply single-document updates one by one: mongomock's `bulk_write` does not support PyMongo 4.11 and later."""
    counts, errors = {"nMatched": 0, "nModified": 0, "nUpserted": 0}, []
    for index, request in enumerate(requests):
        condition, update, upsert = _parts_of_update(request)
        try:
            done = await collection.update_one(condition, update, upsert=bool(upsert))
        except DuplicateKeyError as error:
            errors.append({"index": index, "code": 11000, "errmsg": str(error)})
            if ordered:
                break
            continue
        counts["nMatched"] += done.matched_count
        counts["nModified"] += done.modified_count
        counts["nUpserted"] += done.upserted_id is not None
    if errors:
        raise BulkWriteError({**counts, "writeErrors": errors, "writeConcernErrors": []})
    return BulkWriteResult(counts, acknowledged=True)
