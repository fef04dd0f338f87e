"""The programs of the floors: what FlowKit promises, written by hand, without any FlowKit code.

The baselines make the same writes, but promise less. A floor adds what the promises need, and nothing else: filters
that fence late attempts, tasks that are closed or cancelled, and variables of another type; the fields of a lease; a
record of each attempt; and, for a role, a thread of its own for Temporal, so that a handler that blocks does not stop
heartbeats.
`python -m benchmarks.floors_by_hand PART ARGUMENTS…` runs one of the programs; PART is a name in PARTS. Only its HTTP
server is that of the gateway, as for the bare route beside `flow.status`.
"""

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from graphlib import TopologicalSorter
from typing import Any
from uuid import uuid4

import uvloop
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

with workflow.unsafe.imports_passed_through():
    import aiohttp
    import bson
    from motor.motor_asyncio import AsyncIOMotorClient
    from pydantic_core import to_json
    from pymongo import ReturnDocument
    from pymongo.errors import DuplicateKeyError

    from benchmarks import baseline, baseline_functions, flows_by_hand
    from benchmarks.bare_bridge import BareBridge, command, hash_of
    from benchmarks.baseline import (
        Activities,
        connect,
        create_indexes,
        ended_at,
        insert_once,
        milliseconds,
        seen,
    )
    from benchmarks.baseline_functions import Functions
    from benchmarks.flows_by_hand import CALLER, CONTEXT, FlowByHand

PREFIX, DATABASE = "floor-", "floors"
BRIDGE_ROLE = "floor"
BATCHES_QUEUE, BRIDGE_QUEUE, RETRY_QUEUE = f"{PREFIX}batches", f"{PREFIX}external", f"{PREFIX}actions"
FLUSH_SEC = 1.0
"""How often the records of attempts are written, as a FlowKit worker does."""
BEAT_SEC = 1.0
"""How often a long attempt sends a heartbeat, as a FlowKit worker does."""
CACHED_SEC = 5.0
"""How long a gateway keeps contexts, and whether there are tokens."""
BODY_SEC, BODY_BYTES = 30.0, 4_000_000
UNSET = ("finished_at", "skip_reason", "waits_for", "paused", "coordinator", "cancel_requested_at")
"""What an earlier attempt may have left in a node."""
OPEN = {"closed_run_id": {"$exists": False}, "coordinator.cancelled": {"$ne": True}}
"""Matches a task that is neither closed nor cancelled."""
NOT_LATER = {"attempt_epoch": {"$not": {"$gt": 1}}}
"""Matches a row that no later attempt than the first has written."""

Fields = dict[str, Any]


class Records:
    """Writes a record of each attempt, in groups and off its way."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self._rows: list[dict[str, Any]] = []
        self._writing: asyncio.Future[None] | None = None

    def add(self, key: Mapping[str, Any], now: datetime) -> None:
        """Write the record of an attempt later."""
        payload = {"kind": "TASK_DONE", "worker_id": "w-12345678", "artifacts_ref": {**key}}
        row = {
            **key,
            "step_type": "bench",
            "event_hash": uuid4().hex,
            "payload": payload,
            "ts_ms": milliseconds(now),
        }
        self._rows.append({**row, "attempt_epoch": 1, "created_at": now, "metrics_applied": False})
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        await asyncio.sleep(FLUSH_SEC)
        rows, self._rows = self._rows, []
        await self._db.worker_events.insert_many(rows, ordered=False)


class FencedNodes(Activities):
    """The activities of a role, with FlowKit's promises. The node runs on the loop of the process's main thread."""

    def __init__(self, db: Any) -> None:
        super().__init__(db)
        self._records = Records(self.db)
        self._loop = asyncio.get_running_loop()

    async def on_main_thread(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a handler on the loop of the main thread. A cancel of the activity cancels it."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @activity.defn
    async def node(self, task: str, index: int) -> None:
        await self.on_main_thread(self.run_node(task, index, 1))

    async def run_node(self, task: str, index: int, epoch: int) -> None:
        """Make the five writes of an attempt, fenced as FlowKit's are."""
        await self.begin(task, index, epoch)
        await self.store_batch({"task_id": task, "node_id": f"n{index}"}, epoch)
        await self.end(task, index, epoch)

    async def begin(self, task: str, index: int, epoch: int) -> None:
        """Take the epoch, unless a later attempt has it, or the task is closed or cancelled."""
        path, now = f"graph.nodes.{index}", datetime.now(UTC)
        begun = {**self.begun(path, now), f"{path}.attempt_epoch": epoch}
        lease = begun[f"{path}.lease"]["lease_id"]
        begun[f"{path}.lease"]["version"] = "e8aa8f981646"
        mine = {f"{path}.attempt_epoch": epoch, f"{path}.lease.lease_id": lease}
        free = {"$or": [{f"{path}.attempt_epoch": {"$lt": epoch}}, mine]}
        unset = {f"{path}.{name}": "" for name in UNSET}
        taken = await self.db.tasks.update_one(
            {"id": task, f"{path}.node_id": f"n{index}", **OPEN, **free},
            {"$set": {**begun, **seen(now)}, "$unset": unset},
        )
        _require(taken.matched_count)

    async def end(self, task: str, index: int, epoch: int) -> None:
        """Write the complete marker and the end of the attempt, and its record later."""
        path, key, now = f"graph.nodes.{index}", {"task_id": task, "node_id": f"n{index}"}, datetime.now(UTC)
        held = {
            f"{path}.attempt_epoch": epoch,
            f"{path}.run_id": self.ids["run_id"],
            f"{path}.status": "running",
        }
        ended = {f"{path}.status": "finished", **ended_at(path, now), **seen(now)}
        _, done = await asyncio.gather(
            insert_once(self.db.artifacts, {**self.marker(key, now), "attempt_epoch": epoch}),
            self.db.tasks.update_one(
                {"id": task, f"{path}.node_id": key["node_id"], **held}, {"$set": ended}
            ),
        )
        _require(done.matched_count)
        self._records.add(key, now)


