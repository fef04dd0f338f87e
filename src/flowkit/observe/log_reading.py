"""Finds kept lines again: all of a task in the order of their times, or a page of those of one attempt.

External workers keep no lines. In their place, the lines of a node say what its workers have reported in
`worker_events`.
"""

from __future__ import annotations

import heapq
import logging
import re
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flowkit.adapters.entries import utc
from flowkit.observe.log_buffer import level_name
from flowkit.observe.log_store import LogStore
from flowkit.products import KeptLine, LinePage
from flowkit.protocol.messages import EventKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

    from flowkit.adapters.mongo import Database

_LATE: Final = timedelta(minutes=1)
"""How much later than its first line a document may arrive, and still be found by who follows a task."""
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

_PLACE: Final = re.compile(r"00(?P<ms>\d{13})\.(?P<row>.+)\.(?P<number>\d{9,12})")
"""A place, as `_to_line` makes it: the time, the row, and the number of the line."""

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
        if after and (at := _time_of(after)) is not None:
            wanted |= {"at": {"$gte": at - _LATE}, "until": {"$gte": at}}
        followed = _Followed(self._store, wanted, level, after)
        lines: list[KeptLine] = []
        async for found in followed:
            lines += found
            if not found or (after and len(lines) > limit):
                break
        if after:
            later = len(lines) > limit
            end = lines[limit - 1].place if later else followed.end
            return LinePage(lines=lines[:limit], earlier=True, later=later, end=end)
        last = next(
            (place for place, each in enumerate(lines) if before and each.place >= before), len(lines)
        )
        first = max(0, last - limit)
        later = last < len(lines)
        end = before if later else followed.end
        return LinePage(lines=lines[first:last], earlier=first > 0, later=later, end=end)


class _Followed:
    """The lines of a task as they come. A step that has failed can be repeated: no line is lost or comes twice."""

    def __init__(self, store: LogStore, wanted: Row, level: str, after: str = "") -> None:
        """Prepare to read the rows that `wanted` selects. Lines up to the place `after` are left out."""
        self.end = after
        """The place of the last line before which every missing line is counted in one that was read."""
        self._store = store
        self._wanted = wanted
        self._after = after
        self._numbers = _Numbers(level, after)
        self._seen: dict[str, datetime] = {}
        """When the rows began that were read, by their ids."""
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
            if self._after and not self._numbers.knows(row):
                self._numbers.begin(row, await self._store.number_before(row["_id"]))
            self._seen[row["_id"]] = utc(row["at"])
            for line in self._numbers.read(row):
                if line.line.place > self._after:
                    heapq.heappush(self._waiting, line)
            if lines := self._choose_before(utc(row["at"])):
                yield lines
        if lines := self._choose_before(None):
            yield lines

    def _choose_before(self, at: datetime | None) -> list[KeptLine]:
        """Return the lines of the wanted level that waited and were logged before a time."""
        chosen = []
        while self._waiting and (at is None or self._waiting[0].at < at):
            read = heapq.heappop(self._waiting)
            chosen += self._numbers.choose(read)
            if not self._numbers.carries():
                self.end = read.line.place
        return chosen

    async def _new_rows(self) -> AsyncIterator[Row]:
        """Yield the rows that were not seen, in the order of their first lines.

        Rows that began long before the newest one are not looked for, and forgotten.
        """
        wanted = self._wanted
        if self._seen:
            since = max(self._seen.values()) - _LATE
            wanted = {**wanted, "at": {"$gte": since}}
            for gone in [row_id for row_id, at in self._seen.items() if at < since]:
                del self._seen[gone]
        events = [_row_of_event(each) for each in await self._store.find_events(wanted)]
        pending = deque(each for each in events if each["_id"] not in self._seen)
        async for row in self._store.find(wanted, without=[*self._seen]):
            while pending and pending[0]["at"] <= utc(row["at"]):
                yield pending.popleft()
            yield row
        while pending:
            yield pending.popleft()


class _Numbers:
    """Knows which lines of each log come next, and which of those that are shown follows others that were left out."""

    def __init__(self, level: str, after: str) -> None:
        """Begin at the first lines, or behind the place `after`."""
        self._least = int(logging.getLevelNamesMapping()[level.upper()])
        self._last: dict[str, int] = {}
        """The number of the last line that was read, by log."""
        self._carried: dict[Attempt, int] = {}
        """Number of lines left out before lines that are not shown, by attempt."""
        if found := _PLACE.fullmatch(after):
            self._last[_log_of(found["row"])] = int(found["number"])

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


def _time_of(place: str) -> datetime | None:
    """Return the time of a place; None for a text that is no place."""
    found = _PLACE.fullmatch(place)
    return found and datetime.fromtimestamp(int(found["ms"]) / 1000, UTC)


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
        "node_id": event["node_id"],
        "attempt_epoch": event.get("attempt_epoch") or 0,
        "shard": 0,
        "worker_id": str(payload.get("worker_id") or ""),
        "at": at,
        "lines": [line],
    }
