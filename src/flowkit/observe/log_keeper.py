"""Keeps the lines of the attempts of one process: about once a second, it writes them to MongoDB together.

The lines are for people only, so they must not slow down or fail an attempt. If MongoDB is unavailable, lines wait
within bounds, and what does not fit is counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from flowkit.attempt.background import BackgroundLoop, OutageLogger
from flowkit.core.handler_lines import start_capture, stop_capture
from flowkit.core.instruments import LOG_LINES, LOG_LINES_DROPPED, STORED_BYTES
from flowkit.errors import FlowKitError, StoreRefused
from flowkit.observe.log_buffer import BOUND, OUTAGE, REFUSED, LineBuffer, WaitingBytes, level_name
from flowkit.observe.log_store import LogStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowkit.adapters.mongo import Database
    from flowkit.config import KeptLogs
    from flowkit.models import AttemptInput
    from flowkit.observe.log_buffer import LogRow

_logger = logging.getLogger("flowkit.worker")

_PAUSE_SEC: Final = 1.0
"""The time between two writes of lines."""
_CLOSE_SEC: Final = 5.0
"""How long `stop` waits for MongoDB."""
_GROUP_BYTES: Final = 4 << 20
"""About how many bytes one write has."""


class HandlerLogKeeper:
    """Takes the lines of all attempts of this process between `start` and `stop`."""

    def __init__(self, db: Database, settings: KeptLogs, *, pause_sec: float = _PAUSE_SEC) -> None:
        self._store = LogStore(db)
        self._settings = settings
        self._pause_sec = pause_sec
        self._lock = threading.RLock()
        self._room = WaitingBytes()
        self._changed: dict[LineBuffer, None] = {}
        """The buffers with lines that wait for the next flush, in the order of their first ones."""
        self._due: dict[LineBuffer, None] = {}
        """Those with lines that the current flush writes."""
        self._rows: list[LogRow] = []
        """Documents that are being written, or that MongoDB has not taken yet."""
        self._gone: list[str] = []
        """Ids of documents that have to be deleted."""
        self._tails: dict[str, tuple[str, dict[int, int]]] = {}
        """The stored documents that may still be deleted, by id: their roles, and the number of their lines by level.
        Their lines are counted when that is decided."""
        self._wake = asyncio.Event()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[None] | None = None
        self._prepared = False
        self._levels: dict[str, int | None] = {}
        self._outage = OutageLogger("write the lines of handlers")
        self._loop = BackgroundLoop("lines of handlers", self._write_changed)
        self.health = self._loop.health

    def sink(self, attempt: AttemptInput, worker_id: str) -> LineBuffer | None:
        """Return what takes the lines of an attempt; None if those of its role are not kept."""
        role = attempt.role
        if role not in self._levels:
            self._levels[role] = self._settings.kept_level(role)
            for reason in (OUTAGE, REFUSED):  # From 0, so that Prometheus sees the first ones as an increase.
                LOG_LINES_DROPPED.add(role, reason, amount=0)
        level = self._levels[role]
        if level is None or self._running is None:
            return None
        return LineBuffer(
            attempt,
            worker_id,
            level=level,
            prints=self._settings.keep_prints,
            lock=self._lock,
            room=self._room,
            changed=self._note_change,
        )

    def _note_change(self, buffer: LineBuffer) -> None:
        if buffer in self._changed:
            return
        is_first = not self._changed
        self._changed[buffer] = None
        if is_first and self._event_loop is not None:
            with suppress(RuntimeError):  # The loop is closed.
                self._event_loop.call_soon_threadsafe(self._wake.set)

    def start(self) -> None:
        """Begin to capture lines, and to write them on the running loop."""
        level = self._settings.least_kept_level()
        if level is None or self._running is not None:
            return
        self._event_loop = asyncio.get_running_loop()
        self._running = asyncio.create_task(self._loop.run())
        start_capture(level, prints=self._settings.keep_prints)

    async def stop(self) -> None:
        """Write what is left, but wait for MongoDB five seconds at most. Call this after the attempts have ended."""
        running, self._running = self._running, None
        if running is None:
            return
        stop_capture(prints=self._settings.keep_prints)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_SEC):
                await self.flush()
        except TimeoutError as error:
            self._outage.failed(error)
        self._count_lost()

    async def _write_changed(self) -> None:
        await self._wake.wait()
        await asyncio.sleep(self._pause_sec)
        self._wake.clear()
        if not await self.flush():
            self._wake.set()

    async def flush(self) -> bool:
        """Write the lines that wait. Return False if MongoDB does not take them; they wait on.

        Lines that are logged meanwhile wait for the next flush, so that one busy attempt does not cause many writes.
        """
        with self._lock:
            self._due |= self._changed
            self._changed.clear()
        try:
            while self._take_group():
                await self._write_group()
        except FlowKitError as error:
            self._outage.failed(error)
            self._loop.failed(error)
            return False
        self._outage.recovered()
        self._loop.worked()
        return True

    def _take_group(self) -> bool:
        """Collect the documents of the next write. Return False if nothing waits."""
        size = sum(row.size for row in self._rows)
        while size < _GROUP_BYTES and self._due:
            buffer = next(iter(self._due))
            del self._due[buffer]
            rows, gone = buffer.take()
            self._rows += rows
            self._gone += gone
            self._release_replaced()
            if buffer.has_ended:
                self._count_kept(buffer.stored_tail())
            size += sum(row.size for row in rows)
        return bool(self._rows or self._gone)

    async def _write_group(self) -> None:
        await self._prepare()
        if self._rows:
            await self._append()
        if self._gone:
            await self._store.remove(self._gone)
            for row_id in self._gone:
                role, levels = self._tails.pop(row_id, ("", {}))
                if levels:
                    LOG_LINES_DROPPED.add(role, BOUND, amount=sum(levels.values()))
            self._gone = []

    async def _prepare(self) -> None:
        if not self._prepared:
            await self._store.prepare()
            self._prepared = True

    async def _append(self) -> None:
        try:
            await self._store.append([row.document for row in self._rows])
        except StoreRefused as error:
            _logger.warning("MongoDB rejected some of %d documents with lines: %s", len(self._rows), error)
            self._release(REFUSED)
        else:
            self._release("")

    def _release_replaced(self) -> None:
        """Forget the documents that later lines have replaced before MongoDB took them."""
        gone = {*self._gone}
        left = [row for row in self._rows if row.document["_id"] not in gone]
        self._rows = [row for row in self._rows if row.document["_id"] in gone]
        self._release(BOUND)
        self._rows = left

    def _release(self, reason: str) -> None:
        """Forget the documents that were written, or that are not kept for a reason."""
        rows, self._rows = self._rows, []
        with self._lock:
            self._room.used -= sum(row.size for row in rows)
        for row in rows:
            if reason:
                LOG_LINES_DROPPED.add(row.role, reason, amount=sum(row.levels.values()))
            elif row.may_go():
                self._tails[row.document["_id"]] = row.role, row.levels
            else:
                _count_kept(row.role, row.levels)
        if not reason:
            STORED_BYTES.add("logs", amount=sum(row.size for row in rows))

    def _count_kept(self, row_ids: Iterable[str]) -> None:
        """Count the lines of these documents, as far as they are stored and not counted yet."""
        for row_id in row_ids:
            _count_kept(*self._tails.pop(row_id, ("", {})))

    def _count_lost(self) -> None:
        """Count the lines that MongoDB has not taken, and those that nothing will delete any more."""
        for buffer in (*self._due, *self._changed):
            self._rows += buffer.take()[0]
        self._due.clear()
        self._changed.clear()
        if lost := sum(sum(row.levels.values()) for row in self._rows):
            _logger.warning("%d lines of handlers were not written", lost)
            self._release(OUTAGE)
        self._count_kept([*self._tails])


def _count_kept(role: str, levels: dict[int, int]) -> None:
    for level, count in levels.items():
        LOG_LINES.add(role, level_name(level).lower(), amount=count)
