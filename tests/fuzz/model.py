"""A model of a running task, written from docs/graphs. It shares no code with FlowKit.

The model keeps only facts: how nodes have ended, which have stored a batch, and which conditions have been evaluated.
It derives everything else from these facts and the graph, without any memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tests.fuzz.plans import ALL, ALL_DONE, ANY, COUNT, ERROR, FALSE, TRUE

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.fuzz.wiring import Wiring

FINISHED, FAILED, CANCELLED, SKIPPED = "finished", "failed", "cancelled", "skipped"
UPSTREAM, CONDITION, ROUTING, USER = "upstream_failed", "condition", "routing", "user"
BAD_CONDITION = "bad_condition"
_PRECEDENCE = (UPSTREAM, CONDITION, ROUTING, USER)
_BY_CHOICE = frozenset([CONDITION, ROUTING, USER])

Edge = tuple[str, str]
"""Parent and child. The condition of a node itself has the key `(name, name)`."""


class End(NamedTuple):
    """How a node has ended."""

    status: str
    reason: str | None = None
    """The skip reason, or the reason code of a failure that FlowKit itself causes."""


class Look(NamedTuple):
    """What a parent contributes to a gate: `open`, `batch`, `finished`, `tolerated` or `blocked`."""

    state: str
    reason: str | None = None
    """The skip reason that the parent passes on."""

    @property
    def satisfies(self) -> bool:
        """Whether the edge is satisfied."""
        return self.state in {"batch", "finished"}


OPEN, DONE = Look("open"), Look("finished")


@dataclass
class Facts:
    """Everything that has happened in a task."""

    ends: dict[str, End] = field(default_factory=dict)
    streamed: set[str] = field(default_factory=set)
    evaluated: set[Edge] = field(default_factory=set)


class Model:
    """The state of one task."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.facts = Facts()
        self._settle()

    def end(self, name: str, end: End) -> None:
        """End a node, and skip the nodes that can no longer start."""
        if name not in self.facts.ends:
            lost = end.status == FINISHED and self.lost_its_parents(name)
            self.facts.ends[name] = End(FAILED, UPSTREAM) if lost else end
            self._settle()

    def stream(self, name: str) -> None:
        """Note the first batch of a node that has started. The end of the node may overtake it."""
        self.facts.streamed.add(name)
        self._settle()

    def evaluate(self, group: Collection[Edge]) -> None:
        """Note the results of conditions that were evaluated together.

        All nodes that wait for a condition that cannot be evaluated fail together. Then the other results take effect
        that still matter. Results for which no node waits have no effect.
        """
        due = self.due()
        awaited = [each for each in group if each in due]
        errors = [each for each in awaited if self.verdict(each) == ERROR]
        self.facts.evaluated.update(errors)
        self.facts.ends.update({name: End(FAILED, BAD_CONDITION) for _, name in errors})
        self._settle()
        self.facts.evaluated |= self.due() & set(awaited)
        self._settle()

    def stop(self, started: Collection[str], reason: str) -> None:
        """Stop the task: nodes that had an attempt are cancelled, the others are skipped."""
        for name in self.wiring.steps:
            self.facts.ends.setdefault(name, End(CANCELLED) if name in started else End(SKIPPED, reason))

    def open(self) -> list[str]:
        """Return the nodes that have not ended."""
        return [name for name in self.wiring.steps if name not in self.facts.ends]

    def startable(self) -> set[str]:
        """Return the open nodes that may start, including those that have started."""
        return {name for name in self.open() if self._may_start(name)}

    def due(self) -> set[Edge]:
        """Return the conditions that must be evaluated now because a node waits for them."""
        waiting = [name for name in self.open() if not self._may_start(name)]
        edges = {(above, name) for name in waiting for above in self.wiring.gates[name]}
        edges = {
            edge for edge in edges if self._without_condition(edge).satisfies and not self._passes(edge[1])
        }
        own = {(name, name) for name in waiting if self._passes(name)}
        return {each for each in edges | own if self.verdict(each) and each not in self.facts.evaluated}

    def verdict(self, condition: Edge) -> str | None:
        """Return how a condition turns out; None if there is none."""
        above, name = condition
        if above == name:
            return self.wiring.steps[name].when
        arrow = self.wiring.arrows.get(condition)
        return arrow.when if arrow else None

    def _known(self, condition: Edge) -> str | None:
        return self.verdict(condition) if condition in self.facts.evaluated else None

    def _may_start(self, name: str) -> bool:
        return self._passes(name) and (not self.verdict((name, name)) or self._known((name, name)) == TRUE)

    def _passes(self, name: str) -> bool:
        """Return whether the gate of a node is open and a route leads to it, if it needs one."""
        return self.is_open(name, self.looks(name)) and (not self._is_target(name) or self._is_routed(name))

    def _settle(self) -> None:
        for name in self.wiring.steps:
            reasons = self._obstacles(name) if name not in self.facts.ends else []
            if reasons:
                self.facts.ends[name] = End(SKIPPED, min(reasons, key=_PRECEDENCE.index))

    def _obstacles(self, name: str) -> list[str]:
        """Return the reasons for which a node can never start; an empty list if it still can."""
        looks = self.looks(name)
        reasons = [] if self.can_open(name, looks) else [look.reason for look in looks if look.reason]
        if self._is_target(name) and not self._can_be_routed(name):
            passed = [self._passed_on(router) for router in self.wiring.routers[name]]
            reasons += [reason or ROUTING for reason in passed] or [ROUTING]
        if self._passes(name) and self._known((name, name)) == FALSE:
            reasons.append(CONDITION)
        return reasons

    # The gate: what each parent contributes, and how fan_in combines it.

    def looks(self, name: str) -> list[Look]:
        """Return what each parent contributes to the gate of a node."""
        return [self._with_condition((above, name)) for above in self.wiring.gates[name]]

    def _with_condition(self, edge: Edge) -> Look:
        look = self._without_condition(edge)
        if not look.satisfies or self.verdict(edge) is None or self._known(edge) == TRUE:
            return look
        return Look("tolerated", CONDITION) if self._known(edge) == FALSE else OPEN

    def _without_condition(self, edge: Edge) -> Look:
        if edge[0] in self.facts.streamed and self._streams(edge) and not self._ends_undecided(edge):
            return Look("batch")
        return self._by_end(edge[0])

    def _ends_undecided(self, edge: Edge) -> bool:
        """Return whether the gate waits for the end of the parent, which has failed before its condition was known."""
        end, undecided = self.facts.ends.get(edge[0]), self.verdict(edge) and edge not in self.facts.evaluated
        waits = self.wiring.steps[edge[1]].fan_in == ALL_DONE
        return waits and bool(undecided) and end is not None and end.status != FINISHED

    def _by_end(self, above: str) -> Look:
        end = self.facts.ends.get(above)
        if end is None:
            return OPEN
        if end.status == FINISHED:
            return DONE
        state = "tolerated" if end.status == SKIPPED and end.reason in _BY_CHOICE else "blocked"
        return Look(state, self._passed_on(above))

    def _passed_on(self, name: str) -> str | None:
        """Return the skip reason that an ended node passes on to the nodes below; None if it finished."""
        end = self.facts.ends.get(name)
        if end is None or end.status == FINISHED:
            return None
        if end.status == FAILED and self.wiring.failure[name]:
            return ROUTING
        return end.reason if end.reason in _BY_CHOICE else UPSTREAM

    def _streams(self, edge: Edge) -> bool:
        """Return whether a batch of the parent satisfies the edge."""
        step, arrow = self.wiring.steps[edge[1]], self.wiring.arrows.get(edge)
        if self.wiring.steps[edge[0]].function:
            return False
        if step.first_batch:
            return not step.fan_in.startswith(COUNT)
        return arrow is not None and arrow.streams

    def _may_start_early(self, name: str) -> bool:
        return any(self._streams((above, name)) for above in self.wiring.gates[name])

    def is_open(self, name: str, looks: list[Look]) -> bool:
        """Return whether the gate of a node is open if its parents contribute `looks`."""
        step = self.wiring.steps[name]
        satisfied = sum(look.satisfies for look in looks)
        if not looks:
            return True
        if step.fan_in == ALL:
            whole = satisfied > 0 and not any(look.state in {"open", "blocked"} for look in looks)
            return whole or (step.first_batch and any(look.state == "batch" for look in looks))
        if step.fan_in == ALL_DONE:
            whole = all(look.state != "open" for look in looks)
            return whole or (step.first_batch and any(look.state == "batch" for look in looks))
        return satisfied >= (1 if step.fan_in == ANY else int(step.fan_in.partition(":")[2]))

    def can_open(self, name: str, looks: list[Look]) -> bool:
        """Return whether the gate is open or can still open."""
        return self.is_open(name, [DONE if look == OPEN else look for look in looks])

    def lost_its_parents(self, name: str) -> bool:
        """Return whether a node that finishes must fail, because it needed a parent that has failed since it started.

        Only the ends of the parents count, and failures that are tolerated or routed do not. An open parent counts as
        one that finishes, unless it streams and must itself fail like this.
        """
        looks = [self._end_alone((above, name)) for above in self.wiring.gates[name]]
        return any(look.state == "blocked" for look in looks) and not self.can_open(name, looks)

    def _end_alone(self, edge: Edge) -> Look:
        above = edge[0]
        if self._known(edge) == FALSE:
            return Look("tolerated", CONDITION)
        look = self._by_end(above)
        fails = self.facts.ends.get(above, End("")).status == FAILED
        if look == OPEN and self._may_start_early(above) and self.lost_its_parents(above):
            fails, look = True, Look("blocked", UPSTREAM)
        tolerated = self.wiring.steps[above].allow_failure or bool(self.wiring.failure[above])
        if fails and tolerated:
            return Look("tolerated", ROUTING)
        return look

    # Routes.

    def _is_target(self, name: str) -> bool:
        return bool(self.wiring.routers[name]) or name in self.wiring.unreachable

    def _fires(self, router: str, name: str) -> bool:
        status = self.facts.ends.get(router, End("")).status
        lists = {FINISHED: self.wiring.success, FAILED: self.wiring.failure}
        return status in lists and name in lists[status][router]

    def _is_routed(self, name: str) -> bool:
        routers = self.wiring.routers[name]
        return all(each in self.facts.ends for each in routers) and self._can_be_routed(name)

    def _can_be_routed(self, name: str) -> bool:
        return any(
            each not in self.facts.ends or self._fires(each, name) for each in self.wiring.routers[name]
        )

    # Failures.

    def failed(self) -> list[str]:
        """Return the failed nodes."""
        return [name for name, end in self.facts.ends.items() if end.status == FAILED]

    def is_handled(self, name: str) -> bool | None:
        """Return whether the failure of a node is tolerated or handled; None if this is not decided."""
        return True if self.wiring.steps[name].allow_failure else self._is_remedied(name)

    def _is_remedied(self, name: str) -> bool | None:
        results = [self._remedies(each) for each in self.wiring.failure[name]]
        return True if True in results else None if None in results else False

    def _remedies(self, name: str) -> bool | None:
        """Return whether a remediator handles the failures of its routers."""
        end = self.facts.ends.get(name)
        if end is None:
            return None
        return self._is_remedied(name) if end.status == FAILED else end.status == FINISHED
