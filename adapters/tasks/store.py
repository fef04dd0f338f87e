"""Storage of task documents: opening a task, transitions of the workflow, the close, and what other code reads.

Every write is idempotent and has its fence in its own filter: the epoch and open status of a node, or the `run_seq` of
a task. If the filter matches nothing, FlowKit reads the document afterwards to find the cause.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING, ReturnDocument
from pymongo.errors import DuplicateKeyError, OperationFailure

from flowkit.adapters.batch_tries import BatchTries
from flowkit.adapters.dispatches import external_runs
from flowkit.adapters.input_values import InputValues
from flowkit.adapters.mongo import (
    Database,
    denial,
    denied,
    durable,
    ensure_index,
    iso,
    moment,
    translate_errors,
    with_room,
)
from flowkit.adapters.shards import ShardStore
from flowkit.adapters.tasks.attempts import Attempts
from flowkit.adapters.tasks.cancel_flags import UNSET_OF_TASK_FLAG, CancelFlags
from flowkit.adapters.tasks.close import Closing
from flowkit.adapters.tasks.extend import Extending
from flowkit.adapters.tasks.fields import (
    COUNTED,
    NODE_STATES,
    PAUSED,
    PAUSED_SCOPES,
    PINNED,
    RECORDED_AT,
    RUN_STARTED_AT,
    SATISFIED,
    SCHEDULED_AT,
    SECRET_PARAMS,
    WIRING,
    graph_difference,
    new_task,
    nodes_of,
    opened_history,
    owner,
    params_fields,
    read_satisfied,
)
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.queries import TaskQueries
from flowkit.adapters.tasks.record import Recording, read_actions
from flowkit.adapters.tasks.replace import REPLACED, replacing
from flowkit.adapters.tasks.reset import Resetting, read_first_epochs
from flowkit.adapters.tasks.room import make_room
from flowkit.adapters.tasks.stored_graphs import StoredGraphs
from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.core.time import LeaseObserver
from flowkit.errors import RerunOutdated, StoreRefused, TaskIdTaken
from flowkit.models import AttemptInput, EarlierRun, NodeStatus, TaskStatus
from flowkit.models.columns import status_column

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.core.utils import Fields
    from flowkit.models import (
        CloseTask,
        GraphChange,
        NodeRecord,
        OpenTask,
        RecordTask,
        Rerun,
        ResetNodes,
        SettleBatches,
    )


_GRAPH = {
    "_id": 0,
    "first_run_id": 1,
    "namespace_id": 1,
    "status": 1,
    "graph.nodes.node_id": 1,
    "graph.nodes.type": 1,
    "graph.nodes.depends_on": 1,
    "graph.edges": 1,
    "graph.edges_ex": 1,
}
_RUNNING = [NodeStatus.RUNNING.value, NodeStatus.CANCELLING.value]
_DEADLINES = {"_id": 0, "graph.nodes.node_id": 1, "graph.nodes.lease.deadline_ts_ms": 1}
_BEFORE_ATTEMPT = [NodeStatus.QUEUED.value, NodeStatus.DEFERRED.value]
_CONDITION_VALUES = {"_id": 0, "params": 1, SECRET_PARAMS: 1, "coordinator.vars": 1, SCHEDULED_AT: 1}
_CONDITION_VALUES_AND_NODES = {
    **_CONDITION_VALUES,
    **{f"graph.nodes.{name}": 1 for name in ("node_id", "stats", "attempt_epoch", "first_epoch")},
}
_EARLIER = {
    "_id": 0,
    "run_seq": 1,
    "coordinator.actions": 1,
    SATISFIED: 1,
    **{
        f"graph.nodes.{name}": 1
        for name in (
            *("status", "attempt_epoch", "first_epoch", "generation", "skip_reason", "reason_code"),
            "failed_batches",
        )
    },
}
_COUNTED = {"_id": 0, "coordinator.revision": 1, "graph.nodes.node_id": 1}
_EPOCHS = {"_id": 0, "run_seq": 1, "graph.nodes.attempt_epoch": 1, "graph.nodes.run_id": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredValues:
    """The values that a task document holds for conditions."""

    params: dict[str, Any]
    variables: dict[str, Any]
    stats: dict[str, dict[str, Any]]
    """The stats of each node that has some, by node id."""
    begun: frozenset[str]
    """The ids of the nodes of which an attempt of the present generation has begun, in any run of the task."""
    scheduled_at: str | None = None
    """The nominal time at which a schedule has started the task, as RFC 3339 text in UTC."""
    secret_params: list[list[str | int]] | None = None
    """Where the schema of the params says that they are secret; None without a schema."""


class TaskStore:
    """The collection `tasks` of one database.

    Methods raise StoreUnavailable if MongoDB does not respond; a retry may succeed. They raise StoreRefused for errors
    that no retry can fix.
    """

    def __init__(self, db: Database) -> None:
        self._db = durable(db)
        self._tasks = self._db.tasks
        self._database_id: str | None = None
        self.known_deployment: str | None = None
        """The result of `deployment`, once it has been called."""
        self._leases = LeaseObserver()
        self.flags = CancelFlags(self._tasks)
        self.attempts = Attempts(self._tasks, reopen=self.reopen)
        """The attempts of nodes."""
        self.values = InputValues(self._db)
        """The values by expression of nodes."""
        self.shards = ShardStore(self._db)
        """The attempts of shards."""
        self.tries = BatchTries(self._db)
        """The batches that attempts process, of nodes that set batches aside."""

    @property
    def database(self) -> Database:
        """Return the database that contains the collection."""
        return self._db

    @translate_errors
    async def prepare(self) -> None:
        """Create the indexes.

        Raise StoreRefused, which names the index, if duplicate ids prevent it. Raise StoreDenied, which names the user,
        if the user lacks the right to create indexes.
        """
        try:
            await ensure_index(self._tasks, "id", "uniq_task_id", unique=True)
            by_status = [("status", ASCENDING), ("updated_at", ASCENDING)]
            await ensure_index(self._tasks, by_status, "ix_task_status_updated")
        except OperationFailure as error:
            if not denied(error):
                raise
            raise await denial(self._db, error) from None
        await TaskQueries(self._db).prepare()
        await OpenTasks(self._db).prepare()
        await StoredGraphs(self._db).prepare()
        await self.values.prepare()
        await self.shards.prepare()
        await self.tries.prepare()

    @translate_errors
    async def database_id(self) -> str:
        """Return the database id, by which engines and workers notice that they use different databases.

        The first call by any process creates the id.
        """
        if self._database_id is None:
            with suppress(DuplicateKeyError):
                await self._meta().update_one(
                    {"_id": "deployment"}, {"$setOnInsert": {"value": str(uuid.uuid4())}}, upsert=True
                )
            stored = await self._meta().find_one({"_id": "deployment"})
            self._database_id = str(stored["value"])
        return self._database_id

    async def deployment(self) -> str:
        """Return the database id, a slash and the name of the database: how tasks and attempts name it."""
        if self.known_deployment is None:
            self.known_deployment = f"{await self.database_id()}/{self._db.name}"
        return self.known_deployment

    def _meta(self) -> Any:
        return self._db.flowkit_meta

    @translate_errors
    async def insert_task(self, document: dict[str, Any]) -> None:
        """Insert a new task document unless a document with its id exists already."""
        await self._insert(document)

    async def _insert(self, document: dict[str, Any]) -> None:
        with suppress(DuplicateKeyError):
            await self._tasks.update_one({"id": document["id"]}, {"$setOnInsert": document}, upsert=True)

    @translate_errors
    async def open_task(
        self, opening: OpenTask, *, namespace_id: str = "", database_id: str = ""
    ) -> tuple[int, list[int]]:
        """Assign the task document to a run of its workflow.

        Return `run_seq` and the epoch after which the run's attempts of each node begin; `[]` if all are 0. A repeated
        opening does not skip the epoch of an attempt of its own run: the try that repeats this attempt finds it taken.

        Insert the document if there is none. Raise TaskIdTaken if it belongs to another task.
        """
        ids = owner(namespace_id, database_id)
        stored = await self._tasks.find_one({"id": opening.task_id}, _GRAPH)
        if stored is None:
            document = new_task(
                opening.task_id,
                opening.params,
                opening.graph,
                opening.at,
                scheduled_at=opening.scheduled_at,
                **ids,
            )
            await self._insert(document)
            stored = await self._tasks.find_one({"id": opening.task_id}, _GRAPH)
        if stored is not None:
            _check_graph(stored, opening)
        adopted = await self._adopt(opening, ids, unclaimed_filter(ids))
        if adopted is None:
            raise TaskIdTaken(f"task id {opening.task_id!r} belongs to an earlier task; choose another id")
        epochs = [
            (node.get("attempt_epoch") or 0) - (node.get("run_id") == opening.run_id)
            for node in adopted["graph"]["nodes"]
        ]
        return adopted["run_seq"], epochs if any(epochs) else []

    async def open_rejected(
        self, opening: OpenTask, reason: str, *, namespace_id: str = "", database_id: str = ""
    ) -> None:
        """Write the document of a task that its run has opened, and that fails because the engine rejects its graph.

        Raise TaskIdTaken, and change nothing, if the document belongs to another task.
        """
        await self.open_task(opening, namespace_id=namespace_id, database_id=database_id)
        await OpenTasks(self._db).close_orphan(opening.task_id, opening.run_id, reason, opening.at)

    async def reject_task(self, opening: OpenTask, reason: str, *, namespace_id: str = "") -> bool:
        """Close the document of a task that no run opens, because the engine rejects its graph.

        Return False if there is no document, which the client may still write. Leave the document of another task as
        it is.
        """
        stored = await self._find_graph(opening.task_id)
        if stored is None:
            return False
        ours = stored.get("namespace_id") in (namespace_id or None, None)
        if ours and _is_unclaimed(stored) and not graph_difference(stored.get("graph", {}), opening.graph):
            await OpenTasks(self._db).close_orphan(opening.task_id, None, reason, opening.at)
        return True

    @translate_errors
    async def _find_graph(self, task_id: str) -> dict[str, Any] | None:
        stored: dict[str, Any] | None = await self._tasks.find_one({"id": task_id}, _GRAPH)
        return stored

    @translate_errors
    async def open_rerun(
        self, opening: OpenTask, rerun: Rerun, *, namespace_id: str = "", database_id: str = ""
    ) -> tuple[int, EarlierRun]:
        """Assign the document of an ended task to a new run of its workflow, which continues the run that
        `rerun` names.

        Return `run_seq` and how the nodes have ended. Raise RerunOutdated, and change nothing, if the document belongs
        to a later run, or does not exist. A repeated opening returns the same.
        """
        ids = owner(namespace_id, database_id)
        own = {"id": opening.task_id}
        ended: Fields = {
            "run_seq": rerun.run_seq,
            "closed_run_id": rerun.closed_run_id,
            "finished_at": {"$ne": None},
            **({"namespace_id": {"$in": [namespace_id, None]}} if namespace_id else {}),
        }
        sets: Fields = {**params_fields(opening.params, opening.graph), RUN_STARTED_AT: iso(opening.at)}
        unsets: Fields = {}
        if rerun.replaces and (stored := await self._tasks.find_one(ended | own, REPLACED)) is not None:
            replaced, unsets = replacing(stored, opening)
            sets |= replaced
        elif (stored := await self._tasks.find_one(ended | own, _COUNTED)) is not None:
            revision = (stored.get("coordinator") or {}).get("revision") or 0
            sets[COUNTED] = {"revision": revision, "nodes": len(nodes_of(stored))}
        adopted = await self._adopt(opening, ids, ended, sets=sets, unsets=unsets, projection=_EARLIER)
        if adopted is None:
            raise RerunOutdated(opening.task_id, rerun.run_seq)
        return adopted["run_seq"], earlier_run(adopted)

    async def _adopt(
        self,
        opening: OpenTask,
        ids: dict[str, str],
        available: Fields,
        *,
        sets: Fields | None = None,
        unsets: Fields | None = None,
        projection: Fields = _EPOCHS,
    ) -> dict[str, Any] | None:
        taken: dict[str, Any] | None = await self._tasks.find_one_and_update(
            {
                "id": opening.task_id,
                "run_id": {"$ne": opening.run_id},
                "$or": [{"first_run_id": opening.first_run_id}, available],
            },
            {
                "$set": {
                    "status": TaskStatus.RUNNING.value,
                    "first_run_id": opening.first_run_id,
                    "run_id": opening.run_id,
                    "status_history": opened_history(opening.at),
                    "updated_at": moment(opening.at),
                    **ids,
                    **_NOT_ENDED,
                    **(sets or {}),
                },
                "$unset": {**_REOPENED, **(unsets or {})},
                "$inc": {"run_seq": 1},
            },
            projection=projection,
            return_document=ReturnDocument.AFTER,
        )
        return taken or await self._opened_before(opening, projection)

    async def _opened_before(self, opening: OpenTask, projection: Fields) -> dict[str, Any] | None:
        """Return the document if this run has opened it already; None otherwise.

        A repeated opening must not fence or reopen its own run. A try of the activity that timed out may reach MongoDB
        after a later try, or even after the close.
        """
        own = {"first_run_id": opening.first_run_id, "run_id": opening.run_id}
        found: dict[str, Any] | None = await self._tasks.find_one({"id": opening.task_id, **own}, projection)
        return found

    @translate_errors
    async def reopen(self, task_id: str, run_id: str) -> None:
        """Reopen a task that was closed although a newer run continues it, as after a sweep and Temporal's *Reset*."""
        await self._tasks.update_one(
            {"id": task_id, "closed_run_id": {"$ne": run_id}},
            {
                "$set": {
                    "status": TaskStatus.RUNNING.value,
                    "run_id": run_id,
                    **_NOT_ENDED,
                },
                "$unset": {"closed_run_id": "", "liveness": ""},
            },
        )

    @translate_errors
    async def variables(self, task_id: str) -> dict[str, Any]:
        """Return `coordinator.vars` of a task, or `{}` if there are no variables."""
        stored = await self._tasks.find_one({"id": task_id}, {"_id": 0, "coordinator.vars": 1}) or {}
        found: dict[str, Any] = stored.get("coordinator", {}).get("vars") or {}
        return found

    @translate_errors
    async def condition_values(self, task_id: str, *, with_nodes: bool) -> StoredValues | None:
        """Return what the conditions of a task can read: params, variables and stats. None if there is no document.

        Without its nodes, which are most of a large document, `stats` and `begun` are empty.
        """
        wanted = _CONDITION_VALUES_AND_NODES if with_nodes else _CONDITION_VALUES
        stored = await self._tasks.find_one({"id": task_id}, wanted)
        if stored is None:
            return None
        nodes = nodes_of(stored)
        return StoredValues(
            params=stored.get("params") or {},
            secret_params=stored.get(SECRET_PARAMS),
            variables=(stored.get("coordinator") or {}).get("vars") or {},
            stats={node["node_id"]: node["stats"] for node in nodes if node.get("stats")},
            begun=frozenset(
                node["node_id"]
                for node in nodes
                if (node.get("attempt_epoch") or 0) > (node.get("first_epoch") or 0)
            ),
            scheduled_at=stored.get(SCHEDULED_AT),
        )

    @translate_errors
    async def wiring(self, task_id: str) -> dict[str, Any]:
        """Return the fields of a task's graph that define its dependencies; `{}` for an unknown task."""
        stored = await self._tasks.find_one({"id": task_id}, WIRING) or {}
        found: dict[str, Any] = stored.get("graph") or {}
        return found

    @translate_errors
    async def first_epochs(self, task_id: str, node_ids: Collection[str]) -> dict[str, int]:
        """Return the first epochs of the generations of these nodes, without those that have had one generation."""
        return await read_first_epochs(self._tasks, task_id, node_ids)

    @translate_errors
    async def reset_nodes(self, record: ResetNodes, artifacts: ArtifactStore) -> list[int]:
        """Start new generations of nodes. Return the epoch that each of them has reserved, in the order of the input.

        Raise Fenced if the task has ended or belongs to a newer run.
        """
        write = partial(Resetting(self._tasks, artifacts).write, record)
        return await with_room(write, partial(make_room, self._tasks, record.task_id))

    @translate_errors
    async def settle_batches(self, record: SettleBatches, artifacts: ArtifactStore) -> int:
        """Skip batches that a node has set aside, or forget that they have failed.

        Return how many are still set aside.
        """
        attempt = latest_attempt(record)
        uids = record.batch_uids or None
        if record.skips:
            await artifacts.skip_quarantined(attempt, uids)
        else:
            chosen = await artifacts.choose_quarantined(attempt, uids)
            await self.tries.forget(attempt, chosen)
            await artifacts.forget_quarantined(attempt, chosen)
        left = await artifacts.count_quarantined(attempt)
        entry = f"graph.nodes.{record.index}"
        own = {
            "id": record.task_id,
            f"{entry}.node_id": record.node_id,
            f"{entry}.attempt_epoch": record.epoch,
        }
        await self._tasks.update_one(own, {"$set": {f"{entry}.failed_batches": left}})
        return left

    @translate_errors
    async def change_graph(self, change: GraphChange, graph: Mapping[str, Any]) -> list[int]:
        """Write the changed `graph` of a running task. Return the epochs after which the attempts of new nodes begin.

        Raise Fenced if the task has ended or belongs to a newer run.
        """
        write = partial(Extending(self._tasks).write, change, graph)
        return await with_room(write, partial(make_room, self._tasks, change.task_id))

    @translate_errors
    async def have_restarted(
        self, task_id: str, epochs: Mapping[str, int], unfinished: Collection[str] = ()
    ) -> bool:
        """Return True if a node in `epochs` has begun a later attempt or a node in `unfinished` is open or finished."""
        restarted = {"id": task_id, **_restarted_filter(epochs, unfinished)}
        return await self._tasks.find_one(restarted, {"_id": 1}) is not None

    @translate_errors
    async def node_states(self, task_id: str) -> dict[str, tuple[NodeStatus, int]]:
        """Return the status and the epoch of every node; `{}` for an unknown task.

        Raise StoreRefused if another program has written a status that FlowKit does not know.
        """
        stored = await self._tasks.find_one({"id": task_id}, NODE_STATES)
        nodes = stored["graph"]["nodes"] if stored else []
        try:
            return {n["node_id"]: (NodeStatus(n["status"]), n.get("attempt_epoch", 0)) for n in nodes}
        except ValueError as error:
            raise StoreRefused(f"the document of task {task_id!r} cannot be read: {error}") from None

    async def external_runs(self, task_id: str, node_ids: Sequence[str]) -> dict[str, bool]:
        """Return whether a worker runs these nodes, without those that no bridge has dispatched (`external_runs`)."""
        return await external_runs(self.database, task_id, node_ids, self._leases)

    @translate_errors
    async def running(self, task_id: str, node_ids: Sequence[str], lease_sec: float) -> set[str]:
        """Return which of these nodes are running or being cancelled, without those whose workers are lost.

        After a loss, a node shows its old lease until its next attempt begins. Its worker counts as lost when this
        process has seen the same lease for `lease_sec` seconds. Reads a few bytes for each node, however large the task
        is, unless a lease was renewed. The leases of external workers are in their dispatch records, because writing
        each renewal to a large document would be slow.
        """
        external = await self.external_runs(task_id, node_ids)
        read_at = self._leases.now()
        native = await self.native(task_id, [node_id for node_id in node_ids if node_id not in external])
        deadlines = await self._read_deadlines(task_id, native)
        silent_sec = {
            node_id: self._leases.unchanged_sec((task_id, node_id), deadline, read_at)
            for node_id, deadline in deadlines.items()
            if deadline is not None
        }
        lost = {node_id for node_id, seconds in silent_sec.items() if seconds >= lease_sec}
        return (native - lost) | {node_id for node_id, runs in external.items() if runs}

    async def _read_deadlines(self, task_id: str, node_ids: Collection[str]) -> dict[str, int | None]:
        """Return the deadlines in the leases of nodes. The entry of a node with shards has none."""
        known = {node_id: self._leases.value_of((task_id, node_id)) for node_id in node_ids}
        same = [
            node_id
            for node_id, deadline in known.items()
            if deadline is not None
            and await self._find_native(task_id, [node_id], {"lease.deadline_ts_ms": deadline})
        ]
        found = {node_id: known[node_id] for node_id in same}
        if len(found) == len(node_ids):
            return found
        stored = await self._tasks.find_one({"id": task_id}, _DEADLINES)
        nodes = stored["graph"]["nodes"] if stored else []
        read = {node["node_id"]: (node.get("lease") or {}).get("deadline_ts_ms") for node in nodes}
        return {node_id: read.get(node_id) for node_id in node_ids} | found

    @translate_errors
    async def native(self, task_id: str, node_ids: Sequence[str]) -> set[str]:
        """Return which of these nodes are running or being cancelled, in attempts that no bridge has begun."""
        return await self._find_native(task_id, node_ids, {})

    async def _find_native(self, task_id: str, node_ids: Sequence[str], also: Mapping[str, Any]) -> set[str]:
        """Return which of these nodes run, and are not held by a bridge.

        A bridge begins an attempt before, or while, it stores the dispatch record.
        """
        holder = {"lease.worker_id": {"$not": {"$regex": f"^{BRIDGE_PREFIX}"}}}

        async def is_running(node_id: str) -> bool:
            entry = {"node_id": node_id, "status": {"$in": _RUNNING}, **holder, **also}
            found = {"id": task_id, "graph.nodes": {"$elemMatch": entry}}
            return await self._tasks.find_one(found, {"_id": 1}) is not None

        found = await asyncio.gather(*map(is_running, node_ids))
        return {node_id for node_id, runs in zip(node_ids, found, strict=True) if runs}

    @translate_errors
    async def paused(self, task_id: str, node_ids: Sequence[str]) -> set[str]:
        """Return which of these nodes are paused and run no attempt.

        Only nodes that follow one with `max_ahead` say so.
        """

        async def is_paused(node_id: str) -> bool:
            entry = {"node_id": node_id, PAUSED: True, "status": {"$in": _BEFORE_ATTEMPT}}
            found = {"id": task_id, "graph.nodes": {"$elemMatch": entry}}
            return await self._tasks.find_one(found, {"_id": 1}) is not None

        found = await asyncio.gather(*map(is_paused, node_ids))
        return {node_id for node_id, paused in zip(node_ids, found, strict=True) if paused}

    @translate_errors
    async def record(self, record: RecordTask) -> list[NodeRecord]:
        """Write transitions that only the workflow knows. Outdated transitions change nothing.

        Return the open nodes of the record that an attempt has finished, with its epoch.
        """
        return await Recording(self._tasks).write(record)

    @translate_errors
    async def close_task(self, close: CloseTask) -> bool:
        """Write the end of a task and the transitions that its document lacks. Return False if there is no document.

        Do not change a document that a newer run has opened. Raise StoreTooLarge if the document is too large to close.
        """
        return await Closing(self._tasks).write(close)


