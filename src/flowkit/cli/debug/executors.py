"""Runs a handler or a function as an attempt does, with the stored input of its node, and stores nothing."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from temporalio.testing import ActivityEnvironment

from flowkit.activities.batches.inputs import Input
from flowkit.activities.batches.puller import EndedSources, Puller
from flowkit.activities.builtin_functions import METHODS
from flowkit.activities.calls import Threads
from flowkit.activities.context import ArtifactsWriter
from flowkit.activities.function_attempt import FunctionExecutor
from flowkit.activities.handlers import FinalizeResult
from flowkit.activities.role_attempt import RoleContext, RoleExecutor, uid_of
from flowkit.adapters.batch_uids import uid_text
from flowkit.attempt.failures import from_error
from flowkit.attempt.storage import resolve
from flowkit.attempt.supervision import AttemptFailed, WorkerContext
from flowkit.cli.debug.recording import (
    RecordedAdapters,
    RecordedArtifacts,
    RecordedStorage,
    RecordedTasks,
    RecordedTaskVariables,
    Written,
)
from flowkit.core.loop_portal import LoopPortal
from flowkit.core.time import SystemClock
from flowkit.core.user_code import original
from flowkit.errors import FlowKitError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from flowkit.activities.batches.puller import Delivery
    from flowkit.activities.handlers import Batch, BatchResult, RoleHandler
    from flowkit.adapters.entries import Entry
    from flowkit.adapters.tasks.attempts import StoredParams
    from flowkit.cli.debug.recording import ReadOnly
    from flowkit.models import AttemptFailure, AttemptInput

WORKER_ID = "flowkit-debug"

_ENDED = EndedSources(epochs={}, unfinished=frozenset())


class StoredBatches(Puller):
    """Delivers the batches that the sources have stored by now, also those whose results the node has stored.

    With `wanted`, it reads only the batch with this uid, unless the node splits batches into chunks.
    """

    def __init__(self, *, wanted: str | None, seen: list[str], **given: Any) -> None:
        """Add the uids of all batches to `seen` if one is wanted, and none is split into chunks."""
        super().__init__(**given)
        self._wanted = wanted
        self._seen = seen

    async def _find_done(self) -> set[str]:
        return set()

    async def _deliver_until_ended(self, subscription: object) -> AsyncGenerator[Delivery, None]:
        while True:
            scan = await self._scanner.scan(complete=True)
            async with aclosing(self._deliver(scan.batches)) as deliveries:
                async for delivery in deliveries:
                    yield delivery
            if not self._delivers_items or await self._sources.are_still_ended(_ENDED):
                return

    def _select_fresh(self, source: str, stored: Mapping[str, Entry]) -> list[Entry]:
        fresh = super()._select_fresh(source, stored)
        if self._wanted is None or self._args.size is not None:
            return fresh
        named = {self._own_uid(source, uid_text(each.uid)): each for each in fresh}
        self._seen.extend(named)
        return [named[self._wanted]] if self._wanted in named else []

    async def _take(self, source: str, stored: Any) -> None:
        self._taken[source].update(uid_text(uid) for uid in stored)


@dataclass(frozen=True, kw_only=True)
class StoredInput(Input):
    """The input of an attempt, as far as it is stored by now."""

    wanted: str | None = None
    seen: list[str] = field(default_factory=list)
    """The uids of the batches that are stored, if one is wanted."""

    def _make_puller(self, attempt: AttemptInput, args: Any, items: Any) -> Puller:
        return StoredBatches(
            artifacts=self.artifacts,
            tasks=self.tasks,
            attempt=attempt,
            args=args,
            budget=self.settings.budget,
            items=items,
            wanted=self.wanted,
            seen=self.seen,
        )


@dataclass(kw_only=True, slots=True)
class BatchRun:
    """One call of `process_batch`."""

    uid: str
    seconds: float = 0.0
    """How long the call took."""
    result: BatchResult | None = None
    """What it has returned; None if it has raised an exception."""


@dataclass(kw_only=True, slots=True)
class DebugOutcome:
    """What a run has done."""

    written: Written = field(default_factory=Written)
    batches: list[BatchRun] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    """The uids of the batches of the input, up to the one that ran last."""
    finalized: bool = False
    """Whether `finalize` has returned."""
    final: FinalizeResult | None = None
    returned: Any = None
    """What the function has returned."""
    kv: dict[str, Any] = field(default_factory=dict)
    """The `ctx.kv` at the end."""
    seconds: float = 0.0
    failure: AttemptFailure | None = None
    """Why the attempt would fail; None if it would finish."""
    error: BaseException | None = None
    """The exception behind the failure; None if the handler has returned the failure."""


@dataclass(frozen=True, kw_only=True)
class Debugged:
    """What to run: an attempt of a node, and how."""

    attempt: AttemptInput
    params: StoredParams
    wanted: str | None = None
    """The only batch to process; None for all."""
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    """Returns the function to call in place of `process_batch` or of the node's function."""
    observe: Callable[[Any], None] = lambda value: None
    """Receives the input, with the values of its expressions, and the payload of each batch before it is processed."""

    def observe_input(self, attempt: AttemptInput) -> None:
        """Let `observe` see the input of an attempt."""
        io = attempt.io
        self.observe((io.input_inline, io.input_ref, io.fn_args))


