"""Finds kept lines again: all of a task in the order of their times, or a page of those of one attempt.

External workers keep no lines. In their place, the lines of a node say what its workers have reported in
`worker_events`.
"""

from __future__ import annotations

import heapq
import logging
import re
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flowkit.adapters.entries import utc
from flowkit.observe.log_buffer import level_name
from flowkit.observe.log_store import LATE, LogStore
from flowkit.products import KeptLine, LinePage
from flowkit.protocol.messages import EventKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping

    from flowkit.adapters.mongo import Database

_EVENT_LEVELS: Final[Mapping[str, int]] = {
    EventKind.TASK_ACCEPTED: logging.INFO,
    EventKind.TASK_DONE: logging.INFO,
    EventKind.BATCH_FAILED: logging.WARNING,
    EventKind.CANCELLED: logging.WARNING,
    EventKind.TASK_FAILED: logging.ERROR,
}
"""The levels of events of external workers; DEBUG for the others."""
_SAID: Final = ("batch_uid", "batches", "reason_code", "error", "reason")
"""What an event says, in its payload."""

EVENTS: Final = "worker_events"
"""The logger of what events say."""

_CURSOR: Final = re.compile(r"\d{1,13}(~[0-9a-f]{16}=\d{8}\.\d{9,12})*(~worker_events=\d{15}\.[0-9a-zA-Z]+)?")
"""The text of a cursor: the time, and the key of the last line of each log. The events are one log."""

Row = dict[str, Any]
Attempt = tuple[str, int, int]
"""A node, an epoch and a shard."""


class _Read(NamedTuple):
    """A line with its level as a number. The first fields are its order, which is that of `KeptLine.place`."""

    at: datetime
    row_id: str
    number: int
    level: int
    line: KeptLine


class HandlerLogReader:
    """Finds the lines of tasks."""

    def __init__(self, db: Database) -> None:
        self._store = LogStore(db)

    async def kept_sec(self) -> float | None:
        """Return how long lines are kept; None for ever."""
        return await self._store.kept_sec()

    def lines(
        self, task_id: str, node_id: str | None = None, *, attempt: int | None = None, level: str = "DEBUG"
    ) -> AsyncIterator[list[KeptLine]]:
        """Yield the lines so far, oldest first; then, again and again, an empty list and new ones."""
        wanted: Row = {"task_id": task_id}
        wanted |= {} if node_id is None else {"node_id": node_id}
        wanted |= {} if attempt is None else {"attempt_epoch": attempt}
        return _Followed(self._store, wanted, level)

    async def page(
        self,
        task_id: str,
        node_id: str,
        attempt: int,
        *,
        level: str = "DEBUG",
        before: str = "",
        after: str = "",
        limit: int = 200,
    ) -> LinePage:
        """Return the last lines of an attempt; or those before one place; or the first ones after another place."""
        wanted: Row = {"task_id": task_id, "node_id": node_id, "attempt_epoch": attempt}
        cursor = _Cursor.parse(after)
        followed = _Followed(self._store, wanted, level, cursor)
        lines: list[KeptLine] = []
        async for found in followed:
            lines += found
            if not found or (after and len(lines) > limit):
                break
        if after:
            later = len(lines) > limit
            end = cursor.beyond(lines[:limit]) if later else followed.cursor
            return LinePage(lines=lines[:limit], earlier=True, later=later, end=str(end))
        last = next(
            (place for place, each in enumerate(lines) if before and each.place >= before), len(lines)
        )
        first = max(0, last - limit)
        later = last < len(lines)
        end = cursor.beyond(lines[:last]) if later else followed.cursor
        return LinePage(lines=lines[first:last], earlier=first > 0, later=later, end=str(end))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cursor:
    """Up to where the lines of an attempt were read. New ones are those of documents that MongoDB has stored since.

    Documents may become visible in another order than that of their times, so those of the last minute before are read
    again, and the lines that are known are left out. Within one log, which one process writes, lines are in order.
    """

    stored_at: float = 0.0
    """When MongoDB stored the latest document that was read, in seconds since the Unix epoch; 0 to read all again."""
    known: Mapping[str, str] = field(default_factory=dict)
    """The key of the last known line, by log."""

    @classmethod
    def parse(cls, text: str) -> _Cursor:
        """Return the cursor of a page; that before all lines for another text."""
        if not _CURSOR.fullmatch(text):
            return _START
        stored_at, *logs = text.split("~")
        return cls(stored_at=int(stored_at) / 1000, known=dict(each.split("=") for each in logs))

    def __str__(self) -> str:
        logs = [f"{log}={key}" for log, key in sorted(self.known.items())]
        return "~".join([str(round(self.stored_at * 1000)), *logs]) if self.stored_at or logs else ""

    def beyond(self, lines: Iterable[KeptLine]) -> _Cursor:
        """Return the cursor beyond these lines, too, while later ones of the same documents are not known."""
        return replace(self, known={**self.known, **dict(_position(each.place) for each in lines)})

    def passed_rows(self) -> list[tuple[str, str]]:
        """Return, for each log, ids between which are the rows that need not be read again; without the second one."""
        rows = {log: key.partition(".")[0] for log, key in self.known.items() if log != EVENTS}
        return [(f"{log}-", f"{log}-{row}") for log, row in rows.items()]

    def knows(self, line: KeptLine) -> bool:
        """Return whether a line was read before."""
        log, key = _position(line.place)
        return key <= self.known.get(log, "")


