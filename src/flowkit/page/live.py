"""What the pages of a task show, kept up to date: one poll for all viewers of a task.

Every message carries the id of this server's start and the number of the poll. A page that has seen a higher number
drops a message, and a page that has seen another id takes the next whole state.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from temporalio.service import RPCError, RPCStatusCode

from flowkit.adapters.entries import utc
from flowkit.client import UnknownTask
from flowkit.core.utils import dumps
from flowkit.errors import FlowKitError, StoreUnavailable
from flowkit.reading.documents import reading
from flowkit.reading.state import NodeRow, TaskReader, TaskView, add_set_aside, read_document
from flowkit.server.errors import HttpError
from flowkit.text import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from flowkit.reading.state import Servers

POLL_SEC: Final = 0.5
"""How often a watched task is looked at."""
_LOOK_AGAIN_SEC: Final = 2.0
"""How often the state of an open task is read although its document has not changed: it does not hold all waits."""
_NODES_A_SECOND: Final = 2_000
"""A large task is read less often, because every read returns all its nodes."""

_RECENT_SEC: Final = 30.0
"""A document that changed longer ago than this is settled."""

_LONGEST_LOOK_SEC: Final = 5.0
"""After this time in which MongoDB does not say whether a document has changed, pages say so."""
_LONGEST_READ_SEC: Final = 15.0
"""After this time in which the servers do not return the state of a task, pages say so."""

_logger = logging.getLogger("flowkit.page")

Row = dict[str, Any]
"""The state of a node, as pages get it."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a page gets: the task, and the nodes that have changed since the poll that it knows.

    All pages that know the same poll share one instance.
    """

    server: str
    poll: int
    whole: bool
    """Whether `nodes` has all nodes."""
    origin: str | None
    """Which document the state is of: a task that was deleted may have been created again, with the same id."""
    at: float
    """When the state was read, in seconds since the epoch."""
    task: Mapping[str, Any]
    count: int
    """Number of nodes of the graph, as far as they are known."""
    nodes: Mapping[int, Row]
    """By the position of the node in the graph."""
    problem: str | None = None
    """Why the state could not be read. The rest is then the last known state."""

    @cached_property
    def _text(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return dumps({**given, "nodes": {str(index): row for index, row in self.nodes.items()}}).decode()

    def message(self, now: float) -> str:
        """Return the update as a JSON object with the clock of the server, from which that of a page may differ."""
        return f'{{"now":{now:.3f},{self._text[1:]}'


@dataclass(slots=True)
class _State:
    """The latest state of a task, and since which poll each part has been as it is."""

    task: Row = field(default_factory=dict)
    nodes: list[NodeRow] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    origin: str | None = None
    at: float = 0.0
    problem: str | None = None

    def clear(self) -> None:
        """Forget the nodes."""
        self.nodes, self.since = [], []

    def take(self, view: TaskView, poll: int, at: float) -> None:
        """Note what a view says."""
        if len(view.nodes) < len(self.nodes):
            self.clear()
        known = len(self.nodes)
        for index, node in enumerate(view.nodes):
            if index >= known:
                self.nodes.append(node)
                self.since.append(poll)
            elif node != self.nodes[index]:
                self.nodes[index], self.since[index] = node, poll
        self.task = task_fields(view)
        self.at, self.problem = at, None


_TASK_FIELDS: Final = tuple(each.name for each in fields(TaskView) if each.name != "nodes")
_ROW_FIELDS: Final = tuple(each.name for each in fields(NodeRow) if each.compare)
_COMPUTED: Final = ("awaits_decision", "set_aside_text")
_IN_EVERY_ROW: Final = frozenset({"node_id", "status", "attempt"})


def task_fields(view: TaskView) -> Row:
    """Return what a page gets about a task beside its nodes."""
    given = {name: getattr(view, name) for name in _TASK_FIELDS}
    return {**given, "status": view.status.value, "closed": view.status.closed}


def row_of(node: NodeRow) -> Row:
    """Return the state of a node without what is empty."""
    given = {name: getattr(node, name) for name in (*_ROW_FIELDS, *_COMPUTED)}
    return {
        name: value
        for name, value in given.items()
        if name in _IN_EVERY_ROW or value not in (None, "", 0, False)
    }


def _is_recent(mark: Mapping[str, Any] | None) -> bool:
    """Return whether a document may have changed just now. The clocks of servers may differ by some seconds."""
    changed_at = (mark or {}).get("updated_at")
    return changed_at is not None and time.time() - utc(changed_at).timestamp() < _RECENT_SEC


def describe_outage(error: RPCError) -> str:
    """Return that Temporal does not respond, and how."""
    late = error.status in (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED)
    return f"Temporal does not respond ({'not in time' if late else error.status.name})"


def _too_slow() -> str:
    return f"the servers do not respond within {_LONGEST_READ_SEC:g} s"


class Feed:
    """The state of one task, which is read while it has viewers."""

    def __init__(self, servers: Servers, task_id: str, server: str, polls: Iterator[int]) -> None:
        """Read a task. `polls` yields the numbers of the polls, each higher than those that pages know."""
        self._servers = servers
        self._task_id = task_id
        self._server = server
        self._polls = polls
        self._state = _State()
        self._poll = 0
        self._updates: dict[int, Update] = {}
        """What pages get from the latest poll, by the poll that they know."""
        self._reader: TaskReader | None = None
        """Knows what the document of the latest mark says; None if that has to be read."""
        self._stored_view: TaskView | None = None
        """What the document of the latest mark says, if it was needed because Temporal does not respond."""
        self._changed = asyncio.Condition()
        self._closed = False
        self._mark: Any = None
        self._read_at = float("-inf")
        self._unsettled = False
        """Whether the document may have changed again within the millisecond of its latest mark."""

    async def open(self) -> None:
        """Read the state for the first time. Raise UnknownTask, StoreUnavailable or TemporalUnavailable."""
        self._note_mark(await self._find_mark())
        self._unsettled = _is_recent(self._mark)
        try:
            async with asyncio.timeout(_LONGEST_READ_SEC):
                await self._check_exists()
                await self._read()
        except TimeoutError:
            raise StoreUnavailable(_too_slow()) from None

    def _note_mark(self, mark: Any) -> None:
        """Note the mark of the document that is read next, which may be that of another document with this id."""
        self._mark = mark
        if mark is not None and (origin := str(mark["_id"])) != self._state.origin:
            self._state.clear()
            self._state.origin = origin

    async def _find_mark(self) -> Any:
        try:
            async with asyncio.timeout(_LONGEST_LOOK_SEC):
                return await self._servers.catalog.change_mark(self._task_id)
        except TimeoutError:
            raise StoreUnavailable(f"MongoDB does not respond within {_LONGEST_LOOK_SEC:g} s") from None

    async def _check_exists(self) -> None:
        """Raise UnknownTask if neither server knows the task."""
        if self._mark is None:
            await TaskReader.at(self._servers, self._task_id)

    async def close(self) -> None:
        """End the updates of all viewers."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def run(self) -> None:
        """Read the state again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._pause_sec())
            if await self._try_look():
                async with self._changed:
                    self._changed.notify_all()

    async def _try_look(self) -> bool:
        """Look at the task. Return whether viewers get a message: there is a state, or another reason why not."""
        try:
            async with asyncio.timeout(_LONGEST_READ_SEC):
                return await self._look()
        except UnknownTask:
            self._state.clear()
            return self._note("the task no longer exists")
        except TimeoutError:
            return self._note(_too_slow())
        except FlowKitError as error:
            return self._note(one_line(error))
        except RPCError as error:
            return self._note(describe_outage(error))
        except Exception:  # the feed must go on: a page that shows an old state would say that it is live
            is_new = self._note("unexpected error; the log of the server has more")
            _logger.log(
                logging.ERROR if is_new else logging.DEBUG,
                "the state of task %s cannot be read",
                self._task_id,
                exc_info=True,
            )
            return is_new

    def _pause_sec(self) -> float:
        return max(POLL_SEC, len(self._state.nodes) / _NODES_A_SECOND)

    def _note(self, problem: str) -> bool:
        if problem == self._state.problem:
            return False
        self._state.problem = problem
        self._poll = next(self._polls)
        self._updates.clear()
        return True

    async def _look(self) -> bool:
        """Read the state if it may have changed. Return whether it was read."""
        mark = await self._find_mark()
        is_new = mark != self._mark
        open_or_failed = not self._state.task["closed"] or self._state.problem is not None
        is_due = open_or_failed and time.monotonic() > self._read_at + _LOOK_AGAIN_SEC
        if not (is_new or is_due or self._unsettled):
            return False
        if is_new or self._unsettled:
            self._reader, self._stored_view = None, None
        self._unsettled = is_new
        self._note_mark(mark)
        await self._check_exists()
        await self._read()
        return True

    async def _read(self) -> None:
        """Read the state. A reader that has failed is not used again: it would not ask MongoDB."""
        reader, self._reader = self._reader, None
        reader = reader or TaskReader(self._servers, self._task_id, None, keep=True)
        problem = None
        try:
            view = await reader.view()
        except RPCError as error:
            self._stored_view = view = self._stored_view or await self._document_view()
            problem = f"{describe_outage(error)}, so this is what MongoDB has"
        else:
            if not reader.stored:
                raise StoreUnavailable("MongoDB does not respond")
            self._reader = reader
        poll = next(self._polls)
        self._state.take(view, poll, time.time())
        self._state.problem = problem
        self._poll, self._read_at = poll, time.monotonic()
        self._updates.clear()

    async def _document_view(self) -> TaskView:
        catalog = self._servers.catalog
        if (document := await catalog.document(self._task_id)) is None:
            raise UnknownTask(self._task_id)
        batches, set_aside = await catalog.batches(self._task_id), await catalog.set_aside(self._task_id)
        with reading(self._task_id):
            return add_set_aside(read_document(document, batches), set_aside)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the whole state, then each change, until the feed is closed."""
        sent = 0
        while not self._closed:
            update = self._update_since(sent)
            sent = update.poll  # further polls may follow while the viewer takes this one
            yield update
            await self._wait_beyond(sent)

    async def _wait_beyond(self, poll: int) -> None:
        """Wait for a poll with a higher number."""
        async with self._changed:
            while self._poll <= poll and not self._closed:
                await self._changed.wait()

    def _update_since(self, poll: int) -> Update:
        """Return what a page gets that knows a poll. It is found once for all pages."""
        if poll not in self._updates:
            self._updates[poll] = self._make_update(poll)
        return self._updates[poll]

    def _make_update(self, poll: int) -> Update:
        state = self._state
        changed = [index for index, since in enumerate(state.since) if since > poll]
        return Update(
            server=self._server,
            poll=self._poll,
            whole=not poll,
            origin=state.origin,
            at=state.at,
            task=state.task,
            count=len(state.nodes),
            nodes={index: row_of(state.nodes[index]) for index in changed},
            problem=state.problem,
        )


