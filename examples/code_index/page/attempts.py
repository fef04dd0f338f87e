"""What became of each attempt, put together from events, the task's document and stored batches. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from code_index.documents import ACCEPTED, ENDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from code_index.page.data import Run


class End(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """Its worker fell silent."""
    HANDED_OVER = "handed over"
    """Its worker was stopped gently."""
    CANCELLED = "cancelled"


_ENDS = dict(zip(ENDS, (End.DONE, End.FAILED, End.CANCELLED), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRun:
    """One attempt. Moments are seconds since the task's start."""

    node: str
    epoch: int
    worker: str
    began: float
    ended: float
    """Of a lost attempt: the last that was seen of it."""
    end: End
    reason: str = ""
    stored: tuple[float, ...] = ()
    """When each of its batches was stored."""
    files: int = 0

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended - self.began


@dataclass(slots=True, kw_only=True)
class _Traces:
    """What is known of one attempt."""

    worker: str = ""
    began: float | None = None
    ended: float | None = None
    end: End | None = None
    reason: str = ""
    stored: list[float] = field(default_factory=list)
    files: int = 0


def attempts_of(run: Run) -> list[AttemptRun]:
    """Every attempt of every node, in the order of the graph and of epochs."""
    nodes = run.documents.task["graph"]["nodes"]
    traces = {
        (node["node_id"], epoch): _Traces() for node in nodes for epoch in range(1, node["attempt_epoch"] + 1)
    }
    _trace_batches(run, traces)
    _trace_events(run, traces)
    for node in nodes:
        _trace_last(run, node, traces[node["node_id"], node["attempt_epoch"]])
    _trace_kill(run, traces)
    return [*_completed(traces)]


def _trace_batches(run: Run, traces: dict[tuple[str, int], _Traces]) -> None:
    for batch in sorted(run.documents.batches, key=lambda one: one.stored_at):
        known = traces[batch.node, batch.epoch]
        known.worker = batch.worker
        known.stored.append(run.since_start(batch.stored_at))
        known.files += batch.files


def _trace_events(run: Run, traces: dict[tuple[str, int], _Traces]) -> None:
    for event in run.documents.events:
        known, payload = traces[event["node_id"], event["attempt_epoch"]], event["payload"]
        at = run.since_start(datetime.fromtimestamp(event["ts_ms"] / 1000, UTC))
        known.worker = payload["worker_id"]
        if payload["kind"] == ACCEPTED:
            known.began = at
        if payload["kind"] not in _ENDS:
            continue
        known.ended = at
        known.reason = payload.get("reason_code") or ""
        known.end = _ENDS[payload["kind"]]
        if known.reason == "worker_shutdown":
            known.end = End.HANDED_OVER


def _trace_last(run: Run, node: Mapping[str, Any], known: _Traces) -> None:
    """The task's document knows the last attempt of each node."""
    known.worker = known.worker or node["lease"]["worker_id"]
    if known.began is None:
        known.began = run.since_start(node["started_at"])
    if known.end is None and node["status"] == "finished":
        known.end, known.ended = End.DONE, run.since_start(node["finished_at"])


def _trace_kill(run: Run, traces: dict[tuple[str, int], _Traces]) -> None:
    if run.incident is None:
        return
    known = traces.get((run.incident.node, run.incident.attempt))
    if known is not None and known.end is None:
        known.worker = known.worker or run.incident.worker
        if known.began is None:
            known.began = run.since_start(run.incident.began)
        known.ended = run.since_start(run.incident.killed_at)
        known.reason = "SIGKILL"


def _completed(traces: Mapping[tuple[str, int], _Traces]) -> Iterator[AttemptRun]:
    """Attempts with what is missing filled in as well as can be: from their batches, or from the attempt before."""
    before: dict[str, float] = {}
    for (node, epoch), known in traces.items():
        moments = [moment for moment in (known.began, *known.stored, known.ended) if moment is not None]
        began = min(moments, default=before.get(node, 0.0))
        ended = known.ended if known.ended is not None else max(moments, default=began)
        before[node] = max(began, ended)
        yield AttemptRun(
            node=node,
            epoch=epoch,
            worker=known.worker or "unknown",
            began=began,
            ended=before[node],
            end=known.end or End.LOST,
            reason=known.reason,
            stored=tuple(known.stored),
            files=known.files,
        )
