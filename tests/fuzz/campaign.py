"""Runs many random tasks, and reduces one whose results are wrong to a small graph."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.fuzz.adapter import SUPPORTED
from tests.fuzz.plans import ALL, Plan, drawn_plan, with_counts
from tests.fuzz.play import Play
from tests.fuzz.wiring import wiring_of

from flowkit.errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fuzz.plans import Arrow, Features, Step

_TRIES = 60
"""How many orders of events to try with each smaller graph."""


@dataclass(kw_only=True)
class Figures:
    """What a campaign has played."""

    graphs: int = 0
    nodes: int = 0
    events: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        events = ", ".join(f"{count:,} {kind}" for kind, count in self.events.most_common())
        statuses = ", ".join(f"{count:,} {status}" for status, count in self.statuses.most_common())
        return (
            f"{self.graphs:,} graphs ({statuses}) with {self.nodes:,} nodes; "
            f"{self.events.total():,} events: {events}"
        )


def plan_of(seed: int, number: int, features: Features = SUPPORTED) -> Plan:
    """Return the graph with this number."""
    name = f"{seed}-{number}"
    plan = drawn_plan(name, features, most_steps=12 if (number + 1) % 50 else 40)
    gates = wiring_of(plan).gates
    return with_counts(plan, {step: len(above) for step, above in gates.items()}, random.Random(name))


def campaign(seed: int, *, seconds: float = 0, graphs: int = 0, features: Features = SUPPORTED) -> Figures:
    """Play this many random tasks, and further ones until they have used this much time of the processor.

    Raise an error with a small graph if one goes wrong.
    """
    figures, end = Figures(), time.process_time() + seconds
    while figures.graphs < graphs or time.process_time() < end:
        plan = plan_of(seed, figures.graphs, features)
        play = None
        try:
            play = Play(plan, random.Random(_events(seed, figures.graphs)))
            figures.statuses[play.run()] += 1
        except Exception as error:
            raise AssertionError(_report(seed, figures.graphs, plan, play, error)) from error
        figures.graphs += 1
        figures.nodes += len(plan.steps)
        figures.events += play.counts
    return figures


def _events(seed: int, number: int) -> str:
    """Return the seed of what happens in a task."""
    return f"{seed}-{number}-events"


def _report(seed: int, number: int, plan: Plan, play: Play | None, error: Exception) -> str:
    small, found = reduced(plan, _events(seed, number))
    return "\n".join(
        [
            f"seed {seed}, graph {number}: {error!r}",
            *(play.history if play else ()),
            "a small graph that goes wrong:",
            *(_shown(step) for step in small.steps),
            *(_shown(arrow) for arrow in small.arrows),
            f"edges {small.edges}, continues={small.continues}, order {small.order}, deadline {small.deadline}",
            found or "(the same error did not occur again)",
        ]
    )


def _shown(part: Step | Arrow) -> str:
    """Return the fields of a node or edge that are not the defaults."""
    fields = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    return ", ".join(f"{key}={value}" for key, value in fields.items() if value and value != ALL)


def reduced(plan: Plan, events: str) -> tuple[Plan, str | None]:
    """Return a smaller graph with which something goes wrong, and what does. `events` is a seed with which it does."""
    found = _failure(plan, events)
    smaller = True
    while smaller and found:
        smaller = False
        for candidate in _simpler(plan):
            if text := _failure(candidate, events):
                plan, found, smaller = candidate, text, True
                break
    return plan, found


def _failure(plan: Plan, events: str) -> str | None:
    """Return the events and the error of a play of this graph that goes wrong."""
    return next(filter(None, (_failure_of(plan, each) for each in (events, *range(_TRIES)))), None)


def _failure_of(plan: Plan, events: int | str) -> str | None:
    play = None
    try:
        play = Play(plan, random.Random(events))
        play.run()
    except GraphError:
        return None
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        return "\n".join([*(play.history if play else ()), repr(error)])
    return None


def _simpler(plan: Plan) -> Iterator[Plan]:
    for step in plan.steps:
        yield _without(plan, step.name)
    for place, step in enumerate(plan.steps):
        for other in _simpler_steps(step):
            yield replace(plan, steps=(*plan.steps[:place], other, *plan.steps[place + 1 :]))
    if plan.deadline is not None:
        yield replace(plan, deadline=None)
    for pair in plan.edges:
        yield replace(plan, edges=tuple(each for each in plan.edges if each != pair))
    for arrow in plan.arrows:
        others = tuple(each for each in plan.arrows if each != arrow)
        yield replace(plan, arrows=others)
        if arrow.when or arrow.streams:
            yield replace(plan, arrows=others, edges=(*plan.edges, (arrow.source, arrow.target)))


def _simpler_steps(step: Step) -> Iterator[Step]:
    yield from (
        other
        for other in (
            replace(step, fan_in=ALL),
            replace(step, first_batch=False),
            replace(step, allow_failure=False),
            replace(step, when=None),
            replace(step, deadline=None),
        )
        if other != step
    )
    for name in {*step.depends_on, *step.on_success, *step.on_failure}:
        for key in ("depends_on", "on_success", "on_failure"):
            names = tuple(each for each in getattr(step, key) if each != name)
            if names != getattr(step, key):
                yield _with_names(step, key, names)


def _with_names(step: Step, key: str, names: tuple[str, ...]) -> Step:
    changed: dict[str, Any] = {key: names}
    return replace(step, **changed)


def _without(plan: Plan, name: str) -> Plan:
    def rest(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(each for each in names if each != name)

    return Plan(
        steps=tuple(
            replace(
                step,
                depends_on=rest(step.depends_on),
                on_success=rest(step.on_success),
                on_failure=rest(step.on_failure),
            )
            for step in plan.steps
            if step.name != name
        ),
        edges=tuple(pair for pair in plan.edges if name not in pair),
        arrows=tuple(arrow for arrow in plan.arrows if name not in (arrow.source, arrow.target)),
        continues=plan.continues,
        order=rest(plan.order),
        deadline=plan.deadline,
    )
