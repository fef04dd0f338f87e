"""One attempt without servers: time limit, background tasks, cancel flags, and the errors that the workflow gets."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import Queue
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.contract.builders import RUN, TASK, attempt, begun, opened

from flowkit.activities import attempts
from flowkit.activities.attempts import Attempt, WorkerContext
from flowkit.activities.liveness import HeartbeatThrottle
from flowkit.activities.loop_portal import LoopPortal
from flowkit.adapters.retry import retry_while_unavailable
from flowkit.adapters.tasks.task_store import TaskStore
from flowkit.errors import StoreUnavailable
from flowkit.models import AttemptResult, FailureKind
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from flowkit.models import AttemptInput

FOREVER = 60.0


@dataclass
class Doing:
    """An executor that runs a function of the test until it is cancelled."""

    work: Callable[[], Awaitable[object]]
    stops: bool = True
    reasons: list[str] = field(default_factory=list)
    _task: asyncio.Task[Any] | None = None

    async def run(self) -> AttemptResult:
        self._task = asyncio.current_task()
        await self.work()
        return AttemptResult(worker_id="w")

    def cancel(self, reason: str, grace_sec: float) -> None:
        self.reasons.append(reason)
        if self._task is not None and self.stops:
            self._task.cancel()


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


async def run(db: Any, body: Doing, given: AttemptInput, home: LoopPortal | None = None) -> AttemptResult:
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


async def failed(db: Any, body: Doing, given: AttemptInput, home: LoopPortal | None = None) -> dict[str, Any]:
    """Return the failure that the workflow receives."""
    with pytest.raises(ApplicationError) as caught:
        await asyncio.wait_for(run(db, body, given, home), FOREVER)
    assert caught.value.non_retryable, "Temporal itself must not retry it: the next try would be lease_lost"
    found: dict[str, Any] = caught.value.details[0]
    return found


# --- time limit -------------------------------------------------------------------------------------------------


async def test_an_attempt_that_takes_too_long_fails_as_timeout(db: Any) -> None:
    told = await failed(db, Doing(endless), replace(attempt(), timeout_sec=0.05))
    assert (told["kind"], told["code"], told["permanent"]) == (FailureKind.FAILURE, "timeout", False)
    assert told["message"] == "the attempt took longer than 0.05 s (timeout_sec)"


async def test_time_without_mongodb_does_not_count(db: Any) -> None:
    away = iter([StoreUnavailable("away")] * 4)

    async def store() -> str:
        for error in away:
            raise error
        return "stored"

    begin = time.monotonic()
    result = await run(db, Doing(lambda: retry_while_unavailable(store)), replace(attempt(), timeout_sec=0.2))
    assert result.worker_id == "w"
    assert time.monotonic() - begin > 0.2, "the retries take 0.1, 0.2, 0.4 s, or a second with jitter"


async def test_an_attempt_that_ends_in_time_has_no_timeout(db: Any) -> None:
    async def quick() -> None:
        return

    assert (await run(db, Doing(quick), replace(attempt(), timeout_sec=5.0))).worker_id == "w"


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


async def test_a_handler_that_blocks_its_loop_times_out(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_ABORT_TIMEOUT_SEC", 0.1)
    released = threading.Event()

    async def block() -> None:
        released.wait(FOREVER)

    with another_loop() as loop:
        try:
            told = await failed(db, Doing(block), replace(attempt(), timeout_sec=0.1), LoopPortal(loop))
        finally:
            released.set()
    assert told["code"] == "timeout"


# --- errors -----------------------------------------------------------------------------------------------------


async def test_a_store_that_is_away_costs_no_retry(db: Any) -> None:
    async def read() -> None:
        raise StoreUnavailable("MongoDB is unavailable (AutoReconnect)")

    told = await failed(db, Doing(read), attempt())
    assert (told["kind"], told["code"]) == (FailureKind.YIELDED, "mongo_unavailable")


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
async def test_an_unexpected_error_is_an_ordinary_failure(db: Any, error: Exception, message: str) -> None:
    async def break_down() -> None:
        raise error

    told = await failed(db, Doing(break_down), attempt())
    assert (told["kind"], told["code"], told["message"]) == (FailureKind.FAILURE, "unexpected_error", message)


# --- background tasks -------------------------------------------------------------------------------------------


async def test_a_bug_in_one_duty_leaves_the_heartbeats_alone(
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

    monkeypatch.setattr(attempts, "_UNSUPERVISED_SEC", 0.0)
    monkeypatch.setattr(attempts, "HeartbeatThrottle", Counting)
    monkeypatch.setattr(TaskStore, "flagged", broken)
    assert (await asyncio.wait_for(run(db, Doing(beats.wait), attempt()), FOREVER)).worker_id == "w"


# --- flags ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits."""
    monkeypatch.setattr(attempts, "_UNSUPERVISED_SEC", 0.0)
    monkeypatch.setattr(attempts, "_DELIVERY_SEC", 0.05)


async def flag(db: Any, **fields: Any) -> None:
    """Set the task's cancel flag."""
    flags = {
        "coordinator.cancelled": True,
        **{f"coordinator.{name}": value for name, value in fields.items()},
    }
    await db.tasks.update_one({"id": TASK}, {"$set": flags})


@pytest.mark.usefixtures("_at_once")
async def test_an_attempt_that_the_workflow_has_flagged_stops_and_waits_for_temporals_cancel(db: Any) -> None:
    await flag(db, cancel_run_id=RUN, cancel_reason="hard_fail:boom")
    body = Doing(endless)
    told = await failed(db, body, attempt())
    assert body.reasons == ["hard_fail:boom"]
    assert (told["kind"], told["code"]) == (FailureKind.YIELDED, "cancel_pending")
    assert told["message"].startswith(f"cancel requested by run {RUN} of the workflow (hard_fail:boom)")


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("stops", [True, False])
async def test_an_attempt_ends_at_no_charge_where_temporal_refuses_the_cancel(db: Any, stops: bool) -> None:
    """The environment of the test has no client, so every cancel is refused."""
    await flag(db, cancelled_at="whenever", cancel_reason="too dear")
    body = Doing(endless, stops=stops)
    told = await failed(db, body, replace(attempt(), cancel_grace_sec=0.05))
    assert body.reasons == ["too dear"]
    assert (told["kind"], told["code"]) == (FailureKind.YIELDED, "cancel_refused")
    assert "Temporal rejected the cancel" in told["message"]


@pytest.mark.usefixtures("_at_once")
async def test_a_flag_of_another_run_is_no_reason_to_stop(db: Any) -> None:
    await flag(db, cancel_run_id="an-earlier-run")
    looked = asyncio.Event()

    class Looking(TaskStore):
        async def raised_flag(self, attempt: AttemptInput) -> Any:
            found = await super().raised_flag(attempt)
            asyncio.get_running_loop().call_later(0.05, looked.set)
            return found

    host_tasks = Looking(db)
    body = Doing(looked.wait)
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, workflow_id=TASK, workflow_run_id=RUN)
    worker = WorkerContext(tasks=host_tasks, portal=LoopPortal(), worker_id="w", cancel_poll_sec=0.01)

    async def run_attempt() -> AttemptResult:
        return await Attempt(worker, attempt(), body).run()

    assert (await asyncio.wait_for(environment.run(run_attempt), FOREVER)).worker_id == "w"
    assert body.reasons == []
