"""Run attempts as local activities, inside the engine that runs the workflow, which saves a round trip
through the server.

Attempts of inline roles and calls of built-in functions are local. If the engine cannot run one to its end, the node
falls back: an ordinary attempt with the next epoch follows at once without using a retry, and the node stays ordinary.

While a local activity runs, the server receives no commands of the workflow, and the workflow receives no cancel
requests. Local activities that follow each other without a break form a streak. It begins and ends within one workflow
task (an activation of the workflow by the server), so it also ends when the workflow waits for anything else.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ApplicationError, FailureError, is_cancelled_exception

from flowkit import reason_codes
from flowkit.models import AttemptFailure, FailureKind
from flowkit.models.temporal_names import INLINE_ATTEMPT
from flowkit.workflows.display.summaries import attempt_summary, inline_summary
from flowkit.workflows.engine_calls import cause_of
from flowkit.workflows.payloads import without_defaults
from flowkit.workflows.retry import find_report

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from flowkit.models import AttemptInput, Node, NodeState, Settings
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.scheduling.streams import Streams

MAX_START_SEC = 1.0
"""Age of a streak at which no further local activity starts."""

MAX_END_SEC = 2.0
"""Age of a streak at which its last local activity times out; also the longest time that an inline attempt has."""

MAX_BEGIN_SEC = 5.0
"""Age of a workflow task at which no local activity may begin.

