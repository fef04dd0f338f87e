"""Runs coordinator functions, which the engine calls for `coordinator_fn` nodes (spec: coordinator_fn nodes)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from temporalio import activity
from temporalio.common import RawValue

from flowkit import reason_codes
from flowkit.activities.builtin_functions import IN_ONE_UPDATE, CoordinatorAdapters
from flowkit.adapters.mongo import gather_writes
from flowkit.adapters.outages import retry_while_unavailable
from flowkit.adapters.tasks.attempts import NodeWrite, new_lease
from flowkit.attempt.failures import failed_attempt, failure, lost, unexpected, without_secrets
from flowkit.attempt.storage import begin, mark, resolve
from flowkit.attempt.supervision import AttemptFailed, WorkerContext, refuse_local, run_attempt
from flowkit.errors import AdapterError, FlowKitError
from flowkit.masks import AttemptMask
from flowkit.models import AttemptInput, AttemptResult
from flowkit.models.graphs import FAILED_NODES_KEY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from flowkit.activities.calls import Threads
    from flowkit.adapters.artifacts import ArtifactStore

Function = Any
"""A coordinator function: `async def fn(task_id, **fn_args)`, or a plain function, which runs on a thread."""


def is_built_in(function: Function) -> bool:
    """Return whether `function` is a built-in function, whose effect counts exactly once for a node."""
    return isinstance(getattr(function, "__self__", None), CoordinatorAdapters)


def built_in(functions: Mapping[str, Function]) -> tuple[str, ...]:
    """Return the sorted names of the built-in functions, without those that the user has replaced."""
    return tuple(sorted(name for name, function in functions.items() if is_built_in(function)))


class FunctionActivities:
    """The activities of an engine's coordinator functions.

    `functions` is read at every call, so functions can be added later. Plain functions run on `threads`.
    """

    def __init__(
        self,
        *,
        worker: WorkerContext,
        artifacts: ArtifactStore,
        functions: Mapping[str, Function],
        threads: Threads,
    ) -> None:
        self.functions = functions
        self._worker = worker
        self._artifacts = artifacts
        self._threads = threads

    def activity_for(self, name: str) -> Callable[..., Awaitable[AttemptResult]]:
        """Return the activity that runs nodes whose `io.fn` is `name`."""

        @activity.defn(name=name)
        async def run_function(attempt: AttemptInput) -> AttemptResult:
            return await self._run(name, attempt)

        return run_function

    def dynamic_activity(self) -> Callable[..., Awaitable[AttemptResult]]:
        """Return a dynamic activity that runs any name, including functions that are added later."""

        @activity.defn(dynamic=True)
        async def run_any_function(args: Sequence[RawValue]) -> AttemptResult:
            [raw] = args
            attempt = activity.payload_converter().from_payload(raw.payload, AttemptInput)
            return await self._run(activity.info().activity_type, attempt)

        return run_any_function

    async def close(self) -> None:
        """Wait a while for the functions on threads that were given up, after the Temporal workers have ended."""
        await self._threads.close()

    async def _run(self, name: str, attempt: AttemptInput) -> AttemptResult:
        function = self.functions.get(name)
        if function is None:
            raise failed_attempt(lost(reason_codes.DISPATCH_LOST, self._unknown_text(name)))
        if activity.info().is_local and not is_built_in(function):
            raise refuse_local(f"this engine has another function {name!r} than the built-in one")
        kind = BuiltInFunctionExecutor if is_built_in(function) else FunctionExecutor
        run_id = activity.info().workflow_run_id or ""
        executor = kind(self._worker, self._artifacts, attempt, run_id, function, self._threads)
        return await run_attempt(self._worker, attempt, executor)

    def _unknown_text(self, name: str) -> str:
        return (
            f"engine {self._worker.worker_id} has no coordinator function {name!r}: register the same "
            "functions on every engine of the queue"
        )


class FunctionExecutor:
    """Runs one call of a coordinator function. The function's return value is not stored."""

    def __init__(
        self,
        worker: WorkerContext,
        artifacts: ArtifactStore,
        attempt: AttemptInput,
        run_id: str,
        function: Function,
        threads: Threads,
    ) -> None:
        self._worker = worker
        self._artifacts = artifacts
        self._attempt = attempt
        self._run_id = run_id
        self._function = function
        self._threads = threads
        self._mask = AttemptMask()
        """Hides secrets in errors."""
        self._call: asyncio.Task[Any] | None = None

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Cancel the call, because functions have no cancel flag. A call on a thread continues until it returns."""
        if self._call is not None:
            self._call.cancel(reason)

    def show_end(self, reason: str, grace_sec: float) -> None:
        """Do nothing, because functions have no cancel flag."""

    async def run(self) -> AttemptResult:
        """Run the whole attempt, from its first write to its last."""
        worker = self._worker
        attempt, self._mask = await resolve(worker.tasks, self._attempt)
        self._attempt = attempt
        await begin(worker.tasks, self._artifacts, attempt, self._run_id, worker.worker_id)
        result = await self._await_call()
        marked, now = mark(self._artifacts, attempt, self._build_meta(result), worker.worker_id), time.time()
        await gather_writes(
            marked, retry_while_unavailable(lambda: worker.tasks.attempts.finish(attempt, self._run_id, now))
        )
        return AttemptResult(worker_id=worker.worker_id)

    async def _await_call(self) -> Any:
        self._call = asyncio.create_task(self._invoke())
        try:
            return await self._call
        except AdapterError as error:
            raise AdapterError(self._mask.error(str(error))) from None
        except FlowKitError:
            raise
        except asyncio.CancelledError:
            if not self._call.cancelling():
                text = "the function raised CancelledError although FlowKit did not cancel it"
                raise AttemptFailed(
                    failure(reason_codes.CANCELLED_BY_WORKER, text, permanent=False)
                ) from None
            raise
        except Exception as error:
            raise AttemptFailed(without_secrets(unexpected(error), self._mask)) from error

    async def _invoke(self) -> Any:
        arguments = self._build_arguments()
        check_arguments(self._attempt.io.fn, self._function, self._attempt.task_id, arguments)
        return await self._threads.call(self._function, self._attempt.task_id, **arguments)

    def _build_arguments(self) -> dict[str, Any]:
        """Return `fn_args`. A `target` without a `node_id` gets the id of this node.

        A function with a parameter `failed_nodes` receives the failures that started the node.
        """
        arguments = dict(self._attempt.io.fn_args)
        if self._attempt.failed_nodes and has_parameter(self._function, FAILED_NODES_KEY):
            arguments.setdefault(FAILED_NODES_KEY, self._attempt.failed_nodes)
        if isinstance(arguments.get("target"), dict):
            arguments["target"] = {"node_id": self._attempt.node_id} | arguments["target"]
        return arguments

    def _build_meta(self, result: Any) -> dict[str, Any]:
        """Return the `meta` of the node's complete marker."""
        return {}


