"""One run: start tasks while faults are injected, wait until all tasks end, then compare them with the model."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError
from temporalio.client import (
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError, RPCStatusCode

from flowkit.actions.scopes import nodes_below
from flowkit.adapters.tasks.fields import graph_of
from flowkit.errors import ActionRejected, FlowKitError, UnknownTask
from flowkit.graph.validation import normalized
from tests.integration.chaos.cluster import after_delay, periodically, retry_until_available, until
from tests.integration.chaos.conditions import ERROR
from tests.integration.chaos.contracts import announced
from tests.integration.chaos.flows import flow_of
from tests.integration.chaos.histories import replayed
from tests.integration.chaos.operated_verify import OperatedComparison
from tests.integration.chaos.operators import Operator
from tests.integration.chaos.plans import JSON, TYPED_ROLES
from tests.integration.chaos.signals import send, stray_batches
from tests.integration.chaos.tasks import task_plan
from tests.integration.chaos.verify import Comparison, read_stored
from tests.integration.harness import eventually, wait_seconds

if TYPE_CHECKING:
    from pytest import CaptureFixture
    from temporalio.client import Client, WorkflowHandle

    from tests.integration.chaos.cluster import Cluster
    from tests.integration.chaos.plans import TaskPlan
    from tests.integration.chaos.verify import Stored

MOST_OPEN = 12
"""Tasks that are open at the same time, without those that run again."""
_MORE_OPEN = 4
START_SEC = 240.0
"""Longest time in seconds until the first task with external nodes ends."""
DRAIN_SEC = 240.0
"""Longest time in seconds that tasks may take to end after the last fault."""
_ENDED = ("finished", "failed", "skipped", "cancelled")
_MOST_SENDING = 3
"""Actions on one task that wait for their answers at the same time."""
_UPDATE_TIMEOUT = timedelta(seconds=10)
_QUERY_TIMEOUT = timedelta(seconds=5)
_ROWS = ("metrics_raw", "artifacts")
_SHOWN = {"attempt_epoch": 1, "fence": 1, "node_id": 1, "batch_uid": 1}


@dataclass(kw_only=True)
class Figures:
    """Figures of one run."""

    seed: int
    tasks: int = 0
    nodes: int = 0
    batches: int = 0
    increments: int = 0
    attempts: int = 0
    interrupted: int = 0
    """Attempts beyond those that the plans ask for, after faults and after inline attempts that fell back."""
    pauses: Counter[str] = field(default_factory=Counter)
    """Pauses that were applied, by the kind of their scope, and those of them that stopped attempts."""
    retries: Counter[str] = field(default_factory=Counter)
    """Ended nodes that an action has started again, nodes below them that started again too, and interrupted ones."""
    changes: Counter[str] = field(default_factory=Counter)
    """Changes of graphs that added nodes, and new runs of ended tasks."""
    actions: Counter[str] = field(default_factory=Counter)
    """Actions that operators have sent and tasks have applied, by name; those that they refused; and
    unclear answers."""
    signals: int = 0
    """Repeated and wrong signals."""
    queries: Counter[str] = field(default_factory=Counter)
    """Queries of open tasks, by how they ended."""
    histories: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    """Nodes that have run on typed handlers, by role."""
    written: Counter[str] = field(default_factory=Counter)
    """Tasks by how their graph was written."""
    versions: int = 0
    """Different contracts of typed roles that processes have announced."""
    inline: Counter[str] = field(default_factory=Counter)
    """Inline attempts, and those of them that fell back."""
    worker_lost: list[str] = field(default_factory=list)
    """Nodes that failed as `worker_lost`. Their tasks are not compared."""
    statuses: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        given_up = f", {len(self.worker_lost)} nodes with worker_lost" if self.worker_lost else ""
        inline = f"{listed(self.inline)}, " if self.inline else ""
        seconds = ", ".join(f"{seconds:.0f} s {what}" for what, seconds in self.seconds.items())
        return (
            f"seed {self.seed}: {self.tasks} tasks{given_up} ({listed(self.statuses)}), {self.nodes} nodes, "
            f"{self.attempts} attempts ({self.interrupted} again after a fault or a fallback), "
            f"typed nodes: {listed(self.roles)}; graphs: {listed(self.written)}; {self.versions} contracts; "
            f"{inline}{self.batches} batches, {self.increments} increments; "
            f"{self.injected.total()} faults ({listed(self.injected)}); {self.signals} stray signals; "
            f"queries: {listed(self.queries)}; "
            f"pauses: {listed(self.pauses)}; retried nodes: {listed(self.retries)}; "
            f"{listed(self.changes)}; actions: {listed(self.actions)}; {self.histories} histories replayed; {seconds}"
        )


def listed(counts: Counter[str]) -> str:
    """Format counts, largest first."""
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


class Run:
    """One run of the test on its own cluster."""

    def __init__(self, cluster: Cluster, seed: int, most_tasks: int | None = None) -> None:
        self.cluster = cluster
        self._most_tasks = most_tasks
        self.harness = cluster.harness
        self.figures = Figures(seed=seed, injected=cluster.injected)
        self.plans: dict[str, TaskPlan] = {}
        self.problems: list[str] = []
        self._chance = random.Random(f"{seed}-signals")
        self._client: Client | None = None
        self._open: set[str] = set()
        self.operators: dict[str, Operator] = {}
        """Who sends random actions to which task."""
        self._paused: dict[str, float] = {}
        """The tasks of which a part may be paused, and when to resume them."""
        self._epochs: dict[tuple[str, Any], int] = {}
        self._ended: set[str] = set()
        """The tasks that have ended, and that no rerun has started again."""
        self._seen_ended: set[str] = set()
        self._later: list[asyncio.Task[None]] = []
        """What happens to tasks a while after their start."""
        self._all_started = False
        self._all_ended = asyncio.Event()
        self._works = asyncio.Event()
        """Set when a task with external nodes has ended: all processes have started."""
        self._end = math.inf
        """When to start no further task and inject no further fault."""

    async def run_under_faults(self, seconds: float) -> None:
        """Start tasks. When the processes work, inject faults for this time, then wait until all tasks end."""
        begun = time.monotonic()
        supervising = asyncio.create_task(self.cluster.supervise())
        watching = [
            asyncio.create_task(periodically(1.0, self._watch)),
            asyncio.create_task(periodically(0.3, self._look)),
            asyncio.create_task(periodically(1.0, self._send_stray_signals)),
            asyncio.create_task(periodically(0.3, self._query)),
            asyncio.create_task(periodically(0.5, self._pause_and_resume)),
            asyncio.create_task(periodically(0.5, self._retry_ended_node)),
            asyncio.create_task(periodically(0.5, self._rerun_ended_task)),
        ]
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._start_tasks())
                both.create_task(self._inject_faults(seconds))
            await self.cluster.resumed()
            self.figures.seconds["under faults"] = time.monotonic() - begun
            await self._until_ended()
            self._all_ended.set()
            await asyncio.wait_for(asyncio.gather(*self._later), DRAIN_SEC)
        finally:
            for each in (supervising, *watching, *self._later):
                each.cancel()
            ends = await asyncio.gather(supervising, *watching, *self._later, return_exceptions=True)
        self.figures.seconds["until all tasks ended"] = time.monotonic() - begun
        self.problems += [f"a background check failed: {end!r}" for end in ends if isinstance(end, Exception)]

    async def _inject_faults(self, seconds: float) -> None:
        await asyncio.wait_for(self._works.wait(), START_SEC)
        self._end = time.monotonic() + seconds
        faults = self.cluster.faults
        for number, fault in enumerate(faults.drawn(self.figures.seed)):
            is_over = self._all_started or time.monotonic() + fault.pause > self._end
            if is_over and number >= len(faults.first_round):
                return
            await self.cluster.inject(fault)

    async def _start_tasks(self) -> None:
        numbers = count() if self._most_tasks is None else range(self._most_tasks)
        for number in numbers:
            await until(lambda: len(self._open) < MOST_OPEN or time.monotonic() >= self._end)
            if time.monotonic() >= self._end:
                return
            await self._start(task_plan(self.figures.seed, number))
        self._all_started = True

    async def _start(self, plan: TaskPlan) -> None:
        async def create() -> None:
            """Create the task unless an earlier call did and only its response was lost: a failed task
            would run again.
            """
            if not await self._is_there(plan.task_id):
                await self._submit(plan.cut(plan.first) if plan.first else plan)

        self.plans[plan.task_id] = plan
        await retry_until_available(create)
        self._open.add(plan.task_id)
        if plan.cancel_after is not None:
            cancel = after_delay(plan.cancel_after, lambda: self._cancel(plan.task_id))
            self._later.append(asyncio.create_task(cancel))
        if plan.operated:
            self.operators[plan.task_id] = await self._operator(plan)
            self._later.append(asyncio.create_task(self._operate(plan.task_id)))
        elif plan.first:
            grow = after_delay(self._chance.uniform(0.0, 2.0), lambda: self._grow(plan))
            self._later.append(asyncio.create_task(grow))

    async def _submit(self, plan: TaskPlan) -> None:
        coordinator = self.harness.coordinator
        if plan.written == JSON:
            await coordinator.create_task(params={}, graph=plan.as_graph(), task_id=plan.task_id)
        else:
            await flow_of(plan).submit(coordinator, task_id=plan.task_id)

    async def _operator(self, plan: TaskPlan) -> Operator:
        chance = random.Random(f"{self.figures.seed}-{plan.task_id}-actions")
        return Operator(plan, chance, await self._handle(plan.task_id), self.harness)

    async def _operate(self, task_id: str) -> None:
        """Send actions to a task while it is open, several at a time. Wait for the answers of all."""
        operator, sending = self.operators[task_id], set[asyncio.Task[None]]()
        while not self._all_ended.is_set():
            if task_id in self._open and self._works.is_set() and len(sending) < _MOST_SENDING:
                sending.add(asyncio.create_task(operator.act()))
            _, sending = await asyncio.wait(sending, timeout=0) if sending else (None, sending)
            await wait_seconds(operator.pause)
        await asyncio.gather(*sending)

    async def _is_there(self, task_id: str) -> bool:
        try:
            await (await self._handle(task_id)).describe()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return False
        return True

    async def _handle(self, task_id: str) -> WorkflowHandle[Any, Any]:
        if self._client is None:
            self._client = await retry_until_available(self.harness.client)
        return self._client.get_workflow_handle(task_id)

    async def _cancel(self, task_id: str) -> None:
        await retry_until_available(lambda: self.harness.coordinator.cancel_task(task_id, reason="enough"))

    async def _grow(self, plan: TaskPlan) -> object:
        """Add the other nodes of a task, unless it has ended. A repeated request has the same id."""
        handle = await self._handle(plan.task_id)
        while plan.task_id in self._open:
            with suppress(PyMongoError, RPCError, WorkflowUpdateRPCTimeoutOrCancelledError):
                try:
                    return await handle.execute_update(
                        "change_graph", plan.added(), id="grow", rpc_timeout=_UPDATE_TIMEOUT
                    )
                except WorkflowUpdateFailedError as error:
                    if "ending" not in str(error.cause):
                        self.problems.append(f"{plan.task_id}: its graph cannot change: {error.cause}")
                    return None
            await wait_seconds(0.5)
        return None

    async def _rerun_ended_task(self) -> None:
        """Run one of the ended tasks again, once: what did not finish, or any node, and what depends on it."""
        coordinator = self.harness.coordinator
        with suppress(PyMongoError, RPCError, FlowKitError):
            if not self._ended or time.monotonic() >= self._end or len(self._open) > MOST_OPEN + _MORE_OPEN:
                return
            task_id = self._chance.choice(sorted(self._ended))
            nodes = [self._chance.choice(self.plans[task_id].nodes).node_id]
            keeps = await self._draw_failed_batches(task_id) if task_id in self.operators else []
            chosen = nodes if not keeps and self._chance.random() < 0.5 else None
            self._ended.discard(task_id)
            planned = await coordinator.rerun(task_id, chosen, failed_batches_of=keeps, dry_run=True)
            affected = {each["node_id"] for each in planned["affected"]}
            stopped = await self._stopped(task_id)
            if self._unrepeatable(self.plans[task_id]) & affected or stopped - affected:
                return
            if task_id in self.operators:
                if await self.operators[task_id].rerun(chosen, keeps):
                    self._open.add(task_id)
                    self.figures.changes["reruns"] += 1
                return
            self._open.add(task_id)
            await coordinator.rerun(task_id, chosen)
            self.figures.changes["reruns"] += 1

    async def _look(self) -> None:
        """Remove the tasks that ended from the open ones."""
        with suppress(RPCError):
            for task_id in sorted(self._open):
                described = await (await self._handle(task_id)).describe()
                if described.status is not WorkflowExecutionStatus.RUNNING:
                    self._open.discard(task_id)
                    self._note_ended(task_id)
                    if any(node.external for node in self.plans[task_id].nodes):
                        self._works.set()

    async def _draw_failed_batches(self, task_id: str) -> list[str]:
        """Return a node of a finished task that has set batches aside, in half of the cases."""
        document = await self.harness.document(task_id)
        nodes = [each["node_id"] for each in document["graph"]["nodes"] if each.get("failed_batches")]
        chosen = document["status"] == "finished" and nodes and self._chance.random() < 0.5
        return [self._chance.choice(nodes)] if chosen else []

    async def _stopped(self, task_id: str) -> set[str]:
        """Return the nodes that the end of their task has stopped. A rerun that leaves one of them fails."""
        document = await self.harness.document(task_id)
        return {
            each["node_id"]
            for each in document["graph"]["nodes"]
            if each["status"] == "cancelled" or str(each.get("skip_reason")).startswith("task_")
        }

    def _note_ended(self, task_id: str) -> None:
        """Let a task run again, if it has not yet."""
        if task_id not in self._seen_ended:
            self._seen_ended.add(task_id)
            self._ended.add(task_id)

    async def _watch(self) -> None:
        """Check that no row of an open task returns to an older epoch."""
        with suppress(PyMongoError):
            for name in _ROWS:
                rows = self.harness.db[name].find({"task_id": {"$in": sorted(self._open)}}, _SHOWN)
                async for row in rows:
                    key, epoch = (name, row["_id"]), row.get("fence") or row["attempt_epoch"]
                    if epoch < self._epochs.get(key, 0):
                        self.problems.append(
                            f"{name} of {row}: was at epoch or fence {self._epochs[key]} before"
                        )
                    self._epochs[key] = epoch

    async def _send_stray_signals(self) -> None:
        """Send repeated and wrong signals to one of the open tasks."""
        with suppress(PyMongoError, RPCError):
            if self._open:
                task_id = self._chance.choice(sorted(self._open))
                rows = self.harness.db.artifacts.find({"task_id": task_id, "status": "partial"}, _SHOWN)
                stored = [(row["node_id"], row["attempt_epoch"]) async for row in rows]
                batches = stray_batches(self._chance, sorted(set(stored)))
                await send(await self._handle(task_id), batches)
                self.figures.signals += len(batches)

    async def _query(self) -> None:
        """Ask an open task for its state, and check that no node returns to an older epoch."""
        if not self._open:
            return
        task_id = self._chance.choice(sorted(self._open))
        try:
            found = await (await self._handle(task_id)).query("status", rpc_timeout=_QUERY_TIMEOUT)
        except (RPCError, WorkflowQueryRejectedError):
            self.figures.queries["without an answer"] += 1
            return
        except WorkflowQueryFailedError as error:
            self.problems.append(f"{task_id}: a query failed: {error}")
            return
        self.figures.queries["answered"] += 1
        for node in found["nodes"]:
            key, epoch = (task_id, node["node_id"]), node["attempt_epoch"]
            if epoch < self._epochs.get(key, 0):
                self.problems.append(f"{key}: a query shows epoch {epoch} after {self._epochs[key]}")
            self._epochs[key] = epoch

    async def _pause_and_resume(self) -> None:
        """End the pauses that have lasted long enough.

        Then pause a part of one of the open tasks, until all have started.
        """
        coordinator = self.harness.coordinator
        with suppress(PyMongoError, RPCError, FlowKitError):
            for task_id, until_ in sorted(self._paused.items()):
                if until_ <= time.monotonic() or task_id not in self._open:
                    with suppress(ActionRejected, UnknownTask):
                        await coordinator.resume(task_id)
                    del self._paused[task_id]
            running = [each for each in sorted(self._open - self._paused.keys()) if self._may_pause(each)]
            if running and time.monotonic() < self._end:
                task_id = self._chance.choice(running)
                scope, interrupt = self._draw_scope(self.plans[task_id]), self._chance.random() < 0.5
                self._paused[task_id] = time.monotonic() + self._chance.choice([0.0, 0.5, 2.0])
                with suppress(ActionRejected, UnknownTask):
                    result = await coordinator.pause(task_id, [scope], interrupt=interrupt)
                    self.figures.pauses[scope.partition(":")[0]] += 1
                    self.figures.pauses["interrupts"] += "paused" in {
                        each["to"] for each in result["affected"] if each["from"] == "running"
                    }

    def _may_pause(self, task_id: str) -> bool:
        """Return whether the model knows how a task ends with a pause.

        The end of a pause can divide an evaluation of conditions. If one of an edge fails, its gate may close before.
        """
        plan = self.plans[task_id]
        return not (plan.operated or any(ERROR in dict(node.edge_when).values() for node in plan.nodes))

    async def _retry_ended_node(self) -> None:
        """Start an ended node of one of the open tasks again, with what depends on it, until all tasks have started.

        A node that has set batches aside keeps the others in half of the cases.
        """
        with suppress(
            *(PyMongoError, RPCError, WorkflowUpdateFailedError, WorkflowQueryFailedError),
            WorkflowUpdateRPCTimeoutOrCancelledError,
        ):
            ready = sorted(self._open - self.operators.keys())
            if not ready or time.monotonic() >= self._end:
                return
            task_id = self._chance.choice(ready)
            document = await self.harness.db.tasks.find_one({"id": task_id}) or {}
            ended = self._list_repeatable(task_id, document) if document.get("graph") else []
            if not ended:
                return
            given = {"node_id": self._chance.choice(ended), "interrupt": self._chance.random() < 0.5}
            handle = await self._handle(task_id)
            aside = any(node.aside for node in self.plans[task_id].nodes if node.node_id == given["node_id"])
            name = "retry_batches" if aside and self._chance.random() < 0.5 else "retry_node"
            planned = await handle.query("preview", args=[name, given], result_type=dict)
            affected = planned["affected"]
            given |= {"if_revision": planned["revision"], "if_state": planned["state"]}
            await handle.execute_update(name, given, rpc_timeout=_UPDATE_TIMEOUT)
            self.figures.retries["chosen"] += 1
            self.figures.retries["of batches"] += name == "retry_batches"
            self.figures.retries["below"] += len(affected) - 1
            self.figures.retries["interrupted"] += sum(each["from"] == "running" for each in affected)

    def _list_repeatable(self, task_id: str, document: dict[str, Any]) -> list[str]:
        """Return the ended nodes that may start again: those above no node that must not.

        Such a node may start and end between a preview and its action.
        """
        nodes, spared = normalized(graph_of(document)).nodes, self._unrepeatable(self.plans[task_id])
        return [
            node.node_id
            for node, entry in zip(nodes, document["graph"]["nodes"], strict=True)
            if entry["status"] in _ENDED
            and not spared & {nodes[index].node_id for index in (node.index, *nodes_below(nodes, node.index))}
        ]

    def _unrepeatable(self, plan: TaskPlan) -> set[str]:
        """Return the nodes that end in another way than the model says if they start again.

        They increment variables once more, or their gate may close before the condition of an edge fails them.
        """
        return {
            node.node_id
            for node in plan.nodes
            if (node.call and node.call.fn == "vars.incr") or ERROR in dict(node.edge_when).values()
        }

    def _draw_scope(self, plan: TaskPlan) -> str:
        node = self._chance.choice(plan.nodes)
        return self._chance.choice(
            ["task", f"node:{node.node_id}", f"below:{node.node_id}", f"role:{node.role}"]
        )

    async def _until_ended(self) -> None:
        async def ended() -> bool:
            return not self._open

        try:
            await eventually(ended, timeout_sec=DRAIN_SEC)
        except AssertionError:
            self.problems.append(f"tasks that do not end: {sorted(self._open)}")

    async def compare(self) -> None:
        """Compare everything stored of all tasks with the model, and replay their histories."""
        begun = time.monotonic()
        for task_id, plan in self.plans.items():
            self._compare(plan, await read_stored(self.harness.db, task_id))
        ids = await self.harness.db.tasks.distinct("id")
        if unknown := set(ids) - self.plans.keys():
            self.problems.append(f"documents that belong to no task of this run: {unknown}")
        self.figures.versions, wrong = await announced(self.harness.db)
        self.problems += wrong
        client = await self.harness.client()
        found = await replayed(client, sorted(self.plans))
        self.figures.histories, self.figures.inline = found.histories, found.inline
        self.problems += found.problems
        for task_id, history in found.bad.items():
            (self.cluster.folder / f"{task_id}.json.log").write_text(history)
        self.figures.seconds["to compare"] = time.monotonic() - begun

    def _comparison(self, plan: TaskPlan, found: Stored) -> Comparison:
        if (operator := self.operators.get(plan.task_id)) is None:
            return Comparison(plan, found)
        comparison = OperatedComparison(self.plans[plan.task_id], found, operator.requests)
        self.figures.actions += comparison.ledger.applied
        self.figures.actions["refused"] += sum(bool(each.refusals) for each in operator.requests)
        self.figures.actions["unclear"] += sum(
            not (each.answers or each.refusals) for each in operator.requests
        )
        return comparison

    def _compare(self, plan: TaskPlan, found: Stored) -> None:
        size = len(found.document.get("graph", {}).get("nodes", ()))
        self.figures.changes["grown graphs"] += bool(plan.first) and size > plan.first
        plan = plan.cut(size) if plan.first == size else plan
        comparison, figures = self._comparison(plan, found), self.figures
        figures.tasks += 1
        figures.written[plan.written] += 1
        figures.roles.update(
            node.role
            for node in plan.nodes
            if node.role in TYPED_ROLES and comparison.entries.get(node.node_id, {}).get("attempt_epoch")
        )
        figures.nodes += len(plan.nodes)
        figures.statuses[comparison.status] += 1
        figures.batches += sum(row["status"] == "partial" for row in found.artifacts)
        figures.attempts += sum(entry["attempt_epoch"] for entry in comparison.entries.values())
        figures.interrupted += comparison.interrupted
        calls = [node for node in plan.nodes if node.call and node.call.fn == "vars.incr"]
        counted = [node for node in calls if "applied_generation" in comparison.entries.get(node.node_id, {})]
        figures.increments += len(counted)
        if comparison.worker_lost:
            figures.worker_lost += comparison.worker_lost
        elif problems := comparison.problems():
            self.problems += problems
            self._keep(plan, found)

    def _keep(self, plan: TaskPlan, found: Stored) -> None:
        """Write what the database holds of a task, and the actions on it, beside the logs."""
        operator = self.operators.get(plan.task_id)
        requests = [asdict(each) for each in operator.requests] if operator else []
        kept = {"graph": plan.as_graph(), **asdict(found), "requests": requests}
        text = json.dumps(kept, default=str, ensure_ascii=False, indent=1)
        (self.cluster.folder / f"{plan.task_id}.stored.log").write_text(text)


def show(capsys: CaptureFixture[str], text: str) -> None:
    """Print the text, even when the test passes."""
    with capsys.disabled():
        sys.stdout.write(f"\n  {text}\n")
