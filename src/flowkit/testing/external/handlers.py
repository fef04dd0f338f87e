"""What runs the batches of an external worker: an async generator of a test, or a handler written for the SDK.

Handlers of the SDK are used by the names of their methods only, so this module imports nothing of them.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from flowkit.testing.external.context import RunContext

Fields = dict[str, Any]


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