class BuiltInFunctionExecutor(FunctionExecutor):
    """Runs one call of a built-in function. Its effect counts once for each generation of the node."""

    async def run(self) -> AttemptResult:
        """Run the whole attempt.

        A function in IN_ONE_UPDATE needs only its own write and the complete marker. If it fails, begin the attempt
        separately, so that the task document shows it.
        """
        self._attempt, self._mask = await resolve(self._worker.tasks, self._attempt)
        write, method = self._write(), self._function.__name__
        self._function = getattr(self._function.__self__.for_node(write), method)
        if method not in IN_ONE_UPDATE:
            return await super().run()
        try:
            await self._await_call()
        except AdapterError:
            await retry_while_unavailable(
                lambda: self._worker.tasks.attempts.begin(self._attempt, self._run_id, write.lease, write.at)
            )
            raise
        await mark(self._artifacts, self._attempt, {}, self._worker.worker_id)
        return AttemptResult(worker_id=self._worker.worker_id)

    async def _invoke(self) -> Any:
        arguments = self._build_arguments()
        check_arguments(self._attempt.io.fn, self._function, self._attempt.task_id, arguments)
        return await retry_while_unavailable(lambda: self._function(self._attempt.task_id, **arguments))

    def _write(self) -> NodeWrite:
        now = time.time()
        lease = new_lease(self._worker.worker_id, now)
        return NodeWrite(attempt=self._attempt, run_id=self._run_id, lease=lease, at=now)

    def _build_meta(self, result: Any) -> dict[str, Any]:
        """Return the summary of a merge whose target is this node, so that the marker does not overwrite it."""
        target = self._build_arguments().get("target")
        own = isinstance(target, dict) and target.get("node_id") == self._attempt.node_id
        meta: dict[str, Any] = result["meta"] if own and "meta" in result else {}
        return meta


def check_arguments(name: str, function: Function, task_id: str, arguments: Mapping[str, Any]) -> None:
    """Raise AdapterError if the function does not accept these arguments. A retry would fail in the same way."""
    try:
        if (signature := _find_signature(function)) is not None:
            signature.bind(task_id, **arguments)
    except TypeError as error:
        raise AdapterError(f"io.fn_args do not match the parameters of {name!r}: {error}") from None


def has_parameter(function: Function, name: str) -> bool:
    """Return whether the function has a parameter of this name."""
    try:
        signature = _find_signature(function)
    except TypeError:
        return False
    return signature is not None and name in signature.parameters


def _find_signature(function: Function) -> inspect.Signature | None:
    """Return the signature of a function, or None if it has none, as some functions written in C.

    Raise TypeError if `function` cannot be called.
    """
    try:
        if isinstance(getattr(function, "__self__", None), CoordinatorAdapters):
            return _find_built_in_signature(function.__func__)
        return inspect.signature(function)
    except ValueError:
        return None


@functools.cache
def _find_built_in_signature(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a built-in function. Cached because it takes as long as the rest of the call."""
    return inspect.signature(method.__get__(object()))
