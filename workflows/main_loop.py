"""The state of a task's main loop: when it iterates, and when the task continues as a new run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from temporalio import workflow

from flowkit.workflows.opening import continues_longer, is_mostly_graph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.workflows.evaluations import ConditionEvaluations
    from flowkit.workflows.running_nodes import RunningNodes
    from flowkit.workflows.state_codec import TaskState


class EventSource(Protocol):
    """A part of the task that has events for the main loop."""

    @property
    def has_events(self) -> bool:
        """Whether the main loop must call `process_events`."""

    def process_events(self) -> None:
        """Process the events that have occurred since the last call."""


class MainLoop:
    """Decides when the main loop iterates, and when the history is long enough to continue as a new run."""

    _state: TaskState
    _nodes: RunningNodes
    _conditions: ConditionEvaluations
    _sources: Sequence[EventSource]

    def __init__(self) -> None:
        self._draining = False
        self._ended = False
        """Whether the main loop has ended before all nodes ended: the task stops, or continues in a new run."""
        self._iterations = 0
        """Number of iterations that did not end this run."""
        self._wake_requested = False
        """Whether the loop must iterate although no node has ended: a node began or ended its wait for a retry, has
        stored its first batch, waits for something else, or is about to repeat without backoff while the task must
        continue in a new run."""
        self._progressed = False
        """Whether this run has processed an event. A run without progress must not continue as new, to avoid a loop."""

    def watch(
        self,
        state: TaskState,
        nodes: RunningNodes,
        conditions: ConditionEvaluations,
        *others: EventSource,
    ) -> None:
        """Set the parts of the opened task. Their events are processed in this order, after the ends of nodes."""
        self._state = state
        self._nodes = nodes
        self._conditions = conditions
        self._sources = (conditions, *others)

    @property
    def draining(self) -> bool:
        """Whether the task has stopped starting attempts, but was not asked to cancel."""
        return self._draining

    def starts_no_attempts(self) -> bool:
        """Return whether the task must not start an attempt: it is draining, or its cancel was requested."""
        return self._draining or cancel_requested()

    def is_stopping(self) -> bool:
        """Return whether the loop has ended, so that the task as a whole ends its running nodes."""
        return self._ended

    def wake(self) -> None:
        """Make the loop iterate, so that it shows what has changed."""
        self._wake_requested = True

    def begin_iteration(self) -> None:
        """Count an iteration, which continues this run."""
        self._iterations += 1

    def end(self) -> None:
        """Note that the loop has ended: from now on, the task starts no attempts."""
        self._draining = self._ended = True

    def has_events(self) -> bool:
        """Return whether the loop must iterate."""
        return (
            self._wake_requested
            or self._nodes.any_ended
            or any(source.has_events for source in self._sources)
            or cancel_requested()
        )

    def begin_processing(self) -> None:
        """Note that the loop now processes its events, and forget the requests to iterate."""
        self._wake_requested, self._progressed = False, True

    def process_events(self) -> None:
        """Let each part of the task that has events process them."""
        for source in self._sources:
            if source.has_events:
                source.process_events()

    def should_continue_as_new(self) -> bool:
        """Return whether the history is long enough to continue as new, and no attempt is in flight.

        If attempts keep being in flight until the history is very long, stop starting new ones.
        """
        info, settings = workflow.info(), self._state.opened.settings
        if not info.is_continue_as_new_suggested() or is_mostly_graph(self._state.stored):
            return False
        events, size = info.get_current_history_length(), info.get_current_history_size()
        if events >= settings.hold_starts_events or size >= settings.hold_starts_bytes:
            self._draining = True
        elif continues_longer(len(self._state.nodes)):
            return False
        return self._nodes.in_flight == 0 and self._conditions.is_idle and self._progressed

    async def before_immediate_retry(self) -> None:
        """Wake the loop before an attempt without backoff, if the task must continue in a new run.

        Such an attempt does not wake the loop by itself. Without this call, a node that repeats forever would fill the
        history, and a task that has stopped starting attempts would hang after its last attempt.
        """
        if self._ended or self.has_events() or not self._must_continue_as_new():
            return
        self._wake_requested, iteration = True, self._iterations
        await workflow.wait_condition(lambda: self._iterations != iteration or self._draining)

    def _must_continue_as_new(self) -> bool:
        if self._draining:
            return self._nodes.in_flight == 0
        return workflow.info().is_continue_as_new_suggested()


def cancel_requested() -> bool:
    """Return whether a cancel of the task was requested."""
    return workflow.cancellation_reason() is not None
