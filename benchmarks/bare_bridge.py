"""The baseline for external workers: a bare loop on Kafka and MongoDB, without Temporal and without FlowKit's code.

It runs the nodes of a chain one after another. For each node it sends the same command, waits for the same status
events, and makes the same MongoDB writes as a bridge. Like the bridge, it writes independent documents concurrently.
It commits the offsets of a poll before the next one, as the workers of the protocol do; a bridge commits while it
processes the next events.
`python -m benchmarks.bare_bridge DATABASE BROKERS` runs chains on request, in a process of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from motor.motor_asyncio import AsyncIOMotorClient

from benchmarks.baseline import Collections, insert_once
from benchmarks.served import serve

ROLE = "bare"
DISPATCHES = "bare_dispatches"
"""The collection of its records. The bridge, which uses the same database, would not understand them."""


class BareBridge:
    """Runs chains of nodes on external workers of one role."""

    ROLE, DISPATCHES = ROLE, DISPATCHES

    def __init__(self, db: Any, bootstrap: str) -> None:
        self._db = Collections(db)
        self._bootstrap = bootstrap
        self._producer: Any = None
        self._consumer: Any = None

    async def start(self) -> None:
        """Connect. The topics exist already."""
        self._producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap, enable_idempotence=True, acks="all", linger_ms=0
        )
        self._consumer = AIOKafkaConsumer(
            f"status.{self.ROLE}.v1",
            bootstrap_servers=self._bootstrap,
            group_id=f"{self.ROLE}-loop",
            enable_auto_commit=False,
            auto_offset_reset="latest",
        )
        await self._producer.start()
        await self._consumer.start()
        await self._consumer.seek_to_end()

    async def stop(self) -> None:
        """Disconnect."""
        await self._consumer.stop()
        await self._producer.stop()

    async def chain(self, nodes: int) -> float:
        """Run a chain and return its duration in seconds."""
        task = str(uuid.uuid4())
        began = time.perf_counter()
        fresh = {"type": self.ROLE, "status": "queued", "attempt_epoch": 0, "stats": {}, "lease": {}}
        graph = {"nodes": [{"node_id": f"n{index}", **fresh} for index in range(nodes)]}
        await self._db.tasks.insert_one({"id": task, "status": "running", "graph": graph})
        for index in range(nodes):
            await self._node(task, index)
        await self._db.tasks.update_one({"id": task}, {"$set": {"status": "finished"}})
        return time.perf_counter() - began

    async def _node(self, task: str, index: int) -> None:
        node, path = f"n{index}", f"graph.nodes.{index}"
        key = {"task_id": task, "node_id": node}
        record = hash_of({"t": task, "n": node, "e": 1})
        await self._db[self.DISPATCHES].insert_one(
            {"_id": record, **key, "attempt_epoch": 1, "state": "open"}
        )
        held = {"id": task, f"{path}.attempt_epoch": {"$lt": 1}}
        running = {f"{path}.status": "running", f"{path}.attempt_epoch": 1, f"{path}.started_at": now()}
        await self._db.tasks.update_one(held, {"$set": running})
        message = json.dumps(command(task, node, self.ROLE)).encode()
        sent = await self._producer.send_and_wait(
            f"cmd.{self.ROLE}.v1", message, key=f"{task}:{node}".encode()
        )
        offset = asyncio.ensure_future(
            self._db[self.DISPATCHES].update_one({"_id": record}, {"$set": {"offset": sent.offset}})
        )
        while not await self._events(key, record, path):
            await self._consumer.commit()
        reported = {"$set": {"state": "reported"}}
        await asyncio.gather(
            self._consumer.commit(), offset, self._db[self.DISPATCHES].update_one({"_id": record}, reported)
        )

    async def _events(self, key: dict[str, Any], record: str, path: str) -> bool:
        """Process one poll. Return whether the node has ended."""
        polled = await self._consumer.getmany(timeout_ms=1_000)
        events = [json.loads(each.value) for some in polled.values() for each in some]
        own = [event for event in events if event["node_id"] == key["node_id"]]
        logged = [event for event in own if event["payload"]["kind"] != "TASK_HEARTBEAT"]
        ended, _ = await asyncio.gather(self._apply(own, key, record, path), self._log(logged))
        return ended

    async def _log(self, events: list[dict[str, Any]]) -> None:
        if events:
            rows = [{**event, "event_hash": event["dedup_id"], "recv": now()} for event in events]
            await self._db.worker_events.insert_many(rows)

    async def _apply(self, events: list[dict[str, Any]], key: dict[str, Any], record: str, path: str) -> bool:
        for event in events:
            kind = event["payload"]["kind"]
            if kind == "TASK_ACCEPTED":
                await self._accepted(event, key, record, path)
            elif kind == "BATCH_OK":
                await self._batch(event, key)
                await self._db[self.DISPATCHES].update_one({"_id": record}, {"$inc": {"batches": 1}})
            elif kind == "TASK_DONE":
                await self._done(event, key, record, path)
                return True
        return False

    async def _accepted(self, event: dict[str, Any], key: dict[str, Any], record: str, path: str) -> None:
        lease = event["payload"]
        await asyncio.gather(
            self._db[self.DISPATCHES].update_one(
                {"_id": record, "state": "open"}, {"$set": {"lease": lease}}
            ),
            self._db.tasks.update_one({"id": key["task_id"]}, {"$set": {f"{path}.lease": lease}}),
        )

    async def _batch(self, event: dict[str, Any], key: dict[str, Any]) -> None:
        batch = {**key, "batch_uid": event["payload"]["batch_uid"]}
        metrics = event["payload"]["metrics"]
        partial = {**batch, "status": "partial", "meta": metrics, "created_at": now()}
        await asyncio.gather(
            insert_once(self._db.metrics_raw, {**batch, "metrics": metrics}),
            insert_once(self._db.artifacts, partial),
        )

    async def _done(self, event: dict[str, Any], key: dict[str, Any], record: str, path: str) -> None:
        outcome = {"state": "ended", "outcome": event["payload"]}
        await self._db[self.DISPATCHES].find_one_and_update(
            {"_id": record, "state": "open"}, {"$set": outcome}
        )
        marker = {**key, "batch_uid": {"$exists": False}}
        finished = {f"{path}.status": "finished", f"{path}.finished_at": now()}
        await asyncio.gather(
            self._db.artifacts.update_one(marker, {"$set": {"status": "complete"}}, upsert=True),
            self._db.tasks.update_one({"id": key["task_id"]}, {"$set": finished}),
        )


def command(task: str, node: str, role: str) -> dict[str, Any]:
    """Return the command that starts the first attempt of a node."""
    identity = {"cmd": "CommandKind.TASK_START", "task_id": task, "node_id": node, "epoch": 1}
    payload = {"cmd": "TASK_START", "input_ref": None, "input_inline": None, "batching": None}
    return {
        "v": 1,
        "msg_type": "cmd",
        "role": "coordinator",
        "corr_id": str(uuid.uuid4()),
        "dedup_id": hash_of(identity),
        "task_id": task,
        "node_id": node,
        "step_type": role,
        "attempt_epoch": 1,
        "ts_ms": int(time.time() * 1000),
        "payload": {**payload, "cancel_token": str(uuid.uuid4())},
        "target_worker_id": None,
    }


def hash_of(value: Any) -> str:
    """Return the hash that the protocol of external workers uses."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def now() -> datetime:
    """Return the time."""
    return datetime.now(UTC)


async def main(database: str, brokers: str) -> None:
    """Run chains on request."""
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    bare = BareBridge(mongo[database], brokers)
    await bare.start()
    try:
        await serve(lambda request: bare.chain(request["nodes"]))
    finally:
        await bare.stop()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
