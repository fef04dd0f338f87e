"""Random tasks, drawn from a seed. The same seed and number give the same task in every process.

A node's id contains seed, number and place, so that a handler in any process finds the plan of its node (`node_plan`).
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from flowkit.errors import GraphError
from flowkit.graph.changes import change_problems
from flowkit.graph.validation import parse_graph
from tests.integration.chaos.conditions import ERROR
from tests.integration.chaos.gates import first_predictable, with_conditions, with_streams
from tests.integration.chaos.operated import (
    LargeDrawing,
    NativeOperatedDrawing,
    OperatedDrawing,
    with_gates,
    with_policy,
)
from tests.integration.chaos.plans import BUILT, JSON, READ, TAILS, Drawing, MixedDrawing, TaskPlan, as_typed
from tests.integration.chaos.routes import with_routes

if TYPE_CHECKING:
    from tests.integration.chaos.plans import NodePlan

_ID = re.compile(r"([a-z])(\d+)t(\d+)n(\d+)")
_DRAWINGS = {
    drawing.letter: drawing
    for drawing in (Drawing, MixedDrawing, OperatedDrawing, NativeOperatedDrawing, LargeDrawing)
}
_OPERATED_SHARE = 0.5
_MIXED_SHARE = 0.6
_GROWING_SHARE = 0.3


def task_plan(seed: int, number: int) -> TaskPlan:
    """Return the task with this number. Most tasks have external nodes, beside native and inline ones."""
    mixed = random.Random(f"{seed}-{number}-kind").random() < _MIXED_SHARE
    plan = drawn_task(seed, number, MixedDrawing if mixed else Drawing)
    if random.Random(f"{seed}-{number}-operated").random() < _OPERATED_SHARE:
        plan = operated_task(seed, number)
    chance = random.Random(f"{seed}-{number}-growth")
    return written(growing(plan, chance) if chance.random() < _GROWING_SHARE else plan)


def written(plan: TaskPlan) -> TaskPlan:
    """Return a task whose graph is written in any way. Programs create nodes after their parents."""
    way = random.Random(f"{plan.task_id} written").choice([JSON, READ, BUILT])
    order = tuple(range(len(plan.nodes))) if way == BUILT else plan.order
    return replace(plan, written=way, order=order)


def operated_task(seed: int, number: int) -> TaskPlan:
    """Return a task to which random actions are sent."""
    chance = random.Random(f"{seed}-{number}-policy")
    plan = drawn_task(seed, number, chance.choice([OperatedDrawing, NativeOperatedDrawing]))
    return with_policy(chance, plan)


def growing(plan: TaskPlan, chance: random.Random) -> TaskPlan:
    """Return a task that gets some of its nodes while it runs; the same task if the rules allow no such graph."""
    whole = replace(plan, order=tuple(range(len(plan.nodes))))
    sizes = [size for size in range(1, len(plan.nodes)) if _may_begin_with(whole, size)]
    return replace(whole, first=chance.choice(sizes)) if sizes else plan


def _may_begin_with(plan: TaskPlan, size: int) -> bool:
    """Return whether the other nodes can be added later.

    None of them may stream from the first ones, because such a node starts whether there is a batch or not,
    or fail by the condition of an edge, because its gate may close before.
    """
    first, later = {node.node_id for node in plan.nodes[:size]}, plan.nodes[size:]
    if any(node.streams or node.first_batch for node in later if first & {*node.parents}):
        return False
    if any(ERROR in dict(node.edge_when).values() for node in later):
        return False
    try:
        before = parse_graph(plan.cut(size).as_graph())
    except GraphError:
        return False
    added = replace(plan, first=size).added()
    return not [*change_problems(before, parse_graph(plan.as_graph()), added, ())]


@lru_cache(maxsize=4096)
def drawn_task(seed: int, number: int, drawing: type[Drawing]) -> TaskPlan:
    """Draw the task with this number."""
    chance = random.Random(f"{seed}-{number}")
    nodes: list[NodePlan] = []
    sizes: dict[str, int] = {}
    for place in range(chance.randint(drawing.fewest_nodes, drawing.most_nodes)):
        key = f"n{place}"
        node_id = f"{drawing.letter}{seed}t{number}{key}{chance.choice(TAILS)}"
        nodes.append(as_typed(drawing(chance, node_id, key, nodes, sizes).node()))
    operated = issubclass(drawing, OperatedDrawing)
    gates = random.Random(f"{seed}-{number}-gates")
    return TaskPlan(
        task_id=f"chaos-{seed}-{number}",
        nodes=with_gates(gates, tuple(nodes)) if operated else _with_gates(f"{seed}-{number}", tuple(nodes)),
        order=tuple(chance.sample(range(len(nodes)), len(nodes))),
        continues=chance.random() < 0.75,
        cancel_after=chance.uniform(0.1, 6.0) if chance.random() < 0.08 else None,
    )


def _with_gates(seed: str, nodes: tuple[NodePlan, ...]) -> tuple[NodePlan, ...]:
    """Return the nodes with routes, conditions and streaming edges whose effects do not depend on the order
    of events.
    """
    nodes = first_predictable(with_routes, random.Random(f"{seed}-routes"), nodes)
    nodes = first_predictable(with_conditions, random.Random(f"{seed}-conditions"), nodes)
    return with_streams(random.Random(f"{seed}-streams"), nodes)


def node_plan(node_id: str) -> NodePlan:
    """Return the plan of a node."""
    found = _ID.match(node_id)
    assert found is not None, f"{node_id!r} is no node of a random task"
    seed, number, place = map(int, found.groups()[1:])
    return drawn_task(seed, number, _DRAWINGS[found[1]]).nodes[place]
