"""Runs plain `process_batch` hooks in processes of their own, for work that would hold Python's global lock."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.activities.context import RunContext
    from flowkit.activities.handlers import Batch, RoleHandler

_spawning = multiprocessing.get_context("spawn")
"""A fork of a process with threads may hang; a fresh interpreter does not."""

_handlers: Mapping[str, RoleHandler] = {}
_flags: Any = ()


class ProcessDied(Exception):
    """The process that worked on a batch ended before it was done, for example for want of memory."""


@dataclass(kw_only=True)
class ProcessContext:
    """What `process_batch` sees of its run in another process: its identity, its cancel flag, its scratch space."""

    task_id: str
    node_id: str
    attempt_epoch: int
    worker_id: str
    slot: int
    kv: dict[str, Any] = field(default_factory=dict)

    def cancelled(self) -> bool:
        """Whether the run is to stop."""
        return bool(_flags[self.slot])

    def raise_if_cancelled(self) -> None:
        """Raise asyncio.CancelledError when the run is to stop."""
        if self.cancelled():
            raise asyncio.CancelledError


class ProcessPool:
    """Processes that share a worker's handlers; a broken one is replaced for the next batch."""

    def __init__(self, handlers: Mapping[str, RoleHandler], *, processes: int | None, slots: int) -> None:
        self._handlers = dict(handlers)
        self._processes = processes
        self._flags = _spawning.RawArray("b", slots)
        self._free = list(range(slots))
        self._pool: ProcessPoolExecutor | None = None

    async def process(self, role: str, batch: Batch, ctx: RunContext) -> Any:
        """What the role's `process_batch` answers. ProcessDied when its process has ended."""
        slot = self._free.pop()
        self._flags[slot] = 0
        raised = asyncio.create_task(self._raise_flag(slot, ctx))
        view = ProcessContext(
            task_id=ctx.task_id,
            node_id=ctx.node_id,
            attempt_epoch=ctx.attempt_epoch,
            worker_id=ctx.worker_id,
            slot=slot,
            kv=ctx.kv,
        )
        try:
            return await self._run(role, batch, ctx, view)
        finally:
            raised.cancel()
            self._free.append(slot)

    async def _run(self, role: str, batch: Batch, ctx: RunContext, view: ProcessContext) -> Any:
        pool = self._started()
        try:
            loop = asyncio.get_running_loop()
            result, ctx.kv = await loop.run_in_executor(pool, _process, role, batch, view)
        except BrokenProcessPool:
            if self._pool is pool:
                self.close()
            raise ProcessDied(f"the process that worked on batch {batch.batch_uid!r} has ended") from None
        return result

    async def _raise_flag(self, slot: int, ctx: RunContext) -> None:
        await ctx.cancel_flag.wait()
        self._flags[slot] = 1

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes,
                mp_context=_spawning,
                initializer=_share,
                initargs=(self._handlers, self._flags),
            )
        return self._pool

    def close(self) -> None:
        """End the processes as soon as they have nothing to do."""
        if self._pool is not None:
            threading.Thread(target=_dispose, args=(self._pool,), name="flowkit-pool-end").start()
            self._pool = None


def _dispose(pool: ProcessPoolExecutor) -> None:
    """End the pool and let go of its semaphores here.

    They are freed by imports, which Temporal's sandbox would refuse if Python collected them during a workflow's turn.
    """
    pool.shutdown(cancel_futures=True)
    gc.collect()


def _share(handlers: Mapping[str, RoleHandler], flags: Any) -> None:
    global _handlers, _flags
    _handlers, _flags = handlers, flags
    threading.Thread(target=_end_with_the_worker, name="flowkit-parent", daemon=True).start()


def _end_with_the_worker() -> None:
    """A process of the pool would otherwise wait for ever for the next batch of a worker that was killed."""
    worker = multiprocessing.parent_process()
    if worker is not None:
        worker.join()
        os._exit(1)


def _process(role: str, batch: Batch, view: ProcessContext) -> tuple[Any, dict[str, Any]]:
    hook: Any = _handlers[role].process_batch
    return hook(batch, view), view.kv
