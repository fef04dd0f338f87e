"""A database in memory, for tests that need no server."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pymongo.results import BulkWriteResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pymongo import UpdateOne

    from flowkit.adapters.mongo import Database


def memory_database(name: str = "flowkit") -> Database:
    """A new, empty database with Motor's interface; every call makes one that shares nothing with the others.

    Good for tests of handlers, functions and whole tasks in one process: our contract tests find documents, unique
    indexes and fences as they are on a server. Not good for what only a server does:

    * It accepts updates that MongoDB refuses (one path, or a path and its parent, in two operators), takes 1 for
      true in filters, does not name the index that duplicates prevent, and has neither transactions nor change streams.
    * Nothing in it happens at the same time, so it shows no race; no other process sees it; it never goes away.

    Needs the extra `flowkit-temporal[testing]`.
    """
    try:
        import mongomock
        import mongomock_motor
    except ImportError as error:
        raise ImportError(
            "memory_database() needs mongomock-motor: pip install 'flowkit-temporal[testing]'"
        ) from error
    _replace_clock(mongomock)
    client: Any = mongomock_motor.AsyncMongoMockClient()
    return _covered(client[name])


def _replace_clock(mongomock: Any) -> None:
    """The library's own clock, asked for TTL indexes, warns of its deprecation from Python 3.12 on."""
    if mongomock.utcnow is mongomock.helpers.utcnow:
        mongomock.utcnow = _utcnow


def _utcnow() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


def _covered(database: Any) -> Any:
    """`database` with collections whose `find_one_and_update` and `bulk_write` keep their word."""
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
    """The library takes a document of which nothing is projected for none, and updates nothing: keep its `_id`."""
    hidden = bool(projection) and not (projection or {}).get("_id", True)
    shown = {field: value for field, value in (projection or {}).items() if field != "_id" or value}
    found = await plain(condition, update, projection=shown or None, **options)
    if found and hidden:
        found.pop("_id", None)
    return found


_parts_of_update = attrgetter("_filter", "_doc")


async def _bulk_write(
    collection: Any, requests: Sequence[UpdateOne], *, ordered: bool = True
) -> BulkWriteResult:
    """The library's own does not fit PyMongo 4.11 and later; this one takes updates of one document, one by one."""
    done = [await collection.update_one(*_parts_of_update(request)) for request in requests]
    counts = {
        "nMatched": sum(each.matched_count for each in done),
        "nModified": sum(each.modified_count for each in done),
    }
    return BulkWriteResult(counts, acknowledged=True)
