"""What the pages of a task show, kept up to date: one poll of the servers for all pages of a task.

Pages ask again and again for what has changed, with the id of this server's start and the number of the poll that they
know. No page holds a connection, of which a browser has only six for all its tabs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
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
    from collections.abc import Callable, Iterator, Mapping

    from flowkit.reading.state import Servers

POLL_SEC: Final = 0.5
"""How often a watched task is looked at."""
_LOOK_AGAIN_SEC: Final = 2.0
"""How often the state of an open task is read although its document has not changed: it does not hold all waits."""
_NODES_A_SECOND: Final = 2_000
"""A large task is read less often, because every read returns all its nodes."""

AGAIN_SEC: Final = 1.0
"""After this pause, a page asks again for what has changed."""
KEEP_SEC: Final = 30.0
"""A task is read for this long after a page has asked for it."""

_MOST_UPDATES: Final = 16
"""Updates of one poll that are kept for further pages."""

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
    lost_at: float | None = None
    """With a problem: when it was last known that the state is that of now, in seconds since the epoch."""

    @cached_property
    def _text(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return dumps({**given, "nodes": {str(index): row for index, row in self.nodes.items()}}).decode()

    def message(self, now: float) -> str:
        """Return the update as a JSON object with the clock of the server, from which that of a page may differ."""
        return f'{{"now":{now:.3f},"again_sec":{AGAIN_SEC},{self._text[1:]}'


@dataclass(slots=True)
class _State:
    """The latest state of a task, and since which poll each part has been as it is."""

    task: Row = field(default_factory=dict)
    nodes: list[NodeRow] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    origin: str | None = None
    at: float = 0.0
    live_at: float = 0.0
    """When it was last known that the state is that of now."""
    problem: str | None = None

    def clear(self) -> None:
        """Forget the nodes."""
        self.nodes, self.since = [], []

    def take(self, view: TaskView, poll: int, at: float, problem: str | None) -> None:
        """Note what a view says, and why it does not say everything."""
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
        self.at, self.problem = at, problem
        if problem is None or not self.live_at:
            self.live_at = at


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
    """The state of one task, which is read while pages ask for it."""

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

    async def follow(self, wanted: Callable[[], bool]) -> None:
        """Read the state again and again while it is wanted."""
        while wanted():
            await asyncio.sleep(self._pause_sec())
            await self._try_look()

    async def _try_look(self) -> None:
        """Look at the task. Note a state, or the reason why there is none."""
        try:
            async with asyncio.timeout(_LONGEST_READ_SEC):
                await self._look()
        except UnknownTask:
            self._state.clear()
            self._note("the task no longer exists")
        except TimeoutError:
            self._note(_too_slow())
        except FlowKitError as error:
            self._note(one_line(error))
        except RPCError as error:
            self._note(describe_outage(error))
        except Exception:  # the feed must go on: a page that shows an old state would say that it is live
            is_new = self._note("unexpected error; the log of the server has more")
            _logger.log(
                logging.ERROR if is_new else logging.DEBUG,
                "the state of task %s cannot be read",
                self._task_id,
                exc_info=True,
            )

    def _pause_sec(self) -> float:
        return max(POLL_SEC, len(self._state.nodes) / _NODES_A_SECOND)

    def _note(self, problem: str) -> bool:
        if problem == self._state.problem:
            return False
        self._state.problem = problem
        self._poll = next(self._polls)
        self._updates.clear()
        return True

    async def _look(self) -> None:
        """Read the state if it may have changed."""
        mark = await self._find_mark()
        is_new = mark != self._mark
        open_or_failed = not self._state.task["closed"] or self._state.problem is not None
        is_due = open_or_failed and time.monotonic() > self._read_at + _LOOK_AGAIN_SEC
        if not (is_new or is_due or self._unsettled):
            if self._state.problem is None:
                self._state.live_at = time.time()
            return
        if is_new or self._unsettled:
            self._reader, self._stored_view = None, None
        self._unsettled = is_new
        self._note_mark(mark)
        await self._read()

    async def _read(self) -> None:
        """Read the state. A reader that has failed is not used again: it would not ask MongoDB."""
        if self._mark is None:  # what Temporal still has is not enough for a page, which shows the document
            raise UnknownTask(self._task_id)
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
        self._state.take(view, poll, time.time(), problem)
        self._poll, self._read_at = poll, time.monotonic()
        self._updates.clear()

    async def _document_view(self) -> TaskView:
        catalog = self._servers.catalog
        if (document := await catalog.document(self._task_id)) is None:
            raise UnknownTask(self._task_id)
        batches, set_aside = await catalog.batches(self._task_id), await catalog.set_aside(self._task_id)
        with reading(self._task_id):
            return add_set_aside(read_document(document, batches), set_aside)

    def update_since(self, poll: int) -> Update:
        """Return what has changed since a poll; the whole state if it is 0. It is found once for all pages."""
        if poll not in self._updates:
            if len(self._updates) >= _MOST_UPDATES:  # pages may send any number
                self._updates.clear()
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
            lost_at=state.live_at if state.problem else None,
        )


class _Watched:
    """A feed for the pages that ask for its task. It opens once for all of them, and runs until none asks any more."""

    def __init__(self, feed: Feed, forget: Callable[[], None]) -> None:
        self.asked_at = time.monotonic()
        self._feed = feed
        self._forget = forget
        self._opening = asyncio.create_task(feed.open())
        self._opening.add_done_callback(self._begin)
        self._running: asyncio.Task[None] | None = None

    def _begin(self, opening: asyncio.Task[None]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._forget()
        else:
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._feed.follow(lambda: time.monotonic() < self.asked_at + KEEP_SEC)
        self._forget()

    async def opened(self) -> Feed:
        """Return the feed when it has a state. Raise UnknownTask, StoreUnavailable or RPCError."""
        await asyncio.shield(self._opening)
        return self._feed

    async def close(self) -> None:
        """End the feed."""
        tasks = [each for each in (self._opening, self._running) if each is not None]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LiveTasks:
    """The feeds of the tasks for which pages ask. Pages of the same task share one."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.server = uuid.uuid4().hex
        """The id of this start of the server."""
        self._polls = itertools.count(1)
        self._watched: dict[str, _Watched] = {}
        self._closed = False

    @property
    def task_ids(self) -> list[str]:
        """The tasks that are read."""
        return [*self._watched]

    async def update(self, task_id: str, server: str = "", poll: int = 0) -> Update:
        """Return what has changed since a poll of a server; the whole state if that is not this start of the server.

        Raise UnknownTask, StoreUnavailable or RPCError, and HttpError when the server stops.
        """
        feed = await self._watch(task_id).opened()
        return feed.update_since(poll if server == self.server else 0)

    def _watch(self, task_id: str) -> _Watched:
        if self._closed:
            raise HttpError(503, "stopping", "the server stops; try again")
        watched = self._watched.get(task_id)
        if watched is None:
            feed = Feed(self._servers, task_id, self.server, self._polls)
            watched = self._watched[task_id] = _Watched(feed, lambda: self._forget(task_id))
        watched.asked_at = time.monotonic()
        return watched

    def _forget(self, task_id: str) -> None:
        self._watched.pop(task_id, None)

    async def close(self) -> None:
        """End all feeds, and open no others: pages ask again at once."""
        self._closed = True
        await asyncio.gather(*(each.close() for each in [*self._watched.values()]))
        self._watched.clear()
