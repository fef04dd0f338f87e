"""`explain_timeline` divides the time of random runs, and its gains hold when a model of them runs again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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
    list_waits,
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
            spans.append(
                AttemptSpan(
                    scheduled_at=scheduled, started_at=started, ended_at=at, part=part, first_batch_at=batch
                )
            )
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


# --- by hand ----------------------------------------------------------------------------------------------------------


def ran(name: str, *spans: AttemptSpan, **fields: Any) -> NodeTimeline:
    """Return the timeline of a node with these attempts."""
    return NodeTimeline(node_id=name, spans=spans, **fields)


def worked(since: float, until: float | None, **fields: Any) -> AttemptSpan:
    """Return an attempt that a worker has started at once."""
    return AttemptSpan(scheduled_at=since, started_at=since, ended_at=until, **fields)


def explained(*nodes: NodeTimeline, end: float, resets: tuple[float, ...] = ()) -> TimeReport:
    """Return the report of a task that began at 0, after a check of its parts."""
    task = TaskTimeline(began_at=0.0, ended_at=end, nodes=nodes, resets=resets)
    report = explain_timeline(task)
    check_parts(task, report)
    return report


def legs(report: TimeReport) -> list[tuple[str | None, float]]:
    """Return the nodes of the critical path, with the seconds of their legs."""
    return [(leg.node_id, leg.seconds) for leg in report.path]


def gains(report: TimeReport) -> dict[str, float]:
    """Return the gains by node."""
    return {each.node_id: each.gain for each in report.speed_ups}


def test_second_path_limits_what_a_faster_node_gains() -> None:
    report = explained(
        ran("slow", worked(0, 50)),
        ran("other", worked(0, 40)),
        ran("join", worked(50, 55), parents=(0, 1)),
        end=55,
    )
    assert legs(report) == [("slow", 50), ("join", 5)]
    assert gains(report) == {"slow": 10, "join": 5}


def test_slow_parent_that_a_gate_did_not_need_gains_up_to_the_parent_that_opened_it() -> None:
    report = explained(
        ran("fast", worked(0, 10)),
        ran("slow", worked(0, 12)),
        ran("child", worked(10, 30), parents=(0, 1), needed=1),
        end=30,
    )
    assert legs(report) == [("fast", 10), ("child", 20)]
    assert gains(report) == {"child": 18, "fast": 10, "slow": 10}


def test_reader_that_ends_after_its_source_is_held_by_it() -> None:
    source = ran("source", worked(0, 60, first_batch_at=5.0))
    reader = ran("reader", worked(5, 63), parents=(0,), streams_from=frozenset({0}), sources=(0,))
    report = explained(source, reader, end=63)
    assert legs(report) == [("source", 60), ("reader", 3)]
    assert gains(report) == {"source": 60, "reader": 3}


def test_held_failure_waits_for_people_until_an_action_starts_a_new_generation() -> None:
    hold = WaitSpan(part=TimePart.PEOPLE, since=10, until=40, keeps_open=True)
    failed = worked(0, 10, part=TimePart.FAILED_WORK)
    report = explained(
        ran("held", failed, worked(40, 45, resets=True), waits=(hold,)),
        ran("below", worked(45, 50), parents=(0,)),
        end=50,
        resets=(40,),
    )
    assert legs(report) == [("held", 45), ("below", 5)]
    assert (report.parts[TimePart.PEOPLE], report.parts[TimePart.FAILED_WORK]) == (30, 10)
    assert gains(report) == {"held": 5, "below": 5}, "the failure is over, and the person acted when they did"


def test_waits_of_nodes_are_those_of_the_explanation() -> None:
    """In the queue, for a retry, for a person before and after the failure; none before the gate, or while it works."""
    pause = WaitSpan(part=TimePart.PEOPLE, since=0, until=20)
    retry = WaitSpan(part=TimePart.RETRY_WAITS, since=30, until=40, keeps_open=True)
    nodes = (
        ran("a", worked(0, 10)),
        ran(
            "b",
            AttemptSpan(scheduled_at=20, started_at=22, ended_at=30, part=TimePart.FAILED_WORK),
            worked(40, 50),
            parents=(0,),
            waits=(pause, retry),
        ),
        ran("approval", parents=(1,), is_open=True, waits_as=TimePart.PEOPLE),
        ran("below", parents=(2,), is_open=True, waits=(WaitSpan(part=TimePart.SCHEDULED, since=0),)),
    )
    found = list_waits(TaskTimeline(began_at=0, ended_at=60, nodes=nodes))
    assert [(each.node_id, each.part.value, each.since, each.until) for each in found] == [
        ("b", "people", 10, 20),
        ("b", "queue", 20, 22),
        ("b", "retry_waits", 30, 40),
        ("approval", "people", 50, None),
    ]


def test_path_of_a_restarted_node_leads_through_what_ran_before_the_restart() -> None:
    report = explained(
        ran("a", worked(0, 10), worked(50, 60, resets=True)),
        ran("b", worked(10, 50, part=TimePart.FAILED_WORK), worked(60, 90, resets=True), parents=(0,)),
        end=90,
        resets=(50,),
    )
    assert legs(report) == [("a", 10), ("b", 40), ("a", 10), ("b", 30)]


def test_skipped_node_is_not_on_the_path_although_the_close_has_written_its_end() -> None:
    skipped = ran("skipped", parents=(0,), ended_at=100, is_finished=False)
    report = explained(ran("a", worked(0, 10)), skipped, ran("b", worked(0, 100)), end=100)
    assert legs(report) == [("b", 100)]


def test_open_task_is_held_by_the_node_that_has_been_open_for_longest() -> None:
    needs = WaitSpan(part=TimePart.SCHEDULED, since=0)
    report = explained(
        ran("a", worked(0, 10)),
        ran("waits", parents=(0,), is_open=True, waits=(needs,)),
        ran("later", worked(15, None), parents=(0,), is_open=True),
        ran("below", parents=(1,), is_open=True),
        end=30,
    )
    assert legs(report) == [("a", 10), ("waits", 20)]
    assert report.parts[TimePart.SCHEDULED] == 20


def test_time_without_any_node_belongs_to_the_database_and_temporal() -> None:
    assert explained(end=7).parts[TimePart.OTHER] == 7
    assert explained(end=0).path == ()


def test_each_leg_reads_only_the_limits_of_its_time() -> None:
    count = 400
    read: list[float] = []

    class Limit(WaitSpan):
        def __getattribute__(self, name: str) -> Any:
            if name == "since":
                read.append(0.0)
            return super().__getattribute__(name)

    limits = tuple(Limit(part=TimePart.SLOTS, since=at, until=at + 0.25) for at in range(count))
    nodes = [
        ran(str(at), worked(at + 0.25, at + 1), parents=(at - 1,) if at else (), limits=limits)
        for at in range(count)
    ]
    report = explain_timeline(TaskTimeline(began_at=0.0, ended_at=float(count), nodes=tuple(nodes)))
    assert report.parts[TimePart.SLOTS] == 0.25 * count
    assert len(read) < 10 * count


def test_path_through_a_long_chain_has_all_of_its_nodes() -> None:
    chain = [ran(f"n{at}", worked(at, at + 1), parents=(at - 1,) if at else ()) for at in range(2_000)]
    report = explained(*chain, end=2_000)
    assert len(report.path) == 2_000
    assert set(gains(report).values()) == {1}
