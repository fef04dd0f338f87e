"""Which statuses a flow and its nodes may show, one after the other, in views and in events. Written from
docs/flows.md."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from tests.integration.flow_model.records import (
    CANCELLED,
    COMPLETED,
    CREATED,
    DISPATCHED,
    ENDS,
    ERROR,
    FAILED,
    FINISHED,
    PENDING,
    READY,
    RUNNING,
    STARTED,
    wire_id,
)
from tests.integration.flow_model.timeline import above, failed_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.flow_model.records import Event, Fields, History, RunKey, View
    from tests.integration.flow_model.timeline import Timeline

ARROWS: Final = {
    PENDING: {READY, CANCELLED},
    READY: {DISPATCHED, FAILED, CANCELLED},
    DISPATCHED: {RUNNING, FAILED, CANCELLED},
    RUNNING: {COMPLETED, FAILED, CANCELLED},
    FAILED: {READY},
    COMPLETED: set[str](),
    CANCELLED: set[str](),
}
"""The arrows of a node in the document."""
FLOW_ARROWS: Final = {CREATED: {STARTED}, STARTED: {FINISHED, ERROR}, FINISHED: set[str](), ERROR: set[str]()}
_OVER: Final = frozenset({COMPLETED, FAILED, CANCELLED})
_REACHED: Final = frozenset({DISPATCHED, RUNNING})


def reachable(before: str, after: str, arrows: dict[str, set[str]]) -> bool:
    """Return whether a status can follow another one after any number of steps, none included."""
    known = {before}
    while more := {to for each in known for to in arrows[each]} - known:
        known |= more
    return after in known


# --- views


def view_problems(timeline: Timeline) -> Iterator[str]:
    """Yield what is wrong with the order of what `flow.status` has returned, and with each of these states."""
    found: dict[str, str] = {}
    for before, after in pairwise(timeline.history.views):
        for problem in _steps(timeline, before, after):
            found.setdefault(problem, f"{_short(before)} and then {_short(after)}")
    for view in timeline.history.views:
        for problem in _state_problems(timeline, view):
            found.setdefault(problem, _short(view))
    yield from (f"{problem}, first here: {where}" for problem, where in found.items())


def _short(view: View) -> str:
    nodes = {id: f"{each['node_status']} {each['attempt']}" for id, each in view.state["nodes"].items()}
    return (
        f"{view.state['run_id']} {view.state['status']} {view.state['cause']} {nodes} at {view.answered:.2f}"
    )


def _steps(timeline: Timeline, before: View, after: View) -> Iterator[str]:
    """Yield what is wrong with a step from one view to the next one."""
    old, new = before.state["run_id"], after.state["run_id"]
    if old == new:
        yield from _steps_in_run(before.state, after.state)
        yield from _lost_jobs(timeline, before, after)
    elif new is None and not _may_forget(timeline, before, after):
        yield f"the run {old} is gone, although nobody deleted it or replaced the flow"
    elif None not in (old, new) and timeline.key(new) < timeline.key(old):
        yield f"the run {new} comes after the run {old}"


def _steps_in_run(old: Fields, new: Fields) -> Iterator[str]:
    if not reachable(old["status"], new["status"], FLOW_ARROWS):
        yield f"the run {new['run_id']} moves against the arrows"
    for id, node in old["nodes"].items():
        if id in new["nodes"] and not _follows(node, new["nodes"][id]):
            yield f"the job {id} moves against the arrows in the run {new['run_id']}"


def _lost_jobs(timeline: Timeline, before: View, after: View) -> Iterator[str]:
    """Yield jobs that are gone, unless they were to be added, and nobody has said that they were."""
    for id in before.state["nodes"].keys() - after.state["nodes"].keys():
        if before.state["run_id"] is not None and timeline.is_certain(int(id), before.sent):
            yield f"the job {id} is gone"


def _follows(node: Fields, following: Fields) -> bool:
    """Return whether a node can look so a moment later: along the arrows, and after a failure only in a new attempt."""
    before, after = node["node_status"], following["node_status"]
    if following["attempt"] < node["attempt"]:
        return False
    if before == FAILED and after in (DISPATCHED, RUNNING, COMPLETED):
        return bool(following["attempt"] > node["attempt"])
    return reachable(before, after, ARROWS)


def _may_forget(timeline: Timeline, before: View, after: View) -> bool:
    """Return whether the run can have been deleted, the flow replaced, or another run started, between two views."""
    replaced = any(
        call.method in ("flow.create", "flow.start")
        and call.sent <= after.answered
        and call.answered >= before.sent
        for call in timeline.history.calls
        if call.accepted or call.is_uncertain
    )
    purged = any(begun <= after.answered and end >= before.sent for begun, end in timeline.history.purges)
    return replaced or purged


def _state_problems(timeline: Timeline, view: View) -> Iterator[str]:
    state = view.state
    statuses = {int(id): node["node_status"] for id, node in state["nodes"].items()}
    if state["status"] == FINISHED and set(statuses.values()) - {COMPLETED}:
        yield "the flow is Finished with jobs that are not Completed"
    if state["status"] == ERROR and set(statuses.values()) - _OVER:
        yield "the flow is Error with jobs that are not over"
    if state["status"] == CREATED and set(statuses.values()) - {PENDING}:
        yield "the flow is Created with jobs that have begun"
    if state["status"] in ENDS and state["failed_job"] != next(iter(failed_jobs(state)), None):
        yield f"the failed job is {state['failed_job']}"
    if state["run_id"] is not None:
        yield from _reached_problems(timeline, view)
        yield from _waiting_problems(timeline, view)


def _reached_problems(timeline: Timeline, view: View) -> Iterator[str]:
    """Yield nodes that are shown as dispatched or running before their supervisor has accepted the job."""
    run, _ = timeline.key(view.state["run_id"])
    reached = {
        wire.job
        for each in timeline.history.deliveries
        if each.accepted and each.at <= view.answered and (wire := wire_id(each.id)).run == run
    }
    for id, node in view.state["nodes"].items():
        if node["node_status"] in _REACHED and int(id) not in reached:
            yield f"the job {id} is {node['node_status']}, but no supervisor has accepted it"


def _waiting_problems(timeline: Timeline, view: View) -> Iterator[str]:
    """Yield nodes that wait for what is satisfied, or do not wait for what is not."""
    if view.state["status"] != STARTED:
        return
    key = timeline.key(view.state["run_id"])
    for id, node in view.state["nodes"].items():
        for name in timeline.nodes_of(key).get(int(id), {}).get("prerequisites", ()):
            may, certain = timeline.satisfied(key, name)
            waits = name in node["waiting_on"]
            if waits and certain + timeline.history.shown_sec < view.sent:
                yield f"the job {id} waits for {name}, which is satisfied"
            if not waits and may > view.answered and node["node_status"] != CANCELLED:
                yield f"the job {id} does not wait for {name}, which nobody has satisfied"


# --- the end of a run


def end_problems(timeline: Timeline) -> Iterator[str]:
    """Yield what is wrong with how the runs have ended."""
    for key in timeline.seen:
        view = timeline.last_view(key)
        if view is not None:
            yield from (f"{problem}: {_short(view)}" for problem in _end_problems(timeline, key, view))


def _end_problems(timeline: Timeline, key: RunKey, view: View) -> Iterator[str]:
    state, is_cancelled = view.state, view.state["cause"] == "cancelled"
    cancels = timeline.cancels(key)
    if is_cancelled and not cancels:
        yield "nobody has cancelled the run"
    if not is_cancelled and any(timeline.outlives(key, call) for call in cancels):
        yield "a cancel was accepted, and the run has continued and has not ended as cancelled"
    everything = {node["node_status"] for node in state["nodes"].values()} <= {COMPLETED}
    if state["status"] != (FINISHED if everything and not is_cancelled else ERROR):
        yield "the flow has another status than its jobs say"
    for id, node in state["nodes"].items():
        if node["node_status"] != CANCELLED or _was_kept(timeline, key, id, node):
            continue
        if node["cause"] not in _causes(timeline, key, view, int(id)):
            yield f"the job {id} is Cancelled with the cause {node['cause']}"


def _was_kept(timeline: Timeline, key: RunKey, id: str, node: Fields) -> bool:
    """Return whether a retry has left a job as it was, or may have done so if nobody saw how the run before
    has ended.
    """
    before, restarted = timeline.last_view((key[0], key[1] - 1)), timeline.restarted(key)
    if before is None:
        return key[1] > 1
    if restarted is not None and int(id) in restarted:
        return False
    old = before.state["nodes"].get(id, {})
    return bool((old.get("node_status"), old.get("cause")) == (node["node_status"], node["cause"]))


def _causes(timeline: Timeline, key: RunKey, view: View, job: int) -> set[str]:
    """Return why a job may be cancelled at the end of a run."""
    nodes, found = view.state["nodes"], set[str]()
    failed = failed_jobs(view.state)
    broken = {*failed, *(int(id) for id, node in nodes.items() if node["node_status"] == CANCELLED)}
    if view.state["cause"] == "cancelled":
        found.add("cancelled")
    if above(timeline.nodes_of(key), job) & broken:
        found.add("upstream_failed")
    flows = [flow for flow, _ in timeline.definitions_at(view.answered)]
    if failed and any(flow.get("on_failure") != "continue" for flow in flows):
        found.add("flow_failed")
    return found


# --- events


def event_problems(history: History, timeline: Timeline) -> Iterator[str]:
    """Yield what is wrong with the events that the subscription has sent."""
    numbers = [event.fields["seq"] for event in history.events]
    if numbers != [*range(1, len(numbers) + 1)]:
        yield f"the numbers of the events are {numbers}"
    keys = [timeline.key(event.fields["run_id"]) for event in history.events]
    if keys != sorted(keys):
        yield f"events of an earlier run come after those of a later one: {keys}"
    yield from _flow_event_problems(history, timeline)
    by_node: dict[int, list[Event]] = defaultdict(list)
    for event in history.events:
        if (event.fields["context_id"], event.fields["flow_id"]) != (
            history.place.context,
            history.place.flow,
        ):
            yield f"an event of another flow: {event.fields}"
        if event.fields["node"] is not None:
            by_node[event.fields["node"]].append(event)
    for node, events in by_node.items():
        yield from _node_event_problems(timeline, node, events)


def _flow_event_problems(history: History, timeline: Timeline) -> Iterator[str]:
    """Yield what is wrong with the events of the flow itself: each run starts and ends once, and is shown to end so."""
    found: dict[RunKey, list[tuple[str, str]]] = {key: [] for key in timeline.seen}
    for event in history.events:
        if event.fields["node"] is None:
            found[timeline.key(event.fields["run_id"])].append((event.fields["from"], event.fields["to"]))
    for key, changes in found.items():
        view = timeline.last_view(key)
        ends = [] if view is None else [view.state["status"]]
        if changes[:1] != [(CREATED, STARTED)] or len(changes) > 2:
            yield f"the events of the flow in the run {key} are {changes}"
        elif ends and [after for _, after in changes[1:]] != ends:
            yield f"the run {key} is {ends}, but its events are {changes}"
        elif any(before != STARTED for before, _ in changes[1:]):
            yield f"the run {key} ends with {changes[1:]}"


def _node_event_problems(timeline: Timeline, node: int, events: list[Event]) -> Iterator[str]:
    status, run, repeats = PENDING, (0, 0), 0
    for event in events:
        key, before, after = timeline.key(event.fields["run_id"]), event.fields["from"], event.fields["to"]
        if key != run and (key[0] != run[0] or before == PENDING):
            status, repeats = PENDING, 0
        run, repeats = key, repeats + (before == FAILED)
        if before != status:
            yield f"the job {node} was {status}: {event.fields}"
        if after not in ARROWS.get(before, ()):
            yield f"there is no such arrow: {event.fields}"
        most = max((job["retries"] for job in timeline.jobs_at(node, event.at)), default=0)
        if repeats > most and after not in (READY, CANCELLED):
            yield f"more attempts than {most} retries allow: {event.fields}"
        status = after
    last = timeline.last_view(max(timeline.seen))
    shown = None if last is None else last.state["nodes"].get(str(node))
    if shown is not None and run == max(timeline.seen) and shown["node_status"] != status:
        yield f"the events of the job {node} end with {status}, but it is {shown['node_status']}"
