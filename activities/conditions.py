"""The engine's activity that evaluates conditions (`when`) of nodes and edges, and values by expression (`$cel`)."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from temporalio import activity

from flowkit.activities.evaluation_process import EvaluationProcess
from flowkit.activities.tasks import check_database, heartbeats
from flowkit.attempt.failures import cut, refusal
from flowkit.errors import AdapterError, BadCondition, FlowKitError, StoreRefused
from flowkit.graph import cel
from flowkit.graph.conditions import (
    ERROR_CODE,
    SCHEDULED_AT,
    STATS,
    STATUS,
    SecretRule,
    explain_failure,
    explain_value_failure,
    select_values,
)
from flowkit.graph.expressions import ItemBatches, divide
from flowkit.limits import (
    CONDITION_VALUES_BYTES,
    EXPRESSION_VALUE_BYTES,
    EXPRESSION_VALUES_BYTES,
    MAP_BYTES,
    REPORT_BYTES,
)
from flowkit.models import ConditionResults, EvaluateConditions, temporal_names
from flowkit.models.columns import unpack
from flowkit.text import truncate_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from flowkit.adapters.map_items import ItemSet
    from flowkit.adapters.tasks.store import StoredValues, TaskStore
    from flowkit.adapters.vars.sensitive import Detector
    from flowkit.core.loop_portal import LoopPortal
    from flowkit.graph.cel import Expression

_INLINE_BYTES = 8_000
"""Largest values of a condition that is evaluated without a process of its own."""

Outcome = bool | str
"""The result of a condition, or why it cannot be evaluated."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why a value by expression cannot be evaluated."""

    error: str


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
    """The activity `evaluate_conditions` for one database. `detector` decides which values its errors hide."""

    def __init__(self, *, tasks: TaskStore, portal: LoopPortal, detector: Detector) -> None:
        self._tasks = tasks
        self._portal = portal
        self._detector = detector

    @property
    def all(self) -> list[Callable[..., Any]]:
        """Return the activities to register with a Temporal worker."""
        return [self.evaluate_conditions]

    @activity.defn(name=temporal_names.EVALUATE_CONDITIONS)
    async def evaluate_conditions(self, due: EvaluateConditions) -> ConditionResults:
        """Return the results of the conditions. Raise a retryable error while MongoDB does not respond."""
        evaluation = Evaluation(due.seconds, SecretRule(self._looks_secret))
        async with heartbeats():
            try:
                stored = await self._portal.run(self._read(due))
                evaluation.rule = SecretRule(self._looks_secret, stored.secret_params)
                if due.node_id:
                    return ConditionResults(results=await self._store_values(evaluation, due, stored))
                return ConditionResults(results=await asyncio.to_thread(_evaluate, evaluation, due, stored))
            except FlowKitError as error:
                raise refusal(error) from None
            finally:
                evaluation.stop()

    async def _store_values(
        self, evaluation: Evaluation, due: EvaluateConditions, stored: StoredValues
    ) -> list[Outcome]:
        """Evaluate the values of a node, and store them if all are known. Return True or an error for each.

        The list of a node with `map` comes last. What the generation keeps is not evaluated again: its values, and also
        its items once any attempt has begun, because the uids of stored batches are the numbers of items.
        """
        values, items = await self._portal.run(self._tasks.values.stored(_key_of(due)))
        values = values if due.keeps else {}
        items = items if due.node_id in stored.begun else None
        texts = [text for text in due.texts if text not in values]
        over = due.map_over if items is None else ""
        evaluated = await asyncio.to_thread(
            evaluation.run_values,
            texts,
            _collect_values(due, stored),
            items=over,
            batch_size=due.map_batch_size,
        )
        by_text = dict(zip(texts, evaluated, strict=False))
        outcomes = [_outcome_of(by_text.get(text)) for text in due.texts]
        if due.map_over:
            outcomes.append(_outcome_of(evaluated[-1] if over else None))
        if evaluated and all(each is True for each in outcomes):
            values |= by_text
            size = len(json.dumps(values, ensure_ascii=False).encode())
            if size > EXPRESSION_VALUES_BYTES:
                problem = f"the values of all expressions have {size:,} bytes of JSON, more than"
                return [f"{problem} {EXPRESSION_VALUES_BYTES:,}: pass references" for _ in outcomes]
            items = await self._store_items(due, evaluated[-1]) if over else items
            scheduled = (activity.info().scheduled_time.timestamp(), activity.info().attempt)
            shown = await asyncio.to_thread(evaluation.list_shown, values, _collect_values(due, stored))
            await self._portal.run(
                self._tasks.values.put(_key_of(due), values, time.time(), scheduled, items, shown)
            )
        return outcomes

    async def _store_items(self, due: EvaluateConditions, items: ItemBatches) -> ItemSet:
        """Store the items of a node with `map`. They take effect with its other values."""
        info = activity.info()
        token = f"{info.workflow_run_id}.{info.activity_id}.{info.attempt}"
        return await self._portal.run(
            self._tasks.values.items.put(_key_of(due), token, items, due.map_batch_size, time.time())
        )

    async def _read(self, due: EvaluateConditions) -> StoredValues:
        await check_database(self._tasks, due.task_id, due.deployment)
        stored = await self._tasks.condition_values(due.task_id, with_nodes=_needs_nodes(due))
        if stored is None:
            raise StoreRefused(
                f"the document of task {due.task_id!r} does not exist; a condition needs its values"
            )
        return stored

    def _looks_secret(self, path: str, value: Any) -> bool:
        """Return whether the detector reports a value, or fails."""
        try:
            return self._detector.hits([(path, value)]) > 0
        except AdapterError:
            return True


