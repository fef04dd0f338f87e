"""Converts status events to rows of `worker_events`, the log of attempts for operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.adapters.worker_events import WorkerEvent
from flowkit.limits import LAST_ERROR_CHARS
from flowkit.protocol.kinds import EventKind
from flowkit.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowkit.bridge.rules.reading import StatusEvent

_LARGE = frozenset({"metrics", "artifacts_ref"})
"""Fields that the log leaves out, because they may be large. They are in `metrics_raw` and `artifacts`."""


def worker_events(events: Iterable[StatusEvent]) -> list[WorkerEvent]:
    """Return the rows for `events`. Omits heartbeats, which would make up most of the log."""
    return [_row(event) for event in events if event.event.kind is not EventKind.TASK_HEARTBEAT]


def _row(event: StatusEvent) -> WorkerEvent:
    envelope = event.envelope
    return WorkerEvent(
        task_id=envelope.task_id,
        node_id=envelope.node_id,
        step_type=clean(envelope.step_type[:100]),
        epoch=envelope.attempt_epoch,
        at=envelope.ts_ms / 1000,
        event_hash=clean(envelope.dedup_id[:200]),
        payload=_payload(event),
    )


def _payload(event: StatusEvent) -> dict[str, Any]:
    fields = event.event.model_dump(mode="json", exclude=set(_LARGE))
    return {name: _short(value) for name, value in fields.items()}


def _short(value: Any) -> Any:
    return clean(value[:LAST_ERROR_CHARS]) if isinstance(value, str) else value
