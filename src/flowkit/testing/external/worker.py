"""An external worker for tests: a second, independent implementation of the worker protocol."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from flowkit.testing.external.handlers import RunContext, as_handler
from flowkit.testing.external.journal import Entry, Journal, about
from flowkit.testing.external.kafka import Consumer, Sender, drop_producer, open_producer
from flowkit.testing.external.messages import MessageBuilder
from flowkit.testing.external.misbehavior import Misbehavior
from flowkit.testing.external.pipeline import Pipeline
from flowkit.testing.external.protocol import CancelPayload, Incoming, SignalPayload, StartPayload, read
from flowkit.testing.external.runs import Run
from flowkit.testing.external.settings import Clock, ExternalSettings
from flowkit.testing.external.store import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from flowkit.testing.external.handlers import AnyHandler, Handler
    from flowkit.testing.external.misbehavior import Malformed
    from flowkit.testing.external.protocol import Incoming


class ExternalWorker:
    """A worker that receives its attempts through Kafka, as the worker protocol describes.

    It shares no code with FlowKit's engine, so tests can check the two against each other. Use it as a context
    manager::

        async with ExternalWorker(db, {"indexer": handler}, bootstrap_servers=address) as worker:
            ...
            await worker.wait_for("TASK_DONE", node="extract")

    `handlers` maps roles to handlers: async generator functions that yield the metrics of each batch,
    `EachBatch(function)`, or handlers written for the SDK. `roles` may name more roles than there are handlers; runs
    of the others fail as `no_handler`. `kafka` holds options for all clients, such as `security_protocol` and
    `ssl_context`; `producer` and `consumer` hold options for one kind. The remaining keywords are fields of
    ExternalSettings. Requires aiokafka.
    """

    def __init__(
        self,
        db: Any,
        handlers: Mapping[str, AnyHandler],
        *,
        bootstrap_servers: str | None = None,
        roles: Sequence[str] | None = None,
        worker_id: str | None = None,
        misbehavior: Misbehavior | None = None,
        clock: Clock | None = None,
        kafka: Mapping[str, Any] | None = None,
        producer: Mapping[str, Any] | None = None,
        consumer: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._config = WorkerConfig(
            worker_id=worker_id or f"w-{secrets.token_hex(4)}",
            roles=list(handlers if roles is None else roles),
            handlers={role: as_handler(handler) for role, handler in handlers.items()},
            db=db,
            bootstrap=bootstrap_servers or os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "localhost:9092"),
            settings=ExternalSettings(**settings),
            misbehavior=misbehavior or Misbehavior(),
            clock=clock or Clock(),
            producer_options={**(kafka or {}), **(producer or {})},
            consumer_options={**(kafka or {}), **(consumer or {})},
        )
        self._session: Session | None = None
        self._crashing: asyncio.Task[None] | None = None

    @property
    def worker_id(self) -> str:
        """The id of the worker, which a restart keeps."""
        return self._config.worker_id

    @property
    def roles(self) -> list[str]:
        """The roles that the worker serves."""
        return list(self._config.roles)

    @property
    def settings(self) -> ExternalSettings:
        """The settings of the worker."""
        return self._config.settings

    @property
    def misbehavior(self) -> Misbehavior:
        """The switches for misbehavior. A change takes effect at once."""
        return self._config.misbehavior

    @property
    def alive(self) -> bool:
        """Whether the worker runs: it was started, and neither stopped nor killed."""
        return self._session is not None

    @property
    def busy(self) -> bool:
        """Whether the worker executes a run."""
        return self._session is not None and self._session.busy

    @property
    def held(self) -> Run | None:
        """The run that the worker executes, or restored after a restart."""
        return self._session.held if self._session else None

    @property
    def runs(self) -> list[Run]:
        """All runs that the worker accepted, across its restarts."""
        return list(self._config.runs)

    @property
    def entries(self) -> list[Entry]:
        """Everything that happened, in order: acknowledged records and steps of the worker."""
        return list(self._config.journal.entries)

    @property
    def sent(self) -> list[Entry]:
        """The records that the broker acknowledged, in order."""
        return [entry for entry in self._config.journal.entries if entry.offset >= 0]

    def sent_for(self, node: str, *kinds: str) -> list[Entry]:
        """Return the records sent for a node, of these kinds or of all kinds."""
        return [each for each in self.sent if each.node_id == node and (not kinds or each.kind in kinds)]

    def partitions(self, role: str) -> list[int]:
        """Return the partitions of the role's command topic that the worker currently reads."""
        return self._running_session().commands[role].partitions()

    def paused(self, role: str) -> bool:
        """Return whether the worker has paused reading the commands of a role."""
        return self._running_session().commands[role].paused

    async def start(self) -> None:
        """Start the worker. Returns when it receives everything that is sent from now on."""
        await self._after_crash()
        if self._session is not None:
            raise RuntimeError(f"the external worker {self.worker_id} is already running")
        self._session = Session(self._config, self._crash)
        try:
            await self._session.start()
            await self._session.ready()
        except BaseException:
            await self.kill()
            raise
        self._config.journal.note("started")

    async def stop(self) -> None:
        """Stop gracefully, with WORKER_OFFLINE. A current run ends without a terminal event."""
        session, self._session = self._session, None
        if session is not None:
            await session.stop()
            self._config.journal.note("stopped")

    async def kill(self) -> None:
        """Crash: nothing is sent or written, and connections are dropped without leaving the consumer groups."""
        session, self._session = self._session, None
        if session is not None:
            await session.kill()
            self._config.journal.note("killed")

    async def restart(self, *, graceful: bool = False) -> None:
        """End the worker if it runs, by a crash or gracefully, and start it again with the same id (H9)."""
        await (self.stop() if graceful else self.kill())
        await self.start()

    async def wait_for(
        self,
        kind: str,
        *,
        task: str | None = None,
        node: str | None = None,
        epoch: int | None = None,
        count: int = 1,
        within: float = 30,
    ) -> Entry:
        """Return the `count`-th entry of this kind, as soon as it exists. Entries of the past count.

        `kind` is a message's kind, such as `TASK_ACCEPTED`, or a step: `started`, `assigned`, `committed`,
        `dropped`, `held`, `suppressed`, `malformed`, `cancel_requested`, `cancel_ignored`, `idle`,
        `loop_ended`, `task_ended`, `stopped` or `killed`. Raise TimeoutError after `within` seconds.
        """
        matches = about(kind, task, node, epoch)
        what = f"{kind} (task={task}, node={node}, epoch={epoch})"
        return await self._config.journal.wait_for(matches, count=count, within=within, what=what)

    async def release(self) -> None:
        """Send the events that `Misbehavior.hold` kept back, and hold no further ones."""
        self.misbehavior.hold = ()
        await self._running_session().sender.release()

    async def send_malformed(
        self, kind: Malformed, topic: str | None = None, like: Entry | None = None
    ) -> None:
        """Send a malformed record to a topic; by default to the status topic of the worker's first role.

        `like` is a sent entry whose task, node, epoch and key the record repeats.
        """
        chosen = topic or self.settings.topic_status(self.roles[0])
        await self._running_session().sender.malformed(kind, chosen, like.message if like else None)

    async def send_raw(self, topic: str, value: bytes | None, key: str | None = None) -> None:
        """Send any bytes to any topic, for example a record sent before."""
        await self._running_session().sender.raw(topic, value, key)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._after_crash()
        await self.stop()

    def _running_session(self) -> Session:
        if self._session is None:
            raise RuntimeError(f"the external worker {self.worker_id} is not running; start it first")
        return self._session

    async def _after_crash(self) -> None:
        """Wait for the end of a crash that has begun."""
        crashing, self._crashing = self._crashing, None
        if crashing is not None:
            await crashing

    def _crash(self) -> None:
        """Begin a crash that a misbehavior demands, from inside the worker."""
        self._crashing = asyncio.create_task(self.kill())