_START: Final = _Cursor()


class _Followed:
    """The lines of a task as they come. A step that has failed can be repeated: no line is lost or comes twice."""

    def __init__(self, store: LogStore, wanted: Row, level: str, cursor: _Cursor = _START) -> None:
        """Prepare to read the rows that `wanted` selects. Lines up to the cursor are left out."""
        self.cursor = cursor
        """Up to where every missing line is counted in one that was read."""
        self._store = store
        self._wanted = wanted
        self._begin = cursor
        self._numbers = _Numbers(level, cursor.known)
        self._seen: dict[str, float] = {}
        """When MongoDB stored the rows that were read lately, by their ids."""
        self._events: set[Any] = set()
        """The ids of the events that were read."""
        self._stored_at = cursor.stored_at
        """When MongoDB stored the latest row of the looks that have ended. Rows come in the order of their lines, so a
        look that breaks off may have read later ones than it has missed."""
        self._newest = cursor.stored_at
        """The same of all rows that were read."""
        self._passed: dict[str, tuple[str, float]] = {}
        """The key of the last line that was passed, by log, and when its row was stored; of events, the latest time."""
        self._carrying: dict[str, tuple[str, float]] = {}
        """The same of later lines, before which others are missing that no line has counted yet."""
        self._waiting: list[_Read] = []
        """Lines that may come after those of rows that are still to be read."""
        self._look: AsyncGenerator[list[KeptLine]] | None = None

    def __aiter__(self) -> AsyncIterator[list[KeptLine]]:
        return self

    async def __anext__(self) -> list[KeptLine]:
        look, self._look = self._look or self._new_lines(), None
        if (found := await anext(look, None)) is None:
            return []
        self._look = look
        return found

    async def _new_lines(self) -> AsyncGenerator[list[KeptLine]]:
        async for row in self._new_rows():
            if self._begin.stored_at and not self._numbers.knows(row):
                self._numbers.begin(row, await self._store.number_before(row["_id"]))
            self._note(row)
            for line in self._numbers.read(row):
                if not self._begin.knows(line.line):
                    heapq.heappush(self._waiting, line)
            if lines := self._choose_before(utc(row["at"])):
                yield lines
        lines = self._choose_before(None)
        self.cursor = self._end_look()
        if lines:
            yield lines

    def _note(self, row: Row) -> None:
        """Note that a row was read."""
        if (event := row.get("event")) is not None:
            self._events.add(event)
            return
        self._seen[row["_id"]] = stored_at = utc(row["created_at"]).timestamp()
        self._newest = max(self._newest, stored_at)

    def _choose_before(self, at: datetime | None) -> list[KeptLine]:
        """Return the lines of the wanted level that waited and were logged before a time."""
        chosen = []
        while self._waiting and (at is None or self._waiting[0].at < at):
            read = heapq.heappop(self._waiting)
            chosen += self._numbers.choose(read)
            log, key = _position(read.line.place)
            self._carrying[log] = key, self._newest if log == EVENTS else self._seen[read.row_id]
            if not self._numbers.carries():
                self._passed |= self._carrying
                self._carrying.clear()
        return chosen

    def _end_look(self) -> _Cursor:
        """Return the cursor beyond all that was passed, without the logs of which nothing will be read again."""
        self._stored_at = self._newest
        stored_at = self._begin.stored_at if self._carrying else self._stored_at
        since = stored_at - LATE.total_seconds()
        recent = {log: key for log, (key, row_at) in self._passed.items() if row_at >= since}
        return _Cursor(stored_at=stored_at, known={**self._begin.known, **recent})

    async def _new_rows(self) -> AsyncIterator[Row]:
        """Yield the rows that were not seen, in the order of their first lines.

        Rows that MongoDB stored long before the newest one are not looked for, and forgotten.
        """
        wanted = self._wanted
        if self._stored_at:
            since = self._stored_at - LATE.total_seconds()
            wanted = {**wanted, "created_at": {"$gte": datetime.fromtimestamp(since, UTC)}}
            for gone in [row_id for row_id, stored_at in self._seen.items() if stored_at < since]:
                del self._seen[gone]
        if passed := self._begin.passed_rows():
            wanted = {**wanted, "$nor": [{"_id": {"$gte": first, "$lt": end}} for first, end in passed]}
        since_ms = int(self._begin.known.get(EVENTS, "0").partition(".")[0])
        events = await self._store.find_events(self._wanted, self._events, since_ms=since_ms)
        pending = deque(map(_row_of_event, events))
        async for row in self._store.find(wanted, without=[*self._seen]):
            while pending and pending[0]["at"] <= utc(row["at"]):
                yield pending.popleft()
            yield row
        while pending:
            yield pending.popleft()


