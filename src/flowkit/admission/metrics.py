"""The metrics of an admission queue for Prometheus.

The names are those of the admission specification in the conventions of Prometheus. Where two of them mean the same
value, both are there. A gauge is about the whole queue, so each process shows the same value. A counter and a
histogram are about what this process has done, so their sum over all processes is that of the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.responses import Response

from flowkit import reason_codes
from flowkit.admission.models import ENDED, State
from flowkit.errors import StoreUnavailable
from flowkit.models.admission import BY_RANK, RANKS
from flowkit.server.errors import HttpError
from flowkit.server.rights import HttpRoute, OpenAccess

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric
    from starlette.requests import Request

    from flowkit.admission.models import QueueStatus
    from flowkit.admission.queue import AdmissionQueue

PATH: Final = "/metrics"
_REJECTIONS: Final = (reason_codes.QUEUE_FULL, reason_codes.USER_LIMIT, reason_codes.TENANT_LIMIT)
_ENDS: Final = sorted(state.value for state in ENDED - {State.REJECTED})
_DISPATCH_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_WAIT_BUCKETS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1_800, 3_600)


def metrics_route(queue: AdmissionQueue) -> HttpRoute:
    """Return the route `GET /metrics` for a queue. Its response is 503 while MongoDB is unavailable."""
    metrics = QueueMetrics(queue)

    async def respond(request: Request) -> Response:
        try:
            text = await metrics.render()
        except StoreUnavailable as error:
            raise HttpError(503, error.code, "MongoDB is unavailable; try again") from error
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return HttpRoute(PATH, respond, needs=OpenAccess.TOKEN)


class QueueMetrics:
    """The metrics of one queue in this process, in a registry of their own."""

    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue = queue
        self._registry = CollectorRegistry()
        self._dispatch_times = Histogram(
            "coordinator_scheduling_duration_seconds",
            "How long it took to give slots to requests.",
            buckets=_DISPATCH_BUCKETS,
            registry=self._registry,
        )
        self._waits = [
            Histogram(
                f"{name}_wait_time_seconds",
                "How long requests waited for their slots.",
                ["priority"],
                buckets=_WAIT_BUCKETS,
                registry=self._registry,
            )
            for name in ("coordinator_queue", "queue")
        ]
        self._status: QueueStatus | None = None
        self._registry.register(self)

    async def render(self) -> bytes:
        """Return all metrics as text. Raise StoreUnavailable."""
        self._status = await self._queue.status(users=False)
        while self._queue.dispatch_times:
            self._dispatch_times.observe(self._queue.dispatch_times.popleft())
        while self._queue.waits:
            rank, seconds = self._queue.waits.popleft()
            for histogram in self._waits:
                histogram.labels(BY_RANK[rank].value).observe(seconds)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what the status and the counts of the queue say. The registry calls this."""
        if self._status is not None:
            yield from _gauges(self._status)
        yield from _counters(self._queue.counts)


def _gauges(status: QueueStatus) -> Iterator[Metric]:
    yield _gauge("coordinator_executions_active", "Active requests.", status.active)
    yield _gauge("queue_active", "Active requests.", status.active)
    yield _gauge("execution_queue_depth", "Pending requests.", status.pending)
    depth = GaugeMetricFamily("queue_depth", "Pending requests by priority.", labels=["priority"])
    for name in RANKS:
        depth.add_metric([name], status.by_priority.get(name, 0))
    yield depth
    yield _gauge("admission_pending_limit", "Most pending requests.", status.limits.max_pending)
    yield _gauge("admission_active_limit", "Most active requests.", status.limits.max_active)
    oldest = status.oldest_age_sec or 0.0
    yield _gauge("admission_oldest_age_seconds", "How long the oldest pending request has waited.", oldest)
    yield _gauge("admission_in_doubt", "Changes of counters that are not confirmed yet.", status.in_doubt)
    yield _gauge("admission_unsent_events", "Requests with events that are not sent.", status.unsent_events)


def _counters(counts: Counter[tuple[str, str]]) -> Iterator[Metric]:
    queued, popped = counts["submitted", "queued"], counts["popped", ""]
    rejected = {reason: counts["submitted", reason] for reason in _REJECTIONS}
    scheduled = {
        "queued": queued,
        "scheduled": popped,
        reason_codes.QUEUE_FULL: sum(rejected.values()),
        "error": counts["refused", ""],
    }
    yield _counter(
        "coordinator_executions_scheduled", "Requests by what became of them.", "status", scheduled
    )
    yield CounterMetricFamily("queue_enqueue", "Requests that got a place.", value=queued)
    yield CounterMetricFamily("queue_schedule", "Requests that got a slot.", value=popped)
    yield CounterMetricFamily("queue_event_data_lost", "Requests whose data was lost; stays 0.", value=0)
    yield _counter("admission_rejections", "Requests that got no place.", "reason", rejected)
    duplicates = counts["submitted", "duplicate"]
    yield CounterMetricFamily("admission_duplicates", "Requests whose id was known.", value=duplicates)
    ended = {state: counts["ended", state] for state in _ENDS}
    yield _counter("admission_ended", "Requests that have ended, without rejected ones.", "state", ended)
    yield _by_reason(
        counts, "dead_letter", "admission_dead_letters", "Records that went to the dead letters."
    )
    yield _by_reason(counts, "ignored", "admission_ignored_records", "Records without an effect.")
    dropped = counts["dropped", ""]
    yield CounterMetricFamily("admission_dropped_dead_letters", "Dead letters that were lost.", value=dropped)


def _by_reason(counts: Counter[tuple[str, str]], name: str, metric: str, text: str) -> Metric:
    return _counter(
        metric, text, "reason", {reason: n for (each, reason), n in counts.items() if each == name}
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for each, count in values.items():
        family.add_metric([each], count)
    return family