def _require(matched: int) -> None:
    """Raise if a fence has excluded a write: a later attempt runs, or the task has ended."""
    if not matched:
        raise ApplicationError("a later attempt has the node", non_retryable=True)


class FencedFunctions(Functions):
    """The activities of functions, with FlowKit's promises: a variable of another type, or too many, change nothing."""

    @activity.defn
    async def increment(self, task: str, index: int) -> None:
        path, now, run = f"graph.nodes.{index}", datetime.now(UTC), self.ids["run_id"]
        begun = {**self.begun(path, now), f"{path}.applied_generation": 0}
        ended = {**begun, f"{path}.status": "finished", **ended_at(path, now), **seen(now)}
        live = {"$in": ["queued", "running", "deferred", "cancelling"]}
        mine = {f"{path}.attempt_epoch": 1, f"{path}.run_id": run, f"{path}.status": live}
        held = {"id": task, f"{path}.node_id": f"n{index}", **OPEN}
        free = {"$or": [{f"{path}.attempt_epoch": {"$lt": 1}}, mine]}
        once = {f"{path}.applied_generation": {"$not": {"$gte": 0}}}
        await self.db.tasks.update_one(
            {**held, **free, **once, "$and": [_is("coordinator.vars", "object"), *_FITS]},
            {
                "$set": ended,
                "$inc": {"coordinator.vars.n": 1},
                "$unset": {f"{path}.{name}": "" for name in UNSET[1:]},
            },
        )
        key = {"task_id": task, "node_id": f"n{index}"}
        await insert_once(self.db.artifacts, self.marker(key, datetime.now(UTC)))


def _is(field: str, kind: str) -> dict[str, Any]:
    """Match documents in which a field is missing or has a type, and is not an array of that type."""
    return {
        "$or": [{field: {"$exists": False}}, {field: {"$type": kind}}],
        field: {"$not": {"$type": "array"}},
    }


_FITS: list[dict[str, Any]] = [
    _is("coordinator.vars.n", "number"),
    {
        "$or": [
            {"coordinator.vars.n": {"$exists": False}},
            *({"coordinator.vars.n": {"$type": kind}} for kind in ("double", "decimal")),
            {"coordinator.vars.n": {"$lte": 2**63 - 2}},
        ]
    },
    {
        "$or": [
            {"coordinator.vars_bytes": {"$lte": 999_984}},
            {"coordinator.vars_bytes": {"$exists": False}, "coordinator.vars": {"$exists": False}},
        ]
    },
]
"""Matches tasks whose variables can be incremented, and stay below their limit."""


# --- many batches of a node


@workflow.defn
class ManyBatches:
    """Runs one node with many batches."""

    @workflow.run
    async def run(self, plan: Fields) -> None:
        task, times = workflow.info().workflow_id, _times()
        await workflow.execute_local_activity(
            "open_run", args=[task, 1], start_to_close_timeout=timedelta(seconds=2)
        )
        queue = f"{workflow.info().task_queue}.node"
        await workflow.execute_activity("batches", args=[task, plan["batches"]], task_queue=queue, **times)
        await workflow.execute_activity("close_run", task, start_to_close_timeout=timedelta(seconds=60))


def _times() -> Fields:
    return {"start_to_close_timeout": timedelta(hours=1), "heartbeat_timeout": timedelta(seconds=45)}