def _needs_nodes(due: EvaluateConditions) -> bool:
    """Return whether the evaluation needs the stats of nodes, or whether an attempt of its node has begun."""
    return bool(due.map_over or (due.nodes and any(STATS in cel.find_names(text) for text in due.texts)))


def _key_of(due: EvaluateConditions) -> tuple[str, str, int]:
    return due.task_id, due.node_id, due.generation


def _outcome_of(value: object) -> Outcome:
    return value.error if isinstance(value, Unknown) else True


def _evaluate(evaluation: Evaluation, due: EvaluateConditions, stored: StoredValues) -> list[Outcome]:
    return evaluation.run(due.texts, _collect_values(due, stored))


def _collect_values(due: EvaluateConditions, stored: StoredValues) -> dict[str, Any]:
    """Return the values of the variables. Statuses and reason codes come from the workflow, all others from MongoDB."""
    values: dict[str, Any] = {
        cel.PARAMS: stored.params,
        cel.VARS: stored.variables,
        cel.NODES: {},
        cel.TASK: {SCHEDULED_AT: stored.scheduled_at},
    }
    if due.nodes:
        values[cel.NODES] = {
            node_id: {STATUS: status, ERROR_CODE: code or "", STATS: stored.stats.get(node_id, {})}
            for status, code, ids in unpack(due.nodes)
            for node_id in ids
        }
    return values


