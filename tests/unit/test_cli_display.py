"""The display of a task in a terminal: what a node waits for, and which of its past errors still matter."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.enums.v1 import PendingActivityState, TimeoutType
from temporalio.api.failure.v1 import Failure
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.converter import DataConverter

from flowkit.adapters.artifacts import FailedBatches
from flowkit.adapters.shards import ShardProgress
from flowkit.adapters.tasks.queries import ExternalRun, LatestNodeRun
from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.cli.tasks.display import (
    TaskLines,
    format_line,
    open_task_screen,
    task_table,
    tasks_table,
)
from flowkit.cli.tasks.operations import _print_task, decision_hints
from flowkit.cli.tasks.results import _print_task as print_results
from flowkit.client import TaskSummary
from flowkit.models import TaskStatus
from flowkit.models.waits import for_decision
from flowkit.reading import state as task_view
from flowkit.reading.notes import format_note
from flowkit.reading.results import debug_command, make_view
from flowkit.reading.state import (
    NodeRow,
    TaskView,
    add_external,
    add_pending,
    add_runs,
    add_set_aside,
    add_shards,
    add_waits,
    add_workers,
    find_untaken,
    find_workers,
    has_later_attempts,
    list_running_roles,
    mark_waiting,
    read_waits,
)

ERROR = "rates_unavailable: RatesUnavailable: the service answered 503 Service Unavailable"


def node(node_id: str = "enrich", status: str = "running", **fields: Any) -> NodeRow:
    """Return a node of the role `enrich`."""
    return NodeRow(node_id=node_id, status=status, **{"role": "enrich", "attempt": 1, **fields})


def task(*nodes: NodeRow) -> TaskView:
    """Return a running task."""
    return TaskView(task_id="orders", status=TaskStatus.RUNNING, source="workflow", nodes=nodes)


def printed(renderable: object, width: int = 100) -> str:
    """Return what a terminal of this width shows."""
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None, soft_wrap=True).print(renderable)
    return out.getvalue()


def test_running_node_waits_until_a_worker_has_taken_its_attempt() -> None:
    seen = mark_waiting(task(node("a"), node("b"), node("c", attempt=2)), frozenset({"a.1", "c.1"}))
    assert [each.waiting for each in seen.nodes] == [True, False, False]


@pytest.mark.parametrize("status", ["queued", "deferred", "cancelling", "finished", "failed"])
def test_only_a_running_node_waits_for_a_worker(status: str) -> None:
    (seen,) = mark_waiting(task(node("a", status)), frozenset({"a.1"})).nodes
    assert not seen.waiting


def test_node_taken_by_a_worker_no_longer_waits() -> None:
    once = mark_waiting(task(node("a")), frozenset({"a.1"}))
    assert not mark_waiting(once, frozenset()).nodes[0].waiting


def test_a_description_from_before_an_attempt_was_scheduled_is_noticed() -> None:
    """Otherwise its node would be shown as if a worker ran it."""
    pending = [PendingActivityInfo(activity_id="b.1")]
    description: Any = SimpleNamespace(raw_description=SimpleNamespace(pending_activities=pending))
    assert has_later_attempts(task(node("a"), node("b")), description)
    assert has_later_attempts(task(node("b", attempt=2)), description)
    assert not has_later_attempts(task(node("a", "finished"), node("b")), description)


def test_an_attempt_that_no_worker_has_started_is_known_although_the_document_lacks_it() -> None:
    """The document is what commands see of a large task, whose query omits nodes. It may be older than the events."""
    started = PendingActivityInfo(activity_id="b.3")
    untaken = PendingActivityInfo(
        activity_id="a.1", state=PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
    )
    others = [
        PendingActivityInfo(activity_id=each)
        for each in ("c.1", "d.1", "e.3", "f.2", "record", "elsewhere.1")
    ]
    description: Any = SimpleNamespace(
        raw_description=SimpleNamespace(pending_activities=[untaken, started, *others])
    )
    stored = task(
        node("a", "queued", attempt=0),
        node("b", "deferred", attempt=2),
        node("c", "queued", attempt=1),
        node("d", "finished", attempt=1),
        node("e", "running", attempt=2),
        node("f", "finished", attempt=1),
    )
    seen = mark_waiting(add_pending(stored, description), find_untaken(description))
    assert [(each.status, each.attempt, each.waiting) for each in seen.nodes] == [
        ("running", 1, True),
        ("running", 3, False),
        ("queued", 1, False),
        ("finished", 1, False),
        ("running", 3, False),
        ("running", 2, False),
    ]


def heartbeat(activity_id: str, *details: Any) -> PendingActivityInfo:
    """Return a running attempt with the details of its last heartbeat."""
    payloads = DataConverter.default.payload_converter.to_payloads(details)
    return PendingActivityInfo(activity_id=activity_id, heartbeat_details=Payloads(payloads=payloads))


async def test_waits_come_from_the_heartbeats_of_running_attempts() -> None:
    unreadable = Payload(metadata={"encoding": b"secret"}, data=b"?")
    pending = [
        heartbeat("a.1", {"state": "running", "waits_for": "node b"}),
        heartbeat("b.1"),
        heartbeat("c.1", {"state": "queued", "waits_for": "a worker"}),
        heartbeat("d.1", {"state": "running", "worker": "w-1"}),
        heartbeat("e.1", "text"),
        PendingActivityInfo(activity_id="f.1", heartbeat_details=Payloads(payloads=[unreadable])),
    ]
    description: Any = SimpleNamespace(raw_description=SimpleNamespace(pending_activities=pending))
    assert await read_waits(description, DataConverter.default) == {"a.1": "node b"}
    assert await read_waits(None, DataConverter.default) == {}


def test_only_the_current_attempt_of_a_running_node_shows_its_wait() -> None:
    nodes = node("a"), node("b", attempt=2), node("c", "finished")
    seen = add_waits(task(*nodes), {"a.1": "node b", "b.1": "node c", "c.1": "node a"})
    assert [each.waits_for for each in seen.nodes] == ["node b", "", ""]


NOTES: list[tuple[NodeRow, str]] = [
    (node(), ""),
    (node(waiting=True), "no worker has started it yet"),
    (node(note=ERROR), f"last attempt: {ERROR}"),
    (node(note=ERROR, silent=True), f"sends no heartbeats; last attempt: {ERROR}"),
    (node(note=ERROR, waiting=True), f"no worker has started it yet; last attempt: {ERROR}"),
    (node(waits_for="a free worker", note=ERROR), f"waits for a free worker; last attempt: {ERROR}"),
    (node(status="queued", waits_for="a slot of role r (2 of 2)"), "waits for a slot of role r (2 of 2)"),
    (node(worker="w-1"), "worker w-1"),
    (node(worker="x-1", external=True), "external worker x-1"),
    (node(status="finished", worker="w-1"), ""),
    (node(status="cancelling", note=ERROR), f"last attempt: {ERROR}"),
    (node(status="failed", note=ERROR), ERROR),
    (node(status="skipped", note="upstream_failed"), "upstream_failed"),
]


@pytest.mark.parametrize(("view", "reported"), NOTES)
def test_note_shows_what_a_node_waits_for_and_the_node_of_an_error(view: NodeRow, reported: str) -> None:
    assert format_note(view) == reported


def pending(state: str, **fields: Any) -> PendingActivityInfo:
    """Return the attempt `a.1` of worker w-1, which sent its last heartbeat at 100 s and has a timeout of 45 s."""
    found = PendingActivityInfo(activity_id="a.1", last_worker_identity="w-1", **fields)
    found.state = PendingActivityState.Value(f"PENDING_ACTIVITY_STATE_{state}")
    found.last_heartbeat_time.FromSeconds(100)
    found.activity_options.heartbeat_timeout.FromSeconds(45)
    return found


def seen_at(now: float, activity: PendingActivityInfo) -> NodeRow:
    """Return the running node `a` as a command shows it at a time."""
    description: Any = SimpleNamespace(raw_description=SimpleNamespace(pending_activities=[activity]))
    waiting = mark_waiting(task(node("a")), find_untaken(description))
    return add_workers(waiting, find_workers(description), now).nodes[0]


def test_running_node_shows_its_worker_and_since_when_the_worker_is_silent() -> None:
    assert format_note(seen_at(110, pending("STARTED"))) == "worker w-1"
    overdue = seen_at(130, pending("STARTED"))
    assert (overdue.heard_at, overdue.replaced_at, overdue.lost) == (100, 145, False)
    assert format_note(overdue).startswith("worker w-1 is silent since 00:01:40 UTC (")
    assert format_note(overdue).endswith("; replaced in 0 s unless it responds")


def test_lost_worker_is_named_until_another_one_takes_the_attempt() -> None:
    failure = Failure(message="activity Heartbeat timeout")
    failure.timeout_failure_info.timeout_type = TimeoutType.TIMEOUT_TYPE_HEARTBEAT
    lost = seen_at(150, pending("SCHEDULED", last_failure=failure))
    assert (lost.worker, lost.waiting, lost.lost) == ("w-1", False, True)
    assert "worker w-1 is lost: silent since 00:01:40 UTC (" in format_note(lost)
    assert format_note(seen_at(150, pending("SCHEDULED"))) == "no worker has started it yet"


def test_bridge_is_not_the_worker_of_an_external_attempt() -> None:
    bridged = pending("STARTED")
    bridged.last_worker_identity = f"{BRIDGE_PREFIX}1"
    assert seen_at(110, bridged).worker == ""
    run = LatestNodeRun(epoch=1, worker=f"{BRIDGE_PREFIX}1", started_at=90.0, ended_at=None)
    assert add_runs(task(node("a")), {"a": run}, 110).nodes[0].worker == ""


def test_silent_external_worker_is_replaced_at_the_end_of_its_lease() -> None:
    run = ExternalRun(worker_id="x-1", batches=2, waits_for="", heard_at=100.0, lease_until=160.0)
    early, late = (add_external(task(node("a")), {("a", 1): run}, at).nodes[0] for at in (110, 140))
    assert (early.worker, early.external, early.heard_at) == ("x-1", True, None)
    assert (late.heard_at, late.replaced_at) == (100, 160)


def test_duration_is_that_of_the_latest_attempt() -> None:
    run = LatestNodeRun(epoch=2, worker="w-1", started_at=90.0, ended_at=100.5)
    views = task(node("a", "finished", attempt=2), node("b", attempt=2), node("c", "queued", attempt=3))
    seen = add_runs(views, dict.fromkeys("abc", run), 110).nodes
    assert [(each.seconds, each.worker) for each in seen] == [(10.5, ""), (20.0, "w-1"), (None, "")]


def test_a_row_that_only_becomes_older_is_the_same_row() -> None:
    """So that pages get it once, and count on from its begin."""
    run = LatestNodeRun(epoch=1, worker="w-1", started_at=90.0, ended_at=None)
    early, late = (add_runs(task(node("a")), {"a": run}, at).nodes[0] for at in (100, 110))
    assert (early, early.began_at, early.ended_at) == (late, 90.0, None)
    assert [early.seconds, late.seconds] == [10.0, 20.0]


def test_duration_of_a_node_with_shards_begins_with_the_first_of_them() -> None:
    closing = LatestNodeRun(epoch=4, worker="w-1", started_at=100.0, ended_at=100.5)
    shards = dict.fromkeys("abc", ShardProgress(generation=0, started_at=45.5))
    views = task(
        node("a", "finished", attempt=4), node("b", attempt=5), node("c", attempt=1), node("d", attempt=4)
    )
    seen = add_runs(views, {"a": closing, "b": closing, "d": closing}, 110, shards).nodes
    assert [each.seconds for each in seen] == [55.0, 64.5, 64.5, 10.0]


def test_long_wait_is_shown_in_minutes_and_hours() -> None:
    retry_soon = node(status="deferred", next_retry_at=time.time() + 5_400.2, note=ERROR)
    assert format_note(retry_soon) == f"retry in 1 h 30 min: {ERROR}"
    assert format_note(node(status="deferred", next_retry_at=time.time() - 5)) == "retry in 0 s"


def test_without_a_terminal_a_taken_node_gets_its_own_line() -> None:
    out = io.StringIO()
    lines = TaskLines(Console(file=out, width=200))
    for view in (task(node(waiting=True)), task(node(waiting=True)), task(node())):
        lines.show(view, [])
    reported = [line.partition(" s  ")[2] for line in out.getvalue().splitlines()]
    assert reported == ["enrich  running, attempt 1 (no worker has started it yet)", format_line(node())]


def test_without_a_terminal_progress_gets_a_line_every_ten_seconds() -> None:
    out, now = io.StringIO(), [0.0]
    lines = TaskLines(Console(file=out, width=200), lambda: now[0])
    for at, batches in ((0.0, 0), (5.0, 3), (10.0, 6), (15.0, 9), (20.0, 12), (30.0, 12)):
        now[0] = at
        lines.show(task(node(batches=batches, shards=f"3 shards on 2 workers, {batches} of 90")), [])
    shown = [line.split(maxsplit=1)[0] for line in out.getvalue().splitlines()]
    assert shown == ["0.0", "10.0", "20.0"]
    assert "12 batches (3 shards on 2 workers, 12 of 90)" in out.getvalue()


def test_status_shows_complete_errors() -> None:
    shown = printed(task_table(task(node(status="failed", note=ERROR)), wide=True), width=90)
    assert "…" not in shown
    assert [word for word in ERROR.split() if word not in shown] == []


def test_watched_task_has_one_line_for_each_node() -> None:
    shown = printed(task_table(task(node(status="failed", note=ERROR)), "task orders", rows=5), width=90)
    assert len(shown.strip().splitlines()) == 4
    assert "…" in shown


def test_watched_table_shows_how_long_it_has_been_watched() -> None:
    out = io.StringIO()
    console = Console(file=out, width=90, height=30, force_terminal=True, color_system=None)
    with open_task_screen(console) as shown:
        shown.show(task(node()), ["no worker polls role enrich"])
    assert "task orders: running (watched for 0 s)" in out.getvalue()
    assert "! no worker polls role enrich" in out.getvalue()


def test_list_shows_the_time_zone_of_its_times() -> None:
    summary = TaskSummary(task_id="orders", status=TaskStatus.RUNNING, started_at="2026-01-31T12:00:00+00:00")
    head, row = printed(tasks_table([summary], wide=False)).splitlines()
    assert "created (UTC)" in head
    assert "2026-01-31 12:00" in row


class FakeServers:
    """Temporal with an engine whose workflow omits nodes from its query result, and without MongoDB."""

    def __init__(self, omitted: int) -> None:
        self.omitted = omitted

    def get_workflow_handle(self, task_id: str) -> FakeServers:
        """Return the task's workflow."""
        return self

    async def query(self, name: str, **options: Any) -> dict[str, Any]:
        """Return the query result of the workflow."""
        nodes = [{"node_id": "a", "type": "r", "status": "failed", "attempt_epoch": 1}]
        return {"status": "running", "nodes": nodes, "nodes_omitted": self.omitted}

    async def batches(self, task_id: str) -> dict[str, int]:
        """Return no batches."""
        return {}


