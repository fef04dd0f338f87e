"""Take the screenshots of FlowKit's page: of a task that runs, streams, and waits for decisions."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from motor.motor_asyncio import AsyncIOMotorClient
from playwright.async_api import expect
from temporalio.client import ScheduleBackfill, ScheduleOverlapPolicy

from flowkit import Coordinator, CoordinatorConfig, WorkerConfig
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskCatalog, TaskClient
from flowkit.connection import connect
from flowkit.page.process import PageProcess, PageSettings
from flowkit.reading.state import Servers
from flowkit.worker import Batch, BatchResult, RoleHandler, Worker
from screenshots.browser import open_page
from screenshots.states import DATABASE, TIMEOUT_SEC, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from temporalio.client import Client

    from flowkit.schedules import ScheduleOptions, Schedules
    from flowkit.worker.handlers.base import RunContext

TASK = "daily-orders-2026-11-30"
QUEUE = "orders"
ENRICHED = 14
"""Number of batches after which the pictures are taken."""
_SIZE = (1400, 760)
_CLIP: Any = {"x": 0, "y": 0, "width": _SIZE[0], "height": 400}
_NIGHTS = 120
"""Number of past tasks of schedules that have finished when the picture is taken."""
_SCHEDULES: list[tuple[str, ScheduleOptions, timedelta]] = [
    (
        "daily-orders",
        {"cron": "0 2 * * *", "timezone": "Europe/Berlin", "overlap": "allow"},
        timedelta(days=60),
    ),
    ("exchange-rates", {"every": "1h", "overlap": "allow"}, timedelta(hours=60)),
    ("monthly-report", {"cron": "@monthly", "overlap": "allow"}, timedelta(days=700)),
]


class _Work(RoleHandler):
    """Stores some batches at a given pace."""

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return the input of the node."""
        return input_inline or {}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the batches."""
        for number in range(loaded.get("batches", 1)):
            yield Batch(batch_uid=f"{self.role}-{number}", payload=loaded)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Store the batch after a while, or fail."""
        given = ctx.input_inline or {}
        await ctx.cancellable(asyncio.sleep(given.get("sec", 0.2)))
        if given.get("fails"):
            ctx.log.warning("GET https://rates.example/daily: 503, tried three times")
            error = "the service returned 503 Service Unavailable"
            return BatchResult(success=False, reason_code="rates_unavailable", permanent=True, error=error)
        ctx.log.info("rows read", rows=120)
        return BatchResult(success=True, metrics={"rows": 120})


_HANDLERS = {
    role: type(role.title(), (_Work,), {"role": role})() for role in ("extract", "enrich", "group", "report")
}


def _node(node_id: str, role: str, *parents: str, **given: Any) -> dict[str, Any]:
    return {"node_id": node_id, "type": role, "depends_on": [*parents], "io": {"input_inline": given}}


def _graph() -> dict[str, Any]:
    pulled = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["extract_orders"]}}
    enrich = _node("enrich_orders", "enrich", "extract_orders", sec=1, **pulled)
    enrich["io"]["start_when"] = "first_batch"
    check = {**_node("check_totals", "group", "extract_customers"), "routing": {"on_failure": ["repair"]}}
    nodes = [
        _node("extract_orders", "extract", batches=36, sec=0.5),
        _node("extract_customers", "extract", batches=6),
        _node("exchange_rates", "enrich", fails=True),
        enrich,
        _node("join_customers", "group", "enrich_orders", "extract_customers"),
        _node("convert", "enrich", "extract_customers", "exchange_rates"),
        check,
        _node("repair", "group"),
        _node("warn_accounting", "report"),
        {"node_id": "release", "type": "approval", "depends_on": ["check_totals"]},
        _node("report", "report", "join_customers", "convert", "release"),
    ]
    warning = {"from": "check_totals", "to": "warn_accounting", "when": "has(vars.broken)"}
    return {"name": "daily-orders", "on_node_failure": "hold", "edges_ex": [warning], "nodes": nodes}