class Evaluation:
    """The evaluation of conditions that are due together. All of them have `seconds` from now on.

    `rule` decides which values the errors hide.
    """

    def __init__(self, seconds: float, rule: SecretRule) -> None:
        self._too_late = f"the conditions that are due together take more than {seconds:g} s"
        self._end = time.monotonic() + seconds
        self.rule = rule
        self._process = EvaluationProcess()

    def run(self, texts: Iterable[str], values: Mapping[str, Any]) -> list[Outcome]:
        """Return the results of expressions with these values of the variables. Takes time, so call it in a thread."""
        with closing(self._process):
            return _shorten([self._evaluate_text(text, values) for text in texts])

    def run_values(
        self, texts: Iterable[str], values: Mapping[str, Any], *, items: str = "", batch_size: int = 1
    ) -> list[Any]:
        """Return the values of expressions, as `run` does; Unknown in place of a value that cannot be evaluated.

        The value of the expression `items`, if given, comes last, as ItemBatches. It must be a list, and may be larger.
        """
        with closing(self._process):
            found = [self._evaluate_value(text, values, EXPRESSION_VALUE_BYTES) for text in texts]
            return [*found, self._evaluate_items(items, values, batch_size)] if items else found

    def list_shown(self, texts: Iterable[str], values: Mapping[str, Any]) -> list[str] | None:
        """Return the expressions whose values errors may show. None if it is unknown, because params have no schema."""
        if not self.rule.knows_params:
            return None
        compiled = ((text, cel.compile_value(text)) for text in texts)
        return [text for text, expression in compiled if not self.rule.holds(values, expression.accesses)]

    def _evaluate_items(self, text: str, values: Mapping[str, Any], batch_size: int) -> ItemBatches | Unknown:
        items = self._evaluate_value(text, values, MAP_BYTES, batch_size)
        if isinstance(items, list):
            return divide(items, batch_size)
        if isinstance(items, (ItemBatches, Unknown)):
            return items
        kinds = {dict: "an object", str: "a text", bool: "a truth value", type(None): "null"}
        return Unknown(cut(f"the expression gives {kinds.get(type(items), 'a number')}, not a list: {text}"))

    def stop(self) -> None:
        """Let `run`, on another thread, return soon. Its results are then not valid."""
        self._end = 0.0
        self._process.stop()

    def _evaluate_text(self, text: str, values: Mapping[str, Any]) -> Outcome:
        if time.monotonic() >= self._end:
            return cut(f"{self._too_late}, in the condition {text}")
        try:
            reading = _select_values(text, values)
        except BadCondition as error:
            return cut(str(error))
        outcome = self._evaluate_reading(reading)
        if isinstance(outcome, bool):
            return outcome
        return cut(explain_failure(outcome, text, reading.expression.accesses, reading.values, self.rule))

    def _evaluate_value(
        self, text: str, values: Mapping[str, Any], most_bytes: int, batch_size: int = 0
    ) -> Any:
        """Return the value of an expression, which may be ItemBatches in place of a list if there is a `batch_size`.

        Its error shows no secret that the expression reads.
        """
        try:
            if time.monotonic() >= self._end:
                raise BadCondition(f"{self._too_late}, in the expression {text}")
            reading = _select_values(text, values, by=cel.compile_value)
        except BadCondition as problem:
            return Unknown(cut(str(problem)))
        try:
            if not reading.apart:
                return cel.evaluate_value(reading.expression, reading.values, most_bytes)
            seconds = self._end - time.monotonic()
            found = self._process.evaluate_value(
                text, reading.values, seconds, most_bytes=most_bytes, batch_size=batch_size
            )
            if isinstance(found, dict):
                return ItemBatches(**found) if "batches" in found else found["value"]
            error = self._too_late if found is None else found
        except BadCondition as failed:
            error = str(failed)
        accesses = reading.expression.accesses
        return Unknown(cut(explain_value_failure(error, text, accesses, reading.values, self.rule)))

    def _evaluate_reading(self, reading: _Reading) -> Outcome:
        expression, values = reading.expression, reading.values
        if reading.apart:
            outcome = self._process.evaluate(expression.text, values, self._end - time.monotonic())
            return self._too_late if outcome is None else outcome
        try:
            return cel.evaluate(expression, values)
        except BadCondition as error:
            return str(error)


def _select_values(
    text: str, values: Mapping[str, Any], by: Callable[[str], Expression] = cel.compile_expression
) -> _Reading:
    """Return an expression with the values that it reads. Raise BadCondition if there is nothing to evaluate."""
    expression = by(text)
    read = select_values(values, expression.accesses)
    size = len(json.dumps(read))
    if size <= CONDITION_VALUES_BYTES:
        return _Reading(expression, read, size)
    problem = (
        f"its values have {size:,} bytes, more than {CONDITION_VALUES_BYTES:,}: read a smaller part of them"
    )
    raise BadCondition(
        f"{problem}, in the {'condition' if by is cel.compile_expression else 'expression'} {text}"
    )


def _shorten(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes, with shorter errors if thousands of them would be too large for the result of an
    activity.
    """
    errors = [len(outcome.encode()) for outcome in outcomes if isinstance(outcome, str)]
    if sum(errors) <= REPORT_BYTES:
        return outcomes
    most = REPORT_BYTES // len(errors)
    return [truncate_utf8(outcome, most) if isinstance(outcome, str) else outcome for outcome in outcomes]
