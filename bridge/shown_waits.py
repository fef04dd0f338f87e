"""Writes to task documents what an attempt waits for while no external worker has accepted it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.errors import FlowKitError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.command_watch import CommandWatch
    from flowkit.bridge.context import BridgeContext

_logger = logging.getLogger("flowkit.bridge")

EVERY_SEC = 3.0
"""Minimum time between two writes of one attempt."""

WRITES_AT_ONCE = 50
"""Maximum number of attempts that one call writes, so that a long queue does not delay other writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shown:
    record: Dispatch
    text: str
    at: float


class ShownWaits:
    """Keeps the field `waits_for` of the nodes that one bridge supervises. It is for people: no decision reads it."""

    def __init__(self, context: BridgeContext, commands: CommandWatch) -> None:
        self._context = context
        self._commands = commands
        self._shown: dict[str, _Shown] = {}
        self._writing: asyncio.Task[None] | None = None

    def refresh(self, records: Iterable[Dispatch]) -> None:
        """Write, in the background, the texts that have changed. Do nothing while earlier texts are being written."""
        if self._writing is not None and not self._writing.done():
            return
        supervised = {record.key: record for record in records}
        changes = [*self._ended(supervised), *self._changed(supervised.values())][:WRITES_AT_ONCE]
        if changes:
            self._writing = asyncio.create_task(self._write(changes))

    async def stop(self) -> None:
        """Wait at most two seconds until the current writes have ended."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=2.0)

    def _ended(self, supervised: dict[str, Dispatch]) -> Iterator[tuple[Dispatch, str | None]]:
        """Yield the attempts that ended before a worker accepted them."""
        for key, shown in self._shown.items():
            if key not in supervised:
                yield shown.record, None

    def _changed(self, records: Iterable[Dispatch]) -> Iterator[tuple[Dispatch, str | None]]:
        """Yield the unaccepted attempts whose text has changed. The acceptance itself removes the text."""
        now = self._context.now()
        for record in records:
            if record.lease is not None:
                self._shown.pop(record.key, None)
                continue
            text, shown = self._commands.waits_for(record), self._shown.get(record.key)
            if text is None or (shown is not None and (shown.text == text or now - shown.at < EVERY_SEC)):
                continue
            yield record, text

    async def _write(self, changes: Iterable[tuple[Dispatch, str | None]]) -> None:
        for record, text in changes:
            try:
                await self._show(record, text)
            except FlowKitError as error:
                _logger.debug("what node %s waits for is not shown: %s", record.attempt.node_id, error)
                return

    async def _show(self, record: Dispatch, text: str | None) -> None:
        tasks, attempt, run_id = self._context.stores.tasks, record.attempt, record.run_id
        await self._context.portal.run(tasks.show_wait(attempt, run_id, text, holders=BRIDGE_PREFIX))
        if text is None:
            self._shown.pop(record.key, None)
        else:
            self._shown[record.key] = _Shown(record=record, text=text, at=self._context.now())
