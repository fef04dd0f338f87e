"""What a queue reports to Prometheus: the documented names, with values that agree with what has happened."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from flowkit.admission.metrics import PATH, metrics_route
from flowkit.admission.models import Door, Kind, Limits, Report, Request, State
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.errors import StoreUnavailable
from flowkit.models.admission import Priority
from flowkit.server.token_store import TokenStore
from flowkit.testing import memory_database
from tests.docs.pages import DOCS
from tests.server.servers import Gate, serving, url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from flowkit.server.serving import HttpServer

Samples = dict[tuple[str, str], float]
"""Values by the name of the sample and the value of its label."""


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[tuple[AdmissionQueue, HttpServer]]:
    """Serve the metrics of a queue in memory."""
    db = memory_database()
    store = AdmissionStore(db, queue="q")
    await store.prepare()
    await store.set_limits(replace(Limits(), **limits))
    await store.send_events()
    queue = AdmissionQueue(store)
    async with serving(TokenStore(db), Gate(), routed=[metrics_route(queue)]) as server:
        yield queue, server


async def read(server: HttpServer) -> Samples:
    """Return all samples. Buckets and times of creation are left out."""
    async with aiohttp.ClientSession() as client, client.get(url(server, PATH)) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


async def submit(queue: AdmissionQueue, number: int, priority: Priority = Priority.NORMAL) -> None:
    """Submit an execution."""
    kind, body = Kind.EXECUTION, {"script": ""}
    request = Request(
        execution_id=f"e{number}", user_id="u", door=Door.PYTHON, kind=kind, body=body, priority=priority
    )
    await queue.submit(request)


async def test_samples_agree_with_what_has_happened() -> None:
    async with served(max_pending=3, max_active=1) as (queue, server):
        for number, priority in enumerate((Priority.LOW, Priority.HIGH, Priority.LOW, Priority.LOW)):
            await submit(queue, number, priority)
        await submit(queue, 0)
        [first] = await queue.dispatch()
        await queue.report(first["_id"], Report(state=State.COMPLETED))
        for _ in range(3):
            await queue.dispatch()
        found = await read(server)
        again = await read(server)
    expected = {
        ("coordinator_executions_active", ""): 1,
        ("queue_active", ""): 1,
        ("execution_queue_depth", ""): 1,
        ("queue_depth", "low"): 1,
        ("queue_depth", "high"): 0,
        ("coordinator_executions_scheduled_total", "queued"): 3,
        ("coordinator_executions_scheduled_total", "scheduled"): 2,
        ("coordinator_executions_scheduled_total", "queue_full"): 1,
        ("coordinator_executions_scheduled_total", "error"): 0,
        ("queue_enqueue_total", ""): 3,
        ("queue_schedule_total", ""): 2,
        ("queue_event_data_lost_total", ""): 0,
        ("admission_rejections_total", "queue_full"): 1,
        ("admission_duplicates_total", ""): 1,
        ("admission_ended_total", "completed"): 1,
        ("admission_pending_limit", ""): 3,
        ("admission_active_limit", ""): 1,
        ("admission_unsent_events", ""): 4,
        ("coordinator_scheduling_duration_seconds_count", ""): 2,
        ("queue_wait_time_seconds_count", "high"): 1,
        ("queue_wait_time_seconds_count", "low"): 1,
        ("coordinator_queue_wait_time_seconds_count", "low"): 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["queue_wait_time_seconds_sum", "high"] < found["queue_wait_time_seconds_sum", "low"]
    assert found["admission_oldest_age_seconds", ""] > 0
    assert {name: again[name] for name in expected} == expected, "a histogram keeps what it has seen"


async def test_requests_that_cannot_start_and_invalid_messages_are_counted() -> None:
    async with served() as (queue, server):
        await submit(queue, 1)
        [item] = await queue.dispatch()
        await queue.refuse(item, "its graph is invalid")
        queue.counts["dead_letter", "not_json"] += 2
        queue.counts["ignored", "ended"] += 3
        await queue.dispatch()
        found = await read(server)
    assert found["coordinator_executions_scheduled_total", "error"] == 1
    assert found["admission_ended_total", "failed"] == 1
    assert found["admission_dead_letters_total", "not_json"] == 2
    assert found["admission_ignored_records_total", "ended"] == 3
    assert ("admission_dead_letters_total", "ended") not in found


async def test_without_mongodb_the_response_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(**_: object) -> None:
        raise StoreUnavailable("away")

    async with served() as (queue, server), aiohttp.ClientSession() as client:
        monkeypatch.setattr(queue, "status", away)
        async with client.get(url(server, PATH)) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "mongo_unavailable")


async def test_the_page_describes_every_metric_and_no_other() -> None:
    page = (DOCS / "admission.md").read_text(encoding="utf-8").split("\n## Metrics\n", 1)[1]
    described = set(re.findall(r"^\| `(\w+)` \|", page.split("\n## ", 1)[0], re.MULTILINE))
    async with served() as (queue, server):
        queue.counts["dead_letter", "not_json"] += 1
        queue.counts["ignored", "ended"] += 1
        await submit(queue, 1)
        await queue.dispatch()
        names = {name for name, _ in await read(server)}
    assert {re.sub(r"_(sum|count)$", "", name) for name in names} == described
