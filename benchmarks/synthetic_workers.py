"""The events of many external workers from one producer, written from the worker protocol."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

if TYPE_CHECKING:
    from collections.abc import Iterable

_LEASE_MS = 60_000
_HEARTBEAT_SEC = 15.0


class SyntheticWorkers:
    """Accepts every command of a role as a worker of its own, and sends further events on request."""

    def __init__(self, bootstrap: str, role: str) -> None:
        self._bootstrap = bootstrap
        self._topic = f"status.{role}.v1"
        self._role = role
        self._runs: list[dict[str, Any]] = []
        self._beats = 0
        self.sent = 0
        """Number of events sent so far."""
        self._producer: Any = None
        self._consumer: Any = None
        self._background: list[asyncio.Task[None]] = []
        self._watch: Any = None

    async def __aenter__(self) -> Self:
        """Connect, and start to accept commands."""
        self._producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap, enable_idempotence=True, linger_ms=5
        )
        group = f"workers.{self._role}.v1"
        self._consumer = AIOKafkaConsumer(
            f"cmd.{self._role}.v1",
            bootstrap_servers=self._bootstrap,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        await self._producer.start()
        await self._consumer.start()
        self._background = [asyncio.create_task(self._accept()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._watch is not None:
            await self._watch.stop()
        await self._consumer.stop()
        await self._producer.stop()

    async def _accept(self) -> None:
        while True:
            polled = await self._consumer.getmany(timeout_ms=500)
            commands = [json.loads(record.value) for records in polled.values() for record in records]
            runs = [command for command in commands if command["payload"].get("cmd") == "TASK_START"]
            for run in runs:
                run["worker_id"], run["lease_id"] = (
                    f"w-{run['node_id']}-{run['task_id'][:8]}",
                    str(uuid.uuid4()),
                )
                self._runs.append(run)
            await self._send(self._event(run, "TASK_ACCEPTED", "acc", {}, self._lease(run)) for run in runs)
            await self._consumer.commit()

    async def _beat(self) -> None:
        """Keep the leases of all runs."""
        while True:
            await asyncio.sleep(_HEARTBEAT_SEC)
            await self.heartbeats(1)

    async def heartbeats(self, count: int) -> None:
        """Send heartbeats of every run."""
        for _ in range(count):
            self._beats += 1
            await self._send(
                self._event(run, "TASK_HEARTBEAT", "hb", {"t": self._beats}, self._lease(run))
                for run in self._runs
            )

    async def batches(self, count: int) -> None:
        """Send the batches of every run."""
        for number in range(count):
            await self._send(self._batch(run, f"b{number}", number) for run in self._runs)

    async def done(self) -> None:
        """End every run."""
        runs, self._runs = self._runs, []
        await self._send(self._done(run) for run in runs)

    async def unread(self) -> int:
        """Return the number of events that the bridge has not committed."""
        if self._watch is None:
            self._watch = await self._open_watch()
        places = [*self._watch.assignment()]
        ends = await self._watch.end_offsets(places)
        left = 0
        for place in places:
            left += ends[place] - (await self._watch.committed(place) or 0)
        return left

    async def _open_watch(self) -> Any:
        """Return a client that can read the committed offsets of the bridge's group."""
        watch: Any = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            group_id=await self._status_group(),
            enable_auto_commit=False,
        )
        await watch.start()
        partitions = await self._producer.partitions_for(self._topic)
        watch.assign([TopicPartition(self._topic, number) for number in partitions])
        return watch

    async def _status_group(self) -> str:
        """Return the group in which bridges read the events. Its name contains the id of their database."""
        admin: Any = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await admin.start()
        try:
            groups: list[str] = [group[0] for group in await admin.list_consumer_groups()]
        finally:
            await admin.close()
        return next(
            name for name in groups if name.startswith("flowkit.") and name.endswith(f".status.{self._role}")
        )

    def _batch(self, run: dict[str, Any], uid: str, number: int) -> dict[str, Any]:
        metrics = {"number": number, "items": [f"{uid}-{index}" for index in range(10)]}
        fields = {"batch_uid": uid, "metrics": metrics, "artifacts_ref": {"batch_uid": uid}}
        return self._event(run, "BATCH_OK", "bok", {"uid": uid}, fields)

    def _done(self, run: dict[str, Any]) -> dict[str, Any]:
        ref = {"task_id": run["task_id"], "node_id": run["node_id"]}
        return self._event(
            run, "TASK_DONE", "td", {}, {"metrics": {}, "artifacts_ref": ref, "final_uid": "__final__"}
        )

    def _lease(self, run: dict[str, Any]) -> dict[str, Any]:
        return {"lease_id": run["lease_id"], "lease_deadline_ts_ms": _now_ms() + _LEASE_MS}

    def _event(
        self, run: dict[str, Any], kind: str, what: str, more: dict[str, Any], fields: dict[str, Any]
    ) -> dict[str, Any]:
        epoch = run["attempt_epoch"]
        identity = {what: run["task_id"], "n": run["node_id"], "e": epoch, **more}
        return {
            "v": 1,
            "msg_type": "event",
            "role": "worker",
            "corr_id": run["corr_id"],
            "dedup_id": _hash(identity),
            **{name: run[name] for name in ("task_id", "node_id", "step_type", "attempt_epoch")},
            "ts_ms": _now_ms(),
            "payload": {"kind": kind, "worker_id": run["worker_id"], **fields},
            "target_worker_id": None,
        }

    async def _send(self, events: Iterable[dict[str, Any]]) -> None:
        sending = [
            await self._producer.send(
                self._topic,
                json.dumps(event, separators=(",", ":")).encode(),
                key=f"{event['task_id']}:{event['node_id']}".encode(),
            )
            for event in events
        ]
        self.sent += len(sending)
        if sending:
            await asyncio.gather(*sending)


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def _now_ms() -> int:
    return int(time.time() * 1000)
