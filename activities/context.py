"""RunContext, a handler's view of its run (spec: RunContext), and the resources that it releases at its end."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flowkit.activities.typed import read_params
from flowkit.adapters.outages import retry_while_unavailable
from flowkit.adapters.vars import changes, rules
from flowkit.core.handler_lines import HANDLER_LOGGER, HandlerLogger, mask_lines
from flowkit.core.log import get_logger, log_context
from flowkit.core.user_code import Contained
from flowkit.errors import AdapterError, StoreUnavailable
from flowkit.graph.scheduled import parse_nominal
from flowkit.masks import AttemptMask, list_texts, values_at
from flowkit.text import shown
from flowkit.validation.json_keys import with_lists
from flowkit.validation.values import is_unicode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from datetime import datetime

    from flowkit.activities.builtin_functions import CoordinatorAdapters
    from flowkit.activities.results import Batch
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.attempts import StoredParams
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.core.log import FieldLogger
    from flowkit.models import AttemptInput

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")


def _needs_await(name: str) -> Callable[[F], F]:
    """Let the coroutine method that handlers know as `name` raise TypeError if a plain function calls it on a thread.

    Such a function cannot await the coroutine, so nothing would happen.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                raise TypeError(
                    f"{name} needs `await`, which a plain function cannot do: write the method of the "
                    "handler as `async def`"
                ) from None
            return method(*args, **kwargs)

        return cast("F", call)

    return decorate


