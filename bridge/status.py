"""Processes the status events of external workers: rejects outdated ones, stores batches, and ends attempts.

A poll may contain the events of many nodes. The events of one node are processed in order, those of different nodes
concurrently. The consumer commits the offsets of a poll only after everything in it is stored, which includes the
renewals of leases and the log (`settle`). After a crash, the same events are therefore processed again,
without further effect.

An event that can never be handled ends its attempt, so that no batch is lost unnoticed, and affects no other attempt.
A malformed record does the same if it is about an open attempt. Other malformed records are skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from cachetools import LRUCache

from flowkit import reason_codes
from flowkit.adapters.dispatches import CancelRequest, OutcomeKind
from flowkit.adapters.metrics import BadMetrics
from flowkit.adapters.mongo import gather_writes
from flowkit.adapters.worker_events import WorkerEvent
from flowkit.bridge.rules.fencing import (
    TERMINAL,
    PolledNode,
    Verdict,
    document_deadline_ms,
    is_from_owner,
    judge,
    new_lease,
    record_key,
)
from flowkit.bridge.rules.messages import BadEvent, Malformed, StatusEvent, read_bad_event, read_status
from flowkit.bridge.rules.outcomes import outcome_of, outcome_of_error
from flowkit.core.instruments import BRIDGE_EVENTS, NODE_WAIT, is_measured
from flowkit.errors import Fenced, FlowKitError, StoreRefused, StoreUnavailable
from flowkit.limits import LARGEST_EPOCH, LAST_ERROR_CHARS
from flowkit.protocol.messages import FINAL_UID, EvBatchFailed, EvBatchOk, EventKind, EvTaskDone
from flowkit.text import bounded, prefix

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from aiokafka import ConsumerRecord

    from flowkit.adapters.dispatches import Dispatch, Outcome, WorkerLease
    from flowkit.adapters.tasks.cancel_flags import CancelFlag
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.delivery import Delivery, FirstBatches
    from flowkit.bridge.pulled_inputs import PulledInputs
    from flowkit.bridge.signals import WorkerSignals
    from flowkit.bridge.supervisor import AttemptSupervisor

_logger = logging.getLogger("flowkit.bridge")

_REMEMBERED_BATCHES = 100_000
_REMEMBERED_TASKS = 1_000

_LARGE = frozenset({"metrics", "artifacts_ref"})
"""Fields that the log leaves out, because they may be large. They are in `metrics_raw` and `artifacts`."""


class StatusEvents:
    """Handles polls of the status topics."""

    def __init__(
        self,
        context: BridgeContext,
        *,
        delivery: Delivery,
        signals: WorkerSignals,
        supervisor: AttemptSupervisor,
        inputs: PulledInputs,
        first_batches: FirstBatches,
    ) -> None:
        self._context = context
        self._stores = context.stores
        self._delivery = delivery
        self._signals = signals
        self._supervisor = supervisor
        self._inputs = inputs
        self._first_batches = first_batches
        self._renewals = Renewals(context, supervisor)
        self._log = StatusEventLog(context)
        self._roles = {context.topics.status(role): role for role in context.roles}
        self._stored = LRUCache[tuple[str, str], str](_REMEMBERED_BATCHES)
        """For each batch that this process has stored, by record key and batch uid, the worker that sent it."""
        self._unknown = LRUCache[str, None](_REMEMBERED_TASKS)
        """Tasks whose unknown attempts were logged."""
        self.handled = 0
        """Number of events that this process has handled."""

    async def handle(self, records: Sequence[ConsumerRecord[bytes, bytes]]) -> None:
        """Process one poll. Return once everything is stored, except for what `settle` writes."""
        at = self._context.now()
        events = [event for record in records if (event := await self._read(record)) is not None]
        by_node: dict[tuple[str, str], list[StatusEvent | BadEvent]] = {}
        for event in events:
            by_node.setdefault(event.node, []).append(event)
        flagged = asyncio.create_task(self._read_flagged_tasks(events))
        dispatches = await self._find_records(events)
        runs = [
            PolledNode(
                {key: dispatches[key] for key in map(record_key, some) if key in dispatches}, at, flagged
            )
            for some in by_node.values()
        ]
        nodes = (self._handle_node(run, some) for run, some in zip(runs, by_node.values(), strict=True))
        results = await asyncio.gather(flagged, *nodes, return_exceptions=True)
        for run in runs:
            for key in run.due_renewals():
                self._renewals.add(run.records[key], run.take_batches(key))
        _raise_first(results)
        self._log.add([event for event in events if _is_logged(event, dispatches.get(record_key(event)))], at)
        self.handled += len(events)
        _measure_events(events)

    async def settle(self) -> None:
        """Write renewed leases, numbers of batches and the log. Called before the events' offsets are committed."""
        await gather_writes(self._renewals.write(), self._log.write())

    async def _read_flagged_tasks(self, events: Iterable[StatusEvent | BadEvent]) -> set[str]:
        """Return the tasks with a cancel flag, among those for which an attempt ends: workers may see flags first."""
        known = [event for event in events if isinstance(event, StatusEvent)]
        ids = {event.envelope.task_id for event in known if event.event.kind in TERMINAL}
        return (
            await self._context.db(lambda: self._stores.tasks.flags.find_flagged(sorted(ids)))
            if ids
            else set()
        )

    async def _read(self, record: ConsumerRecord[bytes, bytes]) -> StatusEvent | BadEvent | None:
        role = self._roles.get(record.topic, "")
        try:
            return read_status(record.value, role)
        except Malformed as error:
            bad = read_bad_event(record, role, error)
            if bad is not None and bad.epoch is None:
                bad = await self._attribute(bad)
            if bad is None:
                self._context.malformed.skip(record, error)
            return bad

    async def _attribute(self, bad: BadEvent) -> BadEvent | None:
        """Return a malformed record that names no epoch as one of the latest open attempt of its node; None
        if there is none.
        """
        for node in bad.nodes:
            find = partial(self._stores.dispatches.find_open_before, *node, LARGEST_EPOCH + 1)
            if found := await self._context.db(find):
                epoch = max(record.attempt.epoch for record in found)
                return replace(bad, nodes=(node,), epoch=epoch)
        return None

    async def _find_records(self, events: Iterable[StatusEvent | BadEvent]) -> dict[str, Dispatch]:
        """Return the dispatch records of the events. Only those that this process does not supervise are read."""
        keys = {record_key(event) for event in events}
        known = {key: record for key in keys if (record := self._supervisor.record_for(key)) is not None}
        unknown = keys - known.keys()
        if not unknown:
            return known
        return known | await self._context.db(lambda: self._stores.dispatches.find_all(unknown))

    async def _handle_node(self, run: PolledNode, events: Sequence[StatusEvent | BadEvent]) -> None:
        """Process the events of one node in order. Batches that follow each other are stored concurrently."""
        batches: list[StatusEvent] = []
        for event in events:
            if isinstance(event, StatusEvent) and _is_batch(run, event):
                run.renew(event)
                batches.append(event)
                continue
            await self._store_batches(run, batches)
            batches = []
            await self._run_guarded(run, event, self._handle_event(run, event))
        await self._store_batches(run, batches)

    async def _run_guarded(
        self, run: PolledNode, event: StatusEvent | BadEvent, work: Awaitable[None]
    ) -> None:
        """Do `work`, which handles an event. If it fails and no repetition can help, end the attempt."""
        try:
            await work
        except (Fenced, StoreUnavailable):
            raise
        except FlowKitError as error:
            await self._refuse(run, event, error)
        except Exception as error:
            _logger.exception("unexpected error in an event of node %r", event.node[1])
            await self._refuse(run, event, error)

    async def _refuse(self, run: PolledNode, event: StatusEvent | BadEvent, error: Exception) -> None:
        """End the attempt of an event that cannot be handled, and stop its worker."""
        outcome = outcome_of_error(error, run.at)
        try:
            ended = await self._store_outcome(record_key(event), outcome)
        except StoreRefused:
            _logger.exception(
                "an event of node %r was skipped, and its attempt cannot be ended", event.node[1]
            )
            return
        if ended is None or outcome.failure is None:
            return
        run.put(ended)
        worker_id = ended.lease.worker_id if ended.lease else event.worker_id
        self._signals.cancel(ended.attempt, outcome.failure.code, worker_id=worker_id or None)
        _logger.warning(
            "attempt %d of node %r of task %r ends, because an event of its worker cannot be handled: %s",
            *(ended.attempt.epoch, ended.attempt.node_id, ended.attempt.task_id, outcome.failure.message),
        )

    async def _handle_event(self, run: PolledNode, event: StatusEvent | BadEvent) -> None:
        record = run.record_of(event)
        if isinstance(event, BadEvent):
            self._handle_bad_event(record, event)
            return
        await self._note_late_event(run, record, event)
        match judge(record, event):
            case Verdict.UNKNOWN:
                self._report_unknown(event)
            case Verdict.STOP_WORKER | Verdict.IGNORE as verdict if record is not None:
                if verdict is Verdict.STOP_WORKER:
                    self._signals.cancel(record.attempt, reason_codes.STALE_EPOCH, worker_id=event.worker_id)
                await self._restore(record, event)
            case Verdict.ACCEPT if record is not None:
                await self._accept(run, record, event)
                if judge(run.record_of(event), event) is Verdict.APPLY:
                    await self._apply(run, event)
            case Verdict.APPLY:
                await self._apply(run, event)

    async def _restore(self, record: Dispatch, event: StatusEvent) -> None:
        """Restore the artifact that a worker has overwritten which runs an attempt that is not its own any more."""
        match event.event:
            case EvBatchOk(batch_uid=uid):
                pass
            case EvTaskDone():
                uid = FINAL_UID
            case _:
                return
        if not record.active:
            await self._context.db(lambda: self._stores.artifacts.restore_batch(record.attempt, uid))

    def _handle_bad_event(self, record: Dispatch | None, event: BadEvent) -> None:
        """Skip a malformed record, or raise BadMetrics if it is about an open attempt."""
        if record is not None and is_from_owner(record, event):
            raise BadMetrics(f"the worker sent a record that cannot be read: {event.why}")
        self._context.malformed.skip(event.record, event.why)

    async def _note_late_event(self, run: PolledNode, record: Dispatch | None, event: StatusEvent) -> None:
        """Note that a worker runs, or has ended, an attempt that was cancelled while its command was unread.

        The next attempt of the node waits for that end.
        """
        if record is None or not record.may_begin_late or event.role != record.attempt.role:
            return
        dispatches = self._stores.dispatches
        if event.event.kind not in TERMINAL:
            lease = new_lease(record, event, run.at)
            await self._context.db(lambda: dispatches.note_late_run(record.key, lease))
            run.put(replace(record, lease=lease))
        elif record.lease is None or record.lease.worker_id == event.worker_id:
            await self._context.db(lambda: dispatches.settle(record.key))
            run.put(replace(record, settled=True))

    async def _accept(self, run: PolledNode, record: Dispatch, event: StatusEvent) -> None:
        """Make the sender of `event` the owner of the run. Cancel the earlier owner, if it is another worker."""
        lease, at = new_lease(record, event, run.at), run.at
        # A renewal of the earlier lease would change nothing any more, so its batches become part of the next one.
        run.add_batches(record.key, await self._renewals.take(record.key))
        accepted_at = record.accepted_at if record.accepted_at is not None else at
        taken, _ = await asyncio.gather(
            self._context.db(lambda: self._stores.dispatches.accept(record, lease, at)),
            self._show_lease(record, lease, event, at, accepted_at),
        )
        if not taken:
            await self._reload(run, event)
            return
        if record.accepted_at is None:
            waited = at - (record.attempt.ready_at or record.created_at)
            NODE_WAIT.observe(max(0.0, waited), record.attempt.role)
        past = (*record.past_leases, *([record.lease.lease_id] if record.lease else []))
        run.accepted(replace(record, lease=lease, past_leases=past, accepted_at=accepted_at))
        if record.lease is not None and record.lease.worker_id != event.worker_id:
            self._signals.stop_owner(record)
        self._supervisor.update_record(run.records[record.key])

    async def _reload(self, run: PolledNode, event: StatusEvent) -> None:
        """Read the record again, because another bridge has changed it."""
        key = record_key(event)
        run.records.update(await self._context.db(lambda: self._stores.dispatches.find_all([key])))
        if judge(run.record_of(event), event) is Verdict.ACCEPT:
            raise Fenced(f"the dispatch record of node {event.envelope.node_id!r} keeps changing")

    async def _show_lease(
        self, record: Dispatch, lease: WorkerLease, event: StatusEvent, at: float, accepted_at: float
    ) -> None:
        shown = {
            "worker_id": lease.worker_id,
            "lease_id": lease.lease_id,
            "deadline_ts_ms": document_deadline_ms(event, lease),
        }
        attempt, run_id, attempts = record.attempt, record.run_id, self._stores.tasks.attempts
        await self._context.db(lambda: attempts.show_lease(attempt, run_id, shown, at, accepted_at))

    async def _apply(self, run: PolledNode, event: StatusEvent) -> None:
        record = run.record_of(event)
        if record is None or record.lease is None:
            return
        run.renew(event)
        if event.event.kind is EventKind.BATCH_OK:
            await self._store_batches(run, [event])
        elif isinstance(event.event, EvBatchFailed):
            await self._store_failed_batch(record, event, event.event, run.at)
        elif event.event.kind in TERMINAL:
            await self._end(run, record.key, event)

    async def _store_batches(self, run: PolledNode, events: Sequence[StatusEvent]) -> None:
        """Store batches concurrently, and each one once: a poll may contain duplicates."""
        unique = {
            (record_key(event), event.worker_id, getattr(event.event, "batch_uid", "")): event
            for event in events
        }
        storing = (self._run_guarded(run, event, self._store_batch(run, event)) for event in unique.values())
        await asyncio.gather(*storing)

    async def _store_batch(self, run: PolledNode, event: StatusEvent) -> None:
        record, batch = run.record_of(event), event.event
        if record is None or not isinstance(batch, EvBatchOk):
            return
        identity, worker_id = (record.key, batch.batch_uid), event.worker_id
        if self._stored.get(identity) == worker_id:
            return
        attempt, at = record.attempt, run.at
        try:
            await self._context.db(
                lambda: self._stores.artifacts.store_batch(
                    attempt, batch.batch_uid, batch.metrics, worker_id, at, artifacts_ref=batch.artifacts_ref
                )
            )
        except Fenced as error:
            _logger.info("batch %r was not stored: %s", batch.batch_uid, error)
        else:
            self._count(run, identity, worker_id)
            self._first_batches.batch_stored(record)

    def _count(self, run: PolledNode, identity: tuple[str, str], worker_id: str) -> None:
        """Count a stored batch once, even if two workers with the same epoch have sent it (H16)."""
        if identity not in self._stored:
            run.count(identity[0])
        self._stored[identity] = worker_id

    async def _store_failed_batch(
        self, record: Dispatch, event: StatusEvent, batch: EvBatchFailed, at: float
    ) -> None:
        attempt, worker_id = record.attempt, event.worker_id
        try:
            await self._context.db(
                lambda: self._stores.artifacts.store_failed_batch(
                    attempt, batch.batch_uid, batch.reason_code, at, worker_id=worker_id
                )
            )
        except Fenced as error:
            _logger.info("failed batch %r was not stored: %s", batch.batch_uid, error)

    async def _end(self, run: PolledNode, key: str, event: StatusEvent) -> None:
        """End an attempt by a terminal event. If the node pulls, its inputs are checked before it can finish."""
        record = run.records[key]
        batches = run.take_batches(key) + await self._renewals.take(key)
        try:
            await self._store_end(run, record, event, batches)
        except BaseException:
            self._renewals.add(record, batches)
            raise

    async def _store_end(self, run: PolledNode, record: Dispatch, event: StatusEvent, batches: int) -> None:
        if isinstance(event.event, EvTaskDone) and record.pull is not None:
            record = await self._request_flagged_cancel(run, record)
            if record.cancel is None:
                await self._keep(run, record, event, batches)
                return
        key, outcome = record.key, outcome_of(record, event, run.at)
        ended = await self._context.db(lambda: self._stores.dispatches.end(key, outcome, batches))
        if ended is not None:
            await self._deliver(run, ended, event)

    async def _keep(self, run: PolledNode, record: Dispatch, event: StatusEvent, batches: int) -> None:
        """Keep the outcome of a run that pulls until its sources have ended."""
        key, outcome = record.key, outcome_of(record, event, run.at)
        kept = await self._context.db(lambda: self._stores.dispatches.keep(key, outcome, batches))
        if kept is not None:
            run.put(kept)
            if kept.cancel is None and (ended := await self._inputs.check(kept)) is not None:
                run.put(ended)
                self._finish(ended)
            else:
                self._supervisor.update_record(kept)

    async def _deliver(self, run: PolledNode, ended: Dispatch, event: StatusEvent) -> None:
        """Start the delivery of the outcome of an event. It counts as cancelled if a cancel was requested, or a cancel
        flag set, before.

        The flags are read while the outcome is stored, because a node would wait for both. If the bridge is killed in
        between, the end counts as if it had come before the flag.
        """
        try:
            request = ended.cancel
            if (flag := await self._read_flag(run, ended)) is not None:
                request = CancelRequest(reason=flag.reason, at=run.at)
            if request is not None and not (ended.outcome and ended.outcome.kind is OutcomeKind.CANCELLED):
                cancelled = replace(ended, cancel=request)
                cancelled = replace(cancelled, outcome=outcome_of(cancelled, event, run.at))
                await self._context.db(lambda: self._stores.dispatches.count_as_cancelled(cancelled))
                ended = cancelled
        finally:
            run.put(ended)
            self._finish(ended)

    async def _read_flag(self, run: PolledNode, record: Dispatch) -> CancelFlag | None:
        """Return the cancel flag of an attempt without a cancel request: a worker may see it before any
        bridge (H11).
        """
        if record.cancel is not None or run.flagged is None:
            return None
        if record.attempt.task_id not in await run.flagged:
            return None
        flag = await self._context.db(lambda: self._stores.tasks.flags.find_flag(record.attempt))
        return flag if flag is not None and flag.concerns(record.run_id) else None

    async def _request_flagged_cancel(self, run: PolledNode, record: Dispatch) -> Dispatch:
        """Return the record with its cancel request."""
        if (flag := await self._read_flag(run, record)) is not None:
            request = self._stores.dispatches.request_cancel
            requested = await self._context.db(lambda: request(record.key, flag.reason, run.at))
            run.put(requested or record)
        return run.records[record.key]

    async def _store_outcome(self, key: str, outcome: Outcome, batches: int = 0) -> Dispatch | None:
        ended = await self._context.db(lambda: self._stores.dispatches.end(key, outcome, batches))
        if ended is not None:
            self._finish(ended)
        return ended

    def _finish(self, record: Dispatch) -> None:
        self._supervisor.drop(record.key)
        self._delivery.start(record)

    def _report_unknown(self, event: StatusEvent) -> None:
        """Log, once for each task, that a worker runs an attempt that this deployment has not dispatched."""
        task_id = event.envelope.task_id
        if event.event.kind is not EventKind.TASK_ACCEPTED or task_id in self._unknown:
            return
        self._unknown[task_id] = None
        _logger.warning(
            "worker %r accepted node %r of task %r, which no bridge of this database has dispatched: if several "
            "deployments share this Kafka cluster, give each its own topic names (topic_cmd_fmt, topic_status_fmt, …)",
            event.worker_id,
            event.envelope.node_id,
            task_id,
        )


