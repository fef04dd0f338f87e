"""Start a run of the `Task` workflow: open a new task, or restore the state of the previous run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ApplicationError

from flowkit.errors import GraphError
from flowkit.graph.task_input import NewTask, parse_input
from flowkit.graph.validation import normalized, normalizing, parse_graph
from flowkit.models import NodeState, StatusChange, TaskStatus
from flowkit.text import clean, truncate
from flowkit.workflows.engine_calls import open_document
from flowkit.workflows.state_codec import TaskState, is_state, parse_state
from flowkit.workflows.stored_graphs import end_workflow_task, is_stored, read_task, stored_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from temporalio.common import RawValue

    from flowkit.models import Graph, Opened, StoredGraph

_DECODING_CHARS = 200
_REJECTION_CHARS = 8_000
"""Largest size of an error message about the input. It lists up to ten problems; one may be a cycle of many nodes."""


async def open_or_restore(task: RawValue | None) -> tuple[TaskState, Graph]:
    """Return the state and the graph of the task: those of the previous run, or those of the new task that it opens.

    Only the first run validates the graph, because a task continues under the rules that accepted it.
    Raise ApplicationError when the input or the graph is not valid, or when the engine rejects the task.
    """
    given = None if task is None else _decode(task)
    if workflow.info().continued_run_id and is_state(given):
        state = parse_state(given, await read_task(stored_in(given)) if is_stored(given) else None)
        if state.stored is None:
            return state, normalized(state.graph)
        graph = await _in_steps(normalizing(state.graph))
        await end_workflow_task()
        return state, graph
    if is_stored(given):
        return await _open_stored(_reference(given))
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


async def _open_stored(stored: StoredGraph) -> tuple[TaskState, Graph]:
    """Open a task whose graph is stored.

    The engine validates the graph when it opens the document, because that may take longer than a workflow task may.
    """
    opened = await open_document(NewTask(stored=stored))
    task = await read_task(stored)
    normal = await _in_steps(normalizing(task["graph"]))
    state, graph = _opened_state(NewTask(**task, stored=stored), normal, opened)
    await end_workflow_task()
    return state, graph


async def _in_steps(steps: Iterator[Graph | None]) -> Graph:
    """Return the last of these steps. Each runs in a workflow task of its own."""
    for graph in steps:
        if graph is not None:
            return graph
        await end_workflow_task()
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
    return ApplicationError(
        truncate(clean(str(error)), _REJECTION_CHARS), type=error.code, non_retryable=True
    )


async def _open(new: NewTask, graph: Graph) -> tuple[TaskState, Graph]:
    """Open the task document, and return the state in which the task begins."""
    for warning in graph.warnings:
        workflow.logger.warning("graph: %s", warning)
    return _opened_state(new, graph, await open_document(new))


def _opened_state(new: NewTask, graph: Graph, opened: Opened) -> tuple[TaskState, Graph]:
    epochs = opened.epochs or [0] * len(graph.nodes)
    nodes = [NodeState(epoch=epoch) for epoch in epochs]
    history = [StatusChange(from_=None, to=TaskStatus.QUEUED.value, at=opened.created_at)]
    state = TaskState(
        params=new.params,
        graph=new.graph,
        opened=opened,
        nodes=nodes,
        status_history=history,
        stored=new.stored,
    )
    return state, graph