class FencedBatches(FencedNodes):
    """Processes many batches: the hooks of a handler, distinct ids, and the size and the fence of each result."""

    @activity.defn
    async def batches(self, task: str, count: int) -> None:
        beats = asyncio.ensure_future(_beat())
        try:
            await self.on_main_thread(self.run_batches(task, count))
        finally:
            beats.cancel()

    async def run_batches(self, task: str, count: int) -> None:
        """Process the batches of the node one after another."""
        await self.begin(task, 0, 1)
        uids: set[str] = set()
        async for uid in _produced(count):
            if uid in uids or not 0 < len(uid) <= 256:
                raise ApplicationError(f"the batch id {uid!r} is not valid")
            uids.add(uid)
            await self.store_result({"task_id": task, "node_id": "n0", "batch_uid": uid}, await _process(uid))
        await self.end(task, 0, 1)

    async def store_result(self, key: Fields, metrics: Fields) -> None:
        """Store the result of a batch, unless it does not fit into a document, or a later attempt has stored it."""
        now, size = datetime.now(UTC), len(bson.encode(metrics))
        if size > 15_000_000:
            raise ApplicationError(
                f"the metrics of batch {key['batch_uid']!r} are too large", non_retryable=True
            )
        row = {"attempt_epoch": 1, "created_at": now}
        partial = {"status": "partial", "meta": metrics, "size": size, "payload": None, "updated_at": now}
        await asyncio.gather(
            insert_fenced(
                self.db.metrics_raw,
                key,
                {**row, "metrics": metrics, "failed": False, "reason": None, "ts_ms": milliseconds(now)},
            ),
            insert_fenced(self.db.artifacts, key, {**row, **partial, "worker_id": self.ids["worker_id"]}),
        )


async def _beat() -> None:
    while True:
        activity.heartbeat()
        await asyncio.sleep(BEAT_SEC)


async def _produced(count: int) -> AsyncIterator[str]:
    for number in range(count):
        yield f"b{number}"


async def _process(uid: str) -> Fields:
    return {"n": 1}


async def insert_fenced(collection: Any, key: Fields, fields: Fields) -> None:
    """Insert a row, or replace that of an earlier attempt."""
    try:
        await collection.insert_one({**key, **fields})
    except DuplicateKeyError:
        _require((await collection.update_one({**key, **NOT_LATER}, {"$set": fields})).matched_count)


# --- external nodes


