"""What runs the batches of an external worker: an async generator of a test, or a handler written for the SDK.

`RunContext` is what a handler sees of its run. `scripted` is a generator for workers that run as processes: the node's
input says what it does.

Handlers of the SDK are used by the names of their methods only, so this module imports nothing of them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from flowkit.testing.external.protocol import Fields
    from flowkit.testing.external.runs import Run
    from flowkit.testing.external.settings import Clock
    from flowkit.testing.external.store import Store


@dataclass(frozen=True)
class Batch:
    """A batch. If `batch_uid` is empty, the worker uses a hash of the payload."""

    batch_uid: str | None = None
    payload: Fields = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of a batch, as a handler returns it or a generator yields it."""

    metrics: Fields = field(default_factory=dict)
    batch_uid: str | None = None
    """The batch's uid, for a generator. None means a hash of the metrics."""
    success: bool = True
    artifacts_ref: Fields | None = None
    reason_code: str | None = None
    permanent: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Final:
    """The final result of a node; a generator yields it last."""

    metrics: Fields = field(default_factory=dict)
    artifacts_ref: Fields | None = None


class Handler(Protocol):
    """A handler with the methods of the SDK's `RoleHandler`. Methods may be plain functions or coroutines."""

    def init(self, info: Fields) -> Any:
        """Prepare a run."""

    def load_input(self, input_ref: Fields | None, input_inline: Fields | None) -> Any:
        """Return the input of the node."""

    def iter_batches(self, loaded: Any) -> Any:
        """Yield the batches of a node that does not pull."""

    def process_batch(self, batch: Any, ctx: Any) -> Any:
        """Return the result of a batch."""

    def finalize(self, ctx: Any) -> Any:
        """Return the final result."""

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        """Return reason code and permanence of an exception."""


Generator = Callable[["RunContext"], AsyncIterator[Any]]
"""A handler for tests: `async def handler(run): yield {"count": 1}`. It yields metrics, Result or Final."""

AnyHandler = Handler | type[Handler] | Generator


class BaseHandler:
    """A handler with the defaults of the documented worker."""

    async def init(self, info: Fields) -> None:
        """Do nothing."""

    async def load_input(self, input_ref: Fields | None, input_inline: Fields | None) -> Any:
        """Return both inputs."""
        return {"input_ref": input_ref or {}, "input_inline": input_inline or {}}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Any]:
        """Yield the input as one batch."""
        yield Batch(payload=loaded or {})

    async def process_batch(self, batch: Any, ctx: Any) -> Any:
        """Return success."""
        return Result({"processed": 1})

    async def finalize(self, ctx: Any) -> Any:
        """Return empty metrics."""
        return Final()

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        """Return `unexpected_error`, permanent for errors of types and values."""
        return "unexpected_error", isinstance(exc, (TypeError, ValueError, KeyError))


class EachBatch(BaseHandler):
    """A handler from one function, `function(payload, ctx)`, that returns the metrics of each batch.

    Use it for nodes that pull. The function may be a coroutine, and may return a Result instead of metrics.
    """

    def __init__(self, function: Callable[[Fields, RunContext], Any]) -> None:
        self._function = function

    async def process_batch(self, batch: Any, ctx: Any) -> Any:
        """Return what the function returns for the batch's payload."""
        return as_result(await settled(self._function(batch.payload, ctx)))


class FromGenerator(BaseHandler):
    """A handler from an async generator that yields one result for each batch."""

    def __init__(self, generate: Generator) -> None:
        self._generate = generate

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Any]:
        """Yield a batch for each result of the generator. `loaded` is the run's context."""
        async for item in self._generate(loaded):
            if isinstance(item, Final):
                loaded.kv["final"] = item
            else:
                result = as_result(item)
                yield _Made(result.batch_uid, result.metrics, result)

    async def process_batch(self, batch: Any, ctx: Any) -> Any:
        """Return the result that the generator yielded; for a pulled batch, its payload as metrics."""
        return batch.result if isinstance(batch, _Made) else Result(dict(batch.payload))

    async def finalize(self, ctx: Any) -> Any:
        """Return the generator's Final, if any."""
        return ctx.kv.get("final") or Final()


@dataclass(frozen=True)
class _Made(Batch):
    result: Result = field(default_factory=Result)


def as_result(value: Any) -> Any:
    """Return metrics as a successful Result, and a result of any kind unchanged."""
    return Result(dict(value)) if isinstance(value, Mapping) else value


def as_handler(given: Any) -> Handler:
    """Return the handler of an object, a class or an async generator function."""
    if inspect.isclass(given):
        return as_handler(given())
    if inspect.isasyncgenfunction(given):
        return FromGenerator(given)
    if not callable(getattr(given, "process_batch", None)):
        raise TypeError(
            f"{given!r} is no handler; pass an async generator function, EachBatch(function), or an object with the "
            "methods of RoleHandler"
        )
    handler: Handler = given
    return handler


async def settled(value: Any) -> Any:
    """Return a value, after awaiting it if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


async def each(value: Any) -> AsyncIterator[Any]:
    """Yield the items of a generator of either kind, of an iterable, or of a coroutine that returns one."""
    if isinstance(value, AsyncGenerator):
        async with aclosing(value):
            async for item in value:
                yield item
        return
    if isinstance(value, AsyncIterable):
        async for item in value:
            yield item
        return
    for item in await settled(value):
        yield item


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
        self._read: dict[Any, Any] = {}

    def read_once(self, name: Any, read: Callable[[], T]) -> T:
        """Return what `read` returns, for typed handlers. It is called once for each name."""
        if name not in self._read:
            self._read[name] = read()
        found: T = self._read[name]
        return found

    def without_values(self, text: str) -> str:
        """Return a text for people, for typed handlers. This worker knows no values that must be hidden."""
        return text

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
        """Return whether the run must stop."""
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


async def scripted(run: RunContext) -> AsyncIterator[Any]:
    """Yield batches as the node's `input_inline` describes.

    * `batches`: a number of batches `{"number": n}`, or a list of metrics; 1 by default. The uids are
      `<node_id>-<n>`.
    * `pause_ms`: the time to wait before each batch.
    * `fail_at`: the number of the batch that fails; `reason_code`, `permanent` and `error` describe the failure.
    * `fail_until_epoch`: the first epoch that does not fail; without it, all fail.
    * `final`: the final metrics.
    """
    inline = run.input_inline or {}
    for number, metrics in enumerate(_metrics(inline)):
        await run.cancellable(run.clock.sleep(inline.get("pause_ms", 0) / 1000))
        uid = f"{run.node_id}-{number}"
        yield _failure(inline, uid) if _fails(inline, number, run.attempt_epoch) else Result(metrics, uid)
    yield Final(inline.get("final") or {})


def _metrics(inline: dict[str, Any]) -> list[dict[str, Any]]:
    batches = inline.get("batches", 1)
    return batches if isinstance(batches, list) else [{"number": number} for number in range(batches)]


def _fails(inline: dict[str, Any], number: int, epoch: int) -> bool:
    return inline.get("fail_at") == number and epoch < inline.get("fail_until_epoch", epoch + 1)


def _failure(inline: dict[str, Any], uid: str) -> Result:
    return Result(
        batch_uid=uid,
        success=False,
        reason_code=inline.get("reason_code", "scripted_failure"),
        permanent=inline.get("permanent", False),
        error=inline.get("error", "the node's script demands a failure"),
    )
