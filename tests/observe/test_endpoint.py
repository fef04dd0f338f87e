"""`/metrics` on the health port of a process."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowkit import products
from flowkit.attempt.background import Health, LoopHealth
from flowkit.cli.health import health_endpoint, health_values, measure
from flowkit.cli.options import HealthOptions
from flowkit.core import instruments
from flowkit.core.version import __version__
from flowkit.local.ports import free_port
from flowkit.observe import start_metrics
from flowkit.observe.process import MeasuredProcess
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.test_health_endpoint import GOOD, respond

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """Let nothing measure the process after a test."""
    yield
    instruments.listen(None)


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """Return the samples of a text, by name and values of labels."""
    families = text_string_to_metric_families(text.decode())
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def serve(reports: HealthOptions) -> tuple[int, bytes]:
    """Return the response of `/metrics` of a process with these options."""
    metrics = measure(reports, "engine", "shop")
    instruments.TASKS_OPENED.add()
    render = (lambda: metrics.render(health_values(GOOD))) if metrics else None
    with health_endpoint(reports, lambda: GOOD, render):
        assert reports.port is not None
        return respond(reports.port, path="/metrics?name=x")


def test_metrics_have_the_process_its_health_and_its_instruments() -> None:
    status, text = serve(HealthOptions(port=free_port()))
    found = samples(text)
    assert status == 200
    assert found["flowkit_info", "engine", "shop", __version__] == 1
    assert found[("flowkit_healthy",)] == found["flowkit_loop_running", "a loop"] == 1
    assert found[("flowkit_tasks_opened_total",)] == 1
    assert found[("process_cpu_seconds_total",)] > 0


def test_loops_of_one_name_are_one_series_with_the_worst_of_them() -> None:
    well = LoopHealth(name="a loop", running=True, last_ok_at=30.0)
    failing = LoopHealth(name="a loop", running=True, last_ok_at=10.0, last_error_at=20.0)
    ended = LoopHealth(name="ended", running=False)
    idle = LoopHealth(name="ended", running=True)
    health = Health(running=True, loops=(well, failing, well, ended, idle))
    text = MeasuredProcess.start("engine", "shop").render(health_values(health))
    loops = [line for line in text.decode().splitlines() if line.startswith("flowkit_loop_")]
    assert sorted(loops) == [
        'flowkit_loop_last_error_timestamp_seconds{loop="a loop"} 20.0',
        'flowkit_loop_last_success_timestamp_seconds{loop="a loop"} 10.0',
        'flowkit_loop_running{loop="a loop"} 1.0',
        'flowkit_loop_running{loop="ended"} 0.0',
    ]


class Gate:
    """A lock that is entered when a number of threads has come to it."""

    def __init__(self, threads: int) -> None:
        self._all = threading.Barrier(threads)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._all.wait(EVENT_TIMEOUT_SEC)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_readers_that_come_together_share_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    process, rendered = MeasuredProcess.start("engine", "shop"), []

    def render(_: object) -> bytes:
        rendered.append(1)
        return b""

    monkeypatch.setattr("flowkit.observe.process.generate_latest", render)
    monkeypatch.setattr(process, "_rendering", Gate(20))
    with ThreadPoolExecutor(20) as threads:
        texts = [threads.submit(process.render) for _ in range(20)]
    assert [each.result() for each in texts] == [b""] * 20
    assert len(rendered) == 2


def test_metrics_of_the_sdk_are_in_the_same_text() -> None:
    process = MeasuredProcess.start("engine", "shop")
    runtime = process.create_runtime()
    runtime.metric_meter.create_counter("things").add(2)
    assert samples(process.render())[("things_total",)] == 2
    del runtime


def test_the_metrics_of_the_sdk_can_be_left_out() -> None:
    process = MeasuredProcess.start("engine", "shop", sdk=False)
    process.create_runtime().metric_meter.create_counter("things").add(2)
    assert b"things" not in process.render()


def test_a_process_without_the_product_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "installed", tuple)
    status, text = serve(HealthOptions(port=free_port()))
    assert (status, b"pip install 'flowkit-temporal[observe]'\n" in text) == (404, True)
    assert not instruments.is_measured()


def test_a_process_without_metrics_measures_nothing_and_says_so() -> None:
    status, text = serve(HealthOptions(port=free_port(), metrics=False))
    assert (status, b"switched off" in text) == (404, True)
    assert not instruments.is_measured()


def test_a_process_without_a_health_port_measures_nothing() -> None:
    assert measure(HealthOptions(), "engine", "shop") is None
    assert not instruments.is_measured()


def test_a_process_that_forks_has_its_own_silence() -> None:
    start_metrics("engine", "shop")
    context: Any = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert pool.apply(instruments.is_measured) is False
    assert instruments.is_measured()


def test_slow_readers_of_metrics_delay_no_other_request() -> None:
    reports = HealthOptions(port=free_port())
    with health_endpoint(reports, lambda: GOOD, lambda: b"x" * 20_000_000):
        assert reports.port is not None
        with socket.create_connection((reports.host, reports.port)) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert slow.recv(4) == b"HTTP"
            assert respond(reports.port)[0] == 200