def _restarted_filter(epochs: Mapping[str, int], unfinished: Collection[str]) -> Fields:
    """Return the filter for a document that is more recent than the given state.

    It matches if a node in `epochs` has a later epoch or a node in `unfinished` is not failed, skipped or cancelled.
    """
    later: list[Fields] = [
        {"node_id": node_id, "attempt_epoch": {"$gt": epoch}} for node_id, epoch in epochs.items()
    ]
    if unfinished:
        ended = [status.value for status in NodeStatus if status.ended and status is not NodeStatus.FINISHED]
        later.append({"node_id": {"$in": list(unfinished)}, "status": {"$nin": ended}})
    return {"graph.nodes": {"$elemMatch": {"$or": later}}}


def unclaimed_filter(ids: Mapping[str, str]) -> Fields:
    """Return the filter for a document that no run has opened."""
    found: Fields = {"first_run_id": None, "status": TaskStatus.QUEUED.value}
    if "namespace_id" in ids:
        found["namespace_id"] = {"$in": [ids["namespace_id"], None]}
    return found


def earlier_run(stored: Fields) -> EarlierRun:
    """Return what a new run takes over from a document. Raise StoreRefused if another program has changed statuses."""
    nodes = nodes_of(stored)
    try:
        statuses = status_column(NodeStatus(node["status"]) for node in nodes)
    except (KeyError, ValueError) as error:
        raise StoreRefused(f"the task document cannot be read: {error}") from None
    return EarlierRun(
        statuses=statuses,
        epochs=[node.get("attempt_epoch") or 0 for node in nodes],
        first_epochs=[node.get("first_epoch") or 0 for node in nodes],
        generations=[node.get("generation") or 0 for node in nodes],
        skip_reasons=_texts(nodes, "skip_reason"),
        reason_codes=_texts(nodes, "reason_code"),
        failed_batches={i: count for i, node in enumerate(nodes) if (count := node.get("failed_batches"))},
        applied=read_actions(stored),
        satisfied=read_satisfied(stored),
    )


