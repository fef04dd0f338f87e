"""What Temporal shows of a task: its status as search attributes, its current details, the query `status`
and its result."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

from flowkit import reason_codes
from flowkit.limits import HANDLED_FAILURES_BYTES, LAST_ERROR_CHARS, REPORT_BYTES, STATUS_CHANGES
from flowkit.models import NodeStatus, StatusChange, TaskResult, TaskStatus
from flowkit.models.temporal_names import PIPELINE_ATTRIBUTE, STATUS_ATTRIBUTE, WAITS_ATTRIBUTE
from flowkit.models.waits import WaitKind, for_resume, stored_wait
from flowkit.text import bounded, names, prefix, truncate
from flowkit.workflows.display.details import (
    DISPLAY_ORDER,
    SlotLimits,
    TaskQueues,
    find_decision,
    find_outside_wait,
    render,
)
from flowkit.workflows.payloads import json_size, longest_prefix, truncate_longest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from flowkit.models import Graph, Node, NodeState
    from flowkit.models.waits import NodeWait
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState

_PIPELINE_CHARS = 200
"""Temporal's visibility stores accept keywords of at most 255 characters."""

_FIRST_CHANGES = 10
"""Number of status changes at the beginning of a long history that are kept."""

_BEFORE_ATTEMPT = (NodeStatus.QUEUED, NodeStatus.DEFERRED)
_RANK = {status.value: position for position, status in enumerate(DISPLAY_ORDER)}
_VIEW_BYTES = 200
"""Upper bound for the size of the view of a task without its nodes."""


class StatusPublisher:
    """Keep the task's status and status history, publish them to Temporal, and render the current details.

    The current details are Markdown that the Web UI shows on the page of the run (see `details`).
    """

    def __init__(self, state: TaskState, graph: Graph, scheduler: Scheduler) -> None:
        self._state = state
        self._graph = graph
        self._scheduler = scheduler
        self._queues = TaskQueues(namespace=workflow.info().namespace, prefix=state.opened.settings.queue)
        self._limits = SlotLimits(
            window=state.opened.settings.window, max_in_flight=state.opened.settings.max_in_flight
        )
        self.reason: str | None = None
        """Why the task fails or was cancelled, once its status says so."""
        self.may_wait = False
        """Whether a node of the task can wait for the decision of a person."""
        self.change_graph()
        self._waits = self.may_wait and any(map(find_decision, scheduler.nodes, scheduler.states))
        """Whether the search attribute shows that the task waits for a decision."""
        self.silent_nodes: frozenset[str] = frozenset()
        """The ids of the nodes whose attempts send no heartbeats."""
        self.status = TaskStatus(state.status_history[-1].to)
        self._limit_history()

    def change_graph(self) -> None:
        """Note that the nodes of the graph were set, or that nodes were added or changed."""
        nodes = self._scheduler.nodes
        self.may_wait = any(node.hold_sec is not None or node.approval is not None for node in nodes)

    @property
    def history(self) -> list[StatusChange]:
        """The status changes of the task. A long history keeps only the first and the latest."""
        return self._state.status_history

    @property
    def omitted(self) -> int:
        """Number of entries dropped from the middle of `history`."""
        return self._state.status_history_omitted

    def _limit_history(self) -> None:
        self._state.status_history_omitted += shorten_history(self.history)

    def set_status(self, status: TaskStatus, reason: str | None = None) -> None:
        """Set the task's status, and the reason of a final one. Publish nothing if the task already has the status."""
        self.reason = reason
        if status is self.status:
            return
        at = workflow.now().timestamp()
        self.history.append(StatusChange(from_=self.status.value, to=status.value, at=at))
        self._limit_history()
        self.status = status
        registered = self._state.opened.settings.search_attributes
        if updates := search_attributes(registered, self.history, self._graph, self._state.params):
            workflow.upsert_search_attributes(updates)

    def show_waits(self) -> None:
        """Show as a search attribute whether the task waits for the decision of a person. A change costs an event."""
        waits = any(map(find_decision, self._scheduler.nodes, self._scheduler.states))
        if waits != self._waits and WAITS_ATTRIBUTE in self._state.opened.settings.search_attributes:
            key = SearchAttributeKey.for_keyword(WAITS_ATTRIBUTE)
            workflow.upsert_search_attributes(
                [key.value_set(WaitKind.DECISION.value) if waits else key.value_unset()]
            )
        self._waits = waits

    def details(self) -> str:
        """Return the current details. They are rendered when they are queried, because few of them are ever read."""
        return render(
            self.status,
            self._scheduler,
            self._queues,
            self.reason if self.status is TaskStatus.CANCELLED else None,
            self._limits,
            workflow.now().timestamp(),
            self.silent_nodes,
            self._state.versions,
            self._state.pins,
        )


