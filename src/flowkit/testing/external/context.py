"""What a handler sees of its run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.testing.external.runs import Run
    from flowkit.testing.external.settings import Clock
    from flowkit.testing.external.store import Store

T = TypeVar("T")


class Artifacts:
    """Writes the artifacts of the run's node, for handlers that do so themselves."""

    def __init__(self, run: Run, store: Store) -> None:
        self._run = run
        self._store = store

    async def upsert_partial(self, batch_uid: str, meta: dict[str, Any]) -> dict[str, Any]:
        """Store `meta` as the artifact of a batch, and return a reference to it."""
        return await self._store.write_partial(self._run, batch_uid, meta)

    async def mark_complete(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Write the complete marker, and return a reference to the node."""
        return await self._store.write_complete(self._run, meta)


class RunContext:
    """The context of a run: its ids, its input, and the cancel flag.

    It has the attributes of the SDK's `RunContext` that the protocol needs. Variables and subprocesses of the SDK are
    not available.
    """

    def __init__(self, run: Run, worker_id: str, store: Store, clock: Clock) -> None:
        self.run = run
        self.worker_id = worker_id
        self.task_id = run.task_id
        self.node_id = run.node_id
        self.attempt_epoch = run.attempt_epoch
        self.role = run.step_type
        self.input_ref = run.input_ref
        self.input_inline = run.input_inline
        self.kv: dict[str, Any] = {}
        self.clock = clock
        self.artifacts = Artifacts(run, store)
        self._cleanup: list[Callable[[], Any]] = []

    @property
    def cancel_flag(self) -> asyncio.Event:
        """Set when the run must stop."""
        return self.run.cancel_flag

    @property
    def cancel_reason(self) -> str | None:
        """Why the run must stop: a signal's reason, `db_flag` or `coordinator_cmd`."""
        return self.run.cancel_reason

    @property
    def cancel_deadline_ts_ms(self) -> int | None:
        """The deadline that a signal named. The worker does not enforce it."""
        return self.run.cancel_deadline_ts_ms

    def cancelled(self) -> bool:
        """Whether the run must stop."""
        return self.cancel_flag.is_set()

    async def raise_if_cancelled(self) -> None:
        """Raise `asyncio.CancelledError` if the run must stop."""
        if self.cancelled():
            raise asyncio.CancelledError("cancelled")

    async def cancellable(self, work: Awaitable[T]) -> T:
        """Wait for `work`. Cancel it and raise `asyncio.CancelledError` as soon as the run must stop."""
        working = asyncio.ensure_future(work)
        flagged = asyncio.ensure_future(self.cancel_flag.wait())
        try:
            await asyncio.wait({working, flagged}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise asyncio.CancelledError("cancelled")
            return working.result()
        finally:
            working.cancel()
            flagged.cancel()

    def on_cleanup(self, callback: Callable[[], Any]) -> None:
        """Register a callback for the end of the run."""
        self._cleanup.append(callback)

    def clean_up(self) -> None:
        """Call the registered callbacks in reverse order."""
        while self._cleanup:
            self._cleanup.pop()()
