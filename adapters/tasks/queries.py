"""Queries for displaying tasks to users. FlowKit bases no decision on their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pymongo import DESCENDING

from flowkit import reason_codes
from flowkit.adapters.artifacts import FailedBatches, read_set_aside
from flowkit.adapters.batch_uids import uid_filters, uid_text
from flowkit.adapters.dispatches import ACTIVE_STATES, OutcomeKind
from flowkit.adapters.entries import PROJECTION, epoch_of, oldest_first, utc
from flowkit.adapters.input_values import InputValues
from flowkit.adapters.mongo import (
    Database,
    aggregated,
    durable,
    ensure_index,
    iso,
    moment,
    translate_errors,
)
from flowkit.adapters.shards import ShardProgress, ShardStore
from flowkit.adapters.tasks.fields import (
    ATTEMPT_ENDED_AT,
    INPUT_DIGEST,
    PINNED,
    SCHEDULED_AT,
    TIMES,
    WIRING,
    TaskTimes,
    end_of_attempt,
    nodes_of,
    read_pins,
    read_times,
)
from flowkit.adapters.tasks.reset import read_first_epochs
from flowkit.graph.input_adapters import PULL, replace_alias
from flowkit.graph.scheduled import format_nominal
from flowkit.graph.validation import parents_by_node
from flowkit.models import OPEN_NODE_STATUSES, OPEN_TASK_STATUSES, FailureKind, NodeStatus
from flowkit.models.waits import KIND, TEXT
from flowkit.protocol.messages import EventKind
from flowkit.validation.arguments import require, task_id_problem

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_SUMMARY = {
    "_id": 0,
    "id": 1,
    "status": 1,
    "reason": 1,
    **TIMES,
    "params.pipeline_name": 1,
    "graph.name": 1,
}


_TIMED = {"_id": 0, "id": 1, SCHEDULED_AT: 1, "status": 1, "reason": 1}
_NOMINAL_CHARS = len("-2026-11-26T02:00:00Z")

_MARK = {"updated_at": 1, "last_event_recv_ms": 1, "status": 1, "run_seq": 1}

_BATCH = {
    "batch_uid": 1,
    "status": 1,
    "attempt_epoch": 1,
    "worker_id": 1,
    "updated_at": 1,
    "meta": 1,
    "artifacts_ref": 1,
    "error": 1,
    "quarantined": 1,
}

_BOUNDS = (EventKind.TASK_ACCEPTED, EventKind.TASK_DONE, EventKind.TASK_FAILED, EventKind.CANCELLED)
"""Events at the start and at the end of an attempt."""

_EVENT = {"_id": 0, "node_id": 1, "attempt_epoch": 1, "ts_ms": 1, "payload": 1}
_DISPATCH = {
    "_id": 0,
    "node_id": 1,
    "attempt_epoch": 1,
    "accepted_at": 1,
    "lease.worker_id": 1,
    "outcome.kind": 1,
    "outcome.at": 1,
    "outcome.worker_id": 1,
    "outcome.failure": 1,
}

_EXTERNAL_RUN = {
    "_id": 0,
    "node_id": 1,
    "attempt_epoch": 1,
    "lease.worker_id": 1,
    "lease.expires_at": 1,
    "lease.ttl_sec": 1,
    "batches": 1,
}

_RUN_FIELDS = (
    *("node_id", "attempt_epoch", "generation", "lease.worker_id", "lease.version"),
    *("started_at", "finished_at", ATTEMPT_ENDED_AT),
)
_NODE_RUNS = {"_id": 0} | {f"graph.nodes.{name}": 1 for name in _RUN_FIELDS}
_RUNNING = {**_NODE_RUNS, "id": 1, "graph.nodes.status": 1}


_RERUN = {
    "_id": 0,
    "params": 1,
    "graph": 1,
    "run_seq": 1,
    "closed_run_id": 1,
    "finished_at": 1,
    "coordinator.cancelled": 1,
    SCHEDULED_AT: 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedTask:
    """A task that has a nominal time."""

    task_id: str
    at: datetime
    """The nominal time, in UTC."""
    status: str
    reason: str | None
    """Why it has failed, or was cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalRun:
    """One attempt of an external role."""

    worker_id: str | None
    """The worker that has accepted the attempt; None while no worker has."""
    batches: int
    """Number of batches that the worker has reported."""
    waits_for: str
    """What the attempt waits for while no worker has accepted it; may be empty."""
    heard_at: float | None = None
    """When the latest event of its worker arrived, in seconds since the epoch."""
    lease_until: float | None = None
    """When the lease of its worker ends if no further event arrives, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatestNodeRun:
    """The latest attempt of a node, as the task document describes it."""

    epoch: int
    worker: str
    started_at: float | None
    """Unix time in seconds."""
    ended_at: float | None
    """When the attempt ended."""
    version: str = ""
    """Version of the handler; empty for functions and external workers."""
    generation: int = 0
    """How often the node was started again. Shards of earlier generations have another number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResult:
    """What a node has stored at its end."""

    metrics: dict[str, Any] = field(default_factory=dict)
    """Its final metrics, or what a function has merged."""
    artifacts_ref: dict[str, Any] | None = None
    """The reference of its `finalize`, or of an external worker's last event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBatch:
    """The result of one batch."""

    uid: str
    status: str
    """`ok`, `failed`, or `skipped` if a user has skipped the failed batch."""
    attempt: int
    """Epoch of the attempt that stored it; 0 if unknown."""
    worker: str
    stored_at: str | None
    """When the result was stored, as ISO 8601 text in UTC."""
    metrics: dict[str, Any]
    artifacts_ref: dict[str, Any] | None
    error: str | None
    """Why the batch failed."""
    tries: int | None = None
    """How often it was tried, if it is set aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedAttempt:
    """What `worker_events`, or a dispatch record, says about one attempt. Fields that it does not say are None."""

    node_id: str
    epoch: int
    worker: str | None = None
    version: str | None = None
    started_at: float | None = None
    """Unix time in seconds. Of an external attempt, when its worker accepted it."""
    ended_at: float | None = None
    finished: bool | None = None
    """Whether the attempt succeeded, once it has ended."""
    cancelled: bool = False
    kind: FailureKind | None = None
    """How the attempt failed. None if the source does not say."""
    code: str | None = None
    """The reason code of the failure."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningAttempt:
    """An attempt that a worker runs, according to the task document."""

    task_id: str
    node_id: str
    epoch: int
    worker: str
    started_at: float | None
    """Unix time in seconds."""


class TaskQueries:
    """Queries on `tasks` and `artifacts` for display. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._db = durable(db)

    @translate_errors
    async def prepare(self) -> None:
        """Create the indexes for these queries."""
        await ensure_index(self._db.tasks, [("started_at", DESCENDING)], "ix_task_started")

    @translate_errors
    async def newest(
        self,
        status: str | None,
        limit: int,
        *,
        waits: str | None = None,
        name: str | None = None,
        since: float | None = None,
        ended_since: float | None = None,
        id_prefix: str | None = None,
        skip: int = 0,
    ) -> list[dict[str, Any]]:
        """Return up to `limit` tasks, newest first and without their nodes. `status` None selects every status.

        With `waits`, return only tasks with a node that waits for something of this kind; with `name`, only those whose
        `pipeline_name` or, without it, graph has this name; with `since` or `ended_since`, times in seconds since the
        epoch, only those that have started or ended then or later; with `id_prefix`, only those whose id begins so.
        `skip` is the number of newer tasks to leave out.
        """
        wanted: dict[str, Any] = {} if status is None else {"status": status}
        if waits is not None:
            waiting = {KIND: waits, "status": {"$in": OPEN_NODE_STATUSES}}
            wanted |= {"finished_at": None, "graph.nodes": {"$elemMatch": waiting}}
        if since is not None:
            wanted["started_at"] = {"$gte": iso(since)}
        if ended_since is not None:
            wanted["finished_at"] = {"$gte": moment(ended_since)}
        if id_prefix:
            wanted["id"] = {"$gte": id_prefix, "$lt": id_prefix + "\U0010ffff"}
        if name is not None:
            by_graph = {"params.pipeline_name": {"$in": [None, ""]}, "graph.name": name}
            wanted["$or"] = [{"params.pipeline_name": name}, by_graph]
        found = self._db.tasks.find(wanted, _SUMMARY).sort("started_at", DESCENDING).skip(skip).limit(limit)
        return [document async for document in found]

    @translate_errors
    async def timed_tasks(
        self, spans: Mapping[str, tuple[datetime, datetime]], most: int
    ) -> dict[str, list[TimedTask]]:
        """Return by name the tasks of schedules whose nominal time is within a span, both ends included.

        Return at least the latest `most` of each. Ids of tasks end with the nominal time, so the index of ids has them
        in its order.
        """
        ids = [_ids_within(name, *span) for name, span in spans.items()]
        enough = 2 * most * len(ids)
        rows = [row async for row in self._db.tasks.find({"$or": ids}, _TIMED).limit(enough)] if ids else []
        if ids and len(rows) == enough:
            found = [self._db.tasks.find(each, _TIMED).sort("id", DESCENDING).limit(most) for each in ids]
            rows = [row for each in found async for row in each]
        tasks: dict[str, list[TimedTask]] = {name: [] for name in spans}
        for row in rows:
            name, end = row["id"][:-_NOMINAL_CHARS], row["id"][-_NOMINAL_CHARS:]
            if name in tasks and end == f"-{row.get(SCHEDULED_AT)}":
                tasks[name].append(_timed_task(row))
        return tasks

    @translate_errors
    async def document(self, task_id: str) -> dict[str, Any] | None:
        """Return a task document; None if there is none. Raise ConfigError if the task id is invalid."""
        require(task_id_problem(task_id))
        found: dict[str, Any] | None = await self._db.tasks.find_one({"id": task_id}, {"_id": 0})
        return found

    @translate_errors
    async def times(self, task_id: str) -> TaskTimes | None:
        """Return when a task was created, and when its latest run began and ended; None if there is no such task."""
        require(task_id_problem(task_id))
        return read_times(await self._db.tasks.find_one({"id": task_id}, TIMES) or {})

    @translate_errors
    async def status(self, task_id: str, *, namespace_id: str) -> str | None:
        """Return the status of a task of this namespace; None if there is no such task."""
        own = {"id": task_id, "namespace_id": {"$in": [namespace_id, None]}}
        found = await self._db.tasks.find_one(own, {"_id": 0, "status": 1})
        return None if found is None else found["status"]

    @translate_errors
    async def ended(self, task_ids: Collection[str]) -> list[str]:
        """Return which of these tasks have ended."""
        wanted = {"id": {"$in": [*task_ids]}, "finished_at": {"$ne": None}}
        return [document["id"] async for document in self._db.tasks.find(wanted, {"_id": 0, "id": 1})]

    @translate_errors
    async def variables(self, task_id: str) -> dict[str, Any] | None:
        """Return the variables of a task without the rest of its document; None if there is none.

        Raise ConfigError if the task id is invalid.
        """
        require(task_id_problem(task_id))
        found = await self._db.tasks.find_one({"id": task_id}, {"_id": 0, "id": 1, "coordinator.vars": 1})
        return None if found is None else (found.get("coordinator") or {}).get("vars") or {}

    @translate_errors
    async def change_mark(self, task_id: str) -> dict[str, Any] | None:
        """Return a value that differs after most changes of a task document; None if there is none.

        Two changes within the same millisecond may leave it as it is.
        """
        found: dict[str, Any] | None = await self._db.tasks.find_one({"id": task_id}, _MARK)
        return found

    @translate_errors
    async def input_digest(self, task_id: str) -> dict[str, str] | None:
        """Return the hashes of the params and the graph with which a task started; `{}` if its document has none.

        Return None if there is no document.
        """
        found = await self._db.tasks.find_one({"id": task_id}, {"_id": 0, INPUT_DIGEST: 1})
        return None if found is None else found.get(INPUT_DIGEST) or {}

    @translate_errors
    async def ended_task(self, task_id: str, *, namespace_id: str) -> dict[str, Any] | None:
        """Return what a rerun needs of a task of this namespace, also of an open one; None if there is no such task.

        Raise ConfigError if the task id is invalid.
        """
        require(task_id_problem(task_id))
        own = {"id": task_id, "namespace_id": {"$in": [namespace_id, None]}}
        found: dict[str, Any] | None = await self._db.tasks.find_one(own, _RERUN)
        return found

    @translate_errors
    async def batches(self, task_id: str) -> dict[str, int]:
        """Return the number of stored batches by node id. Raise ConfigError if the task id is invalid."""
        require(task_id_problem(task_id))
        earlier = await self._earlier_generations_filter(task_id)
        stored = {"$match": {"task_id": task_id, "status": "partial", **earlier}}
        return await self._counted(self._db.artifacts, stored, "$node_id")

    @translate_errors
    async def quarantining(self, task_id: str) -> list[str]:
        """Return the nodes of a task that set failed batches aside: those with `on_batch_failure`."""
        require(task_id_problem(task_id))
        wanted = {"_id": 0, "graph.nodes.node_id": 1, "graph.nodes.on_batch_failure": 1}
        stored = await self._db.tasks.find_one({"id": task_id}, wanted) or {}
        return [node["node_id"] for node in nodes_of(stored) if node.get("on_batch_failure") is not None]

    @translate_errors
    async def set_aside(self, task_id: str) -> dict[str, FailedBatches]:
        """Return the batches that the nodes of a task have set aside, by node id. Nodes without any are absent."""
        require(task_id_problem(task_id))
        earlier = await self._earlier_generations_filter(task_id)
        return await read_set_aside(self._db.artifacts, {"task_id": task_id, **earlier})

    async def _earlier_generations_filter(self, task_id: str) -> dict[str, Any]:
        """Return the filter that omits the rows of earlier generations of a task's nodes."""
        first_epochs = await read_first_epochs(self._db.tasks, task_id)
        old = [
            {"node_id": node_id, "attempt_epoch": {"$not": {"$gte": epoch}}}
            for node_id, epoch in first_epochs.items()
        ]
        return {"$nor": old} if old else {}

    @translate_errors
    async def node_runs(self, task_id: str) -> dict[str, LatestNodeRun]:
        """Return the latest attempts of a task's nodes by node id. Nodes without an attempt are absent."""
        require(task_id_problem(task_id))
        stored = await self._db.tasks.find_one({"id": task_id}, _NODE_RUNS)
        nodes = stored["graph"]["nodes"] if stored else []
        return {node["node_id"]: _node_run(node) for node in nodes if node.get("attempt_epoch")}

    async def shards(self, task_id: str) -> dict[str, ShardProgress]:
        """Return how far the shards of a task's nodes are, by node id. Nodes without shards are absent."""
        require(task_id_problem(task_id))
        first = await read_first_epochs(self._db.tasks, task_id)
        found = await ShardStore(self._db).progress(task_id, first)
        for node_id, progress in found.items():
            if progress.first_epoch > first.get(node_id, 0) + 1:
                epochs = {"$gte": first.get(node_id, 0), "$lt": progress.first_epoch}
                progress.before = await self._count_stored(task_id, node_id, epochs)
        if found:
            for (node_id, generation), batches in (await InputValues(self._db).batches(task_id)).items():
                if node_id in found and found[node_id].generation == generation:
                    found[node_id].items = batches
        return found

    @translate_errors
    async def _count_stored(self, task_id: str, node_id: str, epochs: dict[str, int]) -> int:
        own = {"task_id": task_id, "node_id": node_id, "status": "partial", "attempt_epoch": epochs}
        return int(await self._db.artifacts.count_documents(own))

    @translate_errors
    async def sources(self, task_id: str) -> dict[str, list[str]]:
        """Return the nodes from which nodes with shards pull unchanged batches, by node id."""
        require(task_id_problem(task_id))
        stored = await self._db.tasks.find_one({"id": task_id}, {**WIRING, "graph.nodes.parallel": 1}) or {}
        parents = parents_by_node(stored["graph"]) if stored else {}
        sources = {}
        for node in nodes_of(stored):
            inline = (node.get("io") or {}).get("input_inline") or {}
            if (node.get("parallel") or 1) > 1 and inline.get("input_adapter") == PULL:
                named = replace_alias(inline.get("input_args")).get("from_nodes")
                sources[node["node_id"]] = parents[node["node_id"]] if named is None else named
        return sources

    @translate_errors
    async def pins(self, task_id: str) -> dict[str, str]:
        """Return the versions that a task has fixed, by role."""
        require(task_id_problem(task_id))
        return read_pins(await self._db.tasks.find_one({"id": task_id}, {"_id": 0, PINNED: 1}) or {})

    @translate_errors
    async def results(self, task_id: str) -> dict[str, StoredResult]:
        """Return what the nodes of a task have stored at their ends, by node id. Omit nodes without such a result."""
        require(task_id_problem(task_id))
        earlier = await self._earlier_generations_filter(task_id)
        markers = {"task_id": task_id, "batch_uid": {"$exists": False}, "status": "complete", **earlier}
        found = self._db.artifacts.find(markers, {"_id": 0, "node_id": 1, "meta": 1, "artifacts_ref": 1})
        return {row["node_id"]: _stored_result(row) async for row in found}

    @translate_errors
    async def batch_page(
        self, task_id: str, node_id: str, offset: int, limit: int, *, failed: bool = False
    ) -> tuple[list[StoredBatch], int]:
        """Return up to `limit` batches of a node, oldest first and without the first `offset`, and the number of all.

        With `failed`, only failed batches count; otherwise they are included. The content of other batches is not read.
        """
        require(task_id_problem(task_id))
        earlier = await self._earlier_generations_filter(task_id)
        own = {"task_id": task_id, "node_id": node_id, "batch_uid": {"$exists": True}, **earlier}
        own |= {"status": "failed"} if failed else {}
        every = oldest_first([row async for row in self._db.artifacts.find(own, PROJECTION)])
        ids = [row["_id"] for row in every[offset : offset + limit]]
        found = {row["_id"]: row async for row in self._db.artifacts.find({"_id": {"$in": ids}}, _BATCH)}
        return [_stored_batch(found[each]) for each in ids if each in found], len(every)

    @translate_errors
    async def any_meta(self, task_id: str, node_id: str) -> dict[str, Any] | None:
        """Return what one of the batches of a node has stored, which did not fail; None without one."""
        require(task_id_problem(task_id))
        earlier = await self._earlier_generations_filter(task_id)
        own = {
            "task_id": task_id,
            "node_id": node_id,
            "batch_uid": {"$exists": True},
            "status": {"$ne": "failed"},
        }
        row = await self._db.artifacts.find_one(own | earlier, {"_id": 0, "meta": 1})
        return None if row is None else dict(row.get("meta") or {})

    @translate_errors
    async def named_batches(
        self, task_id: str, node_id: str, batch_uids: Collection[str]
    ) -> dict[str, StoredBatch]:
        """Return those of these batches of a node that are stored, also failed ones, by uid."""
        require(task_id_problem(task_id))
        earlier = await self._earlier_generations_filter(task_id)
        found: dict[str, StoredBatch] = {}
        for some in uid_filters([*batch_uids]):
            rows = self._db.artifacts.find(
                {"task_id": task_id, "node_id": node_id, **some, **earlier}, _BATCH
            )
            found |= {batch.uid: batch async for row in rows if (batch := _stored_batch(row))}
        return found

    @translate_errors
    async def was_dispatched(self, task_id: str, node_id: str) -> bool:
        """Return whether a bridge has dispatched an attempt of a node to external workers."""
        require(task_id_problem(task_id))
        own = {"task_id": task_id, "node_id": node_id}
        return await self._db.dispatches.find_one(own, {"_id": 1}) is not None

    @translate_errors
    async def logged_attempts(self, task_id: str, node_id: str | None) -> list[LoggedAttempt]:
        """Return what the logs in MongoDB say about the attempts of a task, or of one of its nodes.

        `worker_events` comes first, with one entry for each event, then the dispatch records of external attempts.
        """
        require(task_id_problem(task_id))
        own = {"task_id": task_id} | ({} if node_id is None else {"node_id": node_id})
        events = self._db.worker_events.find({**own, "payload.kind": {"$in": [*_BOUNDS]}}, _EVENT)
        logged = [_logged_event(row) async for row in events]
        dispatches = self._db.dispatches.find(own, _DISPATCH)
        return logged + [_logged_dispatch(row) async for row in dispatches]

    @translate_errors
    async def announced_versions(self, worker_ids: Collection[str]) -> dict[str, str]:
        """Return the versions of those of the workers that are external and announce one."""
        known = {"worker_id": {"$in": sorted(worker_ids)}, "session": "", "version": {"$nin": [None, ""]}}
        rows = self._db.worker_registry.find(known, {"_id": 0, "worker_id": 1, "version": 1})
        return {row["worker_id"]: str(row["version"]) async for row in rows}

    @translate_errors
    async def running_attempts(self) -> list[RunningAttempt]:
        """Return the running attempts of all open tasks that a worker holds, oldest first."""
        active = [NodeStatus.RUNNING.value, NodeStatus.CANCELLING.value]
        wanted = {"status": {"$in": OPEN_TASK_STATUSES}, "graph.nodes.status": {"$in": active}}
        running = [
            _running_attempt(document["id"], node)
            async for document in self._db.tasks.find(wanted, _RUNNING)
            for node in document["graph"]["nodes"]
            if node["status"] in active
        ]
        return sorted((each for each in running if each.worker), key=lambda each: each.started_at or 0.0)

    @translate_errors
    async def external_runs(self, task_id: str) -> dict[tuple[str, int], ExternalRun]:
        """Return the attempts of a task that bridges have dispatched and that have no outcome, by node id and epoch."""
        require(task_id_problem(task_id))
        active = {"task_id": task_id, "state": {"$in": ACTIVE_STATES}}
        found = self._db.dispatches.find(active, _EXTERNAL_RUN)
        runs = {(row["node_id"], row["attempt_epoch"]): row async for row in found}
        waits = await self._waits(task_id) if any(not row.get("lease") for row in runs.values()) else {}
        return {key: _external_run(row, waits.get(key[0])) for key, row in runs.items()}

    async def _waits(self, task_id: str) -> dict[str, str]:
        names = {"_id": 0, "graph.nodes.node_id": 1, f"graph.nodes.{TEXT}": 1}
        stored = await self._db.tasks.find_one({"id": task_id}, names)
        nodes = stored["graph"]["nodes"] if stored else []
        return {node["node_id"]: node[TEXT] for node in nodes if node.get(TEXT)}

    @translate_errors
    async def open_counts(self) -> dict[str, int]:
        """Return the number of open tasks by status."""
        return await self._counted(
            self._db.tasks, {"$match": {"status": {"$in": OPEN_TASK_STATUSES}}}, "$status"
        )

    async def _counted(self, collection: Any, match: dict[str, Any], by: str) -> dict[str, int]:
        rows = await aggregated(collection, [match, {"$group": {"_id": by, "count": {"$sum": 1}}}])
        return {row["_id"]: row["count"] for row in rows}


