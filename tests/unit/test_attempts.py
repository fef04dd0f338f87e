"""One attempt without servers: time limit, background tasks, cancel flags, and the errors that the workflow gets."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from queue import Queue
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.contract.builders import RUN, TASK, attempt, begun, opened
from tests.integration.harness import EVENT_TIMEOUT_SEC

from flowkit.adapters.outages import AttemptClock, retry_while_unavailable
from flowkit.adapters.tasks.cancel_flags import CancelFlags
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt import supervision
from flowkit.attempt.supervision import Attempt, HeartbeatThrottle, WorkerContext, renewal_pause_sec
from flowkit.core import loop_portal
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import StoreUnavailable
from flowkit.models import AttemptResult, FailureKind
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from flowkit.models import AttemptInput

FOREVER = 60.0


@dataclass
class FunctionRunner:
    """An executor that runs a function of the test until it is cancelled."""

    work: Callable[[], Awaitable[object]]
    stops: bool = True
    reasons: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    _task: asyncio.Task[Any] | None = None

    async def run(self) -> AttemptResult:
        self._task = asyncio.current_task()
        await self.work()
        return AttemptResult(worker_id="w")

    def cancel(self, reason: str, grace_sec: float) -> None:
        self.reasons.append(reason)
        if self._task is not None and self.stops:
            self._task.cancel()

    def show_end(self, reason: str, grace_sec: float) -> None:
        self.ends.append(reason)


async def endless() -> None:
    """Wait forever."""
    await asyncio.Event().wait()


@pytest.fixture
async def db() -> Any:
    """A database with one running task."""
    database = memory_database()
    await opened(TaskStore(database), "a", "b")
    await begun(TaskStore(database), attempt())
    return database


async def run(
    db: Any, body: FunctionRunner, given: AttemptInput, home: LoopPortal | None = None
) -> AttemptResult:
    """Run the executor as a Temporal worker would."""
    worker = WorkerContext(
        tasks=TaskStore(db), portal=home or LoopPortal(), worker_id="w", cancel_poll_sec=0.01
    )
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, workflow_id=TASK, workflow_run_id=RUN)

    async def run_attempt() -> AttemptResult:
        return await Attempt(worker, given, body).run()

    ending: Awaitable[AttemptResult] = environment.run(run_attempt)
    return await ending


async def failed(
    db: Any, body: FunctionRunner, given: AttemptInput, home: LoopPortal | None = None
) -> dict[str, Any]:
    """Return the failure that the workflow receives."""
    with pytest.raises(ApplicationError) as caught:
        await asyncio.wait_for(run(db, body, given, home), FOREVER)
    assert caught.value.non_retryable, "Temporal itself must not retry it: the next try would be lease_lost"
    found: dict[str, Any] = caught.value.details[0]
    return found


# --- time limit -------------------------------------------------------------------------------------------------


async def test_attempt_that_exceeds_its_time_limit_fails_with_timeout(db: Any) -> None:
    reported = await failed(db, FunctionRunner(endless), replace(attempt(), timeout_sec=0.05))
    assert (reported["kind"], reported["code"], reported["permanent"]) == (
        FailureKind.FAILURE,
        "timeout",
        False,
    )
    assert reported["message"] == "the attempt took longer than 0.05 s (timeout_sec)"


async def test_time_without_mongodb_does_not_count(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    away, limit_sec, later = iter([StoreUnavailable("away")] * 2), 60.0, 0.0
    monkeypatch.setattr(supervision, "AttemptClock", lambda: AttemptClock(lambda: time.monotonic() + later))

    async def store() -> str:
        nonlocal later
        for error in away:
            later += 2 * limit_sec
            raise error
        return "stored"

    body = FunctionRunner(lambda: retry_while_unavailable(store))
    assert (await run(db, body, replace(attempt(), timeout_sec=limit_sec))).worker_id == "w"
    assert later > limit_sec


async def test_attempt_that_ends_in_time_does_not_time_out(db: Any) -> None:
    async def quick() -> None:
        return

    assert (await run(db, FunctionRunner(quick), replace(attempt(), timeout_sec=5.0))).worker_id == "w"


@contextmanager
def another_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in its own thread, like the loop of handlers."""
    started: Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def serve() -> None:
        stop = asyncio.Event()
        started.put((asyncio.get_running_loop(), stop))
        await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, stop = started.get()
    yield loop
    loop.call_soon_threadsafe(stop.set)
    thread.join()


