"""`explain_timeline` divides the time of random runs, and its gains hold when a model of them runs again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from tests.unit.property_examples import examples

from flowkit.reading.explain import (
    AttemptSpan,
    NodeTimeline,
    TaskTimeline,
    TimePart,
    TimeReport,
    WaitSpan,
    explain_timeline,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNS = 200
BEGIN = 1_000.0


@dataclass(kw_only=True)
class ModelAttempt:
    """One attempt: what precedes it, and how long it waits and works."""

    wait: float = 0.0
    wait_part: TimePart = TimePart.RETRY_WAITS
    gap: float = 0.0
    """Time of the database and of Temporal before it is scheduled."""
    queue: float = 0.0
    work: float = 0.0
    lost: bool = False


@dataclass(kw_only=True)
class ModelNode:
    """A node of the model, and what it will do."""

    parents: list[int] = field(default_factory=list)
    routers: list[int] = field(default_factory=list)
    streams: set[int] = field(default_factory=set)
    needed: int | None = None
    attempts: list[ModelAttempt] = field(default_factory=list)
    batch_at: float = 0.0
    """After which part of the work of its first attempt it stores a batch."""
    decision: float | None = None
    """How long a person takes, if the node is an approval."""


def draw(chance: random.Random, *, streams: bool) -> list[ModelNode]:
    """Return the nodes of a random task. Kills, retries, slots, pauses and holds precede attempts."""
    nodes: list[ModelNode] = []
    for index in range(chance.randint(1, 12)):
        node = ModelNode(parents=sorted(chance.sample(range(index), min(index, chance.randint(0, 3)))))
        if index and chance.random() < 0.2:
            node.routers = [router for router in [chance.randrange(index)] if router not in node.parents]
        if len(node.parents) > 1 and chance.random() < 0.3:
            node.needed = chance.randint(1, len(node.parents) - 1)
        elif streams:
            node.streams = {each for each in node.parents if chance.random() < 0.4}
        node.batch_at = chance.random()
        if chance.random() < 0.1 and not node.streams:
            node.decision = chance.uniform(0, 50)
        node.attempts = [*draw_attempts(chance)]
        nodes.append(node)
    return nodes


def draw_attempts(chance: random.Random) -> Iterator[ModelAttempt]:
    """Yield the attempts of a node, of which only the last one finishes."""
    first = [TimePart.SLOTS, TimePart.PEOPLE, TimePart.SCHEDULED]
    count = 1 + (chance.random() < 0.4) + (chance.random() < 0.2)
    for number in range(count):
        parts = [TimePart.RETRY_WAITS, TimePart.PEOPLE, TimePart.SLOTS] if number else first
        yield ModelAttempt(
            wait=chance.choice([0.0, chance.uniform(0, 20)]),
            wait_part=chance.choice(parts),
            gap=chance.uniform(0, 0.2),
            queue=chance.choice([0.0, chance.uniform(0, 5)]),
            work=chance.choice([0.0, chance.uniform(0, 30)]),
            lost=number < count - 1,
        )


def run(nodes: list[ModelNode], cut: int | None = None) -> TaskTimeline:
    """Run the model; the attempts of node `cut` take no time."""
    seen: list[NodeTimeline] = []
    ends: list[float] = []
    batches: list[float] = []
    for index, node in enumerate(nodes):
        at = max([BEGIN, *opened_at(node, ends, batches)])
        spans: list[AttemptSpan] = []
        waits: list[WaitSpan] = []
        batches.append(at)
        if node.decision is not None:
            at += node.decision
        for attempt in node.attempts if node.decision is None else ():
            waits.append(WaitSpan(part=attempt.wait_part, since=at, until=at + attempt.wait))
            scheduled = at + attempt.wait + attempt.gap
            started = scheduled + attempt.queue
            work = 0.0 if index == cut else attempt.work
            reads = [] if attempt.lost else [ends[each] for each in node.streams]
            at = max([started, *reads]) + work
            batch = started + work * node.batch_at
            part = TimePart.FAILED_WORK if attempt.lost else TimePart.WORK
            times = {"scheduled_at": scheduled, "started_at": started, "ended_at": at}
            spans.append(AttemptSpan(part=part, first_batch_at=batch, **times))
        batches[index] = spans[0].first_batch_at or at if spans else at
        ends.append(at)
        seen.append(
            NodeTimeline(
                node_id=f"n{index}",
                parents=tuple(node.parents),
                routers=tuple(node.routers),
                streams_from=frozenset(node.streams),
                sources=tuple(node.streams),
                needed=node.needed,
                spans=tuple(spans),
                waits=tuple(waits),
                ended_at=None if spans else at,
                waits_as=TimePart.PEOPLE if node.decision is not None else None,
            )
        )
    return TaskTimeline(began_at=BEGIN, ended_at=max(ends) + 0.1, nodes=tuple(seen))


def opened_at(node: ModelNode, ends: list[float], batches: list[float]) -> list[float]:
    """Return the times of which the latest opens the gate of a node."""
    parents = sorted(batches[each] if each in node.streams else ends[each] for each in node.parents)
    needed = len(parents) if node.needed is None else node.needed
    return [*parents[:needed], *(ends[each] for each in node.routers)]


def check_parts(task: TaskTimeline, report: TimeReport) -> None:
    """Check that the legs and their slices cover the time of the task without overlap, and the parts sum to it."""
    assert report.seconds == pytest.approx(max(0.0, task.ended_at - task.began_at))
    assert sum(report.parts.values()) == pytest.approx(report.seconds)
    assert all(seconds >= 0 for seconds in report.parts.values())
    slices = [piece for leg in report.path for piece in leg.slices]
    for pieces in (report.path, slices):
        bounds = [task.began_at, *(at for each in pieces for at in (each.since, each.until)), task.ended_at]
        assert bounds[::2] == bounds[1::2] if pieces else report.seconds == 0
        assert all(each.since < each.until for each in pieces)
    assert all(0 < each.gain <= each.work for each in report.speed_ups)
    assert [each.gain for each in report.speed_ups] == sorted(
        (each.gain for each in report.speed_ups), reverse=True
    )


def test_parts_sum_to_the_whole_and_gains_hold_in_a_replay() -> None:
    for seed in range(examples(RUNS)):
        check_replay(seed)


def check_replay(seed: int) -> None:
    """Check the report of a random task, and run the task again without the work of each of its nodes."""
    chance = random.Random(seed)
    nodes = draw(chance, streams=seed % 2 == 1)
    task = run(nodes)
    report = explain_timeline(task)
    check_parts(task, report)
    gained = {f"n{index}": task.ended_at - run(nodes, index).ended_at for index in range(len(nodes))}
    for each in report.speed_ups:
        assert each.gain >= gained[each.node_id] - 1e-6
    if not any(node.streams for node in nodes):
        best = sorted((gain for gain in gained.values() if gain >= 0.001), reverse=True)[:3]
        assert [each.gain for each in report.speed_ups] == pytest.approx(best)


def test_contradicting_clocks_make_nothing_negative() -> None:
    for seed in range(examples(RUNS)):
        check_skewed(seed)


def check_skewed(seed: int) -> None:
    """Check the parts of a random task of which the times contradict each other."""
    chance = random.Random(seed)
    task = run(draw(chance, streams=True))

    def skewed(at: float | None) -> float | None:
        return None if at is None or chance.random() < 0.1 else at + chance.gauss(0, 3)

    nodes = [
        replace(
            node,
            spans=tuple(
                replace(
                    span,
                    scheduled_at=span.scheduled_at + chance.gauss(0, 3),
                    started_at=skewed(span.started_at),
                    ended_at=skewed(span.ended_at),
                    resets=chance.random() < 0.2,
                    first_batch_at=skewed(span.first_batch_at),
                )
                for span in node.spans
            ),
            is_open=chance.random() < 0.2,
        )
        for node in task.nodes
    ]
    resets = tuple(task.began_at + chance.uniform(-5, 60) for _ in range(chance.randint(0, 3)))
    changed = replace(task, nodes=tuple(nodes), resets=resets, ended_at=task.ended_at - chance.uniform(0, 20))
    changed = replace(changed, ended_at=max(changed.began_at, changed.ended_at))
    check_parts(changed, explain_timeline(changed))