def _ids_within(name: str, first: datetime, last: datetime) -> dict[str, Any]:
    return {"id": {"$gte": f"{name}-{format_nominal(first)}", "$lte": f"{name}-{format_nominal(last)}"}}


def _timed_task(row: dict[str, Any]) -> TimedTask:
    reason = row.get("reason")
    return TimedTask(
        task_id=row["id"],
        at=datetime.fromisoformat(row[SCHEDULED_AT]),
        status=str(row.get("status")),
        reason=reason if isinstance(reason, str) else None,
    )


def _stored_result(row: dict[str, Any]) -> StoredResult:
    """Return the result in a complete marker. The marker of a node that did not finish has only its status."""
    meta = dict(row.get("meta") or {})
    return StoredResult(metrics={} if [*meta] == ["ended"] else meta, artifacts_ref=row.get("artifacts_ref"))


def _stored_batch(row: dict[str, Any]) -> StoredBatch:
    stored_at = row.get("updated_at")
    return StoredBatch(
        uid=uid_text(row["batch_uid"]),
        status=_status_of(row),
        attempt=epoch_of(row),
        worker=str(row.get("worker_id") or ""),
        stored_at=utc(stored_at).isoformat() if isinstance(stored_at, datetime) else None,
        metrics=dict(row.get("meta") or {}),
        artifacts_ref=row.get("artifacts_ref"),
        error=_error_of(row),
        tries=(row.get("quarantined") or {}).get("tries"),
    )


