"""Reconstruct each attempt from events, the task document and stored batches. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from code_index.documents import ACCEPTED, ENDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from code_index.page.data import DemoRun


class AttemptEnd(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """Its worker disappeared."""
    HANDED_OVER = "handed over"
    """Its worker shut down."""
    CANCELLED = "cancelled"


_ENDS_OF_SHARDS = {"finished": AttemptEnd.DONE, "failed": AttemptEnd.FAILED}
_ENDS = dict(zip(ENDS, (AttemptEnd.DONE, AttemptEnd.FAILED, AttemptEnd.CANCELLED), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRun:
    """One attempt. Times are seconds since the start of the task."""

    node: str
    epoch: int
    shard: int | None
    """The number of the shard; None for an attempt of the node itself."""
    worker: str
    started: float
    ended: float
    """For a lost attempt, the last sign of it."""
    end: AttemptEnd
    reason: str = ""
    stored: tuple[float, ...] = ()
    """The times at which its batches were stored."""
    files: int = 0

    @property
    def seconds(self) -> float:
        """Duration of the attempt."""
        return self.ended - self.started


@dataclass(slots=True, kw_only=True)
class _AttemptData:
    """The data collected for one attempt."""

    shard: int | None = None
    worker: str = ""
    started: float | None = None
    ended: float | None = None
    end: AttemptEnd | None = None
    reason: str = ""
    stored: list[float] = field(default_factory=list)
    files: int = 0


def build_attempts(run: DemoRun) -> list[AttemptRun]:
    """Return every attempt of every node, in the order of the graph and of epochs."""
    nodes = run.documents.task["graph"]["nodes"]
    data = {
        (node, epoch): _AttemptData() for node, epochs in run.documents.epochs.items() for epoch in epochs
    }
    _add_batches(run, data)
    _add_shards(run, data)
    _add_events(run, data)
    for node in nodes:
        _add_last_attempt(run, node, data[node["node_id"], node["attempt_epoch"]])
    _add_kill(run, data)
    return [*_completed(data)]


def _add_batches(run: DemoRun, data: dict[tuple[str, int], _AttemptData]) -> None:
    for batch in sorted(run.documents.batches, key=lambda one: one.stored_at):
        attempt = data[batch.node, batch.epoch]
        attempt.worker = batch.worker
        attempt.stored.append(run.since_start(batch.stored_at))
        attempt.files += batch.files


def _add_shards(run: DemoRun, data: dict[tuple[str, int], _AttemptData]) -> None:
    for row in run.documents.shards:
        attempt = data[row.node, row.epoch]
        attempt.shard, attempt.worker = row.shard, row.worker
        attempt.started = run.since_start(row.started_at)
        attempt.ended = run.since_start(row.ended_at) if row.ended_at else None
        attempt.end = _ENDS_OF_SHARDS.get(row.status)


def _add_events(run: DemoRun, data: dict[tuple[str, int], _AttemptData]) -> None:
    for event in run.documents.events:
        attempt, payload = data[event["node_id"], event["attempt_epoch"]], event["payload"]
        at = run.since_start(datetime.fromtimestamp(event["ts_ms"] / 1000, UTC))
        attempt.worker = payload["worker_id"]
        if payload["kind"] == ACCEPTED:
            attempt.started = at
        if payload["kind"] not in _ENDS:
            continue
        attempt.ended = at
        attempt.reason = payload.get("reason_code") or ""
        attempt.end = _ENDS[payload["kind"]]
        if attempt.reason == "worker_shutdown":
            attempt.end = AttemptEnd.HANDED_OVER


def _add_last_attempt(run: DemoRun, node: Mapping[str, Any], attempt: _AttemptData) -> None:
    """Complete the last attempt of a node from the task document."""
    attempt.worker = attempt.worker or node["lease"]["worker_id"]
    if attempt.started is None:
        attempt.started = run.since_start(node["started_at"])
    if attempt.end is None and node["status"] == "finished":
        attempt.end, attempt.ended = AttemptEnd.DONE, run.since_start(node["finished_at"])


def _add_kill(run: DemoRun, data: dict[tuple[str, int], _AttemptData]) -> None:
    if run.incident is None:
        return
    attempt = data[run.incident.lost.node, run.incident.lost.epoch]
    if attempt.end is None:
        attempt.ended = run.since_start(run.incident.killed_at)
        attempt.reason = "SIGKILL"


def _completed(data: Mapping[tuple[str, int], _AttemptData]) -> Iterator[AttemptRun]:
    """Yield the attempts. Missing times come from their batches, or from the attempt before."""
    before: dict[str, float] = {}
    for (node, epoch), attempt in data.items():
        times = [time for time in (attempt.started, *attempt.stored, attempt.ended) if time is not None]
        started = min(times, default=before.get(node, 0.0))
        ended = attempt.ended if attempt.ended is not None else max(times, default=started)
        before[node] = max(started, ended)
        yield AttemptRun(
            node=node,
            epoch=epoch,
            shard=attempt.shard,
            worker=attempt.worker or "unknown",
            started=started,
            ended=before[node],
            end=attempt.end or AttemptEnd.LOST,
            reason=attempt.reason,
            stored=tuple(attempt.stored),
            files=attempt.files,
        )


def running_seconds(attempts: Iterable[AttemptRun]) -> float:
    """Return how long at least one of the attempts ran."""
    seconds, until = 0.0, 0.0
    for attempt in sorted(attempts, key=lambda one: one.started):
        seconds += max(0.0, attempt.ended - max(attempt.started, until))
        until = max(until, attempt.ended)
    return seconds
