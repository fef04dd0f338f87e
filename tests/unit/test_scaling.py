"""No operation on a task takes time that grows faster than its nodes.

A workflow task may take two seconds, and an operation is one synchronous step of it. A step that is
quadratic in the nodes stops a large task for ever: its workflow task fails, and is tried again.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.processor_time import growth_problem

from flowkit.actions.changed_nodes import changeable
from flowkit.actions.plans import Plan, TaskSnapshot, result_of
from flowkit.actions.preconditions import state_of
from flowkit.actions.records import Action, ChangeGraph, Pause, Resume, RetryNode, Satisfy, SkipNode
from flowkit.actions.reruns import choose_reruns, plan_rerun
from flowkit.actions.table import plan
from flowkit.graph.changes import change_graph
from flowkit.graph.validation import normalizing
from flowkit.limits import ACTION_SCOPES
from flowkit.models import (
    FirstBatch,
    NodeState,
    NodeStatus,
    RecordTask,
    Settings,
    SilenceReport,
    SilentAttempt,
    TaskStatus,
)
from flowkit.models.actions import ActionState, PausedScope
from flowkit.workflows.deadlines import Deadlines, SilentAttempts
from flowkit.workflows.display.details import TaskQueues, render
from flowkit.workflows.display.task_status import (
    failure_text,
    incomplete_text,
    is_dead,
    open_status,
    status_view,
)
from flowkit.workflows.document import fit_into_close, node_record, pulled_nodes, split_record
from flowkit.workflows.evaluations import NoResult, apply_results, requests, value_request
from flowkit.workflows.node import attempt_input
from flowkit.workflows.scheduling.conditions import DueCondition
from flowkit.workflows.scheduling.scheduler import Scheduler
from flowkit.workflows.slots import Slots
from flowkit.workflows.state_codec import columns_of, states_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flowkit.models import Graph

    Operation = Callable[[], object]

PULL = {"input_adapter": "pull.from_artifacts"}


# --- the graphs -----------------------------------------------------------------------------------------------------


def _sinks(above: list[str], **io: Any) -> Iterator[dict[str, Any]]:
    """Yield nodes of each kind of fan-in below the same parents.

    The first in the graph, they have rows in the details.
    """
    for place, fan_in in enumerate(("all", "any", "count:2", "all_done")):
        yield {"node_id": f"sink{place}", "type": "x", "fan_in": fan_in, "depends_on": above, "io": io}


def wide(count: int) -> dict[str, Any]:
    """Return a graph with conditional and streaming edges, from one node to many and from those to a few."""
    inner = [f"n{place}" for place in range(count - 5)]
    child = {
        "type": "x",
        "when": "nodes.root.status == 'finished'",
        "prerequisites": ["all", "more"],
        "deadline_sec": 60,
        "io": {"input_inline": {"value": {"$cel": "nodes.root.status"}}, "max_ahead": 2},
    }
    edges = [{"from": "root", "to": each, "when": "params.a > 0", "mode": "async"} for each in inner]
    edges += [
        {"from": each, "to": f"sink{place}", "when": "params.b > 0", "mode": "async"}
        for place, above in enumerate((inner, inner[::4], inner, inner[::4]))
        for each in above
    ]
    return {
        "on_node_failure": "hold",
        "nodes": [
            *_sinks([], input_inline=PULL),
            {"node_id": "root", "type": "x", "deadline_sec": 60},
            *({"node_id": each, **child, "prerequisites": ["all", each]} for each in inner),
        ],
        "edges_ex": edges,
    }


def batches(count: int) -> dict[str, Any]:
    """Return a graph whose nodes start on the first batch of any parent, in shards, and with items of their own."""
    inner = [f"n{place}" for place in range(count - 5)]
    child = {
        "depends_on": ["root"],
        "io": {"input_inline": PULL, "start_when": "first_batch", "max_ahead": 2},
        "on_batch_failure": {"max": 5},
        "parallel": 2,
    }
    return {
        "on_node_failure": "continue",
        "deadline_sec": 60,
        "nodes": [
            *_sinks(inner, input_inline=PULL, start_when="first_batch"),
            {"node_id": "root", "type": "x", "map": {"over": "params.items"}},
            *({"node_id": each, "type": f"role-{each}", **child} for each in inner),
        ],
    }


def chain(count: int) -> dict[str, Any]:
    """Return a graph in which each node streams from the one before."""
    nodes = [
        {
            "node_id": f"n{place}",
            "type": "x",
            "io": {
                "input_inline": {**PULL, "above": {"$cel": f"nodes.n{place - 1}.status"}},
                "start_when": "first_batch",
            },
            "hold_on_failure": True,
            "depends_on": [f"n{place - 1}"],
        }
        for place in range(1, count)
    ]
    return {"on_node_failure": "continue", "nodes": [{"node_id": "n0", "type": "x"}, *nodes]}


def routes(count: int) -> dict[str, Any]:
    """Return a graph with routes from one node to many, and from many nodes to one."""
    half = (count - 2) // 2
    targets, routers = [f"t{place}" for place in range(half)], [f"r{place}" for place in range(half)]
    return {
        "on_node_failure": "continue",
        "nodes": [
            {"node_id": "root", "type": "x", "routing": {"on_failure": targets, "on_success": targets}},
            {"node_id": "fix", "type": "x"},
            *({"node_id": each, "type": "x", "depends_on": ["root"]} for each in targets),
            *(
                {"node_id": each, "type": "approval" if place % 2 else "delay", **_engine_node(place)}
                | {"routing": {"on_failure": ["fix"], "on_success": ["fix"]}}
                for place, each in enumerate(routers)
            ),
        ],
    }


def _engine_node(place: int) -> dict[str, Any]:
    return {} if place % 2 else {"io": {"input_inline": {"sec": 5}}}


SHAPES: dict[str, Callable[[int], dict[str, Any]]] = {
    shape.__name__: shape for shape in (wide, batches, chain, routes)
}


@cache
def _raw(shape: str, count: int) -> dict[str, Any]:
    return SHAPES[shape](count)


@cache
def _graph(shape: str, count: int) -> Graph:
    *_, graph = normalizing(_raw(shape, count))
    assert graph is not None
    return graph


class Subject:
    """A task with a graph of this shape and size, whose nodes have a status."""

    def __init__(self, shape: str, count: int, status: NodeStatus = NodeStatus.QUEUED) -> None:
        self.raw = _raw(shape, count)
        self.graph = changeable(_graph(shape, count), {})
        self.states = [NodeState(status=status, epoch=int(status.ended)) for _ in self.graph.nodes]
        self.paused: list[PausedScope] = []

    @property
    def indexes(self) -> range:
        return range(len(self.states))

    def schedule(self) -> Scheduler:
        self.scheduler = Scheduler(self.graph, self.states, self.paused)
        return self.scheduler

    def plan(self, action: Action) -> Plan:
        """Plan an action twice, as the validator and the handler of an update do, for a caller who has seen it."""
        for _ in range(2):
            task = TaskSnapshot(
                nodes=self.scheduler.nodes,
                states=self.states,
                pauses=self.scheduler.pauses,
                satisfied=self.scheduler.satisfied,
                resetting=self.scheduler.resetting,
            )
            planned = plan(action, task)
            action = replace(action, if_state=state_of(planned, task))
        result_of(planned, self.scheduler.nodes, 1)
        return planned


# --- the operations -------------------------------------------------------------------------------------------------


def normalize(shape: str, count: int) -> Operation:
    raw = _raw(shape, count)
    return lambda: [*normalizing(raw)]


def schedule(shape: str, count: int) -> Operation:
    return Subject(shape, count).schedule


def finish(shape: str, count: int) -> Operation:
    subject = Subject(shape, count)
    scheduler = subject.schedule()

    def run() -> None:
        for prerequisite in ("all", "more"):
            scheduler.satisfy(prerequisite)
        scheduler.pop_ready()
        for index in subject.indexes:
            scheduler.end(index, NodeStatus.FINISHED)
            if scheduler.any_due:
                scheduler.decide(dict.fromkeys(scheduler.pop_due(), True))
        assert scheduler.done

    return run


def finish_beside(shape: str, count: int) -> Operation:
    """End all nodes but one, whose reset is in progress, so that those that use its results must not start."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    scheduler.resetting.add(count - 1)
    scheduler.rebuild()

    def run() -> None:
        for index in reversed(subject.indexes):
            scheduler.end(index, NodeStatus.FINISHED)
        assert not scheduler.done

    return run