def _texts(nodes: Sequence[Fields], name: str) -> dict[int, str]:
    return {index: node[name] for index, node in enumerate(nodes) if isinstance(node.get(name), str)}


def latest_attempt(record: SettleBatches) -> AttemptInput:
    """Return the latest attempt of the node whose batches a record names."""
    return AttemptInput(
        task_id=record.task_id,
        node_id=record.node_id,
        index=record.index,
        role="",
        epoch=record.epoch,
        generation=record.generation,
        first_epoch=record.first_epoch,
    )


def is_same_database(deployment: str, other: str) -> bool:
    """Return whether two results of `TaskStore.deployment` mean the same database. Either may lack the name."""
    return deployment.partition("/")[0] == other.partition("/")[0]


def show_database(deployment: str) -> str:
    """Return a result of `TaskStore.deployment` as errors show it."""
    database_id, _, name = deployment.partition("/")
    return f"the database {name!r} (id {database_id})" if name else f"the database with id {database_id}"


def _is_unclaimed(stored: dict[str, Any]) -> bool:
    """Return whether no run has opened the document."""
    return stored.get("first_run_id") is None and stored.get("status") == TaskStatus.QUEUED.value


def _check_graph(stored: dict[str, Any], opening: OpenTask) -> None:
    """Raise TaskIdTaken if no run has opened the document and it contains another graph."""
    if _is_unclaimed(stored) and (difference := graph_difference(stored.get("graph", {}), opening.graph)):
        raise TaskIdTaken(
            f"task id {opening.task_id!r} was used for another graph: {difference}; choose another id"
        )


_NOT_ENDED = {"finished_at": None, "reason": None, "result": None, "coordinator.liveness": {"state": "ok"}}

_REOPENED = {
    **dict.fromkeys(("closed_run_id", "liveness", "status_history_omitted"), ""),
    **dict.fromkeys((PINNED, PAUSED_SCOPES, RECORDED_AT), ""),
    **UNSET_OF_TASK_FLAG,
}
"""`$unset` for a task that a run opens again: fields of an earlier end, and what only an earlier run has
fixed or paused."""
