"""What a process serves at `/metrics`: promtool accepts it, and it has the names that panels and alerts use."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowkit.attempt.background import Health, LoopHealth
from flowkit.core.instruments import ALL, Counter, Gauge, listen
from flowkit.observe import start_metrics
from tests.observability.metric_names import KNOWN, OF_PROCESSES, ROOT
from tests.observability.programs import program

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILED_ONCE = LoopHealth(name="the sweep", running=True, last_ok_at=20.0, last_error_at=10.0, last_error="x")


@pytest.fixture(scope="module")
def text() -> Iterator[bytes]:
    """What a process serves that has measured each value once."""
    process = start_metrics("engine", "shop")
    for each in ALL:
        if isinstance(each, Counter):
            each.add(*each.labels)
        elif isinstance(each, Gauge):
            each.set({each.labels: 1.0})
        else:
            each.observe(1.0, *each.labels)
    health = Health(running=True, loops=(FAILED_ONCE,))
    yield process.render({"ok": health.ok, **asdict(health)})
    listen(None)


def test_promtool_accepts_the_text(text: bytes) -> None:
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_text_has_the_metrics_and_labels_that_panels_may_use(text: bytes) -> None:
    served = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    own = {name: labels for name, labels in served.items() if name.startswith("flowkit_")}
    assert own == {name: labels for name, labels in KNOWN.items() if name.startswith("flowkit_")}
    assert {name for name in OF_PROCESSES if name.startswith("process_")} <= served.keys()


def test_panels_use_only_metrics_of_the_sdk_that_the_page_lists() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    used = {name.removesuffix("_bucket") for name in OF_PROCESSES if name.startswith("temporal_")}
    assert {name for name in used if f"`{name}`" not in page} == set()