def _status_of(row: dict[str, Any]) -> str:
    if row.get("status") != "failed":
        return "ok"
    return "skipped" if (row.get("quarantined") or {}).get("skipped") else "failed"


def _error_of(row: dict[str, Any]) -> str | None:
    """Return the reason code of a failed batch, with its message if the batch is set aside."""
    code, message = row.get("error"), (row.get("quarantined") or {}).get("error")
    return f"{code}: {message}" if message else code


def _logged_event(row: dict[str, Any]) -> LoggedAttempt:
    payload = row["payload"]
    kind = payload["kind"]
    at = row["ts_ms"] / 1000
    started = kind == EventKind.TASK_ACCEPTED
    code = payload.get("reason_code")
    return LoggedAttempt(
        node_id=row["node_id"],
        epoch=row["attempt_epoch"],
        worker=payload.get("worker_id"),
        version=payload.get("version"),
        started_at=at if started else None,
        ended_at=None if started else at,
        finished=None if started else kind == EventKind.TASK_DONE,
        cancelled=kind == EventKind.CANCELLED,
        kind=FailureKind.HANDOVER if code == reason_codes.WORKER_SHUTDOWN else None,
        code=code,
        error=payload.get("error"),
    )


def _logged_dispatch(row: dict[str, Any]) -> LoggedAttempt:
    outcome = row.get("outcome") or {}
    failure = outcome.get("failure") or {}
    kind = outcome.get("kind")
    return LoggedAttempt(
        node_id=row["node_id"],
        epoch=row["attempt_epoch"],
        worker=outcome.get("worker_id") or (row.get("lease") or {}).get("worker_id"),
        started_at=row.get("accepted_at"),
        ended_at=outcome.get("at"),
        finished=None if kind is None else kind == OutcomeKind.DONE,
        cancelled=kind == OutcomeKind.CANCELLED,
        kind=FailureKind(failure["kind"]) if failure else None,
        code=failure.get("code"),
        error=failure.get("message"),
    )


