"""Coordinator functions: nodes that the engine runs itself (spec: coordinator_fn nodes)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from temporalio import activity
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError

from flowkit.activities.attempts import Attempt, AttemptFailed, WorkerContext, run_checked
from flowkit.activities.builtin_functions import IN_ONE_UPDATE, CoordinatorAdapters
from flowkit.activities.cancelling import pending, request_cancel
from flowkit.adapters.concurrent_writes import together
from flowkit.adapters.retry import retry_while_unavailable
from flowkit.adapters.tasks.cancel_flags import Flagged
from flowkit.adapters.tasks.node_writes import NodeWrite
from flowkit.attempt.failures import failed_attempt, failure, lost, unexpected
from flowkit.attempt.steps import begin, mark, new_lease
from flowkit.errors import AdapterError, FlowKitError
from flowkit.models import AttemptInput, AttemptResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from flowkit.activities.threads import Threads
    from flowkit.adapters.artifacts import ArtifactStore

Function = Any
"""`async def fn(task_id, **fn_args)`; a plain function is called on a thread."""


def is_built_in(function: Function) -> bool:
    """Whether this is one of ours, of which a node's call counts once whatever happens."""
    return isinstance(getattr(function, "__self__", None), CoordinatorAdapters)


def built_in(functions: Mapping[str, Function]) -> tuple[str, ...]:
    """Names of the functions that are ours and not replaced by others."""
    return tuple(sorted(name for name, function in functions.items() if is_built_in(function)))


class FunctionActivities:
    """The activities of an engine's coordinator functions. `functions` is read at every call: it may grow.

    Plain functions run on `threads`.
    """

    def __init__(
        self,
        *,
        host: WorkerContext,
        artifacts: ArtifactStore,
        functions: Mapping[str, Function],
        threads: Threads,
    ) -> None:
        self.functions = functions
        self._host = host
        self._artifacts = artifacts
        self._threads = threads

    def of(self, name: str) -> Callable[..., Awaitable[AttemptResult]]:
        """The activity that runs nodes whose `io.fn` is `name`."""

        @activity.defn(name=name)
        async def run_function(attempt: AttemptInput) -> AttemptResult:
            return await self._run(name, attempt)

        return run_function

    def any(self) -> Callable[..., Awaitable[AttemptResult]]:
        """One activity for every name, also those that are registered later."""

        @activity.defn(dynamic=True)
        async def run_any_function(args: Sequence[RawValue]) -> AttemptResult:
            [raw] = args
            attempt = activity.payload_converter().from_payload(raw.payload, AttemptInput)
            return await self._run(activity.info().activity_type, attempt)

        return run_any_function

    async def _run(self, name: str, attempt: AttemptInput) -> AttemptResult:
        function = self.functions.get(name)
        if function is None:
            raise failed_attempt(lost("dispatch_lost", self._unknown(name)))
        run_id = activity.info().workflow_run_id or ""
        executor = self._executor(attempt, run_id, function)
        if not activity.info().is_local:
            return await Attempt(self._host, attempt, executor).run()
        if not isinstance(executor, BuiltInFunctionExecutor):
            raise ApplicationError("not a built-in function here", type="not_local", non_retryable=True)
        return await self._run_quickly(attempt, executor)

    def _executor(self, attempt: AttemptInput, run_id: str, function: Function) -> FunctionExecutor:
        kind = BuiltInFunctionExecutor if is_built_in(function) else FunctionExecutor
        return kind(self._host, self._artifacts, attempt, run_id, function, self._threads)

    async def _run_quickly(self, attempt: AttemptInput, executor: BuiltInFunctionExecutor) -> AttemptResult:
        """Run a local activity, which has no heartbeats: a cancel cannot reach it."""
        try:
            return await self._host.portal.run(run_checked(self._host, attempt, executor))
        except AttemptFailed as error:
            raise failed_attempt(error.failure) from None
        except Flagged as error:
            refused = await request_cancel(attempt, error.flag)
            raise failed_attempt(refused or pending(error.flag)) from None

    def _unknown(self, name: str) -> str:
        return (
            f"engine {self._host.worker_id} has no coordinator function {name!r}: give every engine of the queue "
            "the same functions"
        )


