"""Start a run of the `Task` workflow: open a new task, or restore the state of the previous run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from flowkit.errors import GraphError
from flowkit.graph.task_input import parse_input
from flowkit.graph.validation import FIRST_RULES, RULES, normalized, parse_graph
from flowkit.models import NodeState, StatusChange, TaskStatus
from flowkit.text import clean
from flowkit.workflows.document_activities import open_document
from flowkit.workflows.state_codec import TaskState, is_state, parse_state

if TYPE_CHECKING:
    from temporalio.common import RawValue

    from flowkit.graph.task_input import NewTask
    from flowkit.models import Graph

_REFUSAL_CHARS = 8_000
"""Largest message of a rejection. It lists up to ten problems; one of them may be a cycle of thousands of nodes."""


async def enter(task: RawValue | None) -> tuple[TaskState, Graph]:
    """Return the state and the graph of the task, from the previous run or from opening the task now.

    Only the first run validates the graph, because a task continues under the rules that accepted it.
    Raise ApplicationError when the input or the graph is not valid, or when the engine rejects the task.
    """
    given = None if task is None else _decoded(task)
    if workflow.info().continued_run_id and is_state(given):
        state = parse_state(given)
        return state, normalized(state.graph, empty_sources=state.opened.settings.empty_sources)
    try:
        new = parse_input(workflow.info().workflow_id, given)
    except GraphError as error:
        raise _refusal(error) from None
    return await _open(new, _accepted(new))


def _decoded(task: RawValue) -> Any:
    try:
        return workflow.payload_converter().from_payload(task.payload)
    except Exception as error:  # noqa: BLE001 - for any decoding error, the task must fail and report the reason
        problem = "the input of a task is one JSON object; this one cannot be read"
        raise _refusal(GraphError([f"{problem}: {str(error)[:200]}"])) from None


def _accepted(new: NewTask) -> Graph:
    """Return the graph of a new task.

    Raise ApplicationError if the current rules reject it, unless the task was opened under earlier rules.
    """
    try:
        return parse_graph(new.graph, params=new.params, max_nodes=None)
    except GraphError as error:
        graph = _accepted_before(new)
        if graph is None or workflow.patched(f"validation-{RULES}"):
            raise _refusal(error) from None
        return graph


def _accepted_before(new: NewTask) -> Graph | None:
    """Return the graph under the rules of the first release, or None if those rules reject it too."""
    try:
        return parse_graph(new.graph, params=new.params, max_nodes=None, rules=FIRST_RULES)
    except GraphError:
        return None


def _refusal(error: GraphError) -> ApplicationError:
    return ApplicationError(clean(str(error))[:_REFUSAL_CHARS], type=error.code, non_retryable=True)


async def _open(new: NewTask, graph: Graph) -> tuple[TaskState, Graph]:
    for warning in graph.warnings:
        workflow.logger.warning("graph: %s", warning)
    opened = await open_document(new)
    if not opened.settings.empty_sources:
        graph = normalized(new.graph, empty_sources=False)
    nodes = [NodeState(epoch=opened.epochs.get(node.node_id, 0)) for node in graph.nodes]
    history = [StatusChange(from_=None, to=TaskStatus.QUEUED.value, at=opened.created_at)]
    state = TaskState(params=new.params, graph=new.graph, opened=opened, nodes=nodes, status_history=history)
    return state, graph