class _DebugExecutor(RoleExecutor):
    """Runs a handler for one attempt, which takes no epoch, and processes all batches or one."""

    def __init__(
        self, debugged: Debugged, handler: RoleHandler, tasks: RecordedTasks, outcome: DebugOutcome
    ) -> None:
        attempt = debugged.attempt
        artifacts = RecordedArtifacts(tasks.database, outcome.written)
        super().__init__(
            attempt=attempt,
            run_id="",
            worker=WorkerContext(tasks=tasks, portal=LoopPortal(), worker_id=WORKER_ID),
            roles=RoleContext(
                artifacts=artifacts,
                handlers={attempt.role: handler},
                threads=Threads(1, "flowkit-hook"),
                clock=SystemClock(),
            ),
        )
        self._debugged = debugged
        self._outcome = outcome
        self._outcome.kv = self._ctx.kv
        self._adapters = RecordedAdapters(tasks=tasks, written=outcome.written)
        self._input_kind = partial(StoredInput, wanted=debugged.wanted, seen=outcome.uids)
        self._storage = RecordedStorage(tasks, artifacts, attempt, "", WORKER_ID, debugged.params)
        self._act_as(replace(attempt, shard=1) if attempt.parallel > 1 else attempt)

    def _act_as(self, attempt: AttemptInput) -> None:
        """Give the handler the artifacts and the variables of an attempt. Those of a shard permit less."""
        artifacts = ArtifactsWriter(self._artifacts, attempt, WORKER_ID)
        self._ctx.artifacts = artifacts
        self._ctx.vars = RecordedTaskVariables(self._tasks, attempt, "", self._adapters)

    async def _run_handler(self, hooks: Any) -> Any:
        self._debugged.observe_input(self._attempt)
        return await super()._run_handler(hooks)

    async def _call_hooks(self) -> FinalizeResult:
        await self._process_batches()
        if self._attempt.parallel > 1:
            await self._threads.call(self._handler.finalize_attempt, self._ctx)
            self._act_as(self._attempt)
        if self._debugged.wanted is not None:
            return FinalizeResult()
        self._outcome.final = await self._call_finalize()
        self._outcome.finalized = True
        return self._outcome.final

    async def _process_next(self, batches: AsyncGenerator[Batch, None]) -> bool:
        has_run = bool(self._outcome.batches) and self._debugged.wanted is not None
        return not has_run and await super()._process_next(batches)

    async def _process(self, batch: Batch) -> None:
        uid = uid_of(batch)
        self._outcome.uids.append(uid)
        if self._debugged.wanted in (None, uid):
            self._debugged.observe(batch.payload)
            self._outcome.batches.append(BatchRun(uid=uid))
            await super()._process(batch)

    async def _call_handler(self, batch: Batch) -> Any:
        run, began = self._outcome.batches[-1], time.perf_counter()
        try:
            hook = self._debugged.wrap(self._handler.process_batch)
            run.result = result = await self._threads.call(hook, batch, self._ctx)
            return result
        finally:
            run.seconds = time.perf_counter() - began


class _FunctionCall(FunctionExecutor):
    """Calls a function for one attempt, which takes no epoch."""

    def __init__(
        self, debugged: Debugged, function: Any, tasks: RecordedTasks, outcome: DebugOutcome
    ) -> None:
        super().__init__(
            WorkerContext(tasks=tasks, portal=LoopPortal(), worker_id=WORKER_ID),
            RecordedArtifacts(tasks.database, outcome.written),
            debugged.attempt,
            "",
            debugged.wrap(function),
            Threads(1, "flowkit-function"),
        )
        self._debugged = debugged
        self._outcome = outcome

    async def run(self) -> Any:
        """Call the function."""
        self._attempt, self._mask = await resolve(self._worker.tasks, self._attempt)
        self._debugged.observe_input(self._attempt)
        self._outcome.returned = await self._await_call()


async def run_handler(db: ReadOnly, debugged: Debugged, handler: RoleHandler) -> DebugOutcome:
    """Run a handler with the input of its node, and return what it has done."""
    outcome = DebugOutcome()
    tasks = RecordedTasks(db, outcome.written)
    executor = _DebugExecutor(debugged, handler, tasks, outcome)
    await _run(debugged, outcome, executor)
    return outcome


async def run_function(db: ReadOnly, debugged: Debugged, functions: Mapping[str, Any]) -> DebugOutcome:
    """Call the function of a node, and return what it has done. `functions` replace and complete the built-in ones."""
    outcome = DebugOutcome()
    tasks = RecordedTasks(db, outcome.written)
    adapters = RecordedAdapters(tasks=tasks, written=outcome.written)
    name = debugged.attempt.io.fn
    function = functions[name] if name in functions else getattr(adapters, METHODS[name])
    executor = _FunctionCall(debugged, function, tasks, outcome)
    await _run(debugged, outcome, executor)
    return outcome


async def _run(debugged: Debugged, outcome: DebugOutcome, executor: _DebugExecutor | _FunctionCall) -> None:
    """Run an executor as an activity, and note its end."""
    environment = ActivityEnvironment()
    attempt = debugged.attempt
    environment.info = replace(
        environment.info,
        workflow_id=attempt.task_id,
        activity_type=attempt.io.fn or attempt.role,
        activity_id=f"{attempt.node_id}.{attempt.epoch}",
    )
    began = time.perf_counter()
    try:
        await environment.run(executor.run)
    except AttemptFailed as error:
        outcome.failure = error.failure
        outcome.error = original(error.__cause__) if error.__cause__ is not None else None
    except FlowKitError as error:
        outcome.failure, outcome.error = from_error(error), error
    finally:
        outcome.seconds = time.perf_counter() - began