def fail(shape: str, count: int) -> Operation:
    subject = Subject(shape, count)
    scheduler = subject.schedule()

    def run() -> None:
        for index in subject.indexes:
            scheduler.end(index, NodeStatus.FAILED)
        assert [scheduler.failures, scheduler.handled_failures, scheduler.failed_batches] != [[], [], {}]
        failure_text(scheduler)
        is_dead(scheduler)

    return run


def hold(shape: str, count: int) -> Operation:
    """Fail all nodes together, as for conditions without a result. A graph may hold them."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    scheduler.pop_ready()
    return lambda: scheduler.fail([*subject.indexes])


def stream(shape: str, count: int) -> Operation:
    """Let all nodes run at once, because all have stored a batch; the first one fails, then the others end
    backwards.
    """
    subject = Subject(shape, count)
    scheduler = subject.schedule()

    def run() -> None:
        for index, node in enumerate(scheduler.nodes):
            subject.states[index].epoch = 1
            scheduler.accept_batch(FirstBatch(run_id="r", node_id=node.node_id, epoch=1))
        scheduler.decide(dict.fromkeys(scheduler.pop_due(), True))
        first = scheduler.index_of.get("root", 0)
        scheduler.end(first, NodeStatus.FAILED)
        for index in reversed(subject.indexes):
            scheduler.end(index, NodeStatus.FINISHED)

    return run


def decide(shape: str, count: int) -> Operation:
    """Evaluate the conditions that become due together; half of them have no result."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    root = scheduler.index_of.get("root", 0)

    def run() -> None:
        scheduler.satisfy("all")
        scheduler.pop_ready()
        scheduler.end(root, NodeStatus.FINISHED)
        due = scheduler.pop_due()
        parts = requests(scheduler, due, "t", "")
        texts = [text for part in parts for text in part.texts]
        apply_results(scheduler, due, dict.fromkeys(texts, NoResult("bad_condition", "no")))

    return run


