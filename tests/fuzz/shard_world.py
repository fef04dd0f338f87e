"""What surrounds the shards of a node in the fuzz: the clock, and worker processes that stop at a write or
lose MongoDB."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import tenacity
from pymongo.errors import AutoReconnect
from tests.contract.builders import AT
from tests.contract.freezing_database import WRITES

from flowkit.activities import role_attempt
from flowkit.activities.batches import puller
from flowkit.attempt import storage

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterator

_LONGEST_CALL_SEC = 0.01
_ALL_WRITES = WRITES | {"update_many", "delete_many"}


@contextmanager
def virtual_time(chance: random.Random) -> Iterator[None]:
    """Let the time of the running loop, and of attempts, pass only while everything waits: it then jumps to
    the next timer.

    `chance` decides how long retries wait.
    """
    loop: Any = asyncio.get_running_loop()
    select, now = loop._selector.select, loop.time()

    def jump(timeout: float | None) -> Any:
        nonlocal now
        if timeout is None:
            raise RuntimeError("everything waits, and nothing has a timer")
        now += timeout
        return select(0)

    clock = SimpleNamespace(time=lambda: AT + now, monotonic=lambda: now)
    with (
        patch.object(loop, "time", lambda: now),
        patch.object(loop._selector, "select", jump),
        patch.multiple(puller, time=clock, _SCANNED_ITEMS=3),
        patch.multiple(role_attempt, time=clock),
        patch.multiple(storage, time=clock),
        patch.multiple(tenacity.wait, random=chance),
    ):
        yield


async def elapse(seconds: float) -> None:
    """Return when this time has passed."""
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, passed.set)
    await passed.wait()


class Process:
    """A worker process: a database whose calls take time, may lose MongoDB, and stop at a write."""

    def __init__(
        self,
        db: Any,
        chance: random.Random,
        *,
        stops_at: int,
        outages: float,
        note: Callable[[str, object], None],
        on_write: Callable[[str], Awaitable[None]],
    ) -> None:
        """`stops_at` is the number of the write before which the process stops, from 1; 0 for none.

        `outages` is the probability that a call fails, before or after its effect.
        """
        self._db = db
        self._chance = chance
        self._stops_at = stops_at
        self._outages = outages
        self._note = note
        self._on_write = on_write
        self._writes = 0
        self._runs = asyncio.Event()
        self._runs.set()
        self.is_killed = False
        """Whether the process has died, so that no call of it has an effect any more."""
        self.stopped = asyncio.Event()
        """Set when the process has stopped."""

    def __getattr__(self, name: str) -> _Collection:
        return _Collection(name, self._db[name], self)

    def __getitem__(self, name: str) -> _Collection:
        return _Collection(name, self._db[name], self)

    def thaw(self) -> None:
        """Let the process continue."""
        self._runs.set()

    def kill(self) -> None:
        """Let no further call have an effect."""
        self.is_killed = True

    async def call(self, name: str, operation: str, method: Any, *args: Any, **options: Any) -> Any:
        """Make a call, unless the process has stopped."""
        if self.is_killed:
            raise asyncio.CancelledError
        await elapse(self._chance.random() * _LONGEST_CALL_SEC)
        writes = operation in _ALL_WRITES
        self._writes += writes
        if writes and self._writes == self._stops_at:
            self._runs.clear()
            self.stopped.set()
        await self._runs.wait()
        self.fail_sometimes(f"before {name}.{operation}")
        result = await method(*args, **options)
        if writes:
            await self._on_write(name)
        self.fail_sometimes(f"after {name}.{operation}")
        return result

    def fail_sometimes(self, call: str) -> None:
        """Raise the error of a driver that has lost its connection, or do nothing."""
        if self._chance.random() < self._outages:
            self._note("outage", call)
            raise AutoReconnect("as drawn")


class _Collection:
    def __init__(self, name: str, collection: Any, process: Process) -> None:
        self._name = name
        self._collection = collection
        self._process = process

    def __getattr__(self, operation: str) -> Any:
        method = getattr(self._collection, operation)
        if operation in {"find", "aggregate"}:  # They return a cursor, and no result.
            return partial(self._read, method, operation)
        return lambda *args, **options: self._process.call(self._name, operation, method, *args, **options)

    def _read(self, method: Any, operation: str, *args: Any, **options: Any) -> Any:
        self._process.fail_sometimes(f"before {self._name}.{operation}")
        return method(*args, **options)
