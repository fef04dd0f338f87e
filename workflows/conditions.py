"""Let an activity evaluate the conditions that are due, and hand the results to the scheduler."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

from flowkit import reason_codes
from flowkit.models import ConditionResult, DueCondition, EvaluateConditions, NodeStatus
from flowkit.workflows.budget import json_size, split_by_size
from flowkit.workflows.document_activities import evaluate_conditions
from flowkit.workflows.retry import note_failure
from flowkit.workflows.scheduling.conditions import facts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.workflows.scheduling.conditions import Due
    from flowkit.workflows.scheduling.scheduler import Scheduler

_PART_BYTES = 100_000
"""Size of the conditions that one activity evaluates. Most groups fit into one part."""


def request(scheduler: Scheduler, due: Sequence[Due], task_id: str, deployment: str) -> EvaluateConditions:
    """Return the input of the activity: the conditions, and what the workflow knows of the nodes that they may name."""
    nodes, conditions = scheduler.nodes, [_condition(scheduler, each) for each in due]
    return EvaluateConditions(
        task_id=task_id,
        conditions=conditions,
        nodes=facts_of([condition.when for condition in conditions], nodes, scheduler.states),
        deployment=deployment,
    )


def _condition(scheduler: Scheduler, due: Due) -> DueCondition:
    node = scheduler.nodes[due.node]
    if due.parent is None:
        return DueCondition(node_id=node.node_id, when=node.when or "")
    parent = scheduler.nodes[due.parent].node_id
    return DueCondition(node_id=node.node_id, when=node.edge_when[parent], parent=parent)


def apply_result(scheduler: Scheduler, due: Due, result: ConditionResult, code: str) -> None:
    """Hand one result to the scheduler. A condition that cannot be evaluated fails its node permanently with `code`."""
    if result.value is not None:
        scheduler.decide(due, result=result.value)
    elif scheduler.awaits(due):
        edge = "" if due.parent is None else f"edge from {scheduler.nodes[due.parent].node_id!r}: "
        note_failure(scheduler.states[due.node], code, edge + result.error)
        scheduler.end(due.node, NodeStatus.FAILED)
        scheduler.changed.add(due.node)


class ConditionEvaluations:
    """The evaluations of a task that are in progress, and results that the main loop has not yet processed."""

    def __init__(self, scheduler: Scheduler, deployment: str) -> None:
        self._scheduler = scheduler
        self._deployment = deployment
        self._running: set[asyncio.Task[None]] = set()
        self._results: list[tuple[Due, ConditionResult, str]] = []
        self._error: Exception | None = None
        """An unexpected error. It fails the workflow task, so that Temporal shows it."""

    @property
    def is_idle(self) -> bool:
        """Whether no evaluation is in progress and no result waits for the main loop."""
        return not self._running and not self._results

    @property
    def has_events(self) -> bool:
        """Whether `process_events` has a result to process or an error to raise."""
        return bool(self._results) or self._error is not None

    def start(self, due: Sequence[Due]) -> None:
        """Start to evaluate these conditions together."""
        for part in split_by_size(due, self._size, _PART_BYTES):
            running = asyncio.create_task(self._evaluate(part))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    def _size(self, due: Due) -> int:
        condition = _condition(self._scheduler, due)
        return json_size([condition.node_id, condition.when, condition.parent])

    async def _evaluate(self, due: list[Due]) -> None:
        task_id = workflow.info().workflow_id
        try:
            found = await evaluate_conditions(request(self._scheduler, due, task_id, self._deployment))
            results = [
                (each, result, reason_codes.BAD_CONDITION)
                for each, result in zip(due, found.results, strict=True)
            ]
        except ActivityError as error:
            if is_cancelled_exception(error):
                return
            results = [(each, *_refused(error)) for each in due]
        except Exception as error:
            self._error = error
            raise
        self._results += results

    def process_events(self) -> None:
        """Hand the results to the scheduler, errors first. Raise the unexpected error of an evaluation if there is one."""
        if self._error is not None:
            raise self._error
        results, self._results = self._results, []
        for due, result, code in sorted(results, key=lambda each: each[1].value is not None):
            apply_result(self._scheduler, due, result, code)

    async def cancel(self) -> None:
        """Cancel the evaluations in progress, and wait until they have ended."""
        running = list(self._running)
        for each in running:
            each.cancel()
        for each in running:
            with suppress(asyncio.CancelledError):
                await each


def _refused(error: ActivityError) -> tuple[ConditionResult, str]:
    """Return the result of each condition in an evaluation that can never succeed."""
    cause = error.cause
    code = cause.type if isinstance(cause, ApplicationError) else None
    return ConditionResult(error=str(cause or error)), code or reason_codes.BAD_CONDITION