def evaluate(shape: str, count: int) -> Operation:
    """Make the inputs of the activities that evaluate the values by expression and the conditions of each
    node alone.
    """
    scheduler = Subject(shape, count).schedule()

    def run() -> None:
        for node in scheduler.nodes:
            if node.expressions:
                value_request(scheduler, node, "t", "")
            if node.when:
                requests(scheduler, [DueCondition(node.index)], "t", "")

    return run


def rerun(shape: str, count: int) -> Operation:
    """Continue an ended task, all in the first workflow task of its new run."""
    subject = Subject(shape, count, NodeStatus.CANCELLED)

    def run() -> None:
        scheduler = subject.schedule()
        names = choose_reruns(None, scheduler.nodes, subject.states)
        planned = plan_rerun(names, scheduler.nodes, subject.states, names)
        scheduler.resetting.update(planned.resets)
        scheduler.renew(planned.resets, planned.kept)
        scheduler.rebuild()
        incomplete_text(scheduler)

    return run


def _reset(subject: Subject, action: Action) -> None:
    scheduler, planned = subject.scheduler, subject.plan(action)
    scheduler.resetting.update(planned.resets)
    scheduler.renew(planned.resets, planned.kept)
    scheduler.unblock(planned.unblocks)
    scheduler.rebuild()
    scheduler.resetting.difference_update(planned.resets)
    scheduler.rebuild()


