"""`flowkit workers` combines the registry, the processes that poll, and the attempts that run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from flowkit.adapters.tasks.queries import RunningAttempt
from flowkit.adapters.worker_registry import RegisteredWorker
from flowkit.cli.tasks.workers import Busy, ProcessKind, format_busy, make_views

NOW = 1_000.0


def row(worker_id: str, seen_sec: float = 10.0, **fields: Any) -> RegisteredWorker:
    """Return the row of a worker with two slots that announces itself every minute."""
    known: dict[str, Any] = {
        "roles": ("clean",),
        "version": "1.4",
        "slots": 2,
        "online": True,
        "external": False,
        "in_engine": False,
        "last_seen": datetime.fromtimestamp(NOW - seen_sec, UTC),
        "announce_interval_sec": 60.0,
    }
    return RegisteredWorker(worker_id=worker_id, **(known | fields))


def running(worker: str, node_id: str = "a") -> RunningAttempt:
    """Return an attempt that has been running for five seconds."""
    return RunningAttempt(task_id="t", node_id=node_id, epoch=1, worker=worker, started_at=NOW - 5)


def test_engines_and_bridges_come_before_the_workers() -> None:
    polled = {
        (ProcessKind.BRIDGE, "flowkit-bridge-1"): (NOW - 1, ("mail",)),
        (ProcessKind.ENGINE, "engine-1"): (NOW - 2, ()),
    }
    views = make_views([row("x-1", external=True), row("w-1")], polled, [running("w-1")], NOW)
    assert [(view.worker_id, view.kind.value) for view in views] == [
        ("engine-1", "engine"),
        ("flowkit-bridge-1", "bridge"),
        ("w-1", "worker"),
        ("x-1", "external"),
    ]
    assert [len(view.busy) for view in views] == [0, 0, 1, 0]
    assert views[2].busy == (Busy(task_id="t", node_id="a", attempt=1, seconds=5.0),)


@pytest.mark.parametrize(
    ("worker", "state"),
    [
        (row("w"), "online"),
        (row("w", 64.0), "online"),
        (row("w", 68.0), "silent"),
        (row("w", 68.0, online=False), "offline"),
    ],
)
def test_state_is_silent_once_an_announcement_is_overdue(worker: RegisteredWorker, state: str) -> None:
    assert make_views([worker], {}, [], NOW)[0].state.value == state


def test_engine_that_hosts_handlers_is_one_row_with_roles() -> None:
    polled: Any = {(ProcessKind.ENGINE, "engine-1"): (NOW, ())}
    [view] = make_views([row("engine-1", in_engine=True)], polled, [], NOW)
    assert (view.kind, view.roles) == (ProcessKind.ENGINE, ("clean",))


def test_only_the_first_attempts_of_a_busy_worker_are_named() -> None:
    busy = [Busy(task_id="t", node_id=name, attempt=1, seconds=None) for name in "abcde"]
    assert format_busy(busy) == "a of t, b of t, c of t, and 2 more"
    assert (
        format_busy([Busy(task_id="t", node_id="a", attempt=3, seconds=90)]) == "a of t (attempt 3) for 90 s"
    )
