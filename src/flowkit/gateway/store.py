"""What the gateway stores: its entities, the dispatches of jobs to supervisors, and the events of flows.

An entity has its ids as `_id`: that of a flow is `3:40` in context 3, and that of a job `3:11:501` if its caller is 11.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from pymongo import ASCENDING, DESCENDING, ReturnDocument
from pymongo.errors import BulkWriteError, DuplicateKeyError

from flowkit.adapters.mongo import (
    Database,
    aggregated,
    duplicate_indexes,
    durable,
    ensure_index,
    translate_errors,
)
from flowkit.core.utils import Fields, dumps
from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from flowkit.gateway.delivery import LateReply


ACTORS: Final = "flow_actors"
CONTEXTS: Final = "flow_contexts"
RUNNERS: Final = "flow_runners"
JOBS: Final = "flow_jobs"
FLOWS: Final = "flows"
MESSAGES: Final = "flow_messages"
EVENTS: Final = "flow_events"

PAGE_BYTES: Final = 4_000_000
"""Size of the entries of a page, in bytes of JSON, from which on it has no further ones. It has at least one."""

_MAX_LATE = 20
"""Largest number of late replies that the record of a dispatch keeps."""
_UNSHOWN: Final = {FLOWS: ("nodes", "env_vars"), MESSAGES: ("logs", "late", "error")}
"""Long fields that lists do not show."""
_DISPATCH: Final = ("job_id", "generation", "retry", "state", "outcome", "epoch")
_EVENT: Final = ("seq", "task_id", "run_id", "node", "to", "generation", "retry")
_ATTEMPT: Final = ("transport_id", "outcome", "logs", "error")
_OLDEST_FIRST: Final = [("generation", ASCENDING), ("retry", ASCENDING)]


def key(*ids: int) -> str:
    """Return the `_id` of an entity with these ids."""
    return ":".join(map(str, ids))


@dataclass(frozen=True, slots=True)
class Listing:
    """A page of a list."""

    rows: list[Fields]
    more: bool
    """Whether entries follow."""


async def _listed(cursor: Any, limit: int) -> Listing:
    """Read a cursor up to `limit` documents or PAGE_BYTES bytes."""
    rows: list[Fields] = []
    size = 0
    async for document in cursor.limit(limit + 1):
        size += len(dumps(document))
        if rows and (len(rows) == limit or size > PAGE_BYTES):
            return Listing(rows, more=True)
        rows.append(document)
    return Listing(rows, more=False)


def _before(created_at: int, document_id: str) -> list[Fields]:
    """Return the alternatives of a query for messages that follow one, newest first."""
    return [{"created_at": {"$lt": created_at}}, {"created_at": created_at, "_id": {"$lt": document_id}}]


_STATUS: Final = ("status", "finished_at")


def _status_of(task: Fields) -> str:
    """Return the status of a task. One that is ending still runs.

    Its document has the final status before the end is stored. Until then, nodes can lack their final statuses, and the
    task cannot run again.
    """
    status = TaskStatus(task["status"])
    return (TaskStatus.RUNNING if status.closed and task["finished_at"] is None else status).value


class FlowStore:
    """The collections of the gateway. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._db = durable(db)

    @translate_errors
    async def prepare(self) -> None:
        """Create the indexes."""
        up = ASCENDING
        await asyncio.gather(
            ensure_index(self._db[RUNNERS], [("context_id", up), ("id", up)], "ix_flow_runner"),
            ensure_index(
                self._db[RUNNERS],
                [("context_id", up), ("addresses", up), ("id", up)],
                "ix_flow_runner_address",
            ),
            ensure_index(self._db[JOBS], [("context_id", up), ("id", up)], "ix_flow_job"),
            ensure_index(self._db[FLOWS], [("context_id", up), ("id", up)], "ix_flow"),
            ensure_index(self._db[FLOWS], [("context_id", up), ("jobs", up)], "ix_flow_jobs"),
            ensure_index(self._db[FLOWS], [("task_id", up)], "ix_flow_task"),
            ensure_index(
                self._db[MESSAGES],
                [("task_id", up), ("job_id", up), *_OLDEST_FIRST],
                "ix_flow_message_attempt",
            ),
            ensure_index(
                self._db[MESSAGES],
                [("context_id", up), ("created_at", DESCENDING), ("_id", DESCENDING)],
                "ix_flow_message_created",
            ),
            ensure_index(
                self._db[MESSAGES], [("context_id", up), ("open_until", up)], "ix_flow_message_open"
            ),
            ensure_index(self._db[EVENTS], [("task_id", up), ("seq", up)], "ix_flow_event_task_seq"),
            ensure_index(self._db[EVENTS], [("flow", up), ("seq", up)], "uq_flow_event", unique=True),
        )

    # --- entities

    @translate_errors
    async def put(self, collection: str, document_id: int | str, fields: Fields, now: float) -> Fields:
        """Create an entity or replace these fields of it, and return it."""
        stored: Fields = await self._db[collection].find_one_and_update(
            {"_id": document_id},
            {"$set": {**fields, "updated_at": int(now)}, "$setOnInsert": {"created_at": int(now)}},
            upsert=True,
            return_document=ReturnDocument.AFTER,
        )
        return stored

    @translate_errors
    async def insert(self, collection: str, document_id: str, fields: Fields, now: float) -> Fields | None:
        """Create an entity, and return it; None if one with this id exists."""
        made = {"_id": document_id, **fields, "created_at": int(now), "updated_at": int(now)}
        try:
            await self._db[collection].insert_one(made)
        except DuplicateKeyError:
            return None
        return made

    @translate_errors
    async def load(self, collection: str, document_id: int | str) -> Fields | None:
        """Return an entity; None if it does not exist."""
        found: Fields | None = await self._db[collection].find_one({"_id": document_id})
        return found

    @translate_errors
    async def page(
        self, collection: str, wanted: Fields, *, after: int | None, limit: int, by: str = "id"
    ) -> list[Fields]:
        """Return up to `limit` entities with higher ids than `after`, in the order of their ids."""
        more = {} if after is None else {by: {"$gt": after}}
        found = self._db[collection].find({**wanted, **more}).sort(by, ASCENDING).limit(limit)
        return [document async for document in found]

    @translate_errors
    async def listing(
        self, collection: str, wanted: Fields, *, after: int | None, limit: int, by: str = "id"
    ) -> Listing:
        """Return entities as `page` does, without long fields that no list shows, until they have PAGE_BYTES bytes."""
        more = {} if after is None else {by: {"$gt": after}}
        hidden = dict.fromkeys(_UNSHOWN.get(collection, ()), 0)
        return await _listed(self._db[collection].find({**wanted, **more}, hidden).sort(by, ASCENDING), limit)

    @translate_errors
    async def jobs(self, context_id: int, caller_id: int, ids: Collection[int]) -> dict[int, Fields]:
        """Return those of these jobs that exist, by id."""
        wanted = {"_id": {"$in": [key(context_id, caller_id, job_id) for job_id in ids]}}
        return {document["id"]: document async for document in self._db[JOBS].find(wanted)}

    @translate_errors
    async def job_limits(self, context_id: int, caller_id: int, ids: Collection[int]) -> dict[int, Fields]:
        """Return id, timeout and retries of those of these jobs that exist, by id."""
        wanted = {"_id": {"$in": [key(context_id, caller_id, job_id) for job_id in ids]}}
        shown = {"_id": 0, "id": 1, "timeout": 1, "retries": 1}
        return {document["id"]: document async for document in self._db[JOBS].find(wanted, shown)}

    @translate_errors
    async def assign_jobs(self, context_id: int, caller_id: int, ids: Collection[int], flow_id: int) -> None:
        """Note the first flow of each job, which decides the id under which a supervisor knows the job."""
        ids_of = [key(context_id, caller_id, job_id) for job_id in ids]
        await self._db[JOBS].update_many(
            {"_id": {"$in": ids_of}, "flow_id": None}, {"$set": {"flow_id": flow_id}}
        )

    # --- flows

    @translate_errors
    async def insert_flow(self, fields: Fields, now: float) -> bool:
        """Create a flow. Return False if one with its id exists."""
        own = {"_id": key(fields["context_id"], fields["id"]), "version": 1, "run": 0}
        own |= {"task_id": None, "is_starting": False, "last_event": 0}
        try:
            await self._db[FLOWS].insert_one(
                {**own, **fields, "created_at": int(now), "updated_at": int(now)}
            )
        except DuplicateKeyError:
            return False
        return True

    @translate_errors
    async def change_flow(self, flow: Fields, fields: Fields, now: float) -> Fields | None:
        """Change fields of a flow that has the version of `flow`, and return it; None if it has another one."""
        found: Fields | None = await self._db[FLOWS].find_one_and_update(
            {"_id": flow["_id"], "version": flow["version"]},
            {"$set": {**fields, "updated_at": int(now)}, "$inc": {"version": 1}},
            return_document=ReturnDocument.AFTER,
        )
        return found

    @translate_errors
    async def note_started(self, task_id: str) -> None:
        """Note that the task of the latest run of a flow exists, or has existed."""
        await self._db[FLOWS].update_one(
            {"task_id": task_id, "is_starting": True}, {"$set": {"is_starting": False}}
        )

    @translate_errors
    async def flows_of_job(self, context_id: int, job_id: int, caller_id: int | None) -> list[Fields]:
        """Return the flows that have a job, of one caller or of all, without their nodes."""
        wanted: Fields = {"context_id": context_id, "jobs": job_id}
        if caller_id is not None:
            wanted["caller_id"] = caller_id
        hidden = {"nodes": 0, "jobs": 0, "env_vars": 0}
        return [document async for document in self._db[FLOWS].find(wanted, hidden)]

    @translate_errors
    async def flow_without_nodes(self, flow_key: str) -> Fields | None:
        """Return a flow without its long fields; None if it does not exist."""
        hidden = dict.fromkeys(("nodes", "jobs", "env_vars"), 0)
        found: Fields | None = await self._db[FLOWS].find_one({"_id": flow_key}, hidden)
        return found

    @translate_errors
    async def nodes_of_flow(self, flow_key: str) -> list[Fields]:
        """Return the nodes of a flow."""
        found = await self._db[FLOWS].find_one({"_id": flow_key}, {"nodes": 1})
        return found["nodes"] if found else []

    @translate_errors
    async def flow_of_task(self, task_id: str) -> Fields | None:
        """Return the flow whose latest run is a task; None if there is none."""
        found: Fields | None = await self._db[FLOWS].find_one({"task_id": task_id})
        return found

    @translate_errors
    async def task(self, task_id: str, fields: Sequence[str]) -> Fields | None:
        """Return these fields of the document of a task, with its status as `_status_of` has it; None if
        there is none.
        """
        projection = {"_id": 0, **dict.fromkeys((*fields, *_STATUS), 1)}
        found: Fields | None = await self._db.tasks.find_one({"id": task_id}, projection)
        return None if found is None else {**found, "status": _status_of(found)}

    @translate_errors
    async def task_statuses(self, task_ids: Collection[str]) -> dict[str, tuple[str, int]]:
        """Return status and `run_seq` of those of these tasks that have a document, by id."""
        wanted = {"_id": 0, "id": 1, "run_seq": 1, **dict.fromkeys(_STATUS, 1)}
        found = self._db.tasks.find({"id": {"$in": [*task_ids]}}, wanted)
        return {document["id"]: (_status_of(document), document["run_seq"]) async for document in found}

    @translate_errors
    async def result(self, task_id: str, node_id: str, batch_uid: str) -> Fields | None:
        """Return the metrics that a node has stored with a batch; None if there is no such batch."""
        own = {"task_id": task_id, "node_id": node_id, "batch_uid": batch_uid, "status": "partial"}
        found = await self._db.artifacts.find_one(own, {"_id": 0, "meta": 1})
        return found["meta"] if found else None

    # --- dispatches

    @translate_errors
    async def open_dispatch(
        self, dispatch_id: str, fields: Fields, epoch: int, set_fields: Fields, now: float
    ) -> Fields:
        """Return the record of a dispatch. Create it with `fields` if needed, and set `set_fields` in any case.

        An earlier attempt than the latest one that has opened it changes no epoch.
        """
        stored: Fields = await self._db[MESSAGES].find_one_and_update(
            {"_id": dispatch_id},
            {
                "$setOnInsert": {**fields, "created_at": int(now)},
                "$set": {**set_fields, "updated_at": int(now)},
                "$max": {"epoch": epoch},
            },
            upsert=True,
            return_document=ReturnDocument.AFTER,
        )
        return stored

    @translate_errors
    async def dispatch(self, task_id: str, dispatch_id: str) -> Fields | None:
        """Return what the status of a job depends on of a dispatch of a task; None if the task has no such dispatch."""
        own = {"_id": dispatch_id, "task_id": task_id}
        found: Fields | None = await self._db[MESSAGES].find_one(own, dict.fromkeys(_DISPATCH, 1))
        return found

    @translate_errors
    async def change_dispatch(self, dispatch_id: str, before: Fields, fields: Fields, now: float) -> bool:
        """Change the record of a dispatch that has the fields `before`. Return False if they have changed."""
        done = await self._db[MESSAGES].update_one(
            {"_id": dispatch_id, **before}, {"$set": {**fields, "updated_at": int(now)}}
        )
        return bool(done.matched_count)

    @translate_errors
    async def abandon_dispatches(self, ids: Iterable[str], fields: Fields, now: float) -> None:
        """Change the records of these dispatches, unless they have an outcome."""
        await self._abandon({"_id": {"$in": [*ids]}}, fields, now)

    @translate_errors
    async def abandon_earlier(
        self, task_id: str, job: int, generation: int, retry: int, fields: Fields, now: float
    ) -> None:
        """Change the records of earlier attempts of a job, unless they have an outcome."""
        earlier = [
            {"generation": {"$lt": generation}},
            {"generation": generation, "retry": {"$lt": retry}},
        ]
        await self._abandon({"task_id": task_id, "job_id": job, "$or": earlier}, fields, now)

    async def _abandon(self, wanted: Fields, fields: Fields, now: float) -> None:
        await self._db[MESSAGES].update_many(
            {**wanted, "outcome": None}, {"$set": {**fields, "updated_at": int(now)}}
        )

    @translate_errors
    async def add_late_reply(self, dispatch_id: str, reply: LateReply, now: float) -> None:
        """Note a reply that came too late with the record of its dispatch."""
        late = {"$each": [{"at": now, **asdict(reply)}], "$slice": -_MAX_LATE}
        await self._db[MESSAGES].update_one(
            {"_id": dispatch_id}, {"$push": {"late": late}, "$inc": {"late_replies": 1}}
        )

    @translate_errors
    async def dispatches(self, task_id: str, jobs: Collection[int]) -> list[Fields]:
        """Return what the statuses of jobs depend on: the dispatches of these jobs of a task."""
        wanted: Fields = {"task_id": task_id, "job_id": {"$in": [*jobs]}}
        return [row async for row in self._db[MESSAGES].find(wanted, dict.fromkeys(_DISPATCH, 1))]

    @translate_errors
    async def attempts(self, task_id: str, job: int, *, skip: int, limit: int) -> Listing:
        """Return the attempts of a job after the first `skip` ones, oldest first, until they have PAGE_BYTES bytes."""
        found = self._db[MESSAGES].find({"task_id": task_id, "job_id": job}, dict.fromkeys(_ATTEMPT, 1))
        return await _listed(found.sort(_OLDEST_FIRST).skip(skip), limit)

    @translate_errors
    async def latest_error(self, task_id: str, job: int, generation: int) -> str | None:
        """Return the error of the latest attempt of a job in a generation; None if it has none."""
        found = await self._db[MESSAGES].find_one(
            {"task_id": task_id, "job_id": job, "generation": generation},
            {"error": 1},
            sort=[("retry", DESCENDING)],
        )
        return (found or {}).get("error")

    @translate_errors
    async def busy(self, context_id: int, now: float) -> dict[int, int]:
        """Return the number of jobs in flight of each runner of a context, by id. Idle runners are absent."""
        wanted = {"context_id": context_id, "open_until": {"$gt": now}}
        rows = await aggregated(
            self._db[MESSAGES],
            [{"$match": wanted}, {"$group": {"_id": "$runner_id", "count": {"$sum": 1}}}],
        )
        return {row["_id"]: row["count"] for row in rows if row["_id"] is not None}

    @translate_errors
    async def messages(self, wanted: Fields, *, after: tuple[int, str] | None, limit: int) -> Listing:
        """Return messages, newest first, until they have PAGE_BYTES bytes.

        `after` is `created_at` and `_id` of the message after which they follow.
        """
        hidden = dict.fromkeys(_UNSHOWN[MESSAGES], 0)
        older = {} if after is None else {"$or": _before(*after)}
        found = self._db[MESSAGES].find({**wanted, **older}, hidden)
        return await _listed(found.sort([("created_at", DESCENDING), ("_id", DESCENDING)]), limit)

    # --- events

    @translate_errors
    async def last_event(self, flow: str) -> int:
        """Return the highest sequence number of the stored events of a flow; 0 if there are none."""
        found = await self._db[EVENTS].find_one({"flow": flow}, {"seq": 1}, sort=[("seq", DESCENDING)])
        return found["seq"] if found else 0

    @translate_errors
    async def events_of_task(self, task_id: str, after: int, limit: int) -> list[Fields]:
        """Return what the next events of a run depend on: its events after a sequence number, in order."""
        wanted = {"task_id": task_id, "seq": {"$gt": after}}
        found = self._db[EVENTS].find(wanted, dict.fromkeys(_EVENT, 1)).sort("seq", ASCENDING).limit(limit)
        return [document async for document in found]

    @translate_errors
    async def events(self, flow: str, after: int, limit: int = 500) -> list[Fields]:
        """Return the events of a flow after a sequence number, in order."""
        found = (
            self._db[EVENTS].find({"flow": flow, "seq": {"$gt": after}}).sort("seq", ASCENDING).limit(limit)
        )
        return [document async for document in found]

    @translate_errors
    async def note_events(self, flow: str, last: int) -> None:
        """Note the highest sequence number of the events of a flow, which outlives the events."""
        await self._db[FLOWS].update_one({"_id": flow}, {"$max": {"last_event": last}})

    @translate_errors
    async def append_events(self, events: Iterable[Fields]) -> bool:
        """Store events with consecutive sequence numbers.

        Return False if another gateway has stored an event with one of the numbers. The events before it are stored.
        """
        try:
            await self._db[EVENTS].insert_many([*events], ordered=True)
        except BulkWriteError as error:
            return not duplicate_indexes(error)
        return True
