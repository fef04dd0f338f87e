"""The handler interface: RoleHandler, Batch, the results, and the built-in EchoHandler (spec: RoleHandler, EchoHandler).

Public modules re-export them.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from flowkit import reason_codes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from flowkit.activities.context import RunContext


class Batch(BaseModel):
    """One portion of a node's input. If `batch_uid` is None, FlowKit uses a hash of the payload.

    The uids of one attempt must differ; see `RoleHandler.allow_duplicate_uids`.
    """

    batch_uid: str | None = None
    payload: dict[str, Any] = Field(default_factory=dict)


class BatchResult(BaseModel):
    """The result of a batch. FlowKit stores `metrics` as the `meta` of the batch's artifact, which other nodes pull."""

    success: bool
    metrics: dict[str, Any] = Field(default_factory=dict)
    artifacts_ref: dict[str, Any] | None = None
    reason_code: str | None = None
    """The reason code of a failure; `error` if None."""
    permanent: bool = False
    """Whether a retry of the failure would not help."""
    error: str | None = None


class FinalizeResult(BaseModel):
    """The final result of a node. FlowKit stores `metrics` as the `meta` of the node's complete marker."""

    metrics: dict[str, Any] = Field(default_factory=dict)
    artifacts_ref: dict[str, Any] | None = None
    vars: Any = None
    """`{"incr": {path: number}}` adds to variables of the task, once for the node, in the write that ends it.

    If this is not possible, the node fails as `bad_vars`, without a retry.
    """


class RoleHandler:
    """Runs the nodes of one role. One instance serves many runs, so do not store the state of a run in it.

    `init`, `load_input` and `iter_batches` receive the RunContext as well if they declare a parameter `ctx`.

    FlowKit calls the methods in this order: `init`, `load_input`, `iter_batches` (unless an input adapter delivers the
    batches), `process_batch` for each batch, `finalize`. It passes any exception to `classify_error`.
    """

    role: str = ""
    inline: bool = False
    """Whether an engine that hosts this handler runs its attempts itself, as local activities (docs/performance.md).

    Set it if an attempt takes well below two seconds. It has no effect in a worker.
    """
    allow_duplicate_uids: bool = False
    """Whether an attempt may yield several batches with one uid; only one of their results is then stored.

    By default, the attempt fails permanently as `duplicate_uid`.
    """
    handler_version: str = ""
    """Version of an inline handler in `worker_registry`. Empty means a hash of the source of its class."""

    if TYPE_CHECKING:
        # A hook may be a coroutine or a plain function, and the first three may declare a parameter `ctx`.
        def init(self, info: dict[str, Any], *args: Any, **kwargs: Any) -> Any: ...
        def load_input(
            self,
            input_ref: dict[str, Any] | None,
            input_inline: dict[str, Any] | None,
            *args: Any,
            **kwargs: Any,
        ) -> Any: ...
        def iter_batches(self, loaded: Any, *args: Any, **kwargs: Any) -> Any: ...
        def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult | Awaitable[BatchResult]: ...
        def finalize(self, ctx: RunContext) -> FinalizeResult | Awaitable[FinalizeResult | None] | None: ...

    else:

        async def init(self, info: dict[str, Any]) -> None:
            """Prepare a run. `info` contains `task_id`, `node_id`, `attempt_epoch`, `worker_id` and `role`."""

        async def load_input(
            self, input_ref: dict[str, Any] | None, input_inline: dict[str, Any] | None
        ) -> Any:
            """Load and return the node's input.

            If the node names no input adapter, the returned dict may propose one: `input_adapter` and `input_args`.
            """
            return {"input_ref": input_ref or {}, "input_inline": input_inline or {}}

        async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
            """Yield the batches of a node that does not pull. Their uids must be the same in every attempt."""
            yield Batch(payload=loaded or {})

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            """Process one batch and return its result."""
            return BatchResult(success=True, metrics={"processed": 1})

        async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
            """Finish the node; called even if there were no batches.

            Do not rely on `ctx.kv` here: earlier attempts may have processed some of the batches.
            """
            return FinalizeResult()

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        """Return `(reason_code, permanent)` for an exception that another method raised."""
        if isinstance(exc, (TypeError, ValueError, KeyError)):
            return reason_codes.BAD_INPUT, True
        return reason_codes.UNEXPECTED_ERROR, False


_HOOKS = tuple(name for name, value in vars(RoleHandler).items() if inspect.isfunction(value))
_SIMILARITY = 0.85
"""Least similarity of a misspelled hook. `finalise`, `iter_batch` and `processBatch` have it; `load_data` does not."""


def misspelled_hook(handler: RoleHandler) -> str | None:
    """Return the problem of a handler whose class defines a method that looks like a misspelled hook, or None.

    Private methods, inherited ones, and those beside the hook that they resemble count as helpers.
    """
    kind = type(handler)
    for name in [name for name in vars(kind) if not name.startswith("_") and name not in _HOOKS]:
        close = difflib.get_close_matches(name.lower(), _HOOKS, n=1, cutoff=_SIMILARITY)
        if (
            close
            and inspect.isroutine(getattr(kind, name))
            and getattr(kind, close[0]) is vars(RoleHandler)[close[0]]
        ):
            return (
                f"{kind.__name__}.{name} is not a hook of RoleHandler, so FlowKit never calls it; did you mean "
                f"{close[0]!r}? If it is a helper, begin its name with '_'"
            )
    return None


_STEPS = 5
_STEP_SEC = 0.05


class EchoHandler(RoleHandler):
    """Processes a batch in about a quarter of a second and returns the number of steps as a metric."""

    role = "echo"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Run five short steps and check for a cancel before each one."""
        for _ in range(_STEPS):
            await ctx.raise_if_cancelled()
            await ctx.cancellable(asyncio.sleep(_STEP_SEC))
        return BatchResult(success=True, metrics={"echoed": _STEPS})
