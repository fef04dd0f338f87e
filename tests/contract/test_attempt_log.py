"""The `worker_events` of an attempt between its start and its end: few rows, of the documented form."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.contract.builders import AT, TASK, WORKER, attempt, documents_of
from tests.integration.harness import EVENT_TIMEOUT_SEC

from flowkit.activities import attempt_log
from flowkit.activities.attempt_log import AttemptEventLog
from flowkit.adapters.worker_events import WorkerEvents, batch_failed, batch_ok, heartbeat
from flowkit.attempt.supervision import AttemptFailed
from flowkit.models import AttemptFailure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from flowkit.activities.attempt_log import AttemptLog

LEASE = {"worker_id": WORKER, "lease_id": "lease-1", "deadline_ts_ms": 5_000}
BOOM = AttemptFailure(kind=FailureKind.FAILURE, code="boom", message="it broke")
DAY = 86_400


def test_payloads_equal_those_of_external_workers() -> None:
    ref = {"task_id": TASK, "node_id": "a", "batch_uid": "b1"}
    assert batch_ok(attempt(), WORKER, "b1", 7, AT).payload == {
        "kind": "BATCH_OK",
        "worker_id": WORKER,
        "batch_uid": "b1",
        "artifacts_ref": ref,
        "batches": 7,
    }
    assert batch_failed(attempt(), WORKER, "b1", BOOM, AT).payload == {
        "kind": "BATCH_FAILED",
        "worker_id": WORKER,
        "batch_uid": "b1",
        "artifacts_ref": ref,
        "reason_code": "boom",
        "permanent": False,
        "error": "it broke",
    }
    assert heartbeat(attempt(), LEASE, 20, AT).payload == {
        "kind": "TASK_HEARTBEAT",
        "worker_id": WORKER,
        "lease_id": "lease-1",
        "lease_deadline_ts_ms": int((AT + 45) * 1000),
    }


def test_hashes_equal_those_of_external_workers() -> None:
    """The examples of the protocol."""
    extract = replace(attempt("extract"), task_id="7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90")
    assert [
        event.event_hash
        for event in (
            heartbeat(extract, LEASE, 20, 1_764_000_000.5),
            batch_ok(extract, WORKER, "b1", 1, AT),
            batch_failed(extract, WORKER, "b2", BOOM, AT),
        )
    ] == [
        "4edb9727a5b75f32bb4fff955d08f4495de751ff",
        "34692dd4c04ca30c0e0943e91ac6a785019a6d43",
        "0f46281fa1b08aba79f542be95f975d3294d0444",
    ]


class Attempt:
    """An attempt whose log is called once a second of its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, db: Any = None) -> None:
        self.now = AT
        clock = SimpleNamespace(time=lambda: self.now)
        monkeypatch.setattr(attempt_log, "time", clock)
        events: Any = WorkerEvents(db) if db is not None else SimpleNamespace()
        self.log = AttemptEventLog(events)
        self._added: list[dict[str, Any]] = []

    def run(
        self,
        seconds: int,
        each_second: Callable[[AttemptLog, int], None] = lambda log, second: None,
        error: BaseException | None = None,
    ) -> list[dict[str, Any]]:
        """Run the attempt and return the payloads of its events, oldest first."""
        try:
            with self.log.attempt(attempt(), LEASE, lambda: False) as log:
                for second in range(seconds):
                    each_second(log, second)
                    self.now += 1
                    log.tick(self.now)
                if error is not None:
                    raise error
        except AttemptFailed:
            assert error is not None
        return [event.payload for event in self.log._waiting]


def kinds(payloads: list[dict[str, Any]]) -> list[str]:
    return [payload["kind"] for payload in payloads]


def store(log: AttemptLog, second: int) -> None:
    """Store a hundred batches in a second."""
    for number in range(100):
        log.batch_ok(f"b{second}-{number}")


def test_short_successful_attempt_logs_only_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds(Attempt(monkeypatch).run(4, store)) == ["TASK_DONE"]


def test_failure_names_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(log: AttemptLog, second: int) -> None:
        log.batch_ok("b1")
        log.batch_failed("b2", BOOM)

    left = Attempt(monkeypatch).run(1, fail, AttemptFailed(BOOM))
    assert kinds(left) == ["TASK_ACCEPTED", "BATCH_FAILED", "TASK_FAILED"]
    assert (left[1]["batch_uid"], left[1]["reason_code"]) == ("b2", "boom")


def test_long_attempt_coalesces_its_batches_and_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Attempt(monkeypatch).run(12, store)
    assert kinds(left) == ["TASK_ACCEPTED", *(["BATCH_OK"] * 8), "TASK_DONE"]
    assert [payload["batches"] for payload in left[1:-1]] == [*range(500, 1300, 100)]
    assert left[-2]["batch_uid"] == "b11-99"


def test_last_batches_are_counted_even_if_no_row_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Attempt(monkeypatch).run(5 * 60 + 7, store)
    assert [payload["batches"] for payload in left if payload["kind"] == "BATCH_OK"][-1] == 100 * (5 * 60 + 7)


def test_heartbeats_are_logged_at_their_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Attempt(monkeypatch).run(65)
    assert kinds(left) == ["TASK_ACCEPTED", *(["TASK_HEARTBEAT"] * 3), "TASK_DONE"]


def test_attempt_of_a_day_logs_a_few_hundred_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kinds(Attempt(monkeypatch).run(DAY, lambda log, second: log.batch_ok(f"b{second}")))
    assert 100 < found.count("BATCH_OK") < 250
    assert 50 < found.count("TASK_HEARTBEAT") < 200


async def test_rows_are_stored_under_their_hashes(monkeypatch: pytest.MonkeyPatch, db: Any) -> None:
    one = Attempt(monkeypatch, db)
    left = one.run(30, store)
    await one.log.flush()
    rows = await documents_of(db.worker_events)
    assert len(rows) == len(left) == len({row["event_hash"] for row in rows})


async def test_a_running_attempt_is_logged_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = asyncio.Event()

    class BlockingLog:
        async def prepare(self) -> None: ...

        async def append(self, events: list[Any], at: float) -> None:
            if any(event.payload["kind"] == "BATCH_OK" for event in events):
                written.set()

    blocking_log: Any = BlockingLog()
    log = AttemptEventLog(blocking_log, pause_sec=0.01)
    monkeypatch.setattr(attempt_log, "YOUNG_SEC", 0.0)
    running = asyncio.create_task(log.run())
    with log.attempt(attempt(), LEASE, lambda: False) as one:
        one.batch_ok("b1")
        await asyncio.wait_for(written.wait(), EVENT_TIMEOUT_SEC)
    running.cancel()
