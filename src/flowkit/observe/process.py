"""What one process measures: its instruments, its health, itself, and Temporal's SDK."""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig

from flowkit.core.instruments import listen
from flowkit.core.version import __version__
from flowkit.local.ports import free_port
from flowkit.observe.recorder import MetricsRecorder, clean_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric
    from temporalio.runtime import LoggingConfig

_logger = logging.getLogger("flowkit.observe")

_LOOPBACK: Final = "127.0.0.1"
_PORT_TRIES: Final = 5
_SDK_TIMEOUT_SEC: Final = 2.0


os.register_at_fork(after_in_child=lambda: listen(None))


class MeasuredProcess:
    """The metrics of this process. Its methods can be called on any thread."""

    def __init__(self, kind: str, queue: str, recorder: MetricsRecorder, *, sdk: bool) -> None:
        self._info = {"kind": kind, "version": __version__, "queue": clean_label(queue)}
        self._registry = CollectorRegistry()
        self._registry.register(recorder)
        ProcessCollector(registry=self._registry)
        self._measures_sdk = sdk
        self._sdk_port: int | None = None
        self._rendering = threading.Lock()
        self._rendered_at = float("-inf")
        """When the latest text was begun, by the monotonic clock."""
        self._text = b""

    @classmethod
    def start(cls, kind: str, queue: str, sdk: bool = True) -> MeasuredProcess:
        """Let the instruments of this process count from now on. In a process that forks from it, they do not."""
        recorder = MetricsRecorder()
        listen(recorder)
        return cls(kind, queue, recorder, sdk=sdk)

    def stop(self) -> None:
        """Let the instruments count no longer."""
        listen(None)

    def create_runtime(self, logging: LoggingConfig | None = None) -> Runtime:
        """Return a runtime for Temporal's SDK whose metrics are among those of this process.

        Give it to `Runtime.set_default`, or to `Client.connect(runtime=…)`. The SDK serves its metrics on a free port
        of loopback, from which `render` reads them. Without such a port, the runtime has no metrics.
        """
        logs = TelemetryConfig.logging if logging is None else logging
        if not self._measures_sdk:
            return Runtime(telemetry=TelemetryConfig(logging=logs))
        for _ in range(_PORT_TRIES):
            port = free_port()
            metrics = PrometheusConfig(
                bind_address=f"{_LOOPBACK}:{port}",
                counters_total_suffix=True,
                unit_suffix=True,
                durations_as_seconds=True,
            )
            telemetry = TelemetryConfig(logging=logs, metrics=metrics, attach_service_name=False)
            with suppress(ValueError):  # another process has taken the port
                runtime = Runtime(telemetry=telemetry)
                self._sdk_port = port
                return runtime
        _logger.warning("no port is free for the metrics of Temporal's SDK, so /metrics lacks them")
        return Runtime(telemetry=TelemetryConfig(logging=logs))

    def render(self, health: Mapping[str, Any] | None = None) -> bytes:
        """Return all metrics in Prometheus' text format. `health` is that of the process, as JSON values.

        Calls that come while another one is in progress share the next text, so that many readers cost as much as one.
        """
        asked_at = time.monotonic()
        with self._rendering:
            if self._rendered_at < asked_at:
                self._rendered_at = time.monotonic()
                registry = CollectorRegistry()
                registry.register(_Condition(self._info, health))
                self._text = generate_latest(registry) + generate_latest(self._registry) + self._read_sdk()
            return self._text

    def _read_sdk(self) -> bytes:
        if self._sdk_port is None:
            return b""
        connection = http.client.HTTPConnection(_LOOPBACK, self._sdk_port, timeout=_SDK_TIMEOUT_SEC)
        try:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            return response.read() if response.status == http.HTTPStatus.OK else b""
        except (OSError, http.client.HTTPException):
            return b""
        finally:
            connection.close()


class _Condition(Collector):
    """What the process is, and its health at this moment."""

    def __init__(self, info: dict[str, str], health: Mapping[str, Any] | None) -> None:
        self._info = info
        self._health = health

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each value."""
        info = GaugeMetricFamily("flowkit_info", "What this process is; always 1.", labels=[*self._info])
        info.add_metric([*self._info.values()], 1)
        yield info
        if self._health is None:
            return
        yield GaugeMetricFamily(
            "flowkit_healthy", "1 if this process is healthy, else 0.", value=self._health["ok"]
        )
        loops: Sequence[Mapping[str, Any]] = self._health.get("loops") or ()
        running = GaugeMetricFamily(
            "flowkit_loop_running", "1 while a background loop of this process runs, else 0.", labels=["loop"]
        )
        succeeded = GaugeMetricFamily(
            "flowkit_loop_last_success_timestamp_seconds",
            "When a step of a background loop last succeeded, in seconds since the Unix epoch.",
            labels=["loop"],
        )
        failed = GaugeMetricFamily(
            "flowkit_loop_last_error_timestamp_seconds",
            "When a step of a background loop last failed, in seconds since the Unix epoch.",
            labels=["loop"],
        )
        for loop in _worst_of_each_name(loops):
            name = clean_label(loop["name"])
            running.add_metric([name], loop["running"])
            if loop["last_ok_at"] is not None:
                succeeded.add_metric([name], loop["last_ok_at"])
            if loop["last_error_at"] is not None:
                failed.add_metric([name], loop["last_error_at"])
        yield running
        yield succeeded
        yield failed


def _worst_of_each_name(loops: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Return one loop of each name, because a series may appear once only: the one that is in the worst state."""
    return {loop["name"]: loop for loop in sorted(loops, key=_is_well, reverse=True)}.values()


def _is_well(loop: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a loop runs, and whether its last step has not failed."""
    error_at = loop["last_error_at"]
    return loop["running"], error_at is None or (loop["last_ok_at"] or 0.0) >= error_at
