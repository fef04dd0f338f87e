"""Background loops, which survive every error of their steps, and the health that processes report."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowkit.errors import FlowKitError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_logger = logging.getLogger("flowkit.loops")
_outages = logging.getLogger("flowkit.worker")

_AFTER_ERROR_SEC = 1.0
"""The pause after an unexpected error, so that a step that always fails does not run in a tight loop."""

_RELEASE_TIMEOUT_SEC = 2.0
"""How long a stopping process waits for the release of a turn."""


def new_owner() -> str:
    """Return a unique id of a part of this process, under which it takes its turn among the engines."""
    return f"{os.getpid()}@{socket.gethostname()}#{secrets.token_hex(4)}"


async def release_turn(ending: Awaitable[None], name: str) -> None:
    """Await `ending`, which releases a turn of this process, so that another one need not wait until it expires.

    Log an error, and give up after two seconds: the turn expires. `name` is what the turn is for.
    """
    try:
        async with asyncio.timeout(_RELEASE_TIMEOUT_SEC):
            await ending
    except (FlowKitError, TimeoutError) as error:
        _logger.info("the engine could not end its turn %s; the turn expires: %s", name, error)


def error_summary(error: BaseException) -> str:
    """Return the text of an error, or its type if it has no text."""
    return str(error) or type(error).__name__


@dataclass(kw_only=True, slots=True)
class LoopHealth:
    """The health of one background loop. Times are seconds since the Unix epoch."""

    name: str
    running: bool = False
    """False before the loop starts and after it ends."""
    last_ok_at: float | None = None
    """When a step last succeeded."""
    last_error_at: float | None = None
    last_error: str | None = None
    """The text of the last error; it stays after later steps succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleHealth:
    """One external role of a bridge. Counts are None while Kafka or MongoDB does not return them."""

    role: str
    waits_for: str | None = None
    """Why the bridge does not serve the role yet, or what holds it; None while it serves the role."""
    workers: int | None = None
    """Number of external workers of the role that are connected to Kafka."""
    attempts: int | None = None
    """Number of the role's attempts without an outcome, of all bridges on the database."""
    queued: int | None = None
    """Number of commands that no worker has read yet, by the offsets of the workers' group."""
    status_lag: int | None = None
    """Number of status events that no bridge has processed yet."""

    @property
    def served(self) -> bool:
        """Return whether the bridge serves the role."""
        return self.waits_for is None


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeHealth:
    """The state of one bridge."""

    bridge_id: str
    roles: tuple[RoleHealth, ...] = ()
    attempts: int = 0
    """Number of attempts that this bridge supervises."""
    malformed: dict[str, int] = field(default_factory=dict)
    """Number of Kafka records by topic that this bridge skipped, because they are not messages of the protocol."""
    measured_at: float | None = None
    """When the counts of the roles were last read, in seconds since the Unix epoch."""

    @property
    def served(self) -> bool:
        """Return whether the bridge serves all of its roles."""
        return all(role.served for role in self.roles)


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """The health of an engine, a bridge or a worker."""

    running: bool
    """Whether it polls Temporal: it was started, was not stopped and did not fail."""
    error: str | None = None
    """The error that ended it, if any."""
    loops: tuple[LoopHealth, ...] = field(default=())
    """Its background loops. None of them makes decisions about tasks."""
    lost_events: int = 0
    """Number of attempt events that a worker dropped because MongoDB was unavailable for too long."""
    bridge: BridgeHealth | None = None
    """The bridge to external workers; None if the process has none."""

    @property
    def ok(self) -> bool:
        """Return whether it is running with all of its background loops."""
        return self.running and all(loop.running for loop in self.loops)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The errors that a step raises while a server is unavailable. The next step retries."""

    errors: tuple[type[Exception], ...]
    log: Callable[[Exception], object]
    """Logs such an error."""


class BackgroundLoop:
    """Calls `step` repeatedly. If a step raises an error, the loop logs and records it, then continues.

    With `expected`, every step without an error counts as a success. Otherwise, the step reports its own success by
    calling `worked`, and expected errors by calling `failed`.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[object]],
        *,
        pause_sec: float = 0.0,
        expected: Expected | None = None,
    ) -> None:
        self.health = LoopHealth(name=name)
        self._step = step
        self._pause_sec = pause_sec
        self._expected = expected

    async def run(self) -> None:
        """Run until cancelled, even if the step suppresses the cancel, as PyMongo's asynchronous client may."""
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
            if self._expected:
                self.worked()
        except Exception as error:
            if self._expected and isinstance(error, self._expected.errors):
                self._expected.log(error)
                self.failed(error)
                return
            _logger.exception("unexpected error in %s; it continues", self.health.name)
            self.failed(error)
            await asyncio.sleep(_AFTER_ERROR_SEC)

    def failed(self, error: Exception) -> None:
        """Record an error of a step. The caller logs it."""
        self.health.last_error_at = time.time()
        self.health.last_error = error_summary(error)

    def worked(self) -> None:
        """Record that a step succeeded."""
        self.health.last_ok_at = time.time()


class OutageLogger:
    """Logs an outage once when it begins and once when it ends."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_down = False

    def failed(self, error: Exception) -> None:
        """Log the first failure of an outage."""
        if not self._is_down:
            _outages.warning("cannot %s: %s; retrying", self._what, str(error) or "no response in time")
        self._is_down = True

    def recovered(self) -> None:
        """Log the end of an outage, if one was in progress."""
        if self._is_down:
            _outages.info("can %s again", self._what)
        self._is_down = False
