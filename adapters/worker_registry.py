"""The registry of worker processes, `worker_registry` (spec: collections; protocol: announces).

The registry is for operators and monitoring. FlowKit bases two decisions on it: the sweep counts the silence of an
attempt only while a worker serves its role, and only roles with a worker get slots of the concurrency limits.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pymongo.errors import DuplicateKeyError

from flowkit.adapters.entries import utc
from flowkit.adapters.metrics import storable
from flowkit.adapters.mongo import Database, durable, ensure_index, moment, translate_errors
from flowkit.core.time import LeaseObserver
from flowkit.limits import VERSION_CHARS
from flowkit.text import names, shorten, visible

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_SILENT_SEC = 180.0
"""Seconds without an announce after which a worker that reports no interval is offline: 3 times the usual interval."""

_LISTED_FIELDS = (
    "worker_id",
    "type",
    "version",
    "capacity",
    "status",
    "session",
    "handlers",
    "queue",
    "last_seen",
)
_LISTED = {"_id": 0, "announce_interval_sec": 1} | dict.fromkeys(_LISTED_FIELDS, 1)

_ANNOUNCED = {"session": 1, "last_seen": 1, "announce_interval_sec": 1}

_SHOWN_VERSIONS = 5

_MOST_ROWS = 2_000
"""How many rows a read of the workers of some roles returns at most."""
_MOST_SCHEMA_ROWS = 50
"""How many rows with schemas one read returns at most; each has at most two megabytes of them."""

BRIDGE_PREFIX = "flowkit-bridge-"
"""Beginning of the Temporal identity of every bridge."""


class WorkerStatus(StrEnum):
    """The last known state of a worker."""

    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncedContract:
    """The JSON Schemas of the input and the output of a role, as JSON text; empty for one without a type."""

    input: str
    output: str
    digest: str
    """Identifies the contract."""
    is_source: bool = False
    """Whether the input is that of the node itself, and not the batches of others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedHandler:
    """A handler that an engine or a worker hosts."""

    role: str
    version: str
    engine: bool
    """Whether the process is an engine."""
    contract: AnnouncedContract | None = None
    """What the role takes and returns, if it is typed."""

    def entry(self) -> dict[str, Any]:
        """Return the entry of the handler in the row, which names its contract by the digest."""
        typed = {"contract": self.contract.digest} if self.contract else {}
        return {"role": self.role, "version": self.version, "engine": self.engine, **typed}


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedVersions:
    """The versions of one role that online workers run, if they differ."""

    queue: str
    """The engine queue; empty for external workers, which do not announce it."""
    role: str
    workers: dict[str, tuple[str, ...]]
    """The ids of the workers by version."""

    def __str__(self) -> str:
        """Return who runs what, for people."""
        return f"workers of role {self.role} run different versions: {describe_versions(self.workers)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredWorker:
    """The row of a worker."""

    worker_id: str
    roles: tuple[str, ...]
    version: str
    slots: int | None
    """How many attempts it can run at once; None if it does not say."""
    online: bool
    external: bool
    """Whether it is an external worker."""
    in_engine: bool
    """Whether it is an engine that hosts handlers."""
    last_seen: datetime | None
    announce_interval_sec: float
    queue: str = ""
    """The engine queue whose roles it serves; empty for external workers, which do not announce it."""
    handlers: dict[str, str] = field(default_factory=dict)
    """The versions of its handlers by role. All handlers of an external worker have the version that it announces."""
    contracts: dict[str, str] = field(default_factory=dict)
    """The digests of the contracts of its typed roles."""