@dataclass(kw_only=True)
class WorkerConfig:
    """Identity, configuration and records of a worker."""

    worker_id: str
    roles: list[str]
    handlers: Mapping[str, Handler]
    db: Any
    bootstrap: str
    settings: ExternalSettings
    misbehavior: Misbehavior
    clock: Clock
    producer_options: Mapping[str, Any] = field(default_factory=dict)
    consumer_options: Mapping[str, Any] = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)
    runs: list[Run] = field(default_factory=list)


class Seen:
    """The `dedup_id`s of recent commands, bounded in number and age."""

    def __init__(self, size: int, ttl_ms: int) -> None:
        self._size = size
        self._ttl_ms = ttl_ms
        self._ids: OrderedDict[str, int] = OrderedDict()

    def add(self, dedup_id: str, now_ms: int) -> bool:
        """Record an id, and return whether it is new."""
        while self._ids and next(iter(self._ids.values())) <= now_ms - self._ttl_ms:
            self._ids.popitem(last=False)
        if dedup_id in self._ids:
            return False
        self._ids[dedup_id] = now_ms
        if len(self._ids) > self._size:
            self._ids.popitem(last=False)
        return True


class Admission:
    """The checks of a command before its payload is read."""

    def __init__(self, settings: ExternalSettings) -> None:
        self._seen = Seen(settings.dedup_cache_size, settings.dedup_ttl_ms)

    def refusal(self, command: Incoming, role: str, now_ms: int) -> str | None:
        """Return why the worker ignores a command of a role's topic, or None. Remembers every `dedup_id`."""
        if not self._seen.add(command.dedup_id, now_ms):
            return "duplicate"
        if (command.msg_type, command.role) != ("cmd", "coordinator"):
            return "not_a_command"
        if command.step_type != role:
            return "other_role"
        if command.payload.get("cmd") not in ("TASK_START", "TASK_CANCEL"):
            return "unknown_command"
        return None


