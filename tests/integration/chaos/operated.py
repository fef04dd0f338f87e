"""Draws the tasks to which random actions are sent: with approvals, delays, prerequisites, holds and all
other features.

The model does not predict how such a task ends. It says how each node ends, given the ends of the nodes
above it and the actions that the task has applied (`ledger`), so the effects may depend on the order of
events.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.integration.chaos.conditions import FALSE, TRUE
from tests.integration.chaos.model import gate_parents
from tests.integration.chaos.plans import (
    APPROVAL,
    DELAY,
    FINAL,
    HOLD_SEC,
    TOUCH,
    Call,
    Drawing,
    MixedDrawing,
    NodePlan,
)
from tests.integration.chaos.routes import with_routes

if TYPE_CHECKING:
    import random

    from tests.integration.chaos.plans import TaskPlan

APPROVAL_SEC = (3.0, 9.0)
DELAY_SEC = (0.2, 2.0)
PREREQUISITES = ("data:eu", "legal", "é/%")
POLICIES = ("continue", "continue", "continue", "", "hold", "finish_running")
"""Values of `on_node_failure`; empty for the default, which stops the task."""
_CONTINUES = "continue"


class OperatedDrawing(MixedDrawing):
    """Draws nodes of all kinds, without functions whose repetition shows."""

    letter = "o"
    fewest_nodes = 4

    def node(self) -> NodePlan:
        """Return a node that waits for a person, a time or a program, or that works."""
        drawn = self._chance.random()
        if drawn < 0.15:
            plan = self._waiting(APPROVAL)
        elif drawn < 0.22:
            plan = self._waiting(DELAY)
        else:
            plan = super().node()
        if self._chance.random() < 0.2:
            plan = replace(plan, prerequisites=(self._chance.choice(PREREQUISITES),))
        if not plan.kind and not plan.allow_failure and self._chance.random() < 0.5:
            plan = replace(plan, hold_sec=HOLD_SEC)
        return plan

    def _waiting(self, kind: str) -> NodePlan:
        parents = self._parents() if self._above else []
        return NodePlan(
            **self._own,
            kind=kind,
            parents=tuple(parents),
            fan_in=self._fan_in(parents),
            allow_failure=self._chance.random() < 0.5,
            wait_sec=self._chance.uniform(*(APPROVAL_SEC if kind == APPROVAL else DELAY_SEC)),
            approves=self._chance.random() < 0.5,
        )

    def _with_aside(self, plan: NodePlan) -> NodePlan:
        again = super()._with_aside(plan)
        failure, uids = plan.failure, [batch.uid for batch in plan.batches]
        fails = failure is not None and failure.at != FINAL
        if again.aside or plan.external or fails or not uids or self._chance.random() < 0.4:
            return again
        return replace(plan, aside=tuple(self._chance.sample(uids, min(len(uids), 2))))

    def _function(self) -> NodePlan:
        plan = super()._function()
        if plan.call is not None and plan.call.fn in {"vars.set", TOUCH}:
            return plan
        return replace(plan, call=Call(fn="noop"), failure=None)


class NativeOperatedDrawing(OperatedDrawing):
    """Draws such nodes without those that run on external workers, so that all actions may interrupt."""

    letter = "p"

    def _executor(self) -> dict[str, Any]:
        return Drawing._executor(self)


class LargeDrawing(NativeOperatedDrawing):
    """Draws such nodes for tasks of up to 500 of them."""

    letter = "q"
    fewest_nodes = 200
    most_nodes = 500


def with_gates(chance: random.Random, nodes: tuple[NodePlan, ...]) -> tuple[NodePlan, ...]:
    """Return the nodes with routes, conditions and streaming edges."""
    routed = with_routes(chance, nodes)
    return tuple(_with_gate(chance, node, routed) for node in routed)


def _with_gate(chance: random.Random, node: NodePlan, nodes: tuple[NodePlan, ...]) -> NodePlan:
    parents = gate_parents(node, nodes)
    conditions = tuple(
        (parent, chance.choice([TRUE, TRUE, FALSE])) for parent in parents if chance.random() < 0.15
    )
    verdict = chance.choice([TRUE, FALSE]) if chance.random() < 0.15 else ""
    node = replace(node, when=verdict, edge_when=conditions)
    stores = {each.node_id for each in nodes if not (each.call or each.kind)}
    if node.call or node.kind or node.needs_all_sources or not stores.issuperset(parents) or not parents:
        return node
    drawn = chance.random()
    if drawn < 0.2:
        return replace(node, first_batch=True)
    return replace(node, streams=tuple(parents)) if drawn < 0.4 else node


def with_policy(chance: random.Random, plan: TaskPlan) -> TaskPlan:
    """Return the task as one to which actions are sent, with any value of `on_node_failure`."""
    policy = chance.choice(POLICIES)
    continues = policy == _CONTINUES
    return replace(plan, operated=True, continues=continues, on_failure="" if continues else policy)
