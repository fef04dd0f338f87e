"""Start a run of the `Task` workflow: open a new task, or restore the state of the previous run.

The graph and params of a task may be too large for its input. `create_task` then stores them in MongoDB, and each run
reads them in parts and prepares the graph in steps.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ApplicationError

from flowkit.errors import GraphError
from flowkit.graph import validation
from flowkit.graph.submission import NewTask, parse_input
from flowkit.graph.validation import normalized, normalizing, parse_graph
from flowkit.models import (
    NodeState,
    NodeStatus,
    ReadStoredGraph,
    SkipReason,
    StatusChange,
    TaskStatus,
    temporal_names,
)
from flowkit.models.actions import ActionState
from flowkit.models.columns import statuses_of
from flowkit.text import bounded, truncate
from flowkit.workflows.document import open_document
from flowkit.workflows.engine_calls import call_engine
from flowkit.workflows.state_codec import TaskState, is_state, is_stored, parse_state, rerun_in, stored_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from temporalio.common import RawValue

    from flowkit.models import EarlierRun, Graph, Opened, Rerun, StoredGraph

_DECODING_CHARS = 200
_REJECTION_CHARS = 8_000
"""Largest size of an error message about the input. It lists up to ten problems."""

LONGER = 4
"""How many times as long the history of a task with a large graph becomes. An engine replays 16,000 events
in four seconds."""

SUGGESTED_BYTES = 4 * 2**20
SUGGESTED_EVENTS = 4_096
"""Size and length of a history at which Temporal suggests continue-as-new."""

_PARAMS = ("pipeline_name", "priority")
"""The params that the workflow reads. It needs none of the others if they are stored."""

_PAUSE = timedelta(milliseconds=1)
_READ_TIMEOUT = timedelta(seconds=30)


async def open_or_restore(task: RawValue | None) -> tuple[TaskState, Graph]:
    """Return the state and the graph of the task: those of the previous run, or those of the new task that it opens.

    Only the first run validates the graph, because a task continues under the rules that accepted it.
    Raise ApplicationError when the input or the graph is not valid, or when the engine rejects the task.
    """
    given = None if task is None else _decode(task)
    if workflow.info().continued_run_id and is_state(given):
        state = parse_state(given, await _read_task(stored_in(given)) if is_stored(given) else None)
        if state.stored is None:
            return state, normalized(state.graph)
        graph = await in_steps(normalizing(state.graph))
        await _end_workflow_task()
        return state, graph
    if is_stored(given):
        return await _open_stored(_reference(given), rerun_in(given))
    try:
        new = parse_input(workflow.info().workflow_id, given)
    except GraphError as error:
        raise rejection(error) from None
    return await _open(new, _validate(new))


def _reference(given: dict[str, Any]) -> StoredGraph:
    try:
        return stored_in(given)
    except ValidationError:
        problem = "stored_graph is a key that only create_task sets; pass 'params' and 'graph'"
        raise rejection(GraphError([problem])) from None


async def _open_stored(stored: StoredGraph, rerun: Rerun | None) -> tuple[TaskState, Graph]:
    """Open a task whose graph is stored, or an ended task again.

    The engine validates the graph when it opens the document, because that may take longer than a workflow task may.
    """
    opened = await open_document(NewTask(stored=stored, rerun=rerun))
    stored = opened.stored or stored
    task = await _read_task(stored)
    normal = await in_steps(normalizing(task["graph"]))
    state, graph = _opened_state(NewTask(**task, stored=stored), normal, opened)
    if rerun is not None and opened.earlier is not None:
        state = continued_state(state, rerun, opened.earlier)
    await _end_workflow_task()
    return state, graph


def continued_state(state: TaskState, rerun: Rerun, earlier: EarlierRun) -> TaskState:
    """Return the state of a new run that continues an ended task: its nodes have ended as in the earlier run."""
    nodes = [
        NodeState(
            status=status if status.ended else NodeStatus.CANCELLED,
            epoch=earlier.epochs[index],
            first_epoch=earlier.first_epochs[index],
            generation=earlier.generations[index],
            skip_reason=SkipReason(reason) if (reason := earlier.skip_reasons.get(index)) else None,
            reason_code=earlier.reason_codes.get(index),
            failed_batches=earlier.failed_batches.get(index, 0),
        )
        for index, status in enumerate(statuses_of(earlier.statuses))
    ]
    actions = ActionState(applied=earlier.applied, changed=rerun.changed, satisfied=earlier.satisfied)
    return replace(
        state, nodes=nodes, actions=actions, rerun=rerun, opened=replace(state.opened, earlier=None)
    )


async def in_steps(steps: Iterator[Graph | None]) -> Graph:
    """Return the last of these steps. Each runs in a workflow task of its own."""
    for graph in steps:
        if graph is not None:
            return graph
        await _end_workflow_task()
    raise AssertionError("the last step yields the graph")


def _decode(task: RawValue) -> Any:
    try:
        return workflow.payload_converter().from_payload(task.payload)
    except Exception as error:  # noqa: BLE001 - for any decoding error, the task must fail and report the reason
        problem = "the input of a task must be one JSON object, and this input cannot be decoded"
        raise rejection(GraphError([f"{problem}: {truncate(str(error), _DECODING_CHARS)}"])) from None


def _validate(new: NewTask) -> Graph:
    """Return the graph of a new task. Raise ApplicationError if it is not valid."""
    try:
        return parse_graph(new.graph, params=new.params, max_nodes=None)
    except GraphError as error:
        raise rejection(error) from None


def rejection(error: GraphError) -> ApplicationError:
    """Return the error that fails a task whose input or graph is not valid."""
    return ApplicationError(bounded(str(error), _REJECTION_CHARS), type=error.code, non_retryable=True)


async def _open(new: NewTask, graph: Graph) -> tuple[TaskState, Graph]:
    """Open the task document, and return the state in which the task begins."""
    for warning in graph.warnings:
        workflow.logger.warning("graph: %s", warning)
    return _opened_state(new, graph, await open_document(new))


def _opened_state(new: NewTask, graph: Graph, opened: Opened) -> tuple[TaskState, Graph]:
    """Return the state in which a task begins. After a *Reset*, its document may have nodes that were added later."""
    epochs = opened.epochs[: len(graph.nodes)] or [0] * len(graph.nodes)
    nodes = [NodeState(epoch=epoch) for epoch in epochs]
    history = [StatusChange(from_=None, to=TaskStatus.QUEUED.value, at=opened.created_at)]
    state = TaskState(
        params=new.params if opened.params is None else opened.params,
        graph=new.graph,
        opened=replace(opened, params=None, stored=None),
        nodes=nodes,
        status_history=history,
        stored=new.stored,
    )
    return state, graph


async def _read_task(stored: StoredGraph) -> dict[str, Any]:
    """Return the stored graph, and those of the params that the workflow reads. Waits while MongoDB is unavailable.

    Each part is the result of an activity, so that a replay reads it from the history.
    """
    parts = [await _read_part(stored, part) for part in range(stored.parts)]
    task: dict[str, Any] = json.loads(zlib.decompress(b"".join(parts)))
    task["params"] = {name: value for name, value in task["params"].items() if name in _PARAMS}
    await _end_workflow_task()
    return task


async def _end_workflow_task() -> None:
    """Continue in another workflow task.

    One may take two seconds, and each step of opening a large graph takes long.
    """
    await workflow.sleep(_PAUSE, summary="prepare the graph in steps")


async def _read_part(stored: StoredGraph, part: int) -> bytes:
    content: bytes = await call_engine(
        temporal_names.READ_STORED_GRAPH,
        ReadStoredGraph(task_id=workflow.info().workflow_id, stored=stored, part=part),
        bytes,
        summary=f"read the graph from MongoDB, part {part + 1} of {stored.parts}",
        time_limit=_READ_TIMEOUT,
    )
    return content


def is_mostly_graph(stored: StoredGraph | None) -> bool:
    """Return whether the history is only long because of the stored graph, so that a new run would be as long."""
    info = workflow.info()
    if stored is None or stored.size < SUGGESTED_BYTES // 2:
        return False
    own_bytes = info.get_current_history_size() - stored.size
    return own_bytes < SUGGESTED_BYTES and info.get_current_history_length() < SUGGESTED_EVENTS


def continues_longer(nodes: int) -> bool:
    """Return whether a task with so many nodes continues its run, although Temporal suggests a new one.

    Each run prepares the graph again, while only an engine that takes over the task replays the longer history.
    """
    info = workflow.info()
    return (
        nodes > validation.STEP_NODES
        and info.get_current_history_length() < LONGER * SUGGESTED_EVENTS
        and info.get_current_history_size() < LONGER * SUGGESTED_BYTES
    )