def retry_first(shape: str, count: int) -> Operation:
    """Start a node again whose children have ended, or wait for the conditions that it has made due."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    root = scheduler.index_of.get("root", 0)
    scheduler.end(root, NodeStatus.FINISHED)
    scheduler.decide(dict.fromkeys(scheduler.pop_due(), True))
    for index in subject.indexes[::2]:
        if index != root:
            scheduler.end(index, NodeStatus.FAILED)
    return lambda: _reset(subject, RetryNode(node_id=scheduler.nodes[root].node_id))


def skip_last(shape: str, count: int) -> Operation:
    """End the nodes below all others in another way."""
    subject = Subject(shape, count, NodeStatus.FAILED)
    scheduler = subject.schedule()
    name = "sink0" if "sink0" in scheduler.index_of else scheduler.nodes[-1].node_id
    return lambda: _reset(subject, SkipNode(node_id=name))


def pause(shape: str, count: int) -> Operation:
    """Pause as many scopes as possible, and end some of them; show what is paused and what has drained."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    for index in subject.indexes[::2]:
        subject.states[index].status = NodeStatus.RUNNING
    role = scheduler.nodes[0].type
    below = [f"below:{node.node_id}" for node in scheduler.nodes if scheduler.pauses.children[node.index]]
    scopes = [f"role:{role}", *below[: ACTION_SCOPES - 1]]
    flying = {*subject.indexes[::20]}

    def run() -> None:
        for index in (0, 1):
            planned = subject.plan(Pause(scopes=tuple(scopes[index::2]), interrupt=True))
            scheduler.pauses.change([PausedScope(scope=each, since=1.0) for each in planned.pauses], ())
        for each in scheduler.pauses.scopes:
            scheduler.pauses.drained(each.scope, flying)
        for index in subject.indexes:
            scheduler.pauses.scope_of(index)
        planned = subject.plan(Resume(scopes=(scopes[0],)))
        scheduler.pauses.change((), planned.resumes)

    return run


