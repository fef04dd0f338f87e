"""What the workflow and the activity that evaluates conditions exchange."""

from __future__ import annotations

from dataclasses import field

from pydantic import dataclasses as wire


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class DueCondition:
    """A condition to evaluate: that of a node, or that of the edge from `parent` to the node."""

    node_id: str
    when: str
    parent: str | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What a condition can read of a node, as the workflow knows it. The task document may be older."""

    status: str
    error_code: str = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConditions:
    """Input of `evaluate_conditions`. Default values are not sent (see `without_defaults`)."""

    task_id: str
    conditions: list[DueCondition]
    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    """The nodes that the conditions may name, by id."""
    deployment: str = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ConditionResult:
    """The result of one condition. If it cannot be evaluated, `error` says why and `value` is None."""

    value: bool | None = None
    error: str = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ConditionResults:
    """Result of `evaluate_conditions`, in the order of the input."""

    results: list[ConditionResult]
