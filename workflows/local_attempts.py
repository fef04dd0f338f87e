"""Run attempts as local activities, inside the engine that runs the workflow, which saves a round trip through the server.

Attempts of inline roles and calls of built-in functions are local. If the engine cannot run one to its end, the node
falls back: an ordinary attempt with the next epoch follows at once and at no charge, and the node stays ordinary.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ApplicationError, FailureError, is_cancelled_exception

from flowkit import reason_codes
from flowkit.models import AttemptFailure, FailureKind, Settings
from flowkit.temporal_names import INLINE_ATTEMPT
from flowkit.workflows.display.summaries import attempt_summary, inline_summary
from flowkit.workflows.engine_calls import cause_of, without_defaults
from flowkit.workflows.retry import find_report
from flowkit.workflows.scheduling.local_activities import Streak, is_inline, is_local_function
from flowkit.workflows.scheduling.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flowkit.models import AttemptInput, Node, NodeState

_ONCE = RetryPolicy(maximum_attempts=1)
"""Temporal does not retry a local activity, because the workflow receives no cancel requests meanwhile."""

_FALLBACK = AttemptFailure(
    kind=FailureKind.HANDOVER, code=reason_codes.NOT_LOCAL, message="the attempt continues as an ordinary one"
)


class LocalAttempts:
    """The attempts of one task that run inside the engine."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        streams: Streams | None = None,
        streak: Streak | None = None,
        is_only_running_node: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the attempts of a task with these settings.

        `is_only_running_node` returns whether only one node runs, so that a function delays no other node.
        """
        self._settings = settings or Settings()
        self._streams = streams or Streams(())
        self._streak = streak or Streak()
        self._is_only_running_node = is_only_running_node
        self._choosing = asyncio.Lock()
        self.nodes: set[int] = set()
        """Indexes of the nodes whose attempts run inside the engine at present."""

    def note_starts(self, nodes: Iterable[tuple[Node, NodeState]], *, with_conditions: bool) -> None:
        """Note the nodes that start now, and whether conditions are due.

        If some of the nodes are ordinary, inline ones among them would delay these, as they would delay the evaluation of
        the conditions.
        """
        if not self._settings.inline_roles:
            return
        if with_conditions or len({self._is_inline(*each) for each in nodes}) > 1:
            self.hold_for_ordinary()

    def hold_for_ordinary(self) -> None:
        """Start no local activity in this workflow task, because the command of an ordinary one would wait for it."""
        refresh_for_workflow_task(self._streak).hold_for_ordinary()

    async def choose(self, node: Node, state: NodeState) -> bool:
        """Return whether the next attempt of `node` runs inside the engine.

        After a second of consecutive local activities, wait for the next workflow task by means of a very short timer:
        the workflow receives cancel requests then.
        """
        if not self._is_local(node, state):
            return False
        async with self._choosing:
            while refresh_for_workflow_task(self._streak).is_over(_now()):
                await workflow.sleep(0.001, summary="receive cancel requests")
        return not self._streak.delays_ordinary

    def _is_local(self, node: Node, state: NodeState) -> bool:
        if node.is_function:
            functions = self._settings.local_functions
            return is_local_function(node, state, functions=functions) and self._is_only_running_node()
        return self._is_inline(node, state)

    def _is_inline(self, node: Node, state: NodeState) -> bool:
        return is_inline(node, state, roles=self._settings.inline_roles, streams=self._streams)

    async def run(self, node: Node, state: NodeState, attempt: AttemptInput) -> None:
        """Run an attempt inside the engine. Raise FailureError as an ordinary attempt does."""
        streak = refresh_for_workflow_task(self._streak)
        begin_by = streak.begin_by(workflow.info().task_timeout.total_seconds())
        self.nodes.add(node.index)
        try:
            await workflow.execute_local_activity(
                node.io.fn if node.is_function else INLINE_ATTEMPT,
                without_defaults(replace(attempt, begin_by=begin_by)),
                result_type=RawValue,
                activity_id=f"{node.node_id}.{state.epoch}",
                schedule_to_close_timeout=timedelta(seconds=streak.start(_now())),
                retry_policy=_ONCE,
                cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                summary=(attempt_summary if node.is_function else inline_summary)(node, state),
            )
        finally:
            self.nodes.discard(node.index)


def refresh_for_workflow_task(streak: Streak) -> Streak:
    """Return `streak` for the current workflow task (an activation of the workflow by the server)."""
    streak.enter(workflow.info().get_current_history_length(), _now())
    return streak


def _now() -> float:
    return workflow.now().timestamp()


def fall_back(state: NodeState, error: FailureError, failure: AttemptFailure) -> AttemptFailure:
    """Return the failure of a local attempt, and note in `state` whether the node stays ordinary.

    It does if the engine could not run the attempt to its end, or if another attempt has the epoch: only the server's
    acceptance of an ordinary attempt shows which of two engines still runs the workflow.
    """
    cannot_run = not is_cancelled_exception(error) and not is_reported(error)
    state.ordinary = cannot_run or failure.kind in {FailureKind.LOSS, FailureKind.EPOCH_TAKEN}
    return _FALLBACK if cannot_run else failure


def is_reported(error: FailureError) -> bool:
    """Return whether a worker or engine of FlowKit reported the error; otherwise, it comes from another component."""
    return _report(error) is not None


def _report(error: FailureError) -> dict[Any, Any] | None:
    cause = cause_of(error)
    return find_report(cause.details) if isinstance(cause, ApplicationError) else None