logger = logging.getLogger(__name__)

STOP_SEC = 5.0
"""How long a stopping worker waits for a handler that suppresses its cancellation, and for an unreachable broker."""


class Session:
    """A running worker. A restart is a new session with the same `WorkerConfig`."""

    def __init__(self, config: WorkerConfig, crash: Callable[[], None]) -> None:
        self.held: Run | None = None
        """The run that the worker executes, or restored after its start."""
        self.busy = False
        self.commands: dict[str, Consumer] = {}
        self._config = config
        self._crash = crash
        self._crash_due = False
        self._consumers: list[Consumer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission = Admission(config.settings)
        self._messages = MessageBuilder(
            config.worker_id, config.settings, config.clock, lambda: config.misbehavior.epoch_shift
        )
        self._store = Store(config.db, config.worker_id, config.clock, config.misbehavior)
        self.sender = Sender(None, config.journal, config.misbehavior, config.clock, crash)

    async def start(self) -> None:
        """Start as the protocol describes: state, WORKER_ONLINE, and only then the consumers."""
        config = self._config
        await self._store.ensure_indexes()
        self.sender.producer = await open_producer(config.bootstrap, config.producer_options)
        await self._restore()
        resume = self.held.stored() if self.held else None
        await self.sender.send(self._messages.online(config.roles, resume, first=True))
        for role in config.roles:
            await self._listen_for_commands(role)
        await self._listen(config.settings.topic_query, "workers.query.v1", self._on_query)
        group = f"workers.signals.{config.worker_id}"
        await self._listen(config.settings.topic_signals, group, self._on_signal)
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
                await self.sender.send(self._messages.offline())
        except Exception:
            logger.exception("WORKER_OFFLINE of %s was not sent", self._config.worker_id)
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
        if run.step_type in self._config.roles:
            self.held = run
        else:
            await self._store.store_run(None)

    async def _listen_for_commands(self, role: str) -> None:
        group = f"workers.{role}.v1"
        if self._config.misbehavior.second_owner:
            group = f"{group}.{self._config.worker_id}"

        async def handle(record: Incoming) -> None:
            await self._on_command(record, role)

        self.commands[role] = await self._listen(self._config.settings.topic_cmd(role), group, handle)

    async def _listen(
        self, topic: str, group: str, handle: Callable[[Incoming], Awaitable[None]]
    ) -> Consumer:
        config = self._config
        consumer = Consumer(
            topic,
            group,
            config.bootstrap,
            config.consumer_options,
            lambda partitions: config.journal.note("assigned", partitions),
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
                self._config.journal.note("committed", consumer.topic, message)
                await self._crash_if_due()
        except Exception as error:
            self._config.journal.note("loop_ended", f"{consumer.topic}: {error!r}")
            logger.exception("The loop of %s has ended", consumer.topic)

    async def _on_command(self, command: Incoming, role: str) -> None:
        reason = self._admission.refusal(command, role, self._config.clock.now_ms())
        if reason is None and command.payload["cmd"] == "TASK_CANCEL":
            await self._cancel(command, "coordinator_cmd", CancelPayload.model_validate(command.payload))
            return
        if reason is None and self.busy:
            reason = "busy"
        if reason is None and self._config.misbehavior.drop_commands > 0:
            self._config.misbehavior.drop_commands -= 1
            reason = "misbehavior"
        if reason is None:
            await self._accept(command, StartPayload.model_validate(command.payload))
        else:
            self._config.journal.note("dropped", reason, command)

    async def _accept(self, command: Incoming, start: StartPayload) -> None:
        run = Run.accepted(command, start, self._config.clock.now_ms())
        self.busy, self.held = True, run
        self._config.runs.append(run)
        await self._store.store_run(run)
        await self.sender.event(self._messages.accepted(run))
        if not self._config.misbehavior.never_pause:
            for consumer in self.commands.values():
                consumer.pause()
        crash = self._config.misbehavior.crash_after_accepted
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
            chosen = self._config.misbehavior.heartbeats_on or role
            await self.sender.event(self._messages.heartbeat(self.held, chosen))
            await self._config.clock.sleep(self._config.settings.hb_interval_sec)

    async def _execute(self, run: Run) -> None:
        config = self._config
        context = RunContext(run, config.worker_id, self._store, config.clock)
        pipeline = Pipeline(
            run,
            config.handlers.get(run.step_type),
            context,
            store=self._store,
            sender=self.sender,
            messages=self._messages,
            misbehavior=config.misbehavior,
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
            self._config.journal.note("idle", run.outcome or "", run)

    async def _cancel(self, message: Incoming, reason: str, payload: Any) -> None:
        """Set the cancel flag if task, node and epoch are those of the held run."""
        run = self.held
        if run is None or (run.task_id, run.node_id, run.attempt_epoch) != (
            message.task_id,
            message.node_id,
            message.attempt_epoch,
        ):
            self._config.journal.note("cancel_ignored", reason, message)
        elif run.request_cancel(reason, getattr(payload, "deadline_ts_ms", None)):
            await self._store.store_run(run)
            self._config.journal.note("cancel_requested", reason, run)

    async def _on_signal(self, signal: Incoming) -> None:
        if signal.target_worker_id not in (None, self._config.worker_id):
            return
        if (signal.payload.get("sig") or "").upper() == "CANCEL":
            payload = SignalPayload.model_validate(signal.payload)
            await self._cancel(signal, payload.reason, payload)

    async def _on_query(self, query: Incoming) -> None:
        if query.step_type not in self._config.roles:
            return
        held = self.held if self.held and self.held.is_node(query.task_id, query.node_id) else None
        complete = held is None and await self._store.is_complete(query.task_id, query.node_id)
        await self.sender.send(self._messages.snapshot(query, held, complete=complete))

    async def _announce(self) -> None:
        while True:
            await self._config.clock.sleep(self._config.settings.announce_interval_sec)
            await self.sender.send(self._messages.online(self._config.roles, None, first=False))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Record the failure of a background task, such as a heartbeat that the broker refused (H33)."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._config.journal.note("task_ended", repr(error))
            logger.warning("A background task of the external worker has ended: %s", error)