async def test_handler_that_blocks_its_loop_times_out(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "IGNORED_SEC", 0.1)
    released = threading.Event()

    async def block() -> None:
        released.wait(FOREVER)

    with another_loop() as loop:
        try:
            reported = await failed(
                db, FunctionRunner(block), replace(attempt(), timeout_sec=0.1), LoopPortal(loop)
            )
        finally:
            released.set()
    assert reported["code"] == "timeout"


@pytest.mark.parametrize("is_own_loop", [True, False])
async def test_attempt_that_ignored_its_cancels_ends_once_it_no_longer_does(
    db: Any, monkeypatch: pytest.MonkeyPatch, is_own_loop: bool
) -> None:
    monkeypatch.setattr(supervision, "IGNORED_SEC", 0.05)
    monkeypatch.setattr(loop_portal, "IGNORED_SEC", 0.05)
    ended, ignored = threading.Event(), 0

    async def ignore_two_cancels() -> None:
        nonlocal ignored
        try:
            while ignored < 2:
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                ignored += 1
            await asyncio.Event().wait()  # as a write does while the database is away
        finally:
            ended.set()

    timed = replace(attempt(), timeout_sec=0.1)
    with nullcontext(asyncio.get_running_loop()) if is_own_loop else another_loop() as loop:
        reported = await failed(db, FunctionRunner(ignore_two_cancels), timed, LoopPortal(loop))
        assert reported["code"] == "timeout"
        assert await asyncio.to_thread(ended.wait, EVENT_TIMEOUT_SEC)


# --- errors -----------------------------------------------------------------------------------------------------


async def test_unavailable_store_uses_no_retry(db: Any) -> None:
    async def read() -> None:
        raise StoreUnavailable("MongoDB is unavailable (AutoReconnect)")

    reported = await failed(db, FunctionRunner(read), attempt())
    assert (reported["kind"], reported["code"]) == (FailureKind.YIELDED, "mongo_unavailable")


class Unreadable(Exception):
    """An exception that cannot be converted to text."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("odd"), "RuntimeError: odd"),
        (RuntimeError("half a character: \ud83d"), "RuntimeError: half a character: \\ud83d"),
        (Unreadable(), "Unreadable: its message cannot be read"),
    ],
)
async def test_unexpected_error_is_an_ordinary_failure(db: Any, error: Exception, message: str) -> None:
    async def fail_unexpectedly() -> None:
        raise error

    reported = await failed(db, FunctionRunner(fail_unexpectedly), attempt())
    text, _, place = reported["message"].partition(", at ")
    assert (reported["kind"], reported["code"], text) == (FailureKind.FAILURE, "unexpected_error", message)
    assert re.fullmatch(r"tests/unit/test_attempts.py:\d+ in test_\w+.fail_unexpectedly", place)


# --- background tasks -------------------------------------------------------------------------------------------


async def test_error_in_one_background_task_does_not_stop_the_heartbeats(
    db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = asyncio.Event()

    class Counting(HeartbeatThrottle):
        """Sends heartbeats quickly; the attempt may end after ten."""

        asked = 0

        def pause_sec(self, lease_ttl_sec: float) -> float:
            self.asked += 1
            if self.asked > 10:
                beats.set()
            return 0.01

    def broken(*_: Any) -> Any:
        raise RuntimeError("an odd document")

    monkeypatch.setattr(supervision, "_UNSUPERVISED_SEC", 0.0)
    monkeypatch.setattr(supervision, "HeartbeatThrottle", Counting)
    monkeypatch.setattr(CancelFlags, "find_flagged", broken)
    assert (await asyncio.wait_for(run(db, FunctionRunner(beats.wait), attempt()), FOREVER)).worker_id == "w"


async def test_heartbeats_show_what_the_attempt_waits_for(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: Queue[tuple[Any, ...]] = Queue()
    waits = iter(["node b", None, None])
    enough = asyncio.Event()

    def next_wait() -> str | None:
        wait = next(waits, "")
        if wait == "":
            enough.set()
        return wait

    monkeypatch.setattr(supervision, "_UNSUPERVISED_SEC", 0.0)
    monkeypatch.setattr(HeartbeatThrottle, "pause_sec", lambda *_: 0.01)
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, workflow_id=TASK, workflow_run_id=RUN)
    environment.on_heartbeat = lambda *details: beats.put(details)
    worker = WorkerContext(tasks=TaskStore(db), portal=LoopPortal(), worker_id="w")

    async def run_attempt() -> AttemptResult:
        return await Attempt(worker, attempt(), FunctionRunner(enough.wait), next_wait).run()

    ended: Awaitable[AttemptResult] = environment.run(run_attempt)
    await asyncio.wait_for(ended, FOREVER)
    sent = [beats.get_nowait() for _ in range(3)]
    assert sent == [({"state": "running", "waits_for": "node b"},), (), ()]


# --- flags ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits."""
    monkeypatch.setattr(supervision, "_UNSUPERVISED_SEC", 0.0)
    monkeypatch.setattr(supervision, "_DELIVERY_SEC", 0.05)


