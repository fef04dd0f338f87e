"""Code that all MongoDB adapters share: durable handles, error translation, concurrent writes and index creation.

FlowKit's own reads and writes survive a failover, whatever the address of MongoDB says. Temporal's history counts a
write as done when MongoDB has acknowledged it. A failover must not take such a write back.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from pymongo import ReadPreference, WriteConcern, monitoring
from pymongo import errors as pymongo_errors
from pymongo.read_concern import ReadConcern

from flowkit.core.instruments import COMMAND_TIME, ERRORS
from flowkit.errors import (
    ConfigError,
    FlowKitError,
    StoreDenied,
    StoreRefused,
    StoreTooLarge,
    StoreUnavailable,
)
from flowkit.text import bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

Database = Any
"""A Motor database, or an object with its interface: PyMongo Async, or the in-memory database of `flowkit.testing`."""

_UNREACHABLE = (
    pymongo_errors.ConnectionFailure,
    pymongo_errors.ExecutionTimeout,
    pymongo_errors.WriteConcernError,
    pymongo_errors.WTimeoutError,
)
_UNREACHABLE_CODES = frozenset({6, 7, 89, 91, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436})
"""Server codes for an election, a shutdown or a network error (MongoDB's own list of retryable errors)."""

_DENIED_CODES = frozenset({11, 13, 18})
"""UserNotFound, Unauthorized, AuthenticationFailed: they persist until an administrator grants the rights."""

_TOO_LARGE_CODES = frozenset({10334, 17280, 17419, 17420})
"""Server codes for a document over 16 MB and for an index key that is too long."""

_PERMANENT_CODES = _TOO_LARGE_CODES | frozenset(
    {
        *(2, 9, 14, 15),  # BadValue, FailedToParse, TypeMismatch, Overflow
        *(22, 28, 40),  # InvalidBSON, PathNotViable, ConflictingUpdateOperators
        *(52, 53, 54, 55, 56, 57),  # invalid field names: dollar sign, _id, DBRef, empty, dot
        *(59, 66, 67, 72, 73, 85, 86),  # unknown command, immutable field, index, options, namespace
        *(121, 166, 197),  # validator of the collection, view, index specification
        *(11000, 11001, 12582),  # duplicate keys; callers that expect these handle them first
        *(16755, 31249, 40414, 40415, 51270),  # parse errors
    }
)
"""Server codes of errors that no retry can fix. FlowKit retries every other code, known or unknown."""

_MEASURED_COMMANDS = frozenset(
    {"find", "getMore", "insert", "update", "delete", "findAndModify", "aggregate", "distinct"}
)
"""The commands that are measured by name. All others together are `other`."""

DUPLICATE_KEY = 11000
"""Server code of a write that a unique index rejects."""

CURSOR_DOCUMENTS = 1_000
"""How many small documents a cursor receives at once. By default it holds 16 MB of them, which are much
more as objects."""

_INDEX_CONFLICTS = frozenset({85, 86})
"""Server codes for an existing index with the same keys or the same name but a different definition."""

_INDEX_NOT_FOUND = 27

_USAGE_ERRORS = (
    pymongo_errors.CollectionInvalid,
    pymongo_errors.InvalidName,
    pymongo_errors.InvalidOperation,
)
"""Errors in the use of the driver, which it raises before it contacts a server."""

_LOCAL = ReadConcern("local")
_MAJORITY = "majority"
_SURE_MEMBERS = 4
"""A number of members that is a majority of every replica set: at most seven members vote."""

_logger = logging.getLogger("flowkit.store")

P = ParamSpec("P")
R = TypeVar("R")


class CommandTimes(monitoring.CommandListener):
    """Measures how long the commands of a client take. Give it to the client as one of its `event_listeners`."""

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Do nothing."""

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Measure a command."""
        self._measure(event)

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Measure a command that has failed, too: those that time out are the slowest."""
        self._measure(event)

    def _measure(self, event: monitoring.CommandSucceededEvent | monitoring.CommandFailedEvent) -> None:
        name = event.command_name
        COMMAND_TIME.observe(event.duration_micros / 1e6, name if name in _MEASURED_COMMANDS else "other")


def durable(db: Database) -> Database:
    """Return a handle on `db` that reads from the primary and waits until a majority has journaled each write.

    It reads what the primary has (`local`), whatever the client or the cluster has as a default: a write whose filter
    matches nothing is followed by a read, which must not see an earlier state than the write.

    The given handle stays as it is. Log a warning if its settings are weaker. Raise ConfigError for `w=0`.
    Databases that have no such options, like the one in memory, are returned as they are.
    """
    if not hasattr(type(db), "with_options"):
        return db
    given = db.write_concern
    if not given.acknowledged:
        raise ConfigError(
            "the MongoDB client has w=0, with which nothing confirms a write; remove w=0 from MONGO_URL or from the "
            "options of the client: FlowKit writes with w=majority"
        )
    _warn_once(", ".join(weaknesses(db)))
    return db.with_options(
        write_concern=durable_concern(given),
        read_concern=_LOCAL,
        read_preference=ReadPreference.PRIMARY,
    )


def undecoded(collection: Any) -> Any:
    """Return a handle on a collection whose documents keep their BSON until a field is read.

    The database in memory has documents of its own, and its handles are returned as they are.
    """
    if not hasattr(type(collection), "with_options"):
        return collection
    options = collection.codec_options.with_options(document_class=RawBSONDocument)
    return collection.with_options(codec_options=options)


def durable_concern(given: WriteConcern) -> WriteConcern:
    """Return the write concern of FlowKit's writes: the given one where it is stronger, else a journaled majority."""
    options: dict[str, Any] = {**given.document}
    if not _is_majority(options.get("w")):
        options["w"] = _MAJORITY
    if not options.get("fsync"):
        options["j"] = True
    return WriteConcern(**options)


def weaknesses(db: Database) -> list[str]:
    """Return the settings of a handle that allow a failover to lose what FlowKit has stored, as in an address."""
    concern = db.write_concern.document
    preference = db.read_preference.mongos_mode
    found = {
        f"w={concern.get('w')}": "w" in concern and not _is_majority(concern["w"]),
        "journal=false": concern.get("j") is False,
        f"readPreference={preference}": preference != "primary",
        "retryWrites=false": not db.client.options.retry_writes,
    }
    return [setting for setting, weak in found.items() if weak]


def _is_majority(members: str | int | None) -> bool:
    """Return whether a majority acknowledges the write. An administrator has chosen the members behind a name."""
    return isinstance(members, str) or (members is not None and members >= _SURE_MEMBERS)


@functools.cache
def _warn_once(settings: str) -> None:
    if settings:
        _logger.warning(
            "the MongoDB client has %s, so a failover could lose what counts as stored; FlowKit reads from the primary "
            "and writes with w=majority and the journal instead, but retryWrites=false stays in effect: remove these "
            "settings",
            settings,
        )


def translate_errors(method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Decorate `method` so that it raises driver errors as FlowKit errors with a short message.

    Drivers put the whole topology into their messages, and Temporal rejects messages of that length.
    """

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(*args, **kwargs)
        except pymongo_errors.PyMongoError as error:
            found = flowkit_error(error)
            ERRORS.add("mongodb", found.code)
            raise found from None
        except (OverflowError, BSONError) as error:
            kind = StoreTooLarge if too_large(error) else StoreRefused
            raise kind(_short("MongoDB cannot store this value", error)) from None

    return call


async def denial(db: Database, error: pymongo_errors.PyMongoError) -> StoreDenied:
    """Return a StoreDenied error that names the user, the database and how to grant access."""
    return StoreDenied(
        f"MongoDB denies {await _user(db)} access to database {db.name!r} ({words(error)}): "
        "grant the user the role readWrite on it, or connect as another user"
    )


async def _user(db: Database) -> str:
    try:
        status = await db.command({"connectionStatus": 1})
        users = [user["user"] for user in status["authInfo"]["authenticatedUsers"]]
    except (pymongo_errors.PyMongoError, KeyError, TypeError):
        users = []
    return f"user {users[0]!r}" if users else "this client"


def denied(error: pymongo_errors.PyMongoError) -> bool:
    """Return True if MongoDB rejected the call because the user lacks the rights."""
    return bool(codes_of(error) & _DENIED_CODES)


def flowkit_error(error: pymongo_errors.PyMongoError) -> FlowKitError:
    """Return a FlowKit error with a short message for a driver error."""
    if too_large(error):
        return StoreTooLarge(_short("MongoDB rejected the operation", error))
    if not unavailable(error):
        return StoreRefused(_short("MongoDB rejected the operation", error))
    if is_outage(error):
        return StoreUnavailable(_short("MongoDB is unavailable", error))
    if denied(error):
        return StoreDenied(_short("MongoDB denies access", error))
    return StoreUnavailable(_short("MongoDB cannot perform the operation now", error))


def unavailable(error: pymongo_errors.PyMongoError) -> bool:
    """Return True if the same call may succeed later, which includes every error that is not known to be permanent."""
    if isinstance(error, pymongo_errors.OperationFailure):
        passes = is_outage(error) or _is_unconfirmed(error)
        return passes or not (codes_of(error) & _PERMANENT_CODES or _is_from_driver(error))
    if isinstance(error, pymongo_errors.ConfigurationError):
        return error.__cause__ is not None  # a failed DNS lookup has a cause; a wrong setting has none
    return is_outage(error) or not isinstance(error, _USAGE_ERRORS)


def is_outage(error: pymongo_errors.PyMongoError) -> bool:
    """Return True if no call can succeed now: the server is unreachable or changing state, or the client is closed."""
    closed = isinstance(error, pymongo_errors.InvalidOperation) and "after close" in str(error)
    return isinstance(error, _UNREACHABLE) or closed or bool(codes_of(error) & _UNREACHABLE_CODES)


def _is_unconfirmed(error: pymongo_errors.OperationFailure) -> bool:
    """Return True for several writes of which no majority has confirmed those that were made."""
    return isinstance(error, pymongo_errors.BulkWriteError) and bool(error.details.get("writeConcernErrors"))


def too_large(error: Exception) -> bool:
    """Return True if the write failed because the document would exceed MongoDB's size limit."""
    if isinstance(error, pymongo_errors.PyMongoError):
        return bool(codes_of(error) & _TOO_LARGE_CODES)
    return isinstance(error, pymongo_errors.DocumentTooLarge)


async def fits(write: Awaitable[Any]) -> bool:
    """Await a write. Return False if the document would exceed MongoDB's size limit, and True otherwise."""
    try:
        await write
    except (pymongo_errors.PyMongoError, pymongo_errors.DocumentTooLarge) as error:
        if too_large(error):
            return False
        raise
    return True


async def with_room(write: Callable[[], Awaitable[R]], make_room: Callable[[], Awaitable[None]]) -> R:
    """Return the result of a write. If a document would exceed the size limit, make room and write once more."""
    try:
        return await write()
    except (pymongo_errors.PyMongoError, pymongo_errors.DocumentTooLarge) as error:
        if not too_large(error):
            raise
    await make_room()
    return await write()


async def gather_writes(*writes: Awaitable[None]) -> None:
    """Await independent writes concurrently, which saves round trips, and return when all have ended.

    If some failed, raise one of their errors, preferably a permanent one.
    """
    own, *others = writes  # The first one needs no task.
    rest = asyncio.gather(*others, return_exceptions=True)
    try:
        await own
    except asyncio.CancelledError:
        rest.cancel()
        raise
    except StoreUnavailable:
        _raise_error_of(await rest)
        raise
    finally:
        await rest
    _raise_error_of(await rest)


def _raise_error_of(results: Iterable[BaseException | None]) -> None:
    """Raise one of the errors among these results, preferably a permanent one; do nothing if there is none."""
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, StoreUnavailable))


