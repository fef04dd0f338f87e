"""The log of attempts stores each event once and never delays or fails an attempt."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest
from pymongo.errors import BulkWriteError
from tests.contract.builders import AT, TASK, WORKER, attempt, documents_of, seconds
from tests.integration.harness import EVENT_TIMEOUT_SEC

from flowkit.activities.attempt_log import AttemptEventLog
from flowkit.adapters.worker_events import WorkerEvents, accepted, cancelled, done, failed
from flowkit.attempt.supervision import AttemptFailed
from flowkit.errors import Fenced, FlowKitError, StoreRefused, StoreTooLarge, StoreUnavailable
from flowkit.models import AttemptFailure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.adapters.worker_events import WorkerEvent

LEASE = {"worker_id": WORKER, "lease_id": "lease-1", "deadline_ts_ms": 5_000}
BOOM = AttemptFailure(kind=FailureKind.FAILURE, code="boom", message="it broke", permanent=True)


@pytest.fixture
async def events(db: Any) -> WorkerEvents:
    """The log of `db`, with its index."""
    found = WorkerEvents(db)
    await found.prepare()
    return found


@pytest.mark.parametrize("first", [0, 60])
async def test_events_expire_after_the_configured_time(db: Any, events: WorkerEvents, first: int) -> None:
    """An engine changes the index when it starts with another value, and removes it for 0."""
    for ttl_sec in (first, 3_599.5, 3_599.5):
        await events.expire_after(ttl_sec)
    index = (await db.worker_events.index_information())["ttl_worker_events"]
    assert (index["key"], index["expireAfterSeconds"]) == ([("created_at", 1)], 3_600)
    await events.expire_after(0)
    assert set(await db.worker_events.index_information()) == {"_id_", "uniq_worker_event"}


async def test_index_on_the_time_that_a_user_has_created_is_kept(db: Any, events: WorkerEvents) -> None:
    await db.worker_events.create_index("created_at", name="mine", expireAfterSeconds=5)
    await events.expire_after(60)
    await events.expire_after(0)
    assert set(await db.worker_events.index_information()) == {"_id_", "uniq_worker_event", "mine"}


# --- events -------------------------------------------------------------------------------------------------


async def test_event_is_stored_in_the_documented_form(db: Any, events: WorkerEvents) -> None:
    await events.append([accepted(attempt("a", epoch=2), LEASE, AT)], AT + 1)
    [row] = await documents_of(db.worker_events)
    assert seconds(row.pop("created_at")) == AT + 1
    del row["_id"]
    assert len(row.pop("event_hash")) == 40
    assert row == {
        "task_id": TASK,
        "node_id": "a",
        "step_type": "crawler",
        "payload": {
            "kind": "TASK_ACCEPTED",
            "worker_id": WORKER,
            "lease_id": "lease-1",
            "lease_deadline_ts_ms": 5_000,
        },
        "ts_ms": int(AT * 1000),
        "recv_ts_ms": int((AT + 1) * 1000),
        "attempt_epoch": 2,
        "metrics_applied": False,
    }


def test_payloads_equal_those_of_external_workers() -> None:
    ref = {"task_id": TASK, "node_id": "a"}
    assert done(attempt(), WORKER, AT).payload == {
        "kind": "TASK_DONE",
        "worker_id": WORKER,
        "artifacts_ref": ref,
        "final_uid": "__final__",
    }
    assert failed(attempt(), WORKER, BOOM, AT).payload == {
        "kind": "TASK_FAILED",
        "worker_id": WORKER,
        "reason_code": "boom",
        "permanent": True,
        "error": "it broke",
    }
    assert cancelled(attempt(), WORKER, AT).payload == {
        "kind": "CANCELLED",
        "worker_id": WORKER,
        "reason": "cancelled",
    }


def test_hashes_equal_those_of_external_workers() -> None:
    """The examples of the protocol."""
    extract = replace(attempt("extract"), task_id="7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90")
    lease = {**LEASE, "lease_id": "c6a1f0d2-58a5-4d0c-8f2b-1f3a9f4a7b11"}
    code = AttemptFailure(kind=FailureKind.FAILURE, code="unexpected_error")
    assert [
        event.event_hash
        for event in (
            accepted(extract, lease, AT),
            done(extract, WORKER, AT),
            failed(extract, WORKER, code, AT),
            cancelled(extract, WORKER, AT),
        )
    ] == [
        "64605e54e6017746e7756fcb998be0e9bd0ddcd9",
        "66bb98b308392a419eb9aa348dc96402f46a8e40",
        "6bba9302a43e43b2cb7c3470625bd13ecd7a902d",
        "6f4fa8562c60afe0a6d77ddd6fe7606a873d1298",
    ]


async def test_repeated_event_is_stored_once(db: Any, events: WorkerEvents) -> None:
    first, second = done(attempt("a"), WORKER, AT), done(attempt("b"), WORKER, AT)
    await events.append([], AT)
    await events.append([first], AT)
    await events.append([first, second, first], AT + 1)
    rows = await documents_of(db.worker_events)
    assert sorted((row["node_id"], seconds(row["created_at"])) for row in rows) == [("a", AT), ("b", AT + 1)]


async def test_any_text_of_a_handler_can_be_stored(db: Any, events: WorkerEvents) -> None:
    unencodable = AttemptFailure(kind=FailureKind.FAILURE, code="\ud800" * 1000, message="\udfff\0" * 10_000)
    await events.append([failed(attempt(), WORKER, unencodable, AT)], AT)
    [row] = await documents_of(db.worker_events)
    assert row["payload"]["reason_code"].startswith(r"\ud800")
    assert len(row["payload"]["error"]) <= 2_048


async def test_only_duplicate_key_errors_count_as_success() -> None:
    unconfirmed = BulkWriteError({"writeErrors": [], "writeConcernErrors": [{"code": 64}]})
    too_large = BulkWriteError({"writeErrors": [{"index": 0, "code": 11000}, {"index": 1, "code": 17419}]})
    for error, ours in ((unconfirmed, StoreUnavailable), (too_large, StoreTooLarge)):
        collection = SimpleNamespace(insert_many=AsyncMock(side_effect=error))
        with pytest.raises(ours):
            await WorkerEvents(SimpleNamespace(worker_events=collection)).append(
                [done(attempt(), WORKER, AT)], AT
            )


# --- the log that is written in the background --------------------------------------------------------------


class FailingLog:
    """A log that accepts events, or fails as often as the test requests."""

    def __init__(self, *failures: FlowKitError) -> None:
        self.failures = list(failures)
        self.rows: list[WorkerEvent] = []
        self.calls = 0
        self.written = asyncio.Event()

    async def prepare(self) -> None:
        """Do nothing."""

    async def append(self, events: Sequence[WorkerEvent], at: float) -> None:
        """Accept the events, or raise the next failure."""
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        self.rows += events
        self.written.set()

    @property
    def nodes(self) -> list[str]:
        """Return the nodes of the accepted events."""
        return [event.node_id for event in self.rows]


def log_into(failing_log: Any, **options: Any) -> AttemptEventLog:
    return AttemptEventLog(failing_log, **options)


UNAVAILABLE = StoreUnavailable("away")


async def test_events_are_written_in_groups_in_the_background() -> None:
    failing_log = FailingLog()
    log = log_into(failing_log, pause_sec=0)
    running = asyncio.create_task(log.run())
    for name in "abc":
        log.add(done(attempt(name), WORKER, AT))
    await asyncio.wait_for(failing_log.written.wait(), EVENT_TIMEOUT_SEC)
    running.cancel()
    assert (failing_log.nodes, failing_log.calls) == (["a", "b", "c"], 1)


async def test_events_wait_in_order_while_the_store_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    failing_log = FailingLog(UNAVAILABLE, UNAVAILABLE, UNAVAILABLE)
    log = log_into(failing_log, pause_sec=0)
    log.add(done(attempt("a"), WORKER, AT))
    assert not await log.flush()
    log.add(done(attempt("b"), WORKER, AT))
    running = asyncio.create_task(log.run())
    await asyncio.wait_for(failing_log.written.wait(), EVENT_TIMEOUT_SEC)
    running.cancel()
    assert failing_log.nodes == ["a", "b"]
    assert len([entry for entry in caplog.records if entry.levelno >= logging.WARNING]) == 1


async def test_oldest_events_are_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    failing_log = FailingLog(UNAVAILABLE)
    log = log_into(failing_log, waiting=2)
    for name in "abcd":
        log.add(done(attempt(name), WORKER, AT))
    assert not await log.flush()
    log.add(done(attempt("e"), WORKER, AT))
    assert await log.flush()
    assert (failing_log.nodes, log.lost) == (["d", "e"], 3)
    assert caplog.text.count("FlowKit drops the oldest") == 1


async def test_rejected_events_do_not_delay_others(caplog: pytest.LogCaptureFixture) -> None:
    failing_log = FailingLog(StoreRefused("never"))
    log = log_into(failing_log)
    log.add(done(attempt("a"), WORKER, AT))
    assert await log.flush()
    log.add(done(attempt("b"), WORKER, AT))
    assert await log.flush()
    assert failing_log.nodes == ["b"]
    assert "never" in caplog.text


async def test_interrupted_write_is_repeated(db: Any) -> None:
    """The first try may have reached the server; nothing is stored twice."""
    events = WorkerEvents(db)
    log = AttemptEventLog(CancelledAfterStoring(events))  # type: ignore[arg-type]
    log.add(done(attempt("a"), WORKER, AT))
    with pytest.raises(asyncio.CancelledError):
        await log.flush()
    await log.close()
    assert [row["node_id"] for row in await documents_of(db.worker_events)] == ["a"]


class CancelledAfterStoring:
    """Is cancelled once, just after it stored its events."""

    def __init__(self, events: WorkerEvents) -> None:
        self._events = events
        self._cut = False

    async def prepare(self) -> None:
        """Create the index."""
        await self._events.prepare()

    async def append(self, events: Sequence[WorkerEvent], at: float) -> None:
        """Store the events, and be cancelled."""
        await self._events.append(events, at)
        if not self._cut:
            self._cut = True
            raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("error", "asked", "reported"),
    [
        (None, False, {"kind": "TASK_DONE"}),
        (None, True, {"kind": "TASK_DONE"}),
        (AttemptFailed(BOOM), False, {"kind": "TASK_FAILED", "reason_code": "boom", "permanent": True}),
        (Fenced(), False, {"kind": "TASK_FAILED", "reason_code": "fenced"}),
        (asyncio.CancelledError(), True, {"kind": "CANCELLED", "reason": "cancelled"}),
        (asyncio.CancelledError(), False, {"kind": "TASK_FAILED", "reason_code": "worker_shutdown"}),
    ],
)
async def test_attempt_logs_its_start_and_its_end(
    error: BaseException | None, asked: bool, reported: dict[str, Any]
) -> None:
    failing_log = FailingLog()
    log = log_into(failing_log)
    with (
        pytest.raises(type(error)) if error else nullcontext(),
        log.attempt(attempt(), LEASE, lambda: asked),
    ):
        if error is not None:
            raise error
    await log.flush()
    *starts, end = [event.payload for event in failing_log.rows]
    assert [start["kind"] for start in starts] == (["TASK_ACCEPTED"] if error else [])
    assert reported.items() <= end.items()
