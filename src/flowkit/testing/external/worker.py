"""An external worker for tests: a second, independent implementation of the worker protocol."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING, Any, Self

from flowkit.testing.external.handlers import as_handler
from flowkit.testing.external.journal import Entry, about
from flowkit.testing.external.life import Life
from flowkit.testing.external.misbehavior import Misbehavior
from flowkit.testing.external.parts import Parts
from flowkit.testing.external.settings import Clock, ExternalSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.testing.external.handlers import AnyHandler
    from flowkit.testing.external.malformed import Malformed
    from flowkit.testing.external.runs import Run


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
        self._parts = Parts(
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
        self._life: Life | None = None
        self._crashing: asyncio.Task[None] | None = None

    @property
    def worker_id(self) -> str:
        """The id of the worker, which a restart keeps."""
        return self._parts.worker_id

    @property
    def roles(self) -> list[str]:
        """The roles that the worker serves."""
        return list(self._parts.roles)

    @property
    def settings(self) -> ExternalSettings:
        """The settings of the worker."""
        return self._parts.settings

    @property
    def misbehavior(self) -> Misbehavior:
        """The switches for misbehavior. A change takes effect at once."""
        return self._parts.misbehavior

    @property
    def alive(self) -> bool:
        """Whether the worker runs: it was started, and neither stopped nor killed."""
        return self._life is not None

    @property
    def busy(self) -> bool:
        """Whether the worker executes a run."""
        return self._life is not None and self._life.busy

    @property
    def held(self) -> Run | None:
        """The run that the worker executes, or restored after a restart."""
        return self._life.held if self._life else None

    @property
    def runs(self) -> list[Run]:
        """All runs that the worker accepted, across its restarts."""
        return list(self._parts.runs)

    @property
    def entries(self) -> list[Entry]:
        """Everything that happened, in order: acknowledged records and steps of the worker."""
        return list(self._parts.journal.entries)

    @property
    def sent(self) -> list[Entry]:
        """The records that the broker acknowledged, in order."""
        return [entry for entry in self._parts.journal.entries if entry.offset >= 0]

    def sent_for(self, node: str, *kinds: str) -> list[Entry]:
        """Return the records sent for a node, of these kinds or of all kinds."""
        return [each for each in self.sent if each.node_id == node and (not kinds or each.kind in kinds)]

    def partitions(self, role: str) -> list[int]:
        """Return the partitions of the role's command topic that the worker currently reads."""
        return self._living().commands[role].partitions()

    def paused(self, role: str) -> bool:
        """Whether the worker has paused reading the commands of a role."""
        return self._living().commands[role].paused

    async def start(self) -> None:
        """Start the worker. Returns when it receives everything that is sent from now on."""
        await self._after_crash()
        if self._life is not None:
            raise RuntimeError(f"the external worker {self.worker_id} is already running")
        self._life = Life(self._parts, self._crash)
        try:
            await self._life.start()
            await self._life.ready()
        except BaseException:
            await self.kill()
            raise
        self._parts.journal.note("started")

    async def stop(self) -> None:
        """Stop gracefully, with WORKER_OFFLINE. A current run ends without a terminal event."""
        life, self._life = self._life, None
        if life is not None:
            await life.stop()
            self._parts.journal.note("stopped")

    async def kill(self) -> None:
        """Crash: nothing is sent or written, and connections are dropped without leaving the consumer groups."""
        life, self._life = self._life, None
        if life is not None:
            await life.kill()
            self._parts.journal.note("killed")

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

        `kind` is a message's kind, such as `TASK_ACCEPTED`, or a step: `started`, `assigned`, `committed`, `dropped`, `held`,
        `suppressed`, `malformed`, `cancel_requested`, `cancel_ignored`, `idle`, `loop_ended`, `task_ended`, `stopped`
        or `killed`. Raise TimeoutError after `within` seconds.
        """
        matches = about(kind, task, node, epoch)
        what = f"{kind} (task={task}, node={node}, epoch={epoch})"
        return await self._parts.journal.wait_for(matches, count=count, within=within, what=what)

    async def release(self) -> None:
        """Send the events that `Misbehavior.hold` kept back, and hold no further ones."""
        self.misbehavior.hold = ()
        await self._living().sender.release()

    async def send_malformed(
        self, kind: Malformed, topic: str | None = None, like: Entry | None = None
    ) -> None:
        """Send a malformed record to a topic; by default to the status topic of the worker's first role.

        `like` is a sent entry whose task, node, epoch and key the record repeats.
        """
        chosen = topic or self.settings.topic_status(self.roles[0])
        await self._living().sender.malformed(kind, chosen, like.message if like else None)

    async def send_raw(self, topic: str, value: bytes | None, key: str | None = None) -> None:
        """Send any bytes to any topic, for example a record sent before."""
        await self._living().sender.raw(topic, value, key)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._after_crash()
        await self.stop()

    def _living(self) -> Life:
        if self._life is None:
            raise RuntimeError(f"the external worker {self.worker_id} is not running; start it first")
        return self._life

    async def _after_crash(self) -> None:
        """Wait for the end of a crash that has begun."""
        crashing, self._crashing = self._crashing, None
        if crashing is not None:
            await crashing

    def _crash(self) -> None:
        """Begin a crash that a misbehavior demands, from inside the worker."""
        self._crashing = asyncio.create_task(self.kill())
