"""One life of an external worker, from its start to its stop or crash."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from flowkit.testing.external.admission import Admission
from flowkit.testing.external.author import Author
from flowkit.testing.external.context import RunContext
from flowkit.testing.external.kafka import Consumer, drop_producer, open_producer
from flowkit.testing.external.pipeline import Pipeline
from flowkit.testing.external.runs import Run
from flowkit.testing.external.sender import Sender
from flowkit.testing.external.store import Store
from flowkit.testing.external.wire import CancelPayload, Incoming, SignalPayload, StartPayload, read

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from flowkit.testing.external.parts import Parts

logger = logging.getLogger(__name__)

STOP_SEC = 5.0
"""How long a stopping worker waits for a handler that suppresses its cancellation, and for an unreachable broker."""


class Life:
    """A running worker. A restart is a new life with the same `Parts`."""

    def __init__(self, parts: Parts, crash: Callable[[], None]) -> None:
        self.held: Run | None = None
        """The run that the worker executes, or restored after its start."""
        self.busy = False
        self.commands: dict[str, Consumer] = {}
        self._parts = parts
        self._crash = crash
        self._crash_due = False
        self._consumers: list[Consumer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission = Admission(parts.settings)
        self._author = Author(
            parts.worker_id, parts.settings, parts.clock, lambda: parts.misbehavior.epoch_shift
        )
        self._store = Store(parts.db, parts.worker_id, parts.clock, parts.misbehavior)
        self.sender = Sender(None, parts.journal, parts.misbehavior, parts.clock, crash)

    async def start(self) -> None:
        """Start as the protocol describes: state, WORKER_ONLINE, and only then the consumers."""
        parts = self._parts
        await self._store.ensure_indexes()
        self.sender.producer = await open_producer(parts.bootstrap, parts.producer_options)
        await self._restore()
        resume = self.held.stored() if self.held else None
        await self.sender.send(self._author.online(parts.roles, resume, first=True))
        for role in parts.roles:
            await self._listen_for_commands(role)
        await self._listen(parts.settings.topic_query, "workers.query.v1", self._on_query)
        group = f"workers.signals.{parts.worker_id}"
        await self._listen(parts.settings.topic_signals, group, self._on_signal)
        self._spawn(self._announce())

    async def ready(self) -> None:
        """Wait until the worker receives everything that is sent from now on."""
        for consumer in self._consumers:
            await consumer.ready()

    async def stop(self) -> None:
        """Stop gracefully: no terminal event for the current run, and WORKER_OFFLINE as the last message."""
        await self._end_tasks()
        for consumer in self._consumers:
            await consumer.stop()
        self.sender.ended.clear()
        try:
            async with asyncio.timeout(STOP_SEC):
                await self.sender.send(self._author.offline())
        except Exception:
            logger.exception("WORKER_OFFLINE of %s was not sent", self._parts.worker_id)
        finally:
            self.sender.ended.set()
            await drop_producer(self.sender.producer)

    async def kill(self) -> None:
        """End as a crashed process does: send nothing, write nothing, drop the connections."""
        await self._end_tasks()
        for consumer in self._consumers:
            await consumer.drop()
        if self.sender.producer is not None:
            await drop_producer(self.sender.producer)

    async def _end_tasks(self) -> None:
        self.sender.ended.set()
        running = self._tasks - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=STOP_SEC)

    async def _restore(self) -> None:
        stored = await self._store.stored_run()
        if stored is None:
            return
        run = Run.from_state(stored)
        if run.step_type in self._parts.roles:
            self.held = run
        else:
            await self._store.store_run(None)

    async def _listen_for_commands(self, role: str) -> None:
        group = f"workers.{role}.v1"
        if self._parts.misbehavior.second_owner:
            group = f"{group}.{self._parts.worker_id}"

        async def handle(record: Incoming) -> None:
            await self._on_command(record, role)

        self.commands[role] = await self._listen(self._parts.settings.topic_cmd(role), group, handle)

    async def _listen(
        self, topic: str, group: str, handle: Callable[[Incoming], Awaitable[None]]
    ) -> Consumer:
        parts = self._parts
        consumer = Consumer(
            topic,
            group,
            parts.bootstrap,
            parts.consumer_options,
            lambda partitions: parts.journal.note("assigned", partitions),
        )
        self._consumers.append(consumer)
        await consumer.start()
        self._spawn(self._loop(consumer, handle))
        return consumer

    async def _loop(self, consumer: Consumer, handle: Callable[[Incoming], Awaitable[None]]) -> None:
        """Handle record after record. Any exception ends this loop, and only this loop (H1)."""
        try:
            while True:
                message = read((await consumer.next()).value)
                await handle(message)
                await consumer.commit()
                self._parts.journal.note("committed", consumer.topic, message)
                await self._crash_if_due()
        except Exception as error:
            self._parts.journal.note("loop_ended", f"{consumer.topic}: {error!r}")
            logger.exception("The loop of %s has ended", consumer.topic)

    async def _on_command(self, command: Incoming, role: str) -> None:
        reason = self._admission.refusal(command, role, self._parts.clock.now_ms())
        if reason is None and command.payload["cmd"] == "TASK_CANCEL":
            await self._cancel(command, "coordinator_cmd", CancelPayload.model_validate(command.payload))
            return
        if reason is None and self.busy:
            reason = "busy"
        if reason is None and self._parts.misbehavior.drop_commands > 0:
            self._parts.misbehavior.drop_commands -= 1
            reason = "misbehavior"
        if reason is None:
            await self._accept(command, StartPayload.model_validate(command.payload))
        else:
            self._parts.journal.note("dropped", reason, command)

    async def _accept(self, command: Incoming, start: StartPayload) -> None:
        run = Run.accepted(command, start, self._parts.clock.now_ms())
        self.busy, self.held = True, run
        self._parts.runs.append(run)
        await self._store.store_run(run)
        await self.sender.event(self._author.accepted(run))
        if not self._parts.misbehavior.never_pause:
            for consumer in self.commands.values():
                consumer.pause()
        crash = self._parts.misbehavior.crash_after_accepted
        if crash:
            self._crash_due = True
            await self._crash_if_due(crash == "before_commit")
            return
        self._spawn(self._heartbeats(run.step_type))
        self._spawn(self._execute(run))

    async def _crash_if_due(self, now: bool = True) -> None:
        if self._crash_due and now:
            self._crash()
            await asyncio.Event().wait()

    async def _heartbeats(self, role: str) -> None:
        """Send heartbeats while the worker is busy, for whatever run it then has, with the role of the start (H15)."""
        while self.busy and self.held is not None:
            chosen = self._parts.misbehavior.heartbeats_on or role
            await self.sender.event(self._author.heartbeat(self.held, chosen))
            await self._parts.clock.sleep(self._parts.settings.hb_interval_sec)

    async def _execute(self, run: Run) -> None:
        parts = self._parts
        context = RunContext(run, parts.worker_id, self._store, parts.clock)
        pipeline = Pipeline(
            run,
            parts.handlers.get(run.step_type),
            context,
            store=self._store,
            sender=self.sender,
            author=self._author,
            misbehavior=parts.misbehavior,
        )
        try:
            await pipeline.execute()
        except Exception:
            logger.exception("The terminal event of %s/%s was not sent", run.task_id, run.node_id)
        finally:
            context.clean_up()
        await self._release(run)

    async def _release(self, run: Run) -> None:
        """Clean up after a run: the stored state, the pause, and the slot."""
        try:
            await self._store.store_run(None)
        finally:
            self.busy, self.held = False, None
            for consumer in self.commands.values():
                consumer.resume()
            run.finished.set()
            self._parts.journal.note("idle", run.outcome or "", run)

    async def _cancel(self, message: Incoming, reason: str, payload: Any) -> None:
        """Set the cancel flag if task, node and epoch are those of the held run."""
        run = self.held
        if run is None or (run.task_id, run.node_id, run.attempt_epoch) != (
            message.task_id,
            message.node_id,
            message.attempt_epoch,
        ):
            self._parts.journal.note("cancel_ignored", reason, message)
        elif run.request_cancel(reason, getattr(payload, "deadline_ts_ms", None)):
            await self._store.store_run(run)
            self._parts.journal.note("cancel_requested", reason, run)

    async def _on_signal(self, signal: Incoming) -> None:
        if signal.target_worker_id not in (None, self._parts.worker_id):
            return
        if (signal.payload.get("sig") or "").upper() == "CANCEL":
            payload = SignalPayload.model_validate(signal.payload)
            await self._cancel(signal, payload.reason, payload)

    async def _on_query(self, query: Incoming) -> None:
        if query.step_type not in self._parts.roles:
            return
        held = self.held if self.held and self.held.is_node(query.task_id, query.node_id) else None
        complete = held is None and await self._store.is_complete(query.task_id, query.node_id)
        await self.sender.send(self._author.snapshot(query, held, complete=complete))

    async def _announce(self) -> None:
        while True:
            await self._parts.clock.sleep(self._parts.settings.announce_interval_sec)
            await self.sender.send(self._author.online(self._parts.roles, None, first=False))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Record the failure of a background task, such as a heartbeat that the broker refused (H33)."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._parts.journal.note("task_ended", repr(error))
            logger.warning("A background task of the external worker has ended: %s", error)