def stop_reason(
    failed: Node | None, states: Sequence[NodeState], cancel_reason: str | None, *, overdue: bool = False
) -> str:
    """Return why a task stops: `hard_fail:` and the failed node's reason code, its deadline, or `cancel_reason`."""
    if failed is not None:
        return f"{reason_codes.HARD_FAIL}:{states[failed.index].reason_code}"
    if overdue:
        return reason_codes.DEADLINE
    return bounded(cancel_reason or reason_codes.USER_REQUEST, LAST_ERROR_CHARS)


def failure_text(scheduler: Scheduler) -> str:
    """Return in one line why the task failed."""
    first, *others = scheduler.failures
    error = scheduler.states[first.index].last_error or "failed"
    suffix = f" (and {len(others)} more failed nodes)" if others else ""
    return truncate(f"node {first.node_id!r} failed: {error}", LAST_ERROR_CHARS) + suffix


def incomplete_text(scheduler: Scheduler) -> str:
    """Return in one line why a rerun fails that has left nodes of the earlier run as they were."""
    left = names([node.node_id for node in scheduler.left_incomplete])
    return truncate(
        f"an earlier run was stopped before these nodes ended: {left}; run them again, too", LAST_ERROR_CHARS
    )


def open_status(scheduler: Scheduler, *, waits: bool = False) -> TaskStatus:
    """Return the status of a task that has not ended.

    It is `deferred` if no node runs and at least one waits for its retry, otherwise `running`. A task that `waits`,
    because its running attempts are all silent or because it is paused, is `deferred` too.
    """
    if waits:
        return TaskStatus.DEFERRED
    counts = scheduler.counts()
    waiting = counts[NodeStatus.DEFERRED] > 0
    idle = counts[NodeStatus.RUNNING] == 0
    return TaskStatus.DEFERRED if waiting and idle else TaskStatus.RUNNING


def is_dead(scheduler: Scheduler) -> bool:
    """Return whether a node that makes the task fail sent no heartbeats for too long."""
    states = (scheduler.states[node.index] for node in scheduler.failures)
    return any(state.reason_code == reason_codes.HEARTBEAT_TIMEOUT for state in states)


def shorten_history(history: list[StatusChange]) -> int:
    """Drop entries from the middle of a long history; keep the first ten and the latest. Return the number dropped."""
    surplus = max(0, len(history) - STATUS_CHANGES)
    del history[_FIRST_CHANGES : _FIRST_CHANGES + surplus]
    return surplus


def search_attributes(
    registered: Collection[str], history: Sequence[StatusChange], graph: Graph, params: dict[str, Any]
) -> list[SearchAttributeUpdate[Any]]:
    """Return the updates of registered search attributes after the latest status change. They cost one event."""
    updates: list[SearchAttributeUpdate[Any]] = []
    if STATUS_ATTRIBUTE in registered:
        updates.append(SearchAttributeKey.for_keyword(STATUS_ATTRIBUTE).value_set(history[-1].to))
    name = pipeline_name(graph.name, params)
    if PIPELINE_ATTRIBUTE in registered and name and history[-1].from_ == TaskStatus.QUEUED:
        updates.append(SearchAttributeKey.for_keyword(PIPELINE_ATTRIBUTE).value_set(name))
    return updates


