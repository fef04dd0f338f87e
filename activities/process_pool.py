"""Runs plain `process_batch` functions in separate processes, for work that would hold Python's global lock."""

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

from flowkit.adapters.outages import clock_stopped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from flowkit.activities.context import RunContext
    from flowkit.activities.handlers import Batch, RoleHandler

_spawning = multiprocessing.get_context("spawn")
"""Start fresh interpreters, because a fork of a process with threads can hang."""

_handlers: Mapping[str, RoleHandler] = {}
_shared: Any = None


class ProcessDied(Exception):
    """Raised when the process that worked on a batch exited too early, for example because it ran out of memory."""


@dataclass(kw_only=True)
class ProcessContext:
    """The run context of a `process_batch` in a separate process: identity, input, cancel flag, scratch space.

    The other members of RunContext need the worker's process and are not available: `artifacts`, `vars`, `clock`,
    `cancel_flag`, `cancel_reason`, `cancel_deadline_ts_ms`, `remaining_ms()`, `cancellable()`, `run_subprocess()`,
    `register_subprocess()`, `register_temp_path()`, `on_cleanup()`.
    """

    task_id: str
    node_id: str
    attempt_epoch: int
    worker_id: str
    params: dict[str, Any] = field(default_factory=dict)
    input_inline: dict[str, Any] | None = None
    input_ref: dict[str, Any] | None = None
    failed_nodes: list[dict[str, Any]] = field(default_factory=list)
    generation: int = 0
    failures: int = 0
    kv: dict[str, Any] = field(default_factory=dict)
    """Scratch space of this run; its values must be picklable."""

    def cancelled(self) -> bool:
        """Return whether the run is cancelled."""
        return bool(_shared[_STATE] != _RUNS)

    def raise_if_cancelled(self) -> None:
        """Raise asyncio.CancelledError if the run is cancelled. Unlike in RunContext, this is not a coroutine."""
        if self.cancelled():
            raise asyncio.CancelledError


class ProcessPool:
    """Processes that share the handlers of a worker. Each runs one batch at a time; one that exits is replaced."""

    def __init__(self, handlers: Mapping[str, RoleHandler], *, processes: int | None) -> None:
        count = processes or os.cpu_count() or 1
        self._all = [_Process(dict(handlers)) for _ in range(count)]
        self._idle = [*self._all]
        self._free = asyncio.Semaphore(count)

    async def process(self, role: str, batch: Batch, ctx: RunContext) -> Any:
        """Run the role's `process_batch` and return its result. Raise ProcessDied if its process exits early."""
        view = ProcessContext(
            task_id=ctx.task_id,
            node_id=ctx.node_id,
            attempt_epoch=ctx.attempt_epoch,
            worker_id=ctx.worker_id,
            params=ctx.params,
            input_inline=ctx.input_inline,
            input_ref=ctx.input_ref,
            failed_nodes=ctx.failed_nodes,
            generation=ctx.generation,
            failures=ctx.failures,
            kv=ctx.kv,
        )
        async with self._idle_process() as process:
            forwarding = asyncio.create_task(process.cancel_when_set(ctx.cancel_flag))
            try:
                result, ctx.kv = await process.run(role, batch, view)
            finally:
                forwarding.cancel()
        return result

    @asynccontextmanager
    async def _idle_process(self) -> AsyncIterator[_Process]:
        """Yield the idle process that was used last, because it has most likely already started."""
        with clock_stopped():
            await self._free.acquire()
        process = self._idle.pop()
        try:
            yield process
        finally:
            self._idle.append(process)
            self._free.release()

    def close(self) -> None:
        """Shut down every process as soon as it is idle."""
        for process in self._all:
            process.end()


_STATE, _PID, _BEGUN = 0, 1, 2
"""Indexes into the memory that a process shares with its worker."""

_RUNS, _CANCELLED, _GIVEN_UP = 0, 1, 2
"""Values at `_STATE`: the state of the batch."""


class _Process:
    """One process of the pool. If it has exited, the next batch starts a new one."""

    def __init__(self, handlers: Mapping[str, RoleHandler]) -> None:
        self._handlers = handlers
        self._shared: Any = None
        self._executor: ProcessPoolExecutor | None = None

    async def run(self, role: str, batch: Batch, view: ProcessContext) -> tuple[Any, dict[str, Any]]:
        """Run a batch and return the hook's result and the scratch space. Start over if the process died while idle."""
        try:
            return await self._run(role, batch, view)
        except BrokenProcessPool:
            died_idle = not self._shared[_BEGUN]
            self.end()
        if died_idle:
            with suppress(BrokenProcessPool):
                return await self._run(role, batch, view)
            self.end()
        raise ProcessDied(f"the process that ran batch {batch.batch_uid!r} has exited")

    async def _run(self, role: str, batch: Batch, view: ProcessContext) -> tuple[Any, dict[str, Any]]:
        """Run a batch, and kill the process if this call is cancelled."""
        running = self._started().submit(_process, role, batch, view)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if not running.done():
                self._kill()
            raise

    async def cancel_when_set(self, flag: asyncio.Event) -> None:
        """Wait for `flag`, then show the process that its run is cancelled."""
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
        """Kill the process after its batch was abandoned, so that it does not block the next batch."""
        self._shared[_STATE] = _GIVEN_UP
        if pid := self._shared[_PID]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Shut down the process as soon as it is idle."""
        executor, self._executor = self._executor, None
        if executor is not None:
            threading.Thread(target=_dispose, args=(executor,), name="flowkit-pool-end").start()


def _dispose(executor: ProcessPoolExecutor) -> None:
    """Shut down the process and free its semaphores now.

    Freeing them imports modules. If Python collected them while a workflow runs, Temporal's sandbox would reject those
    imports.
    """
    executor.shutdown(cancel_futures=True)
    gc.collect()


def _begin(handlers: Mapping[str, RoleHandler], shared: Any) -> None:
    global _handlers, _shared
    _handlers, _shared = handlers, shared
    shared[_PID] = os.getpid()
    threading.Thread(target=_end_with_the_worker, name="flowkit-parent", daemon=True).start()


def _end_with_the_worker() -> None:
    """Exit when the worker's process exits. Otherwise a killed worker would leave its pool waiting forever."""
    worker = multiprocessing.parent_process()
    if worker is not None:
        worker.join()
        os._exit(1)


def _process(role: str, batch: Batch, view: ProcessContext) -> tuple[Any, dict[str, Any]]:
    if _shared[_STATE] == _GIVEN_UP:  # The batch was abandoned before this process had started.
        os._exit(1)
    _shared[_BEGUN] = 1
    hook: Any = _handlers[role].process_batch
    return hook(batch, view), view.kv
