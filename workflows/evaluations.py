"""Let an activity evaluate the conditions that are due, and hand the results to the scheduler.

The conditions that become due in one activation form a group. Their results apply together, when all of them are known.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

from flowkit import reason_codes
from flowkit.graph.cel import NODES, find_names
from flowkit.graph.expressions import MAP_OVER
from flowkit.limits import CONDITIONS_SEC
from flowkit.models import (
    AttemptFailure,
    ConditionResults,
    EvaluateConditions,
    FailureKind,
    temporal_names,
)
from flowkit.workflows.display.summaries import conditions_summary
from flowkit.workflows.engine_calls import HEARTBEAT_TIMEOUT, call_engine
from flowkit.workflows.payloads import json_size, split_by_size, without_defaults
from flowkit.workflows.retry import note_failure
from flowkit.workflows.scheduling.conditions import facts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flowkit.models import Node, NodeState
    from flowkit.models.columns import Packed
    from flowkit.workflows.scheduling.conditions import DueCondition
    from flowkit.workflows.scheduling.scheduler import Scheduler

_PART_BYTES = 600_000
"""Largest expressions of one activity. Most groups fit into one.

The nodes that the expressions name, and their reason codes, add less than Temporal's limit of 2 MB leaves.
"""

_READ_SEC = 60.0
"""Time limit of an activity, in addition to the time that the evaluation may take."""


class NoResult(NamedTuple):
    """Why a condition has no result: the reason code and the error with which its node fails."""

    code: str
    error: str


Results = dict[str, bool | NoResult]
"""The results of expressions."""


def requests(
    scheduler: Scheduler, due: Iterable[DueCondition], task_id: str, deployment: str
) -> list[EvaluateConditions]:
    """Return the inputs of the activities that evaluate a group. They contain each expression once."""
    texts = list(dict.fromkeys(scheduler.text_of(each) for each in due))
    parts = list(split_by_size(texts, json_size, _PART_BYTES))
    return [
        EvaluateConditions(
            task_id=task_id,
            texts=part,
            nodes=_facts(scheduler, part),
            seconds=CONDITIONS_SEC / len(parts),
            deployment=deployment,
        )
        for part in parts
    ]


def _facts(scheduler: Scheduler, texts: Iterable[str]) -> Packed:
    """Return what these expressions can read of nodes. Each of them contains the ids of these nodes as text."""
    reading = [text for text in texts if NODES in text]
    names = dict.fromkeys(name for text in reading for name in find_names(text))
    index_of, states = scheduler.index_of, scheduler.states
    found = {name: states[index_of[name]] for name in names if name in index_of}
    return facts_of(found) if found else {}


def value_request(scheduler: Scheduler, node: Node, task_id: str, deployment: str) -> EvaluateConditions:
    """Return the input of the activity that evaluates the values by expression of a node."""
    state = scheduler.states[node.index]
    return EvaluateConditions(
        task_id=task_id,
        texts=_input_texts(node),
        nodes=_facts(scheduler, [text for _, text in node.expressions]),
        deployment=deployment,
        node_id=node.node_id,
        generation=state.generation,
        keeps=state.kept,
        map_over=node.map.over if node.map is not None else "",
        map_batch_size=node.map.batch_size if node.map is not None else 1,
    )


def _input_texts(node: Node) -> list[str]:
    """Return the expressions in the input of a node, each once."""
    return list(dict.fromkeys(text for path, text in node.expressions if path != MAP_OVER))


async def evaluate_values(request: EvaluateConditions) -> ConditionResults:
    """Let the activity evaluate and store the values of a node.

    Raise ApplicationError or CancelledError as its cause.
    """
    try:
        return await _evaluate(request, f"{request.node_id}: evaluate values by expression")
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise asyncio.CancelledError from None
        return ConditionResults(
            results=[_refused(error).error] * (len(request.texts) + bool(request.map_over))
        )


def value_failure(node: Node, state: NodeState, found: ConditionResults) -> AttemptFailure | None:
    """Return the failure of a node whose values cannot be evaluated, which names the paths; None if they are stored."""
    by_text = dict(zip(_input_texts(node), found.results, strict=False))
    results = {
        path: found.results[-1] if path == MAP_OVER else by_text[text] for path, text in node.expressions
    }
    problem = next((f"{path}: {result}" for path, result in results.items() if isinstance(result, str)), None)
    if problem is None:
        state.evaluated = True
        return None
    return AttemptFailure(
        kind=FailureKind.FAILURE, code=reason_codes.BAD_EXPRESSION, message=problem, permanent=True
    )


async def _evaluate(part: EvaluateConditions, summary: str) -> ConditionResults:
    """Return the results of conditions.

    Waits while MongoDB is unavailable. Raise ActivityError if it rejects the read.
    """
    results: ConditionResults = await call_engine(
        temporal_names.EVALUATE_CONDITIONS,
        without_defaults(part),
        ConditionResults,
        summary=summary,
        time_limit=timedelta(seconds=_READ_SEC + part.seconds),
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
    )
    return results


def results_of(request: EvaluateConditions, found: ConditionResults) -> Results:
    """Return the results of one part of a group."""
    pairs = zip(request.texts, found.results, strict=True)
    return {
        text: NoResult(reason_codes.BAD_CONDITION, result) if isinstance(result, str) else result
        for text, result in pairs
    }


def apply_results(
    scheduler: Scheduler, group: Iterable[DueCondition], results: Mapping[str, bool | NoResult]
) -> None:
    """Hand the results of a group to the scheduler.

    The nodes that still wait for a condition without a result fail together, so that none of them is skipped because
    of another one. Then the other results take effect, as far as they still matter.
    """
    awaited = [(due, results[scheduler.text_of(due)]) for due in group if scheduler.awaits(due)]
    failed: set[int] = set()
    for due, result in awaited:
        if isinstance(result, NoResult) and due.node not in failed:
            failed.add(due.node)
            note_failure(scheduler.states[due.node], result.code, _place(scheduler, due) + result.error)
    scheduler.fail(sorted(failed))
    scheduler.decide({due: result for due, result in awaited if isinstance(result, bool)})


def _place(scheduler: Scheduler, due: DueCondition) -> str:
    return "" if due.parent is None else f"edge from {scheduler.nodes[due.parent].node_id!r}: "


class ConditionEvaluations:
    """The evaluations of a task that are in progress, and results that the main loop has not yet processed."""

    def __init__(self, scheduler: Scheduler, deployment: str) -> None:
        self._scheduler = scheduler
        self._deployment = deployment
        self._running: set[asyncio.Task[None]] = set()
        self._groups: list[tuple[Sequence[DueCondition], list[int], Results]] = []
        """Groups whose results are known, with the rounds in which their conditions became due."""
        self._error: Exception | None = None
        """An unexpected error. It fails the workflow task, so that Temporal shows it."""
        self.has_events = False
        """Whether there is a result or an error, so that the main loop must call `process_events`."""

    @property
    def is_idle(self) -> bool:
        """Whether no evaluation is in progress and no result waits for the main loop."""
        return not self._running and not self._groups

    def start(self, group: Sequence[DueCondition]) -> None:
        """Start to evaluate these conditions together."""
        if group:
            parts = requests(self._scheduler, group, workflow.info().workflow_id, self._deployment)
            running = asyncio.create_task(self._evaluate(group, parts))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _evaluate(self, group: Sequence[DueCondition], parts: Sequence[EvaluateConditions]) -> None:
        results: Results = {}
        rounds = [self._scheduler.rounds[due.node] for due in group]
        summary = conditions_summary(self._scheduler.nodes[due.node].node_id for due in group)
        for part in parts:
            try:
                results |= results_of(part, await _evaluate(part, summary))
            except ActivityError as error:
                if is_cancelled_exception(error):
                    return
                results |= dict.fromkeys(part.texts, _refused(error))
            except Exception as error:
                self._error, self.has_events = error, True
                raise
        self._groups.append((group, rounds, results))
        self.has_events = True

    def process_events(self) -> None:
        """Hand the results to the scheduler. Raise the unexpected error of an evaluation if there is one."""
        if self._error is not None:
            raise self._error
        self.has_events = False
        groups, self._groups = self._groups, []
        for group, rounds, results in groups:
            current = [
                due
                for due, round_ in zip(group, rounds, strict=True)
                if self._scheduler.rounds[due.node] == round_
            ]
            apply_results(self._scheduler, current, results)

    async def cancel(self) -> None:
        """Cancel the evaluations in progress, and wait until they have ended."""
        running = list(self._running)
        for each in running:
            each.cancel()
        for each in running:
            with suppress(asyncio.CancelledError):
                await each


def _refused(error: ActivityError) -> NoResult:
    """Return the result of each condition in an evaluation that can never succeed."""
    cause = error.cause
    code = cause.type if isinstance(cause, ApplicationError) else None
    return NoResult(code or reason_codes.BAD_CONDITION, str(cause or error))
