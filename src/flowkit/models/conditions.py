"""What the workflow and the activity that evaluates conditions exchange."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from pydantic import dataclasses as wire

from flowkit.limits import CONDITIONS_SEC


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConditions:
    """Input of `evaluate_conditions`. Default values are not sent (see `without_defaults`)."""

    task_id: str
    texts: list[str]
    """The expressions, each once."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """What an expression can read of nodes, packed; empty if none does. The task document may be older.

    `status` is a column with the statuses of all nodes. `error_codes` are the reason codes of failed nodes: pairs of a
    code and the indexes of its nodes.
    """
    seconds: float = CONDITIONS_SEC
    """Most time that the evaluation may take."""
    deployment: str = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ConditionResults:
    """Result of `evaluate_conditions`, in the order of the input."""

    results: list[bool | str]
    """The result of each expression. A text says why the expression cannot be evaluated."""
