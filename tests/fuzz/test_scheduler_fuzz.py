"""The scheduler compared with an independent model on random graphs with random orders of events.

`make fuzz MINUTES=10` runs longer, and `SEED=n` repeats a run.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.fuzz import adapter
from tests.fuzz.adapter import SUPPORTED
from tests.fuzz.budget import (
    ADMISSION_SHARE,
    FLOWS_SHARE,
    GRAPHS,
    MINUTES,
    SHARDS_SHARE,
    SLOTS_SHARE,
    chosen_seed,
    first_of,
    only_in_fuzz,
    show,
)
from tests.fuzz.campaign import campaign, plan_of
from tests.fuzz.wiring import wiring_of
from tests.unit.property_examples import examples

from flowkit.models import FanIn, NodeStatus, SkipReason
from flowkit.workflows import deadlines
from flowkit.workflows.scheduling import conditions, gates, routing, scheduler, streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.models import Node

SEED = 1
PLACES = (
    adapter,
    conditions.Conditions,
    deadlines.Deadlines,
    gates,
    routing,
    scheduler,
    streams.Streams,
    deadlines.DeadlineTimer,
)
"""Where the rules are that the tests make wrong."""


@pytest.mark.slow
def test_scheduler_matches_the_model_on_the_same_graphs_each_time() -> None:
    figures = campaign(SEED, graphs=examples(600))
    assert set(figures.statuses) == {"finished", "failed", "cancelled"}


@only_in_fuzz
@pytest.mark.timeout(MINUTES * 60 * 8 + GRAPHS / 10 + 120)
def test_scheduler_matches_the_model_on_new_graphs_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    seed = chosen_seed()
    show(capsys, f"seed {seed}; `make fuzz SEED={seed}` repeats the graphs and events")
    figures = campaign(
        seed,
        seconds=60 * MINUTES * (1 - SLOTS_SHARE - SHARDS_SHARE - FLOWS_SHARE - ADMISSION_SHARE),
        graphs=GRAPHS,
    )
    show(capsys, f"seed {seed}: {figures}")


def test_same_seed_gives_the_same_graphs() -> None:
    assert [plan_of(SEED, number) for number in range(50)] == [plan_of(SEED, number) for number in range(50)]


def test_random_graphs_cover_every_feature() -> None:
    wirings = [wiring_of(plan_of(SEED, number)) for number in range(300)]
    steps = [step for wiring in wirings for step in wiring.steps.values()]
    assert {"all", "any", "all_done", "count:1", "count:2", "count:3"} <= {step.fan_in for step in steps}
    assert any(len(above) > 1 for wiring in wirings for above in wiring.routers.values())
    assert any(wiring.unreachable for wiring in wirings)
    assert any(
        wiring.steps[name].on_success and not wiring.success[name]
        for wiring in wirings
        for name in wiring.steps
    )
    assert any(wiring.gates[name] and wiring.routers[name] for wiring in wirings for name in wiring.steps)
    used = {
        field.name for step in steps for field in fields(step) if getattr(step, field.name) != field.default
    }
    features = (SUPPORTED.streaming, SUPPORTED.conditions, SUPPORTED.deadlines)
    assert ("first_batch" in used, "when" in used, "deadline" in used) == features
    assert any(wiring.plan.deadline for wiring in wirings)


def always_closed(right: Callable[..., Any]) -> Callable[..., Any]:
    """A parent that was skipped by choice closes a gate with the mode `all`."""
    return lambda state: state.status is not NodeStatus.FINISHED


def weakest(right: Callable[..., Any]) -> Callable[..., Any]:
    """The last reason takes precedence."""
    return lambda left, other: other or left


def one_short(right: Callable[..., Any]) -> Callable[..., Any]:
    """A gate with the mode `count` opens one parent too early."""

    def is_open(node: Node, gate: object) -> Any:
        count = FanIn(mode="count", count=node.fan_in.count - 1)
        return right(replace(node, fan_in=count) if node.fan_in.count > 1 else node, gate)

    return is_open


def routes_cancels(right: Callable[..., Any]) -> Callable[..., Any]:
    """A cancel starts the targets of a failure."""
    return lambda router, state: (
        router.on_failure if state.status is NodeStatus.CANCELLED else right(router, state)
    )


def own_reason(right: Callable[..., Any]) -> Callable[..., Any]:
    """A routed failure passes on `upstream_failed`."""
    return lambda node, status, reason: (
        SkipReason.UPSTREAM_FAILED if status is NodeStatus.FAILED else right(node, status, reason)
    )


def never(right: Callable[..., Any]) -> Callable[..., Any]:
    """A node that a batch has started never fails with its parents."""
    return lambda *rest: False


def always(right: Callable[..., Any]) -> Callable[..., Any]:
    """Every condition of an edge is true."""
    return lambda *rest: True


def forgetful(right: Callable[..., Any]) -> Callable[..., Any]:
    """Continue-as-new forgets which nodes have stored a batch."""
    return lambda encoded: [replace(state, streamed=False) for state in right(encoded)]


def fresh_deadlines(right: Callable[..., Any]) -> Callable[..., Any]:
    """Continue-as-new begins the deadlines of nodes again."""
    return lambda encoded: [replace(state, deadline_at=None) for state in right(encoded)]


def keeps_timer(right: Callable[..., Any]) -> Callable[..., Any]:
    """A timer stays armed for a later deadline than the earliest one."""
    return lambda limits: None if limits._timer else right(limits)


def first_alone(right: Callable[..., Any]) -> Callable[..., Any]:
    """Only one of the nodes fails that have exceeded their deadlines together."""
    return lambda limits, now: right(limits, now)[:1]


def without_task(right: Callable[..., Any]) -> Callable[..., Any]:
    """The deadline of the task has no timer."""

    def next_due(limits: object) -> Any:
        due = right(limits)
        return None if due and due[1] == "the task" else due

    return next_due


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    first_of(
        [
            ("inherited_reason", own_reason),
            ("is_open", one_short),
            ("closes_all_gate", always_closed),
            ("higher_precedence", weakest),
            ("fired_targets", routes_cancels),
            ("fails_with_parents", never),
            ("passes", always),
            ("states_of", forgetful),
            ("states_of", fresh_deadlines),
            ("_arm", keeps_timer),
            ("pop_overdue", first_alone),
            ("next_due", without_task),
        ]
    ),
)
def test_wrong_rule_is_found_and_shown_with_a_small_graph(
    name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [place for place in PLACES if hasattr(place, name)]
    assert places, f"no module has {name}"
    for place in places:
        monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    with pytest.raises(AssertionError) as caught:
        campaign(SEED, graphs=1_000)
    small = str(caught.value).partition("a small graph that goes wrong:\n")[2]
    assert "Difference" in small
    assert small.count("name=") <= 6
