"""Admission: the queue beside a bare program that makes the same grouped writes, and beside plain calls of
`create_task`."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.bare_admission import MAX_ACTIVE, MAX_PENDING, MAX_PER_USER, BareAdmission
from benchmarks.rows import Group, Row, Setting, Side, Sides, Target
from flowkit import Admission
from flowkit.adapters.group_commit import GroupCommit
from flowkit.adapters.tasks.store import TaskStore
from flowkit.admission.models import Door, Kind, Limits, Report, Request, State
from flowkit.admission.process import AdmissionProcess, AdmissionSettings
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.models.admission import Priority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

    Run = Callable[[], Awaitable[float]]

    from temporalio.client import Client

QUEUE = "benchmark-admission"
DATABASES = ("admission", "bare_admission")
WAITING, REQUESTS, IN_FLIGHT = 9_000, 2_000, 64
USERS = 1_000
TASKS = 400
AHEAD, POPS = 9_900, 40
TOGETHER = 100

# The sides run in the process of the benchmark.
_ROW: Any = {"rounds": 3, "in_client": True, "always": False}
OUTSIDE = Row(
    name=f"admission: {REQUESTS:,} requests, {WAITING:,} pending",
    unit="requests/s",
    items=WAITING + REQUESTS,
    item="request",
    targets={"flowkit": Target(ratio=">= 0.60")},
    **_ROW,
)
BLOCKED = Row(
    name=f"admission: pop behind {AHEAD:,} requests",
    unit="ms/pop",
    items=POPS,
    item="pop, with what prepares it",
    targets={"flowkit": Target(ratio="<= 1.3", decided_by_wall=True)},
    **_ROW,
)
STARTS = Row(
    name=f"admission: {TASKS} tasks started",
    unit="s",
    items=TASKS,
    item="task",
    targets={"flowkit": Target(ratio="<= 1.1")},
    **_ROW,
)

_BODY = {"script": "print(6*7)", "language": "python", "language_version": "3.11", "timeout_seconds": 60}
_LIMITS = Limits(max_pending=MAX_PENDING, max_active=MAX_ACTIVE, max_per_user=MAX_PER_USER)
_GRAPH = {"nodes": [{"node_id": "n", "type": "nobody", "depends_on": []}]}


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Yield how the rows take samples."""
    client = await connect()
    tasks = TaskClient(client, TaskStore(setting.mongo[DATABASES[0]]), queue=QUEUE)
    made = Admissions(setting.mongo, client, tasks)
    yield {
        OUTSIDE.name: _sides(made, made.bare, made.queue),
        BLOCKED.name: _sides(made, partial(made.pop, 0), partial(made.pop, AHEAD)),
        STARTS.name: _sides(made, made.plain, made.admitted),
    }


def _sides(made: Admissions, baseline: Run, flowkit: Run) -> Sides:
    sides = {"baseline": baseline, "flowkit": flowkit}
    return Sides(
        sides={name: Side(run=run, programs=name, warm_up=made.clean) for name, run in sides.items()},
        clean=made.clean,
    )


