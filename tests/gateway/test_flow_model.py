"""The model of flows accepts a history that follows the documents, and reports planted errors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.flow_model.limits import Era, limit_problems
from tests.integration.flow_model.records import (
    Call,
    Delivery,
    Event,
    Execution,
    Fields,
    History,
    Place,
    Result,
    View,
)
from tests.integration.flow_model.supervisors import POLL_SEC, SHORT_SEC, SYNC_SEC, fate
from tests.integration.flow_model.verify import problems_of, written

if TYPE_CHECKING:
    from collections.abc import Callable

PLACE = Place(deployment="1a2b3c4d", context=3, caller=11, flow=40)
OWN = "1a2b3c4d:3:11"
ATTEMPT = ("Ready", "Dispatched", "Running")


def run_id(run: str) -> str:
    """Return the id of a run of the flow."""
    return f"flow:1a2b3c4d:3:40/{run}"


class Story:
    """Writes a history down, one second after the other."""

    def __init__(self) -> None:
        self.history = History(place=PLACE, secret="s", is_calm=True, shown_sec=3.0)
        self._now = 0.0
        self._results: dict[int, str] = {}

    def _tick(self) -> float:
        self._now += 1.0
        return self._now

    def call(self, method: str, result: Any = None, *, repeats: bool = False, **params: Any) -> None:
        """Make a call that is accepted with this result."""
        sent, answered = self._tick(), self._tick()
        made = Call(
            method=method, params=params, sent=sent, answered=answered, result=result, repeats=repeats
        )
        self.history.calls.append(made)

    def job(self, id: int, script: str, retries: int = 0) -> None:
        """Store a job."""
        made = {
            "id": id,
            "script": script,
            "executor": "echo",
            "timeout": 50.0,
            "retries": retries,
            "env_vars": {},
        }
        self.call("job.create", {"id": id}, job=made)

    def start(self, run: str, method: str = "flow.start", **params: Any) -> None:
        """Start a run."""
        begun = {"started": True, "flow_id": 40, "run_id": run_id(run), "status": "Started"}
        self.call(method, begun, **params)
        self.event(run, None, "Created", "Started")

    def view(self, status: str, run: str | None, cause: str | None = None, **nodes: str) -> None:
        """Poll the state. Each node is its status, its attempt, and perhaps its cause or what it waits for."""
        shown = {id.strip("j"): _node(text) for id, text in nodes.items()}
        failed = [int(id) for id, node in shown.items() if node["node_status"] == "Failed"]
        state = {
            "run_id": None if run is None else run_id(run),
            "status": status,
            "cause": cause,
            "failed_job": next(iter(failed), None),
            "nodes": shown,
        }
        self.history.views.append(View(sent=self._tick(), answered=self._tick(), state=state))

    def event(self, run: str, node: int | None, *path: str) -> None:
        """Receive the events of a way through statuses."""
        for before, after in pairwise(path):
            seq = len(self.history.events) + 1
            fields = {"seq": seq, "context_id": 3, "flow_id": 40, "run_id": run_id(run), "node": node}
            self.history.events.append(Event(at=self._tick(), fields={**fields, "from": before, "to": after}))

    def deliver(self, job: int, more: str, script: str, *, succeeds: bool = True) -> None:
        """Let the supervisor receive and run a job."""
        id = f"{OWN}:{job}{more}"
        sent = {"payload": script, "timeout": 50.0, "executor": "echo", "env_vars": {"RUN": "x"}}
        at, number = self._tick(), len(self.history.executions)
        self.history.deliveries.append(
            Delivery(id=id, at=at, job=sent, secret="s", accepted=True, succeeds=succeeds)
        )
        self.history.executions.append(
            Execution(id=id, token=f"result {number}", begun=self._tick(), ended=self._tick())
        )
        self._results[job] = f"result {number}"

    def result(self, run: tuple[int, int], job: int, status: str = "Completed") -> None:
        """Read the result of a job."""
        text = self._results[job] if status == "Completed" else None
        error = "no" if status == "Failed" else None
        fields = {"job_id": job, "node_status": status, "result": text, "error": error}
        self.history.results.append(Result(run=run, answered=self._tick(), fields=fields))

    def purge(self) -> None:
        """Delete the ended runs."""
        self.history.purges.append((self._tick(), self._tick()))


def _node(text: str) -> Fields:
    status, attempt, *more = text.split()
    waits = more if status in ("Pending", "Ready") else []
    cause = more[0] if more and status == "Cancelled" else None
    return {"node_status": status, "attempt": int(attempt), "waiting_on": waits, "cause": cause}


def story() -> History:
    """Return the history of a flow whose second run fails, and is retried with a replaced job."""
    told = Story()
    told.job(1, "a", retries=1)
    told.job(2, "b")
    nodes = [{"id": 1, "depends": []}, {"id": 2, "depends": [1], "prerequisites": ["go"]}]
    created = {"status": "Created", "run_id": None}
    told.call("flow.create", created, flow={"id": 40, "nodes": nodes, "env_vars": {"RUN": "x"}})
    told.view("Created", None, j1="Pending 0", j2="Pending 0 go")
    _first_run(told)
    told.purge()
    told.view("Created", None, j1="Pending 0", j2="Pending 0 go")
    _second_run(told)
    return told.history


def _first_run(told: Story) -> None:
    told.start("1")
    told.event("1", 1, "Pending", *ATTEMPT[:1])
    told.view("Started", "1", j1="Ready 0", j2="Pending 0 go")
    told.deliver(1, "", "a", succeeds=False)
    told.event("1", 1, *ATTEMPT, "Failed")
    told.view("Started", "1", j1="Failed 1", j2="Pending 0 go")
    told.deliver(1, "/0.1", "a")
    told.event("1", 1, "Failed", *ATTEMPT, "Completed")
    told.call("node.satisfy", {"satisfied": True}, prerequisite="go")
    told.call("node.satisfy", {"satisfied": False}, prerequisite="go", repeats=True)
    told.deliver(2, "", "b")
    told.event("1", 2, "Pending", *ATTEMPT, "Completed")
    told.view("Started", "1", j1="Completed 2", j2="Running 1")
    told.event("1", None, "Started", "Finished")
    told.view("Finished", "1", j1="Completed 2", j2="Completed 1")
    told.result((1, 1), 1)
    told.result((1, 1), 2)


def _second_run(told: Story) -> None:
    told.start("2")
    told.call("node.satisfy", {"satisfied": True}, prerequisite="go")
    told.deliver(1, "@40.2", "a")
    told.event("2", 1, "Pending", *ATTEMPT, "Completed")
    told.deliver(2, "@40.2", "b", succeeds=False)
    told.event("2", 2, "Pending", *ATTEMPT, "Failed")
    told.event("2", None, "Started", "Error")
    told.view("Error", "2", "failed", j1="Completed 1", j2="Failed 1")
    told.result((2, 1), 1)
    told.result((2, 1), 2, "Failed")
    told.job(2, "c")
    told.start("2.2", "flow.retry", nodes=[])
    told.view("Started", "2.2", j1="Completed 1", j2="Ready 1")
    told.deliver(2, "@40.2/1.0", "c")
    told.event("2.2", 2, "Pending", *ATTEMPT, "Completed")
    told.event("2.2", None, "Started", "Finished")
    told.view("Finished", "2.2", j1="Completed 1", j2="Completed 2")
    told.result((2, 2), 1)
    told.result((2, 2), 2)
    told.history.dispatches = [
        {"transport_id": f"{OWN}:{each}", "status": "Acknowledged"} for each in ("1@40.2", "2@40.2/1.0")
    ]


def test_a_history_that_follows_the_documents_has_no_problem() -> None:
    assert problems_of(story()) == []
    assert "flow.retry" in written(story())


# --- planted errors


def _view(history: History, place: int, **state: Any) -> None:
    view = history.views[place]
    history.views[place] = replace(view, state={**view.state, **state})


def _node_of_view(history: History, place: int, job: str, text: str) -> None:
    nodes = history.views[place].state["nodes"]
    _view(history, place, nodes={**nodes, job: _node(text)})


def _call(history: History, method: str, number: int = 0, **changes: Any) -> None:
    places = [place for place, each in enumerate(history.calls) if each.method == method]
    history.calls[places[number]] = replace(history.calls[places[number]], **changes)


def _reject(history: History, method: str, code: int, number: int = 0) -> None:
    _call(history, method, number, result=None, code=code)


def _event(history: History, number: int, **fields: Any) -> None:
    event = history.events[number - 1]
    history.events[number - 1] = replace(event, fields={**event.fields, **fields})


def _delivery(history: History, place: int, **changes: Any) -> None:
    history.deliveries[place] = replace(history.deliveries[place], **changes)


def _result(history: History, place: int, **fields: Any) -> None:
    result = history.results[place]
    history.results[place] = replace(result, fields={**result.fields, **fields})


def _old_result(history: History) -> None:
    """Show the result of the first run in the second one."""
    _result(history, 2, result=history.results[0].fields["result"])


def _old_result_after_retry(history: History) -> None:
    execution = replace(history.executions[-1], token="old", begun=history.views[-4].answered)
    history.executions.append(execution)
    _result(history, -1, result="old")


def _stored_late(history: History) -> None:
    """Let the retry send the job as it was before it was replaced."""
    _delivery(history, -1, job=history.deliveries[-2].job)


def _started_twice(history: History) -> None:
    history.calls.append(replace(history.calls[3], sent=11.5, answered=12.5))


def _cancelled_in_vain(history: History) -> None:
    """Accept a cancel long before the end of the first run."""
    answer = {"requested": True, "run_id": run_id("1")}
    history.calls.append(Call(method="flow.cancel", params={}, sent=13.1, answered=13.2, result=answer))


PLANTED: dict[str, tuple[Callable[[History], object], str]] = {
    "a view against the arrows": (
        lambda h: _node_of_view(h, 3, "1", "Dispatched 1"),
        "the job 1 moves against the arrows",
    ),
    "a job that is completed and then runs": (
        lambda h: _node_of_view(h, 4, "1", "Running 2"),
        "the job 1 moves against the arrows",
    ),
    "an ended run that goes on": (
        lambda h: _view(h, 2, status="Finished"),
        "the run flow:1a2b3c4d:3:40/1 moves against",
    ),
    "an attempt less": (lambda h: _node_of_view(h, 4, "1", "Completed 0"), "moves against the arrows"),
    "an earlier run": (lambda h: _view(h, -1, run_id=run_id("1")), "comes after the run"),
    "a run of another deployment": (lambda h: _view(h, -1, run_id="flow:00000000:3:40/2"), "is no run of"),
    "a run that is gone": (lambda h: h.purges.clear(), "is gone"),
    "a job that is gone": (lambda h: h.views[3].state["nodes"].pop("2"), "the job 2 is gone"),
    "a job that runs before anyone has it": (
        lambda h: _node_of_view(h, 1, "1", "Running 1"),
        "no supervisor has accepted it",
    ),
    "a refused job that runs": (
        lambda h: _delivery(h, 2, accepted=False),
        "the job 2 is Running, but no supervisor",
    ),
    "an open job in a finished flow": (
        lambda h: _node_of_view(h, -1, "2", "Failed 2"),
        "Finished with jobs that are not Completed",
    ),
    "an open job in a flow with an error": (
        lambda h: _node_of_view(h, 6, "2", "Ready 1"),
        "Error with jobs that are not over",
    ),
    "a created flow with a begun job": (lambda h: _node_of_view(h, 0, "1", "Ready 0"), "Created with jobs"),
    "another failed job": (lambda h: _view(h, 6, failed_job=1), "the failed job is 1"),
    "a wait for what is satisfied": (
        lambda h: _node_of_view(h, 7, "2", "Ready 1 go"),
        "waits for go, which is satisfied",
    ),
    "no wait for what is not satisfied": (
        lambda h: _node_of_view(h, 1, "2", "Pending 0"),
        "does not wait for go",
    ),
    "a cancel by nobody": (lambda h: _view(h, 6, cause="cancelled"), "nobody has cancelled"),
    "a cancel in vain": (_cancelled_in_vain, "a cancel was accepted"),
    "another status than the jobs say": (lambda h: _view(h, -1, status="Error"), "another status than"),
    "a wrong cause": (
        lambda h: _node_of_view(h, 6, "2", "Cancelled 1 upstream_failed"),
        "Cancelled with the cause",
    ),
    "a gap": (lambda h: h.events.pop(3), "the numbers of the events"),
    "a sequence that restarts": (lambda h: _event(h, 12, seq=1), "the numbers of the events"),
    "an event of an earlier run": (lambda h: _event(h, 16, run_id=run_id("1")), "events of an earlier run"),
    "an event of another flow": (lambda h: _event(h, 2, context_id=4), "an event of another flow"),
    "a start without an event": (lambda h: _event(h, 1, node=1), "the events of the flow in the run (1, 1)"),
    "an end that is none": (
        lambda h: _event(h, 14, to="Error"),
        "the run (1, 1) is ['Finished'], but its events",
    ),
    "an arrow that is none": (lambda h: _event(h, 3, to="Running"), "there is no such arrow"),
    "a step from another status": (lambda h: _event(h, 4, **{"from": "Ready"}), "the job 1 was Dispatched"),
    "an end by events that is none": (
        lambda h: _event(h, 29, to="Failed"),
        "the events of the job 2 end with Failed",
    ),
    "more attempts than retries": (
        lambda h: _call(h, "job.create", params={"job": {**h.calls[0].params["job"], "retries": 0}}),
        "more attempts than",
    ),
    "an internal error": (lambda h: _reject(h, "node.satisfy", -32603, 2), "rejected without a reason"),
    "a rejected repetition": (
        lambda h: _reject(h, "node.satisfy", -32004, 1),
        "an identical call was accepted",
    ),
    "a job replaced while it runs": (
        lambda h: _call(h, "job.create", 1, sent=14.0, answered=14.5),
        "accepted although a run is open",
    ),
    "a replacement that is rejected": (
        lambda h: _reject(h, "job.create", -32004),
        "rejected without a reason",
    ),
    "a retry that is rejected": (lambda h: _reject(h, "flow.retry", -32004), "rejected without a reason"),
    "a number that was used before": (
        lambda h: _call(h, "flow.start", 1, result={**h.calls[3].result}),
        "the run does not have the next number",
    ),
    "a run that nobody has started": (
        lambda h: h.calls.remove(next(each for each in h.calls if each.method == "flow.retry")),
        "nobody has started the run (2, 2)",
    ),
    "a start beside an open run": (_started_twice, "a second run beside"),
    "a start without a run": (lambda h: _view(h, 1, run_id=None, status="Created"), "the next view shows"),
    "a retry with another number": (
        lambda h: _call(h, "flow.retry", result={**h.calls[3].result, "run_id": run_id("2.3")}),
        "the run does not have the next number after (2, 1)",
    ),
    "a cancel of nothing": (
        lambda h: h.calls.append(
            Call(
                method="flow.cancel",
                params={},
                sent=0.5,
                answered=0.6,
                result={"requested": True, "run_id": run_id("1")},
            )
        ),
        "no run is open",
    ),
    "a cancel that sees no run": (
        lambda h: h.calls.append(
            Call(
                method="flow.cancel",
                params={},
                sent=13.1,
                answered=13.2,
                result={"requested": False, "run_id": run_id("1")},
            )
        ),
        "a run is open",
    ),
    "a replaced flow with other jobs": (
        lambda h: h.views[0].state["nodes"].pop("2"),
        "the next view has the jobs",
    ),
    "a replaced flow with a run": (
        lambda h: _call(h, "flow.create", result={"status": "Started", "run_id": run_id("1")}),
        "the new flow has a run",
    ),
    "a job that was not added": (
        lambda h: h.calls.append(
            Call(
                method="flow.add_nodes",
                params={"nodes": [{"id": 3}]},
                sent=13.1,
                answered=13.2,
                result={"nodes": {"1": {}, "2": {}}},
            )
        ),
        "the result does not have the jobs",
    ),
    "what nobody has satisfied": (
        lambda h: _call(h, "node.satisfy", result={"satisfied": False}),
        "nobody had satisfied it before",
    ),
    "a job of another tenant": (
        lambda h: _delivery(h, 0, id="1a2b3c4d:4:11:1"),
        "a job of another place",
    ),
    "a job of another flow": (lambda h: _delivery(h, 3, id=f"{OWN}:1@41.2"), "a job of another flow"),
    "another secret": (lambda h: _delivery(h, 0, secret=None), "without the secret of its runner"),
    "a job before the start": (lambda h: _delivery(h, 0, at=1.0), "the run had not started"),
    "a job after the end": (lambda h: _delivery(h, 0, at=99.0), "the run had ended"),
    "a generation too many": (
        lambda h: _delivery(h, 0, id=f"{OWN}:1/1.0"),
        "the generation is not among those",
    ),
    "a job of no node": (lambda h: _delivery(h, 0, id=f"{OWN}:9"), "the flow does not have the job"),
    "a job before its prerequisite": (
        lambda h: _delivery(h, 2, at=h.deliveries[1].at),
        "nobody had satisfied go",
    ),
    "a job before its parent": (
        lambda h: _delivery(h, 1, succeeds=False),
        "the job 1 was not completed",
    ),
    "the old job in a retry": (_stored_late, "but must be one of"),
    "a job sent twice": (lambda h: h.deliveries.append(h.deliveries[0]), "was sent 2 times"),
    "a job that was never sent": (
        lambda h: (h.deliveries.pop(2), h.results.pop()),
        "the supervisor has never received the job: the job 2 is Completed",
    ),
    "a success that counts as a failure": (
        lambda h: _delivery(h, 4, succeeds=True),
        "succeeds: the job 2 is Failed",
    ),
    "a success that is repeated": (lambda h: _delivery(h, 0, succeeds=True), "repeated although"),
    "a failure without its retries": (
        lambda h: _call(h, "job.create", 1, params={"job": {**h.calls[1].params["job"], "retries": 2}}),
        "it failed after 0 of [2] retries",
    ),
    "a result of an earlier run": (_old_result, "it is the result of"),
    "a result of an earlier generation": (_old_result_after_retry, "was made before the run (2, 2) began"),
    "a job that ran again": (
        lambda h: _call(h, "flow.retry", params={"nodes": [7]}),
        "the job was not to run again",
    ),
    "a result of another job": (lambda h: _result(h, 0, job_id=2), "it is the result of"),
    "a result of nobody": (lambda h: _result(h, 0, result="x"), "no supervisor of this flow"),
    "no result": (lambda h: _result(h, 0, result=None), "a job has a result if"),
    "no error": (lambda h: _result(h, 3, error=None), "a job has an error if"),
    "an open dispatch": (lambda h: h.dispatches[0].update(status="Dispatched"), "a dispatch stays open"),
    "an acknowledged dispatch of nobody": (
        lambda h: h.dispatches.append({"transport_id": f"{OWN}:1@40.2/0.7", "status": "Acknowledged"}),
        "has never received what it has acknowledged",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_reported(name: str) -> None:
    plant, text = PLANTED[name]
    history = story()
    plant(history)
    found = problems_of(history)
    assert any(text in problem for problem in found), found


# --- the limit of jobs in flight


def _beside(history: History, begun: float, ended: float) -> None:
    """Run another job of the first run."""
    history.executions.append(Execution(id=f"{OWN}:7", token="beside", begun=begun, ended=ended))


@pytest.mark.parametrize(
    ("eras", "begun", "is_reported"),
    [
        ([Era(limit=1, begun=0.0)], 35.5, True),
        ([Era(limit=1, begun=0.0)], 36.5, False),
        ([Era(limit=2, begun=0.0)], 35.5, False),
        ([Era(limit=None, begun=0.0)], 35.5, False),
        ([Era(limit=None, begun=0.0, ended=20.0), Era(limit=1, begun=20.0)], 35.5, False),
        ([Era(limit=2, begun=0.0, ended=20.0), Era(limit=1, begun=20.0)], 35.5, True),
        ([Era(limit=2, begun=0.0, ended=34.0), Era(limit=1, begun=34.0)], 35.5, False),
    ],
)
def test_a_limit_holds_once_it_is_there_for_runs_that_it_concerns(
    eras: list[Era], begun: float, *, is_reported: bool
) -> None:
    history = story()
    _beside(history, begun, 40.0)
    assert bool([*limit_problems([history], eras)]) is is_reported


# --- the supervisors


@pytest.mark.parametrize(
    ("timeout", "some_succeed"), [(SYNC_SEC, True), (POLL_SEC, True), (SHORT_SEC, False)]
)
def test_fates_are_those_of_the_seed_and_of_every_kind(timeout: float, some_succeed: bool) -> None:
    fates = [fate(1, f"{OWN}:{job}", timeout) for job in range(200)]
    assert fates == [fate(1, f"{OWN}:{job}", timeout) for job in range(200)]
    assert fates != [fate(2, f"{OWN}:{job}", timeout) for job in range(200)]
    assert {each.succeeds for each in fates} == ({True, False} if some_succeed else {False})
