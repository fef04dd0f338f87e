"""What the pages of a task show, kept up to date: one poll for all viewers of a task.

Every message carries the id of this server's start and the number of the poll. A page that has seen a higher number
drops a message, and a page that has seen another id takes the next whole state.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flowkit.client import UnknownTask
from flowkit.errors import FlowKitError
from flowkit.reading.state import TaskReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from flowkit.reading.state import NodeRow, Servers, TaskView

POLL_SEC: Final = 0.5
"""How often a watched task is looked at."""
_LOOK_AGAIN_SEC: Final = 2.0
"""How often the state of an open task is read although its document has not changed: it does not hold all waits."""
_NODES_A_SECOND: Final = 2_000
"""A large task is read less often, because every read returns all its nodes."""

_logger = logging.getLogger("flowkit.page")

Row = dict[str, Any]
"""The state of a node, as pages get it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What a page gets: the task, and the nodes that have changed since the poll that it knows."""

    server: str
    poll: int
    whole: bool
    """Whether `nodes` has all nodes."""
    at: float
    """When the state was read, in seconds since the epoch."""
    task: Mapping[str, Any]
    nodes: Mapping[int, Row]
    """By the position of the node in the graph."""
    problem: str | None = None
    """Why the state could not be read. The rest is then the last known state."""


@dataclass(slots=True)
class _State:
    """The latest state of a task, and since which poll each part has been as it is."""

    task: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    at: float = 0.0
    problem: str | None = None

    def take(self, view: TaskView, poll: int, at: float) -> None:
        """Note what a view says."""
        rows = [row_of(node) for node in view.nodes]
        if len(rows) < len(self.rows):
            self.rows, self.since = [], []
        known = len(self.rows)
        for index, row in enumerate(rows):
            if index >= known:
                self.rows.append(row)
                self.since.append(poll)
            elif row != self.rows[index]:
                self.rows[index], self.since[index] = row, poll
        self.task = task_fields(view)
        self.at, self.problem = at, None


def task_fields(view: TaskView) -> Row:
    """Return what a page gets about a task beside its nodes."""
    fields = asdict(view)
    del fields["nodes"]
    return {**fields, "status": view.status.value, "closed": view.status.closed}


def row_of(node: NodeRow) -> Row:
    """Return the state of a node without what is empty."""
    given = asdict(node) | {"awaits_decision": node.awaits_decision}
    kept = ("node_id", "status", "attempt")
    return {key: value for key, value in given.items() if key in kept or value not in (None, "", 0, False)}


class Feed:
    """The state of one task, which is read while somebody watches it."""

    def __init__(self, servers: Servers, task_id: str, server: str) -> None:
        self._servers = servers
        self._task_id = task_id
        self._server = server
        self._state = _State()
        self._poll = 0
        self._changed = asyncio.Condition()
        self._reader: TaskReader | None = None
        self._mark: Any = None
        self._read_at = float("-inf")
        self._unsettled = True
        """Whether the document may have changed again within the millisecond of its latest mark."""
        self.viewers = 0

    async def open(self) -> None:
        """Read the state for the first time. Raise UnknownTask, StoreUnavailable or TemporalUnavailable."""
        self._reader = await TaskReader.at(self._servers, self._task_id)
        await self._read()

    async def run(self) -> None:
        """Read the state again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._pause_sec())
            try:
                changed = await self._look()
            except UnknownTask:
                changed = self._note("the task no longer exists")
            except FlowKitError as error:
                changed = self._note(str(error))
            if changed:
                async with self._changed:
                    self._changed.notify_all()

    def _pause_sec(self) -> float:
        return max(POLL_SEC, len(self._state.rows) / _NODES_A_SECOND)

    def _note(self, problem: str) -> bool:
        if problem == self._state.problem:
            return False
        self._poll += 1
        self._state.problem = problem
        return True

    async def _look(self) -> bool:
        """Read the state if it may have changed. Return whether it was read."""
        mark = await self._servers.catalog.change_mark(self._task_id)
        is_new = mark != self._mark or self._state.problem is not None
        is_due = not self._state.task["closed"] and time.monotonic() > self._read_at + _LOOK_AGAIN_SEC
        if not (is_new or is_due or self._unsettled):
            return False
        self._mark, self._unsettled = mark, is_new
        await self._read()
        return True

    async def _read(self) -> None:
        assert self._reader is not None
        view = await self._reader.view()
        self._poll += 1
        self._read_at = time.monotonic()
        self._state.take(view, self._poll, time.time())

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the whole state, then each change."""
        sent = 0
        while True:
            yield self._update_since(sent)
            sent = self._poll
            async with self._changed:
                await self._changed.wait_for(lambda sent=sent: self._poll > sent)

    def _update_since(self, poll: int) -> Update:
        state = self._state
        rows = {index: state.rows[index] for index, since in enumerate(state.since) if since > poll}
        return Update(
            server=self._server,
            poll=self._poll,
            whole=not poll,
            at=state.at,
            task=state.task,
            nodes=rows,
            problem=state.problem,
        )


class LiveTasks:
    """The feeds of the tasks that somebody watches. Viewers of the same task share one."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.server = uuid.uuid4().hex
        """The id of this start of the server."""
        self._feeds: dict[str, tuple[asyncio.Future[Feed], asyncio.Task[None]]] = {}

    @asynccontextmanager
    async def watch(self, task_id: str) -> AsyncIterator[Feed]:
        """Yield the feed of a task, which runs as long as somebody watches it.

        Raise UnknownTask, StoreUnavailable or TemporalUnavailable.
        """
        if task_id not in self._feeds:
            opened: asyncio.Future[Feed] = asyncio.get_running_loop().create_future()
            self._feeds[task_id] = opened, asyncio.create_task(self._keep(task_id, opened))
        opened, running = self._feeds[task_id]
        feed = await asyncio.shield(opened)
        feed.viewers += 1
        try:
            yield feed
        finally:
            feed.viewers -= 1
            if not feed.viewers and self._feeds.get(task_id) == (opened, running):
                del self._feeds[task_id]
                running.cancel()

    async def _keep(self, task_id: str, opened: asyncio.Future[Feed]) -> None:
        feed = Feed(self._servers, task_id, self.server)
        try:
            await feed.open()
        except Exception as error:  # noqa: BLE001 - every viewer gets it
            self._feeds.pop(task_id, None)
            opened.set_exception(error)
            opened.exception()
            return
        opened.set_result(feed)
        await feed.run()

    async def close(self) -> None:
        """End all feeds."""
        feeds, self._feeds = self._feeds, {}
        for _, running in feeds.values():
            running.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*(running for _, running in feeds.values()), return_exceptions=True)
