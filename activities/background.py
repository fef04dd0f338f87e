"""Loops that run beside the work: they outlive every error, and show how they do."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_logger = logging.getLogger("flowkit.loops")

_AFTER_ERROR_SEC = 1.0
"""A step that fails at once is not tried without end."""


@dataclass(kw_only=True, slots=True)
class LoopHealth:
    """How one background loop does. Times are seconds since the epoch."""

    name: str
    running: bool = False
    """False before the loop starts and after it has ended."""
    last_ok_at: float | None = None
    """When its last step ended well."""
    last_error_at: float | None = None
    last_error: str | None = None
    """Text of the last error; it stays when later steps end well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """How an engine or a worker does."""

    running: bool
    """Whether it polls Temporal: it was started, not stopped, and nothing has ended it."""
    error: str | None = None
    """What has ended it, if an error did."""
    loops: tuple[LoopHealth, ...] = field(default=())
    """Its background loops. None of them decides about tasks."""
    lost_events: int = 0
    """Events of attempts that a worker has given up because MongoDB was away for too long."""

    @property
    def ok(self) -> bool:
        """Whether it runs, with all of its loops."""
        return self.running and all(loop.running for loop in self.loops)


class BackgroundLoop:
    """Calls `step` again and again; an error that it raises is logged and noted, and the loop continues.

    The step itself says when it ended well (`worked`), and which errors are usual (`failed`).
    """

    def __init__(self, name: str, step: Callable[[], Awaitable[object]], *, pause_sec: float = 0.0) -> None:
        self.health = LoopHealth(name=name)
        self._step = step
        self._pause_sec = pause_sec

    async def run(self) -> None:
        """Run until cancelled, even when the step swallows the cancel (PyMongo's asynchronous client may)."""
        self.health.running = True
        task = asyncio.current_task()
        try:
            while task is None or not task.cancelling():
                await self._once()
                await asyncio.sleep(self._pause_sec)
        finally:
            self.health.running = False

    async def _once(self) -> None:
        try:
            await self._step()
        except Exception as error:
            _logger.exception("unexpected error in %s; it continues", self.health.name)
            self.failed(error)
            await asyncio.sleep(_AFTER_ERROR_SEC)

    def failed(self, error: Exception) -> None:
        """Note an error of a step; logging it is the caller's."""
        self.health.last_error_at = time.time()
        self.health.last_error = str(error) or type(error).__name__

    def worked(self) -> None:
        """Note that a step ended well."""
        self.health.last_ok_at = time.time()