class FencedBridge(BareBridge):
    """An activity of Temporal for each external node, which the events of its worker complete.

    A restart of the process loses nothing: the record of a dispatch names the activity, and each write is fenced.
    """

    ROLE, DISPATCHES = BRIDGE_ROLE, "floor_dispatches"

    def __init__(self, db: Any, bootstrap: str, client: Client) -> None:
        super().__init__(db, bootstrap)
        self._client = client
        self._seen: set[str] = set()
        self._later: set[asyncio.Future[Any]] = set()

    @activity.defn
    async def node(self, task: str, index: int) -> None:
        """Record the dispatch, begin the node and send the command. The activity ends with the events."""
        info, node, path, now = activity.info(), f"n{index}", f"graph.nodes.{index}", datetime.now(UTC)
        dispatch = hash_of({"t": task, "n": node, "e": 1})
        ids = {"task_id": task, "node_id": node, "run_id": info.workflow_run_id, "attempt_epoch": 1}
        sent = command(task, node, self.ROLE)
        known = {"dedup_id": sent["dedup_id"], "cancel_token": sent["payload"]["cancel_token"]}
        place = {"activity_id": info.activity_id, "role": self.ROLE, "owner": "floor", "offset": None}
        fresh = {"state": "open", "lease": None, "accepted_at": None, "batches": 0, "outcome": None}
        own = {f"{path}.attempt_epoch": 1, f"{path}.run_id": info.workflow_run_id}
        free = {"$or": [{f"{path}.attempt_epoch": {"$lt": 1}}, own]}
        lease = {"worker_id": "floor", "lease_id": str(uuid4()), "deadline_ts_ms": 1}
        begun = {**own, f"{path}.status": "running", f"{path}.lease": lease, f"{path}.started_at": now}
        _, taken = await asyncio.gather(
            insert_once(
                self._db[self.DISPATCHES],
                {"_id": dispatch, **ids, **known, **place, **fresh, "created_at": now, "updated_at": now},
            ),
            self._db.tasks.update_one(
                {"id": task, f"{path}.node_id": node, **OPEN, **free},
                {"$set": {**begun, **seen(now)}, "$unset": {f"{path}.{name}": "" for name in UNSET}},
            ),
        )
        _require(taken.matched_count)
        stored = await self._producer.send_and_wait(
            f"cmd.{self.ROLE}.v1", json.dumps(sent).encode(), key=f"{task}:{node}".encode()
        )
        offset = {"partition": stored.partition, "offset": stored.offset}
        self._behind(self._db[self.DISPATCHES].update_one({"_id": dispatch}, {"$set": offset}))
        activity.raise_complete_async()

    def _behind(self, work: Any) -> None:
        """Do something behind the way of the node."""
        running = asyncio.ensure_future(work)
        self._later.add(running)
        running.add_done_callback(self._later.discard)

    async def consume(self) -> None:
        """Process the events of workers. Offsets are committed when the writes are acknowledged."""
        while True:
            polled = await self._consumer.getmany(timeout_ms=1_000)
            events = [json.loads(each.value) for some in polled.values() for each in some]
            new = [event for event in events if event["dedup_id"] not in self._seen]
            self._seen.update(event["dedup_id"] for event in new)
            logged = [event for event in new if event["payload"]["kind"] != "TASK_HEARTBEAT"]
            await asyncio.gather(self._handle(new), self._log(logged))
            if events:
                self._behind(self._consumer.commit())

    async def _handle(self, events: list[Fields]) -> None:
        for event in events:
            key = {"task_id": event["task_id"], "node_id": event["node_id"]}
            dispatch = hash_of({"t": key["task_id"], "n": key["node_id"], "e": event["attempt_epoch"]})
            path, kind = f"graph.nodes.{key['node_id'][1:]}", event["payload"]["kind"]
            if kind == "TASK_ACCEPTED":
                await self._accepted(event, key, dispatch, path)
            elif kind == "BATCH_OK":
                await self._batch(event, key)
            elif kind == "TASK_DONE":
                await self._done(event, key, dispatch, path)

    async def _accepted(self, event: Fields, key: Fields, record: str, path: str) -> None:
        now, payload = datetime.now(UTC), event["payload"]
        lease = {"worker_id": payload["worker_id"], "lease_id": payload["lease_id"], "ended": False}
        shown = {**lease, "deadline_ts_ms": payload["lease_deadline_ts_ms"]}
        held = {f"{path}.node_id": key["node_id"], f"{path}.attempt_epoch": 1, f"{path}.status": "running"}
        taken = {"$set": {"lease": shown, "accepted_at": now, "updated_at": now}}
        change = {"$set": {f"{path}.lease": shown, "last_event_recv_ms": milliseconds(now)}}
        await asyncio.gather(
            self._db[self.DISPATCHES].update_one({"_id": record, "state": "open", "lease": None}, taken),
            self._db.tasks.update_one({"id": key["task_id"], **held}, change),
        )

    async def _batch(self, event: Fields, key: Fields) -> None:
        """Store a batch. The worker has probably written the artifact, so that its fields are set, or inserted."""
        payload, now = event["payload"], datetime.now(UTC)
        batch, metrics = {**key, "batch_uid": payload["batch_uid"]}, payload["metrics"]
        row = {"attempt_epoch": 1, "created_at": now, "failed": False, "reason": None}
        size = len(bson.encode(metrics))
        partial = {"status": "partial", "meta": metrics, "size": size, "worker_id": payload["worker_id"]}
        artifact = {**partial, "artifacts_ref": batch, "attempt_epoch": 1, "updated_at": now}
        await asyncio.gather(
            insert_fenced(
                self._db.metrics_raw, batch, {**row, "metrics": metrics, "ts_ms": milliseconds(now)}
            ),
            self._db.artifacts.update_one(
                {**batch, **NOT_LATER},
                {"$set": artifact, "$setOnInsert": {"created_at": now, "payload": None}},
                upsert=True,
            ),
        )

    async def _done(self, event: Fields, key: Fields, record: str, path: str) -> None:
        now, payload = datetime.now(UTC), event["payload"]
        outcome = {
            "kind": "done",
            "at": now,
            "worker_id": payload["worker_id"],
            "metrics": payload["metrics"],
        }
        ended = await self._db[self.DISPATCHES].find_one_and_update(
            {"_id": record, "state": "open"},
            {"$set": {"state": "ended", "outcome": outcome, "updated_at": now}, "$inc": {"batches": 1}},
            return_document=ReturnDocument.AFTER,
        )
        if ended is not None:
            self._behind(self._deliver(ended, key, path, now))

    async def _deliver(self, ended: Fields, key: Fields, path: str, now: datetime) -> None:
        """Finish the node, complete its activity, and note that."""
        marker = {"status": "complete", "meta": {}, "confirmed": True, "attempt_epoch": 1, "updated_at": now}
        held = {f"{path}.attempt_epoch": 1, f"{path}.run_id": ended["run_id"], f"{path}.status": "running"}
        finished = {f"{path}.status": "finished", **ended_at(path, now), **seen(now)}
        await asyncio.gather(
            self._db.artifacts.update_one(
                {**key, "batch_uid": {"$exists": False}, **NOT_LATER}, {"$set": marker}, upsert=True
            ),
            self._db.tasks.update_one({"id": key["task_id"], **held, **OPEN}, {"$set": finished}),
        )
        place = {"workflow_id": key["task_id"], "run_id": ended["run_id"]}
        await self._client.get_async_activity_handle(**place, activity_id=ended["activity_id"]).complete()
        reported = {"$set": {"state": "reported"}}
        await self._db[self.DISPATCHES].update_one({"_id": ended["_id"], "state": "ended"}, reported)


# --- flows


