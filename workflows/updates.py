"""Apply actions of operators to a running task: what updates do in the workflow.

The rules are pure (`scheduling.actions`). An action takes effect in one step: the handler plans it for the present state
and changes that state without an await in between. The event history is the audit; the task keeps a short form of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from flowkit import reason_codes
from flowkit.errors import ActionRejected
from flowkit.models.actions import PausedScope
from flowkit.workflows.display.details import format_pause
from flowkit.workflows.scheduling.actions import Audit, parse_action, plan, repeated_result, result_of

if TYPE_CHECKING:
    from temporalio.common import RawValue

    from flowkit.models.actions import Action
    from flowkit.workflows.deadlines import Deadlines
    from flowkit.workflows.document import TaskDocument
    from flowkit.workflows.node import RunningNodes
    from flowkit.workflows.scheduling.actions import Plan
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState

MOST_UPDATES = 1_900
"""Number of updates after which a run rejects further actions. Temporal allows 2,000 in a run."""

FULL_UPDATES = 1_500
"""Number of updates after which a run without attempts in flight continues as new."""


class TaskActions:
    """The actions on one task."""

    def __init__(
        self,
        state: TaskState,
        scheduler: Scheduler,
        nodes: RunningNodes,
        deadlines: Deadlines,
        document: TaskDocument,
    ) -> None:
        self._state = state.actions
        self._audit = Audit(entries=state.actions.applied)
        self._scheduler = scheduler
        self._nodes = nodes
        self._deadlines = deadlines
        self._document = document
        self._updates = 0
        """Number of updates that this run has accepted."""
        self.run_is_full = False
        """Whether the run has accepted so many updates that it should continue as new."""

    def count_update(self) -> None:
        """Count an update of this run."""
        self._updates += 1
        self.run_is_full = self._updates >= FULL_UPDATES

    def check(self, action: Action, *, stopping: bool) -> None:
        """Raise ApplicationError, which says why, if the task rejects an action now."""
        if self._find_repeated() is None:
            self._plan(action, stopping=stopping)

    def apply(self, name: str, action: Action, *, stopping: bool) -> dict[str, Any]:
        """Apply an action and return its result. Raise ApplicationError if the task rejects it."""
        self.count_update()
        if (before := self._find_repeated()) is not None:
            return repeated_result(before)
        planned = self._plan(action, stopping=stopping)
        now, info = workflow.now().timestamp(), workflow.current_update_info()
        self._audit.add(name, action, planned, now, info.id if info is not None else "")
        started = [
            PausedScope(scope=scope, since=now, by=action.by, reason=action.reason)
            for scope in planned.pauses
        ]
        pauses = self._scheduler.pauses
        pauses.change(started, planned.resumes)
        self._deadlines.pause_task(pauses.whole_task, now)
        self._nodes.pause(planned.interrupts)
        self._nodes.resume()
        self.show_drained()
        self._document.write_actions()
        return result_of(planned, self._scheduler.nodes, self._audit.revision)

    def preview(self, action: Action, *, stopping: bool) -> dict[str, Any]:
        """Return the result that an action would have, with the present revision."""
        planned = self._plan(action, stopping=stopping)
        return result_of(planned, self._scheduler.nodes, self._audit.revision)

    def view(self) -> dict[str, Any]:
        """Return the part of the query `status` about actions: the revision, and the paused scopes."""
        view: dict[str, Any] = {"revision": self._audit.revision} if self._audit.revision else {}
        paused = [format_pause(each) for each in self._state.paused]
        return view | ({"paused": paused} if paused else {})

    def show_drained(self) -> None:
        """Write to the document which paused scopes have no attempt in flight, if that has changed."""
        flying, pauses = self._nodes.flying, self._scheduler.pauses
        drained = (each.scope for each in pauses.scopes if pauses.drained(each.scope, flying))
        self._document.write_drained(frozenset(drained))

    def _find_repeated(self) -> Any:
        info = workflow.current_update_info()
        return None if info is None else self._audit.find(info.id)

    def _plan(self, action: Action, *, stopping: bool) -> Plan:
        try:
            if stopping:
                raise ActionRejected("the task is ending, so no action can change it any more")
            if self._updates >= MOST_UPDATES:
                raise ActionRejected(
                    f"this run has accepted {self._updates:,} updates, and Temporal allows 2,000: the task continues in a "
                    "new run when no attempt is in flight; try again then, or interrupt its attempts"
                )
            return plan(action, self._scheduler.pauses, self._scheduler.states, self._audit.revision)
        except ActionRejected as error:
            raise rejection(error) from None


def read_action(name: str, given: RawValue | None) -> Action:
    """Return the action in the input of an update. Raise ApplicationError if it is not valid."""
    value = None if given is None else workflow.payload_converter().from_payload(given.payload)
    try:
        return parse_action(name, value)
    except ActionRejected as error:
        raise rejection(error) from None


def rejection(error: ActionRejected) -> ApplicationError:
    """Return the error with which Temporal rejects an update."""
    return ApplicationError(str(error), type=reason_codes.ACTION_REJECTED, non_retryable=True)
