"""Apply what the sweep reports about silent attempts: running attempts that send no heartbeats. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit import reason_codes
from flowkit.models import AttemptFailure, FailureKind, NodeStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.models import SilenceReport, SilentAttempt
    from flowkit.workflows.scheduling.scheduler import Scheduler

_IN_FLIGHT = {NodeStatus.RUNNING, NodeStatus.CANCELLING}


class Silence:
    """The silent attempts of a running task."""

    def __init__(
        self, scheduler: Scheduler, *, run_id: str, stop_node: Callable[[int, AttemptFailure, str], None]
    ) -> None:
        """Call `stop_node` with the index, the failure and the cancel reason of each node that must end."""
        self._states = scheduler.states
        self._index_of = {node.node_id: node.index for node in scheduler.nodes}
        self._run_id = run_id
        self._stop_node = stop_node
        self._epochs: dict[int, int] = {}
        """Epochs of the silent attempts, by the index of the node."""
        self._failures: dict[int, AttemptFailure] = {}
        """Failures of the nodes that `process_events` stops, by index."""
        self.has_events = False
        """Whether there is a new report, so that the main loop must call `process_events`."""

    @property
    def nodes(self) -> list[int]:
        """The indexes of the nodes whose current attempts are silent."""
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
        self._failures |= dict.fromkeys(self._lost(report), _failure(report))
        self.has_events = True

    def process_events(self) -> None:
        """Stop the nodes whose attempts have been silent for too long."""
        self.has_events = False
        failures, self._failures = self._failures, {}
        for index, failure in failures.items():
            if self._states[index].status is NodeStatus.RUNNING:
                self._stop_node(index, failure, reason_codes.SILENCE)

    def _lost(self, report: SilenceReport) -> list[int]:
        """Return the indexes of the nodes that have been silent for too long and do not stop yet."""
        lost = [self._index_of[each.node_id] for each in report.silent if _is_lost(each, report)]
        return [index for index in lost if self._states[index].status is NodeStatus.RUNNING]

    def _is_running(self, attempt: SilentAttempt) -> bool:
        index = self._index_of.get(attempt.node_id)
        return index is not None and self._is_current(index, attempt.epoch)

    def _is_current(self, index: int, epoch: int) -> bool:
        state = self._states[index]
        return state.status in _IN_FLIGHT and state.epoch == epoch


def _is_lost(attempt: SilentAttempt, report: SilenceReport) -> bool:
    return 0 < report.hard_sec <= attempt.silent_sec


def _failure(report: SilenceReport) -> AttemptFailure:
    message = f"the attempt sent no heartbeat for {report.hard_sec:g} s (heartbeat_hard_sec)"
    return AttemptFailure(
        kind=FailureKind.FAILURE, code=reason_codes.HEARTBEAT_TIMEOUT, message=message, permanent=True
    )