class _Watched:
    """A feed with its viewers. It opens once for all of them, and runs from then on."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.viewers = 0
        self._opening = asyncio.create_task(feed.open())
        self._running: asyncio.Task[None] | None = None

    async def opened(self) -> Feed:
        """Return the feed when it has a state. Raise UnknownTask, StoreUnavailable or RPCError."""
        await asyncio.shield(self._opening)
        if self._running is None:
            self._running = asyncio.create_task(self.feed.run())
        return self.feed

    async def close(self) -> None:
        """End the feed."""
        tasks = [each for each in (self._opening, self._running) if each is not None]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.feed.close()


class LiveTasks:
    """The feeds of the tasks that have viewers. Viewers of the same task share one."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.server = uuid.uuid4().hex
        """The id of this start of the server."""
        self._polls = itertools.count(1)
        self._watched: dict[str, _Watched] = {}
        self._closed = False

    @property
    def task_ids(self) -> list[str]:
        """The tasks that have viewers."""
        return [*self._watched]

    @asynccontextmanager
    async def watch(self, task_id: str) -> AsyncIterator[Feed]:
        """Yield the feed of a task, which runs as long as it has viewers.

        Raise UnknownTask, StoreUnavailable or RPCError, and HttpError when the server stops.
        """
        if self._closed:
            raise HttpError(503, "stopping", "the server stops; try again")
        watched = self._watched.get(task_id)
        if watched is None:
            watched = self._watched[task_id] = _Watched(
                Feed(self._servers, task_id, self.server, self._polls)
            )
        watched.viewers += 1
        try:
            yield await watched.opened()
        finally:
            watched.viewers -= 1
            if not watched.viewers and self._watched.get(task_id) is watched:
                del self._watched[task_id]
                await watched.close()

    async def close(self) -> None:
        """End all feeds, and open no others: pages connect again at once."""
        self._closed = True
        watched, self._watched = self._watched, {}
        await asyncio.gather(*(each.close() for each in watched.values()))