def pipeline_name(graph_name: str | None, params: dict[str, Any]) -> str | None:
    """Return `params.pipeline_name` or, without it, the graph's name. None if the task has neither."""
    name = params.get("pipeline_name")
    chosen = name if isinstance(name, str) and name else graph_name
    return _replace_unprintable(prefix(chosen, _PIPELINE_CHARS)) if chosen else None


def _replace_unprintable(text: str) -> str:
    """Replace characters that some databases reject, such as NUL."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def task_result(
    task_id: str,
    status: TaskStatus,
    handled_failures: Sequence[str],
    failed_batches: Mapping[str, int] = MappingProxyType({}),
) -> TaskResult:
    """Return the result of a task, which lists at most HANDLED_FAILURES_BYTES of handled failures.

    `failed_batches` has the number of batches that were set aside, by node id.
    """
    kept = longest_prefix(handled_failures, _measure_entry, HANDLED_FAILURES_BYTES)
    return TaskResult(
        task_id=task_id,
        status=status,
        handled_failures=kept,
        handled_failures_omitted=len(handled_failures) - len(kept),
        failed_batches=dict(failed_batches),
    )


def _measure_entry(text: str) -> int:
    return json_size(text) + 1


def status_view(status: TaskStatus, scheduler: Scheduler | None, result: TaskResult | None) -> dict[str, Any]:
    """Return the result of the query `status`, in at most REPORT_BYTES.

    For a large graph, error texts are truncated first. If that is not enough, nodes are omitted, finished nodes first.
    """
    remaining = REPORT_BYTES - _VIEW_BYTES
    handled = (
        [] if result is None else longest_prefix(result.handled_failures, _measure_entry, remaining // 4)
    )
    views = [] if scheduler is None else [_view_node(node, scheduler) for node in scheduler.nodes]
    errors = [view["last_error"] for view in views]
    for view in views:
        view["last_error"] = None
    kept, remaining = _choose_views(views, remaining - sum(map(_measure_entry, handled)))
    shown = truncate_longest([errors[index] for index in kept], remaining)
    for index, error in zip(kept, shown, strict=True):
        views[index]["last_error"] = error
    return {
        "status": status.value,
        "nodes": [views[index] for index in kept],
        "handled_failures": handled,
        "nodes_omitted": len(views) - len(kept),
        "handled_failures_omitted": _count_handled(result) - len(handled),
        "errors_cut": sum(errors[index] != error for index, error in zip(kept, shown, strict=True)),
    }


def _count_handled(result: TaskResult | None) -> int:
    return 0 if result is None else len(result.handled_failures) + result.handled_failures_omitted


def _choose_views(views: Sequence[dict[str, Any]], remaining: int) -> tuple[list[int], int]:
    """Return the indexes of the views that fit into `remaining` bytes, in graph order, and the bytes that remain."""
    sizes = [json_size(view) + 1 for view in views]
    ranked = sorted(range(len(views)), key=lambda index: _RANK[views[index]["status"]])
    kept = sorted(longest_prefix(ranked, sizes.__getitem__, remaining))
    return kept, remaining - sum(sizes[index] for index in kept)


def _find_wait(node: Node, state: NodeState, scheduler: Scheduler) -> NodeWait | None:
    if decision := find_decision(node, state):
        return decision
    if state.status in _BEFORE_ATTEMPT and node.index in scheduler.pauses.paused:
        return for_resume()
    return find_outside_wait(node, state, scheduler.missing_prerequisites(node.index)) or state.wait


def _view_node(node: Node, scheduler: Scheduler) -> dict[str, Any]:
    state = scheduler.states[node.index]
    wait = _find_wait(node, state, scheduler)
    view = {
        "node_id": node.node_id,
        "type": node.type,
        "status": state.status.value,
        "attempt_epoch": state.epoch,
        "last_error": state.last_error,
        "skip_reason": state.skip_reason,
        "next_retry_at": state.next_retry_at,
    }
    aside = {"failed_batches": state.failed_batches} if state.failed_batches else {}
    return view | aside | (stored_wait(wait) if wait else {})