class FunctionExecutor:
    """One call of a coordinator function; its return value is not kept."""

    def __init__(
        self,
        host: WorkerContext,
        artifacts: ArtifactStore,
        attempt: AttemptInput,
        run_id: str,
        function: Function,
        threads: Threads,
    ) -> None:
        self._host = host
        self._artifacts = artifacts
        self._attempt = attempt
        self._run_id = run_id
        self._function = function
        self._threads = threads
        self._call: asyncio.Task[Any] | None = None

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Functions have no flag to look at: the call is cancelled. One on a thread is left behind."""
        if self._call is not None:
            self._call.cancel(reason)

    async def run(self) -> AttemptResult:
        """The whole attempt, from its first write to its last."""
        host, attempt = self._host, self._attempt
        await begin(host.tasks, self._artifacts, attempt, self._run_id, host.worker_id)
        answer = await self._answer()
        marked, now = mark(self._artifacts, attempt, self._meta(answer), host.worker_id), time.time()
        await together(
            marked, retry_while_unavailable(lambda: host.tasks.finish_attempt(attempt, self._run_id, now))
        )
        return AttemptResult(worker_id=host.worker_id)

    async def _answer(self) -> Any:
        self._call = asyncio.create_task(self._invoke())
        try:
            return await self._call
        except FlowKitError:
            raise
        except asyncio.CancelledError:
            if not self._call.cancelling():
                text = "the function raised CancelledError although nobody cancelled it"
                raise AttemptFailed(failure("cancelled_by_worker", text, permanent=False)) from None
            raise
        except Exception as error:
            raise AttemptFailed(unexpected(error)) from error

    async def _invoke(self) -> Any:
        arguments = self._arguments()
        check_arguments(self._attempt.io.fn, self._function, self._attempt.task_id, arguments)
        return await called(self._threads, self._function, self._attempt.task_id, arguments)

    def _arguments(self) -> dict[str, Any]:
        """`fn_args`; a `target` names this node unless it names another."""
        arguments = dict(self._attempt.io.fn_args)
        if isinstance(arguments.get("target"), dict):
            arguments["target"] = {"node_id": self._attempt.node_id} | arguments["target"]
        return arguments

    def _meta(self, answer: Any) -> dict[str, Any]:
        """What the node's complete marker holds."""
        return {}


class BuiltInFunctionExecutor(FunctionExecutor):
    """One call of a built-in function; its effect counts once for each generation of the node."""

    async def run(self) -> AttemptResult:
        """The whole attempt: in one update and a marker where the function is one write."""
        write, method = self._write(), self._function.__name__
        self._function = getattr(self._function.__self__.for_node(write), method)
        if method not in IN_ONE_UPDATE:
            return await super().run()
        try:
            await self._answer()
        except AdapterError:
            await retry_while_unavailable(
                lambda: self._host.tasks.begin_attempt(self._attempt, self._run_id, write.lease, write.at)
            )
            raise
        await mark(self._artifacts, self._attempt, {}, self._host.worker_id)
        return AttemptResult(worker_id=self._host.worker_id)

    async def _invoke(self) -> Any:
        arguments = self._arguments()
        check_arguments(self._attempt.io.fn, self._function, self._attempt.task_id, arguments)
        return await retry_while_unavailable(lambda: self._function(self._attempt.task_id, **arguments))

    def _write(self) -> NodeWrite:
        now = time.time()
        lease = new_lease(self._host.worker_id, now)
        return NodeWrite(attempt=self._attempt, run_id=self._run_id, lease=lease, at=now)

    def _meta(self, answer: Any) -> dict[str, Any]:
        """A merge whose target is the node itself is the node's own artifact."""
        target = self._arguments().get("target")
        own = isinstance(target, dict) and target.get("node_id") == self._attempt.node_id
        meta: dict[str, Any] = answer["meta"] if own and "meta" in answer else {}
        return meta


def check_arguments(name: str, function: Function, task_id: str, arguments: Mapping[str, Any]) -> None:
    """AdapterError when the function cannot be called with these arguments: no other try would help."""
    try:
        inspect.signature(function).bind(task_id, **arguments)
    except TypeError as error:
        raise AdapterError(f"io.fn_args do not fit {name!r}: {error}") from None
    except ValueError:
        return


async def called(threads: Threads, function: Function, task_id: str, arguments: Mapping[str, Any]) -> Any:
    """What the function answers; a plain one runs on a thread, so that it blocks nobody."""
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        return await function(task_id, **arguments)
    answer = await threads.run(functools.partial(function, task_id, **arguments))
    return await answer if inspect.isawaitable(answer) else answer