def _is_from_driver(error: pymongo_errors.OperationFailure) -> bool:
    """Return True if the error has no server code, so no server reported it."""
    return not codes_of(error) - {0}


def codes_of(error: pymongo_errors.PyMongoError) -> set[int]:
    """Return the server codes of an error; for a bulk write, those of all the writes that failed."""
    if isinstance(error, pymongo_errors.BulkWriteError):
        problems = error.details.get("writeErrors") or []
        return {problem["code"] for problem in problems if problem.get("code")}
    code = code_of(error)
    return set() if code is None else {code}


def code_of(error: pymongo_errors.PyMongoError) -> int | None:
    """Return the server code of an error, or None if the error has no code."""
    code: int | None = getattr(error, "code", None)
    return code


def _short(what: str, error: Exception) -> str:
    return f"{what} ({type(error).__name__}: {words(error)})"


def words(error: Exception) -> str:
    """Return the informative part of a driver's error message, at most 250 characters."""
    details = getattr(error, "details", None) or {}
    return bounded(str(details.get("errmsg") or error).rpartition(":: caused by :: ")[2], 250)


async def ensure_index(collection: Any, keys: Any, name: str, **options: Any) -> None:
    """Create an index, or accept an index with the same keys under another name (protocol: engine duties).

    Raise StoreRefused, which names the index and the fix, in three cases: duplicate documents prevent a unique index,
    an existing index has the same keys but is not unique, or an existing index has the same name but other keys.
    """
    try:
        await collection.create_index(keys, name=name, **options)
    except pymongo_errors.DuplicateKeyError as error:
        raise StoreRefused(
            f"cannot create the unique index {name}; remove the duplicates first: {words(error)}"
        ) from None
    except pymongo_errors.OperationFailure as error:
        if error.code not in _INDEX_CONFLICTS:
            raise
        await _check_other_index(collection, keys, name, options)


