"""The documented events of executions, records of Kafka, and a store that refuses one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokafka.structs import ConsumerRecord

from flowkit.errors import StoreRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

REQUESTED: dict[str, Any] = {
    "event_id": "6d0f0a55-1c2e-4a0e-9a57-5b0e7c1f9a11",
    "event_type": "execution_requested",
    "event_version": "1.0",
    "timestamp": "2026-05-04T09:30:00Z",
    "aggregate_id": "ex-7041",
    "metadata": {
        "service_name": "api",
        "service_version": "1.0.0",
        "user_id": "u-dora",
        "environment": "test",
    },
    "execution_id": "ex-7041",
    "script": "print(6*7)",
    "language": "python",
    "language_version": "3.11",
    "runtime_image": "python:3.11-slim",
    "runtime_command": ["python", "/scripts/main.py"],
    "runtime_filename": "main.py",
    "timeout_seconds": 60,
    "cpu_limit": "1000m",
    "memory_limit": "128Mi",
    "cpu_request": "500m",
    "memory_request": "64Mi",
    "priority": "high",
}


def requested(execution_id: str, **changed: Any) -> dict[str, Any]:
    """Return the event `execution_requested` for an execution."""
    return {**REQUESTED, "execution_id": execution_id, "aggregate_id": execution_id, **changed}


def record(
    topic: str, offset: int, *, timestamp: int = 0, value: bytes = b""
) -> ConsumerRecord[bytes, bytes]:
    """Return a record of partition 0 without a key."""
    return ConsumerRecord(topic, 0, offset, timestamp, 0, None, value, None, 0, len(value), ())


def refuse_inserts(monkeypatch: pytest.MonkeyPatch, store: Any, execution_id: str) -> None:
    """Let MongoDB refuse each group of requests that contains this one."""
    insert = store.insert

    async def refuse(items: Sequence[dict[str, Any]]) -> set[str]:
        if execution_id in {item["_id"] for item in items}:
            raise StoreRefused("MongoDB cannot store this value")
        inserted: set[str] = await insert(items)
        return inserted

    monkeypatch.setattr(store, "insert", refuse)
