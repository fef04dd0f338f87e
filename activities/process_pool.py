"""Runs plain `process_batch` functions in separate processes, for work that would hold Python's global lock."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from traceback import format_exception
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.activities.results import Batch
from flowkit.activities.typed import read_params
from flowkit.adapters.outages import clock_stopped
from flowkit.core import loop_portal
from flowkit.core.handler_lines import HandlerLogger, LineWish, collecting, pass_on
from flowkit.core.loop_portal import outcome_of_call, wait_for_calls
from flowkit.core.user_code import (
    UserCodeError,
    contained,
    end_if_forked,
    error_text,
    original,
    place_of,
    process_id,
)
from flowkit.errors import FlowKitError
from flowkit.masks import Mask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from concurrent.futures import Future
    from datetime import datetime

    from flowkit.activities.context import RunContext
    from flowkit.activities.handlers import RoleHandler
    from flowkit.core.handler_lines import HandlerLine
    from flowkit.core.log import FieldLogger

T = TypeVar("T")

_spawning = multiprocessing.get_context("spawn")
"""Start fresh interpreters, because a fork of a process with threads can hang."""

_handlers: Mapping[str, RoleHandler] = {}
_shared: Any = None


class ProcessDied(Exception):
    """Raised when the process that worked on a batch exited too early, for example because it ran out of memory."""


@dataclass(kw_only=True)
class ProcessContext:
    """The run context of a `process` or `process_batch` in a separate process: identity, input, cancel flag, `kv`.

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
    scheduled_at: datetime | None = None
    input_ref: dict[str, Any] | None = None
    failed_nodes: list[dict[str, Any]] = field(default_factory=list)
    generation: int = 0
    failures: int = 0
    kv: dict[str, Any] = field(default_factory=dict)
    """Scratch space of this run; its values must be picklable."""
    batch: Batch = field(default_factory=Batch)
    """The batch that is being processed, with its uid."""
    mask: Mask = field(default_factory=Mask)
    """Hides secrets in errors."""
    lines: LineWish | None = None
    """Which lines the worker wants; None for none."""

    @property
    def log(self) -> FieldLogger:
        """Logs lines of this attempt. They reach the worker at the end of the batch."""
        return HandlerLogger()

    def params_as(self, kind: type[T]) -> T:
        """Return the params of the task as a model, or as another type that pydantic validates.

        Raise BatchFailure, which is permanent, if they do not fit.
        """
        found: T = read_params(kind, self)
        return found

    def read_once(self, name: Any, read: Callable[[], T]) -> T:
        """Return what `read` returns: in a process, each batch has a context of its own."""
        return read()

    def without_values(self, text: str) -> str:
        """Return a text for people without secrets of the input and the params."""
        return self.mask.text(text)

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
        self._given_up: dict[Future[Any], int] = {}
        """The ids of the processes that run batches that were given up."""
        self._all = [_Process(dict(handlers), self._given_up) for _ in range(count)]
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
            scheduled_at=ctx.scheduled_at,
            input_ref=ctx.input_ref,
            failed_nodes=ctx.failed_nodes,
            generation=ctx.generation,
            failures=ctx.failures,
            kv=ctx.kv,
            batch=ctx.batch,
            mask=ctx.mask.mask,
            lines=LineWish.current(),
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

    async def close(self) -> None:
        """Shut down every process as soon as it is idle. Kill those that do not stop within five seconds."""
        for process in self._all:
            process.end()
        await wait_for_calls([*self._given_up])
        for running, pid in [*self._given_up.items()]:
            _kill_if_running(running, pid)


_STATE, _PID, _BEGUN = 0, 1, 2
"""Indexes into the memory that a process shares with its worker."""

_RUNS, _CANCELLED, _GIVEN_UP = 0, 1, 2
"""Values at `_STATE`: the state of the batch."""