class _Numbers:
    """Knows which lines of each log come next, and which of those that are shown follows others that were left out."""

    def __init__(self, level: str, known: Mapping[str, str]) -> None:
        """Begin at the first lines, or behind those of which the keys are known."""
        self._least = int(logging.getLevelNamesMapping()[level.upper()])
        self._last: dict[str, int] = {}
        """The number of the last line that was read, by log."""
        self._carried: dict[Attempt, int] = {}
        """Number of lines left out before lines that are not shown, by attempt."""
        self._last |= {log: int(key.partition(".")[2]) for log, key in known.items() if log != EVENTS}

    def knows(self, row: Row) -> bool:
        """Return whether it is known which line comes before a row."""
        return row["lines"][0]["n"] == 1 or _log_of(str(row["_id"])) in self._last

    def begin(self, row: Row, number: int) -> None:
        """Note the number of the line before a row."""
        self._last[_log_of(str(row["_id"]))] = number

    def carries(self) -> bool:
        """Return whether lines were left out that are not counted in any line yet."""
        return bool(self._carried)

    def read(self, row: Row) -> Iterator[_Read]:
        """Yield the lines of a row."""
        row_id = str(row["_id"])
        log = _log_of(row_id)
        for each in row["lines"]:
            left_out = each["n"] - self._last.get(log, 0) - 1
            self._last[log] = each["n"]
            at = utc(each["at"])
            yield _Read(at, row_id, each["n"], each["level"], _to_line(row, each, at, max(0, left_out)))

    def choose(self, read: _Read) -> list[KeptLine]:
        """Return the line if it has the wanted level."""
        line = read.line
        key = line.node_id, line.attempt, line.shard
        left_out = line.left_out + self._carried.pop(key, 0)
        if read.level >= self._least:
            return [line if left_out == line.left_out else replace(line, left_out=left_out)]
        if left_out:
            self._carried[key] = left_out
        return []


def _log_of(row_id: str) -> str:
    """Return the id of the log of an attempt in one process that a row is a part of."""
    return row_id.partition("-")[0]


def _position(place: str) -> tuple[str, str]:
    """Return the log of a line, and its key, which sorts the lines of this log as their process has made them."""
    at, row, number = place.split(".")
    log, is_row, part = row.partition("-")
    return (log, f"{part}.{number}") if is_row else (EVENTS, f"{at}.{row}")


def _to_line(row: Row, line: Row, at: datetime, left_out: int) -> KeptLine:
    return KeptLine(
        node_id=row["node_id"],
        attempt=row["attempt_epoch"],
        shard=row["shard"],
        left_out=left_out,
        at=at.timestamp(),
        level=level_name(line["level"]),
        logger=line["logger"],
        text=line["text"],
        batch_uid=line.get("batch_uid", ""),
        worker_id=row["worker_id"],
        place=f"{int(at.timestamp() * 1000):015d}.{row['_id']}.{line['n']:09d}",
    )


def _row_of_event(event: Row) -> Row:
    """Return an event of an external worker in the form of a row of `attempt_logs`."""
    payload = event.get("payload") or {}
    kind, at = str(payload.get("kind", "")), datetime.fromtimestamp(event["ts_ms"] / 1000, UTC)
    said = [f"{name}={payload[name]}" for name in _SAID if payload.get(name) not in (None, "")]
    text = "  ".join([kind.lower().replace("_", " "), *([" ".join(said)] if said else [])])
    line = {"n": 1, "at": at, "level": _EVENT_LEVELS.get(kind, logging.DEBUG), "logger": EVENTS, "text": text}
    return {
        "_id": str(event["_id"]),
        "event": event["_id"],
        "node_id": event["node_id"],
        "attempt_epoch": event.get("attempt_epoch") or 0,
        "shard": 0,
        "worker_id": str(payload.get("worker_id") or ""),
        "at": at,
        "lines": [line],
    }
