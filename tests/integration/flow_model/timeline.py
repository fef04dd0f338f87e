"""What is known, and when, about the runs of a flow, its jobs and its graph: nothing here judges, all times
are bounds."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tests.integration.flow_model.records import (
    ALREADY_EXISTS,
    COMPLETED,
    ENDS,
    FAILED,
    STARTED,
    run_key,
    wire_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.integration.flow_model.records import Call, Delivery, Fields, History, RunKey, View

BEGINS = ("flow.start", "flow.retry")
"""The methods that begin runs."""


class Timeline:
    """The runs, jobs and nodes of a flow by time, from what its client has sent and seen."""

    def __init__(self, history: History) -> None:
        self.history = history

    def key(self, text: str) -> RunKey:
        """Return the numbers of a run of this flow."""
        return run_key(self.history.place, text)

    # --- runs

    @cached_property
    def begins(self) -> dict[RunKey, Call]:
        """The calls that have said that they began a run."""
        calls = (call for call in self.history.calls if call.method in BEGINS and call.accepted)
        return {self.key(call.result["run_id"]): call for call in calls if call.result["started"]}

    @cached_property
    def seen(self) -> dict[RunKey, float]:
        """When a run had certainly begun, by its numbers, in the order of these."""
        found: dict[RunKey, float] = {}
        for key, at in self._mentions():
            found[key] = min(at, found.get(key, math.inf))
        return dict(sorted(found.items()))

    def _mentions(self) -> Iterator[tuple[RunKey, float]]:
        for call in self.history.calls:
            if call.accepted and call.method in BEGINS:
                yield self.key(call.result["run_id"]), call.answered
        for view in self.history.views:
            if view.state["run_id"] is not None:
                yield self.key(view.state["run_id"]), view.answered
        for event in self.history.events:
            yield self.key(event.fields["run_id"]), event.at

    @cached_property
    def ended(self) -> dict[RunKey, float]:
        """When a run had certainly ended, by its numbers, for those that were seen to end."""
        found: dict[RunKey, float] = {}
        for view in self.history.views:
            if view.state["run_id"] is not None and view.state["status"] in ENDS:
                found.setdefault(self.key(view.state["run_id"]), view.answered)
        for event in self.history.events:
            if event.fields["node"] is None and event.fields["to"] in ENDS:
                key = self.key(event.fields["run_id"])
                found[key] = min(event.at, found.get(key, math.inf))
        return found

    def causes(self, key: RunKey) -> list[Call]:
        """Return the calls that may have begun a run."""
        if key in self.begins:
            return [self.begins[key]]
        calls = (call for call in self.history.calls if call.method in BEGINS and call.is_uncertain)
        return [call for call in calls if call.sent <= self.seen[key]]

    def may_begin(self, key: RunKey) -> float:
        """Return the earliest time at which a run can have begun."""
        return min((call.sent for call in self.causes(key)), default=self.seen[key])

    def may_live(self, call: Call) -> bool:
        """Return whether a run may have been open at some moment of a call."""
        return any(
            self.may_begin(key) <= call.answered and self.ended.get(key, math.inf) >= call.sent
            for key in self.seen
        )

    def lives(self, call: Call) -> bool:
        """Return whether a run was open during the whole call."""
        return any(self.seen[key] <= call.sent and self._shown_open(key, call.answered) for key in self.seen)

    def _shown_open(self, key: RunKey, at: float) -> bool:
        return any(view.sent >= at and view.state["status"] == STARTED for view in self.views_of(key))

    def may_be_ending(self, call: Call) -> bool:
        """Return whether a run may have been about to end, after a failed job or a cancel, when a call was answered."""
        failed = {wire_id(each.id).run for each in self._last_failures if each.at <= call.answered}
        cancelled = (
            key for key in self.seen if any(each.sent <= call.answered for each in self.cancels(key))
        )
        return bool(self._open_runs(call) & (failed | {key[0] for key in cancelled}))

    @cached_property
    def _last_failures(self) -> list[Delivery]:
        """What the supervisor has received of attempts that fail, after which the job may have no retry left."""
        failed = (each for each in self.history.deliveries if not each.succeeds)
        return [each for each in failed if wire_id(each.id).retry >= self.fewest_retries(each)]

    def fewest_retries(self, delivery: Delivery) -> int:
        """Return the least number of retries that a job may have had when its supervisor received it."""
        jobs = self.jobs_at(wire_id(delivery.id).job, delivery.at)
        return min((job["retries"] for job in jobs), default=0)

    def _open_runs(self, call: Call) -> set[int]:
        return {key[0] for key in self.seen if self.ended.get(key, math.inf) >= call.sent}

    def had_completed(self, call: Call) -> bool:
        """Return whether all jobs but those that a retry names were completed before it."""
        views = [view for view in self.history.views if view.answered <= call.sent]
        nodes = views[-1].state["nodes"] if views else {}
        others = {id: node for id, node in nodes.items() if int(id) not in call.params.get("nodes", ())}
        return all(node["node_status"] == COMPLETED for node in others.values())

    def views_of(self, key: RunKey) -> list[View]:
        """Return the views of a run, in order."""
        return self._views.get(key, [])

    @cached_property
    def _views(self) -> dict[RunKey, list[View]]:
        found: dict[RunKey, list[View]] = {}
        for view in self.history.views:
            if view.state["run_id"] is not None:
                found.setdefault(self.key(view.state["run_id"]), []).append(view)
        return found

    def last_view(self, key: RunKey) -> View | None:
        """Return the last view of an ended run. None if it was not seen to end."""
        views = [view for view in self.views_of(key) if view.state["status"] in ENDS]
        return views[-1] if views else None

    def cancels(self, key: RunKey) -> list[Call]:
        """Return the calls that may have cancelled a run."""
        calls = (call for call in self.history.calls if call.method == "flow.cancel")
        return [
            call
            for call in calls
            if (call.is_uncertain or (call.accepted and call.result["requested"]))
            and (not call.accepted or self.key(call.result["run_id"]) == key)
            and self.may_begin(key) <= call.answered
        ]

    def outlives(self, key: RunKey, call: Call) -> bool:
        """Return whether a run was open long after a call was accepted."""
        return call.accepted and self._shown_open(key, call.answered + self.history.shown_sec)

    # --- what the client has defined

    @cached_property
    def _effective(self) -> list[Call]:
        """The calls that have had their effect, or may have had it: not those that were rejected when they
        were repeated.
        """
        found: list[Call] = []
        for place, call in enumerate(self.history.calls):
            again = (each for each in self.history.calls[place:] if each.method == call.method)
            same = (each for each in again if each.params == call.params and not each.is_uncertain)
            answer = next(same, None)
            if answer is None or answer.accepted or (call.is_uncertain and answer.code == ALREADY_EXISTS):
                found.append(call)
        return found

    def jobs_at(self, job: int, at: float) -> list[Fields]:
        """Return the definitions of a job that may have been in force at this moment."""
        found: list[Fields] = []
        for call in self._effective:
            if call.method == "job.create" and call.params["job"]["id"] == job and call.sent <= at:
                if call.accepted and call.answered <= at:
                    found = []
                found.append(call.params["job"])
        return found

    def definitions_at(self, at: float) -> list[tuple[Fields, dict[int, Fields]]]:
        """Return the flow, with its nodes by id of the job, as it may have been defined at this moment."""
        before = [call for call in self._effective if call.answered <= at]
        begun = [call for call in self._effective if call.sent <= at]
        return [_defined(before), _defined(begun)] if len(begun) > len(before) else [_defined(before)]

    def nodes_at(self, at: float) -> dict[int, Fields]:
        """Return the latest nodes that the flow may have had at this moment, by id of the job."""
        return self.definitions_at(at)[-1][1]

    def nodes_of(self, key: RunKey) -> dict[int, Fields]:
        """Return the nodes that a run may have had until its end. No flow is replaced while it runs."""
        end, begun = self.ended.get(key, math.inf), self.seen[key]
        calls = [call for call in self._effective if call.sent <= end]
        made = [call for call in calls if call.method != "flow.create" or call.sent < begun]
        return _defined(made)[1]

    def is_certain(self, job: int, at: float) -> bool:
        """Return whether the flow certainly had a job at this moment."""
        nodes: dict[int, Fields] = {}
        for call in self._effective:
            if call.sent <= at and call.method == "flow.create":
                nodes = _nodes(call.params["flow"]["nodes"])
            elif call.accepted and call.answered <= at and call.method == "flow.add_nodes":
                nodes = nodes | _nodes(call.params["nodes"])
        return job in nodes

    def restarted(self, key: RunKey) -> set[int] | None:
        """Return the jobs that a retry has started again, or first: all in a first run. None if it is not known."""
        nodes = self.nodes_of(key)
        if key[1] == 1:
            return set(nodes)
        before, causes = self.last_view((key[0], key[1] - 1)), self.causes(key)
        if before is None or len(causes) != 1:
            return None
        chosen = causes[0].params.get("nodes") or [
            int(id) for id, node in before.state["nodes"].items() if node["node_status"] != COMPLETED
        ]
        added = {id for id in nodes if str(id) not in before.state["nodes"]}
        return below(nodes, chosen) | added

    def satisfied(self, key: RunKey, name: str) -> tuple[float, float]:
        """Return when a prerequisite may have been satisfied in a run, and when it certainly was.

        What was satisfied in a run stays so in its retries.
        """
        begin = self.may_begin((key[0], 1)) if (key[0], 1) in self.seen else -math.inf
        end = self.ended.get(key, math.inf)
        calls = [
            call
            for call in self.history.calls
            if call.method == "node.satisfy"
            and call.params["prerequisite"] == name
            and call.answered >= begin
            and call.sent <= end
        ]
        may = (call.sent for call in calls if call.accepted or call.is_uncertain)
        certain = (call.answered for call in calls if call.accepted and call.sent >= self._begun(key))
        return min(may, default=math.inf), min(certain, default=math.inf)

    def _begun(self, key: RunKey) -> float:
        return self.seen.get((key[0], 1), math.inf)


def _defined(calls: Iterable[Call]) -> tuple[Fields, dict[int, Fields]]:
    """Return the flow and its nodes after these calls."""
    flow: Fields = {}
    nodes: dict[int, Fields] = {}
    for call in calls:
        if call.method == "flow.create":
            flow, nodes = call.params["flow"], _nodes(call.params["flow"]["nodes"])
        elif call.method == "flow.add_nodes":
            nodes = nodes | _nodes(call.params["nodes"])
    return flow, nodes


def _nodes(listed: Iterable[Fields]) -> dict[int, Fields]:
    return {node["id"]: node for node in listed}


def below(nodes: dict[int, Fields], jobs: Iterable[int]) -> set[int]:
    """Return these jobs and all that depend on them."""
    found = set(jobs)
    while more := {id for id, node in nodes.items() if found & set(node.get("depends", ()))} - found:
        found |= more
    return found


def above(nodes: dict[int, Fields], job: int) -> set[int]:
    """Return all jobs on which a job depends, directly or not."""
    found: set[int] = set()
    left = [job]
    while left:
        parents = set(nodes.get(left.pop(), {}).get("depends", ())) - found
        found |= parents
        left += parents
    return found


def failed_jobs(state: dict[str, Any]) -> list[int]:
    """Return the failed jobs of a view."""
    return [int(id) for id, node in state["nodes"].items() if node["node_status"] == FAILED]