async def flag(db: Any, **fields: Any) -> None:
    """Set the task's cancel flag."""
    flags = {
        "coordinator.cancelled": True,
        **{f"coordinator.{name}": value for name, value in fields.items()},
    }
    await db.tasks.update_one({"id": TASK}, {"$set": flags})


@pytest.mark.usefixtures("_at_once")
async def test_attempt_flagged_by_the_workflow_stops_and_waits_for_the_temporal_cancel(db: Any) -> None:
    await flag(db, cancel_run_id=RUN, cancel_reason="hard_fail:boom")
    body = FunctionRunner(endless)
    reported = await failed(db, body, attempt())
    assert body.reasons == ["hard_fail:boom"]
    assert (reported["kind"], reported["code"]) == (FailureKind.YIELDED, "cancel_pending")
    assert reported["message"].startswith(f"cancel requested by run {RUN} of the workflow (hard_fail:boom)")


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("stops", [True, False])
async def test_attempt_ends_without_using_budget_if_temporal_rejects_the_cancel(db: Any, stops: bool) -> None:
    """The environment of the test has no client, so every cancel is rejected."""
    await flag(db, cancelled_at="whenever", cancel_reason="too dear")
    body = FunctionRunner(endless, stops=stops)
    reported = await failed(db, body, replace(attempt(), cancel_grace_sec=0.05))
    assert body.reasons == ["too dear"]
    assert (reported["kind"], reported["code"]) == (FailureKind.YIELDED, "cancel_refused")
    assert "Temporal rejected the cancel" in reported["message"]


@pytest.mark.usefixtures("_at_once")
async def test_flag_of_another_run_does_not_stop_the_attempt(db: Any) -> None:
    await flag(db, cancel_run_id="an-earlier-run")
    checked = asyncio.Event()

    class WatchedFlags(CancelFlags):
        async def find_flag(self, attempt: AttemptInput) -> Any:
            found = await super().find_flag(attempt)
            asyncio.get_running_loop().call_later(0.05, checked.set)
            return found

    host_tasks = TaskStore(db)
    host_tasks.flags = WatchedFlags(db.tasks)
    body = FunctionRunner(checked.wait)
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, workflow_id=TASK, workflow_run_id=RUN)
    worker = WorkerContext(tasks=host_tasks, portal=LoopPortal(), worker_id="w", cancel_poll_sec=0.01)

    async def run_attempt() -> AttemptResult:
        return await Attempt(worker, attempt(), body).run()

    assert (await asyncio.wait_for(environment.run(run_attempt), FOREVER)).worker_id == "w"
    assert body.reasons == []


@pytest.mark.parametrize("longest", [0.5, 7.5, 20.0])
def test_leases_are_renewed_in_time_and_at_few_moments(longest: float) -> None:
    begins = [100 + longest * number / 37 for number in range(37)]
    pauses = [renewal_pause_sec(begin, longest) for begin in begins]
    assert all(longest / 2 <= pause <= longest for pause in pauses)
    moments = {round(begin + pause, 6) for begin, pause in zip(begins, pauses, strict=True)}
    assert len(moments) <= 3
    assert {round(renewal_pause_sec(moment + 0.001, longest), 2) for moment in moments} == {
        round(longest - 0.001, 2)
    }
