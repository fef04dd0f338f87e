"""The renewed leases and the numbers of new batches that status events bring, until they are written."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from flowkit.errors import StoreRefused

if TYPE_CHECKING:
    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.supervisor import Supervisor

_logger = logging.getLogger("flowkit.bridge")


class Renewals:
    """Collects renewals and writes them together: one update for each attempt, all in one call.

    The consumer commits events only after their renewals are written. After a crash, it receives the events again.
    """

    def __init__(self, context: BridgeContext, supervisor: Supervisor) -> None:
        self._context = context
        self._supervisor = supervisor
        self._due: dict[str, tuple[Dispatch, int]] = {}
        self._being_written: dict[str, tuple[Dispatch, int]] = {}
        self._one_write = asyncio.Lock()

    def add(self, record: Dispatch, batches: int) -> None:
        """Note the renewed lease of `record`, and the number of its new batches."""
        self._merge(record, batches)
        self._supervisor.saw(record)

    def _merge(self, record: Dispatch, batches: int) -> None:
        _, others = self._due.get(record.key, (record, 0))
        self._due[record.key] = (record, others + batches)

    async def take(self, key: str) -> int:
        """Return the number of batches that are not written yet. The caller ends the attempt and writes it itself."""
        if key in self._being_written:
            async with self._one_write:
                pass
        _, batches = self._due.pop(key, (None, 0))
        return batches

    async def write(self) -> None:
        """Write what is due. Return once everything is written that was noted before the call."""
        async with self._one_write:
            self._being_written, self._due = self._due, {}
            try:
                await self._write()
            except BaseException:
                later, self._due = self._due, self._being_written
                for renewal in later.values():
                    self._merge(*renewal)
                raise
            finally:
                self._being_written = {}

    async def _write(self) -> None:
        renewals, dispatches = [*self._being_written.values()], self._context.stores.dispatches
        at = self._context.now()
        try:
            if renewals and not await self._context.db(lambda: dispatches.renew(renewals, at)):
                self._supervisor.refresh_soon()
        except StoreRefused as error:
            _logger.warning("some of %d leases were not renewed, so they expire: %s", len(renewals), error)