def _is_batch(run: PolledNode, event: StatusEvent) -> bool:
    return event.event.kind is EventKind.BATCH_OK and judge(run.record_of(event), event) is Verdict.APPLY


def _measure_events(events: Iterable[StatusEvent | BadEvent]) -> None:
    """Count events by role and kind. Those that could not be read have the kind `malformed`."""
    if is_measured():
        kinds = Counter(
            (each.role, each.event.kind.value if isinstance(each, StatusEvent) else "malformed")
            for each in events
        )
        for labels, count in kinds.items():
            BRIDGE_EVENTS.add(*labels, amount=count)


def _is_logged(event: StatusEvent | BadEvent, record: Dispatch | None) -> TypeGuard[StatusEvent]:
    """Return whether an event is about a dispatched attempt. Otherwise, anyone could fill the log."""
    return isinstance(event, StatusEvent) and record is not None and record.attempt.role == event.role


def _raise_first(results: Iterable[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


class Renewals:
    """Collects renewals and writes them together: one update for each attempt, all in one call.

    The consumer commits events only after their renewals are written. After a crash, it receives the events again.
    """

    def __init__(self, context: BridgeContext, supervisor: AttemptSupervisor) -> None:
        self._context = context
        self._supervisor = supervisor
        self._due: dict[str, tuple[Dispatch, int]] = {}
        self._being_written: dict[str, tuple[Dispatch, int]] = {}
        self._one_write = asyncio.Lock()

    def add(self, record: Dispatch, batches: int) -> None:
        """Note the renewed lease of `record`, and the number of its new batches."""
        self._merge(record, batches)
        self._supervisor.update_record(record)

    def _merge(self, record: Dispatch, batches: int) -> None:
        _, others = self._due.get(record.key, (record, 0))
        self._due[record.key] = (record, others + batches)

    async def take(self, key: str) -> int:
        """Return the number of batches that are not written yet. The caller ends the attempt and writes it itself."""
        if key in self._being_written:
            async with self._one_write:
                pass
        _, batches = self._due.pop(key, (None, 0))
        return batches

    async def write(self) -> None:
        """Write what is due. Return once everything is written that was noted before the call."""
        async with self._one_write:
            self._being_written, self._due = self._due, {}
            try:
                await self._write()
            except BaseException:
                later, self._due = self._due, self._being_written
                for renewal in later.values():
                    self._merge(*renewal)
                raise
            finally:
                self._being_written = {}

    async def _write(self) -> None:
        renewals, dispatches = [*self._being_written.values()], self._context.stores.dispatches
        at = self._context.now()
        try:
            if renewals and not await self._context.db(lambda: dispatches.renew(renewals, at)):
                self._supervisor.refresh_soon()
        except StoreRefused as error:
            _logger.warning("some of %d leases were not renewed, so they expire: %s", len(renewals), error)


class StatusEventLog:
    """Collects events, and stores those of several polls in one call."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._one_write = asyncio.Lock()
        self.unwritten: list[WorkerEvent] = []

    def add(self, events: Iterable[StatusEvent], at: float) -> None:
        """Note events that were received at this time."""
        self.unwritten += log_rows(events, at)

    async def write(self) -> None:
        """Store what was noted before the call. Log a warning if MongoDB permanently rejects some events."""
        async with self._one_write:
            rows, now = [*self.unwritten], self._context.now()
            try:
                await self._context.db(lambda: self._context.stores.events.append(rows, now))
            except StoreRefused as error:
                _logger.warning("%d events were not stored in worker_events: %s", len(rows), error)
            del self.unwritten[: len(rows)]


def log_rows(events: Iterable[StatusEvent], at: float) -> list[WorkerEvent]:
    """Return the rows for `events`. Omits heartbeats, which would make up most of the log."""
    return [_log_row(event, at) for event in events if event.event.kind is not EventKind.TASK_HEARTBEAT]


def _log_row(event: StatusEvent, at: float) -> WorkerEvent:
    envelope = event.envelope
    return WorkerEvent(
        task_id=envelope.task_id,
        node_id=envelope.node_id,
        step_type=prefix(envelope.step_type, 100),
        epoch=envelope.attempt_epoch,
        at=envelope.ts_ms / 1000,
        event_hash=prefix(envelope.dedup_id, 200),
        payload=_log_payload(event),
        received_at=at,
    )


def _log_payload(event: StatusEvent) -> dict[str, Any]:
    fields = event.event.model_dump(mode="json", exclude=set(_LARGE))
    return {
        name: bounded(value, LAST_ERROR_CHARS) if isinstance(value, str) else value
        for name, value in fields.items()
    }
