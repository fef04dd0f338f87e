"""Run attempts without Temporal: the activities' executors on a database that the test chooses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.contract.builders import RUN, WORKER
from tests.integration.harness import EVENT_TIMEOUT_SEC

from flowkit.activities.calls import Threads
from flowkit.activities.function_attempt import BuiltInFunctionExecutor, FunctionExecutor
from flowkit.activities.handlers import Batch, BatchResult, FinalizeResult, RoleHandler
from flowkit.activities.role_attempt import RoleContext, RoleExecutor
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.failures import from_error
from flowkit.attempt.supervision import AttemptFailed, WorkerContext
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import FlowKitError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from flowkit.activities.attempt_log import AttemptEventLog
    from flowkit.activities.batches.inputs import InputSettings
    from flowkit.models import AttemptFailure, AttemptInput


class Returning(RoleHandler):
    """Returns the same result for each of its batches."""

    def __init__(
        self, result: BatchResult, *uids: str, final: FinalizeResult | None = None, propose: Any = None
    ) -> None:
        self._result = result
        self._uids = uids
        self._final = final
        self._propose = propose
        self.got: list[Batch] = []

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return the route to propose."""
        return self._propose

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield one batch for each uid."""
        for uid in self._uids:
            yield Batch(batch_uid=uid)

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Return the result."""
        self.got.append(batch)
        return self._result

    async def finalize(self, ctx: Any) -> FinalizeResult | None:
        """Return the final result."""
        return self._final


def worker_context(db: Any) -> WorkerContext:
    """Return a process context whose attempts run on the current event loop."""
    return WorkerContext(tasks=TaskStore(db), portal=LoopPortal(), worker_id=WORKER)


def role_executor(
    db: Any,
    attempt: AttemptInput,
    handler: RoleHandler,
    *,
    inputs: InputSettings | None = None,
    events: AttemptEventLog | None = None,
    on_batch: Callable[[], None] = lambda: None,
    on_begin: Callable[[], None] = lambda: None,
    may_repeat: bool = False,
) -> RoleExecutor:
    """Return an attempt of a role."""
    shared: dict[str, Any] = {"inputs": inputs} if inputs is not None else {}
    roles = RoleContext(
        artifacts=ArtifactStore(db),
        handlers={attempt.role: handler},
        threads=Threads(1, "test-hook"),
        events=events,
        **shared,
    )
    return RoleExecutor(
        attempt=attempt,
        run_id=RUN,
        worker=worker_context(db),
        roles=roles,
        on_batch=on_batch,
        on_begin=on_begin,
        may_repeat=may_repeat,
    )


def function_executor(db: Any, attempt: AttemptInput, function: Any) -> FunctionExecutor:
    """Return an attempt of a coordinator function."""
    kind = (
        BuiltInFunctionExecutor
        if isinstance(getattr(function, "__self__", None), CoordinatorAdapters)
        else FunctionExecutor
    )
    return kind(worker_context(db), ArtifactStore(db), attempt, RUN, function, Threads(1, "test-function"))


async def failure_of(executor: RoleExecutor) -> AttemptFailure:
    """Run an attempt and return its failure."""
    try:
        await asyncio.wait_for(executor.run(), EVENT_TIMEOUT_SEC)
    except AttemptFailed as error:
        return error.failure
    except FlowKitError as error:
        return from_error(error)
    raise AssertionError("the attempt did not fail")
