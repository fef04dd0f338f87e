"""What all MongoDB adapters share: the shape of the handle they take and the way they fail."""

from __future__ import annotations

import functools
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from bson.errors import BSONError
from pymongo import errors as pymongo_errors

from flowkit.errors import StoreRefused, StoreUnavailable
from flowkit.text import clean

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

Database = Any
"""A Motor database, or any object with its interface (PyMongo Async, the in-memory one of `flowkit.testing`)."""

_UNAVAILABLE = (
    pymongo_errors.ConnectionFailure,
    pymongo_errors.ExecutionTimeout,
    pymongo_errors.WriteConcernError,
    pymongo_errors.WTimeoutError,
)
_TRANSIENT_CODES = frozenset({6, 7, 89, 91, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436})
"""Server codes of an election, a shutdown or a lost network (MongoDB's own list of retryable errors)."""

_INDEX_OPTIONS_CONFLICT = 85

_logger = logging.getLogger("flowkit.store")

P = ParamSpec("P")
R = TypeVar("R")


def shortened(method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Turn a driver's error into ours with a short text; drivers print whole topologies, which Temporal refuses."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(*args, **kwargs)
        except pymongo_errors.PyMongoError as error:
            if unavailable(error):
                raise StoreUnavailable(_short("MongoDB does not answer", error)) from None
            raise StoreRefused(_short("MongoDB refused", error)) from None
        except (OverflowError, BSONError) as error:
            raise StoreRefused(_short("MongoDB cannot hold this", error)) from None

    return call


def unavailable(error: pymongo_errors.PyMongoError) -> bool:
    """Whether the same call may succeed later: the server is away, or changes its state."""
    return isinstance(error, _UNAVAILABLE) or code_of(error) in _TRANSIENT_CODES


def code_of(error: pymongo_errors.PyMongoError) -> int | None:
    """The server's code of an error, if it is the server's."""
    code: int | None = getattr(error, "code", None)
    return code


def _short(what: str, error: Exception) -> str:
    return f"{what} ({type(error).__name__}: {words(error)})"


def words(error: Exception) -> str:
    """The telling part of a driver's error."""
    details = getattr(error, "details", None) or {}
    return clean(str(details.get("errmsg") or error).rpartition(":: caused by :: ")[2][:250])


async def ensure_index(collection: Any, keys: Any, name: str, **options: Any) -> None:
    """Create an index; one of the same keys under another name serves as well (protocol: engine duties).

    StoreRefused names the index when duplicate documents prevent a unique one.
    """
    try:
        await collection.create_index(keys, name=name, **options)
    except pymongo_errors.DuplicateKeyError as error:
        raise StoreRefused(
            f"unique index {name} needs its duplicates removed first: {words(error)}"
        ) from None
    except pymongo_errors.OperationFailure as error:
        if error.code != _INDEX_OPTIONS_CONFLICT:
            raise
        _logger.info("index %s exists under another name: %s", name, words(error))


def moment(at: float) -> datetime:
    """Seconds since the epoch as the aware UTC date that documents hold."""
    return datetime.fromtimestamp(at, UTC)


def iso(at: float) -> str:
    """Seconds since the epoch as the documented ISO text, which ends in `+00:00`."""
    return moment(at).isoformat()
