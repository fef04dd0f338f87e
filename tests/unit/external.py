"""Runs an external worker's pipeline without Kafka: on a database in memory, with a producer that only records."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.unit.event_loop import let_other_tasks_run

from flowkit.testing import memory_database
from flowkit.testing.external.handlers import RunContext, as_handler
from flowkit.testing.external.journal import Entry, Journal
from flowkit.testing.external.kafka import Sender
from flowkit.testing.external.messages import MessageBuilder
from flowkit.testing.external.misbehavior import Misbehavior
from flowkit.testing.external.pipeline import Pipeline
from flowkit.testing.external.runs import Run
from flowkit.testing.external.settings import Clock, ExternalSettings
from flowkit.testing.external.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable


class NoWaiting(Clock):
    """A clock whose sleeps end at once. `between` runs instead of each, with its number."""

    def __init__(self, between: Callable[[int], Any] | None = None) -> None:
        self.sleeps: list[float] = []
        self._between = between

    async def sleep(self, seconds: float) -> None:
        """Record the time, and let other tasks and the test act."""
        self.sleeps.append(seconds)
        await let_other_tasks_run()
        if self._between is not None:
            await self._between(len(self.sleeps))


class Recorder:
    """A producer that acknowledges every record."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes | None, bytes | None]] = []

    async def send_and_wait(self, topic: str, value: bytes | None, key: bytes | None) -> Any:
        """Record and acknowledge."""
        self.records.append((topic, value, key))
        return SimpleNamespace(partition=0, offset=len(self.records) - 1)


def run_of(
    inline: dict[str, Any] | None = None, *, task: str = "t", node: str = "n", role: str = "indexer"
) -> Run:
    """A run in progress."""
    return Run(
        task_id=task,
        node_id=node,
        step_type=role,
        attempt_epoch=1,
        lease_id="lease",
        cancel_token="token",
        started_at_ms=0,
        state="running",
        checkpoint={},
        input_inline=inline,
    )


class Bench:
    """The parts of a worker around one pipeline."""

    def __init__(
        self, misbehavior: Misbehavior | None = None, clock: Clock | None = None, db: Any = None
    ) -> None:
        self.misbehavior = misbehavior or Misbehavior()
        self.clock = clock or NoWaiting()
        self.db: Any = db or memory_database()
        self.settings = ExternalSettings()
        self.journal = Journal()
        self.producer = Recorder()
        self.store = Store(self.db, "w-1", self.clock, self.misbehavior)
        self.messages = MessageBuilder("w-1", self.settings, self.clock, lambda: self.misbehavior.epoch_shift)
        self.sender = Sender(self.producer, self.journal, self.misbehavior, self.clock, lambda: None)

    async def execute(self, handler: Any, run: Run | None = None) -> list[Entry]:
        """Execute a run, and return what it sent."""
        chosen = run or run_of()
        pipeline = Pipeline(
            chosen,
            None if handler is None else as_handler(handler),
            RunContext(chosen, "w-1", self.store, self.clock),
            store=self.store,
            sender=self.sender,
            messages=self.messages,
            misbehavior=self.misbehavior,
        )
        await pipeline.execute()
        return self.sent

    @property
    def sent(self) -> list[Entry]:
        """The acknowledged records."""
        return [entry for entry in self.journal.entries if entry.offset >= 0]

    @property
    def kinds(self) -> list[str]:
        """The kinds of the acknowledged records."""
        return [entry.kind for entry in self.sent]

    async def partial(self, node: str, uid: str, meta: dict[str, Any]) -> None:
        """Store a batch of another node, as an engine does."""
        document = {"task_id": "t", "node_id": node, "batch_uid": uid, "status": "partial"}
        await self.db.artifacts.insert_one({**document, "meta": meta, "created_at": self.clock.now()})

    async def complete(self, node: str) -> None:
        """Mark another node as complete."""
        await self.db.artifacts.insert_one(
            {"task_id": "t", "node_id": node, "status": "complete", "meta": {}}
        )


def values(bench: Bench) -> list[dict[str, Any]]:
    """The messages that the producer received."""
    return [json.loads(value) for _, value, _ in bench.producer.records if value]