async def expire_after(collection: Any, name: str, seconds: float) -> None:
    """Let MongoDB delete documents this long after their `created_at`, by the index `name`; 0 means never."""
    whole = math.ceil(seconds)
    index = (await collection.index_information()).get(name)
    if index is not None and index.get("expireAfterSeconds") != whole:
        await _drop_index(collection, name)
    if whole:
        await ensure_index(collection, "created_at", name, expireAfterSeconds=whole)


async def _drop_index(collection: Any, name: str) -> None:
    try:
        await collection.drop_index(name)
    except pymongo_errors.OperationFailure as error:
        if error.code != _INDEX_NOT_FOUND:  # another engine has dropped it
            raise


async def _check_other_index(collection: Any, keys: Any, name: str, options: dict[str, Any]) -> None:
    """Accept an existing index that can replace the requested one. Raise StoreRefused if there is none."""
    unique = bool(options.get("unique"))
    wanted = [(keys, 1)] if isinstance(keys, str) else [tuple(key) for key in keys]
    indexes = await collection.index_information()
    same = {other: index for other, index in indexes.items() if _keys(index) == wanted}
    serving = [other for other, index in same.items() if not unique or _is_unique(index)]
    if serving:
        if "expireAfterSeconds" in options and "expireAfterSeconds" not in same[serving[0]]:
            _logger.warning(
                "documents of %s do not expire: the index %s over the same field prevents the index %s; remove it "
                "with db.%s.dropIndex(%r), then restart",
                *(collection.name, serving[0], name, collection.name, serving[0]),
            )
        return _logger.info("index %s exists under the name %s", name, serving[0])
    other = next(iter(same), name)
    is_not = (
        f"over {_shown(wanted)} is not unique" if same else f"has the keys {_shown(_keys(indexes[name]))}"
    )
    raise StoreRefused(
        f"collection {collection.name!r} needs the index {name} over {_shown(wanted)}{', unique' * unique}, "
        f"but its index {other!r} {is_not}: remove it with db.{collection.name}.dropIndex({other!r}), then restart"
    )


