"""Draws the routes of random tasks, and says what the routes of a task mean for its nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.integration.chaos.plans import NodePlan

UPSTREAM_FAILED, ROUTING, CONDITION = "upstream_failed", "routing", "condition"


def with_routes(chance: random.Random, nodes: Sequence[NodePlan]) -> tuple[NodePlan, ...]:
    """Return the nodes, in half of the tasks with routes. They lead from earlier to later nodes."""
    if chance.random() < 0.5:
        return tuple(nodes)
    made = list(nodes)
    for place, router in enumerate(nodes[:-1]):
        if chance.random() < 0.3:
            on_success = _targets(chance, router, nodes[place + 1 :], among_parents=False)
            on_failure = _targets(chance, router, nodes[place + 1 :], among_parents=True)
            if any(router.node_id in each.parents for each in nodes):
                on_success = ()  # FlowKit ignores the list, because edges take precedence.
            made[place] = replace(router, on_success=on_success, on_failure=on_failure)
    return tuple(made)


def _targets(
    chance: random.Random, router: NodePlan, below: Sequence[NodePlan], *, among_parents: bool
) -> tuple[str, ...]:
    """Choose targets. `count:n` of a target might be too much for a gate that does not count the router."""
    allowed = [
        node.node_id
        for node in below
        if router.node_id not in node.parents or (among_parents and not node.fan_in.startswith("count"))
    ]
    return tuple(chance.sample(allowed, min(len(allowed), chance.choice([0, 0, 1, 2]))))


def routers_of(node: NodePlan, nodes: Sequence[NodePlan]) -> list[NodePlan]:
    """Return the nodes that can start this one."""
    return [each for each in nodes if node.node_id in (*each.on_success, *each.on_failure)]