class ArtifactsWriter:
    """Writes and reads the artifacts of the running node, for handlers that manage artifacts themselves.

    All methods wait while MongoDB is unavailable.
    """

    def __init__(
        self,
        store: ArtifactStore,
        attempt: AttemptInput,
        worker_id: str,
        on_batch: Callable[[str], None] = lambda uid: None,
        fence_of: Callable[[str], int] = lambda uid: 0,
    ) -> None:
        """Prepare the writer. `on_batch` is called with the uid of each batch that `upsert_partial` has stored.

        `fence_of` returns the fencing number of a batch in a shard.
        """
        self._store = store
        self._attempt = attempt
        self._worker_id = worker_id
        self._on_batch = on_batch
        self._fence_of = fence_of

    @_needs_await("ctx.artifacts.upsert_partial")
    async def upsert_partial(self, batch_uid: str, meta: dict[str, Any]) -> dict[str, Any]:
        """Store `meta` as the artifact of a batch and return a reference to it. Raise ValueError for an invalid uid.

        For nodes that stream from this one, it is a batch like any other: the first one lets them start.
        """
        if not isinstance(batch_uid, str) or not batch_uid or not is_unicode(batch_uid):
            raise ValueError(f"batch_uid must be a non-empty string, not {shown(batch_uid)}")
        attempt, worker_id, now, fence = (
            self._attempt,
            self._worker_id,
            time.time(),
            self._fence_of(batch_uid),
        )
        given = with_lists(meta)
        await retry_while_unavailable(
            lambda: self._store.upsert_partial(attempt, batch_uid, given, worker_id, now, fence=fence)
        )
        self._on_batch(batch_uid)
        return {**self._ref(), "batch_uid": batch_uid}

    @_needs_await("ctx.artifacts.mark_complete")
    async def mark_complete(
        self, meta: dict[str, Any], artifacts_ref: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write the node's complete marker and return a reference to it. FlowKit replaces it when the run ends.

        Until then, it does not end the nodes that pull from this one, because the handler may store more batches. In a
        shard of a node with `parallel`, raise ValueError: only `finalize` may write it.
        """
        if self._attempt.shard:
            raise ValueError("a shard cannot write the complete marker of its node; write it in finalize")
        attempt, now = self._attempt, time.time()
        given, ref = with_lists(meta), with_lists(artifacts_ref)
        await retry_while_unavailable(
            lambda: self._store.mark_complete(
                attempt.task_id,
                attempt.node_id,
                attempt.epoch,
                given,
                now,
                worker_id=self._worker_id,
                artifacts_ref=ref,
                confirmed=False,
            )
        )
        return ref or self._ref()

    async def partials(self) -> AsyncIterator[dict[str, Any]]:
        """Yield `batch_uid` and `meta` of each batch that this node has stored, in earlier attempts too."""
        own, yielded = self._attempt, set[str]()
        pages = self._store.pages(own.task_id, own.node_id, first_epoch=own.first_epoch)

        async def next_page() -> list[dict[str, Any]] | None:
            nonlocal pages
            try:
                return await anext(pages, None)
            except StoreUnavailable:
                pages = self._store.pages(own.task_id, own.node_id, skip=yielded, first_epoch=own.first_epoch)
                raise

        while (page := await retry_while_unavailable(next_page)) is not None:
            yielded.update(partial["batch_uid"] for partial in page)
            for partial in page:
                yield partial

    def _ref(self) -> dict[str, Any]:
        return {"task_id": self._attempt.task_id, "node_id": self._attempt.node_id}


_NO_VALUE: Any = object()


class TaskVariables:
    """The variables of the task (`coordinator.vars`), for the handler of a running node.

    All methods wait while MongoDB is unavailable. They run one after the other, in the order of the calls. Each change
    takes effect once, even if its reply was lost, and it never overwrites a later change of this attempt. The methods
    that change variables raise AdapterError, which names the path, for an invalid path or value, a conflict with the
    variables or an exceeded limit, and then write nothing. They raise Fenced if the attempt has ended or was replaced.
    """

    def __init__(self, tasks: TaskStore, attempt: AttemptInput, run_id: str) -> None:
        self._tasks = tasks
        self._attempt = attempt
        self._run_id = run_id
        self._turn = asyncio.Lock()
        self._changes = 0
        self._adapters: CoordinatorAdapters | None = None

    @_needs_await("ctx.vars")
    async def __call__(self) -> dict[str, Any]:
        """Return all current variables, or `{}` if the task has none."""
        async with self._turn:
            return await retry_while_unavailable(lambda: self._tasks.variables(self._attempt.task_id))

    @_needs_await("ctx.vars.get")
    async def get(self, path: str, default: Any = None) -> Any:
        """Return the current value at `path`, such as `routing.sla`, or `default` if there is none."""
        return rules.value_at(await self(), changes.checked_path("get", path), default)

    @_needs_await("ctx.vars.set")
    async def set(
        self, path: str | Mapping[str, Any], value: Any = _NO_VALUE, *, block_sensitive: bool = False
    ) -> None:
        """Set the variable at `path`, or several in one atomic write: `set({"routing.sla": "gold", "n": 1})`.

        The rules are those of `vars.set`. `block_sensitive=True` rejects values that look like secrets.
        """
        several = isinstance(path, Mapping)
        if several == (value is not _NO_VALUE):
            raise AdapterError("vars.set: pass a path and its value, or a mapping of paths to values")
        await self._change("vars_set", kv=path if several else {path: value}, block_sensitive=block_sensitive)

    @_needs_await("ctx.vars.merge")
    async def merge(self, tree: Mapping[str, Any], *, block_sensitive: bool = False) -> None:
        """Merge a tree into the variables in one atomic write; its leaves overwrite existing values.

        The rules are those of `vars.merge`. `block_sensitive=True` rejects values that look like secrets.
        """
        await self._change("vars_merge", data=tree, block_sensitive=block_sensitive)

    async def _change(self, method: str, **given: Any) -> None:
        if self._attempt.shard:
            raise AdapterError(
                f"{method.replace('_', '.')}: a shard of a node with 'parallel' cannot change "
                "variables, because others run "
                "beside it; change them in finalize, or return increments from it"
            )
        # Not at the top: modules of handlers import this one, and need no driver of MongoDB.
        from flowkit.activities.builtin_functions import CoordinatorAdapters
        from flowkit.adapters.tasks.attempts import NumberedWrite

        async with self._turn:
            self._changes += 1
            write = NumberedWrite(attempt=self._attempt, run_id=self._run_id, sequence=self._changes)
            if self._adapters is None:
                self._adapters = CoordinatorAdapters(db=self._tasks.database)
            change = getattr(self._adapters.for_write(write), method)
            await retry_while_unavailable(lambda: change(self._attempt.task_id, **given))


class RunContext:
    """One run of a handler: its identity, cancellation, scratch space, and resources to release at its end."""

    def __init__(
        self,
        *,
        attempt: AttemptInput,
        worker_id: str,
        artifacts: ArtifactsWriter,
        tasks: TaskStore,
        run_id: str,
        clock: Any = None,
    ) -> None:
        self._attempt = attempt
        self._stored_params: StoredParams | None = None
        """The params as MongoDB has sent them; None before the attempt has begun."""
        self._params: dict[str, Any] | None = None
        """The decoded params; None before a handler has read them."""
        self.task_id = attempt.task_id
        self.node_id = attempt.node_id
        self.attempt_epoch = attempt.epoch
        self.generation = attempt.generation
        """How often an action or a rerun of the task has reset the node."""
        self.failures = attempt.failures
        """Number of failed attempts of the node in its generation. Lost attempts do not count."""
        self.worker_id = worker_id
        self.failed_nodes = list(attempt.failed_nodes)
        """The nodes whose failure started this node: `node_id`, `attempt_epoch`, `reason_code`, `error` of each."""
        self.artifacts = artifacts
        self.clock = clock
        """The worker's clock: `now_dt()`, `now_ms()`, `mono_ms()`, `sleep_ms(ms)`."""
        self.vars = TaskVariables(tasks, attempt, run_id)
        """The variables of the task: `await ctx.vars()` returns them all; see TaskVariables."""
        self._resources = Resources()
        self.mask = AttemptMask()
        """Hides secrets in errors."""
        self._batch: Batch | None = None
        self._read: dict[Any, Any] = {}
        self.kv: dict[str, Any] = {}
        """Scratch space of this run; every attempt starts with an empty one."""
        self.log: FieldLogger = get_logger(HANDLER_LOGGER)
        """Logs lines of this attempt: `ctx.log.info("page read", page=3)`, on any thread."""
        self.cancel_flag = asyncio.Event()
        """Set when the run is cancelled, or ends by force."""
        self.cancel_requested = False
        """Whether a cancel of the task or the node was requested. Otherwise, a cancelled run ends by force: its worker
        shuts down, its time limit has passed, or another attempt has replaced it."""
        self.cancel_reason: str | None = None
        self.cancel_deadline_ts_ms: int | None = None
        """When FlowKit stops a cancelled run by force, in milliseconds since the Unix epoch."""

    @property
    def params(self) -> dict[str, Any]:
        """The params of the task, as its creator passed them. Changes to the dict reach no other attempt."""
        if self._params is None:
            self._params = self._stored_params.decode() if self._stored_params is not None else {}
        return self._params

    @property
    def scheduled_at(self) -> datetime | None:
        """The nominal time at which a schedule has started the task, in UTC; None without a schedule.

        An outage or a slow start does not change it, and neither does a retry or a rerun.
        """
        return parse_nominal(self._stored_params.scheduled_at) if self._stored_params is not None else None

    @property
    def input_inline(self) -> dict[str, Any] | None:
        """The `io.input_inline` of the node, as `load_input` receives it; also of a node that pulls."""
        return self._attempt.io.inline_with(self._attempt.failed_nodes)

    @property
    def input_ref(self) -> dict[str, Any] | None:
        """The `io.input_ref` of the node, as `load_input` receives it."""
        return self._attempt.io.input_ref

    @property
    def batch(self) -> Batch:
        """The batch that is being processed, with its uid. Raise RuntimeError while none is."""
        if self._batch is None:
            raise RuntimeError("ctx.batch is set only while a batch is processed")
        return self._batch

    def params_as(self, kind: type[T]) -> T:
        """Return the params of the task as a model, or as another type that pydantic validates.

        All calls of an attempt return the same object. Raise BatchFailure, which is permanent, if they do not fit.
        """
        found: T = self.read_once(kind, lambda: read_params(kind, self))
        return found

    def read_once(self, name: Any, read: Callable[[], T]) -> T:
        """Return what `read` returns. It is called once for each name in an attempt."""
        if name not in self._read:
            self._read[name] = read()
        found: T = self._read[name]
        return found

    def without_values(self, text: str) -> str:
        """Return a text for people without secrets of the input and the params."""
        return self.mask.text(text)

    @contextmanager
    def processing(self, batch: Batch) -> Iterator[None]:
        """Let `batch` be the one that is being processed. FlowKit calls this."""
        self._batch = batch
        try:
            with log_context(batch_uid=batch.batch_uid):
                yield
        finally:
            self._batch = None

    def begun(self, params: StoredParams, attempt: AttemptInput, mask: AttemptMask | None = None) -> None:
        """Set the params of the task, which the begin of the attempt has read, and the attempt with its whole input.

        `mask` hides the secrets of the input in errors, and from now on those of the params. FlowKit calls this before
        the hooks.
        """
        self._params, self._stored_params, self._attempt = None, params, attempt
        self.log = HandlerLogger(lambda: (self._batch and self._batch.batch_uid) or "")
        mask_lines({}, self._find_secrets)
        self.mask, self._read = mask or AttemptMask(), {}
        self.mask.read(self._find_secrets)

    def _find_secrets(self) -> Any:
        """Return the params, and those that are secret by their schema under the name of a secret."""
        if self._stored_params is None:
            return {}, {}
        stored = self._stored_params.decode()
        return stored, {"secret": [*list_texts(values_at(stored, self._stored_params.secrets))]}

    def cancelled(self) -> bool:
        """Return whether the run must stop. Any thread may call this."""
        return self.cancel_flag.is_set()

    def remaining_ms(self) -> float | None:
        """Return the milliseconds until FlowKit stops the run by force, or None if the run is not cancelled."""
        if self.cancel_deadline_ts_ms is None:
            return None
        return max(0.0, self.cancel_deadline_ts_ms - time.time() * 1000)

    @_needs_await("ctx.raise_if_cancelled")
    async def raise_if_cancelled(self) -> None:
        """Raise asyncio.CancelledError if the run is cancelled."""
        if self.cancelled():
            raise asyncio.CancelledError(self.cancel_reason)

    @_needs_await("ctx.cancellable")
    async def cancellable(self, work: Awaitable[T]) -> T:
        """Await `work` and return its result.

        As soon as the run is cancelled, cancel `work` and raise asyncio.CancelledError.
        """
        task = asyncio.ensure_future(work)
        flag = asyncio.create_task(self.cancel_flag.wait())
        try:
            await asyncio.wait([task, flag], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise asyncio.CancelledError(self.cancel_reason)
        finally:
            flag.cancel()
            task.cancel()

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Request that the run stop. Later calls do not change the reason or the deadline."""
        self.cancel_requested = True
        self.show_end(reason, grace_sec)

    def show_end(self, reason: str, grace_sec: float) -> None:
        """Show that the run ends by force after `grace_sec` seconds, as after the shutdown of its worker."""
        if not self.cancel_flag.is_set():
            self.cancel_reason = reason
            self.cancel_deadline_ts_ms = int((time.time() + grace_sec) * 1000)
            self.cancel_flag.set()

    @_needs_await("ctx.run_subprocess")
    async def run_subprocess(self, *command: str, grace_ms: int = 5000) -> int:
        """Run a command in its own process group and return its return code.

        If the run is cancelled, FlowKit terminates the whole group, kills it after `grace_ms` milliseconds, and raises
        asyncio.CancelledError. FlowKit discards the output; if the command fails, the log shows its last part.
        """
        process = await Subprocess.start(*command)
        try:
            return await self.cancellable(process.wait())
        finally:
            await asyncio.shield(process.end(grace_ms / 1000))

    def register_subprocess(self, process: Any) -> None:
        """Kill `process` (from asyncio or subprocess) when the run ends, if it is still running."""
        self._resources.add_process(process)

    def register_temp_path(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or directory when the run ends."""
        self._resources.add_path(path)

    def on_cleanup(self, callback: Callable[[], Any]) -> None:
        """Call `callback`, a plain or coroutine function, when the run ends. The last one registered runs first."""
        self._resources.add(callback)

    async def release(self) -> None:
        """Release everything that the run registered; FlowKit calls this however the run ends."""
        await self._resources.release()


_logger = logging.getLogger("flowkit.worker")

_OUTPUT_WAIT_SEC = 0.5
"""How long to wait for the last output of a failed process before logging it."""
_TAIL_BYTES = 4_096
"""How many bytes at the end of a process's output to keep for the log."""


class Resources:
    """Releases resources in reverse order of registration. An error in one does not prevent the others."""

    def __init__(self) -> None:
        self._clean_ups: list[Callable[[], Any]] = []

    def add(self, clean_up: Callable[[], Any]) -> None:
        """Call `clean_up`, a plain or coroutine function, when the run ends."""
        self._clean_ups.append(clean_up)

    def add_path(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or directory when the run ends."""
        self.add(lambda: _remove(Path(path)))

    def add_process(self, process: Any) -> None:
        """Kill a process when the run ends, if it is still running."""
        self.add(lambda: _end_now(process))

    async def release(self) -> None:
        """Release everything that was registered."""
        while self._clean_ups:
            clean_up = self._clean_ups.pop()
            try:
                await Contained(_call(clean_up))
            except (Exception, asyncio.CancelledError):
                _logger.exception("a cleanup callback failed; the others still run")


async def _call(clean_up: Callable[[], Any]) -> None:
    result = clean_up()
    if inspect.isawaitable(result):
        await result


class Subprocess:
    """A command in its own process group. Its output is read continuously, so that a full pipe never blocks it."""

    def __init__(self, process: asyncio.subprocess.Process, output: int) -> None:
        self._process = process
        self._output = _Output(output)

    @classmethod
    async def start(cls, *command: str) -> Subprocess:
        """Start the command. Raise OSError if it does not exist."""
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return cls(process, read_end)

    async def wait(self) -> int:
        """Wait for the process and return its return code; a negative code is the signal that ended it."""
        code = await self._process.wait()
        if code != 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(_OUTPUT_WAIT_SEC):
                    await self._output.closed.wait()
            _logger.warning("a subprocess exited with code %d: %s", code, self._output.tail())
        return code

    async def end(self, grace_sec: float) -> None:
        """Terminate the whole process group, and kill it after `grace_sec` seconds."""
        try:
            if self._process.returncode is None:
                _signal_group(self._process.pid, signal.SIGTERM)
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_sec):
                        await self._process.wait()
            _signal_group(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        finally:
            self._output.close()


class _Output:
    """Reads the output of a command from a pipe until its end, and keeps the last part.

    With asyncio's own pipes, a wait for the process would block until every process that inherited one of them has
    exited. A transport of the pipe would not be connected yet when a short command ends, and not close it then.
    """

    def __init__(self, pipe: int) -> None:
        """Begin to read on the running loop. `close` closes the pipe, as its end does."""
        self._pipe = pipe
        self._tail = bytearray()
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        os.set_blocking(pipe, False)
        self._loop.add_reader(pipe, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self._pipe, 65_536)
        except BlockingIOError:
            return
        if chunk:
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        else:
            self.close()

    def close(self) -> None:
        """Close the pipe, once."""
        if not self.closed.is_set():
            self.closed.set()
            self._loop.remove_reader(self._pipe)
            os.close(self._pipe)

    def tail(self) -> str:
        """Return the end of the output."""
        return self._tail.decode(errors="replace").strip()[-500:]


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _end_now(process: Any) -> None:
    """Kill a process that a handler started itself, and its group only if the process leads that group."""
    with suppress(ProcessLookupError):
        leads_group = os.getpgid(process.pid) == process.pid
        if leads_group:
            _signal_group(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            process.kill()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