class FencedJobs(flows_by_hand.Activities, FencedNodes):
    """Runs jobs at a supervisor. The flow, its jobs and the runners are read once for each run."""

    def __init__(self, db: Any, session: Any) -> None:
        super().__init__(db, session)
        self._flows: dict[str, asyncio.Future[Fields]] = {}

    @activity.defn
    async def open_run(self, task: str, nodes: int) -> None:
        """Open the task, which the gateway has created."""
        now = datetime.now(UTC)
        opened = {"opened": True, "status": "running", **seen(now)}
        await self.db.tasks.update_one({"id": task, "opened": {"$exists": False}}, {"$set": opened})

    @activity.defn
    async def job(self, task: str, index: int, job: int, payload: str, supervisor: str) -> None:
        await self.on_main_thread(self.run_job(task, index, job))

    async def run_job(self, task: str, index: int, job: int) -> None:
        """Run a job at the supervisor, with the writes of its node and of its dispatch."""
        await self.begin(task, index, 1)
        flow = await self._flow(task)
        key = {"task_id": task, "node_id": f"n{index}"}
        dispatch, id = f"{task}:{job}:0.0", f"{CONTEXT}:{CALLER}:{job}@{task}"
        await self.open_dispatch(dispatch, id, task, job)
        outcome = await self.call(flow["runners"][0]["address"], id, flow["jobs"][job]["script"])
        await self.store(key, {"result": outcome["success"], "logs": outcome["logs"]})
        await self.close_dispatch(dispatch, outcome["logs"])
        await self.end(task, index, 1)

    async def _flow(self, task: str) -> Fields:
        """Return a flow with its jobs and runners. Concurrent jobs share the reads."""
        if (known := self._flows.get(task)) is None:
            known = self._flows[task] = asyncio.ensure_future(self._read_flow(task))
        return await known

    async def _read_flow(self, task: str) -> Fields:
        flow = await self.db.flows.find_one({"task_id": task})
        ids = [f"{CONTEXT}:{CALLER}:{job}" for job in flow["jobs"]]
        jobs = await self.db.flow_jobs.find({"_id": {"$in": ids}}).to_list(None)
        runners = await self.db.flow_runners.find({"context_id": CONTEXT}).to_list(1000)
        return {**flow, "jobs": {job["id"]: job for job in jobs}, "runners": runners}

    async def close_dispatch(self, dispatch: str, logs: str) -> None:
        status = {"state": "Running", "status": "Acknowledged", "transport_status": "Delivered"}
        done = {
            "outcome": "completed",
            **status,
            "open_until": None,
            "logs": logs,
            "updated_at": int(time.time()),
        }
        own = {"_id": dispatch, "state": "Ready", "outcome": None, "epoch": 1}
        await self.db.flow_messages.update_one(own, {"$set": done})


