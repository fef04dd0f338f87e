"""The dispatcher: gives slots, starts tasks, forwards cancels, and finds ends that nobody has reported."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from temporalio.client import WorkflowExecutionStatus
from temporalio.common import Priority, WorkflowIDReusePolicy
from temporalio.service import RPCError, RPCStatusCode

from flowkit import reason_codes
from flowkit.admission import rules
from flowkit.admission.models import Kind, Report, State
from flowkit.attempt.background import BackgroundLoop, Expected, OutageLogger, error_summary
from flowkit.connection import TemporalUnavailable
from flowkit.errors import FlowKitError, StoreUnavailable, TaskIdTaken
from flowkit.graph.scheduled import read_nominal
from flowkit.models.ownership import Owner, OwnerKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from flowkit.admission.queue import AdmissionQueue
    from flowkit.attempt.background import LoopHealth
    from flowkit.client import TaskClient
    from flowkit.core.utils import Fields

POLL_SEC: Final = 0.05
"""Interval at which a dispatcher looks for requests and ends that other processes have stored."""
IDLE_SEC: Final = 0.25
"""Poll interval while the queue is empty."""
UPKEEP_SEC: Final = 1.0
RECONCILE_SEC: Final = 10.0
MISSING_SEC: Final = 5.0
"""After this time, a workflow counts as lost if a second look does not find it either."""
STRAY_SEC: Final = 600.0
STOP_SEC: Final = 5.0
"""How long a dispatcher that stops waits for starts in flight."""
_CHECKS: Final = 20
"""How many workflows are looked at concurrently."""
_FAIRNESS_BYTES: Final = 64

_ENDS: Final = {
    WorkflowExecutionStatus.COMPLETED: (State.COMPLETED, None),
    WorkflowExecutionStatus.FAILED: (State.FAILED, reason_codes.TASK_FAILED),
    WorkflowExecutionStatus.CANCELED: (State.CANCELLED, reason_codes.TASK_CANCELLED),
    WorkflowExecutionStatus.TERMINATED: (State.FAILED, reason_codes.TERMINATED),
    WorkflowExecutionStatus.TIMED_OUT: (State.TIMEOUT, reason_codes.TIMED_OUT),
}

_logger = logging.getLogger("flowkit.admission")


class Dispatcher:
    """Works on one queue between `start` and `stop`. Any number of dispatchers can run in parallel."""

    def __init__(
        self,
        queue: AdmissionQueue,
        tasks: TaskClient,
        *,
        on_events: Callable[[], object] | None = None,
    ) -> None:
        """`on_events` is called when requests have events to be sent."""
        self._queue = queue
        self._tasks = tasks
        self._on_events = on_events or (lambda: None)
        self._wake = asyncio.Event()
        self._starting: dict[asyncio.Task[None], Fields] = {}
        self._popping, self._taking = asyncio.Lock(), asyncio.Lock()
        """Held while the loops take requests that are then to be started."""
        self._running: list[asyncio.Task[None]] = []
        self._missing: dict[str, float] = {}
        """When the workflow of an active request was first not found, in seconds of the monotonic clock."""
        queue.on_change = self.wake
        queue.dispatches = True
        self._outage = OutageLogger("work on the admission queue")
        expected = Expected(errors=(StoreUnavailable,), log=self._outage.failed)
        steps = (
            ("admission dispatch", self._dispatch, 0.0),
            ("admission upkeep", self._keep_up, UPKEEP_SEC),
            ("admission reconciliation", self._reconcile, RECONCILE_SEC),
            ("admission holds", self._queue.drop_stray_holds, STRAY_SEC),
        )
        self._loops = [
            BackgroundLoop(name, step, pause_sec=pause, expected=expected) for name, step, pause in steps
        ]

    @property
    def loops(self) -> list[LoopHealth]:
        """The health of the loops."""
        return [loop.health for loop in self._loops]

    def wake(self) -> None:
        """Look at the queue at once. The relay follows, since requests that start have further events."""
        self._wake.set()

    async def start(self) -> None:
        """Begin to work."""
        self._running = [asyncio.create_task(loop.run()) for loop in self._loops]

    async def stop(self) -> None:
        """Stop when the starts in flight have ended.

        Leave those that do not end in time to other dispatchers at once.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SEC):
                await self._popping.acquire()
                await self._taking.acquire()
        await _cancelled(self._running)
        if self._starting:
            await asyncio.wait(self._starting, timeout=STOP_SEC)
        left = dict(self._starting)
        await _cancelled(left)
        handed_over = (self._queue.hand_over(item) for item in left.values())
        await asyncio.gather(*handed_over, return_exceptions=True)

    # --- slots

    async def _dispatch(self) -> None:
        self._wake.clear()
        async with self._popping:
            for item in await self._queue.dispatch():
                self._start_soon(item)
        if self._queue.outbox:
            self._on_events()
        if self._queue.more:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SEC if self._queue.idle else POLL_SEC):
                await self._wake.wait()

    def _start_soon(self, item: Fields) -> None:
        if item["kind"] == Kind.TASK:
            task = asyncio.create_task(self._start(item))
            self._starting[task] = item
            task.add_done_callback(self._starting.pop)

    async def _start(self, item: Fields) -> None:
        """Start a task. Whatever happens, the request stays known, and upkeep finds what was not completed.

        A call that arrives late does not start a task again that has ended.
        """
        try:
            body = item.get("body") or await self._queue.body(item["_id"])
            await self._tasks.start_task(
                item["_id"],
                owner=await self._owner_of(item),
                graph=body["graph"],
                params=body["params"],
                reuse=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                priority=Priority(priority_key=item["rank"], fairness_key=_fairness_key(item)),
                nominal=read_nominal(body),
            )
        except TaskIdTaken as error:
            outcome: Awaitable[object] = self._queue.refuse(
                item, str(error), reason=reason_codes.TASK_ID_TAKEN
            )
        except (FlowKitError, RPCError) as error:
            decide = self._queue.refuse if _is_permanent(error) else self._queue.try_again
            outcome = decide(item, str(error))
        except Exception as error:
            _logger.exception("unexpected error in the start of task %s", item["_id"])
            outcome = self._queue.try_again(item, error_summary(error))
        else:
            outcome = self._queue.started(item)
        with suppress(StoreUnavailable):
            await outcome
        self._on_events()

    async def _owner_of(self, item: Fields) -> Owner:
        """Return the marker of the workflow of a request. A later request with the same id has another one."""
        return Owner(kind=OwnerKind.ADMISSION, deployment=await self._tasks.deployment(), id=item["place"])

    # --- upkeep

    async def _keep_up(self) -> None:
        """Do what is due by the clock, and complete what other processes have left behind."""
        queue = self._queue
        await queue.recover()
        await queue.keep_records()
        async with self._taking:
            due = await queue.take_due()
            for item in due.starts:
                self._start_soon(item)
        for item in due.cancels:
            await self._cancel(item)
        self._outage.recovered()

    async def _cancel(self, item: Fields) -> None:
        """Cancel a task. One that Temporal does not know yet starts first, since its start may be in flight."""
        cancel = partial(
            self._tasks.cancel_workflow,
            item["_id"],
            reason=item["cancel"]["reason"] or reason_codes.USER_REQUEST,
            owner=await self._owner_of(item),
        )
        try:
            cancelled = await cancel()
            if not cancelled and item["state"] == State.STARTING:
                await self._start(item)
                cancelled = await cancel()
            if not cancelled:
                await self._check(item)
        except (TemporalUnavailable, RPCError) as error:
            _logger.warning("task %s cannot be cancelled now: %s", item["_id"], error)

    async def _reconcile(self) -> None:
        """Look at the workflows of active tasks, and end the requests whose workflow has ended.

        Requests that wait apart by mistake, after a call that arrived late, may start, too.
        """
        await self._queue.wake_all()
        limit, after = asyncio.Semaphore(_CHECKS), ""
        active: set[str] = set()

        async def check(item: Fields) -> None:
            async with limit:
                await self._check(item)

        while items := await self._queue.store.in_state(State.ACTIVE, after=after):
            after = items[-1]["_id"]
            tasks = [item for item in items if item["kind"] == Kind.TASK]
            active |= {item["place"] for item in tasks}
            await asyncio.gather(*(check(item) for item in tasks))

        self._missing = {place: at for place, at in self._missing.items() if place in active}

    async def _check(self, item: Fields) -> None:
        """End a request whose workflow has ended or, while it is active, was not found twice."""
        try:
            workflow = await self._tasks.look_up(item["_id"], await self._owner_of(item))
        except RPCError as error:
            _logger.info("the workflow of task %s cannot be looked up now: %s", item["_id"], error)
            return
        if workflow.description is None:
            if item["state"] == State.ACTIVE and self._is_missing_for_long(item):
                await self._end(item, *_absent(item))
            return
        self._missing.pop(item["place"], None)
        if workflow.description.status in _ENDS:
            await self._end(item, *_ENDS[workflow.description.status])

    def _is_missing_for_long(self, item: Fields) -> bool:
        """Return whether an earlier look did not find the workflow of a request either."""
        now = time.monotonic()
        return now - self._missing.setdefault(item["place"], now) >= MISSING_SEC

    async def _end(self, item: Fields, state: State, reason: str | None) -> None:
        text = "" if reason is None else f"the workflow of the task ended: {reason}"
        ended = rules.ended(item, self._queue.clock(), state, text)
        await self._queue.report(
            item["_id"], Report(state=state, reason=reason, error=text or None), events=[ended]
        )


async def _cancelled(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_permanent(error: FlowKitError | RPCError) -> bool:
    """Return whether the same start would fail again.

    A missing right or namespace concerns all tasks, and an operator can restore it, so the start is repeated.
    """
    if isinstance(error, RPCError):
        return error.status is RPCStatusCode.INVALID_ARGUMENT
    return not error.retryable


def _absent(item: Fields) -> tuple[State, str]:
    """Return how a request ended whose workflow does not exist."""
    if item.get("cancel"):
        return State.CANCELLED, reason_codes.USER_REQUEST
    return State.FAILED, reason_codes.LOST


def _fairness_key(item: Fields) -> str:
    """Return the user as Temporal's fairness key, which has at most 64 bytes."""
    return str(item["user_id"]).encode()[:_FAIRNESS_BYTES].decode(errors="ignore")
