"""The heartbeat rules: which attempts run and are silent, and which reports a task accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.workflow.v1 import PendingActivityInfo
from tests.unit.graphs import node

from flowkit import CoordinatorConfig
from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.core.time import LeaseObserver
from flowkit.engine.silent_attempts import SilenceCheck, find_running_attempts
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState, NodeStatus, SilenceReport, SilentAttempt, TaskStatus
from flowkit.testing import memory_database
from flowkit.workflows.deadlines import SilentAttempts
from flowkit.workflows.display.task_status import is_dead, open_status
from flowkit.workflows.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from flowkit.models import AttemptFailure

RUN = "run-1"
STARTED, SCHEDULED = 2, 1


class Stopped:
    """Nodes `n0` and `n1` in given states, and what the rules stop."""

    def __init__(self, *states: NodeState) -> None:
        nodes = [node(f"n{i}") for i in range(len(states))]
        self.scheduler = Scheduler(parse_graph({"nodes": nodes}), list(states))
        self.calls: list[tuple[int, str, str]] = []
        self.silence = SilentAttempts(self.scheduler, run_id=RUN, stop_nodes=self.stop)

    def stop(self, failures: dict[int, AttemptFailure], reason: str) -> None:
        """Note the nodes of a call."""
        for index, failure in failures.items():
            self.calls.append((index, failure.code, reason))
            self.scheduler.states[index].status = NodeStatus.CANCELLING


def running(epoch: int = 1) -> NodeState:
    """Return the state of a node that runs."""
    return NodeState(status=NodeStatus.RUNNING, epoch=epoch)


def report(*silent: tuple[str, int, float], hard_sec: float = 0.0, run_id: str = RUN) -> SilenceReport:
    """Return a report about attempts: node, epoch and seconds without a heartbeat."""
    attempts = [SilentAttempt(node_id=name, epoch=epoch, silent_sec=sec) for name, epoch, sec in silent]
    return SilenceReport(run_id=run_id, silent=attempts, hard_sec=hard_sec)


OUTDATED = {
    "other_run": report(("n0", 1, 9), run_id="run-0"),
    "other_epoch": report(("n0", 2, 9)),
    "other_node": report(("x", 1, 9)),
    "deferred": report(("n1", 3, 9)),
    "one_of_two": report(("n0", 1, 9), ("n1", 3, 9)),
    "nothing": report(),
}


@pytest.mark.parametrize("given", OUTDATED.values(), ids=OUTDATED)
def test_outdated_report_is_rejected(given: SilenceReport) -> None:
    task = Stopped(running(), NodeState(status=NodeStatus.DEFERRED, epoch=3))
    assert task.silence.problem(given)


def test_node_is_silent_until_a_report_omits_it() -> None:
    silence = Stopped(running(), running()).silence
    assert silence.problem(report(("n1", 1, 5))) is None
    silence.accept(report(("n1", 1, 5)))
    assert (silence.nodes, silence.has_events) == ([1], True)
    silence.process_events()
    assert (silence.has_events, silence.problem(report(("n1", 1, 6)))) == (
        False,
        "the report changes nothing",
    )
    assert silence.problem(report()) is None
    silence.accept(report())
    assert silence.nodes == []


@pytest.mark.parametrize("later", [NodeState(status=NodeStatus.DEFERRED, epoch=1), running(2)])
def test_silence_ends_with_its_attempt(later: NodeState) -> None:
    task = Stopped(running())
    task.silence.accept(report(("n0", 1, 5)))
    task.scheduler.states[0].status, task.scheduler.states[0].epoch = later.status, later.epoch
    assert task.silence.nodes == []


def test_attempt_that_is_silent_for_too_long_is_stopped_once() -> None:
    task = Stopped(running(), running())
    lost = report(("n0", 1, 7), ("n1", 1, 5), hard_sec=6)
    task.silence.accept(lost)
    task.silence.process_events()
    assert task.calls == [(0, "heartbeat_timeout", "silence")]
    assert task.silence.nodes == [0, 1]
    assert task.silence.problem(lost) == "the report changes nothing"
    task.silence.process_events()
    assert len(task.calls) == 1


def test_node_that_ended_after_the_report_is_not_stopped() -> None:
    task = Stopped(running())
    task.silence.accept(report(("n0", 1, 7), hard_sec=6))
    task.scheduler.states[0].status = NodeStatus.FINISHED
    task.silence.process_events()
    assert task.calls == []


def test_task_whose_attempts_are_all_silent_is_deferred() -> None:
    scheduler = Stopped(running()).scheduler
    assert open_status(scheduler, waits=True) is TaskStatus.DEFERRED
    assert open_status(scheduler) is TaskStatus.RUNNING


@pytest.mark.parametrize(("code", "dead"), [("heartbeat_timeout", True), ("flaky", False)])
def test_task_is_dead_if_a_silent_attempt_made_it_fail(code: str, dead: bool) -> None:
    failed = NodeState(status=NodeStatus.FAILED, epoch=1, reason_code=code)
    assert is_dead(Stopped(failed, NodeState(status=NodeStatus.FINISHED)).scheduler) is dead


# --- the sweep ----------------------------------------------------------------------------------------------------


def pending(
    activity_id: str, *, state: Any = STARTED, heartbeat: int = 0, **fields: Any
) -> PendingActivityInfo:
    """Return an activity as Temporal describes it, which started at second 100."""
    made = PendingActivityInfo(activity_id=activity_id, state=state, last_started_time=Timestamp(seconds=100))
    made.activity_type.name = "crawler"
    made.last_heartbeat_time.seconds = heartbeat
    made.last_worker_identity = fields.get("identity", "w-1")
    return made


def test_started_attempts_run_and_other_activities_do_not() -> None:
    activities = [
        pending("a.b.12", heartbeat=150),
        pending("c.1", identity="flowkit-bridge-x"),
        pending("d.1", state=SCHEDULED),
        pending("7"),
        pending("record.x"),
    ]
    found = [*find_running_attempts(activities, "q")]
    assert [(each.node_id, each.epoch, each.heard_at, each.external) for each in found] == [
        ("a.b", 12, 150.0, False),
        ("c", 1, 100.0, True),
    ]
    assert {(each.name, each.queue) for each in found} == {("crawler", "q.crawler")}


class FakeClient:
    """A server without pollers, on which the updates of workflows end."""

    namespace = "default"

    def __init__(self) -> None:
        self.reports: list[SilenceReport] = []
        self.workflow_service = self

    async def describe_task_queue(self, request: Any, **options: Any) -> Any:
        """Return no pollers."""
        return SimpleNamespace(pollers=[])

    def get_workflow_handle(self, task_id: str, run_id: str) -> Any:
        """Return a handle whose updates are noted."""
        return SimpleNamespace(execute_update=self._update)

    async def _update(self, name: str, sent: SilenceReport, rpc_timeout: Any) -> None:
        assert name == "report_silence"
        self.reports.append(sent)


def described(*activities: PendingActivityInfo, queue: str = "q") -> Any:
    """Return a running workflow with these activities, as Temporal describes it."""
    raw = SimpleNamespace(pending_activities=activities)
    return SimpleNamespace(id="t", run_id=RUN, task_queue=queue, raw_description=raw)


@pytest.fixture
def client() -> FakeClient:
    """A server without pollers."""
    return FakeClient()


@pytest.fixture
def db() -> Any:
    """An empty database."""
    return memory_database()


class Engine:
    """The check of an engine's queue `q`."""

    def __init__(self, client: Any, db: Any, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        self._now = 0.0
        patch.setattr(LeaseObserver, "now", lambda observer: self._now)
        self._check = SilenceCheck(client, db, CoordinatorConfig(queue="q", **settings))

    async def look(self, description: Any, document: dict[str, Any] | None = None) -> None:
        """Check a task."""
        await self._check.check(document or {"id": "t"}, description)

    async def look_twice(self, description: Any, document: dict[str, Any] | None = None) -> None:
        """Check a task, and check it again after more than an hour."""
        await self.look(description, document)
        self.wait()
        await self.look(description, document)

    def wait(self) -> None:
        """Let more than an hour pass."""
        self._now += 3_601


async def online(db: Any, *roles: str) -> None:
    """Register a worker of these roles."""
    await WorkerRegistry(db).register("w-1", roles, "1", 1, 1.0)


async def test_silent_attempt_of_a_served_role_is_reported_once_an_engine_has_seen_its_silence(
    client: FakeClient, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of Temporal, its last heartbeat may have arrived long ago, or later than now."""
    await online(db, "indexer", "crawler")
    engine, silent = Engine(client, db, monkeypatch), [pending("b.1"), pending("a.2", heartbeat=2**33)]
    await engine.look(described(*silent, pending("c.1", heartbeat=150)))
    assert client.reports == []
    engine.wait()
    await engine.look(described(*silent, pending("c.1", heartbeat=151)))
    (sent,) = client.reports
    assert [(each.node_id, each.epoch) for each in sent.silent] == [("a", 2), ("b", 1)]
    assert (sent.run_id, sent.hard_sec) == (RUN, 3600)


async def test_time_without_a_worker_of_the_role_does_not_count(
    client: FakeClient, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(client, db, monkeypatch)
    await engine.look_twice(described(pending("a.1")))
    await online(db, "crawler")
    await engine.look(described(pending("a.1")))
    assert client.reports == []


UNREPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "rules_off": ({"heartbeat_soft_sec": 0, "heartbeat_hard_sec": 0}, "q"),
    "other_queue": ({}, "other"),
    "shown_already": ({"heartbeat_hard_sec": 0}, "q"),
}


@pytest.mark.parametrize(("settings", "queue"), UNREPORTED.values(), ids=UNREPORTED)
async def test_report_that_no_task_needs_is_not_sent(
    client: FakeClient, db: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], queue: str
) -> None:
    await online(db, "crawler")
    shown = ["a"] if settings.get("heartbeat_soft_sec") is None and queue == "q" else []
    document = {"id": "t", "coordinator": {"liveness": {"silent_nodes": shown}}}
    engine = Engine(client, db, monkeypatch, **settings)
    await engine.look_twice(described(pending("a.1"), queue=queue), document)
    assert client.reports == []


async def test_end_of_the_silence_is_reported(
    client: FakeClient, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"id": "t", "coordinator": {"liveness": {"silent_nodes": ["a"]}}}
    await Engine(client, db, monkeypatch).look(described(), document)
    assert [sent.silent for sent in client.reports] == [[]]


async def test_external_attempt_is_silent_from_the_last_event_of_its_worker(
    client: FakeClient, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await online(db, "crawler")
    identity = "flowkit-bridge-x"
    rows = {"accepted": {"accepted_at": 50.0, "lease": {"expires_at": 130.0, "ttl_sec": 60.0}}, "queued": {}}
    for name, fields in rows.items():
        row = {"task_id": "t", "node_id": name, "attempt_epoch": 1, "state": "open", "accepted_at": None}
        await db.dispatches.insert_one({**row, **fields})
    activities = [pending(f"{name}.1", heartbeat=10**9, identity=identity) for name in rows]
    await Engine(client, db, monkeypatch).look_twice(described(*activities))
    (sent,) = client.reports
    assert [each.node_id for each in sent.silent] == ["accepted"]


def test_report_about_an_attempt_that_an_action_gives_up_is_rejected() -> None:
    task = Stopped(running())
    task.scheduler.resetting.add(0)
    assert task.silence.problem(report(("n0", 1, 7), hard_sec=6)) == "attempt 1 of node 'n0' does not run"
