"""Runs plain `process_batch` invoker in processes of their own, for work that would hold Python's global lock."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.adapters.retry import clock_stopped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from flowkit.activities.context import RunContext
    from flowkit.activities.handlers import Batch, RoleHandler

_spawning = multiprocessing.get_context("spawn")
"""A fork of a process with threads may hang; a fresh interpreter does not."""

_handlers: Mapping[str, RoleHandler] = {}
_shared: Any = None


class ProcessDied(Exception):
    """The process that worked on a batch ended before it was done, for example for want of memory."""


@dataclass(kw_only=True)
class ProcessContext:
    """What `process_batch` sees of its run in another process: its identity, its cancel flag, its scratch space.

    Everything else of a RunContext needs the worker's process and is missing: `artifacts`, `vars()`, `clock`,
    `cancel_flag`, `cancel_reason`, `cancel_deadline_ts_ms`, `remaining_ms()`, `cancellable()`, `run_subprocess()`,
    `register_subprocess()`, `register_temp_path()`, `on_cleanup()`.
    """

    task_id: str
    node_id: str
    attempt_epoch: int
    worker_id: str
    kv: dict[str, Any] = field(default_factory=dict)
    """Scratch space of this run; what it holds must be picklable."""

    def cancelled(self) -> bool:
        """Whether the run is to stop."""
        return bool(_shared[_STATE] != _RUNS)

    def raise_if_cancelled(self) -> None:
        """Raise asyncio.CancelledError when the run is to stop; not a coroutine here."""
        if self.cancelled():
            raise asyncio.CancelledError


class ProcessPool:
    """Processes that share a worker's handlers. Each runs one batch at a time; one that ends is replaced."""

    def __init__(self, handlers: Mapping[str, RoleHandler], *, processes: int | None) -> None:
        count = processes or os.cpu_count() or 1
        self._all = [_Process(dict(handlers)) for _ in range(count)]
        self._idle = [*self._all]
        self._free = asyncio.Semaphore(count)

    async def process(self, role: str, batch: Batch, ctx: RunContext) -> Any:
        """What the role's `process_batch` answers. ProcessDied when its process has ended."""
        view = ProcessContext(
            task_id=ctx.task_id,
            node_id=ctx.node_id,
            attempt_epoch=ctx.attempt_epoch,
            worker_id=ctx.worker_id,
            kv=ctx.kv,
        )
        async with self._idle_process() as process:
            asking = asyncio.create_task(process.ask_to_stop_with(ctx.cancel_flag))
            try:
                result, ctx.kv = await process.run(role, batch, view)
            finally:
                asking.cancel()
        return result

    @asynccontextmanager
    async def _idle_process(self) -> AsyncIterator[_Process]:
        """The process that was used last, which has started already."""
        with clock_stopped():
            await self._free.acquire()
        process = self._idle.pop()
        try:
            yield process
        finally:
            self._idle.append(process)
            self._free.release()

    def close(self) -> None:
        """End the processes as soon as they have nothing to do."""
        for process in self._all:
            process.end()


_STATE, _PID, _BEGUN = 0, 1, 2
"""Places in the memory that a process shares with its worker."""

_RUNS, _CANCELLED, _GIVEN_UP = 0, 1, 2
"""States of the batch in it."""


class _Process:
    """One process; the next batch starts a new one when it has ended."""

    def __init__(self, handlers: Mapping[str, RoleHandler]) -> None:
        self._handlers = handlers
        self._shared: Any = None
        self._executor: ProcessPoolExecutor | None = None

    async def run(self, role: str, batch: Batch, view: ProcessContext) -> tuple[Any, dict[str, Any]]:
        """What the hook answers, and the scratch space after it. A process that died while idle costs nothing."""
        try:
            return await self._run(role, batch, view)
        except BrokenProcessPool:
            died_idle = not self._shared[_BEGUN]
            self.end()
        if died_idle:
            with suppress(BrokenProcessPool):
                return await self._run(role, batch, view)
            self.end()
        raise ProcessDied(f"the process that worked on batch {batch.batch_uid!r} has ended")

    async def _run(self, role: str, batch: Batch, view: ProcessContext) -> tuple[Any, dict[str, Any]]:
        """Kills the process when the batch is given up."""
        running = self._started().submit(_process, role, batch, view)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if not running.done():
                self._kill()
            raise

    async def ask_to_stop_with(self, flag: asyncio.Event) -> None:
        """Show the hook that its run is cancelled as soon as `flag` is set."""
        await flag.wait()
        self._shared[_STATE] = _CANCELLED

    def _started(self) -> ProcessPoolExecutor:
        if self._executor is None:
            self._shared = _spawning.RawArray("q", 3)
            self._executor = ProcessPoolExecutor(
                1, mp_context=_spawning, initializer=_begin, initargs=(self._handlers, self._shared)
            )
        self._shared[_STATE], self._shared[_BEGUN] = _RUNS, 0
        return self._executor

    def _kill(self) -> None:
        """The batch that it works on has been given up; it must hold up no other."""
        self._shared[_STATE] = _GIVEN_UP
        if pid := self._shared[_PID]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """End the process as soon as it has nothing to do."""
        executor, self._executor = self._executor, None
        if executor is not None:
            threading.Thread(target=_dispose, args=(executor,), name="flowkit-pool-end").start()


def _dispose(executor: ProcessPoolExecutor) -> None:
    """End the process and let go of its semaphores here.

    They are freed by imports, which Temporal's sandbox would refuse if Python collected them during a workflow's turn.
    """
    executor.shutdown(cancel_futures=True)
    gc.collect()


def _begin(handlers: Mapping[str, RoleHandler], shared: Any) -> None:
    global _handlers, _shared
    _handlers, _shared = handlers, shared
    shared[_PID] = os.getpid()
    threading.Thread(target=_end_with_the_worker, name="flowkit-parent", daemon=True).start()


def _end_with_the_worker() -> None:
    """A process of the pool would otherwise wait for ever for the next batch of a worker that was killed."""
    worker = multiprocessing.parent_process()
    if worker is not None:
        worker.join()
        os._exit(1)


def _process(role: str, batch: Batch, view: ProcessContext) -> tuple[Any, dict[str, Any]]:
    if _shared[_STATE] == _GIVEN_UP:  # before the process had started
        os._exit(1)
    _shared[_BEGUN] = 1
    hook: Any = _handlers[role].process_batch
    return hook(batch, view), view.kv