@pytest.mark.parametrize("omitted", [0, 3])
async def test_truncated_workflow_status_is_not_used_for_the_view(
    omitted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pollers(*args: Any, **options: Any) -> set[str]:
        return {"engine"}

    monkeypatch.setattr(task_view, "recent_pollers", pollers)
    servers: Any = SimpleNamespace(temporal=FakeServers(omitted), catalog=FakeServers(omitted))
    description: Any = SimpleNamespace(task_queue="flowkit")
    seen = await task_view.TaskReader(servers, "t", description)._queried()
    assert (seen is None) == bool(omitted)


@pytest.mark.parametrize(("status", "shown"), [("queued", True), ("deferred", True), ("running", False)])
def test_wait_for_a_slot_is_part_of_the_view_until_the_attempt_starts(status: str, shown: bool) -> None:
    waits_for = "a slot of role r (2 of 2)"
    entry = {"node_id": "a", "type": "r", "status": status, "waits_for": waits_for, "next_retry_at": 1.0}
    view = task_view.read_query("t", {"status": "running", "nodes": [entry]}, {})
    assert view.nodes[0].waits_for == (waits_for if shown else "")
    assert view.nodes[0].next_retry_at is None


WAITING = task(
    node("load", "deferred", note="bad_input: no day").waiting_for(for_decision("failed with bad_input")),
    NodeRow(node_id="re view", role="approval", status="deferred").waiting_for(
        for_decision("approve or reject")
    ),
    node("clean"),
)


def test_hints_name_the_commands_that_decide() -> None:
    assert decision_hints(WAITING) == [
        "load waits for a decision: `flowkit retry orders load`, or skip, complete or fail",
        "re view waits for a decision: `flowkit decide orders 're view' approve`, or reject",
    ]


def test_hints_name_only_the_first_nodes_that_wait_for_a_decision() -> None:
    nodes = [node(f"n{i}", "deferred").waiting_for(for_decision("failed with x")) for i in range(7)]
    assert decision_hints(task(*nodes))[3:] == ["4 more nodes wait for a decision"]


def test_status_ends_with_the_hints_at_decisions(capsys: pytest.CaptureFixture[str]) -> None:
    _print_task(WAITING)
    printed = capsys.readouterr()
    assert "waits for a decision: failed with bad_input; last attempt: bad_input: no day" in printed.out
    assert printed.err.splitlines() == [f"  {hint}" for hint in decision_hints(WAITING)]


def test_status_names_the_command_that_debugs_the_first_failed_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _print_task(task(node("call", "failed", attempt=1), node("re view", "failed"), node("c")))
    hint = "  run a failed node here: `flowkit debug orders call --handler MODULE:CLASS`"
    assert capsys.readouterr().err.splitlines() == [hint]
    assert debug_command("a b", "n", "-1") == "flowkit debug 'a b' n --batch=-1 --handler MODULE:CLASS"


def test_nodes_that_wait_for_a_decision_come_first_if_not_all_fit() -> None:
    failed = [node(f"f{i}", "failed") for i in range(5)]
    shown = printed(task_table(task(*failed, WAITING.nodes[0]), rows=3))
    assert shown.index("load") < shown.index("f0")


def test_delay_ends_and_does_not_retry() -> None:
    delay = NodeRow(node_id="night", role="delay", status="deferred", next_retry_at=time.time() + 60)
    assert format_note(delay) in ("ends in 60 s", "ends in 59 s")


@pytest.mark.parametrize(
    ("status", "finished_at", "note"),
    [("running", None, True), ("failed", None, True), ("failed", datetime.now(UTC), False)],
)
def test_results_of_a_failing_task_can_still_change(
    status: str, finished_at: datetime | None, note: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [{"node_id": "load", "type": "load", "status": "cancelling"}]
    document = {"id": "t", "status": status, "finished_at": finished_at, "graph": {"nodes": nodes}}
    print_results(make_view(document, {}, {}, {}))
    assert ("its results can still change" in capsys.readouterr().err) is note


def test_batches_that_are_set_aside_are_seen_while_the_node_runs_and_after_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    aside = FailedBatches(codes={"slow": 2, "bad": 20}, latest="bad: no such city")
    found = {"a": aside, "b": aside}
    running = node("a", shards="2 shards on 2 workers, 22 of 903")
    views = task(running, node("b", "failed", note="x: y"), node("c"))
    seen = add_set_aside(views, found)
    text = "22 batches are set aside (bad 20, slow 2; latest: bad: no such city)"
    assert [format_note(each) for each in seen.nodes] == [f"{running.shards}; {text}", "x: y", ""]
    assert add_set_aside(seen, {}).nodes[0].failed_batches == 0
    _print_task(replace(seen, seconds=2.0, total_seconds=62.0))
    printed = capsys.readouterr()
    head = "task orders running; 44 batches are set aside (latest run for 2 s; 62 s since it was created)"
    assert printed.out.splitlines()[0] == head
    assert "22 batches are set aside in b: `flowkit batches orders b --failed`" in printed.err


def test_progress_counts_batches_that_are_set_aside_and_no_earlier_ones_make_a_rate() -> None:
    shards = ShardProgress(generation=1, started_at=100.0, before=880, workers={1: "w-1"})
    seen = add_shards(
        task(node("a", batches=881, failed_batches=19), node("s", "finished", batches=1_000)),
        {"a": shards},
        {"a": ["s"]},
        120,
    )
    assert seen.nodes[0].shards == "1 shard on 1 worker, 900 of 1,000, 1/s, 100 s left"


def test_shards_of_an_earlier_generation_have_no_part_in_the_duration_of_a_node() -> None:
    begun = LatestNodeRun(epoch=4, worker="w-1", started_at=100.0, ended_at=None, generation=1)
    shards = {"a": ShardProgress(generation=0, started_at=5.0)}
    (seen,) = add_runs(task(node("a", attempt=4)), {"a": begun}, 110, shards).nodes
    assert seen.seconds == 10


def test_a_node_of_which_something_runs_or_has_run_does_not_wait_for_its_first_worker() -> None:
    """Without MongoDB, nothing is known of shards but the attempts that Temporal has scheduled."""
    activities = [
        PendingActivityInfo(activity_id="wide.7", state=PendingActivityState.PENDING_ACTIVITY_STATE_STARTED),
        PendingActivityInfo(
            activity_id="wide.8", state=PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
        ),
        PendingActivityInfo(
            activity_id="again.1", attempt=2, state=PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
        ),
        PendingActivityInfo(
            activity_id="new.1", attempt=1, state=PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
        ),
    ]
    description: Any = SimpleNamespace(raw_description=SimpleNamespace(pending_activities=activities))
    assert find_untaken(description) == {"new.1"}


def test_roles_of_nodes_on_which_workers_run_are_not_missing() -> None:
    views = task(
        node("a", role="busy", worker="w-1"),
        node("b", role="busy", waiting=True),
        node("c", role="wide", shards="2 shards"),
        node("d", role="lost", worker="w-2", lost=True),
        node("e", role="none", waiting=True),
    )
    assert list_running_roles(views) == ["lost", "none"]