def _external_run(row: dict[str, Any], waits_for: str | None) -> ExternalRun:
    lease = row.get("lease") or {}
    worker_id, until = lease.get("worker_id"), lease.get("expires_at")
    return ExternalRun(
        worker_id=worker_id,
        batches=int(row.get("batches") or 0),
        waits_for="" if worker_id is not None else waits_for or "",
        heard_at=None if until is None else until - (lease.get("ttl_sec") or 0.0),
        lease_until=until,
    )


def _node_run(node: dict[str, Any]) -> LatestNodeRun:
    lease = node.get("lease") or {}
    return LatestNodeRun(
        epoch=node.get("attempt_epoch") or 0,
        worker=lease.get("worker_id") or "",
        version=lease.get("version") or "",
        generation=node.get("generation") or 0,
        started_at=_timestamp(node.get("started_at")),
        ended_at=_timestamp(end_of_attempt(node)),
    )


def _running_attempt(task_id: str, node: dict[str, Any]) -> RunningAttempt:
    run = _node_run(node)
    return RunningAttempt(
        task_id=task_id,
        node_id=node["node_id"],
        epoch=run.epoch,
        worker=run.worker,
        started_at=run.started_at,
    )


def _timestamp(stored: datetime | None) -> float | None:
    return None if stored is None else utc(stored).timestamp()
