"""Random graphs as plain data, drawn from a seed. A condition is an oracle: the plan says how it will turn out.

The nodes of a plan are in a topological order: parents and routers come before their children and targets.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

TRUE, FALSE, ERROR = "true", "false", "error"
ALL, ANY, COUNT, ALL_DONE = "all", "any", "count", "all_done"
NODE_DEADLINES = (0.25, 1.0, 2.0, 2.0, 4.0, 8.0, 60.0)
TASK_DEADLINES = (0.5, 4.0, 8.0, 16.0, 60.0)
"""Seconds. An event takes about half a second on average."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One node."""

    name: str
    depends_on: tuple[str, ...] = ()
    fan_in: str = ALL
    """`all`, `any`, `count:n` or `all_done`."""
    first_batch: bool = False
    """Whether all edges into the node stream."""
    function: bool = False
    """Whether the node is a coordinator function, which stores no batches."""
    allow_failure: bool = False
    on_success: tuple[str, ...] = ()
    on_failure: tuple[str, ...] = ()
    when: str | None = None
    """How the condition of the node will turn out; None if it has none."""
    deadline: float | None = None
    """Seconds from the opening of the gate."""


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """One entry of `edges_ex`."""

    source: str
    target: str
    streams: bool = False
    when: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One graph."""

    steps: tuple[Step, ...]
    edges: tuple[tuple[str, str], ...] = ()
    arrows: tuple[Arrow, ...] = ()
    continues: bool = False
    """Whether `on_node_failure` is `continue`."""
    order: tuple[str, ...] = ()
    """Names in the order in which the graph lists them."""
    deadline: float | None = None
    """Seconds from the opening of the task."""

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """Parent and child of every entry in `edges` and `edges_ex`."""
        return frozenset([*self.edges, *((arrow.source, arrow.target) for arrow in self.arrows)])


@dataclass(frozen=True, kw_only=True)
class Features:
    """Which features the graphs use."""

    routing: bool = True
    streaming: bool = False
    conditions: bool = False
    deadlines: bool = False


def parents_in(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the parents of each node: its `depends_on`, or else the sources of the edges that lead to it."""
    return {
        step.name: step.depends_on or tuple(sorted(a for a, b in plan.pairs if b == step.name))
        for step in plan.steps
    }


def drawn_plan(seed: str, features: Features, most_steps: int = 9) -> Plan:
    """Draw a graph."""
    return _Drawing(random.Random(seed), features, most_steps).plan()


class _Drawing:
    """Draws one graph. Each graph uses some of the features, so that all combinations occur."""

    def __init__(self, chance: random.Random, features: Features, most_steps: int) -> None:
        self._chance = chance
        self._names = [f"n{place}" for place in range(chance.randint(1, most_steps))]
        routing = features.routing and self._likely(0.6)
        self._streaming = features.streaming and self._likely(0.6)
        self._conditions = features.conditions and self._likely(0.5)
        self._deadlines = features.deadlines and self._likely(0.4)
        self._by_edges = self._likely(0.5)
        """Whether some nodes have their parents in edges instead of `depends_on`."""
        self._success = self._routes(0.25 if routing else 0.0)
        self._failure = self._routes(0.3 if routing else 0.0)
        self._without_edges = {name for name in self._names if self._success[name] and self._likely(0.75)}
        """Routers that are the parents of their targets at most, so that edges do not take precedence."""

    def _likely(self, share: float) -> bool:
        return self._chance.random() < share

    def plan(self) -> Plan:
        """Return the graph, without `count:n`, which depends on what the other fields mean."""
        parents = {name: self._parents(place) for place, name in enumerate(self._names)}
        wired = [name for name in self._names if self._by_edges and self._likely(0.6)]
        pairs = [(above, name) for name in wired for above in parents[name]]
        arrows = [self._arrow(*pair) for pair in pairs if self._likely(0.8)]
        arrows += [self._arrow(*pair) for pair in self._beside(parents, wired)]
        listed = {(arrow.source, arrow.target) for arrow in arrows}
        return Plan(
            steps=tuple(self._step(name, () if name in wired else parents[name]) for name in self._names),
            edges=tuple(pair for pair in pairs if pair not in listed or self._likely(0.1)),
            arrows=tuple(arrows),
            continues=self._likely(0.7),
            order=tuple(self._chance.sample(self._names, len(self._names))),
            deadline=self._chance.choice(TASK_DEADLINES) if self._deadlines and self._likely(0.3) else None,
        )

    def _beside(self, parents: dict[str, tuple[str, ...]], wired: list[str]) -> list[tuple[str, str]]:
        """Return parent and child of entries of `edges_ex` for nodes with `depends_on`."""
        dependent = [name for name in self._names if parents[name] and name not in wired and self._by_edges]
        named = [(above, name) for name in dependent for above in parents[name] if self._likely(0.4)]
        others = [(above, name) for name in dependent for above in self._names[: self._names.index(name)]]
        return named + [pair for pair in others if pair[0] not in parents[pair[1]] and self._likely(0.03)]

    def _parents(self, place: int) -> tuple[str, ...]:
        name = self._names[place]
        free = [
            above
            for above in self._names[:place]
            if above not in self._without_edges or (name in self._success[above] and self._likely(0.3))
        ]
        return tuple(self._chance.sample(free, min(len(free), self._chance.choice([0, 1, 1, 2, 2, 3, 4]))))

    def _routes(self, share: float) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(self._targets(place)) if self._likely(share) else ()
            for place, name in enumerate(self._names)
        }

    def _targets(self, place: int) -> list[str]:
        below = self._names[place + 1 :]
        return self._chance.sample(below, min(len(below), self._chance.choice([1, 1, 2, 3])))

    def _step(self, name: str, depends_on: tuple[str, ...]) -> Step:
        return Step(
            name=name,
            depends_on=depends_on,
            fan_in=self._chance.choice([ALL, ALL, ANY, COUNT, ALL_DONE]),
            first_batch=self._streaming and self._likely(0.3),
            function=self._likely(0.15),
            allow_failure=self._likely(0.3),
            on_success=self._success[name],
            on_failure=self._failure[name],
            when=self._verdict(0.3),
            deadline=self._chance.choice(NODE_DEADLINES) if self._deadlines and self._likely(0.5) else None,
        )

    def _arrow(self, source: str, target: str) -> Arrow:
        streams = self._streaming and self._likely(0.5)
        return Arrow(source=source, target=target, streams=streams, when=self._verdict(0.4))

    def _verdict(self, share: float) -> str | None:
        if not (self._conditions and self._likely(share)):
            return None
        return self._chance.choice([TRUE, TRUE, TRUE, FALSE, FALSE, ERROR])


def with_counts(plan: Plan, gate_parents: dict[str, int], chance: random.Random) -> Plan:
    """Return the graph with a number in each `count`, at most the number of parents that the gate counts."""

    def counted(step: Step) -> Step:
        if not step.fan_in.startswith(COUNT):
            return step
        most = gate_parents[step.name]
        return replace(step, fan_in=f"{COUNT}:{chance.randint(1, most)}" if most else ALL)

    return replace(plan, steps=tuple(counted(step) for step in plan.steps))