class Admissions:
    """Runs the samples of both sides."""

    def __init__(self, mongo: Any, client: Client, tasks: TaskClient) -> None:
        self._mongo = mongo
        self._client = client
        self._tasks = tasks

    async def clean(self) -> None:
        """Drop what the last sample has left behind."""
        for name in DATABASES:
            await self._mongo.drop_database(name)

    # --- outside executors

    async def bare(self) -> float:
        """Admit, dispatch and end requests in the bare program, and return the requests per second."""
        bare = BareAdmission(self._mongo[DATABASES[1]])
        await bare.prepare([_user(number) for number in range(USERS)])

        async def together(items: Sequence[dict[str, Any]]) -> Collection[int]:
            await bare.submit(items)
            return ()

        async def start(most: int) -> int:
            items = await bare.start(most)
            if items:
                task = asyncio.create_task(bare.end(items))
                ending.add(task)
                task.add_done_callback(ending.discard)
            return len(items)

        ending: set[asyncio.Task[None]] = set()
        commit: GroupCommit[dict[str, Any]] = GroupCommit(
            "submissions", lambda item: bare.submit([item]), together
        )
        rate = await _drive(lambda number: commit.write(_bare_item(number)), start, bare.relay)
        await asyncio.gather(*ending)
        return rate

    async def queue(self) -> float:
        """Admit, dispatch and end requests, and return the requests per second."""
        store, queue = await self._new_queue(_LIMITS)
        await store.send_events()
        ending: set[asyncio.Task[Any]] = set()

        async def start(most: int) -> int:
            items = await queue.dispatch(most)
            for item in items:
                task = asyncio.create_task(queue.report(item["_id"], Report(state=State.COMPLETED)))
                ending.add(task)
                task.add_done_callback(ending.discard)
            return len(items)

        async def relay() -> int:
            items = await store.unsent()
            await store.mark_sent({(item["_id"], item["place"]): len(item["events"]) for item in items})
            return len(items)

        rate = await _drive(lambda number: queue.submit(_request(number)), start, relay)
        await asyncio.gather(*ending)
        return rate

    async def _new_queue(self, limits: Limits) -> tuple[AdmissionStore, AdmissionQueue]:
        store = AdmissionStore(self._mongo[DATABASES[0]], queue=QUEUE)
        await store.prepare()
        await store.set_limits(limits)
        return store, AdmissionQueue(store)

    # --- requests that may not start

    async def pop(self, ahead: int) -> float:
        """Return the median time of a pop behind requests whose users are at their cap, in milliseconds."""
        _, queue = await self._new_queue(replace(_LIMITS, max_active_per_user=1))
        flood = [_request(number, user=f"flood-{number % 99}") for number in range(ahead)]
        await _all([partial(queue.submit, each) for each in flood])
        while await queue.dispatch():
            pass
        others = [_request(10_000 + number, user=f"other-{number}") for number in range(POPS)]
        await _all([partial(queue.submit, each) for each in others])
        times = []
        for _ in range(POPS):
            began = time.perf_counter()
            items = await queue.dispatch(1)
            times.append(time.perf_counter() - began)
            if len(items) != 1 or not items[0]["user_id"].startswith("other"):
                raise RuntimeError(f"the pop has returned {items}")
        return sorted(times)[POPS // 2] * 1_000

    # --- tasks

    async def plain(self) -> float:
        """Start tasks without admission, and return the seconds until Temporal has all of them."""
        began = time.perf_counter()
        await _all([lambda: self._tasks.create_task(params={}, graph=_GRAPH) for _ in range(TASKS)])
        return time.perf_counter() - began

    async def admitted(self) -> float:
        """Admit tasks, and return the seconds until Temporal has all of them."""
        settings = AdmissionSettings(queue=QUEUE)
        process = AdmissionProcess(db=self._mongo[DATABASES[0]], client=self._client, settings=settings)
        store, queue = await self._new_queue(_LIMITS)
        await process.start()
        try:
            noted, all_noted = process.queue.started, asyncio.Semaphore(0)

            async def note(item: dict[str, Any]) -> None:
                await noted(item)
                all_noted.release()

            process.queue.started = note  # type: ignore[method-assign]
            began = time.perf_counter()
            await _all([partial(process.queue.submit, _task(number)) for number in range(TASKS)])
            for _ in range(TASKS):
                await all_noted.acquire()
            took = time.perf_counter() - began
            if await store.count_items({"state": "active"}) != TASKS:
                raise RuntimeError("the tasks have not started")
            return took
        finally:
            await process.stop()
            await queue.session.close()


async def _all(calls: Sequence[Callable[[], Awaitable[Any]]]) -> None:
    """Make calls, a fixed number at a time."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


async def _drive(
    submit: Callable[[int], Awaitable[Any]],
    start: Callable[[int], Awaitable[int]],
    relay: Callable[[], Awaitable[int]],
) -> float:
    """Fill the queue, then submit requests and start as many. Return the requests per second.

    The next request is submitted when one has started, so that as many wait all the time.
    """
    numbers = itertools.count()
    await _all([lambda: submit(next(numbers)) for _ in range(WAITING)])
    while await relay():
        pass
    submitted = started = 0
    starts = asyncio.Semaphore(0)

    async def one() -> None:
        nonlocal submitted
        await submit(next(numbers))
        submitted += 1
        await starts.acquire()

    async def dispatch() -> None:
        nonlocal started
        while started < REQUESTS:
            most = min(TOGETHER, submitted - started)
            count = await start(most) if most else 0
            started += count
            for _ in range(count):
                starts.release()
            await asyncio.sleep(0)

    async def relay_all() -> None:
        while started < REQUESTS or await relay():
            await relay()
            await asyncio.sleep(0.02)

    began = time.perf_counter()
    await asyncio.gather(_all([one] * REQUESTS), dispatch(), relay_all())
    return REQUESTS / (time.perf_counter() - began)


def _user(number: int) -> str:
    return f"user-{number % USERS}"


def _request(number: int, user: str | None = None) -> Request:
    return Request(
        execution_id=f"execution-{number}",
        user_id=user or _user(number),
        door=Door.PYTHON,
        kind=Kind.EXECUTION,
        body=_BODY,
        priority=list(Priority)[number % 5],
    )


def _bare_item(number: int) -> dict[str, Any]:
    return {
        "_id": f"execution-{number}",
        "user_id": _user(number),
        "kind": "execution",
        "body": _BODY,
        "rank": number % 5 + 1,
        "requested_at": time.time(),
    }


def _task(number: int) -> Request:
    admission = Admission(user_id=_user(number))
    return Request(
        execution_id=str(uuid.uuid4()),
        user_id=admission.user_id,
        door=Door.PYTHON,
        kind=Kind.TASK,
        body={"graph": _GRAPH, "params": {}},
    )


GROUP = Group(rows=(OUTSIDE, BLOCKED, STARTS), opened=opened)
