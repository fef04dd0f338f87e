"""What the edges and routes of a graph mean, from docs/graphs/branches.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.fuzz.plans import parents_in

if TYPE_CHECKING:
    from tests.fuzz.plans import Arrow, Plan, Step


@dataclass(frozen=True)
class Wiring:
    """The parts of a graph that are in effect."""

    plan: Plan
    steps: dict[str, Step]
    """The nodes by name, parents before children."""
    gates: dict[str, tuple[str, ...]]
    """For each node, the parents that its gate counts."""
    success: dict[str, frozenset[str]]
    failure: dict[str, frozenset[str]]
    routers: dict[str, tuple[str, ...]]
    """For each node, the routers that can start it."""
    unreachable: frozenset[str]
    """Nodes that only ignored lists could start."""
    arrows: dict[tuple[str, str], Arrow]
    """Entries of `edges_ex` by parent and child."""


def wiring_of(plan: Plan) -> Wiring:
    """Return the parts of a graph that are in effect."""
    steps = {step.name: step for step in plan.steps}
    parents = parents_in(plan)
    true_edges = {(a, b) for b, above in parents.items() for a in above if not _repeats(plan, steps[a], b)}
    with_children = {a for a, _ in true_edges}
    success = {
        name: frozenset(() if name in with_children else step.on_success) for name, step in steps.items()
    }
    failure = {name: frozenset(step.on_failure) for name, step in steps.items()}
    routers = {b: tuple(a for a in steps if b in success[a] | failure[a]) for b in steps}
    named = {b for step in plan.steps for b in (*step.on_success, *step.on_failure)}
    with_parents = {b for _, b in true_edges}
    return Wiring(
        plan=plan,
        steps=steps,
        gates={b: tuple(a for a in above if a not in routers[b]) for b, above in parents.items()},
        success=success,
        failure=failure,
        routers=routers,
        unreachable=frozenset(b for b in named if not routers[b] and b not in with_parents),
        arrows={(arrow.source, arrow.target): arrow for arrow in plan.arrows},
    )


def _repeats(plan: Plan, router: Step, child: str) -> bool:
    """Return whether a dependency on a router only repeats its route."""
    if child in router.on_failure:
        return True
    return child in router.on_success and (router.name, child) not in plan.pairs