It is half of Temporal's usual timeout of a workflow task. After that timeout, another engine runs the workflow, and an
engine that was frozen meanwhile would run local activities of a state that is outdated.
"""

_ONCE = RetryPolicy(maximum_attempts=1)
"""Temporal does not retry a local activity, because the workflow receives no cancel requests meanwhile."""

_FALLBACK = AttemptFailure(
    kind=FailureKind.HANDOVER, code=reason_codes.NOT_LOCAL, message="the attempt continues as an ordinary one"
)


class LocalAttempts:
    """The attempts of one task that run inside the engine."""

    def __init__(
        self,
        settings: Settings,
        streams: Streams,
        streak: Streak,
        *,
        is_only_running_node: Callable[[], bool],
    ) -> None:
        """Prepare the attempts of a task with these settings.

        `is_only_running_node` returns whether only one node runs, so that a function delays no other node.
        """
        self._settings = settings
        self._streams = streams
        self._streak = streak
        self._is_only_running_node = is_only_running_node
        self._choosing = asyncio.Lock()
        self.nodes: set[int] = set()
        """Indexes of the nodes whose attempts run inside the engine at present."""

    def note_starts(self, nodes: Iterable[tuple[Node, NodeState]], *, with_conditions: bool) -> None:
        """Note the nodes that start now, and whether conditions are due.

        If some of the nodes are ordinary, inline ones among them would delay these, as they would delay the
        evaluation of the conditions.
        """
        if not self._settings.inline_roles:
            return
        if with_conditions or len({self._is_inline(*each) for each in nodes}) > 1:
            self.yield_to_ordinary()

    def yield_to_ordinary(self) -> None:
        """Start no local activity in this workflow task, because the command of an ordinary one would wait for it."""
        refresh_for_workflow_task(self._streak).yield_to_ordinary()

    @property
    def ran(self) -> bool:
        """Whether an attempt has run inside the engine in this workflow task, so that Temporal does not
        know of it yet.
        """
        return refresh_for_workflow_task(self._streak).has_begun

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

    async def run(self, node: Node, state: NodeState, attempt: AttemptInput) -> Any:
        """Run an attempt inside the engine and return its result. Raise FailureError as an ordinary attempt does."""
        streak = refresh_for_workflow_task(self._streak)
        begin_by = streak.begin_by(workflow.info().task_timeout.total_seconds())
        self.nodes.add(node.index)
        try:
            return await workflow.execute_local_activity(
                node.io.fn if node.is_function else INLINE_ATTEMPT,
                {**without_defaults(attempt), "begin_by": begin_by},
                result_type=RawValue,
                activity_id=f"{node.node_id}.{state.epoch}",
                schedule_to_close_timeout=timedelta(seconds=streak.start(_now())),
                retry_policy=_ONCE,
                cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                summary=(attempt_summary if node.is_function else inline_summary)(node, state),
            )
        finally:
            self.nodes.discard(node.index)


def local_attempts_of(
    settings: Settings, scheduler: Scheduler, streak: Streak, *, is_only_running_node: Callable[[], bool]
) -> LocalAttempts | None:
    """Return the local attempts of a task; None if no node of its graph can run inside the engine."""
    if not any(_has_local_activity(node, settings) for node in scheduler.nodes):
        return None
    return LocalAttempts(settings, scheduler.streams, streak, is_only_running_node=is_only_running_node)


def _has_local_activity(node: Node, settings: Settings) -> bool:
    return node.io.fn in settings.local_functions if node.is_function else node.type in settings.inline_roles


def is_local_function(node: Node, state: NodeState, *, functions: Collection[str]) -> bool:
    """Return whether a node calls one of the built-in `functions`, which may run inside the engine."""
    return node.is_function and node.io.fn in functions and not state.ordinary


def is_inline(node: Node, state: NodeState, *, roles: Collection[str], streams: Streams) -> bool:
    """Return whether attempts of a node may run inside the engine, which hosts `roles`.

    A node that pulls or streams waits for other nodes, and one with `map` may have many batches. A node on
    which others stream must start them while it runs, and a node that fell back before is too slow, or its
    engine does not host the role.
    """
    return (
        node.type in roles
        and not node.is_function
        and not state.ordinary
        and not node.pulls
        and node.map is None
        and not node.streams_from
        and node.index not in streams.children
    )


class Streak:
    """The local activities that follow each other in a workflow task, and what must wait for their end."""

    def __init__(self) -> None:
        self._workflow_task = -1
        """Length of the history in the workflow task to which the other fields apply."""
        self._entered_at = 0.0
        """Time at which the workflow task began, by the server's clock."""
        self._began_at: float | None = None
        """Time at which the streak began; None without one."""
        self._ordinary = False
        """Whether a command for an ordinary activity waits for the end of the workflow task, or is about to."""

    def enter(self, workflow_task: int, now: float) -> None:
        """Set the current workflow task. A new one begins without a streak.

        Call this before the first local activity of each workflow task, because that one changes the workflow's time.
        """
        if workflow_task != self._workflow_task:
            self._workflow_task, self._entered_at = workflow_task, now
            self._began_at, self._ordinary = None, False

    def begin_by(self, task_timeout_sec: float) -> float:
        """Return the time after which no attempt may begin. The server's timeout of a workflow task limits it."""
        return self._entered_at + min(MAX_BEGIN_SEC, task_timeout_sec / 2)

    def yield_to_ordinary(self) -> None:
        """Start no further local activity in this workflow task, because it would delay an ordinary activity."""
        self._ordinary = True

    @property
    def delays_ordinary(self) -> bool:
        """Whether a local activity that starts now would delay an ordinary one."""
        return self._ordinary

    @property
    def has_begun(self) -> bool:
        """Whether a local activity has started in the workflow task."""
        return self._began_at is not None

    def is_over(self, now: float) -> bool:
        """Return whether the streak is so old that the next attempt must wait for the next workflow task."""
        return self._began_at is not None and now - self._began_at >= MAX_START_SEC

    def start(self, now: float) -> float:
        """Count a local activity that starts now. Return the seconds after which it times out."""
        if self._began_at is None:
            self._began_at = now
        return MAX_END_SEC - (now - self._began_at)


def refresh_for_workflow_task(streak: Streak) -> Streak:
    """Return `streak` for the current workflow task (an activation of the workflow by the server)."""
    streak.enter(workflow.info().get_current_history_length(), _now())
    return streak


def _now() -> float:
    return workflow.now().timestamp()


def fall_back(state: NodeState, error: FailureError, failure: AttemptFailure) -> AttemptFailure:
    """Return the failure of a local attempt, and note in `state` whether the node stays ordinary.

    It does if the engine could not run the attempt to its end or has another version of the handler than the task, or
    if another attempt has the epoch: only the server's
    acceptance of an ordinary attempt shows which of two engines still runs the workflow.
    """
    cannot_run = not is_cancelled_exception(error) and not is_reported(error)
    replaced = failure.kind in {FailureKind.LOSS, FailureKind.EPOCH_TAKEN}
    state.ordinary = cannot_run or replaced or bool(failure.pinned)
    return _FALLBACK if cannot_run else failure


def is_reported(error: FailureError) -> bool:
    """Return whether a worker or engine of FlowKit reported the error; otherwise, it comes from another component."""
    return _report(error) is not None


def _report(error: FailureError) -> dict[Any, Any] | None:
    cause = cause_of(error)
    return find_report(cause.details) if isinstance(cause, ApplicationError) else None
