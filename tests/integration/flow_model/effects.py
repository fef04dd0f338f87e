"""Whether each call had its effect, and each rejection its reason. Written from docs/flows.md and
docs/flow-methods.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.integration.flow_model.records import CREATED, STARTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.flow_model.records import Call, History, View
    from tests.integration.flow_model.timeline import Timeline

INVALID_TRANSITION: Final = -32004
PERMISSION_DENIED: Final = -32003
NOT_FOUND: Final = -32001
_CHANGES: Final = ("flow.create", "job.create", "flow.retry")
"""Calls that are accepted only while no run is open."""


def call_problems(history: History, timeline: Timeline) -> Iterator[str]:
    """Yield what is wrong with the answers to calls, and with what followed."""
    for key in timeline.seen:
        if not timeline.causes(key):
            yield f"nobody has started the run {key}"
    for call in history.calls:
        yield from (f"{problem}: {_short(call)}" for problem in _problems(history, timeline, call))


def _short(call: Call) -> str:
    answer = call.result if call.accepted else f"{call.code} {call.text}"
    return f"{call.method} {call.params} at {call.sent:.2f} to {call.answered:.2f}: {answer}"


def _problems(history: History, timeline: Timeline, call: Call) -> Iterator[str]:
    if call.accepted:
        if call.method in _CHANGES and _concerns_run(timeline, call) and timeline.lives(call):
            yield "accepted although a run is open"
        yield from _EFFECTS.get(call.method, _nothing)(history, timeline, call)
    elif (
        call.repeats
        and not call.is_uncertain
        and (call.method != "node.satisfy" or not _is_justified(history, timeline, call))
    ):
        yield "rejected although an identical call was accepted before"
    elif not call.is_uncertain and not _is_justified(history, timeline, call):
        yield "rejected without a reason"


def _concerns_run(timeline: Timeline, call: Call) -> bool:
    """Return whether a call changes what an open run has: a job that is none of the flow may change."""
    return call.method != "job.create" or call.params["job"]["id"] in timeline.nodes_at(call.sent)


def _is_justified(history: History, timeline: Timeline, call: Call) -> bool:
    """Return whether the state of the flow may have been a reason to reject a call."""
    if call.code == NOT_FOUND and call.method == "node.satisfy":
        nodes = timeline.nodes_at(call.answered).values()
        return not any(call.params["prerequisite"] in node.get("prerequisites", ()) for node in nodes)
    if call.code != INVALID_TRANSITION:
        return False
    match call.method:
        case "job.create" | "flow.create":
            return timeline.may_live(call)
        case "flow.add_nodes":
            return any(timeline.may_begin(key) <= call.answered for key in timeline.seen)
        case "flow.retry":
            has_reason = bool(call.params.get("nodes")) != timeline.had_completed(call)
            return timeline.may_live(call) or _may_have_no_run(history, call) or has_reason
        case "node.satisfy":
            return not timeline.lives(call) or timeline.may_be_ending(call)
    return False


def _may_have_no_run(history: History, call: Call) -> bool:
    """Return whether the flow may have had no run at some moment of a call."""
    before = [view for view in history.views if view.answered <= call.sent]
    return (
        not before
        or before[-1].state["run_id"] is None
        or _may_reset(history, before[-1].sent, call.answered)
    )


def _may_reset(history: History, begun: float, end: float) -> bool:
    """Return whether the flow may have lost its run between two moments."""
    resets = [(each.sent, each.answered) for each in history.calls if each.method == "flow.create"]
    return any(first <= end and last >= begun for first, last in [*resets, *history.purges])


def _next_view(history: History, call: Call) -> View | None:
    """Return the first view that was asked for after a call."""
    return next((view for view in history.views if view.sent >= call.answered), None)


def _nothing(history: History, timeline: Timeline, call: Call) -> Iterator[str]:
    yield from ()


def _start_problems(history: History, timeline: Timeline, call: Call) -> Iterator[str]:
    key = timeline.key(call.result["run_id"])
    earlier = [each for each, at in timeline.seen.items() if at <= call.sent]
    if call.result["started"]:
        if key[1] != 1 or any(each[0] >= key[0] for each in earlier):
            yield f"the run does not have the next number after {max(earlier, default=None)}"
        if timeline.lives(call):
            yield "a second run beside an open one"
    elif not timeline.may_live(call) or call.result["status"] != STARTED:
        yield "the run is not in progress"
    yield from _shown(history, timeline, call)


def _retry_problems(history: History, timeline: Timeline, call: Call) -> Iterator[str]:
    key = timeline.key(call.result["run_id"])
    earlier = [each for each, at in timeline.seen.items() if at <= call.sent]
    if not earlier or key != (max(earlier)[0], max(earlier)[1] + 1):
        yield f"the run does not have the next number after {max(earlier, default=None)}"
    yield from _shown(history, timeline, call)


def _shown(history: History, timeline: Timeline, call: Call) -> Iterator[str]:
    """Yield a problem if the next view does not show the run that a call has started or found."""
    view = _next_view(history, call)
    if view is None or _may_reset(history, call.answered, view.answered):
        return
    shown = view.state["run_id"]
    if shown is None or timeline.key(shown) < timeline.key(call.result["run_id"]):
        yield f"the next view shows the run {shown}"
    elif view.state["status"] == CREATED:
        yield "the next view shows the flow as Created"


def _cancel_problems(history: History, timeline: Timeline, call: Call) -> Iterator[str]:
    if call.result["requested"] and not timeline.may_live(call):
        yield "no run is open"
    if not call.result["requested"] and timeline.lives(call):
        yield "a run is open"


def _create_problems(history: History, timeline: Timeline, call: Call) -> Iterator[str]:
    if call.result["status"] != CREATED or call.result["run_id"] is not None:
        yield "the new flow has a run"
    view = _next_view(history, call)
    later = [each for each in history.calls if each.sent >= call.answered]
    if view is None or any(each.sent <= view.answered for each in later):
        return
    if {int(id) for id in view.state["nodes"]} != {node["id"] for node in call.params["flow"]["nodes"]}:
        yield f"the next view has the jobs {[*view.state['nodes']]}"


def _add_problems(history: History, timeline: Timeline, call: Call) -> Iterator[str]:
    added = {str(node["id"]) for node in call.params["nodes"]}
    if added - call.result["nodes"].keys():
        yield "the result does not have the jobs"
    view = _next_view(history, call)
    if view is None or _may_reset(history, call.answered, view.answered):
        return
    if added - view.state["nodes"].keys():
        yield f"the next view has the jobs {[*view.state['nodes']]}"


def _satisfy_problems(history: History, timeline: Timeline, call: Call) -> Iterator[str]:
    if not timeline.may_live(call):
        yield "no run is open"
    if call.result["satisfied"]:
        return
    before = (each for each in history.calls if each.method == call.method and each.sent < call.sent)
    same = [each for each in before if each.params["prerequisite"] == call.params["prerequisite"]]
    if not any(each.accepted or each.is_uncertain for each in same):
        yield "nobody had satisfied it before"


_EFFECTS: Final[dict[str, Callable[[History, Timeline, Call], Iterator[str]]]] = {
    "flow.start": _start_problems,
    "flow.retry": _retry_problems,
    "flow.cancel": _cancel_problems,
    "flow.create": _create_problems,
    "flow.add_nodes": _add_problems,
    "node.satisfy": _satisfy_problems,
}
