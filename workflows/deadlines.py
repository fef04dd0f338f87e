"""End what takes too long: nodes and tasks that exceed their deadlines, and attempts that send no heartbeats.

The deadline of a node begins when its gate opens first, and covers all attempts and waits. Its absolute time is part of
the node's state. The deadline of the task follows from the time at which the task was opened. The sweep reports the
attempts that send no heartbeats.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING

from temporalio import workflow

from flowkit import reason_codes
from flowkit.models import AttemptFailure, FailureKind, NodeStatus
from flowkit.workflows.display.summaries import deadline_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from flowkit.models import Graph, Node, NodeState, SilenceReport, SilentAttempt
    from flowkit.models.actions import ActionState
    from flowkit.workflows.scheduling.scheduler import Scheduler

_SHORTEST_TIMER_SEC = 0.001


class DeadlineTimer:
    """Enforces the deadlines of a task with a single timer, armed for the earliest one that is still open."""

    def __init__(
        self,
        deadlines: Deadlines,
        graph: Graph,
        *,
        stop_nodes: Callable[[dict[int, AttemptFailure], str], None],
    ) -> None:
        """Call `stop_nodes` with the failures, by index, of the nodes that must end, and with their cancel reason."""
        self._deadlines = deadlines
        self._nodes = graph.nodes
        self._stop_nodes = stop_nodes
        self._timer: asyncio.Task[None] | None = None
        self._armed_for: tuple[float, str] | None = None
        self.has_events = False
        """Whether the timer has fired, so that the main loop must call `process_events`."""
        self.task_failure: str | None = None
        """Why the task must fail, once it has exceeded its deadline."""

    def begin(self, ready: list[int]) -> list[int]:
        """Begin the deadlines of the nodes whose gates have opened, arm the timer, and return `ready`."""
        limited = [index for index in ready if self._nodes[index].deadline_sec is not None]
        if limited:
            self._deadlines.begin(limited, workflow.now().timestamp())
        self._arm()
        return ready

    def process_events(self) -> None:
        """Stop the nodes that have exceeded their deadlines, and set `task_failure` if the task has."""
        self.has_events, now = False, workflow.now().timestamp()
        overdue = {index: node_failure(self._nodes[index]) for index in self._deadlines.pop_overdue(now)}
        self._stop_nodes(overdue, reason_codes.DEADLINE)
        self.task_failure = self._deadlines.task_failure(now)

    def _arm(self) -> None:
        """Arm the timer for the earliest deadline. The timer for the deadline of a node that has ended is cancelled."""
        due = self._deadlines.next_due()
        if due == self._armed_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = due
        self._timer = None if due is None else asyncio.create_task(self._fire(*due))

    async def _fire(self, at: float, limits: str) -> None:
        wait_sec = max(at - workflow.now().timestamp(), _SHORTEST_TIMER_SEC)
        await workflow.sleep(wait_sec, summary=deadline_summary(limits, wait_sec))
        self._timer, self._armed_for, self.has_events = None, None, True


class Deadlines:
    """The deadlines of one task. Times are seconds since the Unix epoch."""

    def __init__(
        self, graph: Graph, states: Sequence[NodeState], actions: ActionState, *, opened_at: float
    ) -> None:
        """Continue with the deadlines in `states`, and with the pauses of the whole task in `actions`."""
        self._nodes = graph.nodes
        self._states = states
        self._limit_sec = graph.deadline_sec
        self._actions = actions
        self._opened_at = opened_at
        self._due = [(at, i) for i, state in enumerate(states) if (at := state.deadline_at) is not None]
        heapq.heapify(self._due)

    def begin(self, indexes: Iterable[int], now: float) -> None:
        """Begin the deadlines of the nodes whose gates have opened. A deadline that has begun stays as it is."""
        for index in indexes:
            limit, state = self._nodes[index].deadline_sec, self._states[index]
            has_begun = state.deadline_at is not None or state.deadline_left is not None
            if limit is not None and not has_begun and state.held_until is None:
                self._set(index, now + limit)

    def _set(self, index: int, at: float) -> None:
        self._states[index].deadline_at = at
        heapq.heappush(self._due, (at, index))

    def restore(self, index: int) -> None:
        """Count the deadline of a node again that may have passed while the node could not end."""
        if (at := self._states[index].deadline_at) is not None:
            self._set(index, at)

    def pause(self, index: int, now: float) -> None:
        """Let the deadline of a node stand still, if it has begun."""
        state = self._states[index]
        if state.deadline_at is not None:
            state.deadline_left, state.deadline_at = max(state.deadline_at - now, _SHORTEST_TIMER_SEC), None

    def resume(self, index: int, now: float) -> None:
        """Let the deadline of a node continue."""
        state = self._states[index]
        if state.deadline_left is not None:
            self._set(index, now + state.deadline_left)
            state.deadline_left = None

    def pause_task(self, paused: bool, now: float) -> None:
        """Let the deadline of the task stand still, or continue."""
        since = self._actions.stopped_at
        if paused and since is None:
            self._actions.stopped_at = now
        elif not paused and since is not None:
            self._actions.stopped_sec += now - since
            self._actions.stopped_at = None

    @property
    def _task_at(self) -> float | None:
        """When the task must have ended. None without a deadline, and while it stands still."""
        if self._limit_sec is None or self._actions.stopped_at is not None:
            return None
        return self._opened_at + self._limit_sec + self._actions.stopped_sec

    def _is_due(self, at: float, index: int) -> bool:
        """Return whether an entry of the heap is the deadline of an open node, and not an outdated one."""
        state = self._states[index]
        return not state.status.ended and state.deadline_at == at

    def next_due(self) -> tuple[float, str] | None:
        """Return the earliest deadline that may still be exceeded, and what it limits. None if there is none."""
        while self._due and not self._is_due(*self._due[0]):
            heapq.heappop(self._due)
        task_at = self._task_at
        if not self._due and task_at is None:
            return None
        found = [(at, self._nodes[index].node_id) for at, index in self._due[:1]]
        found += [(task_at, "the task")] if task_at is not None else []
        return min(found, default=None)

    def pop_overdue(self, now: float) -> list[int]:
        """Return the indexes of the open nodes that have exceeded their deadlines, each only once."""
        overdue: dict[int, None] = {}
        while self._due and self._due[0][0] <= now:
            at, index = heapq.heappop(self._due)
            if self._is_due(at, index):
                overdue[index] = None
        return [*overdue]

    def task_failure(self, now: float) -> str | None:
        """Return why the task must fail if it has exceeded its deadline, otherwise None."""
        at = self._task_at
        if at is None or now < at:
            return None
        return f"{reason_codes.DEADLINE_EXCEEDED}: the task took longer than {self._limit_sec:g} s (deadline_sec)"


def node_failure(node: Node) -> AttemptFailure:
    """Return the failure of a node that has exceeded its deadline."""
    message = f"the node took longer than {node.deadline_sec:g} s (deadline_sec) from the opening of its gate"
    return AttemptFailure(
        kind=FailureKind.FAILURE, code=reason_codes.DEADLINE_EXCEEDED, message=message, permanent=True
    )


class SilentAttempts:
    """The silent attempts of a running task."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        run_id: str,
        stop_nodes: Callable[[dict[int, AttemptFailure], str], None],
    ) -> None:
        """Call `stop_nodes` with the failures, by index, of the nodes that must end, and with their cancel reason."""
        self._scheduler = scheduler
        self._states = scheduler.states
        self._index_of = scheduler.index_of
        self._run_id = run_id
        self._stop_nodes = stop_nodes
        self._epochs: dict[int, int] = {}
        """Epochs of the silent attempts, by the index of the node."""
        self._failures: dict[int, AttemptFailure] = {}
        """Failures of the nodes that `process_events` stops, by index."""
        self.has_events = False
        """Whether there is a new report, so that the main loop must call `process_events`."""

    @property
    def nodes(self) -> list[int]:
        """The indexes of the nodes whose current attempts are silent."""
        if not self._epochs:
            return []
        return sorted(index for index, epoch in self._epochs.items() if self._is_current(index, epoch))

    def problem(self, report: SilenceReport) -> str | None:
        """Return why the task rejects a report, or None. It rejects outdated reports, and those that change nothing."""
        if report.run_id != self._run_id:
            return f"the report is about run {report.run_id}, and this is run {self._run_id}"
        for attempt in report.silent:
            if not self._is_running(attempt):
                return f"attempt {attempt.epoch} of node {attempt.node_id!r} does not run"
        reported = {self._index_of[attempt.node_id] for attempt in report.silent}
        return "the report changes nothing" if reported == {*self.nodes} and not self._lost(report) else None

    def accept(self, report: SilenceReport) -> None:
        """Note the attempts that are silent now, and those that have been silent for too long."""
        self._epochs = {self._index_of[each.node_id]: each.epoch for each in report.silent}
        self._failures |= dict.fromkeys(self._lost(report), silence_failure(report))
        self.has_events = True

    def process_events(self) -> None:
        """Stop the nodes whose attempts have been silent for too long."""
        self.has_events = False
        failures, self._failures = self._failures, {}
        running = {i: each for i, each in failures.items() if self._states[i].status is NodeStatus.RUNNING}
        self._stop_nodes(running, reason_codes.SILENCE)

    def _lost(self, report: SilenceReport) -> list[int]:
        """Return the indexes of the nodes that have been silent for too long and do not stop yet."""
        lost = [each for each in report.silent if _is_lost(each, report) and self._is_running(each)]
        indexes = [self._index_of[each.node_id] for each in lost]
        return [index for index in indexes if self._states[index].status is NodeStatus.RUNNING]

    def _is_running(self, attempt: SilentAttempt) -> bool:
        index = self._index_of.get(attempt.node_id)
        return index is not None and self._is_current(index, attempt.epoch)

    def _is_current(self, index: int, epoch: int) -> bool:
        return self._states[index].status.in_flight and self._scheduler.is_current(index, epoch)


def _is_lost(attempt: SilentAttempt, report: SilenceReport) -> bool:
    return 0 < report.hard_sec <= attempt.silent_sec


def silence_failure(report: SilenceReport) -> AttemptFailure:
    """Return the failure of a node whose attempt has been silent for too long."""
    message = f"the attempt sent no heartbeat for {report.hard_sec:g} s (heartbeat_hard_sec)"
    return AttemptFailure(
        kind=FailureKind.FAILURE, code=reason_codes.HEARTBEAT_TIMEOUT, message=message, permanent=True
    )
