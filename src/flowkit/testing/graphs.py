"""Runs whole tasks in one process and without servers, for tests of handlers and graphs."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.activities.builtin_functions import default_adapters
from flowkit.activities.params_checks import ParamsChecks
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.graph.submission import convert_to_json, parse_input, validate_input
from flowkit.graph.validation import raise_if, unknown_function
from flowkit.models import NodeStatus
from flowkit.testing.executors import executors
from flowkit.testing.memory import memory_database
from flowkit.testing.task import InProcessTask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.adapters.mongo import Database
    from flowkit.models import Node
    from flowkit.worker import RoleHandler


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRun:
    """The outcome of one node."""

    status: str
    attempts: int
    batches: list[dict[str, Any]]
    """The `metrics` that its batches returned, oldest first, even if the node failed later."""
    final: dict[str, Any]
    """The metrics that `finalize` returned."""
    error: str | None
    """Why the node failed, as in `last_error` of the task document."""
    skip_reason: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRun:
    """The outcome of a task that `run_graph` ran."""

    task_id: str
    status: str
    reason: str | None
    """Why the task failed, or None."""
    nodes: dict[str, NodeRun]
    vars: dict[str, Any]
    """The variables of the task at its end."""
    db: Database
    """The database with the documents of the task."""


async def run_graph(
    graph: dict[str, Any],
    *handlers: RoleHandler,
    params: dict[str, Any] | None = None,
    functions: Mapping[str, Any] | None = None,
    db: Database | None = None,
) -> GraphRun:
    """Run a task to its end in this process, without any server, and return its outcome.

    Handlers and coordinator functions run in the same activities as on a worker and an engine. Validation, gates,
    retries and failures follow the rules of the Task workflow. `functions` adds to the built-in functions. To give
    handlers data to read, pass a database as `db`; the default is a new `memory_database()`.

    A failed task raises no error; check `status` and `reason`. Raise GraphError for an invalid graph, and ConfigError
    for a role without a handler.

    The workflow itself does not run, so there are no timers, no `timeout_sec`, no `deadline_sec`, no
    external cancel and no process crashes. Retries follow immediately, and no failure is held. Delays pass
    at once, approvals are approved and prerequisites are satisfied. Requires the extra
    `flowkit-temporal[testing]`.
    """
    task_id = str(uuid.uuid4())
    given = {"params": convert_to_json("params", params or {}), "graph": convert_to_json("graph", graph)}
    parsed, new = validate_input(task_id, given), parse_input(task_id, given)
    await ParamsChecks().check(new.graph, new.params)
    database = memory_database() if db is None else db
    known = {**default_adapters(db=database), **(functions or {})}
    raise_if([problem for node in new.graph["nodes"] if (problem := unknown_function(node, known))])
    async with executors(database, parsed, handlers, known) as ready:
        task = InProcessTask(task_id, new, parsed, ready)
        await task.run()
    return GraphRun(
        task_id=task_id,
        status=task.status.value,
        reason=task.reason,
        nodes={node.node_id: await _read_node_run(task, node, database) for node in parsed.nodes},
        vars=await TaskStore(database).variables(task_id),
        db=database,
    )


async def _read_node_run(task: InProcessTask, node: Node, db: Database) -> NodeRun:
    state, metas = task.scheduler.states[node.index], []
    async for page in ArtifactStore(db).pages(task.task_id, node.node_id):
        metas += [partial["meta"] for partial in page]
    return NodeRun(
        status=state.status.value,
        attempts=state.epoch,
        batches=metas,
        final=await _read_final(task, node, db) if state.status is NodeStatus.FINISHED else {},
        error=state.last_error,
        skip_reason=state.skip_reason.value if state.skip_reason else None,
    )


async def _read_final(task: InProcessTask, node: Node, db: Database) -> dict[str, Any]:
    marker = {"task_id": task.task_id, "node_id": node.node_id, "status": "complete"}
    complete: dict[str, Any] = await db.artifacts.find_one(marker) or {}
    return complete.get("meta") or {}