def _keys(index: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(key) for key in index["key"]]


def _is_unique(index: dict[str, Any]) -> bool:
    """Return True if the index is unique for all documents and not only for those that match a partial filter."""
    return bool(index.get("unique")) and "partialFilterExpression" not in index


def _shown(keys: list[tuple[Any, ...]]) -> str:
    return f"({', '.join(str(key[0]) for key in keys)})"


def duplicate_indexes(error: pymongo_errors.BulkWriteError) -> set[int]:
    """Return the indexes of the rows whose key exists already.

    Raise `error` if it has any other cause, or if no majority has confirmed the rows that were written.
    """
    problems = error.details.get("writeErrors", [])
    other = [problem for problem in problems if problem.get("code") != DUPLICATE_KEY]
    if other or not problems or error.details.get("writeConcernErrors"):
        raise error
    return {problem["index"] for problem in problems}


def moment(at: float) -> datetime:
    """Convert seconds since the Unix epoch to the timezone-aware UTC datetime that documents contain."""
    return datetime.fromtimestamp(at, UTC)


def iso(at: float) -> str:
    """Convert seconds since the Unix epoch to the documented ISO 8601 text, which ends in `+00:00`."""
    return moment(at).isoformat()


async def aggregated(collection: Any, pipeline: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of an aggregation.

    Motor's `aggregate` returns a cursor; that of PyMongo's asynchronous client returns an awaitable of a cursor.
    """
    cursor = collection.aggregate(pipeline)
    if inspect.isawaitable(cursor):
        cursor = await cursor
    return [row async for row in cursor]