class WorkerRegistry:
    """The collection `worker_registry`, which has one row for each worker id.

    A row describes the process that came online last. `session` distinguishes processes with the same id, so that the
    end of an old process does not hide a new one. Processes without a session, such as external workers, count as one.
    """

    def __init__(self, db: Database) -> None:
        self._workers = durable(db).worker_registry
        self._announces = LeaseObserver()

    @translate_errors
    async def prepare(self) -> None:
        """Create the index. Raise StoreRefused, which names the index, if duplicate ids prevent it."""
        await ensure_index(self._workers, "worker_id", "uniq_worker", unique=True)

    @translate_errors
    async def register(
        self,
        worker_id: str,
        roles: Sequence[str],
        version: str,
        capacity: int,
        at: float,
        *,
        session: str = "",
        leaked_threads: int | None = None,
        announce_interval_sec: float | None = None,
        queue: str = "",
        handlers: Sequence[HostedHandler] = (),
    ) -> None:
        """Register a process that has started. As in announces, `type` contains all its roles, joined by commas."""
        contracts = [asdict(each) for each in {each.contract: None for each in handlers} if each is not None]
        shown = {
            "type": ",".join(roles),
            "capabilities": {"roles": list(roles)},
            "version": version,
            "capacity": {"tasks": capacity},
            "announce_interval_sec": announce_interval_sec,
            **({"queue": queue} if queue else {}),
            **({"handlers": [each.entry() for each in handlers]} if handlers else {}),
            **({"contracts": contracts} if contracts else {}),
            **_alive(at, session, leaked_threads),
        }
        await self._upsert(worker_id, shown)

    async def _upsert(self, worker_id: str, shown: dict[str, Any]) -> None:
        """Set fields of a row, which another process may create at the same time."""
        try:
            await self._workers.update_one({"worker_id": worker_id}, {"$set": shown}, upsert=True)
        except DuplicateKeyError:
            await self._workers.update_one({"worker_id": worker_id}, {"$set": shown})

    @translate_errors
    async def record_announcement(self, worker_id: str, fields: dict[str, Any], at: float) -> None:
        """Record an announcement of an external worker. Fields that it does not contain keep their stored values."""
        stored, _ = storable(f"announcement of worker {worker_id!r}", fields)
        shown = {**stored, **_alive(at, "", None)}
        await self._upsert(worker_id, shown)

    @translate_errors
    async def refresh(
        self, worker_id: str, at: float, *, session: str = "", leaked_threads: int | None = None
    ) -> bool:
        """Record that a process is still running. Return False if it has no row and must call `register` again.

        The row stays unchanged while it describes another process that is online.
        """
        own = {"worker_id": worker_id, "$or": [{"session": session}, {"status": WorkerStatus.OFFLINE.value}]}
        done = await self._workers.update_one(own, {"$set": _alive(at, session, leaked_threads)})
        if done.matched_count:
            return True
        return await self._workers.find_one({"worker_id": worker_id}, {"_id": 1}) is not None

    @translate_errors
    async def mark_offline(self, worker_id: str, at: float, *, session: str = "") -> bool:
        """Record that a process has stopped. Return False, and change nothing, if the row describes another process."""
        gone = {"status": WorkerStatus.OFFLINE.value, "last_seen": moment(at)}
        done = await self._workers.update_one({"worker_id": worker_id, "session": session}, {"$set": gone})
        return bool(done.matched_count)

    @translate_errors
    async def list_workers(self) -> list[RegisteredWorker]:
        """Return all workers that have a row, sorted by id."""
        rows = self._workers.find({"worker_id": {"$exists": True}}, _LISTED).sort("worker_id", 1)
        return [_registered(row) async for row in rows]

    @translate_errors
    async def find_online(self, queue: str, roles: Collection[str]) -> list[RegisteredWorker]:
        """Return up to 2,000 workers of an engine queue that are online and serve one of the roles."""
        serving = {
            "queue": queue,
            "status": WorkerStatus.ONLINE.value,
            "handlers.role": {"$in": sorted(roles)},
        }
        rows = self._workers.find(serving, _LISTED).limit(_MOST_ROWS)
        return [_registered(row) async for row in rows]

    @translate_errors
    async def count_online(self, queue: str) -> Counter[str]:
        """Return how many online workers serve each role: those of an engine queue, and external ones."""
        rows = self._workers.find({"status": WorkerStatus.ONLINE.value}, _LISTED)
        online = [_registered(row) async for row in rows]
        return Counter(role for each in online if each.queue in (queue, "") for role in {*each.roles})

    @translate_errors
    async def read_contracts(self, worker_ids: Collection[str]) -> dict[str, AnnouncedContract]:
        """Return the contracts of up to 50 workers, by digest."""
        asked = {"worker_id": {"$in": sorted(worker_ids)}, "session": {"$gt": ""}}
        rows = self._workers.find(asked, {"_id": 0, "contracts": 1}).limit(_MOST_SCHEMA_ROWS)
        found = [_contract(each) async for row in rows for each in _listed(row.get("contracts"))]
        return {each.digest: each for each in found if each is not None}

    @translate_errors
    async def find_stopped(self, worker_ids: Collection[str]) -> set[str]:
        """Return those of the workers that have a row and are offline."""
        gone = {"worker_id": {"$in": sorted(worker_ids)}, "status": WorkerStatus.OFFLINE.value}
        return {row["worker_id"] async for row in self._workers.find(gone, {"worker_id": 1})}

    @translate_errors
    async def is_served(self, role: str) -> bool:
        """Return whether a worker of the role is online."""
        listed = {"$regex": f"(^|,){re.escape(role)}(,|$)"}
        online = {"status": WorkerStatus.ONLINE.value, "type": listed}
        return await self._workers.find_one(online, {"_id": 1}) is not None

    @translate_errors
    async def find_roles(self) -> tuple[set[str], set[str]]:
        """Return the roles of all workers that have ever registered, and those of the workers that are online."""
        types = [
            await self._workers.distinct("type", query)
            for query in ({}, {"status": WorkerStatus.ONLINE.value})
        ]
        ever, online = (
            {role for each in found if isinstance(each, str) for role in each.split(",")} for found in types
        )
        return ever - {""}, online - {""}

    @translate_errors
    async def expire_silent(self) -> int:
        """Mark workers that this process has seen miss three announces as offline, and return their number.

        Their next announce marks them as online again.
        """
        read_at, silent = self._announces.now(), list[Any]()
        async for row in self._workers.find({"status": WorkerStatus.ONLINE.value}, _ANNOUNCED):
            interval = row.get("announce_interval_sec")
            silent_sec = 3 * interval if isinstance(interval, (int, float)) else _SILENT_SEC
            seen = (str(row.get("session")), str(row.get("last_seen")))
            if self._announces.unchanged_sec(row["_id"], seen, read_at) > silent_sec:
                silent.append({"_id": row["_id"], "last_seen": row.get("last_seen")})
        gone = {"$set": {"status": WorkerStatus.OFFLINE.value}}
        return sum([(await self._workers.update_one(each, gone)).modified_count for each in silent])