def satisfy(shape: str, count: int) -> Operation:
    """Fulfil prerequisites of many nodes, which need more of them, when many others are satisfied."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    scheduler.end(scheduler.index_of.get("root", 0), NodeStatus.FINISHED)
    scheduler.satisfied.extend(f"n{place}" for place in range(count // 2, count))
    wanted = any(node.prerequisites for node in scheduler.nodes)

    def run() -> None:
        if wanted:
            subject.plan(Satisfy(prerequisite="all"))
        scheduler.satisfy("all")
        for index in subject.indexes:
            scheduler.missing_prerequisites(index)

    return run


def extend(shape: str, count: int) -> Operation:
    """Change many nodes of the graph, and add some."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    changed = {node.node_id: {"timeout_sec": 5} for node in scheduler.nodes[count // 2 :]}
    new = tuple({"node_id": f"new{place}", "type": "x"} for place in range(count // 20))
    edges = tuple([scheduler.nodes[-1].node_id, each["node_id"]] for each in new)
    raw = change_graph(subject.raw, {"nodes": [*new], "edges": [*edges]}, {})
    *_, after = normalizing(raw)
    assert after is not None

    def run() -> None:
        planned = subject.plan(ChangeGraph(nodes=new, edges=edges, changes=changed))
        nodes = [after.nodes[index] for index in planned.replaces]
        scheduler.change_graph(nodes, after.nodes[count:], [0] * len(new))
        scheduler.rebuild()

    return run


def deadlines(shape: str, count: int) -> Operation:
    subject = Subject(shape, count)
    subject.schedule()

    def run() -> None:
        deadlines = Deadlines(subject.graph, subject.states, ActionState(), opened_at=0.0)
        deadlines.begin(subject.indexes, 0.0)
        for index in subject.indexes:
            deadlines.pause(index, 1.0)
            deadlines.resume(index, 2.0)
            deadlines.restore(index)
        deadlines.next_due()
        deadlines.pop_overdue(100.0)

    return run


def silence(shape: str, count: int) -> Operation:
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    for state in subject.states:
        state.status, state.epoch = NodeStatus.RUNNING, 1
    attempts = [SilentAttempt(node_id=node.node_id, epoch=1, silent_sec=9.0) for node in scheduler.nodes]
    report = SilenceReport(run_id="r", silent=attempts, hard_sec=5.0)
    silent = SilentAttempts(scheduler, run_id="r", stop_nodes=lambda *_: None)

    def run() -> None:
        silent.problem(report)
        silent.accept(report)
        silent.process_events()
        assert silent.nodes

    return run


def show(shape: str, count: int) -> Operation:
    """Render the details, and answer the query `status`, of a task that waits, and of the same one after failures."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    queues = TaskQueues(namespace="default", prefix="flowkit")
    scheduler.satisfied.extend(f"n{place}" for place in range(count // 2))

    def run() -> None:
        for _ in range(2):
            render(TaskStatus.RUNNING, scheduler, queues)
            status_view(TaskStatus.RUNNING, scheduler, None)
            open_status(scheduler)
            scheduler.end(scheduler.index_of.get("root", 0), NodeStatus.FAILED)

    return run


def write(shape: str, count: int) -> Operation:
    """Make the records of all nodes for the document, and encode the state for the next run."""
    subject = Subject(shape, count, NodeStatus.FAILED)
    scheduler = subject.schedule()
    for state in subject.states:
        state.last_error, state.edges = "Error: " + 100 * "x", {0: True}

    def run() -> None:
        pulled = pulled_nodes(scheduler.nodes)
        nodes = [
            node_record(node, state, pulled=node.node_id in pulled)
            for node, state in zip(scheduler.nodes, subject.states, strict=True)
        ]
        record = RecordTask(
            task_id="t",
            run_id="r",
            run_seq=1,
            at=1.0,
            nodes=nodes,
            status=TaskStatus.RUNNING,
            status_history=[],
        )
        split_record(record)
        fit_into_close(nodes)

    return run


def carry(shape: str, count: int) -> Operation:
    """Encode the state of the nodes for the next run, which decodes it."""
    subject = Subject(shape, count, NodeStatus.FAILED)
    for index, state in enumerate(subject.states):
        state.last_error, state.edges = f"Error {index}", {0: True}
    return lambda: states_of(columns_of(subject.states, 1_000_000))


def slots(shape: str, count: int) -> Operation:
    """Let all nodes wait for slots, each of its own role, and cancel most of them, the latest first."""
    subject = Subject(shape, count)

    def run() -> None:
        slots = Slots(limit=1_000, window=100)
        roles = [f"role{index}" if shape == "batches" else "x" for index in subject.indexes]
        for ticket, role in enumerate(roles):
            if not slots.try_acquire(role):
                slots.enqueue(role, ticket)
        used = {role: slots.in_use_by(role) for role in roles}
        for role, number in used.items():
            for _ in range(number):
                slots.release(role)
        for ticket, role in reversed([*enumerate(roles)]):
            slots.cancel_wait(role, ticket)

    return run


def attempt(shape: str, count: int) -> Operation:
    """Make the inputs of the attempts of all nodes."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    scheduler.end(scheduler.index_of.get("root", 0), NodeStatus.FAILED)
    settings = Settings()
    return lambda: [attempt_input(scheduler, settings, "t", node) for node in scheduler.nodes]


def stop(shape: str, count: int) -> Operation:
    """End all nodes of a task that was cancelled."""
    subject = Subject(shape, count)
    scheduler = subject.schedule()
    for state in subject.states[::2]:
        state.status = NodeStatus.RUNNING

    def run() -> None:
        scheduler.mark_cancelling()
        scheduler.end_all(NodeStatus.CANCELLED, None)  # type: ignore[arg-type] # only the time matters here
        assert scheduler.done

    return run


OPERATIONS: tuple[Callable[[str, int], Operation], ...] = (
    *(normalize, schedule, finish, fail, hold, stream, decide, evaluate, rerun, retry_first, skip_last),
    *(pause, satisfy, finish_beside, extend, deadlines, silence, show, write, carry, slots, attempt, stop),
)


def _measure(operation: Callable[[str, int], Operation], shape: str, count: int) -> float:
    """Return the processor time of an operation, in seconds."""
    run = operation(shape, count)
    gc.disable()
    try:
        began = time.process_time()
        run()
        return time.process_time() - began
    finally:
        gc.enable()


def _check(shape: str, count: int) -> None:
    found = {each.__name__: growth_problem(partial(_measure, each, shape), count) for each in OPERATIONS}
    assert {name: problem for name, problem in found.items() if problem is not None} == {}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_processor_time_grows_with_the_nodes_and_not_faster(shape: str) -> None:
    _check(shape, 2_400)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_processor_time_grows_with_the_nodes_of_the_largest_graph(shape: str) -> None:
    _check(shape, 20_000)
