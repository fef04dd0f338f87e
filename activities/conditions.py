"""The engine's activity that evaluates conditions (`when`) of nodes and edges."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from temporalio import activity

from flowkit import temporal_names
from flowkit.activities.condition_process import TOO_LARGE
from flowkit.activities.stored_tasks import check_database
from flowkit.activities.tasks import heartbeats
from flowkit.adapters.tasks.condition_reads import ConditionReads
from flowkit.adapters.vars.sensitive import DefaultDetector
from flowkit.attempt.failures import cut, refusal
from flowkit.errors import BadCondition, FlowKitError, StoreRefused
from flowkit.graph import cel
from flowkit.graph.condition_values import explained, selected
from flowkit.graph.conditions import ERROR_CODE, STATS, STATUS
from flowkit.limits import CONDITION_SEC, CONDITION_VALUES_BYTES
from flowkit.models import ConditionResult, ConditionResults, EvaluateConditions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.core.loop_portal import LoopPortal
    from flowkit.graph.cel import Expression

_PROCESS_TIMEOUT_SEC = 60.0
"""Time for a process to start and to evaluate one condition. The processor time of the evaluation has its own limit."""

_INLINE_BYTES = 8_000
"""Largest values of a condition that is evaluated without a process of its own."""

_TOO_LONG = f"the evaluation takes more than {CONDITION_SEC:g} s"
_ENDS = {-signal.SIGABRT: TOO_LARGE, **({-signal.SIGXCPU: _TOO_LONG} if hasattr(signal, "SIGXCPU") else {})}
"""Why a process ended that a condition has ended, by exit code."""

Outcome = bool | str
"""The result of a condition, or why it cannot be evaluated."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """An expression with the values that it reads."""

    expression: Expression
    values: dict[str, Any]
    size: int

    @property
    def apart(self) -> bool:
        """Whether the evaluation may take long, so that a process evaluates the expression."""
        return self.expression.iterates or self.size > _INLINE_BYTES


class ConditionActivities:
    """The activity `evaluate_conditions` for one database."""

    def __init__(self, *, tasks: TaskStore, portal: LoopPortal) -> None:
        self._tasks = tasks
        self._reads = ConditionReads(tasks.database)
        self._portal = portal

    @property
    def all(self) -> list[Callable[..., Any]]:
        """Return the activities to register with a Temporal worker."""
        return [self.evaluate_conditions]

    @activity.defn(name=temporal_names.EVALUATE_CONDITIONS)
    async def evaluate_conditions(self, due: EvaluateConditions) -> ConditionResults:
        """Return the results of the conditions. Raise a retryable error while MongoDB does not respond."""
        texts = [condition.when for condition in due.conditions]
        async with heartbeats():
            try:
                values = await self._portal.run(self._read(due))
            except FlowKitError as error:
                raise refusal(error) from None
            return ConditionResults(results=await asyncio.to_thread(results_of, texts, values))

    async def _read(self, due: EvaluateConditions) -> dict[str, Any]:
        """Return the values of the variables. Statuses and codes come from the workflow."""
        await check_database(self._tasks, due.task_id, due.deployment)
        stored = await self._reads.values(due.task_id)
        if stored is None:
            raise StoreRefused(
                f"the document of task {due.task_id!r} does not exist; a condition needs its values"
            )
        nodes = {
            node_id: {
                STATUS: facts.status,
                ERROR_CODE: facts.error_code,
                STATS: stored.stats.get(node_id, {}),
            }
            for node_id, facts in due.nodes.items()
        }
        return {cel.PARAMS: stored.params, cel.VARS: stored.variables, cel.NODES: nodes}


def results_of(texts: Sequence[str], values: Mapping[str, Any]) -> list[ConditionResult]:
    """Evaluate expressions with these values of the variables. Takes time, so call it in a thread."""
    readings = [_reading(text, values) for text in texts]
    apart = [each for each in readings if isinstance(each, _Reading) and each.apart]
    slow = iter(_in_process(apart) if apart else [])
    return [_result(each, slow) if isinstance(each, _Reading) else each for each in readings]


def _reading(text: str, values: Mapping[str, Any]) -> _Reading | ConditionResult:
    """Return an expression with the values that it reads, or the result if there is nothing to evaluate."""
    try:
        expression = cel.compiled(text)
    except BadCondition as error:
        return ConditionResult(error=cut(str(error)))
    read = selected(values, expression.accesses)
    size = len(json.dumps(read))
    if size <= CONDITION_VALUES_BYTES:
        return _Reading(expression, read, size)
    problem = (
        f"its values have {size:,} bytes, more than {CONDITION_VALUES_BYTES:,}: read a smaller part of them"
    )
    return ConditionResult(error=cut(f"{problem}, in the condition {text}"))


def _result(reading: _Reading, slow: Any) -> ConditionResult:
    outcome: Outcome = next(slow) if reading.apart else _inline(reading)
    if isinstance(outcome, bool):
        return ConditionResult(value=outcome)
    is_secret = DefaultDetector().is_sensitive
    expression = reading.expression
    message = explained(outcome, expression.text, expression.accesses, reading.values, is_secret)
    return ConditionResult(error=cut(message))


def _inline(reading: _Reading) -> Outcome:
    try:
        return cel.evaluate(reading.expression, reading.values)
    except BadCondition as error:
        return str(error)


def _in_process(readings: Sequence[_Reading]) -> list[Outcome]:
    """Evaluate in a process. If a condition ends the process, start another one for the conditions after it."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(readings):
        ended = _run_process(readings[len(outcomes) :])
        outcomes += [json.loads(line) for line in ended.stdout.splitlines()]
        if len(outcomes) < len(readings):
            if ended.returncode not in _ENDS:
                raise RuntimeError(f"the process that evaluates conditions exited with {ended.returncode}")
            outcomes.append(_ENDS[ended.returncode])
    return outcomes


def _run_process(readings: Sequence[_Reading]) -> subprocess.CompletedProcess[bytes]:
    given = json.dumps([[each.expression.text, each.values] for each in readings])
    return subprocess.run(
        [sys.executable, "-m", "flowkit.activities.condition_process"],
        input=given.encode() + b"\n",
        stdout=subprocess.PIPE,
        timeout=_PROCESS_TIMEOUT_SEC * len(readings),
        check=False,
    )