class Gateway:
    """Two methods over JSON-RPC, with the checks that a server on this machine needs without tokens."""

    def __init__(self, db: Any, client: Client) -> None:
        self._activities = Activities(db)
        self._db = self._activities.db
        self._client = client
        self._known: dict[str, tuple[float, Any]] = {}
        self._methods = {"flow.start": self.start, "flow.status": self.status}

    async def respond(self, request: Any) -> tuple[int, bytes]:
        """Return the status and the body of the response to a call."""
        if problem := _refusal(request.headers) or await self._tokens_problem():
            return 403, to_json({"error": problem})
        async with asyncio.timeout(BODY_SEC):
            body = await request.body()
        try:
            call = _read_call(body, self._methods)
        except ValueError as error:
            return 200, to_json(
                {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": str(error)}}
            )
        result = await self._methods[call["method"]](call["params"])
        return 200, to_json({"jsonrpc": "2.0", "id": call.get("id"), "result": result})

    async def _tokens_problem(self) -> str:
        found = await self._cached("tokens", self._db.tokens.find_one, {}, {"_id": 1})
        return "send a token" if found else ""

    async def _cached(self, name: str, read: Any, *query: Any) -> Any:
        until, found = self._known.get(name, (0.0, None))
        if time.monotonic() >= until:
            found = await read(*query)
            self._known[name] = (time.monotonic() + CACHED_SEC, found)
        return found

    async def _permitted(self, params: Fields) -> Fields:
        """Return a flow of a context that exists. Without tokens, each caller is an operator."""
        context = params["context_id"]
        await self._cached(f"context {context}", self._db.flow_contexts.find_one, {"_id": context})
        flow: Fields = await self._db.flows.find_one({"_id": f"{context}:{params['id']}"})
        return flow

    async def start(self, params: Fields) -> Fields:
        """Start a run of a flow. A second call returns the run that the first one has started."""
        flow = await self._permitted(params)
        if flow["task_id"] is not None:
            return {"run_id": flow["task_id"], "begun": False}
        ids = [f"{CONTEXT}:{CALLER}:{job}" for job in flow["jobs"]]
        found = self._db.flow_jobs.find(
            {"_id": {"$in": ids}}, {"_id": 0, "id": 1, "timeout": 1, "retries": 1}
        )
        jobs = await found.to_list(None)
        task, now = f"{PREFIX}flow:{flow['_id']}/1", int(time.time())
        begun = {"run": 1, "task_id": task, "started_at": now, "run_seq": 1, "updated_at": now}
        await self._db.flows.find_one_and_update(
            {"_id": flow["_id"], "version": flow["version"]}, {"$set": begun, "$inc": {"version": 1}}
        )
        await self._activities.open_run(task, len(jobs))
        plan = {"levels": _levels(flow["nodes"]), "payload": "", "supervisor": ""}
        await self._client.start_workflow(
            FlowByHand.run, plan, id=task, task_queue=PREFIX + flows_by_hand.QUEUE
        )
        return {"run_id": task, "begun": True}

    async def status(self, params: Fields) -> Fields:
        """Return the state of the latest run of a flow."""
        flow = await self._permitted(params)
        task = await self._db.tasks.find_one({"id": flow["task_id"]}, _STATUS_FIELDS)
        begun = [node["node_id"] for node in task["graph"]["nodes"] if node["status"] in _BEGUN]
        dispatches: dict[int, Fields] = {}
        if begun:
            own = {"task_id": flow["task_id"], "job_id": {"$in": [int(each) for each in begun]}}
            async for each in self._db.flow_messages.find(own).sort("retry", 1):
                dispatches[each["job_id"]] = each
        nodes = _states(flow["nodes"], task, dispatches)
        failed = (
            int(id) for id, node in nodes.items() if node["node_status"] == "Failed" and not node["retry_at"]
        )
        return {
            "flow_id": flow["id"],
            "run_id": flow["task_id"],
            "status": _FLOW_STATUS.get(task["status"], "Started"),
            "cause": task["reason"] if task["status"] in ("failed", "cancelled") else None,
            "failed_job": next(failed, None),
            "nodes": nodes,
            "created_at": flow["created_at"],
            "started_at": flow["started_at"],
            "finished_at": _seconds(task["finished_at"]),
        }


_BEGUN = frozenset({"running", "deferred", "cancelling"})
_FLOW_STATUS = {"finished": "Finished", "failed": "Error", "cancelled": "Error"}
_NODE_STATUS = {"finished": "Completed", "failed": "Failed", "cancelled": "Cancelled", "skipped": "Cancelled"}
_OF_A_NODE = (
    *("node_id", "status", "generation", "skip_reason", "held_until_ms"),
    *("attempt_epoch", "last_error", "next_retry_at_ms", "finished_at"),
)
_STATUS_FIELDS = {
    "_id": 0,
    **dict.fromkeys(("status", "reason", "finished_at", "coordinator.satisfied", "run_seq"), 1),
    **{f"graph.nodes.{name}": 1 for name in _OF_A_NODE},
}


def _refusal(headers: Mapping[str, str]) -> str:
    """Return why a call may come from a web page; an empty text if it does not."""
    host = headers.get("host", "").rpartition(":")[0]
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        return "the header Host does not name this machine"
    if "origin" in headers:
        return "calls of other web pages are refused"
    if headers.get("content-type", "").partition(";")[0] != "application/json":
        return "send JSON"
    return "" if int(headers.get("content-length", 0)) <= BODY_BYTES else "the body is too large"


def _read_call(body: bytes, methods: Mapping[str, Any]) -> Fields:
    """Return a call. Raise ValueError for one that is not valid."""
    call = json.loads(body, object_pairs_hook=_object)
    if not isinstance(call, dict) or call.get("jsonrpc") != "2.0" or call.get("method") not in methods:
        raise ValueError("this is no call of a known method")
    params = call.get("params")
    if not isinstance(params, dict) or params.keys() != {"context_id", "id"}:
        raise ValueError("params must have context_id and id")
    if any(type(value) is not int for value in params.values()):
        raise ValueError("context_id and id must be integers")
    return call


def _object(pairs: list[tuple[str, Any]]) -> Fields:
    """Return a JSON object. Raise ValueError if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _states(nodes: list[Fields], task: Fields, dispatches: Mapping[int, Fields]) -> dict[str, Fields]:
    """Return the state of each node of a flow, by the id of its job."""
    begun = {int(node["node_id"]): node for node in task["graph"]["nodes"]}
    done = {id for id, node in begun.items() if node["status"] == "finished"}
    satisfied = set((task.get("coordinator") or {}).get("satisfied") or ())
    return {
        str(node["id"]): _state(node, begun[node["id"]], dispatches.get(node["id"]), done, satisfied)
        for node in nodes
    }


def _state(
    node: Fields, begun: Fields, dispatch: Fields | None, done: set[int], satisfied: set[str]
) -> Fields:
    is_queued = begun["status"] == "queued"
    waits = [name for name in node["prerequisites"] if name not in satisfied] if is_queued else []
    if is_queued:
        status = "Ready" if done.issuperset(node["depends"]) and not waits else "Pending"
    elif begun["status"] in _NODE_STATUS:
        status = _NODE_STATUS[begun["status"]]
    elif begun.get("held_until_ms") or (dispatch or {}).get("outcome") == "failed":
        status = "Failed"
    else:
        status = dispatch["state"] if dispatch else "Ready"
    has_failed = status == "Failed"
    return {
        "node_status": status,
        "cause": begun.get("skip_reason") if status == "Cancelled" else None,
        "attempt": begun["attempt_epoch"],
        "waiting_on": waits,
        "supervisor_url": node["supervisor_url"],
        "error": begun.get("last_error") if has_failed else None,
        "retry_at": begun.get("next_retry_at_ms") if has_failed else None,
    }


def _seconds(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())


def _levels(nodes: list[Fields]) -> list[list[int]]:
    """Return the jobs of a flow level by level. Raise CycleError for a cycle."""
    sorter, levels = TopologicalSorter({node["id"]: node["depends"] for node in nodes}), []
    sorter.prepare()
    while sorter:
        levels.append([*sorter.get_ready()])
        sorter.done(*levels[-1])
    return levels


# --- retry_node


@workflow.defn
class FencedRetried:
    """Runs its only node, and again after each update, until a signal ends it.

    The update changes the state before it returns, and is an event of the history. What follows from it can repeat:
    each write names the number of the action, and has a fence.
    """

    def __init__(self) -> None:
        self._due = deque([0])
        self._last = 0
        self._ends = False

    @workflow.run
    async def run(self) -> None:
        task, soon = workflow.info().workflow_id, timedelta(seconds=2)
        await workflow.execute_local_activity("open_run", args=[task, 2], start_to_close_timeout=soon)
        while not self._ends or self._due:
            await workflow.wait_condition(lambda: bool(self._due) or self._ends)
            if self._due:
                await self._round(task, self._due.popleft())
        await workflow.execute_activity("close_run", task, start_to_close_timeout=timedelta(seconds=60))

    async def _round(self, task: str, action: int) -> None:
        soon, queue = timedelta(seconds=2), f"{workflow.info().task_queue}.node"
        if action:
            await workflow.execute_activity(
                "reset", args=[task, action], start_to_close_timeout=timedelta(seconds=60)
            )
        await workflow.execute_activity("attempt", args=[task, 2 * action + 1], task_queue=queue, **_times())
        await workflow.execute_local_activity("show", args=[task, "deferred"], start_to_close_timeout=soon)

    @workflow.update
    def retry(self) -> int:
        """Accept the action, and return its number."""
        self._last += 1
        self._due.append(self._last)
        return self._last

    @retry.validator
    def check_retry(self) -> None:
        """Refuse an action after the end."""
        if self._ends:
            raise ApplicationError("the task has ended")

    @workflow.signal
    def end(self) -> None:
        self._ends = True


class FencedRetries(FencedNodes):
    """The activities of a node that can run again."""

    @activity.defn
    async def reset(self, task: str, action: int) -> None:
        """Reserve an epoch of the node with the record of the action, and delete what earlier attempts have stored.

        A repeated call changes nothing.
        """
        path, fence, now = (
            "graph.nodes.0",
            {"id": task, "run_seq": {"$lte": 1}, "finished_at": None},
            datetime.now(UTC),
        )
        shown = {
            "_id": 0,
            "graph.nodes.node_id": 1,
            "graph.nodes.attempt_epoch": 1,
            "graph.nodes.reset_by": 1,
        }
        found = (await self.db.tasks.find_one(fence, shown))["graph"]["nodes"][0]
        if found.get("reset_by") != f"{action}":
            await self._reserve(fence, path, found["attempt_epoch"], action, now)
        await self.delete_earlier(task, 2 * action)

    async def _reserve(self, fence: Fields, path: str, before: int, action: int, now: datetime) -> None:
        record = {"revision": action, "action": "retry_node", "at": now, "by": "", "reason": "", "what": "n0"}
        fresh = {
            "status": "queued",
            "attempt_epoch": 2 * action,
            "generation": action,
            "reset_by": f"{action}",
            "lease": {},
            "last_error": None,
        }
        left_over = (*UNSET, "started_at", "run_id", "reason_code", "failed_batches", "held_until_ms")
        await self.db.tasks.update_one(
            {
                **fence,
                f"{path}.attempt_epoch": before,
                "coordinator.revision": {"$not": {"$gte": action}},
            },
            {
                "$set": {
                    **{f"{path}.{name}": value for name, value in fresh.items()},
                    **_status("running", now),
                    "coordinator.revision": action,
                },
                "$unset": {f"{path}.{name}": "" for name in left_over},
                "$push": {
                    "coordinator.actions": {"$each": [{**record, "affected": 1}], "$slice": -200},
                    "status_history": {"$each": [{"to": "running", "at": now}], "$slice": -100},
                },
            },
        )

    async def delete_earlier(self, task: str, epoch: int) -> None:
        """Delete what attempts before an epoch have stored."""
        rows = {"task_id": task, "$or": [{"node_id": "n0", "attempt_epoch": {"$lt": epoch}}]}
        claims = {"task_id": task, "$or": [{"consumer_node": "n0", "attempt_epoch": {"$lt": epoch}}]}
        await asyncio.gather(
            self.db.artifacts.delete_many(rows),
            self.db.metrics_raw.delete_many(rows),
            self.db.stream_progress.delete_many(claims),
        )

    @activity.defn
    async def attempt(self, task: str, epoch: int) -> None:
        await self.on_main_thread(self.run_attempt(task, epoch))

    async def run_attempt(self, task: str, epoch: int) -> None:
        """Run an attempt. It deletes what a late attempt has stored since the reset."""
        await self.begin(task, 0, epoch)
        if epoch > 1:
            await self.delete_earlier(task, epoch)
        await self.store_batch({"task_id": task, "node_id": "n0"}, epoch)
        await self.end(task, 0, epoch)

    @activity.defn
    async def show(self, task: str, status: str) -> None:
        """Show the status of the task."""
        now = datetime.now(UTC)
        history = {"$each": [{"to": status, "at": now}], "$slice": -100}
        await self.db.tasks.update_one(
            {"id": task, "finished_at": None},
            {"$set": _status(status, now), "$push": {"status_history": history}},
        )


def _status(status: str, now: datetime) -> Fields:
    return {"status": status, "updated_at": now, "coordinator.recorded_at": now}


# --- the programs


def _database(name: str = DATABASE) -> Any:
    return AsyncIOMotorClient(os.environ["MONGO_URL"], tz_aware=True)[name]


async def _serve(queue: str, workflow: type, calls: list[Any], client: Client | None = None) -> None:
    runner = UnsandboxedWorkflowRunner()
    await Worker(
        client or await connect(),
        task_queue=queue,
        workflows=[workflow],
        activities=calls,
        workflow_runner=runner,
    ).run()


async def _serve_role(queue: str, call: Any, slots: int = baseline.SLOTS) -> None:
    """Serve a role from a thread of its own. The main thread keeps its loop, as a FlowKit worker does for handlers."""

    async def poll() -> None:
        await Worker(
            await connect(), task_queue=queue, activities=[call], max_concurrent_activities=slots
        ).run()

    await asyncio.to_thread(uvloop.run, poll())


async def _workflows() -> None:
    own = FencedNodes(_database())
    await create_indexes(own.db)
    await _serve(PREFIX + baseline.QUEUE, baseline.Baseline, [own.open_run, own.close_run])


async def _activities() -> None:
    await _serve_role(f"{PREFIX}{baseline.QUEUE}.node", FencedNodes(_database()).node)


async def _functions() -> None:
    own = FencedFunctions(_database())
    await create_indexes(own.db)
    calls = [own.open_run, own.close_run, own.increment]
    await _serve(PREFIX + baseline_functions.QUEUE, baseline_functions.BaselineFunctions, calls)


async def _batch_workflows() -> None:
    own = FencedNodes(_database())
    await create_indexes(own.db)
    await _serve(BATCHES_QUEUE, ManyBatches, [own.open_run, own.close_run])


async def _batch_activities() -> None:
    await _serve_role(f"{BATCHES_QUEUE}.node", FencedBatches(_database()).batches)


async def _bridge(database: str, brokers: str) -> None:
    client, db = await connect(), _database(database)
    bridge, runs = FencedBridge(db, brokers, client), Activities(db)
    await bridge.start()
    nodes = Worker(
        client, task_queue=f"{BRIDGE_QUEUE}.node", activities=[bridge.node], max_concurrent_activities=100
    )
    workflows = _serve(BRIDGE_QUEUE, baseline.Baseline, [runs.open_run, runs.close_run], client)
    try:
        await asyncio.gather(workflows, nodes.run(), bridge.consume())
    finally:
        await bridge.stop()


async def _job_workflows() -> None:
    async with aiohttp.ClientSession() as session:
        own = FencedJobs(_database(), session)
        await create_indexes(own.db)
        await flows_by_hand.create_message_indexes(own.db)
        await own.db.flows.create_index("task_id")
        await _serve(PREFIX + flows_by_hand.QUEUE, FlowByHand, [own.open_run, own.close_run])


async def _job_activities() -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        own = FencedJobs(_database(), session)
        await _serve_role(f"{PREFIX}{flows_by_hand.QUEUE}.job", own.job, flows_by_hand.SLOTS)


async def _gateway(port: str, database: str) -> None:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from flowkit.server.addresses import Address
    from flowkit.server.serving import HttpServer

    gateway = Gateway(_database(database), await connect())

    async def respond(request: Request) -> Response:
        status, body = await gateway.respond(request)
        return Response(body, status, media_type="application/json")

    app = Starlette(routes=[Route("/", respond, methods=["POST"])])
    server = HttpServer(app, [Address(host="127.0.0.1", port=int(port))])
    await server.start()
    await server.wait_stopped()


async def _retry_workflows() -> None:
    own = FencedRetries(_database())
    await create_indexes(own.db)
    await _serve(RETRY_QUEUE, FencedRetried, [own.open_run, own.close_run, own.reset, own.show])


async def _retry_activities() -> None:
    await _serve_role(f"{RETRY_QUEUE}.node", FencedRetries(_database()).attempt)


PARTS: dict[str, Any] = {
    "workflows": _workflows,
    "activities": _activities,
    "functions": _functions,
    "batch-workflows": _batch_workflows,
    "batch-activities": _batch_activities,
    "bridge": _bridge,
    "job-workflows": _job_workflows,
    "job-activities": _job_activities,
    "gateway": _gateway,
    "retry-workflows": _retry_workflows,
    "retry-activities": _retry_activities,
}


if __name__ == "__main__":
    uvloop.run(PARTS[sys.argv[1]](*sys.argv[2:]))
