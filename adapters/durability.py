"""What counts as stored: FlowKit's own reads and writes survive a failover, whatever the address of MongoDB says.

Temporal's history counts a write as done when MongoDB has acknowledged it. A failover must not take such a write back.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from pymongo import ReadPreference, WriteConcern

from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from flowkit.adapters.mongo import Database

_logger = logging.getLogger("flowkit.store")

_MAJORITY = "majority"
_SURE_MEMBERS = 4
"""A number of members that is a majority of every replica set: at most seven members vote."""


def durable(db: Database) -> Database:
    """Return a handle on `db` that reads from the primary and waits until a majority has journaled each write.

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
    return db.with_options(write_concern=durable_concern(given), read_preference=ReadPreference.PRIMARY)


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
