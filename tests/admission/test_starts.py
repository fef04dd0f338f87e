"""Starts that fail, or that a process leaves behind, and executions that nobody ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from flowkit.admission import dispatcher as dispatching
from flowkit.admission.dispatcher import Dispatcher
from flowkit.admission.models import Door, Kind, Request, State
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.rules import OVERDUE_SEC, START_TRIES, start_pause
from flowkit.connection import TemporalUnavailable
from flowkit.errors import GraphError, StoreRefused, StoreUnavailable
from tests.admission.memory import MemoryStore, Shared
from tests.admission.test_ownership import BODY, Tasks, admitted

PERMANENT = [
    GraphError(["node 'a' is unknown"]),
    StoreRefused("MongoDB cannot store this value"),
    RPCError("the input exceeds the size limit", RPCStatusCode.INVALID_ARGUMENT, b""),
]
TRANSIENT = [
    StoreUnavailable("MongoDB is away"),
    TemporalUnavailable("Temporal is away"),
    RPCError("busy", RPCStatusCode.RESOURCE_EXHAUSTED, b""),
    RPCError("not permitted", RPCStatusCode.PERMISSION_DENIED, b""),
    RPCError("namespace not found", RPCStatusCode.NOT_FOUND, b""),
    ValueError("a defect"),
]


@pytest.mark.parametrize("error", PERMANENT, ids=repr)
async def test_an_error_that_comes_again_fails_the_request_at_once(error: Exception) -> None:
    _, shared = await admitted(Tasks(error=error))
    assert (shared.items["t"]["state"], shared.items["t"]["reason"]) == (State.FAILED, "start_failed")
    assert str(error) in shared.items["t"]["error"]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
async def test_any_other_error_is_one_try(error: Exception) -> None:
    dispatcher, shared = await admitted(Tasks(error=error))
    for tries in range(1, START_TRIES):
        item = shared.items["t"]
        assert (item["state"], item["tries"]) == (State.STARTING, tries)
        assert str(error) in item["error"]
        await dispatcher._start(dict(item))
    assert (shared.items["t"]["state"], shared.items["t"]["reason"]) == (State.FAILED, "start_failed")


class Blocked(Tasks):
    """A client whose starts are in flight until they may end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ends = asyncio.Event(), asyncio.Event()

    async def start_task(self, *given: object, **more: Any) -> bool:
        """Wait."""
        self.begun.set()
        await self.ends.wait()
        return await super().start_task(*given, **more)


async def starting(tasks: Any) -> tuple[Dispatcher, AdmissionQueue, Shared]:
    """Return a dispatcher that is starting a task."""
    shared = Shared()
    store: Any = MemoryStore(shared)
    queue = AdmissionQueue(store, clock=lambda: 5.0)
    await queue.submit(Request(execution_id="t", user_id="dora", door=Door.PYTHON, kind=Kind.TASK, body=BODY))
    made = Dispatcher(queue, tasks)
    await made.start()
    await tasks.begun.wait()
    return made, queue, shared


async def test_a_dispatcher_that_stops_completes_its_starts() -> None:
    tasks = Blocked()
    dispatcher, _, shared = await starting(tasks)
    stop = asyncio.create_task(dispatcher.stop())
    tasks.ends.set()
    await stop
    assert shared.items["t"]["state"] == State.ACTIVE


async def test_another_process_repeats_at_once_what_a_stopped_one_has_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatching, "STOP_SEC", 0.05)
    dispatcher, queue, _ = await starting(Blocked())
    await dispatcher.stop()
    assert [item["_id"] for item in (await queue.take_due()).starts] == ["t"]


class Slow(MemoryStore):
    """A store that takes time for the update that gives slots."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.begun, self.ends = asyncio.Event(), asyncio.Event()

    async def update(self, updates: Any, marker: tuple[str, Any]) -> set[str]:
        """Make the change, but return only when it may."""
        done = await super().update(updates, marker)
        if marker[0] == "slot":
            self.begun.set()
            await self.ends.wait()
        return done


async def test_a_dispatcher_that_stops_while_it_gives_a_slot_starts_the_task() -> None:
    shared = Shared()
    store: Any = Slow(shared)
    tasks: Any = Tasks()
    queue = AdmissionQueue(store, clock=lambda: 0.0)
    await queue.submit(Request(execution_id="t", user_id="dora", door=Door.PYTHON, kind=Kind.TASK, body=BODY))
    dispatcher = Dispatcher(queue, tasks)
    await dispatcher.start()
    await store.begun.wait()
    stop = asyncio.create_task(dispatcher.stop())
    store.ends.set()
    await stop
    assert shared.items["t"]["state"] == State.ACTIVE


@pytest.mark.parametrize(("tries", "sec"), [(1, 1.0), (2, 2.0), (3, 4.0), (10, 60.0)])
def test_the_pause_before_another_try_doubles_up_to_a_minute(tries: int, sec: float) -> None:
    assert start_pause(tries) == sec


async def test_an_overdue_execution_is_stopped() -> None:
    shared, now = Shared(), 0.0
    store: Any = MemoryStore(shared)
    queue = AdmissionQueue(store, clock=lambda: now)
    body = {"timeout_seconds": 60}
    await queue.submit(
        Request(execution_id="e", user_id="dora", door=Door.PYTHON, kind=Kind.EXECUTION, body=body)
    )
    await queue.dispatch()
    now += 60 + OVERDUE_SEC - 1
    assert (await queue.take_due()).ended == 0
    now += 1
    assert (await queue.take_due()).ended == 1
    events = {event["event_type"]: event for event in await queue.events("e")}
    assert events["delete_pod_command"]["saga_id"] == events["create_pod_command"]["saga_id"]
    assert "execution_timeout" in events