def _registered(row: dict[str, Any]) -> RegisteredWorker:
    """Return the worker of a row. The rows of external workers contain what the workers announce."""
    types, version, capacity = row.get("type"), row.get("version"), row.get("capacity")
    roles = tuple(filter(None, types.split(","))) if isinstance(types, str) else ()
    hosted = _hosted(row) if row.get("session") else []  # external workers announce anything
    queue = row.get("queue")
    external = not row.get("session")
    announced = dict.fromkeys(roles, _shown_version(version)) if external and version else {}
    slots = capacity.get("tasks") if isinstance(capacity, dict) else None
    interval, last_seen = row.get("announce_interval_sec"), row.get("last_seen")
    return RegisteredWorker(
        worker_id=str(row["worker_id"]),
        roles=roles,
        version=version if isinstance(version, str) else "",
        slots=slots if isinstance(slots, int) else None,
        online=row.get("status") == WorkerStatus.ONLINE,
        external=external,
        in_engine=any(each.get("engine") for each in hosted),
        queue=queue if hosted and isinstance(queue, str) else "",
        handlers={each["role"]: _shown_version(each.get("version")) for each in hosted} or announced,
        contracts={
            each["role"]: each["contract"] for each in hosted if isinstance(each.get("contract"), str)
        },
        last_seen=utc(last_seen) if isinstance(last_seen, datetime) else None,
        announce_interval_sec=interval if isinstance(interval, (int, float)) else _SILENT_SEC / 3,
    )


def _listed(stored: object) -> list[Any]:
    return stored if isinstance(stored, list) else []


def _hosted(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the handlers of a row, without what no process of this version has written."""
    hosted = _listed(row.get("handlers"))
    return [each for each in hosted if isinstance(each, dict) and isinstance(each.get("role"), str)]


def _contract(stored: object) -> AnnouncedContract | None:
    """Return a stored contract; None for one that no process of this version has written."""
    match stored:
        case {
            "input": str(taken),
            "output": str(returned),
            "digest": str(digest),
            "is_source": bool(is_source),
        }:
            return AnnouncedContract(input=taken, output=returned, digest=digest, is_source=is_source)
    return None


def _shown_version(version: object) -> str:
    """Return the version of an external worker, which may announce anything."""
    return shorten(visible(version), VERSION_CHARS) if isinstance(version, str) else ""


def find_mixed_versions(workers: Iterable[RegisteredWorker]) -> list[MixedVersions]:
    """Return the roles of which online workers run different versions, by queue and role."""
    versions: dict[tuple[str, str], dict[str, list[str]]] = {}
    for worker in workers:
        for role, version in worker.handlers.items() if worker.online else ():
            versions.setdefault((worker.queue, role), {}).setdefault(version, []).append(worker.worker_id)
    return [
        MixedVersions(
            queue=queue, role=role, workers={each: (*ids,) for each, ids in sorted(by_version.items())}
        )
        for (queue, role), by_version in sorted(versions.items())
        if len(by_version) > 1
    ]


def describe_versions(workers: Mapping[str, Sequence[str]]) -> str:
    """Return the versions with their workers: `1.4 (w-1 and w-2), 1.5 (w-3)`."""
    shown = [f"{version} ({names([visible(each) for each in ids])})" for version, ids in workers.items()]
    more = len(shown) - _SHOWN_VERSIONS
    return ", ".join(shown[:_SHOWN_VERSIONS]) + (f" and {more:,} more" if more > 0 else "")


def _alive(at: float, session: str, leaked_threads: int | None) -> dict[str, Any]:
    """Return the fields of a running worker. `leaked_threads` is None for workers that do not count them."""
    leaked = {} if leaked_threads is None else {"leaked_threads": leaked_threads}
    return {"status": WorkerStatus.ONLINE.value, "last_seen": moment(at), "session": session, **leaked}
