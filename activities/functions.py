"""Coordinator functions: nodes that the engine runs itself (spec: coordinator_fn nodes)."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any

from temporalio import activity

from flowkit.activities.attempts import Attempt, AttemptFailed, Host
from flowkit.activities.failures import cut
from flowkit.activities.roles import begin, mark
from flowkit.adapters.patience import durably
from flowkit.errors import FlowKitError
from flowkit.models import AttemptFailure, AttemptInput, AttemptResult, FailureKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from flowkit.adapters.artifacts import ArtifactStore

Function = Any
"""`async def fn(task_id, **fn_args)`; a plain function is allowed."""


async def noop(task_id: str, **anything: Any) -> dict[str, Any]:
    """Do nothing, whatever the arguments."""
    return {"ok": True}


BUILT_IN: dict[str, Function] = {"noop": noop}


class FunctionActivities:
    """The activities of an engine's coordinator functions."""

    def __init__(self, *, host: Host, artifacts: ArtifactStore, functions: Mapping[str, Function]) -> None:
        self._host = host
        self._artifacts = artifacts
        self._functions = functions

    def of(self, name: str) -> Callable[..., Awaitable[AttemptResult]]:
        """The activity that runs nodes whose `io.fn` is `name`."""

        @activity.defn(name=name)
        async def run_function(attempt: AttemptInput) -> AttemptResult:
            run_id = activity.info().workflow_run_id or ""
            body = FunctionBody(self._host, self._artifacts, attempt, run_id, self._functions[name])
            return await Attempt(self._host, attempt, body).run()

        return run_function


class FunctionBody:
    """One call of a coordinator function; its return value is not kept."""

    def __init__(
        self, host: Host, artifacts: ArtifactStore, attempt: AttemptInput, run_id: str, function: Function
    ) -> None:
        self._host = host
        self._artifacts = artifacts
        self._attempt = attempt
        self._run_id = run_id
        self._function = function
        self._call: asyncio.Task[None] | None = None

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Functions have no flag to look at: the call is cancelled."""
        if self._call is not None:
            self._call.cancel(reason)

    async def run(self) -> AttemptResult:
        """The whole attempt, from its first write to its last."""
        host, attempt = self._host, self._attempt
        await begin(host.tasks, self._artifacts, attempt, self._run_id, host.worker_id)
        self._call = asyncio.create_task(self._invoke())
        try:
            await self._call
        except (FlowKitError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise AttemptFailed(_failure(error)) from error
        await mark(self._artifacts, attempt, {}, host.worker_id)
        await durably(lambda: host.tasks.finish_attempt(attempt, self._run_id, time.time()))
        return AttemptResult(worker_id=host.worker_id)

    async def _invoke(self) -> None:
        outcome = self._function(self._attempt.task_id, **self._attempt.io.fn_args)
        if inspect.isawaitable(outcome):
            await outcome


def _failure(error: Exception) -> AttemptFailure:
    permanent = isinstance(error, (TypeError, ValueError, KeyError))
    return AttemptFailure(
        kind=FailureKind.FAILURE,
        code="bad_input" if permanent else "unexpected_error",
        message=cut(f"{type(error).__name__}: {error}"),
        permanent=permanent,
    )