@asynccontextmanager
async def _running(mongo_url: str, web_ui: str) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """Run the task until enough is enriched; yields the address of the page, and what ends the task."""
    mongo: Any = AsyncIOMotorClient(mongo_url, tz_aware=True)
    db, client = mongo[DATABASE], await connect()
    engine = Coordinator(db=db, cfg=CoordinatorConfig(queue=QUEUE), client=client)
    cfg = WorkerConfig(roles=[*_HANDLERS], queue=QUEUE, max_concurrent=8, worker_id="orders-worker-1")
    worker = Worker(db=db, cfg=cfg, handlers=_HANDLERS, client=client)
    settings = PageSettings(addresses=[("127.0.0.1", 0)], web_ui=web_ui)
    catalog, tasks = TaskCatalog(db), TaskClient(client, TaskStore(db), queue=QUEUE)
    page = PageProcess(Servers(temporal=client, tasks=tasks, catalog=catalog, db=db), settings)
    try:
        for each in (engine, worker, page):
            await each.start()
        await _start_nights(client, await engine.schedules())
        await engine.create_task(params={"day": "2026-11-30"}, graph=_graph(), task_id=TASK)

        async def is_enriched() -> bool:
            return (await catalog.batches(TASK)).get("enrich_orders", 0) >= ENRICHED

        async def end() -> None:
            for node_id in ("release", "exchange_rates"):
                await tasks.steering.act(TASK, "complete_node", {"node_id": node_id, "by": "ada"})
            await engine.wait(TASK, timeout=TIMEOUT_SEC)

        await wait_until(is_enriched)
        yield f"http://127.0.0.1:{page.ports[0]}/", end
    finally:
        for each in (page, worker, engine):
            await each.stop()
        mongo.close()


async def _start_nights(client: Client, schedules: Schedules) -> None:
    """Create schedules, and start the tasks of past times, of which some fail."""
    fails = {"$cel": "task.scheduled_at.contains('-13T') || task.scheduled_at.contains('-17T08')"}
    graph = {"nodes": [_node("report", "report", sec=0.1, fails=fails)]}
    for name, options, past in _SCHEDULES:
        await schedules.create(name, graph=graph, **options)
        end = datetime.now(UTC)
        backfill = ScheduleBackfill(end - past, end, overlap=ScheduleOverlapPolicy.ALLOW_ALL)
        await client.get_schedule_handle(name).backfill(backfill)
    await schedules.pause(_SCHEDULES[-1][0], note="the year is closed")


async def page_pictures(mongo_url: str, web_ui: str, folder: Path) -> None:
    """Save the pictures of docs/ui.md to `folder`."""
    async with _running(mongo_url, web_ui) as (address, end), open_page() as page:
        await page.set_viewport_size({"width": _SIZE[0], "height": _SIZE[1]})

        async def take(name: str, part: str, **query: str) -> None:
            await page.goto(f"{address}?{urlencode({'task': TASK, **query})}")
            await expect(page.locator(part).first).to_be_visible()
            await expect(page.locator("aside .attempts")).to_be_visible()
            await expect(page.locator("aside .actions button").first).to_be_visible()
            await expect(page.locator(".actions button").first).to_be_visible()
            await page.screenshot(path=folder / f"ui-{name}.png", animations="disabled")

        await page.goto(f"{address}?view=schedules")
        await expect(page.locator(".squares .finished").nth(_NIGHTS)).to_be_visible()
        await expect(page.locator(".squares .started, .squares .running")).to_have_count(0)
        await page.locator("a.square.failed").first.focus()
        await page.screenshot(path=folder / "ui-schedules.png", animations="disabled", clip=_CLIP)
        await take("graph", "g.node.selected .state", node="enrich_orders")
        await page.locator("aside .lines").evaluate("lines => lines.scrollIntoView({ block: 'end' })")
        await page.locator("aside").screenshot(path=folder / "ui-log.png", animations="disabled")
        await take("timeline", ".timeline-row", node="exchange_rates", view="timeline")
        await end()
        await take("path", "g.node.on-path .share", node="enrich_orders", path="1")
        await take("explain", ".parts-bar", node="enrich_orders", view="explain")