class _Process:
    """One process of the pool. If it has exited, the next batch starts a new one."""

    def __init__(self, handlers: Mapping[str, RoleHandler], given_up: dict[Future[Any], int]) -> None:
        self._handlers = handlers
        self._given_up = given_up
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
        """Run a batch. If this call is cancelled, wait for the end of the batch. A second cancel gives it up."""
        running = self._started().submit(_process, role, batch, view)
        try:
            pickled = await outcome_of_call(running)
        except asyncio.CancelledError:
            if not running.done():
                self._give_up(running)
            raise
        with contained:
            outcome: _Outcome = pickle.loads(pickled)
        pass_on(outcome.lines)
        return outcome.read()

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

    def _give_up(self, running: Future[bytes]) -> None:
        """Let another process run the next batch, and kill this one if it does not stop soon."""
        self._shared[_STATE] = _GIVEN_UP
        self._given_up[running] = pid = self._shared[_PID]
        running.add_done_callback(lambda _: self._given_up.pop(running, None))
        asyncio.get_running_loop().call_later(loop_portal.IGNORED_SEC, _kill_if_running, running, pid)
        self.end()

    def end(self) -> None:
        """Shut down the process as soon as it is idle."""
        executor, self._executor = self._executor, None
        if executor is not None:
            threading.Thread(target=_dispose, args=(executor,), name="flowkit-pool-end").start()


def _kill_if_running(running: Future[Any], pid: int) -> None:
    """Kill the process of a batch that has not ended. One that has not started yet does not begin the batch."""
    if pid and not running.done():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    threading.Thread(target=_end_with_the_worker, name="flowkit-parent", daemon=True).start()


def _ignore(number: int, frame: object) -> None:
    """Do nothing on a signal that a terminal or an init system sends to all processes of a group.

    The worker decides what happens to the batch.
    """


def _end_with_the_worker() -> None:
    """Exit when the worker's process exits. Otherwise a killed worker would leave its pool waiting forever."""
    worker = multiprocessing.parent_process()
    if worker is not None:
        worker.join()
        os._exit(1)


@dataclass(kw_only=True)
class _Outcome:
    """How a batch ended: with its result and the scratch space, or with an error."""

    result: Any = None
    kv: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    traceback: str = ""
    place: str = ""
    lines: list[HandlerLine] = field(default_factory=list)
    """What the batch has logged."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Keep the error of the block, if any, in place of a result."""
        if error is not None:
            raised = original(error)
            self.result, self.kv, self.error = None, {}, _picklable(raised)
            self.traceback, self.place = "\n" + "".join(format_exception(raised)), place_of(raised)
        return True

    def read(self) -> tuple[Any, dict[str, Any]]:
        """Return the result and the scratch space, or raise the error."""
        error = self.error
        if error is None:
            return self.result, self.kv
        error.__cause__ = _RemoteTraceback(self.traceback)
        if isinstance(error, (FlowKitError, asyncio.CancelledError)):
            raise error
        raise UserCodeError(error, place=self.place)


class _RemoteTraceback(Exception):
    """The traceback of an error in a separate process, as the cause of that error."""


def _process(role: str, batch: Batch, view: ProcessContext) -> bytes:
    """Run a batch and return the pickled _Outcome. The pool could not pass on every error, or every result."""
    if _shared[_STATE] == _GIVEN_UP:  # The batch was abandoned before this process had started.
        os._exit(1)
    _shared[_BEGUN] = 1
    outcome, pid = _Outcome(), process_id()
    with outcome, collecting(view.lines, outcome.lines.extend), contained:
        hook: Any = _handlers[role].process_batch
        try:
            outcome.result, outcome.kv = hook(batch, view), view.kv
        finally:
            end_if_forked(pid)
    with outcome, contained:
        return pickle.dumps(outcome)
    return pickle.dumps(outcome)


def _picklable(error: BaseException) -> BaseException:
    """Return the error if the worker can unpickle it; otherwise one of the nearest built-in type, with the
    same text.
    """
    with suppress(Exception), contained:
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    for kind in kinds:
        with suppress(Exception):
            nearest: BaseException = kind(error_text(error))
            return nearest
    return RuntimeError(error_text(error))
